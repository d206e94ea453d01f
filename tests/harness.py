"""What every contract of trainers needs: to build, train and read one of them by its name, here or in a new process."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocols.contract import Checkpoint, Dataset, Network, Outcome
from protocols.run import Run
from tests.runs import MemoryContext, make_run
from trainers.initial import initial_weights

ROOT = Path(__file__).parent.parent


class Harness:
    """One trainer, whose short name is ``name``."""

    name: str

    @property
    def trainer(self) -> Any:
        return importlib.import_module(f"trainers.{self.name}").trainer

    def train(self, run: Run, data: Dataset, context: MemoryContext | None = None) -> Outcome:
        train: Callable[..., Outcome] = self.function(self.trainer.train)
        return train(run, data, context or MemoryContext())

    def function(self, path: str) -> Any:
        module, _, function = path.partition(":")
        return getattr(importlib.import_module(module), function)

    def run(self, **fields: Any) -> Run:
        return make_run(self.name, **fields)

    def network(self, run: Run, data: Dataset) -> Network:
        architecture = importlib.import_module("trainers.resolve").architecture(run.architecture)
        network: Network = self.trainer.network(architecture, data.image_shape, data.classes, run.recipe)
        return network

    def engine(self, run: Run, data: Dataset) -> Any:
        """The engine of a run, at the run's initial weights."""
        network, engine = importlib.import_module(f"trainers.{self.name}.train").build(run, data, "cpu", 1)
        engine.load(initial_weights(run, network), None, None)
        return engine

    def in_fresh_process(
        self,
        run: Run,
        checkpoint: Checkpoint | None = None,
        folder: Path | None = None,
        *,
        module: str = "tests.train_once",
    ) -> dict[str, Any]:
        """Train in a new process with the environment of the run's profile; what the module prints of it."""
        arguments = [run.specification]
        if checkpoint is not None:
            assert folder is not None
            path = folder / "checkpoint.pickle"
            path.write_bytes(pickle.dumps(checkpoint))
            arguments.append(str(path))
        environment = {
            **os.environ,
            **self.trainer.environment(run.profile, 1, 0.0),
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
