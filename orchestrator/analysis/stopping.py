"""Cells whose number of replicates was decided by looks: at which level they are judged, and where they stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from orchestrator.analysis.intervals import LEVEL, Estimate
from orchestrator.analysis.rows import CELL, ends, frame, identity, values
from orchestrator.looks import BUDGET, GOES_ON, Look, Looks, grant
from protocols.until import Until, percent

if TYPE_CHECKING:
    from orchestrator.analysis.sweep import Cell, Sweep

LOOKS = (
    *(*CELL, "look", "looks", "replicates", "n", "diverged", "absent"),
    *(*ends("accuracy_sd"), "level", "width", "decision", "notes"),
)


class Stopping:
    """What looks have decided.

    Args:
        until: what was declared; None: nothing.
        cells: the ids of the first replicates of all cells that it concerns, in the order of the plan.
        looks: those that were taken.
    """

    def __init__(self, until: Until | None, cells: Sequence[str], looks: Looks) -> None:
        self._until = until
        self._cells = cells
        self._looks = looks
        self._short = grant(until, cells, looks).short if until else frozenset()

    def level(self, cell: Cell) -> float:
        """Of the interval of a cell's accuracy SD."""
        return self._until.level if self._until and _name(cell) in self._cells else LEVEL

    def looks(self, cell: Cell) -> list[Look]:
        """Those that were taken at a cell, in their order."""
        name = _name(cell)
        return [look for (key, _), look in sorted(self._looks.items()) if key == name and key in self._cells]

    def decision(self, look: Look) -> str:
        """What became of a look: its decision, or ``budget`` where there was nothing left to go on with."""
        last = (look.cell, look.look + 1) not in self._looks
        return BUDGET if look.decision == GOES_ON and look.cell in self._short and last else look.decision

    def note(self, cell: Cell) -> str:
        """Where a cell stopped, and at which level it is judged; empty where its replicates were fixed."""
        if self._until is None or _name(cell) not in self._cells:
            return ""
        found, level = self.looks(cell), percent(self._until.level)
        if not found:
            return f"not looked at yet: interval of the accuracy SD at level {level}"
        last = found[-1]
        decision = self.decision(last)
        what = "goes on after" if decision == GOES_ON else "stopped at"
        budget = " for the budget's sake" if decision == BUDGET else ""
        where = f"{what} look {last.look} of {last.looks}{budget}, n = {last.n}"
        text = f"{where}: interval of the accuracy SD at level {level}"
        more = len(cell.ok) - last.n
        return f"{text}; {more} more since" if more > 0 else text


def looks(sweep: Sweep) -> pd.DataFrame:
    """One row a look; see :meth:`Sweep.looks`."""
    rows = []
    for cell in sweep.cells:
        for look in sweep.stopping.looks(cell):
            known = [number if number is not None else float("nan") for number in (look.sd, look.low, look.high)]
            rows.append(
                identity(cell)
                | {name: getattr(look, name) for name in ("look", "looks", "replicates", "n", "level", "width")}
                | {"diverged": len(look.diverged), "absent": len(look.absent)}
                | values("accuracy_sd", Estimate(value=known[0], low=known[1], high=known[2]))
                | {"decision": sweep.stopping.decision(look), "notes": look.reason}
            )
    return frame(rows, *LOOKS)


def _name(cell: Cell) -> str:
    """The id of a cell's first replicate."""
    return str(cell.runs.iloc[0]["id"])
