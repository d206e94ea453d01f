"""Altintas et al., "The Butterfly Effect: Neural Network Training Trajectories Are Highly Sensitive to Initial
Conditions" (ICML 2025, arXiv 2506.13234)."""

from __future__ import annotations

from dataclasses import replace

from protocols.perturbation import Perturbation
from protocols.protocol import Cell, Protocol, grid
from protocols.recipe import Recipe
from protocols.small import shrunk
from protocols.small import small as cut_down

TIMES = ((0, 0), (0, 1), (0, 10), (5, 0), (20, 0), (50, 0), (100, 0))
"""Whole epochs and further steps of training before the change."""

SIZES = (Perturbation(), Perturbation(kind="gaussian", scale=1e-2, fraction=1.0))
"""One element of the first layer by one ulp; noise of a hundredth of its spread on all of them."""


def butterfly() -> Protocol:
    """A change at step t, and how far it has carried the weights by the end of training."""
    (cell,) = grid(
        sources=("onebit",),
        architectures=("resnet14",),
        datasets=("cifar10",),
        trainers=("torch",),
        recipe=Recipe(epochs=200),
    )
    return Protocol(
        name="butterfly",
        summary="weights perturbed at step t: distance, cosine, disagreement and loss barrier at the end, against t",
        cells=tuple(
            replace(cell, perturb=replace(size, epoch=epoch, step=step)) for size in SIZES for epoch, step in TIMES
        ),
        replicates=10,
        control_replicates=2,
        keep=("weights", "barrier"),
        reference=(
            "G. S. Altintas et al.: The Butterfly Effect: Neural Network Training Trajectories Are Highly Sensitive to "
            "Initial Conditions. ICML 2025, arXiv 2506.13234"
        ),
        deviations=(
            "ResNet-14 and 200 epochs of the recipe of Summers & Dinneen (ICML 2021) in place of the paper's",
            "the change is of the first layer only, by one ulp of one element or by noise on all elements",
            "barriers (Frankle et al., ICML 2020) are between the perturbed run and the same run unperturbed",
        ),
    )


def small(protocol: Protocol) -> Protocol:
    """The small form: 40 epochs of 1,000 images of 16x16."""
    return cut_down(protocol, _small_cell, replicates=4)


def _small_cell(cell: Cell) -> Cell:
    recipe = replace(cell.recipe, epochs=40, batch_size=64, warmup_epochs=1.0)
    perturb = replace(cell.perturb, epoch=cell.perturb.epoch // 5)
    dataset = shrunk(cell.dataset, train_size=1000, test_size=500)
    return replace(cell, dataset=dataset, recipe=recipe, perturb=perturb)
