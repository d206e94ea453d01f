"""How often a run is tried again: every kind of failure has a budget of its own.

What is no failure of the run costs nothing and never comes here: its node or its slot went away, it was preempted,
someone stopped the sweep, another sweep trains it, the store did not answer, or the hardware is of another class than
its group's.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

Next = Literal["again", "elsewhere", "over"]

OUT_OF_MEMORY_RETRIES = 1
"""Once more in a fresh process, whose memory nothing else has fragmented."""

HARDWARE_RETRIES = 5
"""Each on another device, as far as there is one: the run is not to blame."""


class Budgets:
    """Decides what becomes of a run whose attempt left no record.

    Args:
        errors: how often a run that raised, crashed or hung is tried again.
    """

    def __init__(self, errors: int = 1) -> None:
        self._errors = errors
        self._used: dict[str, Counter[str]] = {}

    def after(self, id: str, outcome: str) -> Next:
        """What follows a failed attempt, which is counted.

        Args:
            id: the run's.
            outcome: of the attempt: ``out_of_memory``, ``error``, ``timeout`` or ``hardware``.

        Returns:
            ``again``: in a fresh process, anywhere; ``elsewhere``: on another device; ``over``: its budget is used up.
        """
        kind = "error" if outcome == "timeout" else outcome
        used = self._used.setdefault(id, Counter())
        used[kind] += 1
        if kind == "hardware":
            return "elsewhere" if used[kind] <= HARDWARE_RETRIES else "over"
        allowed = OUT_OF_MEMORY_RETRIES if kind == "out_of_memory" else self._errors
        return "again" if used[kind] <= allowed else "over"

    def failed(self, id: str) -> int:
        """How many attempts of a run have failed so far in this launch."""
        return self._used[id].total() if id in self._used else 0

    def forget(self, id: str) -> None:
        """Drop what was counted of a run that has ended."""
        self._used.pop(id, None)
