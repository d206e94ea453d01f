"""Records that no one trained: consistent with each other and with the plan, written through the real store.

Replicates of a cell share the logits of a common model and differ by noise of a given size, so the measures have
values one can reason about; everything else in a record follows from its run.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.analysis import measures
from protocols import streams
from protocols.perturbation import Perturbation
from protocols.protocol import DatasetSpec
from protocols.recipe import Recipe
from protocols.run import Run
from protocols.sources import HELD, label_sources

ALL = ("augment", "dropout", "init", "library", "shuffle")
SOURCES = ("none", "init", "shuffle", "augment", "dropout", "library", "onebit", "all")
STARTED = datetime.datetime(2024, 5, 1, 12, 0, tzinfo=datetime.UTC)
PROVENANCE = {
    "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
    "packages": {"noisegrid": "0.1.0", "numpy": "2.4.6", "torch": "2.13.0"},
    "python": "3.11.7",
    "os": "Linux-6.1-x86_64-with-glibc2.36",
    "cpu": "Some CPU (6/143/8)",
    "isa": ["avx", "avx2", "fma"],
    "cores": 2,
    "host": "node",
    "gpus": [],
    "trainer": {"device": "cpu", "torch": "2.13.0", "threads": 1, "deterministic": True},
    "environment": {"OMP_NUM_THREADS": "1"},
}


@dataclass(frozen=True)
class Fake:
    """A planned run, with the attributes of the planner's own."""

    run: Run
    source: str


def plan(
    *,
    sources: Sequence[str] = SOURCES,
    replicates: int = 4,
    trainer: str = "torch",
    architecture: str = "dropnet",
    dataset: str = "digits",
    base_seed: int = 0,
    library: str = "order",
    recipe: Recipe | None = None,
    **fields: Any,
) -> list[Fake]:
    """One group's runs, replicate by replicate; ``fields`` are fields of every run. A source may carry choices, as
    ``onebit[step=10]`` does: a label, whose perturbation is given by ``perturb``."""
    return [
        Fake(_run(source, replicate, trainer, architecture, dataset, base_seed, library, recipe, fields), source)
        for replicate in range(replicates)
        for source in sources
    ]


def _run(
    source: str,
    replicate: int,
    trainer: str,
    architecture: str,
    dataset: str,
    base_seed: int,
    library: str,
    recipe: Recipe | None,
    fields: dict[str, Any],
) -> Run:
    varies = {"none": (), "all": ALL}.get(source, tuple(sorted(label_sources(source))))
    perturb = fields.get("perturb", Perturbation())
    run = Run(
        varies=varies,
        library=library if "library" in varies else HELD,
        architecture=architecture,
        dataset=DatasetSpec(name=dataset),
        dataset_fingerprint=hashlib.sha256(dataset.encode()).hexdigest(),
        trainer=trainer,
        numerics=1,
        recipe=recipe or Recipe(epochs=6, batch_size=64, crop=1, flip=False),
        base_seed=base_seed,
        replicate=replicate,
    )
    return dataclasses.replace(run, **fields | {"perturb": perturb if "onebit" in varies else None})


def labels(examples: int = 300, classes: int = 10) -> np.ndarray:
    """The test labels of every fake dataset of that size."""
    return np.random.default_rng(0).integers(0, classes, examples)


def labels_fingerprint(values: np.ndarray) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()


def logits(run: Run, *, examples: int = 300, classes: int = 10, noise: float = 0.5) -> np.ndarray:
    """(examples, classes) float32: right for most examples, and, where something varies, off by ``noise``."""
    truth = labels(examples, classes)
    common = np.random.default_rng([1, run.base_seed]).standard_normal((examples, classes)) * 1.3
    common[np.arange(examples), truth] += 4
    scale = noise * (0.7 if run.varies == ("onebit",) else 1)
    if run.varies:
        own = np.random.default_rng([int(run.id[:8], 16), 2])
        common = common + scale * own.standard_normal(common.shape)
    return common.astype(np.float32)


