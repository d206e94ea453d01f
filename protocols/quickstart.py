"""Studies that finish in minutes on a laptop: 8x8 handwritten digits and a small network with dropout."""

from __future__ import annotations

from protocols.protocol import Protocol, grid
from protocols.recipe import Recipe

RECIPE = Recipe(epochs=20, batch_size=64, learning_rate=0.1, warmup_epochs=1.0)


def quickstart() -> Protocol:
    """Every source in both trainers, four replicates each."""
    return Protocol(
        name="quickstart",
        summary="every source of nondeterminism of synchronous training, in both trainers, on 8x8 digits: minutes",
        cells=grid(
            sources=("none", "init", "shuffle", "augment", "dropout", "library", "onebit", "all"),
            architectures=("dropnet",),
            datasets=("digits",),
            trainers=("torch", "tensorflow"),
            recipe=RECIPE,
        ),
        replicates=4,
        library="order",
    )


def tiny() -> Protocol:
    """The smallest study that shows anything: one trainer, two sources, two replicates."""
    return Protocol(
        name="quickstart-tiny",
        summary="a first look: initial weights and one bit of one weight, two runs each, on 8x8 digits",
        cells=grid(
            sources=("none", "init", "onebit"),
            architectures=("dropnet",),
            datasets=("digits",),
            trainers=("torch",),
            recipe=RECIPE,
        ),
        replicates=2,
        library="order",
    )
