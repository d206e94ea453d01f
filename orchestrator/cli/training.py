"""``run``: train what is missing. ``check``: hold everything, train twice, compare."""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator import catalog
from orchestrator.adaptive import Looking
from orchestrator.cli import output
from orchestrator.cli.amounts import Duration, Memory
from orchestrator.cli.options import (
    Study,
    data_option,
    examples,
    finite,
    gpus_option,
    protocol_options,
    study_options,
)
from orchestrator.cli.reporting import publish
from orchestrator.cli.storing import compact_many
from orchestrator.plan import Plan
from orchestrator.plan import plan as make_plan
from orchestrator.store import Store, open_store
from protocols.errors import UserError
from protocols.overrides import select_cells
from protocols.protocol import Protocol
from protocols.sources import CONTROL

if TYPE_CHECKING:
    from orchestrator.launch import Result

INTERRUPTED = 130
OUT_OF_TIME = 3
"""Exit code of a sweep that its time budget ended."""

RETRIES = ("all", "failed", "none")


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of how runs are scheduled; none of them changes a bit of any result."""
    for option in (
        click.option(
            "--retries",
            type=click.IntRange(min=0),
            default=1,
            show_default=True,
            help="How often a run that raised, crashed or hung is tried again.",
        ),
        click.option(
            "--patience",
            type=Duration(),
            default="1h",
            show_default=True,
            help="Time without a finished epoch after which a run counts as hung.",
        ),
        click.option(
            "--checkpoint-every",
            type=click.FloatRange(min=0),
            default=60.0,
            show_default=True,
            callback=finite,
            metavar="SECONDS",
            help="Time between two checkpoints of a run; 0: every epoch.",
        ),
        click.option(
            "--decode-threads",
            type=click.IntRange(min=1),
            help="Threads that decode photographs for each run; default: its share of the machine's cores.",
        ),
        click.option(
            "--max-concurrent",
            type=click.IntRange(min=1),
            help="Runs side by side; default: what the cluster has room for.",
        ),
        click.option(
            "--memory-per-run",
            type=Memory(),
            help="Memory that a node must have for each run, and a run may take, like 4GB; default: what there is.",
        ),
        data_option,
        gpus_option,
    ):
        command = option(command)
    return command


sweep_options = (
    click.option(
        "--time-budget",
        type=Duration(),
        help="End after this long, like 3h30m, and begin no run that is known not to end by then.",
    ),
    click.option(
        "--first",
        multiple=True,
        metavar="KEY=VALUE,...",
        help="Train some cells before all others, named as --only names them; those of the first --first come first.",
    ),
    click.option(
        "--retry",
        type=click.Choice(RETRIES),
        default="all",
        show_default=True,
        help="Of what is missing, train all, only the runs with a failed attempt, or none of those.",
    ),
    click.option(
        "--lease-seconds",
        type=click.FloatRange(min=1),
        default=60.0,
        show_default=True,
        callback=finite,
        metavar="SECONDS",
        help="After so long without a sign of life another sweep may train what this one was training.",
    ),
)
"""Options of ``run`` alone."""


def _all(options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """A decorator that is several."""
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


@click.command(
    epilog=examples(
        "sweep.py run quickstart",
        "sweep.py run quickstart --set replicates=10 --only source=init,onebit",
        "sweep.py run summers2021-table1 --set dataset=mnist --set library=order --data-root ~/data",
        "sweep.py run summers2021-table1 --first source=all --time-budget 11h30m",
        "sweep.py run quickstart --retry failed",
    )
)
@study_options
@launch_options
@_all(sweep_options)
def run(
    study: Study,
    gpus_per_run: float,
    data_root: Path | None,
    time_budget: float | None,
    first: tuple[str, ...],
    retry: str,
    **options: Any,
) -> int:
    """Train what is missing, then report.

    The same command again resumes. Exits 0 only if every planned run is done, 1 if some are not, 3 if the time budget
    was used up before, and 130 after Ctrl-C or a signal.
    """
    study = dataclasses.replace(study, protocol=prioritised(study.protocol, first))
    plan = study.plan(study.store(), gpus_per_run=gpus_per_run)
    if plan.growing and not plan.missing:  # a sweep that was stopped may not have come to its last looks
        Looking(plan, study.store()).after(())
        plan = study.plan(study.store(), gpus_per_run=gpus_per_run)
    if not plan.missing:
        click.echo(f"Nothing to train: all {output.count(len(plan.planned), 'run')} are done.\n")
        publish(study, plan, study.store())
        return 0
    plan = chosen(plan, study.store(), retry)
    if not plan.missing:
        click.echo(f"Nothing to train with --retry {retry}: {_left_out(plan, retry)}\n")
        publish(study, study.plan(study.store()), study.store())
        return 1
    _check_needs(plan, data_root)
    store = study.store(create=True)
    store.probe()
    store.tidy()

    from orchestrator.launch import sweep

    options |= {"time_budget": math.inf if time_budget is None else time_budget}
    result = sweep(plan, store, data_root=data_root, gpus_per_run=gpus_per_run, **_given(options))
    if result.interrupted:
        click.echo(f"Interrupted with {_progress(result)}; the same command again resumes.", err=True)
        return INTERRUPTED
    compact_many(store)
    after = study.plan(store)
    try:
        publish(study, after, store)
    except (UserError, OSError) as error:  # What was trained counts, whether or not it can be shown.
        click.echo(f"There is no report: {error}", err=True)
    # The store has the last word: records may have been withdrawn since they were counted.
    done = len(after.planned) - len(after.missing)
    result = dataclasses.replace(result, planned=len(after.planned), done=done)
    click.echo(f"\n{_verdict(result)}")
    if result.complete:
        return 0
    return OUT_OF_TIME if result.out_of_time else 1


@click.command(
    epilog=examples(
        "sweep.py check quickstart",
        "sweep.py check summers2021-table1 --set recipe.epochs=2 --gpus-per-run 1",
    )
)
@protocol_options
@launch_options
def check(protocol: Protocol, gpus_per_run: float, data_root: Path | None, **options: Any) -> int:
    """Hold everything and train twice: the same bits?

    Each group's control is trained in two processes, with the whole recipe; --set recipe.epochs=2 shortens it.

    The records go to a temporary store. Exits 0 only if every group is held.
    """
    from orchestrator.analysis import load
    from orchestrator.analysis.controls import HELD

    with tempfile.TemporaryDirectory(prefix="noisegrid-check-") as folder:
        store = open_store(folder, create=True)
        plan = make_plan(controls(protocol), store)
        _check_needs(plan, data_root)

        from orchestrator.launch import sweep

        result = sweep(plan, store, data_root=data_root, gpus_per_run=gpus_per_run, **_given(options))
        if result.interrupted:
            click.echo("Interrupted; the temporary store is gone.", err=True)
            return INTERRUPTED
        swept = load(store, plan.protocol, plan.planned)
        verdicts = swept.verdicts
        rows = [(swept.group_title(group), verdict.verdict, verdict.reason) for group, verdict in verdicts.items()]
    output.print_table(["group", "control", ""], rows)
    for message in sorted(set(result.failed.values())):
        click.echo(f"failed: {message}")
    held = sum(verdict.verdict == HELD for verdict in verdicts.values())
    click.echo(f"\n{held} of {output.count(len(verdicts), 'group')} held.")
    return 0 if held == len(verdicts) else 1


def controls(protocol: Protocol) -> Protocol:
    """The protocol with nothing but two replicates of each group's control."""
    cells = dict.fromkeys(dataclasses.replace(cell, source=CONTROL) for cell in protocol.cells)
    return dataclasses.replace(protocol, cells=tuple(cells), control_replicates=2)