def record(fake: Fake, **changes: Any) -> dict[str, Any]:
    """The row of one run's record; ``changes`` replace columns, and ``noise``, ``examples``, ``classes`` shape it."""
    run = fake.run
    shape = {name: changes.pop(name) for name in ("examples", "classes") if name in changes}
    own = logits(run, noise=changes.pop("noise", 0.5), **shape)
    truth = labels(*own.shape)
    accuracy = float(measures.accuracy(own[None], truth)[0])
    loss = float(measures.cross_entropy(own[None], truth)[0])
    epochs, steps = run.recipe.epochs, 5 * run.recipe.epochs
    order = sorted(ALL).index(run.varies[0]) if run.varies and run.varies[0] in ALL else 0
    started = STARTED + datetime.timedelta(minutes=2 * run.replicate + order)
    onebit = "onebit" in run.varies
    row = {
        "id": run.id,
        "source": fake.source,
        "architecture": run.architecture,
        "dataset": str(run.dataset),
        "trainer": run.trainer,
        "library": run.library,
        "asynchrony": run.asynchrony,
        "group": run.group,
        "base_seed": run.base_seed,
        "replicate": run.replicate,
        "outcome": "ok",
        "accuracy": accuracy,
        "cross_entropy": loss,
        "initial_digest": _hash("initial", run.base_seed, run.id if {"init", "onebit"} & set(run.varies) else ""),
        "first_step_digest": _hash("first", run.id if run.varies else run.group),
        "final_digest": _hash("final", run.id if run.varies else run.group),
        "tensor_digests": {"head.weight": _hash("head", run.id if run.varies else run.group)},
        "attempt": 1,
        "resumed_epochs": 0,
        "specification": run.specification,
        "parameters": 4810,
        "logits": own,
        "logits_precision": "float32",
        "passes": 1,
        "predictions": own.argmax(axis=1).astype(np.int32),
        "labels_fingerprint": labels_fingerprint(truth),
        "variants": [],
        "losses": np.geomspace(2.3, loss, steps).astype(np.float32),
        "history": [
            {
                "epoch": epoch,
                "learning_rate": 0.4 * epoch / epochs,
                "train_loss": float(loss + 2 * 0.4**epoch),
                "test_loss": float(loss + 2 * 0.5**epoch),
                "test_accuracy": float(accuracy * (1 - 0.5**epoch)) if epoch < epochs else accuracy,
                "seconds": 0.5,
            }
            for epoch in range(1, epochs + 1)
        ],
        "staleness_mean": None,
        "staleness_max": None,
        "commits": [],
        "seconds": 0.5 * epochs,
        "train_seconds": 0.4 * epochs,
        "evaluate_seconds": 0.05 * epochs,
        "setup_seconds": 0.05 * epochs,
        "images_per_second": 3600.0,
        "started": started,
        "finished": started + datetime.timedelta(seconds=0.5 * epochs),
        "onebit_tensor": "stem.weight" if onebit else None,
        "onebit_index": run.replicate if onebit else None,
        "onebit_before": 0.1 if onebit else None,
        "onebit_after": float(np.nextafter(np.float32(0.1), np.float32(1))) if onebit else None,
        "onebit_step": 0 if onebit else None,
        "onebit_elements": 1 if onebit else None,
        "onebit_digest": _hash("perturbed", run.id) if onebit else None,
        "weights_changed": 4800 if onebit else None,
        "weights_total": 4810 if onebit else None,
        "predictions_changed": 7 if onebit else None,
        "first_differing_step": 6 if onebit else None,
        "distance": 1.5 if onebit else None,
        "cosine": 0.98 if onebit else None,
        "largest_ulp": 2**24 if onebit else None,
        "barrier_error": None,
        "barrier_loss": None,
        "kept": [],
        "seeds": {name: json.dumps(key) for name, key in streams.seeds(run).items()},
        "process": f"node:{100 + run.replicate % 2}:1714564800",
        "host": "node",
        "device": "cpu",
        "hardware": "cpu, torch 2.13.0",
        "provenance": json.dumps(PROVENANCE, sort_keys=True),
        "fingerprint": "f00d" * 4,
    }
    assert not set(changes) - set(row), f"no such column: {set(changes) - set(row)}"
    return row | changes


def diverged(fake: Fake) -> dict[str, Any]:
    """The row of a run whose loss left the numbers."""
    examples, classes = logits(fake.run).shape
    return record(
        fake,
        outcome="diverged",
        accuracy=None,
        cross_entropy=None,
        logits=np.full((examples, classes), np.nan, np.float32),
        predictions=np.zeros(examples, np.int32),
    )


def fill(store: Any, fakes: Iterable[Fake], **changes: Any) -> None:
    """Commit a record for each planned run, and the labels they were tested on."""
    for fake in fakes:
        row = record(fake, **changes)
        store.commit(row)
        store.put_labels(row["labels_fingerprint"], labels(*np.shape(row["logits"])))


def failure(fake: Fake, attempt: int = 1, outcome: str = "out_of_memory") -> dict[str, Any]:
    """The row of an attempt that left no record."""
    run = fake.run
    return {
        "id": run.id,
        "source": fake.source,
        "architecture": run.architecture,
        "dataset": str(run.dataset),
        "trainer": run.trainer,
        "replicate": run.replicate,
        "attempt": attempt,
        "outcome": outcome,
        "message": "CUDA out of memory: tried to allocate 2.00 GiB",
        "traceback": "Traceback (most recent call last):\n  ...\nOutOfMemoryError: tried to allocate 2.00 GiB",
        "log_tail": "epoch 3 of 6",
        "started": STARTED,
        "finished": STARTED + datetime.timedelta(seconds=2),
        "host": "node",
        "device": "cpu",
        "specification": run.specification,
    }


def _hash(*parts: object) -> str:
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()
