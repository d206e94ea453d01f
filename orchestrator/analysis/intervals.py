"""Intervals for spreads and for means over pairs of models.

What cannot be estimated is NaN together with the reason, never an exception or a warning: one model has no spread, two
models have a spread but nothing to judge it by, and where values repeat so that leaving one out changes nothing, as
accuracies on a small test set do, an interval without width would claim a certainty that is not there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from orchestrator.analysis.jackknife import Jackknife, deviation, pair_average, same
from orchestrator.analysis.measures import pair_mean, pair_values, standard_deviation

Floats = NDArray[np.float64]

LEVEL = 0.95
NONE = "no replicate yet"
ONE = "one replicate shows no spread"
UNMOVED = "leaving out any one replicate changes nothing, so there is no error to estimate"
FEW_PAIRS = "an interval over pairs needs at least 3 replicates"
NOT_POSITIVE = "it is not above 0 with every set of models, so there is no ratio to judge"
UNKNOWN = "leaving out one of the replicates leaves too few, or a value that is not finite"
FEW = "an interval of an SD needs at least 4 replicates"

RESAMPLES = 10_000
"""Bootstrap resamples of Summers & Dinneen (ICML 2021)."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its confidence interval."""

    value: float
    low: float = math.nan
    high: float = math.nan
    reason: str = ""
    """Why the value or its interval is NaN; empty where both are known."""

    def __mul__(self, factor: float) -> Estimate:
        """The same estimate in another unit (``factor`` above 0)."""
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor, reason=self.reason)


def mean(values: Floats, level: float = LEVEL, bounds: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
    """The mean of (models,) values, which lie within ``bounds``, with Student's t interval, cut off there."""
    n = len(values)
    if n == 0:
        return Estimate(value=math.nan, reason=NONE)
    value = float(values[0] + np.mean(values - values[0]))
    if n == 1:
        return Estimate(value=value, reason=ONE)
    spread = standard_deviation(values)
    if spread == 0:
        return Estimate(value=value, reason=f"all {n} values are equal")
    half = _quantile(level, n - 1) * spread / math.sqrt(n)
    return Estimate(value=value, low=max(value - half, bounds[0]), high=min(value + half, bounds[1]))


def spread(values: Floats, level: float = LEVEL) -> Estimate:
    """The standard deviation (ddof=1) of (models,) values with a jackknife interval on its logarithm.

    ``log s`` is computed without each value in turn; the variance of those n numbers, times (n - 1)^2 / n, is the
    squared standard error of ``log s``, and the interval is ``s exp(-/+ t se)`` with Student's t at n - 1 degrees of
    freedom. Unlike chi-square it does not rely on normal data, and unlike the bootstrap it holds at n = 5.
    """
    n = len(values)
    if n < 2:
        return Estimate(value=math.nan, reason=ONE if n else NONE)
    value = standard_deviation(values)
    if value == 0:
        return Estimate(value=0.0, reason=f"all {n} values are equal")
    if n < 4:  # at 3 it would cover, but its ends typically lie a factor of 1,000 apart
        return Estimate(value=value, reason=FEW)
    jackknife = deviation(values)
    (without,) = jackknife.without
    if np.min(without) <= 1e-6 * value:
        return Estimate(value=value, reason=f"all but one of the {n} values are equal")
    if np.ptp(without) <= 1e-12 * value:
        return Estimate(value=value, reason=UNMOVED)
    return positive(jackknife, level)


def pairwise_mean(
    matrix: Floats, level: float = LEVEL, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Estimate:
    """The mean over all pairs of a symmetric (models, models) matrix with a jackknife interval over models.

    Pairs that share a model are dependent, so a standard error over pairs is far too small (at 100 models it covers
    17 % instead of 95 %). Here each model is left out in turn with all its pairs, which needs the matrix alone.

    Args:
        matrix: (models, models), from :mod:`orchestrator.analysis.measures`.
        level: the nominal coverage.
        bounds: the least and greatest values that the measure can take; the interval is cut off there.
    """
    n = len(matrix)
    value = pair_mean(matrix)
    if n < 2:
        return Estimate(value=value, reason=ONE if n else NONE)
    if math.isnan(value):
        return Estimate(value=value, reason="some pair has no value")
    if n < 3:
        return Estimate(value=value, reason=FEW_PAIRS)
    pairs = pair_values(matrix)
    if np.all(pairs == pairs[0]):
        return Estimate(value=float(pairs[0]), reason=f"all {len(pairs)} pairs have the same value")
    jackknife = pair_average(matrix)
    if np.ptp(jackknife.without) <= 1e-12 * np.ptp(pairs):
        return Estimate(value=value, reason=UNMOVED)
    return interval(jackknife, level, bounds)


def interval(
    jackknife: Jackknife, level: float = LEVEL, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Estimate:
    """A number with Student's t interval from its jackknife, cut off at ``bounds``."""
    if not jackknife.known:
        return Estimate(value=jackknife.value, reason=UNKNOWN)
    if jackknife.error == 0:
        return Estimate(value=jackknife.value, reason=UNMOVED)
    half = _quantile(level, jackknife.freedom) * jackknife.error
    low, high = jackknife.value - half, jackknife.value + half
    return Estimate(value=jackknife.value, low=max(low, bounds[0]), high=min(high, bounds[1]))


def positive(jackknife: Jackknife, level: float = LEVEL) -> Estimate:
    """A number above 0, such as an SD or a ratio of two, with an interval that is symmetric on its logarithm."""
    if not jackknife.known:
        return Estimate(value=jackknife.value, reason=UNKNOWN)
    if not (jackknife.value > 0 and all((part > 0).all() for part in jackknife.without)):
        return Estimate(value=jackknife.value, reason=NOT_POSITIVE)
    logarithm = interval(same(np.log, jackknife), level)
    return Estimate(
        value=jackknife.value, low=math.exp(logarithm.low), high=math.exp(logarithm.high), reason=logarithm.reason
    )


def bootstrap_error(values: Floats, rng: np.random.Generator, resamples: int = RESAMPLES) -> float:
    """The papers' "+-": the SD over bootstrap resamples of the standard deviation (ddof=0) of (models,) values.

    Shown for comparison only: at n = 5 it is .059 where .076 would be right, and no interval follows from it. NaN
    without values.
    """
    n = len(values)
    if n == 0:
        return math.nan
    drawn = values[rng.integers(0, n, (resamples, n))] - values[0]
    return float(np.std(np.std(drawn, axis=1)))


def _quantile(level: float, freedom: float) -> float:
    return float(stdtrit(freedom, (1 + level) / 2))
