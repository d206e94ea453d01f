"""A progress bar for what takes a while before training: downloads and packing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(description: str, total: int | None, done: int = 0, *, size: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal's error stream, gone when done; nothing where that is no terminal.

    Args:
        description: what is going on.
        total: how much there is to do; None: not known.
        done: how much of it is done already.
        size: whether it counts bytes.

    Yields:
        ``advance(amount)``, to be called as more is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counter = DownloadColumn() if size else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counter, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(description, total=total, completed=done)
        yield lambda amount: progress.advance(task, amount)
