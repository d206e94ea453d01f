"""``plan``: what would run, what is done, what is missing and how long it would take."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator import catalog
from orchestrator.cli import output
from orchestrator.cli.cells import cell_names, cell_values, headline
from orchestrator.cli.options import Study, data_option, examples, gpus_option, json_option, study_options
from orchestrator.plan import Plan
from orchestrator.store import Store


@click.command(
    epilog=examples(
        "sweep.py plan quickstart",
        "sweep.py plan quickstart --set replicates=10 --only source=init,shuffle",
        "sweep.py plan summers2021-table1 --gpus-per-run 1 --json",
    )
)
@study_options
@gpus_option
@data_option
@json_option
def plan(study: Study, gpus_per_run: float, data_root: Path | None, as_json: bool) -> int:
    """Show what is planned, done and missing.

    Trains nothing, writes nothing. With --data-root on the command line it also looks whether the data are there.
    """
    store = study.store()
    found = study.plan(store, gpus_per_run=gpus_per_run)
    # A root from the environment may be another machine's, where the study is to run.
    if click.get_current_context().get_parameter_source("data_root") is ParameterSource.COMMANDLINE:
        for spec in {entry.run.dataset: None for entry in found.planned}:
            catalog.check_data(spec, data_root)
    seconds = remaining_seconds(found, store)
    if as_json:
        output.print_json(_plan_values(study, found, seconds))
    else:
        _print_plan(study, found, seconds)
    return output.corrupt_lines(found.corrupt)


def remaining_seconds(plan: Plan, store: Store) -> float | None:
    """How long one device would take for what is missing, by the mean of what is done in the same group.

    Returns:
        Seconds, or None where some group with missing runs has no finished run.
    """
    table = store.table(["id", "seconds"], plan.done)
    took = dict(zip(table["id"].to_pylist(), table["seconds"].to_pylist(), strict=True))
    done: dict[str, list[float]] = defaultdict(list)
    for entry in plan.planned:
        if entry.id in took:
            done[entry.group].append(took[entry.id])
    if any(entry.group not in done for entry in plan.missing):
        return None
    return sum(sum(done[entry.group]) / len(done[entry.group]) for entry in plan.missing)


def _plan_values(study: Study, plan: Plan, seconds: float | None) -> dict[str, Any]:
    cells = []
    for key, entries in plan.cells().items():
        done = sum(entry.id in plan.done for entry in entries)
        counts = {"planned": len(entries), "done": done, "missing": len(entries) - done}
        cells.append({**cell_values(key, entries), **counts, "parameters": entries[0].parameters})
    return {
        "protocol": plan.protocol.name,
        "store": study.store_url,
        "planned": len(plan.planned),
        "done": len(plan.done),
        "missing": len(plan.missing),
        "unplanned": plan.unplanned,
        "corrupt": dict(plan.corrupt),
        "device_seconds": seconds,
        "cells": cells,
        "runs": [
            {"id": entry.id, "source": entry.source, "group": entry.group, "replicate": entry.run.replicate}
            for entry in plan.planned
        ],
    }


def _print_plan(study: Study, plan: Plan, seconds: float | None) -> None:
    click.echo(headline(study, plan) + "\n")
    names = cell_names(plan)
    rows = []
    for key, entries in plan.cells().items():
        done = sum(entry.id in plan.done for entry in entries)
        rows.append((*names[key], f"{entries[0].parameters:,}", len(entries), done, len(entries) - done))
    numbers = [(heading, "right") for heading in ("parameters", "planned", "done", "missing")]
    output.print_table(["trainer", "architecture", "dataset", "varies", *numbers], rows)
    if plan.missing:
        known = "not known before some are done"
        if seconds is not None:
            known = f"about {output.duration(seconds)} of one device, by those that are done"
        click.echo(f"\nTime for the missing runs: {known}.")
