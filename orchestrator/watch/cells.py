"""How far the cells of a plan are, and when they will be done, from how long runs were found to take."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.naming import CellKey
from orchestrator.plan import Planned

LAST = 0.05
"""The least share of its time that a running run is taken to have left, however long it has been running."""


def cell_key(planned: Planned) -> CellKey:
    """The cell that a run belongs to."""
    run = planned.run
    return run.trainer, run.architecture, str(run.dataset), planned.group, planned.source


@dataclass(kw_only=True, eq=False)
class Cell:
    """How far one cell is."""

    key: CellKey
    first: Planned
    """One of its runs."""
    planned: int = 0
    done: int = 0
    """Runs with a record."""
    failed: int = 0
    """Runs without a record whose last attempt failed, and that are not running."""
    given_up: int = 0
    """Those of them that are not going to be tried again."""
    retried: int = 0
    """Attempts that failed and were followed by another."""
    running: int = 0
    timed: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Device -> how many done runs it had, and their seconds together."""

    @property
    def left(self) -> int:
        """Runs that are still to be done, the running ones included."""
        return self.planned - self.done - self.given_up

    @property
    def images(self) -> int:
        """Training examples that one of its runs goes through."""
        return self.first.examples * self.first.run.recipe.epochs

    def time(self, seconds: float, device: str = "", count: int = 1) -> None:
        """Take note of done runs that took so many seconds together."""
        known, total = self.timed.get(device, (0, 0.0))
        self.timed[device] = known + count, total + seconds


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A running run."""

    key: CellKey
    seconds: float
    """What it has behind it."""
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """When cells will be done, in seconds from now; None where nothing is known of how long runs take."""

    remaining: float | None
    """Until the last run of all is done; None also where runs are left and none is running."""
    cells: Mapping[CellKey, float | None]
    """Until the last run of each cell is done."""
    device_seconds: float | None
    """What is left for the devices to do, added up over them."""

    def scaled(self, remaining: float | None) -> Forecast:
        """The same with the last run done in ``remaining`` seconds, as someone knows who knows better."""
        if remaining is None or self.remaining is None:
            return dataclasses.replace(self, remaining=remaining)
        factor = remaining / self.remaining if self.remaining else 0.0
        cells = {key: None if seconds is None else factor * seconds for key, seconds in self.cells.items()}
        return dataclasses.replace(self, remaining=remaining, cells=cells)


def forecast(cells: Collection[Cell], begun: Iterable[Begun], pace: float | None = None) -> Forecast:
    """When what is left of each cell will be done by as many devices as are running now.

    A run takes the mean of its cell's done runs, on each kind of device by itself. A device on which the cell has none
    is as much faster or slower as in other cells. A cell without any takes, per training example, what cells of its
    trainer and architecture take, else what all take, else what ``pace`` says. Cells of one priority take turns, run
    by run, as the sweep lets them: a cell with few runs left is done early, the last ones end together. No cell ends
    before the runs that it has begun.

    Args:
        cells: how far they are.
        begun: the runs under way; their devices are the ones that there are.
        pace: seconds for a training example, as far as it is known apart from done runs.
    """
    means = _Means(cells, pace)
    begun_in: dict[CellKey, list[Begun]] = defaultdict(list)
    for run in begun:
        begun_in[run.key].append(run)
    devices = Counter(run.device for runs in begun_in.values() for run in runs)
    work = [_work(cell, begun_in[cell.key], devices, means) for cell in cells if cell.left]
    known = [each for each in work if each is not None]
    if len(known) < len(work):
        return Forecast(
            remaining=None, cells={cell.key: None if cell.left else 0.0 for cell in cells}, device_seconds=None
        )
    times: dict[CellKey, float | None] = {cell.key: None if cell.left else 0.0 for cell in cells}
    if devices:
        times |= _ends(known)
    ends = [time for time in times.values() if time is not None]
    return Forecast(
        remaining=max(ends, default=0.0) if len(ends) == len(times) else None,
        cells=times,
        device_seconds=sum(each.runs * each.mean for each in known),
    )


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What is left of one cell."""

    key: CellKey
    priority: int
    runs: float
    """Of running ones what is left of them."""
    mean: float
    """Seconds of a run on the devices that there have been."""
    interval: float
    """Seconds between the ends of two runs, if all devices of now were at it; 0 where there is none."""
    least: float
    """Seconds before which it cannot be through, because runs are not divided."""


def _work(cell: Cell, begun: Sequence[Begun], devices: Mapping[str, int], means: _Means) -> _Work | None:
    """None where nothing is known of how long its runs take."""
    if (mean := means.of(cell)) is None:
        return None
    takes = {device: max(means.on(cell, mean, device), 1e-9) for device in devices}
    shares = [max(1 - run.seconds / takes[run.device], LAST) for run in begun]
    waiting = max(cell.left - len(begun), 0)
    ends = [share * takes[run.device] for share, run in zip(shares, begun, strict=True)]
    rate = sum(number / takes[device] for device, number in devices.items())
    return _Work(
        key=cell.key,
        priority=cell.first.priority,
        runs=waiting + sum(shares),
        mean=mean,
        interval=1 / rate if rate else 0.0,
        least=max([*ends, *([min(takes.values())] if waiting and takes else [])], default=0.0),
    )


def _ends(work: Iterable[_Work]) -> dict[CellKey, float]:
    """When each cell's runs are through if the cells take turns: in round n, every cell that has n left has one run.

    Cells of a higher priority come before all others.
    """
    ends, before = {}, 0.0
    for _, alike in itertools.groupby(sorted(work, key=lambda each: (-each.priority, each.runs)), _priority):
        ordered = list(alike)
        turn = sum(each.interval for each in ordered)
        for each in ordered:
            ends[each.key] = max(before + each.runs * turn, each.least)
            before += each.runs * each.interval
            turn -= each.interval
    return ends


def _priority(work: _Work) -> int:
    return work.priority


class _Means:
    """Seconds of a run, by cell and device."""

    def __init__(self, cells: Collection[Cell], pace: float | None) -> None:
        self._pace = pace
        self._cells: dict[CellKey, float] = {}
        self._alike: dict[object, tuple[float, float]] = {}
        expected: dict[str, tuple[float, float]] = {}
        for cell in cells:
            count, total = (
                (sum(values) for values in zip(*cell.timed.values(), strict=True)) if cell.timed else (0, 0.0)
            )
            if not count:
                continue
            self._cells[cell.key] = mean = total / count
            for alike in (cell.key[:2], None):
                images, seconds = self._alike.get(alike, (0.0, 0.0))
                self._alike[alike] = images + count * cell.images, seconds + total
            for device, (number, seconds) in cell.timed.items():
                took, usual = expected.get(device, (0.0, 0.0))
                expected[device] = took + seconds, usual + number * mean
        self._slower = {device: took / usual for device, (took, usual) in expected.items() if usual > 0}

    def of(self, cell: Cell) -> float | None:
        """On whatever devices there are."""
        if cell.key in self._cells:
            return self._cells[cell.key]
        images, seconds = self._alike.get(cell.key[:2]) or self._alike.get(None) or (0.0, 0.0)
        if images:
            return cell.images * seconds / images
        return None if self._pace is None else cell.images * self._pace

    def on(self, cell: Cell, mean: float, device: str) -> float:
        """On one device."""
        count, total = cell.timed.get(device, (0, 0.0))
        return total / count if count else mean * self._slower.get(device, 1.0)
