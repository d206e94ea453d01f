"""How often a cell is repeated where that is not fixed: until its spread is known well enough, looked at so often."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from protocols.errors import UserError

ALPHA = 0.05
"""How often an interval may miss the spread at the look at which its cell stops."""

GROWTH = 3 / 2
"""From one look to the next, where the looks are not listed."""

LEAST = 4
"""Replicates below which a standard deviation has no interval."""


@dataclass(frozen=True, kw_only=True)
class Until:
    """Replicates are added until the interval of the accuracy's standard deviation is narrow.

    All of it is declared beforehand. A cell is looked at when it has so many replicates as one of ``schedule``, and
    nowhere else. Each look's interval has the level 1 - .05 / number of looks (Bonferroni), so that, whatever makes a
    cell stop at one of them, the interval found there misses with a probability of at most 5 %.

    Raises:
        UserError: a value lies outside its range.
    """

    width: float
    """Percentage points. A cell stops at the first look at which its interval's ends lie less than this apart."""
    at_least: int
    """Replicates at the first look."""
    at_most: int
    """Replicates at the last look, where the cell stops in any case."""
    looks: tuple[int, ...] = ()
    """Replicates at each look; empty: from ``at_least`` half as many more each time, up to ``at_most``."""
    budget: int | None = None
    """Runs that all such cells may take together; where they do not suffice, the widest intervals get theirs first.
    None: as many as ``at_most`` allows."""

    def __post_init__(self) -> None:
        if not (self.width > 0 and math.isfinite(self.width)):
            raise UserError(f"until.width must be a finite number above 0 (percentage points), not {self.width}")
        if self.at_least < LEAST:
            raise UserError(
                f"until.at_least must be at least {LEAST}, since a standard deviation of fewer replicates has no "
                f"interval, not {self.at_least}"
            )
        if self.at_most < self.at_least:
            raise UserError(f"until.at_most is {self.at_most}, but until.at_least is {self.at_least}")
        if self.looks:
            counts = ", ".join(map(str, self.looks))
            if any(later <= earlier for earlier, later in zip(self.looks, self.looks[1:], strict=False)):
                raise UserError(f"until.looks must grow from look to look, which {counts} does not")
            if (self.looks[0], self.looks[-1]) != (self.at_least, self.at_most):
                raise UserError(
                    f"until.looks must begin with until.at_least ({self.at_least}) and end with until.at_most "
                    f"({self.at_most}), which {counts} does not"
                )
        if self.budget is not None and self.budget < self.at_least:
            raise UserError(f"until.budget must be at least until.at_least ({self.at_least}), not {self.budget}")

    @property
    def schedule(self) -> tuple[int, ...]:
        """Replicates at each look."""
        if self.looks:
            return self.looks
        counts = [self.at_least]
        while counts[-1] < self.at_most:
            counts.append(min(math.ceil(counts[-1] * GROWTH), self.at_most))
        return tuple(counts)

    @property
    def level(self) -> float:
        """Of the interval at each look."""
        return 1 - ALPHA / len(self.schedule)

    @property
    def declaration(self) -> str:
        """Names what was declared of the looks, 16 hexadecimal digits: another width or schedule is another one.

        The budget is no part of it: it decides who is trained on, not what a look finds.
        """
        declared = json.dumps({"looks": self.schedule, "width": float(self.width)}, sort_keys=True)
        return hashlib.sha256(declared.encode()).hexdigest()[:16]

    @property
    def shared(self) -> str:
        """The budget in words; empty without one."""
        return "" if self.budget is None else f", within {self.budget:,} runs in all (widest intervals first)"

    def __str__(self) -> str:
        counts = ", ".join(map(str, self.schedule))
        looks = f"looks at {counts} replicates" if len(self.schedule) > 1 else f"one look at {counts} replicates"
        return (
            f"until the {percent(self.level)} interval of the accuracy SD is narrower than {self.width:g} percentage "
            f"points; {looks}{self.shared}"
        )


def percent(level: float) -> str:
    """A level as tables write it: ``95 %``, ``99.17 %``."""
    return f"{100 * level:.4g} %"
