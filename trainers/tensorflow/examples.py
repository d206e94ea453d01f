"""A dataset where a network can read it, whether it lies on the device or is decoded as it is needed.

A batch is described by *columns*, arrays with a row for each of its examples; what enters the network is made of them
on the device, within the traced step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from protocols import streams
from protocols.contract import Dataset, View
from protocols.recipe import Recipe
from trainers.ahead import ahead
from trainers.batches import EpochPlan, padded_pixels, pixel_grids

Columns = tuple[Any, ...]
Fetch = Callable[[], Columns]
"""Gives the columns of one batch."""


class Examples(Protocol):
    """One dataset on one device."""

    columns: tuple[Any, ...]
    """What the columns are like: a ``tf.TensorSpec`` each."""
    raw: Any
    """What the values that ``training`` and ``test`` yield are like."""

    def epoch(self, plan: EpochPlan) -> Columns | None:
        """The columns of all rows of a plan; None: they are too large to have at once."""

    def batches(self, plan: EpochPlan, order: Sequence[int]) -> Iterator[Fetch]:
        """These batches of a plan, to be fetched in this order."""

    def batch(self, *columns: Any) -> tuple[Any, Any]:
        """What enters the network, and the labels; part of a traced function."""

    def inputs(self, raw: Any) -> Any:
        """What enters the network; part of a traced function."""

    def training(self, size: int) -> Iterator[Any]:
        """All training examples, plain and in their stored order, so many at a time."""

    def test(self, view: View, size: int) -> Iterator[Any]:
        """All test examples in one view, so many at a time."""

    def provenance(self) -> dict[str, Any]:
        """What the examples' bits depend on beside the dataset."""


def place(data: Dataset, recipe: Recipe, threads: int) -> Examples:
    """A dataset on the process's device, for recipes with this crop, flip and element type."""
    if data.photographs is not None:
        return _Photographs(data, recipe, threads)
    return _Text(data) if data.is_text else _Images(data, recipe)


class _Pixels:
    """Normalises images."""

    def __init__(self, data: Dataset, recipe: Recipe) -> None:
        dtype = tf.as_dtype(recipe.dtype)
        self._shift = tf.constant(data.shift, dtype)
        self._scale = tf.constant(data.scale, dtype)

    def inputs(self, raw: Any) -> Any:
        """(pixel - shift) * scale"""
        return (tf.cast(raw, self._shift.dtype) - self._shift) * self._scale


class _Images(_Pixels):
    """Raw pixels, padded for crops once; normalised after a batch has been gathered."""

    def __init__(self, data: Dataset, recipe: Recipe) -> None:
        super().__init__(data, recipe)
        # Bytes cannot be gathered on a GPU; as floating-point numbers they are the same values.
        gpu = bool(tf.config.get_visible_devices("GPU"))
        self._dtype = tf.as_dtype(recipe.dtype if gpu else data.test_images.dtype)
        self._images = data.train_images
        self._labels = tf.constant(data.train_labels)
        self._pixels = self._constant(padded_pixels(data, recipe.crop or 0))
        self._test_images = self._constant(data.test_images)
        plain, mirrored = pixel_grids(data.image_shape, recipe.crop or 0)
        self._plain = tf.constant(plain)
        self._mirrored = tf.constant(mirrored) if recipe.flip else None
        self.columns = (tf.TensorSpec((None,), tf.int64),) * 3
        self.raw = tf.TensorSpec((None, *data.image_shape), self._dtype)

    def epoch(self, plan: EpochPlan) -> Columns:
        return plan.examples, plan.corners, plan.flips

    def batches(self, plan: EpochPlan, order: Sequence[int]) -> Iterator[Fetch]:
        return _slices(self.epoch(plan), plan, order)

    def batch(self, *columns: Any) -> tuple[Any, Any]:
        examples, corners, flips = columns
        grid = self._plain
        if self._mirrored is not None:
            grid = tf.where(flips[:, None, None] == 1, self._mirrored, grid)
        return self.inputs(tf.gather(self._pixels, corners[:, None, None] + grid)), tf.gather(self._labels, examples)

    def training(self, size: int) -> Iterator[Any]:
        for start in range(0, len(self._images), size):
            yield self._constant(self._images[start : start + size])

    def test(self, view: View, size: int) -> Iterator[Any]:
        for start in range(0, len(self._test_images), size):
            yield _seen(self._test_images[start : start + size], view)

    def provenance(self) -> dict[str, Any]:
        return {}

    def _constant(self, images: NDArray[Any]) -> Any:
        return tf.constant(np.asarray(images).astype(self._dtype.as_numpy_dtype, copy=False))


