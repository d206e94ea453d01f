"""Runs that train nothing, for measuring everything around training: a trainer, a dataset and a study of them.

A run leaves logits of 10,000 test examples and 10 classes, as one on CIFAR-10 does, and takes NOISEGRID_NOOP_SECONDS.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from protocols.contract import Checkpoint, Context, Dataset, Epoch, Interrupted, Network, Outcome, Parameter, Trainer
from protocols.digest import digest
from protocols.protocol import Protocol, grid
from protocols.recipe import Recipe
from protocols.run import Run
from trainers.datasets import from_arrays

SECONDS = "NOISEGRID_NOOP_SECONDS"
EXAMPLES, CLASSES = 10_000, 10

_WEIGHTS = {"head.weight": np.zeros((CLASSES, 1), np.float32)}
_DIGEST = digest(_WEIGHTS)


def architecture(net: Any, x: Any, classes: int) -> Any:
    """Stands in for an architecture."""
    return x


def network(architecture: Any, image_shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Network:
    """One matrix."""
    return Network(
        parameters=(Parameter(name="head.weight", shape=(classes, 1), law="constant", scale=0.0),),
        dropout={},
        perturbed="head.weight",
        head="head.weight",
    )


def environment(profile: str, threads: int, gpus: float) -> dict[str, str]:
    """Nothing that a framework would want."""
    return {}


def train(run: Run, data: Dataset, context: Context) -> Outcome:
    """Sleep, and come up with logits, other ones for each replicate."""
    provenance = {"device": "cpu", "supervisor": os.getppid()}
    context.fingerprint(provenance)
    history: tuple[Epoch, ...] = ()
    for epoch in range(1, run.recipe.epochs + 1):
        began = time.perf_counter()
        time.sleep(float(os.environ.get(SECONDS, "0")) / run.recipe.epochs)
        row = Epoch(
            epoch=epoch,
            learning_rate=0.1,
            train_loss=0.0,
            test_loss=0.0,
            test_accuracy=0.1,
            seconds=time.perf_counter() - began,
        )
        history = (*history, row)
        context.report(row)
        if epoch < run.recipe.epochs and context.should_stop():  # A canary ends here.
            context.save_checkpoint(_checkpoint(history))
            raise Interrupted
    logits = np.random.default_rng(run.replicate).standard_normal((EXAMPLES, CLASSES), np.float32)
    return Outcome(
        status="ok",
        logits=logits,
        weights=_WEIGHTS,
        losses=np.zeros(len(history)),
        history=history,
        initial_digest=_DIGEST,
        first_step_digest=_DIGEST,
        resumed_epochs=0,
        images_per_second=0.0,
        timings={},
        provenance=provenance,
    )


def _checkpoint(history: tuple[Epoch, ...]) -> Checkpoint:
    return Checkpoint(
        epochs=len(history),
        tensors={f"weights/{name}": tensor for name, tensor in _WEIGHTS.items()},
        losses=np.zeros(len(history)),
        history=history,
        initial_digest=_DIGEST,
        first_step_digest=_DIGEST,
    )


trainer = Trainer(
    name="noop",
    numerics=1,
    framework="numpy",
    extra="torch",
    train="benchmarks.noop:train",
    network=network,
    environment=environment,
    sources=frozenset({"init", "shuffle"}),
    library_kinds=("order",),
)

blank = from_arrays(
    name="blank",
    train_images=np.zeros((CLASSES, 1, 1, 1), np.uint8),
    train_labels=np.arange(CLASSES),
    test_images=np.zeros((EXAMPLES, 1, 1, 1), np.uint8),
    test_labels=np.arange(EXAMPLES) % CLASSES,
    mean=(0.0,),
    std=(1.0,),
)


def study(runs: int, epochs: int = 1) -> Protocol:
    """So many runs, two of them controls."""
    return Protocol(
        name="noop",
        summary="runs that train nothing",
        cells=grid(
            sources=("shuffle",),
            architectures=("benchmarks.noop:architecture",),
            datasets=("benchmarks.noop:blank",),
            trainers=("benchmarks.noop:trainer",),
            recipe=Recipe(epochs=epochs, batch_size=CLASSES),
        ),
        replicates=runs - 2,
        control_replicates=2,
    )
