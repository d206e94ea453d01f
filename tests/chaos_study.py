"""Studies whose every training leaves a line in a log, which run, when it began and where; and a driver of sweeps.

``python -m tests.chaos_study STUDY STORE ADDRESS`` is one sweep as a program of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator import catalog
from protocols.contract import Context, Dataset, Outcome
from protocols.protocol import DatasetSpec, Protocol, grid
from protocols.recipe import Recipe
from protocols.run import Run
from tests import fake_trainer, fakes

LOG = "NOISEGRID_TEST_LOG"
"""Environment variable with the log's path."""

SOURCES = ("init", "shuffle", "augment", "dropout", "library", "onebit")


def train(run: Run, data: Dataset, context: Context) -> Outcome:
    """The fake trainer."""
    _note(run, context)
    return fake_trainer.train(run, data, context)


def train_digits(run: Run, data: Dataset, context: Context) -> Outcome:
    """PyTorch, on the CPU although Ray was told that there are GPUs."""
    _note(run, context)
    vars(context)["device"] = "cpu"
    return catalog.train("torch")(run, data, context)


def _note(run: Run, context: Context) -> None:
    """Leave a line, unless it is a device's canary, or the unperturbed run that a onebit run is held against."""
    if vars(context).get("_attempt") is None:
        return
    with open(os.environ[LOG], "a") as log:
        log.write(f"{run.id} {time.time_ns()} {os.getpid()}\n")


fake = dataclasses.replace(fake_trainer.trainer, train="tests.chaos_study:train")
torch = dataclasses.replace(catalog.trainer("torch"), train="tests.chaos_study:train_digits")


def fakes_study() -> Protocol:
    """70 runs of milliseconds."""
    return fakes.protocol(SOURCES, replicates=10, trainers=("tests.chaos_study:fake",))


def digits_study() -> Protocol:
    """63 runs of PyTorch on a part of the digits."""
    return Protocol(
        name="chaos",
        summary="quickstart's network and data, all sources that replay",
        cells=grid(
            sources=SOURCES,
            architectures=("dropnet",),
            datasets=(DatasetSpec(name="digits", train_size=200, test_size=100),),
            trainers=("tests.chaos_study:torch",),
            recipe=Recipe(epochs=3, batch_size=64, learning_rate=0.1, warmup_epochs=1.0),
        ),
        replicates=9,
    )


def trainings() -> list[tuple[str, int, int]]:
    """(run, when it began in nanoseconds, process) for every training so far."""
    path = Path(os.environ[LOG])
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(id, int(began), int(pid)) for id, began, pid in lines]


def main(study: str, url: str, address: str, **options: Any) -> None:
    """A sweep on every fake GPU of the cluster at that address, whose result is printed as JSON."""
    from orchestrator.launch import sweep
    from orchestrator.plan import plan
    from orchestrator.store import open_store

    store = open_store(url, create=True)
    store.tidy()
    result = sweep(
        plan(globals()[study](), store),
        store,
        address=address,
        gpus_per_run=1.0,
        checkpoint_every=0.0,
        retries=10,
        **options,
    )
    print(json.dumps({"done": result.done, "planned": result.planned, "stopped": result.stopped}))


if __name__ == "__main__":
    main(*sys.argv[1:4], **json.loads(sys.argv[4]) if len(sys.argv) > 4 else {})
