"""Adaptive protocols while they run: take the looks that are due, record them, say what they grant."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from orchestrator.looks import AT_MOST, GOES_ON, NARROW, Look, grant, read_looks
from orchestrator.plan import Plan, Planned, Replicated
from orchestrator.store import Store
from protocols.until import Until


class Looking:
    """Follows the cells of a plan whose number of replicates looks decide.

    A cell is looked at when all the replicates granted to it have ended, those that failed for good included; a look
    that another process took in the meantime counts in place of one's own. Without such cells nothing is done, at no
    cost.

    Args:
        plan: made against the same store.
        store: where the records are and the looks go.
    """

    def __init__(self, plan: Plan, store: Store) -> None:
        self._until = plan.protocol.until
        self._store = store
        self._cells = {cell.name: cell for cell in plan.growing}
        if self._until is None or not self._cells:
            return
        self._names = list(self._cells)
        self._looks = read_looks(store.looks(self._until.declaration))
        self._granted = dict.fromkeys(self._names, 0)
        self._left: dict[str, set[str]] = {name: set() for name in self._names}
        self._ended: set[str] = set()  # cells of which nothing is left, unless they were looked at since
        self._cell_of: dict[str, str] = {}
        self._new: list[Planned] = []
        """Granted, and not returned yet."""
        self._extend(plan.done.__contains__, ())
        self._new = []  # The plan has those.

    def after(self, ids: Collection[str]) -> list[Planned]:
        """Take the looks that are due when further runs have ended.

        Args:
            ids: runs that are done, or failed for good, since the last call; at first none, for the looks that were due
                when an earlier sweep was stopped.

        Returns:
            The runs that are granted thereby and have no record, in the order to run.

        Raises:
            StoreError: it refused. Nothing is lost by that: the next call, with whatever ids, does what is left to do.
        """
        if self._until is None or not self._cells:
            return []
        for id in ids:
            if (cell := self._cell_of.pop(id, None)) is not None:
                self._left[cell].discard(id)
                if not self._left[cell]:
                    self._ended.add(cell)
        while self._ended:
            ended = sorted(self._ended, key=self._names.index)
            due = self._due(self._until, ended)
            for name, accuracies in self._accuracies(due).items():
                look = take(self._until, self._cells[name], accuracies)
                if self._store.record_look(look.declaration, look.cell, look.look, vars(look)):
                    self._looks[look.cell, look.look] = look
            self._looks |= read_looks(self._store.looks(self._until.declaration, self._looks.keys()))
            self._extend(self._store.has, ended)
        new, self._new = self._new, []
        return new

    def _due(self, until: Until, ended: Sequence[str]) -> list[str]:
        """Cells whose granted replicates have all ended and were not looked at."""
        numbers = {count: number for number, count in enumerate(until.schedule, start=1)}
        return [name for name in ended if (name, numbers[self._granted[name]]) not in self._looks]

    def _accuracies(self, names: Sequence[str]) -> dict[str, list[float | None]]:
        """For each cell the accuracies of its granted replicates: NaN if one diverged, None if there is no record."""
        ids = {name: [self._cells[name].id(number) for number in range(self._granted[name])] for name in names}
        table = self._store.table(["id", "outcome", "accuracy"], {id for own in ids.values() for id in own})
        found = {
            row["id"]: row["accuracy"] if row["outcome"] == "ok" and row["accuracy"] is not None else math.nan
            for row in table.to_pylist()
        }
        return {name: [found.get(id) for id in own] for name, own in ids.items()}

    def _extend(self, has: Callable[[str], bool], ended: Collection[str]) -> None:
        """Follow the grants of all looks known by now, and note the new runs that have no record.

        Args:
            has: whether a run has one. Nothing has changed if it raises.
            ended: cells of which nothing was left, that have been looked at.
        """
        assert self._until is not None
        counts = grant(self._until, self._names, self._looks).replicates
        further = {
            name: [self._cells[name].planned(number) for number in range(self._granted[name], counts[name])]
            for name in self._names
        }
        absent = {name: [entry for entry in entries if not has(entry.id)] for name, entries in further.items()}
        self._ended -= set(ended)
        for name, entries in absent.items():
            self._left[name] |= {entry.id for entry in entries}
            self._cell_of |= {entry.id: name for entry in entries}
            if further[name] and not self._left[name]:
                self._ended.add(name)
            self._granted[name] = counts[name]
        new = [entry for entries in absent.values() for entry in entries]
        self._new += sorted(new, key=lambda entry: entry.run.replicate)


def take(until: Until, cell: Replicated, accuracies: Sequence[float | None]) -> Look:
    """A look at a cell.

    Args:
        until: what was declared.
        cell: the cell.
        accuracies: of all its granted replicates, shares of the test set; NaN: it diverged; None: there is no record.
    """
    # SciPy is loaded for this only: to plan and to train takes no statistics.
    from orchestrator.analysis.intervals import spread

    known: NDArray[np.float64] = np.array([value for value in accuracies if value is not None and math.isfinite(value)])
    found = spread(100 * known, until.level)
    number = until.schedule.index(len(accuracies)) + 1
    if found.high - found.low < until.width:
        decision = NARROW
    else:
        decision = AT_MOST if number == len(until.schedule) else GOES_ON
    return Look(
        declaration=until.declaration,
        cell=cell.name,
        identity=cell.identity,
        group=cell.group,
        source=cell.source,
        look=number,
        looks=len(until.schedule),
        replicates=len(accuracies),
        n=len(known),
        diverged=tuple(index for index, value in enumerate(accuracies) if value is not None and math.isnan(value)),
        absent=tuple(index for index, value in enumerate(accuracies) if value is None),
        sd=_known(found.value),
        low=_known(found.low),
        high=_known(found.high),
        level=until.level,
        width=until.width,
        decision=decision,
        reason=found.reason,
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
