"""Which runs go together, and in which order: what Ray Tune schedules is one cell with a block of its runs.

A trial costs about a tenth of a second and a block shares that cost, so short runs come in larger blocks. Blocks are
cut when they are asked for, from what is known by then of how long runs take.
"""

from __future__ import annotations

import math
from collections import deque
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
        count, total = self._seen.get(_likeness(run), (0, 0.0))
        self._seen[_likeness(run)] = count + 1, total + seconds

    def estimate(self, run: Run) -> float:
        """Seconds that a run will take: the mean of those with its trainer, architecture, dataset and recipe."""
        count, total = self._seen.get(_likeness(run), (0, 0.0))
        return total / count if count else self._guess(run)


class Blocks:
    """Hands out blocks of runs.

    Block k of every cell comes before block k + 1 of any, so that a sweep that is stopped has equally many replicates
    everywhere. Within such a round a trainer's cells stay together, because a slot that changes trainers starts a new
    process; every other round goes through the trainers backwards, for the same reason. A group's control comes first
    and its onebit cells last, since those are held against the control.

    Args:
        runs: what to train, a cell's runs in the order of their replicates.
        slots: how many runs train side by side.
        durations: what is known of how long runs take.
    """

    def __init__(self, runs: Iterable[Planned], slots: int, durations: Durations) -> None:
        self._slots = slots
        self._durations = durations
        self._cells: dict[object, deque[Planned]] = {}
        for planned in runs:
            self._cells.setdefault((planned.group, planned.source), deque()).append(planned)
        self._round: deque[deque[Planned]] = deque()
        self._backwards = True

    @property
    def left(self) -> list[Planned]:
        """The runs that are in no block yet."""
        return [planned for cell in self._cells.values() for planned in cell]

    def next(self) -> list[Planned]:
        """The next block; empty if none is left."""
        if not self._round:
            self._backwards = not self._backwards
            self._round.extend(_ordered([cell for cell in self._cells.values() if cell], self._backwards))
        if not self._round:
            return []
        cell = self._round.popleft()
        return [cell.popleft() for _ in range(min(len(cell), self._size(cell[0].run)))]

    def _size(self, run: Run) -> int:
        """Enough runs to fill ``BLOCK_SECONDS``, but never more than leave two blocks for every slot.

        So no slot idles while another works off the last block (guided self-scheduling: Polychronopoulos & Kuck, 1987).
        """
        left = sum(len(cell) for cell in self._cells.values())
        wanted = math.floor(BLOCK_SECONDS / max(self._durations.estimate(run), 1e-3))
        return max(1, min(wanted, math.ceil(left / (2 * self._slots))))


def _ordered(cells: Sequence[deque[Planned]], backwards: bool) -> list[deque[Planned]]:
    trainers = list(dict.fromkeys(cell[0].run.trainer for cell in cells))
    groups = list(dict.fromkeys(cell[0].group for cell in cells))

    def place(cell: deque[Planned]) -> tuple[int, int, bool, bool]:
        run = cell[0].run
        trainer = trainers.index(run.trainer)
        return -trainer if backwards else trainer, groups.index(cell[0].group), bool(run.varies), "onebit" in run.varies

    return sorted(cells, key=place)


def _likeness(run: Run) -> object:
    return run.trainer, run.architecture, run.dataset, run.recipe
