"""Smaller images, by the mean over the area that a new pixel covers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1000
"""Images at a time, so that the sums of a large set need little memory."""


def shrink(images: NDArray[Any], size: int) -> NDArray[Any]:
    """Square images of ``size`` pixels a side.

    A new pixel is the mean of the old ones under it, each weighted with the share of it that lies there: where the
    sides divide, the plain mean of a block. All sums of uint8 are exact integers, and those of float32 are added in one
    order in float64, so every machine makes the same images.

    Args:
        images: (N, height, width, channels), uint8 or float32.
        size: at most height and width.

    Returns:
        (N, size, size, channels) of the same type; uint8 rounded to the nearest, halves up.
    """
    if images.shape[1:3] == (size, size):
        return images
    return np.concatenate([_shrink(images[start : start + CHUNK], size) for start in range(0, len(images), CHUNK)])


def _shrink(images: NDArray[Any], size: int) -> NDArray[Any]:
    whole = images.dtype == np.uint8
    sums = _sums(_sums(images.astype(np.int64 if whole else np.float64), 1, size), 2, size)
    area = images.shape[1] * images.shape[2]
    means: NDArray[Any] = (2 * sums + area) // (2 * area) if whole else sums / area
    return means.astype(images.dtype)


def _sums(values: NDArray[Any], axis: int, size: int) -> NDArray[Any]:
    """Sums along an axis, each value weighted with its overlap; a new cell's weights sum to the axis' old length.

    In units of 1/size of an old cell: old cell j covers [j size, (j + 1) size), new cell i [i length, (i + 1) length).
    """
    values = np.moveaxis(values, axis, 0)
    length = len(values)
    sums = np.zeros((size, *values.shape[1:]), values.dtype)
    for old in range(length):
        for new in range(old * size // length, -(-(old + 1) * size // length)):
            overlap = min((old + 1) * size, (new + 1) * length) - max(old * size, new * length)
            sums[new] += overlap * values[old]
    return np.moveaxis(sums, 0, axis)
