"""Test-time augmentation: which views of a test image a name stands for, and the mean of their logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from protocols.contract import PLAIN, View

PHOTOGRAPH_STEP = 16
"""Pixels between the crops of a photograph, which has 16 to spare on each side (224 of 256)."""


def views(name: str, *, photographs: bool = False) -> list[View]:
    """The views of a name of ``protocols.recipe.VIEWS``, some of them twice.

    On CIFAR-sized images the image itself comes first and the crops after it, so that the unshifted crop counts twice;
    the nine crops of MNIST and of photographs hold it once.
    """
    if name == "flip":
        return [PLAIN, PLAIN._replace(flip=True)]
    flips = (False, True) if name.startswith("flip-") else (False,)
    reach, step = {"crop9": (1, 1), "crop25": (4, 2), "crop81": (4, 1)}[name.removeprefix("flip-")]
    shifts = [shift * (PHOTOGRAPH_STEP if photographs else 1) for shift in range(-reach, reach + 1, step)]
    crops = [View(row, column, flip) for flip in flips for row in shifts for column in shifts]
    return crops if name.endswith("crop9") else [PLAIN, *crops]


def averaged(
    logits: Callable[[View], NDArray[np.floating]], names: Sequence[str], *, photographs: bool = False
) -> dict[str, tuple[NDArray[np.float64], int]]:
    """For each name the mean of its views' logits, in float64, and how many views it has.

    A view that several names share is computed once.

    Args:
        logits: the logits of the test set in one view, (examples, classes).
        names: of ``protocols.recipe.VIEWS``.
        photographs: whether the images have pixels to spare around them.
    """
    wanted = {name: Counter(views(name, photographs=photographs)) for name in names}
    sums: dict[str, NDArray[np.float64]] = {}
    for view in dict.fromkeys(view for counts in wanted.values() for view in counts):
        values = logits(view).astype(np.float64)
        for name, counts in wanted.items():
            if view in counts:
                sums[name] = sums.get(name, 0.0) + counts[view] * values
    return {name: (sums[name] / wanted[name].total(), wanted[name].total()) for name in names}
