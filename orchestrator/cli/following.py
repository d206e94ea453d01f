"""``status --follow``: the store is read again and again, until all is done or someone has seen enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import click
from rich.live import Live

from orchestrator.cli import output
from orchestrator.watch import view
from orchestrator.watch.reading import Follower, Status

SECONDS = 5.0
"""Between two looks at the store."""

PLAIN_SECONDS = 30.0
"""Between two lines where the output is no terminal."""

SHARE = 0.2
"""Of the time that reading may take: from a slow store it is read less often."""

INTERRUPTED = 130


def watch(follower: Follower, notes: Callable[[Status], Sequence[str]]) -> int:
    """Show how far a study is: on a terminal a live table, elsewhere a line now and then.

    Args:
        follower: reads it.
        notes: further lines for the table.

    Returns:
        The exit code.
    """
    console = output.console()
    if not console.is_terminal or console.is_dumb_terminal:
        return follow(follower, lambda status: click.echo(view.line(view_of(status))), plain=True)
    line = ""
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(status: Status) -> None:
            nonlocal line
            line = view.line(view_of(status))
            live.update(view.screen(view_of(status, notes(status)), console), refresh=True)

        code = follow(follower, show)
    click.echo(line)
    return code


def follow(follower: Follower, show: Callable[[Status], None], *, plain: bool = False) -> int:
    """Show how far a study is every few seconds, or less often where it is ``plain`` lines for a log.

    Returns:
        The exit code: 0 once every run is done, 130 on Ctrl-C, 2 where it is done but for unreadable records.
    """
    try:
        while True:
            began = time.monotonic()
            status = follower.read()
            show(status)
            if status.complete:
                return output.corrupt_lines(status.corrupt)
            took = time.monotonic() - began
            time.sleep(max((PLAIN_SECONDS if plain else SECONDS) - took, took / SHARE))
    except KeyboardInterrupt:
        return INTERRUPTED


def view_of(status: Status, notes: Sequence[str] = ()) -> view.View:
    """What is shown of a status."""
    return view.View(
        name=status.plan.protocol.name,
        cells=status.cells,
        forecast=status.forecast,
        running=sum(cell.running for cell in status.cells.values()),
        images_per_second=status.images_per_second,
        measures=status.measures,
        notes=notes,
    )
