"""Trainers against the bare loop: ``python -m benchmarks.trainer FRAMEWORK [--quick]`` prints figures as JSON.

The trainer's side is everything a training epoch does: batch plan, dropout masks, crops, steps, losses. The other side
is :mod:`benchmarks.bare`, written without the trainers, on one batch that is already normalised and in place. Both take
turns, so that a machine that is busy now and then slows both.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks import bare
from protocols.contract import Dataset
from protocols.protocol import DatasetSpec
from protocols.recipe import Recipe
from protocols.run import Run
from protocols.sources import HELD

BATCH = 128
STEPS = 4


def main(framework: str, *options: str) -> None:
    """Measure resnet14 on images of the shape of CIFAR-10."""
    turns = 3 if "--quick" in options else 9
    data = photographs(BATCH * STEPS)
    whole, loop = trainer_epochs(framework, data), getattr(bare, framework)(data, BATCH, STEPS)
    whole(), loop()
    seconds = [(timed(whole), timed(loop)) for _ in range(turns)]
    trainer, alone = (BATCH * STEPS / statistics.median(column) for column in zip(*seconds, strict=True))
    figure = {"name": f"trainer/{framework}/resnet14", "ratio": trainer / alone, "trainer": trainer, "bare": alone}
    print(json.dumps([figure]))


def photographs(count: int) -> Dataset:
    """Noise of the shape of CIFAR-10."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, count)
    return Dataset(
        name="noise",
        fingerprint="noise",
        classes=10,
        train_images=images,
        train_labels=labels,
        test_images=images[:10],
        test_labels=labels[:10],
        shift=np.full(3, 127.5),
        scale=np.full(3, 1 / 64),
        train_samples=np.arange(count),
        full_train_size=count,
    )


def trainer_epochs(framework: str, data: Dataset) -> Callable[[], None]:
    """A function that trains the next epoch as the trainer does."""
    from trainers.batches import plan_epoch
    from trainers.initial import initial_weights

    run = Run(
        varies=(),
        library=HELD,
        architecture="resnet14",
        dataset=DatasetSpec(name="noise"),
        dataset_fingerprint="noise",
        trainer=framework,
        numerics=1,
        recipe=Recipe(batch_size=BATCH, crop=4, flip=True, learning_rate=0.01),
        base_seed=0,
        replicate=0,
    )
    network, engine = importlib.import_module(f"trainers.{framework}.train").build(run, data, "cpu", 1)
    engine.load(initial_weights(run, network), None, None)
    epochs = iter(range(run.recipe.epochs))

    def epoch() -> None:
        plan = plan_epoch(run, data, network, next(epochs))
        engine.losses(engine.train(plan, 0, plan.steps))

    return epoch


def timed(function: Callable[[], None]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
