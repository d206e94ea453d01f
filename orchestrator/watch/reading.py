"""How far a plan is, from the store alone: read once, or again and again, when only what is new is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from orchestrator.naming import CellKey
from orchestrator.plan import Plan, Planned
from orchestrator.store import Store
from orchestrator.watch.cells import Begun, Cell, Forecast, cell_key, forecast
from orchestrator.watch.measures import Measures, Reader
from orchestrator.watch.sweeps import EITHER, INTERRUPTED, RUNNING, Active, Sweeps

STILL_SECONDS = 120.0
"""How long a run of which it is not known whether it is running is taken to be, after it last showed how far it was,
or three times as long as its last epoch took."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """A run that was begun and has neither a record nor, of that attempt, a failure."""

    entry: Planned
    attempt: int
    epochs: int
    """Epochs that are done."""
    epoch_seconds: float | None
    """What the last of them took."""
    updated: datetime
    state: str
    """``running``, ``interrupted`` or ``running or interrupted``."""
    active: bool
    """Whether it is taken to be running, as far as can be told."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The newest attempt of a run without a record, if that failed."""

    entry: Planned
    attempt: int
    outcome: str
    message: str
    finished: datetime


@dataclass(frozen=True, kw_only=True)
class Status:
    """How far a plan is, at one moment."""

    plan: Plan
    cells: Mapping[CellKey, Cell]
    live: list[Live]
    """By id."""
    failures: list[Failed]
    """By id."""
    sweeps: list[Active]
    corrupt: Mapping[str, str]
    measures: Measures
    forecast: Forecast
    images_per_second: float | None
    """Of the running runs, by the last epoch of each."""

    @property
    def done(self) -> int:
        """Planned runs with a record."""
        return sum(cell.done for cell in self.cells.values())

    @property
    def planned(self) -> int:
        """Runs of the plan."""
        return sum(cell.planned for cell in self.cells.values())

    @property
    def complete(self) -> bool:
        """Whether every planned run has a record."""
        return self.done == self.planned


class Follower:
    """Reads how far a plan is.

    Args:
        plan: as the store was when it was planned.
        store: where its records are.
        replan: makes the plan anew, for protocols whose plan grows with what is recorded.
    """

    def __init__(self, plan: Plan, store: Store, replan: Callable[[], Plan]) -> None:
        self._store = store
        self._replan = replan
        self._plan = plan
        self._reader = Reader(store)
        self._sweeps = Sweeps(store)
        self._measures = Measures(plan.protocol.until)
        self._cells: dict[CellKey, Cell] = {}
        self._keys: dict[str, CellKey] = {}
        self._entries: dict[str, Planned] = {}
        self._done: set[str] = set()
        self._failures: dict[tuple[str, int], Failed | None] = {}
        self._looked = False
        self._expect(plan.planned)

    def read(self) -> Status:
        """What is known by now. The first time the records are those of the plan, later they are looked for."""
        done, corrupt = self._plan.done, self._plan.corrupt
        if self._looked:
            finished, corrupt = self._store.examined()
            done = frozenset(self._keys.keys() & finished)
            if self._plan.growing and done != self._plan.done:
                self._plan = self._replan()
                self._expect(self._plan.planned)
                done, corrupt = self._plan.done, self._plan.corrupt
        self._looked = True
        self._learn(done)
        self._fail()
        live = self._live()
        newest = self._newest(live)
        for cell in self._cells.values():
            cell.done = cell.running = cell.failed = 0
        for id in self._done:
            self._cells[self._keys[id]].done += 1
        for run in live:
            self._cells[cell_key(run.entry)].running += run.state != INTERRUPTED
        for failed in newest:
            self._cells[cell_key(failed.entry)].failed += 1
        active = [run for run in live if run.active]
        return Status(
            plan=self._plan,
            cells=self._cells,
            live=live,
            failures=newest,
            sweeps=self._sweeps.active(),
            corrupt=corrupt,
            measures=self._measures,
            forecast=forecast(self._cells.values(), map(_begun, active), _pace(active)),
            images_per_second=_rate(active),
        )

    def _expect(self, planned: Iterable[Planned]) -> None:
        known: dict[tuple[str, str], CellKey] = {}
        for entry in planned:
            if entry.id not in self._keys:
                key = known.get((entry.group, entry.source)) or cell_key(entry)
                known[entry.group, entry.source] = key
                self._cells.setdefault(key, Cell(key=key, first=entry)).planned += 1
                self._keys[entry.id] = key
                self._entries[entry.id] = entry

    def _learn(self, done: frozenset[str]) -> None:
        """Read the records that are new; those that are gone are not done any more."""
        if new := done - self._measures.ids:
            records = self._reader.read(set(new))
            self._measures.add(records, self._keys)
            columns = (records.table[name].to_pylist() for name in ("id", "seconds", "device"))
            for id, seconds, device in zip(*columns, strict=True):
                self._cells[self._keys[id]].time(seconds, device)
        self._done = set(done & self._measures.ids)

    def _fail(self) -> None:
        """Read the failures that are new."""
        for row in self._store.failures(known=self._failures.keys()).to_pylist():
            entry = self._entries.get(row["id"])
            failed = None
            if entry is not None:
                self._measures.spend((row["finished"] - row["started"]).total_seconds(), row["device"])
                failed = Failed(
                    entry=entry,
                    attempt=row["attempt"],
                    outcome=row["outcome"],
                    message=row["message"],
                    finished=row["finished"],
                )
            self._failures[row["id"], row["attempt"]] = failed

    def _newest(self, live: Iterable[Live]) -> list[Failed]:
        """The newest failure of each run that has neither a record nor a later attempt under way."""
        begun = {run.entry.id for run in live if run.state != INTERRUPTED}
        newest: dict[str, Failed] = {}
        for (id, attempt), failed in self._failures.items():
            if failed is not None and id not in self._done and (id not in newest or newest[id].attempt < attempt):
                newest[id] = failed
        return [newest[id] for id in sorted(newest) if id not in begun]

    def _live(self) -> list[Live]:
        rows = [row for row in self._store.live_rows() if row["id"] in self._keys and row["id"] not in self._done]
        self._sweeps.active()
        states = self._sweeps.states({row["id"] for row in rows})
        now = datetime.now(UTC)
        return [_as_live(row, self._entries[row["id"]], states[row["id"]], now) for row in rows]


def _as_live(row: dict[str, Any], entry: Planned, state: str, now: datetime) -> Live:
    still = max(STILL_SECONDS, 3 * (row["seconds"] or 0.0))
    return Live(
        entry=entry,
        attempt=row["attempt"],
        epochs=row["epochs"],
        epoch_seconds=row["seconds"],
        updated=row["updated"],
        state=state,
        active=state == RUNNING or (state == EITHER and (now - row["updated"]).total_seconds() <= still),
    )


def _begun(run: Live) -> Begun:
    return Begun(key=cell_key(run.entry), seconds=run.epochs * (run.epoch_seconds or 0.0))


def _pace(active: Iterable[Live]) -> float | None:
    """Seconds for a training example, from the last epochs of running runs."""
    timed = [(run.epoch_seconds, run.entry.examples) for run in active if run.epoch_seconds]
    return sum(seconds for seconds, _ in timed) / sum(examples for _, examples in timed) if timed else None


def _rate(active: Iterable[Live]) -> float | None:
    """Training examples a second, all running runs together."""
    rates = [run.entry.examples / run.epoch_seconds for run in active if run.epoch_seconds]
    return sum(rates) if rates else None
