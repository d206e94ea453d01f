"""The runs of a sweep, one row each: what was planned joined with what was recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

import pandas as pd

from orchestrator.store import Store
from protocols.run import Run
from protocols.sources import ALL, CONTROL, SOURCES, label_sources, source_number

IDENTITY = (
    *("id", "group", "source", "library", "asynchrony", "trainer", "architecture", "dataset"),
    *("base_seed", "replicate"),
)
"""What a run is, from its plan or its record."""

RESULTS = (
    *("outcome", "accuracy", "cross_entropy", "initial_digest", "final_digest", "labels_fingerprint"),
    *("logits_precision", "passes", "staleness_mean", "staleness_max"),
    *("onebit_step", "weights_changed", "weights_total", "predictions_changed", "first_differing_step"),
    *("distance", "cosine", "largest_ulp", "barrier_error", "barrier_loss", "kept"),
    *("attempt", "resumed_epochs", "images_per_second", "seconds", "train_seconds", "started", "finished"),
    *("process", "host", "device", "hardware", "fingerprint", "provenance"),
)
"""What a record adds; missing for a run that is not finished."""


class Planned(Protocol):
    """One run of a plan, as :mod:`orchestrator.plan` gives it."""

    @property
    def run(self) -> Run: ...

    @property
    def source(self) -> str: ...


def read_runs(store: Store, planned: Sequence[Planned] | None = None) -> pd.DataFrame:
    """One row a run: ``IDENTITY``, ``RESULTS``, ``specification`` and ``recipe``.

    ``recipe`` is what tells a group from others of the same trainer, architecture and dataset, beside the base seed:
    text such as ``epochs=20, momentum=0.9``, empty where there is nothing to tell.

    Args:
        store: where the records are.
        planned: the runs that should be there, finished or not; None: every record.
    """
    ids = None if planned is None else [entry.run.id for entry in planned]
    runs: pd.DataFrame = store.table([*IDENTITY, *RESULTS, "specification"], ids).to_pandas()
    if planned is not None:
        plan = pd.DataFrame([_identity(entry) for entry in planned], columns=[*IDENTITY, "specification"])
        # One run may be planned twice, under two cells that vary the same sources.
        runs = plan.drop_duplicates("id").merge(runs[["id", *RESULTS]], on="id", how="left")
    return runs.assign(recipe=_recipes(runs))


def source_order(source: str) -> tuple[int, list[int], list[int], str]:
    """Sorts the control first, then single sources and combinations by their numbers, and ``all`` last.

    One source with several choices, such as ``onebit[step=10]``, is sorted by the numbers in them.
    """
    if source in (CONTROL, ALL):
        return (0 if source == CONTROL else len(SOURCES) + 1), [], [], source
    numbers = [source_number(name) for name in label_sources(source)]
    choices = source.partition("[")[2]
    return len(numbers), numbers, [int(number) for number in re.findall(r"\d+", choices)], source


def _identity(entry: Planned) -> dict[str, Any]:
    run = entry.run
    return {
        "id": run.id,
        "group": run.group,
        "source": entry.source,
        "library": run.library,
        "asynchrony": run.asynchrony,
        "trainer": run.trainer,
        "architecture": run.architecture,
        "dataset": str(run.dataset),
        "base_seed": run.base_seed,
        "replicate": run.replicate,
        "specification": run.specification,
    }


def _recipes(runs: pd.DataFrame) -> pd.Series:
    texts: dict[Any, str] = {}
    for _, alike in runs.drop_duplicates("group").groupby(["trainer", "architecture", "dataset"]):
        settings = {row.group: _settings(str(row.specification)) for row in alike.itertuples()}
        names = sorted({name for values in settings.values() for name in values})
        differing = [name for name in names if len({values.get(name) for values in settings.values()}) > 1]
        for group, values in settings.items():
            texts[group] = ", ".join(f"{name}={values.get(name, 'unset')}" for name in differing)
    return runs["group"].map(texts).astype(object)


def _settings(specification: str) -> dict[str, str]:
    """What decides a group's bits beside its trainer, architecture, dataset and base seed, as text."""
    values = json.loads(specification)
    settings = {
        name: "+".join(value) or "none" if isinstance(value, list) else str(value)
        for name, value in values["recipe"].items()
    }
    settings |= {"numerics": str(values["numerics"]), "data": values["dataset_fingerprint"][:12]}
    settings |= {"keep": "+".join(values["keep"]) or "nothing"}
    return settings | {module: version[:12] for module, version in values["code"]}
