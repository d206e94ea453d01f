"""Whether two cells vary alike: the ratio of a measure between them, and what may be said of it.

Overlapping intervals do not show that two cells are alike, and a difference that is not significant shows nothing at
all. ``same`` is therefore a finding of its own, with a margin that is declared before looking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.analysis.intervals import LEVEL, Estimate, interval, positive
from orchestrator.analysis.jackknife import Jackknife, same, separate

SAME = "same"
DIFFERENT = "different"
CANNOT_SAY = "cannot say"

ALPHA = 1 - LEVEL
"""Chance of a wrong ``same``, and of a wrong ``different``."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measure of two cells."""

    ratio: Estimate
    """First over second."""
    difference: Estimate
    """First minus second."""
    verdict: str
    """``same``, ``different`` or ``cannot say``."""


def compare(first: Jackknife, second: Jackknife, margin: float, paired: bool = False) -> Comparison:
    """Hold a measure of one cell against that of another.

    ``same``: two one-sided tests at 5 % each reject that the ratio lies beyond 1/margin or margin, which is to say that
    its 90 % interval lies between them. ``different``: the 95 % interval of the ratio excludes 1, and it is not
    ``same``: a ratio known to lie within the margin is close enough, whether or not it is exactly 1. Otherwise, and
    where there is no interval, ``cannot say``.

    Args:
        first: a measure that is 0 where models do not differ: an SD, a disagreement, 1 - correlation, a gain.
        second: the same measure of the other cell.
        margin: above 1.
        paired: whether both are of the same models, in the same order.
    """
    ratio = relative(first, second, paired)
    narrow = positive(ratio, level=1 - 2 * ALPHA)
    wide = positive(ratio)
    if 1 / margin <= narrow.low and narrow.high <= margin:
        verdict = SAME
    elif wide.low > 1 or wide.high < 1:
        verdict = DIFFERENT
    else:
        verdict = CANNOT_SAY
    subtract = same(np.subtract, first, second) if paired else separate(np.subtract, [first], [second])
    return Comparison(ratio=wide, difference=interval(subtract), verdict=verdict)


def relative(first: Jackknife, second: Jackknife, paired: bool = False) -> Jackknife:
    """The ratio of a measure between two cells; NaN where the second's is 0."""
    return same(divided, first, second) if paired else separate(divided, [first], [second])


def divided(first: Any, second: Any) -> NDArray[np.float64]:
    """``first / second`` of numbers or arrays, NaN where that is not a finite number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.divide(first, second)
    return np.where(np.isfinite(quotient), quotient, np.nan)
