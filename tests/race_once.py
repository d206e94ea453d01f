"""``python -m tests.race_once SPECIFICATION``: race until two races differ, replay each, print all bits as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from protocols.contract import Dataset, Outcome
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

    def races(data: Dataset) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while len(found) < ATTEMPTS and len({json.dumps(pair["race"]) for pair in found}) < 2:
            race = train(run, data, MemoryContext())
            context = MemoryContext()
            context.log = race.commits
            found.append({"race": described(race), "replay": described(train(run, data, context))})
        return found

    with tempfile.TemporaryDirectory() as cache:
        data = prepare(digits, run.dataset, None, Path(cache))
        print(json.dumps({"images": races(data), "photographs": races(as_photographs(data))}))


def described(outcome: Outcome) -> dict[str, Any]:
    """All bits of an outcome, and its log."""
    assert outcome.commits is not None
    tensors = {"logits": outcome.logits, "losses": outcome.losses}
    tensors |= {variant.name: variant.logits for variant in outcome.variants}
    return {"final": digest(outcome.weights), "tests": digest(tensors), "log": outcome.commits.tolist()}


if __name__ == "__main__":
    main(*sys.argv[1:])
