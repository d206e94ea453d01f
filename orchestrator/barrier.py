"""The barrier between two trained networks: how much worse it gets on the straight line between their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.records import cross_entropy, highest

POINTS = 11
"""Points on the line, both ends included."""

Weights = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """The highest value on the line minus the mean of its ends (Frankle et al., ICML 2020)."""

    error: float
    """Of the test error, as a share of the test examples."""
    loss: float
    """Of the test cross-entropy, in nats."""


def barrier(
    evaluate: Callable[[Weights], NDArray[np.floating]], one: Weights, other: Weights, labels: NDArray[np.int64]
) -> Barrier | None:
    """The barrier between two networks.

    Args:
        evaluate: logits of the test set under given weights. It should estimate batch-norm statistics anew: between two
            networks they are the mean of neither (Jordan et al., ICLR 2023).
        one: weights and statistics of one network.
        other: of the other.
        labels: (test examples,); of text, the barrier is that of as many of them as there are logits.

    Returns:
        None where a logit on the line is not finite.
    """
    errors, losses = [], []
    for share in np.linspace(0, 1, POINTS):
        logits = evaluate({name: between(one[name], other[name], share) for name in one})
        if not np.isfinite(logits).all():
            return None
        tested = labels[: len(logits)]
        errors.append(float(np.mean(highest(logits) != tested)))
        losses.append(cross_entropy(logits, tested))
    return Barrier(error=_rise(errors), loss=_rise(losses))


def between(one: NDArray[Any], other: NDArray[Any], share: float) -> NDArray[Any]:
    """The point that lies ``share`` of the way from one tensor to another, in their element type."""
    point: NDArray[Any] = ((1 - share) * one.astype(np.float64) + share * other.astype(np.float64)).astype(one.dtype)
    return point


def _rise(values: list[float]) -> float:
    return max(values) - (values[0] + values[-1]) / 2
