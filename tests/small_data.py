"""Data sets made on the spot: photographs that need no decoding, and text."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
from numpy.typing import NDArray

from protocols.contract import Dataset, View


def viewed(images: NDArray[np.generic], view: View) -> NDArray[np.generic]:
    """Images (n, height, width, channels) shifted into zeros, then mirrored."""
    seen = np.zeros_like(images)
    _, height, width, _ = images.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row + view.row < height and 0 <= column + view.column < width:
                seen[:, row, column] = images[:, row + view.row, column + view.column]
    return seen[:, :, ::-1] if view.flip else seen


class Undecoded:
    """Images as photographs that all have the network's input size already, and are slow to come."""

    decoder = "none"
    content = "pixels"
    left_out = 0

    def __init__(self, data: Dataset) -> None:
        self._train, self._test = data.train_images, data.test_images
        self.train_sizes = np.tile(np.array(data.image_shape[:2]), (len(self._train), 1))

    def train(self, examples: NDArray[np.int64], boxes: NDArray[np.int64], threads: int) -> NDArray[np.uint8]:
        time.sleep(0.001)
        images = np.array(self._train[examples])
        mirrored = boxes[:, 4] == 1
        images[mirrored] = images[mirrored, :, ::-1]
        return images

    def test(self, start: int, stop: int, view: View, threads: int) -> NDArray[np.uint8]:
        return np.ascontiguousarray(viewed(self._test[start:stop], view))


def as_photographs(data: Dataset) -> Dataset:
    """The same images, decoded as they are needed."""
    empty = np.zeros((0, *data.image_shape), np.uint8)
    return dataclasses.replace(data, train_images=empty, test_images=empty, photographs=Undecoded(data))


def text(classes: int = 11, length: int = 7, train: int = 40, test: int = 10) -> Dataset:
    """Windows of a text in which the next token is twice this one, more often than not."""
    rng = np.random.default_rng(0)
    tokens = [1]
    for noise in rng.random((train + test) * length):
        tokens.append(2 * tokens[-1] % classes if noise < 0.8 else int(rng.integers(classes)))
    windows = np.array(tokens[:-1]).reshape(-1, length).astype(np.int32)
    following = np.array(tokens[1:]).reshape(-1, length).astype(np.int64)
    return Dataset(
        name="doubling",
        fingerprint="doubling",
        classes=classes,
        train_images=windows[:train],
        train_labels=following[:train],
        test_images=windows[train:],
        test_labels=following[train:].ravel(),
        shift=np.zeros(0),
        scale=np.zeros(0),
        train_samples=np.arange(train),
        full_train_size=train,
    )
