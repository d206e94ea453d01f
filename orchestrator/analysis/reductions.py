"""How much a mitigation reduces variability: one figure from the five measures (Summers & Dinneen, ICML 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.analysis.comparisons import Comparison, compare, divided, relative
from orchestrator.analysis.intervals import Estimate, interval, positive
from orchestrator.analysis.jackknife import Floats, Integers, Jackknife, deviation, pair_average, same, separate
from protocols.protocol import MEASURES

PAIRS = ("disagreement", "correlation", "ensemble_gain")
"""Those of the five that are means over pairs."""

NOTHING = "the base's is not above 0, so there is nothing to reduce"


def variability_reduction(measures: Mapping[str, float], reference: Mapping[str, float]) -> float:
    """The mean over the five measures of their relative reduction, ``1 - measure / reference``.

    Correlation enters as ``1 - rho``, so that for it too 0 means that the models do not differ.

    Args:
        measures: ``accuracy_sd, cross_entropy_sd, disagreement, correlation, ensemble_gain`` with the mitigation, each
            in the unit it has in ``reference``.
        reference: the same without it.

    Returns:
        1 where nothing varies any more, 0 where nothing changed; NaN where a measure of the reference is 0.

    Raises:
        KeyError: one of the five measures is missing.
    """
    after = [_distance(name, measures[name]) for name in MEASURES]
    before = [_distance(name, reference[name]) for name in MEASURES]
    return float(1 - _mean_ratio(*after, *before))


def distance(name: str, data: Floats, blocks: Integers | None = None) -> Jackknife:
    """One of the five measures of a cell, as a number that is 0 where its models do not differ.

    Args:
        name: of ``MEASURES``.
        data: (models,) values for an SD, for one of ``PAIRS`` the (models, models) matrix.
        blocks: (models,) numbers from 0; models of one block are left out together. None: each by itself.
    """
    return pair_average(_distance(name, data), blocks) if name in PAIRS else deviation(data, blocks)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """What a mitigation does to the five measures, as shares: .4 is a reduction by 40 %."""

    measures: Mapping[str, Estimate]
    comparisons: Mapping[str, Comparison]
    """After against before."""
    mean: Estimate
    """:func:`variability_reduction`."""


def reduction(
    before: Mapping[str, Jackknife], after: Mapping[str, Jackknife], margin: float, paired: bool
) -> Reduction:
    """Hold a cell with a mitigation against the cell without.

    Intervals leave one model out at a time and are symmetric on the logarithm of what is left of the variability,
    except where a gain is not above 0, so that it has none. Of a base that is not above 0 itself, as the ensemble gain
    of few models may be, nothing can be reduced, and a share of it would have the wrong sign. Where the very same
    trained models were evaluated twice,
    each is left out of both at once: what makes a model an outlier in both then cancels.

    Args:
        before: :func:`distance` for all of ``MEASURES`` without the mitigation.
        after: the same with it.
        margin: of the verdicts, see :func:`orchestrator.analysis.comparisons.compare`.
        paired: whether both are of the same models, in the same order.
    """
    comparisons = {name: compare(after[name], before[name], margin, paired) for name in MEASURES}
    empty = [name for name in MEASURES if before[name].value <= 0]
    nothing = Estimate(value=math.nan, reason=NOTHING)
    first, second = [after[name] for name in MEASURES], [before[name] for name in MEASURES]
    mean = same(_mean_ratio, *first, *second) if paired else separate(_mean_ratio, first, second)
    return Reduction(
        measures={
            name: nothing if name in empty else _reduced(relative(after[name], before[name], paired))
            for name in MEASURES
        },
        comparisons=comparisons,
        mean=nothing if empty else _reduced(mean),
    )


def _reduced(ratio: Jackknife) -> Estimate:
    """1 - ratio."""
    left = positive(ratio) if ratio.value > 0 and all((part > 0).all() for part in ratio.without) else interval(ratio)
    return Estimate(value=1 - left.value, low=1 - left.high, high=1 - left.low, reason=left.reason)


def _mean_ratio(*values: Any) -> Any:
    """The mean over the measures of after / before, given all after and then all before."""
    half = len(values) // 2
    return sum(map(divided, values[:half], values[half:])) / half


def _distance(name: str, value: Any) -> Any:
    """A measure as a number that is 0 where the models do not differ; for arrays too."""
    return 1 - value if name == "correlation" else value
