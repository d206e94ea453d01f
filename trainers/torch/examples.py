"""A dataset where a network can read it, whether it lies on the device or is decoded as it is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from protocols import streams
from protocols.contract import Dataset, View
from protocols.recipe import Recipe
from trainers.ahead import ahead
from trainers.batches import EpochPlan, padded_pixels, pixel_grids

Fetch = Callable[[], tuple[Tensor, Tensor]]
"""Gives one batch: what enters the network, and the labels."""


class Examples(Protocol):
    """One dataset on one device."""

    def batches(self, plan: EpochPlan, order: Sequence[int]) -> Iterator[Fetch]:
        """These batches of a plan, to be fetched in this order."""

    def training(self, size: int) -> Iterator[Tensor]:
        """All training examples, plain and in their stored order, so many at a time."""

    def test(self, view: View, size: int) -> Iterator[Tensor]:
        """All test examples in one view, so many at a time."""

    def provenance(self) -> dict[str, Any]:
        """What the examples' bits depend on beside the dataset."""


def place(data: Dataset, recipe: Recipe, device: torch.device, threads: int) -> Examples:
    """A dataset on a device, for recipes with this crop, flip and element type."""
    if data.photographs is not None:
        return _Photographs(data, recipe, device, threads)
    return _Text(data, device) if data.is_text else _Images(data, recipe, device)


class _Pixels:
    """Normalises images."""

    def __init__(self, data: Dataset, recipe: Recipe, device: torch.device) -> None:
        dtype = getattr(torch, recipe.dtype)
        self._shift = torch.tensor(data.shift, dtype=dtype, device=device)
        self._scale = torch.tensor(data.scale, dtype=dtype, device=device)

    def __call__(self, images: Tensor) -> Tensor:
        """(pixel - shift) * scale, NHWC to NCHW without moving memory."""
        return ((images.to(self._shift.dtype) - self._shift) * self._scale).permute(0, 3, 1, 2)


class _Images:
    """Raw pixels on the device, padded for crops once; normalised after a batch has been gathered."""

    def __init__(self, data: Dataset, recipe: Recipe, device: torch.device) -> None:
        crop = recipe.crop or 0
        self._device = device
        self._normalised = _Pixels(data, recipe, device)
        self._pixels = torch.from_numpy(padded_pixels(data, crop)).to(device)
        self._labels = torch.tensor(data.train_labels, device=device)
        self._test_images = torch.tensor(np.asarray(data.test_images), device=device)
        plain, mirrored = pixel_grids(data.image_shape, crop)
        self._plain = torch.tensor(plain, device=device)
        self._mirrored = torch.tensor(np.ascontiguousarray(mirrored), device=device) if recipe.flip else None
        height, width, _ = data.image_shape
        starts = torch.arange(len(data.train_labels), device=device) * (height + 2 * crop) + crop
        self._centres = starts * (width + 2 * crop) + crop

    def batches(self, plan: EpochPlan, order: Sequence[int]) -> Iterator[Fetch]:
        examples, corners, flips = (
            torch.from_numpy(values).to(self._device) for values in (plan.examples, plan.corners, plan.flips)
        )
        labels = self._labels[examples]

        def fetch(rows: slice) -> tuple[Tensor, Tensor]:
            return self._crops(corners[rows], flips[rows]), labels[rows]

        return (functools.partial(fetch, plan.rows(batch)) for batch in order)

    def training(self, size: int) -> Iterator[Tensor]:
        for corners in self._centres.split(size):
            yield self._crops(corners, torch.zeros_like(corners))

    def test(self, view: View, size: int) -> Iterator[Tensor]:
        for images in self._test_images.split(size):
            yield self._normalised(_seen(images, view))

    def provenance(self) -> dict[str, Any]:
        return {}

    def _crops(self, corners: Tensor, flips: Tensor) -> Tensor:
        """The crops at these corners, normalised, NCHW (channels innermost in memory)."""
        grid = self._plain
        if self._mirrored is not None:
            grid = torch.where(flips[:, None, None].bool(), self._mirrored, grid)
        index = corners[:, None, None] + grid
        return self._normalised(self._pixels[index.flatten()].unflatten(0, index.shape))


