"""Learning-rate schedules, per step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocols.recipe import Recipe


def learning_rates(recipe: Recipe, epoch: int, steps: int) -> NDArray[np.float64]:
    """The rate of each step of an epoch (counted from 0), shape (steps,).

    With t the time in epochs since the cycle began, at the step's start, and n the epochs of a cycle: peak t / warmup
    during the warm-up, then the peak, or peak/2 (1 + cos(pi t / n)). So the very first step of a run with a warm-up has
    rate 0. Without accelerated ensembling the whole run is one cycle.
    """
    time = epoch % recipe.cycle_epochs + np.arange(steps) / steps
    if recipe.schedule == "cosine":
        rates = recipe.learning_rate / 2 * (1 + np.cos(np.pi * time / recipe.cycle_epochs))
    else:
        rates = np.full(steps, recipe.learning_rate)
    warming = time < recipe.warmup_epochs
    rates[warming] = recipe.learning_rate * time[warming] / recipe.warmup_epochs
    return rates
