"""What a sweep shows while it runs: one live line on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

PLAIN_SECONDS = 30.0
"""Seconds between two lines where the output is no terminal."""

WINDOW_SECONDS = 30.0
"""Seconds over which images are counted for the rate."""


@dataclass(kw_only=True)
class Tally:
    """What has happened so far in this launch."""

    planned: int
    """Runs of the plan."""
    done: int
    """Runs of the plan with a record."""
    failed: dict[str, str] = field(default_factory=dict)
    """Runs that failed for good: id -> message."""
    retried: int = 0
    running: int = 0
    images: int = 0
    """Training images seen."""


class Display:
    """Shows a tally; a context manager.

    Args:
        tally: what to show, changed by whoever counts.
        remaining: seconds until everything is done, as far as is known.
        console: where to show it.
    """

    def __init__(self, tally: Tally, remaining: Callable[[], float], console: Console) -> None:
        self._tally = tally
        self._remaining = remaining
        self._console = console
        self._shown = time.monotonic()
        self._seen = deque([(self._shown, 0)])
        self._bar = Progress(
            BarColumn(), TextColumn("{task.description}"), console=console, transient=True, auto_refresh=False
        )
        self._task = self._bar.add_task("", total=max(tally.planned, 1))

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def refresh(self) -> None:
        """Show the present state, if it is time to."""
        now = time.monotonic()
        self._seen.append((now, self._tally.images))
        while self._seen[0][0] < now - WINDOW_SECONDS:
            self._seen.popleft()
        since = now - self._shown
        if self._console.is_terminal and since >= 0.5:
            self._shown += since
            self._bar.update(self._task, completed=self._tally.done, description=self.line())
            self._bar.refresh()
        elif since >= PLAIN_SECONDS:
            self._shown += since
            self.say(self.line())

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def line(self) -> str:
        """The state in one line."""
        tally = self._tally
        parts = [f"{tally.done:,}/{tally.planned:,} done", f"{tally.running} running", f"{len(tally.failed)} failed"]
        (then, before), (now, images) = self._seen[0], self._seen[-1]
        if images > before:
            parts.append(f"{(images - before) / (now - then):,.0f} images/s")
        if tally.done < tally.planned:
            parts.append(f"about {timedelta(seconds=round(self._remaining()))} left")
        return ", ".join(parts)


def failures(failed: Mapping[str, str], limit: int = 5) -> list[str]:
    """One line for each of the first failed runs, and one for the rest."""
    lines = [f"failed: {id[:12]}: {message}" for id, message in list(failed.items())[:limit]]
    return lines + ([f"and {len(failed) - limit:,} more"] if len(failed) > limit else [])
