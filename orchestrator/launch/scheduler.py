"""What becomes of every run of a sweep: handed out in blocks, tried again, given up, or left to another sweep.

Plain bookkeeping, without Ray and without a store: the driver tells it what happened and asks it what is next. What it
is given to call may ask the store, and may be let down by it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.launch.blocks import Blocks, Durations
from orchestrator.launch.budgets import Budgets
from orchestrator.launch.jobs import configuration
from orchestrator.launch.tally import Tally
from orchestrator.plan import Planned
from orchestrator.store import StoreError

ALIKE = 3
"""If the first so many runs fail alike, and none is done, the sweep stops. Refused runs do not count: other machines of
the cluster may train the rest."""

IN_A_ROW = 4
"""After so many failures in a row on one device, of runs that another device then trained, it gets no more. A run that
nobody can train says nothing against a device, however many of its kind there are."""

LOSSES = 10
"""How often a run's slot may die, on a node that lives, without a finished epoch in between. Then it is the run."""

HOLD_SECONDS = 2.0
"""How long a run rests before it is tried again; twice as long each time it comes back untried."""

LONGEST_HOLD_SECONDS = 15.0

SHUNNED = 3
"""How often a run comes back untried from a device that it is to avoid, before that device may have it after all: about
half a minute. Not where hardware failed, or where others are known that may train it and this one trains nothing."""

UNANSWERED = 5
"""How often in a row the store may leave one run, or the driver, without an answer: about a minute, since every time it
was asked several times over."""

_PARTICULARS = re.compile(r"\b[0-9a-f]{8,}\b|\d+")
"""What differs between messages that say the same: ids and numbers."""


@dataclass(kw_only=True)
class _Block:
    """A block on its slot."""

    left: dict[str, Planned]
    """Its runs that have not come to an end there; the first is the one under way."""
    device: str = ""
    shown: tuple[str, str] = "", ""
    """The run that the tally has as running, and its device, which is known from the first report on."""


@dataclass(kw_only=True)
class _Rest:
    """Why a run was put back, and how often in a row it has been."""

    times: int = 0
    avoid: list[str] = field(default_factory=list)
    strictly: bool = False


