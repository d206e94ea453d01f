"""A study of real PyTorch runs whose every training leaves a line in a log: which run, when it began, and where."""

from __future__ import annotations

import dataclasses
import os
import time

from orchestrator import catalog
from protocols.contract import Context, Dataset, Outcome
from protocols.protocol import Protocol, grid
from protocols.recipe import Recipe
from protocols.run import Run

LOG = "NOISEGRID_TEST_LOG"
"""Environment variable with the log's path."""


def train(run: Run, data: Dataset, context: Context) -> Outcome:
    with open(os.environ[LOG], "a") as log:
        log.write(f"{run.id} {time.time_ns()} {os.getpid()}\n")
    return catalog.train("torch")(run, data, context)


torch = dataclasses.replace(catalog.trainer("torch"), train="tests.kill_study:train")


def study() -> Protocol:
    return Protocol(
        name="kill-study",
        summary="quickstart's network and data, all sources that replay",
        cells=grid(
            sources=("init", "shuffle", "augment", "dropout", "library", "onebit", "all"),
            architectures=("dropnet",),
            datasets=("digits",),
            trainers=("tests.kill_study:torch",),
            recipe=Recipe(epochs=30, batch_size=64, learning_rate=0.1, warmup_epochs=1.0),
        ),
        replicates=2,
    )
