"""The jackknife over models: how far a number would move if one model had not been trained.

A measure of a cell, be it a spread or a mean over pairs, is a function of its models. Leaving each out in turn shows
how much hangs on it, also where pairs share models and where one measure is divided by another. What models of one cell
share, a comparison of the same models keeps (:func:`same`), and one of different models does not (:func:`separate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class Jackknife:
    """A number, and what it would be without each of the models it was computed from."""

    value: float
    without: tuple[Floats, ...]
    """For every independent set of models (models,) numbers, each without one model."""

    @property
    def known(self) -> bool:
        """Whether every number is finite."""
        return (
            math.isfinite(self.value)
            and min(map(len, self.without)) > 1
            and all(np.isfinite(part).all() for part in self.without)
        )

    @property
    def error(self) -> float:
        """The jackknife's standard error."""
        return math.sqrt(sum(_squared_error(part) for part in self.without))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of that error: models less one, or Welch & Satterthwaite's for several sets."""
        squares = [_squared_error(part) for part in self.without]
        below = sum(square**2 / (len(part) - 1) for square, part in zip(squares, self.without, strict=True))
        return sum(squares) ** 2 / below if below > 0 else math.nan


def same(function: Callable[..., Any], *numbers: Jackknife) -> Jackknife:
    """A function of several numbers of the same models, e.g. of these before and after a mitigation."""
    parts = zip(*(number.without for number in numbers), strict=True)
    return Jackknife(
        value=float(function(*(number.value for number in numbers))),
        without=tuple(np.asarray(function(*part), np.float64) for part in parts),
    )


def separate(function: Callable[..., Any], first: list[Jackknife], second: list[Jackknife]) -> Jackknife:
    """A function of numbers of two independent sets of models: ``function(*first, *second)``."""
    a, b = [number.value for number in first], [number.value for number in second]
    return Jackknife(
        value=float(function(*a, *b)),
        without=(
            *(function(*part, *b) for part in zip(*(number.without for number in first), strict=True)),
            *(function(*a, *part) for part in zip(*(number.without for number in second), strict=True)),
        ),
    )


def deviation(values: Floats, blocks: Integers | None = None) -> Jackknife:
    """The standard deviation (ddof=1).

    Args:
        values: (models,)
        blocks: (models,) numbers from 0; models of one block are left out together. None: each by itself.
    """
    centred = values - (values.mean() if len(values) else 0.0)
    members = _members(len(values), blocks)
    left = len(values) - members.sum(axis=1)
    sums, squares = -members @ centred, centred @ centred - members @ centred**2
    with np.errstate(invalid="ignore", divide="ignore"):
        variances = (squares - sums**2 / left) / (left - 1)
    return Jackknife(
        value=float(np.std(centred, ddof=1)) if len(values) > 1 else math.nan,
        without=(np.sqrt(variances.clip(min=0)),),
    )


def pair_average(matrix: Floats, blocks: Integers | None = None) -> Jackknife:
    """The mean over the distinct pairs of models.

    Args:
        matrix: (models, models), symmetric.
        blocks: as in :func:`deviation`.
    """
    n = len(matrix)
    apart = np.where(np.eye(n, dtype=bool), 0.0, matrix)
    members = _members(n, blocks)
    sums = members @ apart
    removed = sums.sum(axis=1) - (sums * members).sum(axis=1) / 2
    left = n - members.sum(axis=1)
    total = apart.sum() / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        without = (total - removed) / (left * (left - 1) / 2)
    return Jackknife(value=float(total / (n * (n - 1) / 2)) if n > 1 else math.nan, without=(without,))


def _members(models: int, blocks: Integers | None) -> Floats:
    """(blocks, models), 1 where a model belongs to a block."""
    if blocks is None:
        return np.eye(models)
    members: Floats = (np.arange(blocks.max() + 1)[:, None] == blocks).astype(np.float64)
    return members


def _squared_error(without: Floats) -> float:
    n = len(without)
    return (n - 1) / n * float(np.sum((without - without.mean()) ** 2)) if n else math.nan