class Scheduler:
    """Knows every run that has not come to an end.

    Args:
        missing: the runs to be trained.
        blocks: they are in, in the order to hand them out.
        durations: learns what runs took.
        budgets: how often a run is tried again.
        tally: is told what happens.
        say: prints a line that stays.
        bar: has a device train no more blocks: (device, reason).
        grown: the runs that follow from the end of others: adaptive replicates. It may raise StoreError, and is asked
            again, with the same ids.
        planned: all runs of the plan, of which records may turn out to be wrong.
    """

    def __init__(
        self,
        missing: Iterable[Planned],
        blocks: Blocks,
        durations: Durations,
        budgets: Budgets,
        tally: Tally,
        *,
        say: Callable[[str], None] = lambda text: None,
        bar: Callable[[str, str], None] = lambda device, reason: None,
        grown: Callable[[Collection[str]], Sequence[Planned]] = lambda ids: (),
        planned: Iterable[Planned] = (),
    ) -> None:
        self._open = {entry.id: entry for entry in missing}
        self._all = {entry.id: entry for entry in planned} | self._open
        self._blocks = blocks
        self._durations = durations
        self._budgets = budgets
        self._tally = tally
        self._say = say
        self._bar = bar
        self._grown = grown
        self._trials: dict[str, _Block] = {}
        self._rests: dict[str, _Rest] = {}
        self._busy: set[str] = set()
        self._succeeded = False
        self._alike: dict[str, dict[str, str]] = {}  # message without particulars -> run -> device
        # Trusted device -> runs that failed on it since its last success -> whether another has trained them since.
        self._rows: dict[str, dict[str, bool]] = {}
        self._refusing: dict[tuple[str, str], list[str]] = {}  # cell -> devices that are of another class
        self._barred: set[str] = set()
        self._losses: Counter[str] = Counter()
        self._advanced: set[str] = set()  # open runs that have finished an epoch
        self._broken = 0
        self._ended: list[str] = []  # runs of which is not known yet what follows from them
        # How often in a row the store left runs without an answer, and the driver, named by the empty text.
        self._unanswered: Counter[str] = Counter()
        self.parked: dict[str, str] = {}
        """Trials whose slots train no more, and why."""
        self.stopped = ""
        """Why the sweep has to be given up, in words; empty while it need not be."""

    @property
    def over(self) -> bool:
        """Whether every run has come to an end."""
        return not self._open and not self._ended

    @property
    def trials(self) -> int:
        """How many blocks are on slots, or on their way there."""
        return len(self._trials)

    @property
    def training(self) -> bool:
        """Whether a run is in a block on a slot that trains."""
        return any(block.left for trial, block in self._trials.items() if trial not in self.parked)

    def resting(self, within: float) -> bool:
        """Whether something is waited for that may be trained within so many seconds."""
        return bool(self._ended) or self._blocks.resting(within)

    def slots(self, count: int) -> None:
        """So many runs train side by side now."""
        self._blocks.slots = count

    def remaining(self) -> float:
        """Expected seconds of what is left, one run after another."""
        begun = [planned for block in self._trials.values() for planned in block.left.values()]
        return self._blocks.remaining() + sum(self._durations.estimate(planned.run) for planned in begun)

    # Blocks come and go

    def block(self, trial: str, within: float = math.inf) -> dict[str, Any] | None:
        """The next block, as a trial's configuration; None if there is none now.

        Args:
            trial: the Tune trial that is to train it.
            within: seconds; runs that are known to take longer are not begun.
        """
        while handed := self._blocks.next(within):
            # A run that rested may have been done by another sweep since.
            if block := [planned for planned in handed if planned.id in self._open]:
                self._trials[trial] = _Block(left={planned.id: planned for planned in block})
                failed = {planned.id: count for planned in block if (count := self._budgets.failed(planned.id))}
                return configuration(block, failed=failed, avoid=self._shunned(block))
        return None

    def started(self, trial: str) -> None:
        """A slot took on its block."""
        self._show(self._trials[trial])

    def ended(self, trial: str) -> None:
        """A block has ended; what is left of it is handed out again."""
        block = self._trials.pop(trial, None)
        self.parked.pop(trial, None)
        if block is not None:
            self._release(block)

    def lost(self, trial: str, *, blame: bool, message: str) -> None:
        """A slot is gone, which is no failure of its runs.

        Args:
            trial: what it trained.
            blame: whether the run under way may be what took it down; False where the whole node went.
            message: what happened, in one line.
        """
        block = self._trials.get(trial)
        if blame and block is not None and block.left:
            under_way = next(iter(block.left))
            self._losses[under_way] += 1
            if self._losses[under_way] > LOSSES:
                self._give_up(block.left.pop(under_way), message)
        self.ended(trial)

    def broken(self, trial: str, message: str) -> None:
        """A slot raised an exception of its own."""
        block = self._trials.get(trial)
        self._broken += 1
        if self._broken >= max(ALIKE, 2 * self._blocks.slots):
            self.stopped = f"no slot can be set up: {message}"
        if block is not None:
            self._trials.pop(trial)
            self._release(block, HOLD_SECONDS)

    def restarted(self) -> None:
        """No slot is left, and those to come may have other devices."""
        for trial in list(self._trials):
            self.ended(trial)
        self.shrunk()

    # What slots report

    def report(self, trial: str, result: Mapping[str, Any]) -> None:
        """What a slot did since its last report, see :class:`.trainable.Slot`."""
        block = self._trials[trial]
        block.device = result["device"]
        if block.device not in self._barred:
            self._rows.setdefault(block.device, {})
            if len(self._rows) > self._blocks.slots:
                self.shrunk()
        self._tally.seen(result["images"])
        if result["images"] and block.left:
            under_way = next(iter(block.left))
            self._advanced.add(under_way)
            self._losses.pop(under_way, None)
            self._unanswered.pop(under_way, None)
        for id, seconds in result["finished"].items():
            block.left.pop(id, None)
            self.done(id, seconds, block.device)
        for id, (outcome, message, refused) in result["failed"].items():
            if planned := block.left.pop(id, None):
                self._failed(planned, block.device, outcome, message, refused)
        for id in result["busy"]:
            if planned := block.left.pop(id, None):
                self._busy.add(id)
                self._rest(planned)
        for id, message in result["unstored"].items():
            if planned := block.left.pop(id, None):
                self._unheard(id, message)
                self._rest(planned)
        for id in result["returned"]:
            if planned := block.left.pop(id, None):
                self._rest(planned)
        if result["parked"] and trial not in self.parked:
            self.parked[trial] = result["parked"]
            self.distrust(block.device, result["parked"])
        self.reopen(result["withdrawn"])
        self._show(block)

    def done(self, id: str, seconds: float | None = None, device: str = "") -> None:
        """A run has its record, whoever trained it. A block that was lost reports it again."""
        planned = self._open.get(id)
        if planned is None:
            return
        if seconds is not None:
            self._durations.learn(planned.run, seconds)
            self._succeeded = True
            self._broken = 0
            self._unanswered.clear()
            if device in self._rows:
                self._rows[device].clear()
            self._trained(id)
        self._tally.done(id, seconds, device or None)
        self._close(planned)

    def reopen(self, ids: Iterable[str]) -> None:
        """Some runs' records were wrong and have been moved away: those of the plan are trained again."""
        for id in ids:
            if id in self._all and id not in self._open:
                self._open[id] = self._all[id]
                self._tally.undone(id)
                self._blocks.put_back(self._all[id])

    def distrust(self, device: str, reason: str) -> None:
        """Have a device train no more."""
        self._rows.pop(device, None)
        if device not in self._barred:
            self._barred.add(device)
            self._say(f"{device} trains no more: {reason}")
            self._bar(device, reason)

    def shrunk(self) -> None:
        """Slots have left: only devices that train at the moment are known to be there."""
        there = {block.device for block in self._trials.values()}
        self._rows = {device: failed for device, failed in self._rows.items() if device in there}

    def elsewhere(self, has: Callable[[str], bool]) -> None:
        """Look for the records of runs that other sweeps are training, and for what the store could not say before."""
        try:
            for id in [id for id in self._busy if has(id)]:
                self.done(id)
            self._grow()
        except StoreError as error:
            self._unheard("", error)
        else:
            self._unanswered.pop("", None)

    # In detail

    def _failed(self, planned: Planned, device: str, outcome: str, message: str, refused: bool) -> None:
        rest = self._rests.setdefault(planned.id, _Rest())
        if refused:
            self._refused(planned, device, message)
            return
        then = self._budgets.after(planned.id, outcome)
        # What has finished an epoch before does not fail as a study that cannot run does, unless it fails for good.
        telling = then == "over" or planned.id not in self._advanced
        self._look_for_a_cause(planned.id, device, message if telling else "")
        rest.avoid = list(dict.fromkeys([*rest.avoid, device]))
        rest.strictly, rest.times = then == "elsewhere", 0
        if then == "over":
            self._give_up(planned, message)
        else:
            self._tally.again(planned.id)
            self._rest(planned)

    def _refused(self, planned: Planned, device: str, message: str) -> None:
        """A device is of another class than a run's group, as others may be that have not been heard of yet."""
        refusing = self._refusing.setdefault((planned.group, planned.source), [])
        if device not in refusing:
            refusing.append(device)
        elsewhere = set(self._rows) - set(refusing)
        if not elsewhere and (self._all_seen or self._rests[planned.id].times > SHUNNED):
            self._give_up(planned, message)
        else:
            self._tally.again(planned.id)
            self._rest(planned)

    @property
    def _all_seen(self) -> bool:
        """Whether no slot can have a device that has not been heard of. Where several share one nobody knows."""
        parked = {self._trials[trial].device for trial in self.parked}
        return len(self._rows.keys() | parked) >= self._blocks.slots

    def _look_for_a_cause(self, id: str, device: str, message: str) -> None:
        """Blame the study, if too much fails; and take note of what may be the device's fault."""
        if message and not self._succeeded:
            self._alike.setdefault(_PARTICULARS.sub("#", message), {})[id] = device
            (alike, *others) = self._alike.values()
            # One bad device is not the whole study's fault.
            enough = len(alike) >= ALIKE and len(set(alike.values())) >= min(2, len(self._rows))
            if enough and not others:
                self.stopped = f"every run failed alike: {message}"
        if device in self._rows:
            self._rows[device][id] = False

    def _trained(self, id: str) -> None:
        """A run was trained here; it may have failed on other devices before."""
        for device in self._rests[id].avoid if id in self._rests else ():
            row = self._rows.get(device, {})
            if id in row:
                row[id] = True
                if (count := sum(row.values())) >= IN_A_ROW:
                    self.distrust(device, f"{count} runs in a row failed on it that other devices then trained")

    def _shunned(self, block: Sequence[Planned]) -> dict[str, list[str]]:
        """For each run the devices that are not to have it, as long as there are others."""
        avoid = {}
        for planned in block:
            rest = self._rests.get(planned.id, _Rest())
            refusing = self._refusing.get((planned.group, planned.source), [])
            wary = rest.times <= SHUNNED
            shunned = list(dict.fromkeys([*refusing, *rest.avoid]))
            if set(self._rows) <= set(shunned):
                shunned = refusing if wary and not self._all_seen else []
            else:
                strict = rest.strictly or wary
                shunned = [each for each in shunned if strict or each in refusing or self._rows.get(each)]
            if shunned:
                avoid[planned.id] = shunned
        return avoid

    def _unheard(self, who: str, message: object) -> None:
        """The store did not answer: a run, which costs it nothing, or the driver."""
        self._unanswered[who] += 1
        if self._unanswered[who] >= UNANSWERED and not self.stopped:
            self.stopped = f"the store has not answered for about a minute: {message}"

    def _rest(self, planned: Planned) -> None:
        """Hand a run out again in a while."""
        self._tally.idle(planned.id)
        rest = self._rests.setdefault(planned.id, _Rest())
        seconds = min(HOLD_SECONDS * 2.0**rest.times, LONGEST_HOLD_SECONDS)
        rest.times += 1
        self._blocks.put_back(planned, seconds)

    def _release(self, block: _Block, seconds: float = 0.0) -> None:
        """Hand out again what is left of a block."""
        for planned in block.left.values():
            self._tally.idle(planned.id)
            self._blocks.put_back(planned, seconds)

    def _give_up(self, planned: Planned, message: str) -> None:
        self._tally.failed(planned.id, message)
        self._say(f"failed: {planned.id[:12]}: {message}")
        self._close(planned)

    def _close(self, planned: Planned) -> None:
        """A run has come to an end, and others may follow from it."""
        id = planned.id
        del self._open[id]
        self._busy.discard(id)
        self._rests.pop(id, None)
        self._losses.pop(id, None)
        self._advanced.discard(id)
        self._budgets.forget(id)
        waiting = bool(self._ended)
        self._ended.append(id)
        if not waiting:  # Else the store has just not answered, and is asked again in a while.
            try:
                self._grow()
            except StoreError as error:
                self._unheard("", error)

    def _grow(self) -> None:
        """Add what follows from the runs that have ended."""
        if self._ended:
            more = [planned for planned in self._grown(self._ended) if planned.id not in self._all]
            self._ended = []
            if more:
                self._tally.added(more)
                self._blocks.add(more)
                self._open |= {planned.id: planned for planned in more}
                self._all |= {planned.id: planned for planned in more}

    def _show(self, block: _Block) -> None:
        """Tell the tally which run of a block is under way."""
        under_way = next(iter(block.left), "")
        if (under_way, block.device) != block.shown:
            block.shown = under_way, block.device
            if under_way:
                self._tally.started(under_way, block.device)