class _Text:
    """Tokens, in the one whole-number type that a GPU gathers as well."""

    def __init__(self, data: Dataset) -> None:
        self._tokens, self._labels, self._test_tokens = (
            tf.constant(np.asarray(values), tf.int64)
            for values in (data.train_images, data.train_labels, data.test_images)
        )
        self.columns = (tf.TensorSpec((None,), tf.int64),)
        self.raw = tf.TensorSpec((None, *data.image_shape), tf.int64)

    def epoch(self, plan: EpochPlan) -> Columns:
        return (plan.examples,)

    def batches(self, plan: EpochPlan, order: Sequence[int]) -> Iterator[Fetch]:
        return _slices(self.epoch(plan), plan, order)

    def batch(self, *columns: Any) -> tuple[Any, Any]:
        (examples,) = columns
        return tf.gather(self._tokens, examples), tf.gather(self._labels, examples)

    def inputs(self, raw: Any) -> Any:
        return raw

    def training(self, size: int) -> Iterator[Any]:
        return (self._tokens[start : start + size] for start in range(0, len(self._tokens), size))

    def test(self, view: View, size: int) -> Iterator[Any]:
        return (self._test_tokens[start : start + size] for start in range(0, len(self._test_tokens), size))

    def provenance(self) -> dict[str, Any]:
        return {}


class _Photographs(_Pixels):
    """Compressed images, decoded by threads a few batches ahead of the device."""

    def __init__(self, data: Dataset, recipe: Recipe, threads: int) -> None:
        super().__init__(data, recipe)
        assert data.photographs is not None
        self._photographs = data.photographs
        self._threads = threads
        self._labels = tf.constant(data.train_labels)
        self._test_examples = data.test_examples
        self.raw = tf.TensorSpec((None, *data.image_shape), tf.uint8)
        self.columns = (tf.TensorSpec((None,), tf.int64), self.raw)

    def epoch(self, plan: EpochPlan) -> None:
        return None

    def batches(self, plan: EpochPlan, order: Sequence[int]) -> Iterator[Fetch]:
        boxes = plan.boxes
        assert boxes is not None

        def decode(rows: slice) -> NDArray[np.uint8]:
            return self._photographs.train(plan.examples[rows], boxes[rows], self._threads)

        def fetch(rows: slice, pixels: Future[NDArray[np.uint8]]) -> Columns:
            return plan.examples[rows], pixels.result()

        wanted = [plan.rows(batch) for batch in order]
        return (functools.partial(fetch, rows, pixels) for rows, pixels in ahead(decode, wanted))

    def batch(self, *columns: Any) -> tuple[Any, Any]:
        examples, pixels = columns
        return self.inputs(pixels), tf.gather(self._labels, examples)

    def training(self, size: int) -> Iterator[Any]:
        boxes = streams.plain_crops(self._photographs.train_sizes)

        def decode(start: int) -> NDArray[np.uint8]:
            part = boxes[start : start + size]
            return self._photographs.train(np.arange(start, start + len(part)), part, self._threads)

        return (pixels.result() for _, pixels in ahead(decode, range(0, len(boxes), size)))

    def test(self, view: View, size: int) -> Iterator[Any]:
        def decode(start: int) -> NDArray[np.uint8]:
            return self._photographs.test(start, min(start + size, self._test_examples), view, self._threads)

        return (pixels.result() for _, pixels in ahead(decode, range(0, self._test_examples, size)))

    def provenance(self) -> dict[str, Any]:
        photographs = self._photographs
        return {
            "decoder": photographs.decoder,
            "photographs": photographs.content,
            "photographs_left_out": photographs.left_out,
        }


def _slices(columns: Columns, plan: EpochPlan, order: Sequence[int]) -> Iterator[Fetch]:
    def fetch(rows: slice) -> Columns:
        return tuple(column[rows] for column in columns)

    return (functools.partial(fetch, plan.rows(batch)) for batch in order)


def _seen(images: Any, view: View) -> Any:
    """Raw images (n, height, width, channels) in one view: shifted into zeros, then mirrored."""
    row, column, mirrored = view
    if row or column:
        _, height, width, _ = images.shape
        sides = [(max(-shift, 0), max(shift, 0)) for shift in (row, column)]
        top, left = max(row, 0), max(column, 0)
        images = tf.pad(images, ((0, 0), *sides, (0, 0)))[:, top : top + height, left : left + width]
    return tf.reverse(images, (2,)) if mirrored else images
