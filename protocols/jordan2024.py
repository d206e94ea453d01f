"""Jordan, "On the Variance of Neural Network Training with respect to Test Sets and Distributions" (ICLR 2024, arXiv
2304.01910)."""

from __future__ import annotations

from dataclasses import replace

from protocols.protocol import Cell, Protocol, grid
from protocols.recipe import Recipe
from protocols.small import shrunk
from protocols.small import small as cut_down


def jordan2024() -> Protocol:
    """How much of the spread of test accuracies would be left on an endless test set."""
    return Protocol(
        name="jordan2024",
        summary="the variance of test accuracy against that of the accuracy on the whole distribution",
        cells=grid(
            sources=("all", "init", "shuffle", "augment"),
            architectures=("resnet18",),
            datasets=("cifar10",),
            trainers=("torch",),
            recipe=Recipe(epochs=64),
        ),
        replicates=250,
        control_replicates=2,
        library="native",
        reference=(
            "K. Jordan: On the Variance of Neural Network Training with respect to Test Sets and Distributions. "
            "ICLR 2024, arXiv 2304.01910"
        ),
        deviations=(
            "ResNet-18 and 64 epochs of the recipe of Summers & Dinneen (ICML 2021) in place of the paper's network",
            "250 replicates a cell, far fewer than the paper's; each source stands alone beside all",
        ),
    )


def small(protocol: Protocol) -> Protocol:
    """The small form: many short runs of ResNet-14 on 1,000 images of 16x16, tested on 2,000."""
    return cut_down(protocol, _small_cell, replicates=24)


def _small_cell(cell: Cell) -> Cell:
    recipe = replace(cell.recipe, epochs=10, batch_size=64, warmup_epochs=1.0)
    dataset = shrunk(cell.dataset, train_size=1000, test_size=2000)
    return replace(cell, architecture="resnet14", dataset=dataset, recipe=recipe)
