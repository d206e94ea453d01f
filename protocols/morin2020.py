"""Morin & Willetts, "Non-Determinism in TensorFlow ResNets" (2020, arXiv 2001.11396)."""

from __future__ import annotations

from dataclasses import replace

from protocols.protocol import Cell, Protocol, grid
from protocols.recipe import Recipe
from protocols.small import shrunk
from protocols.small import small as cut_down

FIXED = "library"
"""Every seed is held; the GPU's kernels are not."""
VARIED = "init+shuffle+augment+library"
"""What the graph-level seed, the seeds of operations and NumPy's seed drive, and the kernels."""


def morin2020() -> Protocol:
    """Two arms of 50 TensorFlow ResNet-50 on CIFAR-10: seeds held, seeds varied."""
    return Protocol(
        name="morin2020",
        summary="TensorFlow ResNet-50 on CIFAR-10 with every seed held and with every seed varied",
        cells=grid(
            sources=(FIXED, VARIED),
            architectures=("resnet50",),
            datasets=("cifar10",),
            trainers=("tensorflow",),
            recipe=Recipe(epochs=200),
        ),
        replicates=50,
        control_replicates=2,
        library="native",
        reference="M. Morin, M. Willetts: Non-Determinism in TensorFlow ResNets. 2020, arXiv 2001.11396",
        deviations=(
            "a control is added, in which the kernels are held, too",
            "the paper leaves the recipe open: 200 epochs of that of Summers & Dinneen (ICML 2021) in both arms",
            "the paper sets the graph-level seed, the operations' seeds and NumPy's; what they drive (initial weights, "
            "order, augmentation) has a seed each here, named in every record",
            "the GPU is not reset between runs unless that is asked for: --set 'between_runs=nvidia-smi -rac'",
        ),
    )


def small(protocol: Protocol) -> Protocol:
    """The small form: 50 ResNet-14 an arm on 1,000 images of 16x16; weights are kept, to be compared by layer."""
    return cut_down(protocol, _small_cell, replicates=50, keep=("weights",))


def _small_cell(cell: Cell) -> Cell:
    recipe = replace(cell.recipe, epochs=20, batch_size=64, warmup_epochs=1.0)
    dataset = shrunk(cell.dataset, train_size=1000, test_size=500)
    return replace(cell, architecture="resnet14", dataset=dataset, recipe=recipe)
