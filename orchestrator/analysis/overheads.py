"""What determinism costs: the time of runs that hold the library against that of runs that release it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, ndtri

from orchestrator.analysis.intervals import LEVEL, Estimate

Floats = NDArray[np.float64]

FEWEST = 5
FEW_TIMES = f"an interval of a median needs at least {FEWEST} runs of each kind"


def median_ratio(held: Floats, released: Floats, level: float = LEVEL) -> Estimate:
    """The ratio of two medians with the interval of Price & Bonett (2002).

    The error of the logarithm of a median is read off two order statistics on either side of it, so times may be
    distributed in any way; stragglers, of which training has many, hardly matter.

    Args:
        held: (runs,) seconds.
        released: (runs,) seconds.
        level: the nominal coverage.
    """
    if not len(held) or not len(released):
        return Estimate(value=math.nan, reason="no run of one of the two kinds")
    value = float(np.median(held) / np.median(released))
    if min(len(held), len(released)) < FEWEST:
        return Estimate(value=value, reason=FEW_TIMES)
    error = math.hypot(_log_median_error(held), _log_median_error(released))
    half = float(ndtri((1 + level) / 2)) * error
    return Estimate(value=value, low=value * math.exp(-half), high=value * math.exp(half))


def _log_median_error(values: Floats) -> float:
    n = len(values)
    place = max(1, round((n + 1) / 2 - math.sqrt(n)))
    outside = float(bdtr(place - 1, n, 0.5))  # below the lower of the two, and as much above the upper
    ranked = np.sort(values)
    return float(np.log(ranked[n - place] / ranked[place - 1])) / (2 * float(ndtri(1 - outside)))
