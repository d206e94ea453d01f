"""``python -m tests.train_once SPECIFICATION [CHECKPOINT]``: train one run on digits and print digests as JSON."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
import tempfile
from pathlib import Path

from protocols.digest import digest
from protocols.run import run_from_specification
from tests.runs import MemoryContext
from trainers.datasets import prepare
from trainers.datasets.digits import digits


def main(specification: str, checkpoint: str | None = None) -> None:
    run = run_from_specification(specification)
    context = MemoryContext(checkpoint=pickle.loads(Path(checkpoint).read_bytes()) if checkpoint else None)
    with tempfile.TemporaryDirectory() as cache:
        data = prepare(digits, run.dataset, None, Path(cache))
        outcome = importlib.import_module(f"trainers.{run.trainer}.train").train(run, data, context)
    print(
        json.dumps(
            {
                "final": digest(outcome.weights),
                "initial_digest": outcome.initial_digest,
                "first_step_digest": outcome.first_step_digest,
                "logits": digest({"logits": outcome.logits}),
                "losses": outcome.losses.tolist(),
                "resumed_epochs": outcome.resumed_epochs,
                "epochs": [row.epoch for row in outcome.history],
                "fingerprint": context.fingerprint(outcome.provenance),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
