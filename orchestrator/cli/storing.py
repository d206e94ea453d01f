"""``compact``, ``verify``, ``export`` and ``import``: what is done with a store as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from orchestrator.cli import output
from orchestrator.cli.options import Study, examples, json_option, store_option, study_options
from orchestrator.store import Store, StoreError, open_store
from protocols.errors import UserError

MANY = 1000
"""Loose records from which on ``run`` and ``import`` compact by themselves."""

Report = Callable[[int, int], None]


@click.command(epilog=examples("sweep.py compact", "sweep.py compact --store results/"))
@store_option
def compact(store: str) -> int:
    """Make a store of many records fast to read.

    Repeats all but the long columns of every record in a few large files under compacted/. The records themselves stay
    as they are. It can be done at any time, also while sweeps run; run does it by itself where there are many.
    """
    from orchestrator.store.compaction import compact

    opened = _existing(store)
    with _progress("compacting") as report:
        done = compact(opened, report=report)
    assert done is not None
    click.echo(
        f"{output.count(done.records, 'record')} in {output.count(done.parts, 'part')} under {opened.url}/compacted, "
        f"{done.added:,} of them new."
    )
    if done.unreadable:
        click.echo(
            f"{output.count(done.unreadable, 'file')} of records/ cannot be read and were left out (see verify)."
        )
    return 0


def compact_many(store: Store) -> None:
    """Compact a store that has many loose records; a store where that fails is as good as before.

    What ``run`` does at its end.
    """
    from orchestrator.store.compaction import compact

    try:
        with _progress("compacting") as report:
            compact(store, at_least=MANY, report=report)
    except StoreError as error:
        click.echo(f"warning: the store was not compacted: {error}", err=True)


@click.command(
    epilog=examples(
        "sweep.py verify",
        "sweep.py verify --store results/ --json",
        "sweep.py verify --set-aside",
    )
)
@store_option
@click.option("--set-aside", is_flag=True, help="Move damaged records to corrupt/, so that run trains them again.")
@json_option
def verify(store: str, set_aside: bool, as_json: bool) -> int:
    """Check every byte of a store.

    Every record against its checksum and its run's specification, its columns against each other, and kept tensors,
    labels, references, checkpoints and the files of compacted/ as well. Each problem is named with what mends it.

    Changes nothing, unless --set-aside is given. Exits 1 if there is a problem.
    """
    from orchestrator.store.verify import verify

    opened = _existing(store)
    with _progress("checking") as report:
        found = verify(opened, report)
    moved = []
    if set_aside:
        for entry, fault in found.unreadable.items():
            opened.condemn(entry, fault)
            moved.append(opened.set_aside(entry.name.removesuffix(".parquet")))
    if as_json:
        problems = [dataclasses.asdict(problem) for problem in found.problems]
        output.print_json({"store": opened.url, "checked": found.checked, "problems": problems, "set_aside": moved})
        return int(bool(problems))
    bad = {kind: sum(problem.kind == kind for problem in found.problems) for kind in found.checked}
    rows = [(f"{kind}/", f"{count:,}", f"{bad[kind]:,}") for kind, count in found.checked.items() if count or bad[kind]]
    output.print_table(["", ("checked", "right"), ("problems", "right")], rows)
    for problem in found.problems:
        click.echo(f"{problem.file}: {problem.fault}; {problem.remedy}")
    for place in filter(None, moved):
        click.echo(f"moved to {place}")
    click.echo(f"\n{output.count(len(found.problems), 'problem') if found.problems else 'No problem'} in {opened.url}.")
    return int(bool(found.problems))


@click.command(
    "export",
    epilog=examples(
        "sweep.py export quickstart --to shared/",
        "sweep.py export summers2021-table1 --only source=init,shuffle --store results/ --to init-and-shuffle/",
    ),
)
@study_options
@click.option("--to", "place", required=True, metavar="PLACE", help="The store to copy into; made if there is none.")
def export(study: Study, place: str) -> int:
    """Copy a study's records into another store.

    Those of the protocol's planned runs, with the kept tensors, labels, references and hardware claims that belong to
    them. Only whole records are copied, and none that is there is replaced; the same command again goes on.

    Exits 1 if a record is damaged or its group was trained on other hardware there.
    """
    source = _existing(study.store_url)
    planned = {entry.id for entry in study.plan(source).planned}
    return _transfer(source, open_store(place, create=True), planned)


@click.command(
    "import",
    epilog=examples(
        "sweep.py import --from shared/",
        "sweep.py import --from init-and-shuffle/ --store results/",
    ),
)
@click.option("--from", "place", required=True, metavar="PLACE", help="The store to copy from.")
@store_option
def import_(place: str, store: str) -> int:
    """Copy all records of another store into this one.

    With the kept tensors, labels, references and hardware claims that belong to them. Only whole records are copied,
    and none that is there is replaced; the same command again goes on. To copy a part of a store, export it first.

    Exits 1 if a record is damaged or its group was trained on other hardware here.
    """
    return _transfer(_existing(place), open_store(store, create=True), None)


def _transfer(source: Store, target: Store, ids: set[str] | None) -> int:
    from orchestrator.store.transfer import COPIED, DAMAGED, PRESENT, WITHHELD, transfer

    if source.url == target.url:
        raise UserError(f"{source.url} is both the store to copy from and the one to copy into; give two")
    target.probe()
    with _progress("copying") as report:
        done = transfer(source, target, ids, report)
    compact_many(target)
    counts = done.counts
    text = f"{output.count(counts[COPIED], 'record')} copied to {target.url}, {counts[PRESENT]:,} there already"
    if ids is not None:
        without = len(ids) - sum(counts.values())
        text += f"; {without:,} of {output.count(len(ids), 'planned run')} without a record" if without else ""
    click.echo(f"{text}.")
    for sentence in done.refused.values():
        click.echo(f"error: {sentence}", err=True)
    if done.refused:
        click.echo(f"error: {output.count(counts[WITHHELD], 'record')} not copied for that reason", err=True)
    for id, fault in sorted(done.damaged.items()):
        click.echo(f"error: record {id} was not copied: {' '.join(fault.split())}", err=True)
    if counts[DAMAGED]:
        click.echo(f"error: {output.count(counts[DAMAGED], 'record')} not whole; see verify", err=True)
    return int(not done.complete)


def _existing(url: str) -> Store:
    """A store that is there, which reading one takes for granted otherwise."""
    store = open_store(url)
    if not store.files.writable:
        raise UserError(f"there is no store in {store.url}")
    return store


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Report]:
    """A bar with the time that is left, on a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield report
