"""How verbs print: tables of at most 100 columns, without colour unless to a terminal; one line a mistake."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from orchestrator.wording import amount, count, duration, size

__all__ = [
    "WIDTH",
    "amount",
    "console",
    "corrupt_lines",
    "count",
    "duration",
    "print_json",
    "print_table",
    "print_wrapped",
    "size",
]

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
    """Print rows under headings, or without any where they are empty; values are shown by ``str``.

    Where that is too wide, columns of text are wrapped, the widest one first: between words, and only where that does
    not suffice after ``+ , : / -``.
    """
    named = [(column, "left") if isinstance(column, str) else column for column in columns]
    cells = [[heading for heading, _ in named], *([str(value) for value in row] for row in rows)]
    target = console()
    # Two columns are two spaces apart.
    widths = _widths(cells, [justify == "left" for _, justify in named], target.width - 2 * (len(named) - 1))
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        show_header=any(columns),
        padding=(0, 1),
        collapse_padding=True,
    )
    wrapped = [[_wrap(text, width) for text, width in zip(row, widths, strict=True)] for row in cells]
    for heading, (_, justify) in zip(wrapped[0], named, strict=True):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in wrapped[1:]:
        table.add_row(*row)
    with target.capture() as captured:
        target.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


_WORD = re.compile(r"\S*\s*")
_PIECE = re.compile(r"[^\s+,:/-]*[+,:/-]*\s*")


def _widths(cells: Sequence[Sequence[str]], text: Sequence[bool], room: int) -> list[int]:
    """The width of each column: what it needs, less what the widest columns of text can do without."""
    columns = [[row[number] for row in cells] for number in range(len(text))]
    widths = [max(map(len, column)) for column in columns]
    for parts in (_WORD, _PIECE):
        least = [max(len(part.rstrip()) for value in column for part in parts.findall(value)) for column in columns]
        while (excess := sum(widths) - room) > 0:
            reducible = [number for number in range(len(widths)) if text[number] and widths[number] > least[number]]
            if not reducible:
                break
            widest = max(reducible, key=lambda number: widths[number])
            second = max((widths[number] for number in reducible if number != widest), default=0)
            widths[widest] = max(least[widest], widths[widest] - excess, min(second, widths[widest]) - 1)
    return widths


def _wrap(text: str, width: int) -> str:
    """A text in lines of at most ``width``: between words, within those that are longer."""
    if len(text) <= width:
        return text
    lines = [""]
    for word in _WORD.findall(text):
        for part in _PIECE.findall(word) if len(word.rstrip()) > width else [word]:
            if lines[-1].strip() and len(lines[-1]) + len(part.rstrip()) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


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
