"""How far the accuracy on each class moves from run to run (Zhuang et al., MLSys 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.analysis import intervals
from orchestrator.analysis.intervals import LEVEL, Estimate
from orchestrator.analysis.jackknife import Floats, deviation, same

Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class ClassSpreads:
    """Standard deviations over models of the accuracy on the examples of one class."""

    labels: Integers
    """(classes,) those that the test set has."""
    examples: Integers
    """(classes,) of the test set."""
    accuracies: list[Estimate]
    """Of each class, the mean over models."""
    spreads: list[Estimate]
    """Of each class."""
    mean: Estimate
    """Over classes."""
    largest: Estimate
    """Over classes. Its interval allows for the choice: those of all classes hold at once."""


def class_spreads(predictions: Integers, labels: Integers) -> ClassSpreads:
    """The spread of each class's accuracy.

    Args:
        predictions: (models, examples)
        labels: (examples,)
    """
    present, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    correct = predictions == labels
    values = np.stack([np.bincount(index, row, len(present)) / counts for row in correct.astype(np.float64)], axis=1)
    spreads = [intervals.spread(row) for row in values]
    return ClassSpreads(
        labels=present,
        examples=counts,
        accuracies=[intervals.mean(row, bounds=(0.0, 1.0)) for row in values],
        spreads=spreads,
        mean=_mean(values),
        largest=_largest(values, spreads),
    )


def _mean(values: Floats) -> Estimate:
    if values.shape[1] < 4:
        sds = [intervals.spread(row) for row in values]
        return Estimate(value=float(np.mean([sd.value for sd in sds])), reason=intervals.FEW)
    average = same(lambda *sds: sum(sds) / len(sds), *map(deviation, values))
    return intervals.positive(average)


def _largest(values: Floats, spreads: list[Estimate]) -> Estimate:
    worst = max(spreads, key=lambda spread: spread.value)
    strict = [intervals.spread(row, level=1 - (1 - LEVEL) / len(values)) for row in values]
    # A class in which no model differs has no interval, and no part in the largest.
    known = [spread for spread in strict if np.isfinite(spread.low)]
    if not np.isfinite(worst.low) or not known:
        return Estimate(value=worst.value, reason=worst.reason)
    return Estimate(
        value=worst.value,
        low=max(spread.low for spread in known),
        high=max(spread.high for spread in known),
    )
