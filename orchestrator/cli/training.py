"""``run``: train what is missing. ``check``: hold everything, train twice, compare."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator import catalog
from orchestrator.cli import output
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
from orchestrator.plan import Plan
from orchestrator.plan import plan as make_plan
from orchestrator.store import open_store
from protocols.protocol import Protocol
from protocols.sources import CONTROL

if TYPE_CHECKING:
    from orchestrator.launch import Result

INTERRUPTED = 130


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of how runs are scheduled; none of them changes a bit of any result."""
    for option in (
        click.option(
            "--retries",
            type=click.IntRange(min=0),
            default=1,
            show_default=True,
            help="How often a run that failed is tried again.",
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
        data_option,
        gpus_option,
    ):
        command = option(command)
    return command


@click.command(
    epilog=examples(
        "sweep.py run quickstart",
        "sweep.py run quickstart --set replicates=10 --only source=init,onebit",
        "sweep.py run summers2021-table1 --set dataset=mnist --set library=order --data-root ~/data",
    )
)
@study_options
@launch_options
def run(study: Study, gpus_per_run: float, data_root: Path | None, **options: Any) -> int:
    """Train what is missing, then report.

    The same command again resumes. Exits 0 only if every planned run is done.
    """
    plan = study.plan(study.store(), gpus_per_run=gpus_per_run)
    if not plan.missing:
        click.echo(f"Nothing to train: all {output.count(len(plan.planned), 'run')} are done.\n")
        publish(study, plan, study.store())
        return 0
    _check_needs(plan, data_root)
    store = study.store(create=True)
    store.probe()
    store.tidy()

    from orchestrator.launch import sweep

    result = sweep(plan, store, data_root=data_root, gpus_per_run=gpus_per_run, **options)
    if result.interrupted:
        click.echo(f"Interrupted with {_progress(result)}; the same command again resumes.", err=True)
        return INTERRUPTED
    publish(study, study.plan(store), store)
    click.echo(f"\n{_verdict(result)}")
    return 0 if result.complete else 1


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

        result = sweep(plan, store, data_root=data_root, gpus_per_run=gpus_per_run, **options)
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
    if result.hopeless:
        return f"Given up with {_progress(result)}, since every run failed alike: {result.hopeless}"
    return (
        f"{_progress(result).capitalize()}, {len(result.failed):,} failed (see status); the same command tries again."
    )
