"""How much hangs on the base seed: cells that share one are conditional on all that it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.analysis import intervals
from orchestrator.analysis.intervals import LEVEL, Estimate
from orchestrator.analysis.measures import standard_deviation

Floats = NDArray[np.float64]

DRAWS = 20_000
FEW_BASES = "an interval between base seeds needs at least 3 of them"
FEW_EACH = "a base seed has fewer than 2 replicates, so what lies within base seeds is not known"


@dataclass(frozen=True, kw_only=True)
class Components:
    """The variance of a value divided into what lies within base seeds and between them; as standard deviations."""

    within: Estimate
    between: Estimate
    """0 where the estimated variance is not above 0: the base seeds differ no more than replicates would make them."""


def across(values: Floats) -> tuple[Estimate, float]:
    """The mean of (base seeds,) values of one measure with Student's t interval, and their SD (ddof=1)."""
    known = values[np.isfinite(values)]
    mean = intervals.mean(known)
    if len(known) < 3:
        mean = Estimate(value=mean.value, reason=FEW_BASES)
    return mean, standard_deviation(known)


def components(samples: Sequence[Floats], rng: np.random.Generator, level: float = LEVEL) -> Components:
    """Divide the variance of a value over replicates of several base seeds: random effects, one way.

    Within: the mean square within base seeds, with its chi-square interval. Between: the variance of the base seeds'
    means less what the replicates put into it, with a generalized confidence interval (Weerahandi 1995): both mean
    squares are drawn from what the data leave open, and the difference's quantiles are taken. Both suppose normal
    effects. Base seeds of unequal size enter by the harmonic mean of their sizes (Thomas & Hultquist 1978).

    Args:
        samples: for each base seed (replicates,) values.
        rng: for the draws.
        level: the nominal coverage.
    """
    samples = [sample for sample in samples if len(sample)]
    if len(samples) < 2 or min(map(len, samples)) < 2:
        nothing = Estimate(value=math.nan, reason=FEW_BASES if len(samples) < 2 else FEW_EACH)
        return Components(within=nothing, between=nothing)
    size = len(samples) / sum(1 / len(sample) for sample in samples)
    freedom, bases = sum(len(sample) - 1 for sample in samples), len(samples)
    within = sum(float(np.sum((sample - sample.mean()) ** 2)) for sample in samples) / freedom
    means = standard_deviation(np.array([sample.mean() for sample in samples])) ** 2
    value = math.sqrt(max(means - within / size, 0.0))
    ends = ((1 - level) / 2, (1 + level) / 2)
    own = within * freedom / rng.chisquare(freedom, DRAWS)
    low, high = np.sqrt(np.quantile(own, ends))
    inside = Estimate(value=math.sqrt(within), low=float(low), high=float(high))
    if bases < 3:
        return Components(within=inside, between=Estimate(value=value, reason=FEW_BASES))
    drawn = means * (bases - 1) / rng.chisquare(bases - 1, DRAWS) - own / size
    low, high = np.sqrt(np.quantile(drawn, ends).clip(min=0))
    return Components(within=inside, between=Estimate(value=value, low=float(low), high=float(high)))
