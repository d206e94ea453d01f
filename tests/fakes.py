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

_FIELDS = ("library", "asynchrony", "keep", "isolation", "between_runs")

TRAINER = "tests.fake_trainer:trainer"


def protocol(sources: Sequence[str] = ("init", "onebit"), *, replicates: int = 2, **recipe: Any) -> Protocol:
    """Cells of the fake trainer; the control comes by itself. Fields of the protocol are told from the recipe's."""
    trainers = recipe.pop("trainers", (TRAINER,))
    fields = {name: recipe.pop(name) for name in _FIELDS if name in recipe}
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
        **fields,
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
