"""``python -m tests.race_once SPECIFICATION``: race until two races differ, replay each, print all bits as JSON."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocols.contract import Dataset, Interrupted, Outcome
from protocols.digest import digest
from protocols.run import run_from_specification
from tests.runs import MemoryContext
from tests.small_data import as_photographs
from trainers.datasets import prepare
from trainers.datasets.digits import digits

ATTEMPTS = 8


def main(specification: str) -> None:
    run = run_from_specification(specification)
    train = importlib.import_module(f"trainers.{run.trainer}.train").train

    def interrupted(data: Dataset) -> MemoryContext:
        """Ready to go on with a race that was stopped after its first epoch."""
        context = MemoryContext(stop_after=1)
        with contextlib.suppress(Interrupted):
            train(run, data, context)
        assert context.checkpoint is not None
        return MemoryContext(checkpoint=context.checkpoint)

    def races(data: Dataset, prepared: Callable[[Dataset], MemoryContext]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while len(found) < ATTEMPTS and len({json.dumps(pair["race"]) for pair in found}) < 2:
            race = train(run, data, prepared(data))
            context = MemoryContext()
            context.log = race.commits
            found.append({"race": described(race), "replay": described(train(run, data, context))})
        return found

    with tempfile.TemporaryDirectory() as cache:
        data = prepare(digits, run.dataset, None, Path(cache))
        kinds = {
            "images": races(data, lambda data: MemoryContext()),
            "photographs": races(as_photographs(data), lambda data: MemoryContext()),
            "interrupted": races(data, interrupted),
        }
        print(json.dumps(kinds))


def described(outcome: Outcome) -> dict[str, Any]:
    """All bits of an outcome, and its log."""
    assert outcome.commits is not None
    tensors = {"logits": outcome.logits, "losses": outcome.losses}
    tensors |= {variant.name: variant.logits for variant in outcome.variants}
    return {"final": digest(outcome.weights), "tests": digest(tensors), "log": outcome.commits.tolist()}


if __name__ == "__main__":
    main(*sys.argv[1:])
