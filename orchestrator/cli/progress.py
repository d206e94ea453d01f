"""``status``: how far a study is, once or until it is done."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click

from orchestrator.cli import output
from orchestrator.cli.cells import cell_names, cell_values, headline, legend
from orchestrator.cli.following import follow, watch
from orchestrator.cli.options import Study, examples, json_option, study_options
from orchestrator.naming import CellKey
from orchestrator.plan import Planned
from orchestrator.watch import view
from orchestrator.watch.cells import cell_key
from orchestrator.watch.measures import Measured
from orchestrator.watch.reading import Failed, Follower, Live, Status
from orchestrator.watch.sweeps import EITHER, INTERRUPTED, RUNNING, Active

SHOWN = 10
"""How many running or failed runs are named in the text."""


@click.command(
    epilog=examples(
        "sweep.py status quickstart",
        "sweep.py status quickstart --store results/ --json",
        "sweep.py status quickstart --follow",
    )
)
@study_options
@json_option
@click.option("--follow", "-f", "following", is_flag=True, help="Show it again and again until all runs are done.")
def status(study: Study, as_json: bool, following: bool) -> int:
    """Count runs by outcome, cell by cell; say when they will be done.

    A failed run is a missing one whose newest attempt failed. All is read from the store, so it works from any machine
    that sees it. With --follow, --json prints a line of JSON each time; exits 0 once all is done, 130 on Ctrl-C.
    """
    store = study.store()
    plan = study.plan(store)
    follower = Follower(plan, store, lambda: study.plan(store))
    if following:
        if as_json:
            return follow(
                follower, lambda found: click.echo(json.dumps(status_values(study, found), ensure_ascii=False))
            )
        return watch(follower, sweep_lines)
    found = follower.read()
    if as_json:
        output.print_json(status_values(study, found))
    else:
        _print_status(study, found)
    return output.corrupt_lines(found.corrupt)


def status_values(study: Study, status: Status) -> dict[str, Any]:
    """What ``--json`` prints; ``docs/watching.md`` says what it means."""
    failed: dict[CellKey, Counter[str]] = defaultdict(Counter)
    for run in status.failures:
        failed[cell_key(run.entry)][run.outcome] += 1
    cells = []
    total: Counter[str] = Counter()
    for key, entries in status.plan.cells().items():
        cell = status.cells[key]
        outcomes = Counter(status.measures.outcomes.get(key, {})) + failed[key]
        total += outcomes
        cells.append(
            {
                **cell_values(key, entries),
                "planned": cell.planned,
                "missing": cell.planned - cell.done,
                "running": cell.running,
                "outcomes": dict(outcomes),
                "seconds_left": status.forecast.cells[key],
                **_measured_values(status.measures.of(key, adaptive=entries[0].adaptive)),
            }
        )
    left = status.forecast.device_seconds
    return {
        "protocol": status.plan.protocol.name,
        "store": study.store_url,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "planned": status.planned,
        "done": status.done,
        "missing": status.planned - status.done,
        "running": sum(run.state != INTERRUPTED for run in status.live),
        "interrupted": sum(run.state == INTERRUPTED for run in status.live),
        "outcomes": dict(total),
        "seconds_left": status.forecast.remaining,
        "device_seconds_spent": dict(status.measures.device_seconds),
        "device_seconds_left": None if left is None else {status.measures.unit: left * status.measures.share},
        "images_per_second": status.images_per_second,
        "corrupt": dict(status.corrupt),
        "sweeps": [_sweep_values(sweep) for sweep in status.sweeps],
        "cells": cells,
        "live": [_live_values(run) for run in status.live],
        "failures": [_failure_values(run) for run in status.failures],
    }


def _measured_values(measured: Measured | None) -> dict[str, Any]:
    values: dict[str, Any] = {"n": 0 if measured is None else measured.n}
    for name in ("mean", "sd"):
        estimate = None if measured is None else getattr(measured, name)
        for end, attribute in (("", "value"), ("_low", "low"), ("_high", "high")):
            number = math.nan if estimate is None else getattr(estimate, attribute)
            values[f"accuracy_{name}{end}"] = number if math.isfinite(number) else None
    return values


def _sweep_values(sweep: Active) -> dict[str, Any]:
    return {
        "host": sweep.host,
        "pid": sweep.pid,
        "command": sweep.command,
        "since": sweep.since.isoformat(),
        "heartbeat_age": round(sweep.heard, 1),
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


def _live_values(run: Live) -> dict[str, Any]:
    return {
        **_run_values(run.entry),
        "state": run.state,
        "attempt": run.attempt,
        "epochs": run.entry.run.recipe.epochs,
        "epochs_done": run.epochs,
        "epoch_seconds": run.epoch_seconds,
        "updated": run.updated.isoformat(),
    }


def _failure_values(run: Failed) -> dict[str, Any]:
    ended = {
        "attempt": run.attempt,
        "outcome": run.outcome,
        "message": run.message,
        "finished": run.finished.isoformat(),
    }
    return {**_run_values(run.entry), **ended}


def _print_status(study: Study, status: Status) -> None:
    plan = status.plan
    click.echo(headline(study, plan))
    for line in summary(status):
        output.print_wrapped(line)
    click.echo()
    names = cell_names(plan)
    failed = Counter(cell_key(run.entry) for run in status.failures)
    rows = []
    for key in plan.cells():
        cell, outcomes = status.cells[key], status.measures.outcomes.get(key, {})
        counts = (cell.planned, outcomes.get("ok", 0), outcomes.get("diverged", 0), cell.planned - cell.done)
        left = "" if status.forecast.remaining is None else view.cell_left(cell, status.forecast)
        rows.append((*names[key], *counts, cell.running, failed[key], left))
    headings = ["trainer", "architecture", "dataset", "varies"]
    numbers = [(heading, "right") for heading in ("planned", "ok", "diverged", "missing", "running", "failed", "left")]
    # What never happened needs no room.
    shown = [number for number in range(11) if number not in (6, 10) or any(row[number] for row in rows)]
    columns: list[output.Column] = [*headings, *numbers]
    output.print_table([columns[number] for number in shown], [[row[number] for number in shown] for row in rows])
    for line in legend(plan):
        output.print_wrapped(line)
    for title, lines in _sections(status):
        if lines:
            click.echo(f"\n{title}:")
            for text in lines[:SHOWN]:
                click.echo("  " + textwrap.shorten(text, output.WIDTH - 2, placeholder=" ..."))
            if len(lines) > SHOWN:
                click.echo(f"  and {len(lines) - SHOWN:,} more (--json lists all)")


def summary(status: Status) -> list[str]:
    """What is known beside the counts: the sweeps at work, the time left, device time and speed."""
    parts = []
    if status.images_per_second:
        parts.append(f"{status.images_per_second:,.0f} images/s")
    if status.forecast.remaining is not None and not status.complete:
        parts.append(f"about {view.time_left(status.forecast.remaining)} left")
    parts += view.device_times(status.measures, status.forecast)
    sentence = ", ".join(parts)
    return [*sweep_lines(status), *([sentence[0].upper() + sentence[1:] + "."] if sentence else [])]


def sweep_lines(status: Status) -> list[str]:
    """The sweeps at work, one a line."""
    return [
        f"Running on {sweep.host} (process {sweep.pid}) since {sweep.since.astimezone():%Y-%m-%d %H:%M}, last heard of "
        f"{output.duration(sweep.heard)} ago."
        for sweep in status.sweeps
    ]


def _sections(status: Status) -> Iterator[tuple[str, list[str]]]:
    now = datetime.now(UTC)
    for state in (RUNNING, EITHER, INTERRUPTED):
        yield state.capitalize(), [_live_line(run, now) for run in status.live if run.state == state]
    outcomes = Counter(run.outcome for run in status.failures)
    counts = ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(outcomes.items()))
    newest = sorted(status.failures, key=lambda run: run.finished, reverse=True)
    yield f"Failed ({counts}), the newest first", [_failure_line(run) for run in newest]


def _run_name(entry: Planned) -> str:
    run = entry.run
    return " ".join((entry.id[:8], run.trainer, run.architecture, str(run.dataset), entry.source, f"#{run.replicate}"))


def _live_line(run: Live, now: datetime) -> str:
    age = max((now - run.updated).total_seconds(), 0)
    epochs = f"epoch {run.epochs} of {run.entry.run.recipe.epochs}"
    return f"{_run_name(run.entry)}: {epochs}, attempt {run.attempt}, {output.duration(age)} ago"


def _failure_line(run: Failed) -> str:
    message = " ".join(run.message.split())
    return f"{_run_name(run.entry)}: attempt {run.attempt}: {run.outcome}: {message}"
