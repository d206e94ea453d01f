"""Initial weights: drawn in NumPy from the init stream, the same values for every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols import streams
from protocols.contract import Network
from protocols.run import Run


def initial_weights(run: Run, network: Network) -> dict[str, NDArray[np.floating]]:
    """Every tensor of the network before training, in the recipe's element type, without any one-bit change.

    Each tensor's values depend on (init seed, its name) alone; they are drawn in float64 and rounded once.
    """
    weights: dict[str, NDArray[np.floating]] = {}
    for parameter in network.parameters:
        if parameter.law == "normal":
            values = streams.initial_normal(run, parameter.name, parameter.shape, parameter.scale)
        elif parameter.law == "uniform":
            values = streams.initial_uniform(run, parameter.name, parameter.shape, parameter.scale)
        else:
            values = np.full(parameter.shape, parameter.scale)
        weights[parameter.name] = values.astype(run.recipe.dtype)
    return weights


def perturb(
    run: Run, network: Network, weights: dict[str, NDArray[np.floating]]
) -> tuple[dict[str, NDArray[np.floating]], dict[str, Any] | None]:
    """Apply the one-bit change where the run varies ``onebit``.

    Returns:
        The weights, and what was changed (tensor, index, before, after), or None.
    """
    if "onebit" not in run.varies:
        return weights, None
    changed, change = streams.flip_one_bit(run, weights[network.perturbed])
    return {**weights, network.perturbed: changed}, {"tensor": network.perturbed, **change}
