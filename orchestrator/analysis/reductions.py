"""How much a mitigation reduces variability: one figure from the five measures (Summers & Dinneen, ICML 2021)."""

from __future__ import annotations

from collections.abc import Mapping

from protocols.protocol import MEASURES


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
    total = 0.0
    for name in MEASURES:
        before, after = _distance(name, reference[name]), _distance(name, measures[name])
        if before == 0:
            return float("nan")
        total += 1 - after / before
    return total / len(MEASURES)


def _distance(name: str, value: float) -> float:
    """A measure as a number that is 0 where the models do not differ."""
    return 1 - value if name == "correlation" else value
