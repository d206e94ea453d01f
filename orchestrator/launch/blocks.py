"""Which runs go together, and in which order: what Ray Tune schedules is one cell with a block of its runs.

A trial costs about a tenth of a second and a block shares that cost, so short runs come in larger blocks. Blocks are
cut when they are asked for, from what is known by then of how long runs take.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from orchestrator.plan import Planned
from protocols.run import Run

BLOCK_SECONDS = 10.0
"""What a block should take: about three starts of an actor with its training process."""


class Durations:
    """How long runs take, learned from those that are done.

    Args:
        guess: seconds for a run of which no similar one is done.
    """

    def __init__(self, guess: Callable[[Run], float]) -> None:
        self._guess = guess
        self._seen: dict[object, tuple[int, float]] = {}

    def learn(self, run: Run, seconds: float) -> None:
        """Take note of a finished run."""
        count, total = self._seen.get(likeness(run), (0, 0.0))
        self._seen[likeness(run)] = count + 1, total + seconds

    def known(self, run: Run) -> float | None:
        """Mean seconds of the done runs with its trainer, architecture, dataset and recipe; None if there is none."""
        count, total = self._seen.get(likeness(run), (0, 0.0))
        return total / count if count else None

    def estimate(self, run: Run) -> float:
        """Seconds that a run will take: what is known of similar ones, else the guess."""
        known = self.known(run)
        return self._guess(run) if known is None else known


class _Cell:
    """The runs of one cell that are in no block yet."""

    def __init__(self, first: Planned) -> None:
        self.group, self.trainer, self.priority = first.group, first.run.trainer, first.priority
        self.run = first.run
        """Any of its runs."""
        self.likeness = likeness(first.run)
        self.waiting: deque[Planned] = deque()


class Blocks:
    """Hands out blocks of runs.

    Cells of a higher priority come first. Among equals block k of every cell comes before block k + 1 of any, so that a
    sweep that is stopped has equally many replicates everywhere. Within such a round a trainer's cells stay together,
    because a slot that changes trainers starts a new process; every other round goes through the trainers backwards,
    for the same reason. A group's control comes first and its onebit cells last, since those are held against the
    control. Towards the end the longest runs are taken first, whatever their cell, so that none starts last.

    Args:
        runs: what to train, a cell's runs in the order of their replicates.
        slots: how many runs train side by side; it may be changed at any time.
        durations: what is known of how long runs take.
        clock: seconds, for runs that are held back.
    """

    def __init__(
        self,
        runs: Iterable[Planned],
        slots: int,
        durations: Durations,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = slots
        self._durations = durations
        self._clock = clock
        self._cells: dict[object, _Cell] = {}
        self._round: deque[_Cell] = deque()
        self._backwards = True
        # How many runs of each priority and kind wait in cells, with one of the kind.
        self._counts: dict[int, Counter[object]] = {}
        self._kinds: dict[object, Run] = {}
        self._held: list[tuple[float, int, Planned]] = []
        self._order = itertools.count()
        self.add(runs)

    def __len__(self) -> int:
        """How many runs are in no block, those held back included."""
        return sum(counts.total() for counts in self._counts.values()) + len(self._held)

    def resting(self, within: float = math.inf) -> bool:
        """Whether runs are held back that would fit in once their time has come.

        Args:
            within: seconds from now.
        """
        now = self._clock()
        return any(self._size(planned.run, within - max(at - now, 0.0)) for at, _, planned in self._held)

    def add(self, runs: Iterable[Planned]) -> None:
        """Add runs to the end of their cells."""
        for planned in runs:
            key = planned.group, planned.source
            if key not in self._cells:
                self._cells[key] = _Cell(planned)
            cell = self._cells[key]
            cell.waiting.append(planned)
            self._kinds.setdefault(cell.likeness, cell.run)
            self._counts.setdefault(cell.priority, Counter())[cell.likeness] += 1
            if self._round and cell.priority > self._round[0].priority:
                self._round.clear()

    def put_back(self, planned: Planned, seconds: float = 0.0) -> None:
        """Take a run back, and hand it out again, before any new one, once so many seconds have passed."""
        heapq.heappush(self._held, (self._clock() + seconds, next(self._order), planned))

    def remaining(self) -> float:
        """Expected seconds of all runs that are in no block, one after another."""
        waiting = sum(
            count * self._durations.estimate(self._kinds[kind])
            for counts in self._counts.values()
            for kind, count in counts.items()
        )
        return waiting + sum(self._durations.estimate(planned.run) for _, _, planned in self._held)

    def next(self, within: float = math.inf) -> list[Planned]:
        """The next block; empty if there is none now.

        Args:
            within: seconds; runs that are known to take longer are left where they are.
        """
        return self._again(within) or self._new(within)

    def _again(self, within: float) -> list[Planned]:
        """Runs of one cell whose time has come again."""
        block: list[Planned] = []
        kept = []
        while self._held and self._held[0][0] <= self._clock():
            entry = heapq.heappop(self._held)
            planned = entry[2]
            first = block[0] if block else planned
            alike = (planned.group, planned.source) == (first.group, first.source)
            if alike and len(block) < self._size(first.run, within):
                block.append(planned)
            else:
                kept.append(entry)
        for entry in kept:
            heapq.heappush(self._held, entry)
        return block

    def _new(self, within: float) -> list[Planned]:
        cell = self._choose(within)
        if cell is None:
            return []
        block = [cell.waiting.popleft() for _ in range(min(len(cell.waiting), self._size(cell.run, within)))]
        self._counts[cell.priority][cell.likeness] -= len(block)
        if not self._counts[cell.priority][cell.likeness]:
            del self._counts[cell.priority][cell.likeness]
        return block

    def _choose(self, within: float) -> _Cell | None:
        """The cell whose turn it is, which leaves the round."""
        for priority in sorted(self._counts, reverse=True):
            fitting = {kind for kind in self._counts[priority] if self._size(self._kinds[kind], within)}
            if not fitting:
                continue
            if not any(cell.waiting and cell.likeness in fitting for cell in self._round):
                self._backwards = not self._backwards
                cells = [cell for cell in self._cells.values() if cell.waiting and cell.priority == priority]
                self._round = deque(_ordered(cells, self._backwards))
            turn = [cell for cell in self._round if cell.waiting and cell.likeness in fitting]
            cell = turn[0]
            if stragglers := self._stragglers(priority, fitting):
                waiting = [cell for cell in self._cells.values() if cell.waiting and cell.priority == priority]
                cell = next(cell for cell in [*turn, *waiting] if cell.likeness in stragglers)
            if cell in self._round:
                self._round.remove(cell)
            return cell
        return None

    def _stragglers(self, priority: int, fitting: set[object]) -> set[object]:
        """The kinds of run that take longest, if one that starts any later may well be the last to end."""
        expected = {kind: self._durations.estimate(self._kinds[kind]) for kind in self._counts[priority]}
        longest = max(expected[kind] for kind in fitting)
        left = sum(count * expected[kind] for kind, count in self._counts[priority].items())
        return {kind for kind in fitting if expected[kind] == longest} if 2 * longest > left / self.slots else set()

    def _size(self, run: Run, within: float) -> int:
        """Enough runs to fill ``BLOCK_SECONDS``, but never more than leave two blocks for every slot, or than fit in.

        So no slot idles while another works off the last block (guided self-scheduling: Polychronopoulos & Kuck, 1987).
        """
        known = self._durations.known(run)
        if known is not None and known > within:
            return 0
        seconds = max(self._durations.estimate(run), 1e-3)
        wanted = math.floor(min(BLOCK_SECONDS, within) / seconds)
        return max(1, min(wanted, math.ceil(len(self) / (2 * self.slots))))


def likeness(run: Run) -> object:
    """What runs have in common that take about as long."""
    return run.trainer, run.architecture, run.dataset, run.recipe


def _ordered(cells: Sequence[_Cell], backwards: bool) -> list[_Cell]:
    trainers = list(dict.fromkeys(cell.trainer for cell in cells))
    groups = {group: number for number, group in enumerate(dict.fromkeys(cell.group for cell in cells))}

    def place(cell: _Cell) -> tuple[int, int, bool, bool]:
        trainer = trainers.index(cell.trainer)
        varies = cell.run.varies
        return -trainer if backwards else trainer, groups[cell.group], bool(varies), "onebit" in varies

    return sorted(cells, key=place)
