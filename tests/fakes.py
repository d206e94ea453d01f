"""Plans of runs for the fake trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.plan import Plan, plan
from orchestrator.store import Store
from protocols.contract import Dataset
from protocols.protocol import Protocol, grid
from protocols.recipe import Recipe
from protocols.run import Run
from tests.fake_trainer import blobs
from trainers.datasets import prepare

TRAINER = "tests.fake_trainer:trainer"


def protocol(sources: Sequence[str] = ("init", "onebit"), *, replicates: int = 2, **recipe: Any) -> Protocol:
    """Cells of the fake trainer; the control comes by itself. ``library`` is a field of the protocol."""
    library = recipe.pop("library", "order")
    trainers = recipe.pop("trainers", (TRAINER,))
    return Protocol(
        name="fake",
        summary="runs that take no time",
        cells=grid(
            sources=sources,
            architectures=("tests.fake_trainer:architecture",),
            datasets=("tests.fake_trainer:blobs",),
            trainers=trainers,
            recipe=Recipe(**{"epochs": 3, "batch_size": 15} | recipe),
        ),
        replicates=replicates,
        library=library,
    )


def planned(store: Store, *sources: str, **changes: Any) -> Plan:
    """The plan of :func:`protocol` against a store."""
    return plan(protocol(sources, **changes), store)


def runs_of(plan: Plan, source: str) -> list[Run]:
    """The runs of one cell, by replicate."""
    return [entry.run for entry in plan.planned if entry.source == source]


def blobs_data(run: Run, cache: Any) -> Dataset:
    """The fake dataset, prepared."""
    return prepare(blobs, run.dataset, None, cache)