class _Photographs:
    """Compressed images, decoded by threads a few batches ahead of the device."""

    def __init__(self, data: Dataset, recipe: Recipe, device: torch.device, threads: int) -> None:
        assert data.photographs is not None
        self._device = device
        self._threads = threads
        self._normalised = _Pixels(data, recipe, device)
        self._photographs = data.photographs
        self._labels = torch.tensor(data.train_labels, device=device)
        self._test_examples = data.test_examples

    def batches(self, plan: EpochPlan, order: Sequence[int]) -> Iterator[Fetch]:
        boxes = plan.boxes
        assert boxes is not None
        labels = self._labels[torch.from_numpy(plan.examples).to(self._device)]

        def decode(rows: slice) -> Tensor:
            return self._staged(self._photographs.train(plan.examples[rows], boxes[rows], self._threads))

        def fetch(rows: slice, pixels: Future[Tensor]) -> tuple[Tensor, Tensor]:
            return self._moved(pixels), labels[rows]

        wanted = [plan.rows(batch) for batch in order]
        return (functools.partial(fetch, rows, pixels) for rows, pixels in ahead(decode, wanted))

    def training(self, size: int) -> Iterator[Tensor]:
        boxes = streams.plain_crops(self._photographs.train_sizes)

        def decode(start: int) -> Tensor:
            part = boxes[start : start + size]
            return self._staged(self._photographs.train(np.arange(start, start + len(part)), part, self._threads))

        for _, pixels in ahead(decode, range(0, len(boxes), size)):
            yield self._moved(pixels)

    def test(self, view: View, size: int) -> Iterator[Tensor]:
        def decode(start: int) -> Tensor:
            stop = min(start + size, self._test_examples)
            return self._staged(self._photographs.test(start, stop, view, self._threads))

        for _, pixels in ahead(decode, range(0, self._test_examples, size)):
            yield self._moved(pixels)

    def provenance(self) -> dict[str, Any]:
        photographs = self._photographs
        return {
            "decoder": photographs.decoder,
            "photographs": photographs.content,
            "photographs_left_out": photographs.left_out,
        }

    def _staged(self, pixels: NDArray[np.uint8]) -> Tensor:
        tensor = torch.from_numpy(pixels)
        # From pinned memory the copy does not hold up the thread that trains.
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _moved(self, pixels: Future[Tensor]) -> Tensor:
        return self._normalised(pixels.result().to(self._device, non_blocking=True))


class _Text:
    """Tokens on the device."""

    def __init__(self, data: Dataset, device: torch.device) -> None:
        self._device = device
        self._tokens, self._labels, self._test_tokens = (
            torch.tensor(np.asarray(values), device=device)
            for values in (data.train_images, data.train_labels, data.test_images)
        )

    def batches(self, plan: EpochPlan, order: Sequence[int]) -> Iterator[Fetch]:
        examples = torch.from_numpy(plan.examples).to(self._device)

        def fetch(rows: slice) -> tuple[Tensor, Tensor]:
            return self._tokens[examples[rows]], self._labels[examples[rows]]

        return (functools.partial(fetch, plan.rows(batch)) for batch in order)

    def training(self, size: int) -> Iterator[Tensor]:
        return iter(self._tokens.split(size))

    def test(self, view: View, size: int) -> Iterator[Tensor]:
        return iter(self._test_tokens.split(size))

    def provenance(self) -> dict[str, Any]:
        return {}


def _seen(images: Tensor, view: View) -> Tensor:
    """Raw images (n, height, width, channels) in one view: shifted into zeros, then mirrored."""
    row, column, mirrored = view
    if row or column:
        # A negative number of zeros takes pixels away: what a crop gains on one side it loses on the other.
        images = F.pad(images, (0, 0, -column, column, -row, row))
    return images.flip(2) if mirrored else images
