"""Summers & Dinneen, "Nondeterminism and Instability in Neural Network Optimization" (ICML 2021, arXiv 2103.04514)."""

from __future__ import annotations

from protocols.protocol import Protocol, grid
from protocols.recipe import Recipe

REFERENCE = (
    "C. Summers, M. J. Dinneen: Nondeterminism and Instability in Neural Network Optimization. "
    "ICML 2021, arXiv 2103.04514"
)


def table1() -> Protocol:
    """The main table: ResNet-14 on CIFAR-10, seven rows of 100 models."""
    return Protocol(
        name="summers2021-table1",
        summary="the main table: ResNet-14 on CIFAR-10, 500 epochs, 100 models a row",
        cells=grid(
            sources=(
                "init",
                "shuffle",
                "augment",
                "library",
                "shuffle+library",
                "shuffle+augment+library",
                "all",
            ),
            architectures=("resnet14",),
            datasets=("cifar10",),
            trainers=("torch",),
            recipe=Recipe(),
        ),
        replicates=100,
        control_replicates=2,
        library="native",
        reference=REFERENCE,
        deviations=(
            "a control is added, in which nothing varies, to show that the held sources are held",
            "augmentation is drawn for (seed, epoch, sample); the authors' depends on the number of loader workers",
            "SDs are unbiased (ddof 1) with jackknife intervals, pairwise means with jackknife intervals over models; "
            "the paper's own conventions stand beside them",
            "where it is run on MNIST, Fashion-MNIST or digits: crops with a padding of 1 pixel and no flips "
            "(the paper augments CIFAR-10 by crops with a padding of 4 and flips, and MNIST not at all)",
        ),
    )
