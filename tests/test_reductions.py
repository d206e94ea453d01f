"""The eight published reduction figures follow from the published table."""

from __future__ import annotations

import math

import pytest

from orchestrator.analysis.reductions import variability_reduction
from protocols.protocol import MEASURES

ALL = (0.26, 0.0072, 10.7, 0.871, 1.82)
"""Summers & Dinneen: ResNet-14, CIFAR-10, every source varies."""

PUBLISHED = {
    "accelerated ensembling": ((0.19, 0.0044, 6.1, 0.957, 0.63), 48),
    "flip": ((0.24, 0.0061, 8.2, 0.905, 1.20), 21),
    "crop25": ((0.23, 0.0059, 9.2, 0.893, 1.49), 16),
    "crop81": ((0.21, 0.0055, 8.8, 0.898, 1.39), 21),
    "flip-crop25": ((0.21, 0.0051, 7.2, 0.920, 0.99), 33),
    "flip-crop81": ((0.19, 0.0049, 6.9, 0.922, 0.92), 37),
    "accelerated ensembling + flip": ((0.15, 0.0039, 5.0, 0.967, 0.45), 58),
    "accelerated ensembling + flip-crop81": ((0.16, 0.0033, 4.6, 0.972, 0.38), 61),
}


def measured(values: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(MEASURES, values, strict=True))


@pytest.mark.parametrize("method", PUBLISHED)
def test_published_figures(method: str) -> None:
    values, percent = PUBLISHED[method]
    assert round(100 * variability_reduction(measured(values), measured(ALL))) == percent


def test_the_ends_of_the_scale() -> None:
    reference = measured(ALL)
    assert variability_reduction(reference, reference) == 0
    assert variability_reduction(measured((0, 0, 0, 1, 0)), reference) == 1
    assert math.isnan(variability_reduction(reference, measured((0, 0, 0, 1, 0))))
    with pytest.raises(KeyError):
        variability_reduction({"accuracy_sd": 0.2}, reference)
