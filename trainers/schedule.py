"""Learning-rate schedules, per step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocols.recipe import Recipe


def learning_rates(recipe: Recipe, epoch: int, steps: int) -> NDArray[np.float64]:
    """The rate of each step of an epoch (counted from 0), shape (steps,).

    With t the time in epochs at the step's start: peak t / warmup during the warm-up, then the peak, or
    peak/2 (1 + cos(pi t / epochs)). So the very first step of a run with a warm-up has rate 0.
    """
    time = epoch + np.arange(steps) / steps
    if recipe.schedule == "cosine":
        rates = recipe.learning_rate / 2 * (1 + np.cos(np.pi * time / recipe.epochs))
    else:
        rates = np.full(steps, recipe.learning_rate)
    warming = time < recipe.warmup_epochs
    rates[warming] = recipe.learning_rate * time[warming] / recipe.warmup_epochs
    return rates
