"""How verbs print: tables of at most 100 columns, without colour unless to a terminal; one line a mistake."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 100

Column = str | tuple[str, str]
"""A heading, or a heading and how its column is justified (``right``)."""


def console() -> Console:
    """A console on the standard output as it is now."""
    terminal = sys.stdout.isatty()
    return Console(
        file=sys.stdout,
        width=None if terminal else WIDTH,
        force_terminal=terminal,
        no_color=not terminal,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings, or without any where they are empty; values are shown by ``str``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=any(columns))
    for column in columns:
        heading, justify = (column, "left") if isinstance(column, str) else column
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*map(str, row))
    target = console()
    with target.capture() as captured:
        target.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def print_json(values: Any) -> None:
    """Print values for programs."""
    click.echo(json.dumps(values, indent=2, ensure_ascii=False))


def corrupt_lines(corrupt: Mapping[str, str]) -> int:
    """Name every unreadable record on the standard error.

    Returns:
        The exit code that follows: 2 where there are any.
    """
    for name, reason in sorted(corrupt.items()):
        reason = " ".join(reason.split()).rstrip(".")
        # A record's name is its run's id; any other file got there by mistake.
        remedy = "its run counts as missing: run trains it again" if len(name) == 64 else "move it out of records/"
        click.echo(f"error: corrupt record {name}: {reason}; {remedy}", err=True)
    return 2 if corrupt else 0


def print_wrapped(line: str) -> None:
    """Print a line of prose, continued on indented lines where it is long."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    click.echo(textwrap.fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False))


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def amount(number: float) -> str:
    """A large number to three digits: ``12,345``, ``1.23 million``, ``18 billion``."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"


def size(count: float) -> str:
    """A number of bytes to three digits: ``1.23 GB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e3:.3g} kB"


def duration(seconds: float) -> str:
    """A time span in its two largest units: ``48 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
