"""What disagreement to expect if networks erred independently of each other, and the least that their accuracies allow.

A disagreement says little by itself: networks that err often differ often. Beside it belong its two ends. The least is
reached where the better of two networks errs only where the other does: the difference of their accuracies. At the
other end an error of one says nothing about an error of the other, so that it falls on any example alike, and on any
wrong class, or on wrong classes as often as networks really confuse them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]


def least(accuracies: Floats) -> Floats:
    """The least disagreement of every two models, (models, models), from their (models,) accuracies, 0 to 1."""
    return np.abs(accuracies[:, None] - accuracies)


def uniform(accuracies: Floats, classes: int) -> Floats:
    """The disagreement of every two models whose errors are independent and fall on every wrong class alike.

    Both are right, or both are wrong in the same way, by chance: 1 - p q - (1 - p) (1 - q) / (classes - 1).

    Args:
        accuracies: (models,), 0 to 1.
        classes: number of classes, at least 2.

    Returns:
        (models, models)
    """
    both = np.outer(accuracies, accuracies)
    return 1 - both - np.outer(1 - accuracies, 1 - accuracies) / (classes - 1)


def confused(predictions: Integers, labels: Integers) -> Floats:
    """The disagreement of every two models whose errors are independent among the examples of one class.

    Each model predicts class ``c`` for a share of the examples whose label is ``y``; two models that did so
    independently would agree on the sum over ``c`` of the product of their shares.

    Args:
        predictions: (models, examples)
        labels: (examples,)

    Returns:
        (models, models)
    """
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # Only confusions that occur are kept: of a large vocabulary few do.
    pairs, index = np.unique(classes * (int(predictions.max(initial=0)) + 1) + predictions, return_inverse=True)
    index = index.reshape(predictions.shape)
    confusions = np.stack([np.bincount(row, minlength=len(pairs)) for row in index])
    weights = counts[pairs // (int(predictions.max(initial=0)) + 1)]
    agreement: Floats = (confusions / weights) @ confusions.T / len(labels)
    return 1 - agreement
