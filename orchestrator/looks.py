"""Looks of adaptive protocols: what was found at each, and what they grant.

How many replicates every cell is to have follows from the recorded looks alone, whoever took them and in whatever
order, so that any process that reads a store plans the same runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from protocols.until import Until

NARROW = "narrow"
"""The cell stops: its interval is narrower than what was declared."""
GOES_ON = "goes on"
"""The cell is to have the next look's replicates, where the budget has room for them."""
AT_MOST = "at most"
"""The cell stops: this was the last look."""
BUDGET = "budget"
"""The cell would go on, but other cells with wider intervals got what was left of the budget."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at one cell: taken once, and never again with other numbers."""

    declaration: str
    """:attr:`protocols.until.Until.declaration`"""
    cell: str
    """The id of the cell's first replicate."""
    identity: Mapping[str, Any]
    """The cell in words: trainer, architecture, dataset, varying sources and their kinds, base seed."""
    group: str
    source: str
    look: int
    """Its number, from 1."""
    looks: int
    """Out of how many."""
    replicates: int
    """How many the cell had by then, in all."""
    n: int
    """Those of them that ended ok."""
    diverged: tuple[int, ...]
    """Replicates that are left out because they diverged."""
    absent: tuple[int, ...]
    """Replicates that are left out because they failed for good: there was no record of them."""
    sd: float | None
    """Of the accuracy (ddof=1), in percentage points, as are the ends of its interval."""
    low: float | None
    high: float | None
    level: float
    width: float
    """What ``high - low`` must be below."""
    decision: str
    """``narrow``, ``goes on`` or ``at most``."""
    reason: str
    """Why there is no interval; empty where there is one."""
    time: str
    """When it was taken, UTC."""

    @property
    def spread(self) -> float:
        """How wide the interval is; NaN where there is none."""
        return math.nan if self.low is None or self.high is None else self.high - self.low


_NAMES = {field.name for field in fields(Look)}

Looks = Mapping[tuple[str, int], Look]
"""By cell and number."""


def read_looks(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], Look]:
    """Recorded looks by cell and number; what is none is left out."""
    found = {}
    for row in rows:
        if row.keys() >= _NAMES:
            values: dict[str, Any] = {
                name: tuple(row[name]) if isinstance(row[name], list) else row[name] for name in _NAMES
            }
            found[row["cell"], row["look"]] = Look(**values)
    return found


@dataclass(frozen=True, kw_only=True)
class Grants:
    """What looks grant."""

    replicates: Mapping[str, int]
    """By cell: how many it is to have, by what is known."""
    short: frozenset[str]
    """Cells that stop for the budget's sake."""
    most: int
    """Replicates of all cells that there may be in the end."""


def grant(until: Until, cells: Sequence[str], looks: Looks) -> Grants:
    """How many replicates each cell is to have.

    Every cell has its first look's. From look to look, the next step is granted to all cells that go on if the budget
    has room for all that go on or may yet do so, those included that were not looked at so far. Otherwise it is granted
    once all cells of that round have been looked at: widest interval first, those without an interval last, cells that
    are equal in the order given. So what is granted in the end does not hang on the order in which runs end.

    Args:
        until: what was declared.
        cells: names of all cells that share the budget, in the order of the plan.
        looks: those that were taken.
    """
    schedule = until.schedule
    replicates = dict.fromkeys(cells, schedule[0])
    short: set[str] = set()
    budget = math.inf if until.budget is None else until.budget
    room = budget - schedule[0] * len(cells)
    present, possible = list(cells), 0  # those that have this round's replicates, and how many more may come to it
    for number, (now, then) in enumerate(zip(schedule, schedule[1:], strict=False), start=1):
        found = [look for cell in present if (look := looks.get((cell, number))) is not None]
        going = [look for look in found if look.decision == GOES_ON]
        possible += len(present) - len(found)
        step = then - now
        if step * (len(going) + possible) > room:
            if possible:
                break  # they are waited for
            going.sort(key=lambda look: -1.0 if math.isnan(look.spread) else look.spread, reverse=True)
            affordable = int(room // step)
            short |= {look.cell for look in going[affordable:]}
            going = going[:affordable]
        room -= step * (len(going) + possible)
        for look in going:
            replicates[look.cell] = then
        present = [cell for cell in present if replicates[cell] == then]
    stopped = short | {look.cell for look in looks.values() if look.decision != GOES_ON}
    most = sum(count if cell in stopped else schedule[-1] for cell, count in replicates.items())
    return Grants(replicates=replicates, short=frozenset(short), most=int(min(most, budget)))
