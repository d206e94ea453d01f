"""``status``: how far a study is."""

from __future__ import annotations

import textwrap
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import click

from orchestrator.cli import output
from orchestrator.cli.cells import cell_names, cell_values, headline, legend
from orchestrator.cli.options import Study, examples, json_option, study_options
from orchestrator.plan import Plan, Planned
from orchestrator.store import Store
from orchestrator.store.schema import FAILURE_OUTCOMES

SHOWN = 10
"""How many running or failed runs are named in the text."""


@click.command(
    epilog=examples(
        "sweep.py status quickstart",
        "sweep.py status quickstart --store results/ --json",
    )
)
@study_options
@json_option
def status(study: Study, as_json: bool) -> int:
    """Count runs by outcome, cell by cell.

    A failed run is a missing one whose newest attempt failed; a running one may also be interrupted.
    """
    store = study.store()
    found = study.plan(store)
    values = _status_values(study, found, store)
    if as_json:
        output.print_json(values)
    else:
        _print_status(found, values, headline(study, found))
    return output.corrupt_lines(found.corrupt)


def _status_values(study: Study, plan: Plan, store: Store) -> dict[str, Any]:
    missing = {entry.id: entry for entry in plan.missing}
    records = store.table(["id", "outcome"], plan.done)
    outcomes = dict(zip(records["id"].to_pylist(), records["outcome"].to_pylist(), strict=True))
    failures = [row for row in store.failures().to_pylist() if row["id"] in missing]
    newest = {row["id"]: row for row in sorted(failures, key=lambda row: row["attempt"])}
    live = {row["id"]: row for row in store.live().to_pylist() if row["id"] in missing}
    cells = []
    for key, entries in plan.cells().items():
        ids = [entry.id for entry in entries]
        ended = Counter(outcomes[id] for id in ids if id in outcomes)
        ended.update(newest[id]["outcome"] for id in ids if id in newest)
        cells.append(
            {
                **cell_values(key, entries),
                "planned": len(ids),
                "missing": sum(id in missing for id in ids),
                "running": sum(id in live for id in ids),
                "outcomes": dict(ended),
            }
        )
    total: Counter[str] = Counter()
    for cell in cells:
        total.update(cell["outcomes"])
    return {
        "protocol": plan.protocol.name,
        "store": study.store_url,
        "planned": len(plan.planned),
        "done": len(plan.done),
        "missing": len(plan.missing),
        "running": len(live),
        "outcomes": dict(total),
        "corrupt": dict(plan.corrupt),
        "cells": cells,
        "live": [_live_values(row, missing[id]) for id, row in live.items()],
        "failures": [_failure_values(row, missing[id]) for id, row in newest.items()],
    }


def _run_values(entry: Planned) -> dict[str, Any]:
    run = entry.run
    return {
        "id": entry.id,
        "source": entry.source,
        "architecture": run.architecture,
        "dataset": str(run.dataset),
        "trainer": run.trainer,
        "replicate": run.replicate,
    }


def _live_values(row: dict[str, Any], entry: Planned) -> dict[str, Any]:
    return {
        **_run_values(entry),
        "attempt": row["attempt"],
        "epochs": entry.run.recipe.epochs,
        "epochs_done": row["epochs"],
        "updated": row["updated"].isoformat(),
    }


def _failure_values(row: dict[str, Any], entry: Planned) -> dict[str, Any]:
    return {**_run_values(entry), "attempt": row["attempt"], "outcome": row["outcome"], "message": row["message"]}


def _print_status(plan: Plan, values: dict[str, Any], line: str) -> None:
    click.echo(line + "\n")
    names = cell_names(plan)
    rows = []
    for key, cell in zip(plan.cells(), values["cells"], strict=True):
        ended = cell["outcomes"]
        failed = sum(number for outcome, number in ended.items() if outcome in FAILURE_OUTCOMES)
        counts = (cell["planned"], ended.get("ok", 0), ended.get("diverged", 0), cell["missing"])
        rows.append((*names[key], *counts, cell["running"], failed))
    headings = ("planned", "ok", "diverged", "missing", "running", "failed")
    numbers = [(heading, "right") for heading in headings]
    output.print_table(["trainer", "architecture", "dataset", "varies", *numbers], rows)
    for line in legend(plan):
        output.print_wrapped(line)
    for title, lines in (
        ("Running, or interrupted", [_live_line(row) for row in values["live"]]),
        ("Newest failure of each run that is missing", [_failure_line(row) for row in values["failures"]]),
    ):
        if lines:
            click.echo(f"\n{title}:")
            for text in lines[:SHOWN]:
                click.echo("  " + textwrap.shorten(text, output.WIDTH - 2, placeholder=" ..."))
            if len(lines) > SHOWN:
                click.echo(f"  and {len(lines) - SHOWN:,} more (--json lists all)")


def _run_name(row: dict[str, Any]) -> str:
    return " ".join((row["trainer"], row["architecture"], row["dataset"], row["source"], f"#{row['replicate']}"))


def _live_line(row: dict[str, Any]) -> str:
    age = (datetime.now(UTC) - datetime.fromisoformat(row["updated"])).total_seconds()
    epochs = f"epoch {row['epochs_done']} of {row['epochs']}"
    return f"{_run_name(row)}: {epochs}, attempt {row['attempt']}, {output.duration(max(age, 0))} ago"


def _failure_line(row: dict[str, Any]) -> str:
    message = " ".join(row["message"].split())
    return f"{_run_name(row)}: attempt {row['attempt']}: {row['outcome']}: {message}"
