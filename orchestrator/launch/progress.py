"""What a sweep shows while it runs: a live table on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live

from orchestrator.launch.tally import Tally
from orchestrator.naming import CellKey
from orchestrator.store import Store, StoreError
from orchestrator.watch import view
from orchestrator.watch.measures import Batch, Measures, Reader

PLAIN_SECONDS = 30.0
"""Seconds between two lines where the output is no terminal."""

LIVE_SECONDS = 0.5
"""Seconds between two states of a terminal."""

WINDOW_SECONDS = 30.0
"""Seconds over which images are counted for the rate, or longer where they come less often."""

READ_SECONDS = 10.0
"""Seconds between two looks at new records."""

CHUNK = 500
"""Records that are read at a time."""

SHARE = 0.05
"""Of the time that reading may take."""

LAST_SECONDS = 5.0
"""How long the end waits for the last records."""


class Display:
    """Shows a tally; a context manager.

    Args:
        tally: what to show, changed by whoever counts.
        remaining: seconds until everything is done, None where that is not known; without it the tally is asked.
        console: where to show it.
        store: where new records are, for the running measures and the device time; they are read in a thread.
        gpus: of each run; 0: it has a CPU core.
    """

    def __init__(
        self,
        tally: Tally,
        remaining: Callable[[], float | None] | None,
        console: Console,
        *,
        store: Store | None = None,
        gpus: float = 0.0,
    ) -> None:
        self._tally = tally
        self._remaining = remaining
        self._console = console
        self._gpus = gpus
        self._rate = Rate()
        self._shown = time.monotonic()
        self._measures = Measures(tally.until)
        self._measures.runs_have(gpus)
        self._records = None if store is None else _NewRecords(store)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self.take(LAST_SECONDS)
        if self._records is not None:
            self._records.close()
        self.say(self.line())

    def refresh(self) -> None:
        """Show the present state, if it is time to."""
        now = time.monotonic()
        self._rate.note(now, self._tally.images)
        since = now - self._shown
        if since < (PLAIN_SECONDS if self._live is None else LIVE_SECONDS):
            return
        self._shown += since
        self.take()
        if self._live is None:
            self.say(self.line())
        else:
            self._live.update(view.screen(self.view(), self._console), refresh=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def line(self) -> str:
        """The state in one line."""
        return view.line(self.view())

    def view(self) -> view.View:
        """The state."""
        tally = self._tally
        forecast = tally.forecast()
        if self._remaining is not None:
            forecast = forecast.scaled(self._remaining())
        return view.View(
            name=tally.name,
            cells=tally.cells,
            forecast=forecast,
            running=tally.running,
            retried=tally.retried,
            images_per_second=self._rate.value(tally.running),
            measures=self._measures,
        )

    def take(self, wait: float = 0.0) -> None:
        """Take in the records that have been read, and say which are to be read.

        Args:
            wait: seconds to wait at most for all of them.
        """
        if self._records is None:
            return
        self._records.want(self._tally.fresh())
        for batch, keys in self._records.taken(wait):
            self._measures.add(batch, keys)
            self._measures.runs_have(self._gpus)
            columns = (batch.table[name].to_pylist() for name in ("id", "seconds", "device"))
            for id, seconds, device in zip(*columns, strict=True):
                self._tally.took(id, seconds, device)


class Rate:
    """Images a second, of late."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._now = 0.0

    def note(self, now: float, images: int) -> None:
        """So many had been seen at that moment."""
        self._now = now
        if not self._seen or images > self._seen[-1][1]:
            self._seen.append((now, images))

    def value(self, running: int) -> float | None:
        """Over the last ``WINDOW_SECONDS``, or so long that each running run has reported about twice."""
        while len(self._seen) > 2 * running + 2 and self._seen[1][0] < self._now - WINDOW_SECONDS:
            self._seen.popleft()
        if len(self._seen) < 2 or not running:
            return None
        (then, before), (_, images) = self._seen[0], self._seen[-1]
        return (images - before) / max(self._now - then, 1e-9)


class _NewRecords:
    """Reads records in a thread of its own, so that the sweep does not wait for the store."""

    def __init__(self, store: Store) -> None:
        self._reader = Reader(store)
        self._changed = threading.Condition()
        self._wanted: dict[str, CellKey] = {}
        self._read: list[tuple[Batch, dict[str, CellKey]]] = []
        self._reading = self._hurried = self._closed = False
        self._due = 0.0
        threading.Thread(target=self._work, name="records", daemon=True).start()

    def want(self, keys: dict[str, CellKey]) -> None:
        """Have records read, given the cell of each run."""
        if keys:
            with self._changed:
                self._wanted |= keys
                self._changed.notify_all()

    def taken(self, wait: float) -> list[tuple[Batch, dict[str, CellKey]]]:
        """What has been read since the last call; wait so many seconds at most for all that is wanted."""
        with self._changed:
            if wait:
                self._hurried = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._wanted and not self._reading, wait)
                self._hurried = False
            found, self._read = self._read, []
            return found

    def close(self) -> None:
        """Let the thread end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while keys := self._next():
            began = time.monotonic()
            try:
                batch = self._reader.read(set(keys))
            except StoreError:  # The store may answer again; measures are not worth a sweep.
                batch = None
            # The thread takes the interpreter from the sweep for no more than a small share of the time.
            took = time.monotonic() - began
            with self._changed:
                self._reading = False
                self._due = began + (READ_SECONDS if batch is None or not self._wanted else 0.0) + took / SHARE
                if batch is None:
                    self._wanted |= keys
                    self._hurried = False
                else:
                    self._read.append((batch, keys))
                self._changed.notify_all()

    def _next(self) -> dict[str, CellKey]:
        """Some of what is wanted, once it is time to read it; nothing if the thread is to end."""
        with self._changed:
            while not self._closed:
                wait = 0.0 if self._hurried else self._due - time.monotonic()
                if self._wanted and wait <= 0:
                    self._reading = True
                    return {id: self._wanted.pop(id) for id in list(self._wanted)[:CHUNK]}
                self._changed.wait(wait if self._wanted else None)
            return {}


def failures(failed: Mapping[str, str], limit: int = 5) -> list[str]:
    """One line for each of the first failed runs, and one for the rest."""
    lines = [f"failed: {id[:12]}: {message}" for id, message in list(failed.items())[:limit]]
    return lines + ([f"and {len(failed) - limit:,} more"] if len(failed) > limit else [])
