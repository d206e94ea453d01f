"""Photographs decoded batch by batch while training, side by side in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.contract import View
from trainers.datasets.pack import Pack, Part, pillow, rgb


class PackedPhotographs:
    """The images of a pack, as :class:`protocols.contract.Photographs`.

    Each image is a function of its own arguments and has its place in the batch before any thread starts, so the number
    of threads changes nothing.
    """

    def __init__(self, pack: Pack, size: int, resize: int) -> None:
        """
        Args:
            pack: the images.
            size: height and width of the network's input.
            resize: what a test image's shorter side becomes before it is cropped.
        """
        self.pack = pack
        self.train_sizes = np.stack([pack.train.column("height"), pack.train.column("width")], axis=1)
        self._size, self._resize = size, resize
        self._pools: dict[int, ThreadPoolExecutor] = {}

    @property
    def decoder(self) -> str:
        """What decodes the images; another version may give other pixels."""
        from PIL import __version__, features

        turbo = features.version("libjpeg_turbo")
        return f"Pillow {__version__}, " + (f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version('jpg')}")

    @property
    def content(self) -> str:
        """The pack's manifest."""
        return self.pack.manifest

    @property
    def left_out(self) -> int:
        """How many images cannot be decoded."""
        return len(self.pack.skipped)

    def train(self, examples: NDArray[np.int64], boxes: NDArray[np.int64], threads: int) -> NDArray[np.uint8]:
        """Parts of training images, cut out and then resized (bilinear, with antialiasing), as in the contract."""

        def load(number: int) -> NDArray[np.uint8]:
            top, left, height, width, flip = map(int, boxes[number])
            image = self._image(self.pack.train, int(examples[number]))
            part = image.crop((left, top, left + width, top + height))
            return _mirrored(part.resize((self._size, self._size), pillow().Resampling.BILINEAR), bool(flip))

        return self._batch(load, range(len(examples)), threads)

    def test(self, start: int, stop: int, view: View, threads: int) -> NDArray[np.uint8]:
        """The centres of test images whose shorter side was resized; a view shifts them as far as there is image."""

        def load(index: int) -> NDArray[np.uint8]:
            image = self._image(self.pack.test, index)
            shorter = min(image.size)
            width, height = (side * self._resize // shorter for side in image.size)
            image = image.resize((width, height), pillow().Resampling.BILINEAR)
            left, top = self._corner(width, view.column), self._corner(height, view.row)
            return _mirrored(image.crop((left, top, left + self._size, top + self._size)), view.flip)

        return self._batch(load, range(start, stop), threads)

    def _corner(self, length: int, shift: int) -> int:
        room = length - self._size
        return min(max(room // 2 + shift, 0), room)

    def _image(self, part: Part, index: int) -> Any:
        return rgb(part.content(index))

    def _batch(
        self, load: Callable[[int], NDArray[np.uint8]], numbers: Iterable[int], threads: int
    ) -> NDArray[np.uint8]:
        if threads <= 1:
            return np.stack([load(number) for number in numbers])
        if threads not in self._pools:
            self._pools[threads] = ThreadPoolExecutor(threads, "decode")
        return np.stack(list(self._pools[threads].map(load, numbers)))


def _mirrored(image: Any, flip: bool) -> NDArray[np.uint8]:
    pixels = np.asarray(image)
    return pixels[:, ::-1] if flip else pixels
