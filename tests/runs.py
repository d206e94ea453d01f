"""Short runs for tests, and a context that lives in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.contract import Checkpoint, Epoch
from protocols.perturbation import Perturbation
from protocols.protocol import DatasetSpec
from protocols.recipe import Recipe
from protocols.run import Run
from protocols.sources import HELD

TRAINERS = ("torch", "tensorflow")


def make_run(trainer: str = "torch", *, varies: tuple[str, ...] = (), replicate: int = 0, **fields: Any) -> Run:
    """A run on digits. ``fields`` are fields of Run, or else of its recipe."""
    values: dict[str, Any] = {
        "varies": tuple(sorted(varies)),
        "library": "order" if "library" in varies else HELD,
        "asynchrony": "simulated" if "async" in varies else HELD,
        "perturb": Perturbation() if "onebit" in varies else None,
        "keep": (),
        "architecture": "dropnet",
        "dataset": DatasetSpec(name="digits", train_size=200, test_size=100),
        "dataset_fingerprint": "digits",
        "trainer": trainer,
        "numerics": 1,
        "base_seed": 0,
        "replicate": replicate,
    }
    recipe: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 64,
        "learning_rate": 0.1,
        "warmup_epochs": 1.0,
        "crop": 1,
        "flip": False,
    }
    for name, value in fields.items():
        (values if name in values else recipe)[name] = value
    return Run(recipe=Recipe(**recipe), **values)


class MemoryContext:
    """A trainer's context that keeps everything in memory."""

    device = "cpu"
    threads = 1
    decode_threads = 1

    def __init__(
        self, *, checkpoint: Checkpoint | None = None, every_epoch: bool = False, stop_after: int | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.machine = "this machine"
        self.epochs: list[Epoch] = []
        self.log: NDArray[np.int64] | None = None
        self._every_epoch = every_epoch
        self._stop_after = stop_after

    def report(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)

    def fingerprint(self, provenance: Mapping[str, Any]) -> str:
        return self.machine + json.dumps(provenance, sort_keys=True)

    def load_checkpoint(self) -> Checkpoint | None:
        return self.checkpoint

    def commit_log(self) -> NDArray[np.int64] | None:
        return self.log

    def checkpoint_due(self) -> bool:
        return self._every_epoch

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def should_stop(self) -> bool:
        return self._stop_after is not None and len(self.epochs) >= self._stop_after
