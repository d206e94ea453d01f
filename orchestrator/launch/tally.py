"""What has happened so far in a sweep, counted cell by cell by the one who drives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from orchestrator.naming import CellKey
from orchestrator.plan import Plan, Planned
from orchestrator.watch.cells import Begun, Cell, Forecast, cell_key, forecast


class Tally:
    """Counts of a sweep. Every method may be told the same thing twice.

    Args:
        plan: what is planned, and what of it is done.
        clock: seconds, for how long runs have been running.
    """

    def __init__(self, plan: Plan, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = plan.protocol.name
        self.until = plan.protocol.until
        self.cells: dict[CellKey, Cell] = {}
        """In the plan's order."""
        self.failures: dict[str, str] = {}
        """Runs that failed for good: id -> message."""
        self.retried = 0
        """Attempts that failed and were followed by another."""
        self.images = 0
        """Training images seen."""
        self._clock = clock
        self._began = clock()
        self._cell: dict[str, Cell] = {}
        self._done: set[str] = set()
        self._timed: set[str] = set()
        self._fresh: list[str] = []
        self._running: dict[str, tuple[float, str]] = {}
        self._busy, self._counted = 0.0, self._began
        self.added(plan.planned)
        for id in plan.done:
            self._end(id)

    @property
    def planned(self) -> int:
        """Runs of the plan."""
        return len(self._cell)

    @property
    def done_count(self) -> int:
        """Runs of the plan with a record."""
        return len(self._done)

    @property
    def running(self) -> int:
        """Runs that are being trained."""
        return len(self._running)

    def has_ended(self, id: str) -> bool:
        """Whether a run has a record or has failed for good."""
        return id in self._done or id in self.failures

    def added(self, planned: Sequence[Planned]) -> None:
        """These runs are planned, too."""
        known: dict[tuple[str, str], CellKey] = {}
        for entry in planned:
            if entry.id not in self._cell:
                key = known.get((entry.group, entry.source)) or cell_key(entry)
                known[entry.group, entry.source] = key
                cell = self.cells.setdefault(key, Cell(key=key, first=entry))
                cell.planned += 1
                self._cell[entry.id] = cell

    def started(self, id: str, device: str = "") -> None:
        """A run is being trained now.

        Args:
            id: the run's.
            device: what kind of device it has, wherever durations should be told apart.
        """
        self._pass()
        if id not in self._running:
            self._cell[id].running += 1
        since, known = self._running.get(id, (self._clock(), ""))
        self._running[id] = since, known or device

    def idle(self, id: str) -> None:
        """A run is not being trained any more, and has not come to an end."""
        self._pass()
        if self._running.pop(id, None) is not None:
            self._cell[id].running -= 1

    def again(self, id: str) -> None:
        """An attempt at a run failed, and another follows."""
        self.idle(id)
        self.retried += 1
        self._cell[id].retried += 1

    def done(self, id: str, seconds: float | None = None, device: str | None = None) -> bool:
        """A run has its record.

        Args:
            id: the run's.
            seconds: what it took; None: it is not known.
            device: on what kind of device; None: the one it was started on.

        Returns:
            Whether that is news.
        """
        _, known = self._running.get(id, (0.0, ""))
        self.idle(id)
        if id in self._done:
            return False
        if self.failures.pop(id, None) is not None:
            self._cell[id].failed -= 1
            self._cell[id].given_up -= 1
        self._end(id)
        if seconds is not None:
            self.took(id, seconds, known if device is None else device)
        return True

    def undone(self, id: str) -> None:
        """A run's record is gone: it is to be trained again."""
        if id in self._done:
            self._done.discard(id)
            self._cell[id].done -= 1

    def took(self, id: str, seconds: float, device: str = "") -> None:
        """A done run took so long; for runs of which that was not said when they were done."""
        if id not in self._timed:
            self._timed.add(id)
            self._cell[id].time(seconds, device)

    def failed(self, id: str, message: str) -> None:
        """A run failed, and is not tried again."""
        self.idle(id)
        if not self.has_ended(id):
            self._cell[id].failed += 1
            self._cell[id].given_up += 1
            self.failures[id] = message

    def seen(self, images: int) -> None:
        """Training images have been seen."""
        self.images += images

    def fresh(self) -> dict[str, CellKey]:
        """The runs that have been done since the last call, each with its cell; at first those done before."""
        fresh, self._fresh = self._fresh, []
        return {id: self._cell[id].key for id in fresh}

    def forecast(self) -> Forecast:
        """When the cells will be done, as far as is known by now."""
        now = self._clock()
        self._pass()
        begun = [
            Begun(key=self._cell[id].key, seconds=now - since, device=device)
            for id, (since, device) in self._running.items()
        ]
        return forecast(self.cells.values(), begun, self._busy / self.images if self.images else None)

    def remaining(self) -> float | None:
        """Seconds until everything is done, None where that is not known."""
        return self.forecast().remaining

    def _end(self, id: str) -> None:
        self._done.add(id)
        self._fresh.append(id)
        self._cell[id].done += 1

    def _pass(self) -> None:
        """Add up how long runs have been running, all together."""
        now = self._clock()
        self._busy += len(self._running) * (now - self._counted)
        self._counted = now