def prioritised(protocol: Protocol, first: Sequence[str]) -> Protocol:
    """The protocol with some cells before all others.

    Args:
        protocol: whose cells.
        first: which, as ``--only`` names them; those that the first text names come first.

    Raises:
        UserError: a text names no cell.
    """
    for text in reversed(first):
        highest = max(cell.priority for cell in protocol.cells)
        try:
            named = dict.fromkeys(select_cells(protocol, (text,)).cells)
        except UserError as error:
            raise UserError(str(error).replace("--only", "--first")) from None
        # A control need not be among the cells to be named.
        cells = dict.fromkeys((*protocol.cells, *named))
        raised = (dataclasses.replace(cell, priority=highest + 1) if cell in named else cell for cell in cells)
        protocol = dataclasses.replace(protocol, cells=tuple(raised))
    return protocol


def chosen(plan: Plan, store: Store, retry: str) -> Plan:
    """The plan with fewer missing runs: those with a failed attempt (``failed``), or those without one (``none``).

    With ``failed`` its cells do not grow either: the looks that are due wait for a launch that trains what they grant.
    """
    if retry == "all":
        return plan
    failed = set(store.failures()["id"].to_pylist())
    missing = tuple(entry for entry in plan.missing if (entry.id in failed) == (retry == "failed"))
    return dataclasses.replace(plan, missing=missing, growing=() if retry == "failed" else plan.growing)


def _left_out(plan: Plan, retry: str) -> str:
    missing = output.count(len(plan.planned) - len(plan.done), "missing run")
    return f"none of {missing} has failed." if retry == "failed" else f"of {missing}, each has failed."


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Options without those that were left out."""
    return {name: value for name, value in options.items() if value is not None}


def _check_needs(plan: Plan, data_root: Path | None) -> None:
    """Check that frameworks and data are there, before anything is written or started."""
    for trainer in sorted({entry.run.trainer for entry in plan.missing}):
        catalog.require(trainer)
    for spec in {entry.run.dataset: None for entry in plan.missing}:
        catalog.check_data(spec, data_root)
        if catalog.dataset(spec.name).photographs:  # packed here, where a progress bar and a broken image are seen
            catalog.prepare(spec, data_root)


def _progress(result: Result) -> str:
    return f"{result.done:,} of {output.count(result.planned, 'planned run')} done"


def _verdict(result: Result) -> str:
    """How a launch ended, in one sentence."""
    took = output.duration(result.seconds)
    if result.complete:
        return f"All {output.count(result.planned, 'planned run')} are done (this took {took})."
    if result.stopped:
        return f"Given up with {_progress(result)}, since {result.stopped}"
    failed = f", {len(result.failed):,} failed" if result.failed else ""
    if result.out_of_time:
        return (
            f"The time budget is used up with {_progress(result)}{failed}; about {output.duration(result.left)} are "
            "left, on as many slots, and the same command again resumes."
        )
    return f"{_progress(result).capitalize()}{failed or ', 0 failed'} (see status); the same command tries again."
