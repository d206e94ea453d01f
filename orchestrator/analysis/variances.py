"""The variance of accuracy on the test set, and what of it lies beyond this test set (Jordan, ICLR 2024, 2304.01910).

Between two runs the accuracy moves for two reasons: the networks are better or worse as such, on the distribution that
the test set was drawn from, and each example is won or lost by its own luck. The second part alone, examples won and
lost independently of each other, gives the variance

    floor = mean over examples of the variance over models of whether it is classified correctly, over the examples

and what a test set of N examples shows beyond it estimates the first: (variance - floor) N / (N - 1). That estimate is
unbiased over both models and test sets, so where networks are equally good it is as often below 0 as above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.analysis import intervals
from orchestrator.analysis.intervals import LEVEL, Estimate, interval, positive
from orchestrator.analysis.jackknife import Floats, Jackknife, same

FEWEST = 4
"""Models from which on there is an interval."""


@dataclass(frozen=True, kw_only=True)
class Variances:
    """Standard deviations of the accuracy, as shares."""

    test_set: Estimate
    """Over runs, on this very test set: what every table shows."""
    floor: Estimate
    """What it would be if examples were won and lost independently of each other."""
    distribution: Estimate
    """Over runs, on the whole distribution: 0 where the estimated variance is not above 0."""
    distribution_variance: Estimate
    """Its square before it is cut off at 0."""


def variances(correct: NDArray[np.bool_], level: float = LEVEL) -> Variances:
    """Divide the variance of the accuracy.

    The interval of the part beyond the test set lets models and examples vary: the jackknife leaves out each model in
    turn and each example in turn, and the two squared errors add up. What belongs to both is counted twice, so the
    interval is too wide rather than too narrow where there is little to find. It is symmetric on the logarithm of the
    whole variance, floor included, which is positive and skewed as variances are.

    Args:
        correct: (models, examples) whether an example is classified correctly.
        level: the nominal coverage of the interval of the SD on the test set; of the other intervals it is 95 %.
    """
    models, examples = correct.shape
    accuracies = correct.mean(axis=1, dtype=np.float64)
    if models < 2 or examples < 2:
        nothing = Estimate(value=math.nan, reason=intervals.ONE if models else intervals.NONE)
        return Variances(test_set=nothing, floor=nothing, distribution=nothing, distribution_variance=nothing)
    floor, beyond = _floor(correct), _beyond(correct, accuracies)
    if models < FEWEST:
        short = Estimate(value=beyond.value, reason=intervals.FEW)
        root = Estimate(value=math.sqrt(floor.value), reason=intervals.FEW)
    else:
        base = floor.value * examples / (examples - 1)
        whole = positive(same(lambda variance: variance + base, beyond))
        short = Estimate(value=beyond.value, low=whole.low - base, high=whole.high - base, reason=whole.reason)
        root = _root(interval(floor, bounds=(0.0, math.inf)))
    return Variances(
        test_set=intervals.spread(accuracies, level), floor=root, distribution=_root(short), distribution_variance=short
    )


def _floor(correct: NDArray[np.bool_]) -> Jackknife:
    """The variance of independent errors; leaves out models."""
    models, examples = correct.shape
    right = correct.sum(axis=0, dtype=np.int64)

    def over(counts: NDArray[np.int64], n: int) -> float:
        return float(np.sum(counts * (n - counts), dtype=np.float64)) / (n * (n - 1)) / examples**2 if n > 1 else 0.0

    without = [over(right - model, models - 1) for model in correct]
    return Jackknife(value=over(right, models), without=(np.array(without),))


def _beyond(correct: NDArray[np.bool_], accuracies: Floats) -> Jackknife:
    """The variance beyond the test set; leaves out models, and examples."""
    models, examples = correct.shape
    floor = _floor(correct)
    stretch = examples / (examples - 1)

    def apart(values: Floats) -> float:
        return float(np.var(values, ddof=1)) if len(values) > 1 else 0.0

    variance = apart(accuracies)
    by_model = [apart(np.delete(accuracies, model)) for model in range(models)]
    # The estimate is the mean covariance, over models, of two different examples; one example enters by its covariance
    # with the accuracy, less its own variance.
    centred = accuracies - accuracies.mean()
    own = correct.mean(axis=0, dtype=np.float64)
    own = own * (1 - own) * models / (models - 1)
    with_all = examples * (centred @ correct) / (models - 1) - own
    total = variance * examples**2 - own.sum()
    by_example = (total - 2 * with_all) / ((examples - 1) * (examples - 2)) if examples > 2 else np.zeros(examples)
    return Jackknife(
        value=(variance - floor.value) * stretch,
        without=((np.array(by_model) - floor.without[0]) * stretch, by_example),
    )


def _root(variance: Estimate) -> Estimate:
    """The standard deviation, 0 where the variance is not above it."""
    value, low, high = (
        math.sqrt(max(number, 0.0)) if math.isfinite(number) else number
        for number in (variance.value, variance.low, variance.high)
    )
    return Estimate(value=value, low=low, high=high, reason=variance.reason)
