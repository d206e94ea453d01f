"""Initial weights: drawn in NumPy from the init stream, the same values for every framework."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols import streams
from protocols.contract import Network
from protocols.errors import UserError, unknown
from protocols.run import Run
from protocols.sources import source


def initial_weights(run: Run, network: Network) -> dict[str, NDArray[np.floating]]:
    """Every tensor of the network before training, in the recipe's element type, without any perturbation.

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
    for name in run.varies:
        if (change := source(name).weights) is not None:
            weights = change(weights, streams.generator(run, name, "weights"))
    return weights


def perturbed_tensor(run: Run, network: Network) -> str:
    """The name of the tensor that the run's perturbation changes.

    Raises:
        UserError: the network has no such trainable tensor, or it has fewer elements than the perturbation names.
    """
    assert run.perturb is not None
    wanted = run.perturb.tensor
    name = {"first": network.perturbed, "last": network.head}.get(wanted, wanted)
    shapes = {parameter.name: parameter.shape for parameter in network.parameters if parameter.trainable}
    if name not in shapes:
        raise unknown("perturb.tensor", wanted, ["first", "last", *shapes])
    size = math.prod(shapes[name])
    if run.perturb.element is not None and run.perturb.element >= size:
        raise UserError(f"perturb.element is {run.perturb.element}, but {name} has {size} elements (counted from 0)")
    return name


def perturb(
    run: Run, network: Network, weights: dict[str, NDArray[np.floating]], step: int
) -> tuple[dict[str, NDArray[np.floating]], dict[str, Any]]:
    """Make the change that ``run.perturb`` describes.

    Returns:
        The weights after it, and what was changed: see :attr:`protocols.contract.Outcome.perturbation`.
    """
    name = perturbed_tensor(run, network)
    changed, change = streams.perturbed(run, weights[name])
    return {**weights, name: changed}, {"tensor": name, "step": step, **change}
