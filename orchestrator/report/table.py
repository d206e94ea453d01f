"""The result table in the terminal: first whether what was held was held, then one table a group."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.analysis.controls import HELD, NOT_HELD, NOT_SHOWN
from orchestrator.analysis.quantities import QUANTITIES
from orchestrator.analysis.sweep import Cell, Sweep
from orchestrator.report import facts, text
from orchestrator.report.studies import Section, sections

WIDTH = 100

ON_PAGE = ("classes", "cka", "equality")
"""Sections too long for a terminal: on the page and in files only."""

STYLES = {HELD: "green", NOT_HELD: "bold red", NOT_SHOWN: "yellow"}


def write_table(sweep: Sweep, console: Console) -> None:
    """Print a sweep's controls and result tables, at most 100 columns wide, finished or not."""
    if not sweep.cells:
        console.print(Text(f"No records in {sweep.store.url} yet."))
        return
    width = min(WIDTH, console.width)
    console.print(_overview(sweep), width=width)
    for group in sweep.groups["group"]:
        _print_group(sweep, group, console, width)
    console.print(Text(text.method(sweep)), style="dim", width=width)
    for section in sections(sweep):
        _print_section(section, console, width)
    if failed := facts.failures(sweep):
        console.print(Text(f"Failed attempts: {len(failed)}, kept in the store with their tracebacks."))


def _overview(sweep: Sweep) -> Table:
    title = _title("What was run, and whether the rest was held")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("group", ratio=3)
    for name in ("runs", "missing", "diverged"):
        table.add_column(name, justify="right")
    table.add_column("control", ratio=4)
    for group in sweep.groups["group"]:
        cells = [cell for cell in sweep.cells if cell.group == group]
        verdict = sweep.verdicts[group]
        table.add_row(
            Text(sweep.group_title(group)),
            str(sum(len(cell.ok) for cell in cells)),
            str(sum(cell.missing for cell in cells)),
            str(sum(cell.count("diverged") for cell in cells)),
            Text.assemble((verdict.verdict, STYLES[verdict.verdict]), f": {verdict.reason}"),
        )
    return table


def _print_group(sweep: Sweep, group: str, console: Console, width: int) -> None:
    rows = [(cell, m) for cell, m in zip(sweep.cells, sweep.measured, strict=True) if cell.group == group]
    marks, notes = text.footnotes(sweep.notes(cell, measured) for cell, measured in rows)
    invalid = sweep.verdicts[group].verdict == NOT_HELD
    title = _title(sweep.group_title(group) + (" (INVALID: what it holds was not held)" if invalid else ""))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("source", min_width=11, overflow="fold")
    table.add_column("n", justify="right", no_wrap=True)
    names = text.columns(sweep)
    for name in names:
        unit = f" {QUANTITIES[name].unit}" if QUANTITIES[name].unit else ""
        table.add_column(QUANTITIES[name].short + unit, justify="right")
    for (cell, measured), mark in zip(rows, marks, strict=True):
        values = []
        for name in names:
            estimate = measured.estimates[name]
            value, interval = text.number(estimate.value, name), text.interval(estimate, name)
            values.append(Text.assemble(value, (_small(interval, width), "dim")))
        table.add_row(_source(cell, mark), text.count(cell), *values)
    console.print(table, width=width)
    for letter, note in notes.items():
        console.print(Text(f"  [{letter}] {note}"), style="dim", width=width)
    console.print()


def _print_section(section: Section, console: Console, width: int) -> None:
    if section.name in ON_PAGE:
        return
    console.print()
    console.print(_title(section.title), width=width)
    console.print(Text(section.text), style="dim", width=width)
    for part in section.tables:
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=part.caption, title_justify="left"
        )
        for index, head in enumerate(part.heads):
            table.add_column(head, justify="right" if index else "left", overflow="fold")
        for row in part.rows:
            table.add_row(*(Text.assemble(value, (_small(small, width), "dim")) for value, small in row))
        console.print(table, width=width)
        for letter, note in part.notes.items():
            console.print(Text(f"  [{letter}] {note}"), style="dim", width=width)


def _small(words: str, width: int) -> str:
    """Small print on a line of its own, or on two where the terminal is narrow."""
    if width < WIDTH:
        words = words.replace("–", "–\n").replace(" to ", " to\n")
    return f"\n{words}" if words else ""


def _source(cell: Cell, mark: str) -> Text:
    label = Text(cell.label.replace("+", " + "))  # room to wrap
    return Text.assemble(label, (f" [{mark}]", "dim")) if mark else label


def _title(title: str) -> Text:
    return Text(title, style="bold not italic")
