"""Zhuang, Zhang, Song & Hooker, "Randomness in Neural Network Training" (MLSys 2022, arXiv 2106.11872)."""

from __future__ import annotations

from dataclasses import replace

from protocols.protocol import Cell, Protocol, grid
from protocols.recipe import Recipe
from protocols.small import shrunk
from protocols.small import small as cut_down

ALGO = "init+shuffle+augment"
IMPL = "library"
ALGO_IMPL = "init+shuffle+augment+library"


def zhuang2022() -> Protocol:
    """Algorithmic and implementation noise, together, each alone and neither."""
    return Protocol(
        name="zhuang2022",
        summary="algorithm and implementation as sources: both, each alone, neither; churn, classes, overhead",
        cells=grid(
            sources=(ALGO_IMPL, ALGO, IMPL, "none"),
            architectures=("resnet18",),
            datasets=("cifar10", "cifar100"),
            trainers=("torch",),
            recipe=Recipe(epochs=200),
        ),
        replicates=10,
        library="native",
        reference=(
            "D. Zhuang, X. Zhang, S. L. Song, S. Hooker: Randomness in Neural Network Training: Characterizing the "
            "Impact of Tooling. MLSys 2022, arXiv 2106.11872"
        ),
        deviations=(
            "one network and two datasets of the paper's several; PyTorch; 10 replicates an arm",
            "200 epochs of the recipe of Summers & Dinneen (ICML 2021) in place of the paper's",
            "the paper compares kinds of GPU: here each store holds one kind, and --set source=hardware mixes them",
        ),
    )


def small(protocol: Protocol) -> Protocol:
    """The small form: ResNet-14 on 2,000 images of 16x16."""
    return cut_down(protocol, _small_cell, replicates=8)


def _small_cell(cell: Cell) -> Cell:
    recipe = replace(cell.recipe, epochs=20, batch_size=64, warmup_epochs=1.0)
    return replace(cell, architecture="resnet14", dataset=shrunk(cell.dataset), recipe=recipe)
