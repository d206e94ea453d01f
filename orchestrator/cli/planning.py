"""``plan``: what would run, what is done, what is missing and how long it would take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator import catalog
from orchestrator.cli import output
from orchestrator.cli.cells import cell_names, cell_values, headline, legend, listed, until_values
from orchestrator.cli.options import Study, data_option, examples, gpus_option, json_option, study_options
from orchestrator.plan import Plan, Planned
from orchestrator.store import Store
from protocols.sources import HELD

NAMES = ("trainer", "architecture", "dataset", "varies")
COUNTS = (("planned", "right"), ("done", "right"), ("missing", "right"))

LOGITS_WORTH_SAYING = 100_000_000
"""Bytes from which on the logits of all missing runs are mentioned."""

LINES = 40
"""Of more cells than this, those of a group share a line."""

Key = tuple[str, str, str, str, str]


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


def kept_bytes(plan: Plan) -> int:
    """How large the files are that the missing runs will leave beside their records."""
    if not plan.protocol.keep:
        return 0
    from orchestrator.records import kept_bytes

    sizes = {entry.group: kept_bytes(entry.run, entry.network) for entry in plan.missing}
    return sum(sizes[entry.group] for entry in plan.missing)


def logits_bytes(plan: Plan) -> int:
    """About how much of the missing runs' records will be logits."""
    from orchestrator.records import logits_bytes

    sizes: dict[str, int] = {}
    for entry in plan.missing:
        if entry.group not in sizes:
            spec = entry.run.dataset
            kept, _ = catalog.kept_logits(catalog.dataset(spec.name), spec)
            sizes[entry.group] = logits_bytes(entry.run, kept)
    return sum(sizes[entry.group] for entry in plan.missing)


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
        "further": plan.further,
        "until": until_values(plan.protocol),
        "unplanned": plan.unplanned,
        "corrupt": dict(plan.corrupt),
        "device_seconds": seconds,
        "kept_bytes": kept_bytes(plan),
        "logits_bytes": logits_bytes(plan),
        "cells": cells,
        "runs": [
            {"id": entry.id, "source": entry.source, "group": entry.group, "replicate": entry.run.replicate}
            for entry in plan.planned
        ],
    }


def _print_plan(study: Study, plan: Plan, seconds: float | None) -> None:
    click.echo(headline(study, plan) + "\n")
    names = cell_names(plan)
    if len(names) > LINES:
        _print_groups(plan, names)
    else:
        rows = [
            (*names[key], f"{entries[0].parameters:,}", *_counts(plan, entries))
            for key, entries in plan.cells().items()
        ]
        output.print_table([*NAMES, ("parameters", "right"), *COUNTS], rows)
    for line in legend(plan):
        output.print_wrapped(line)
    if plan.growing:
        click.echo()
        output.print_wrapped(f"Replicates: {plan.protocol.until}.")
    if plan.missing:
        known = "not known before some are done"
        if seconds is not None:
            known = f"about {output.duration(seconds)} of one device, by those that are done"
        click.echo(f"\nTime for the missing runs: {known}.")
    if (size := logits_bytes(plan)) > LOGITS_WORTH_SAYING:
        click.echo(f"Their records will hold logits: about {output.size(size)}.")
    if size := kept_bytes(plan):
        click.echo(f"They will keep {listed(plan.protocol.keep)}: at most {output.size(size)}.")


def _print_groups(plan: Plan, names: Mapping[Key, Sequence[str]]) -> None:
    """One line a group, with all that varies in it."""
    groups: dict[tuple[str, ...], list[Planned]] = defaultdict(list)
    for key, entries in plan.cells().items():
        groups[tuple(names[key][:3])] += entries
    rows = [
        (*place, listed(entry.source for entry in entries), *_counts(plan, entries))
        for place, entries in groups.items()
    ]
    output.print_table([*NAMES, *COUNTS], rows)
    for kind in sorted({entry.run.library for entry in plan.planned} - {HELD}):
        click.echo(f"Where the library varies: by {kind}.")


def _counts(plan: Plan, entries: Sequence[Planned]) -> tuple[str, str, str]:
    """How many runs are planned, done and missing."""
    done = sum(entry.id in plan.done for entry in entries)
    return f"{len(entries):,}", f"{done:,}", f"{len(entries) - done:,}"
