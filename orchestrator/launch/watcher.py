"""Between Ray Tune and the scheduler: Tune tells what its slots report and asks for the next block.

Tune calls back several times a second, unless nothing is running: then it does nothing but ask for a block, again and
again. So whatever is to be looked at from time to time is looked at on both occasions.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from ray import cloudpickle, tune
from ray.tune.experiment import Trial

from orchestrator.launch.gate import GATE_SECONDS
from orchestrator.launch.scheduler import Scheduler
from orchestrator.launch.searcher import Over

TRIALS_PER_FIT = 2000
"""Tune never forgets a trial, and slows down with their number; so it is started afresh after so many."""

LOOK_SECONDS = 1.0
"""Time between two looks at the cluster's nodes."""

ELSEWHERE_SECONDS = 5.0
"""Time between two looks for the records of runs that other sweeps are training."""


class Room(Protocol):
    """How many runs the cluster has room for."""

    def __call__(self) -> tuple[int, int]:
        """(side by side on the present nodes, blocks that Tune is to have at a time: more make a cluster grow)"""


class Shown(Protocol):
    """Where progress is shown."""

    def refresh(self) -> None:
        """Show the present state, if it is time to."""

    def say(self, text: str) -> None:
        """Print a line that stays."""


class Watcher(tune.Callback):
    """Drives one sweep from within Tune.

    Args:
        scheduler: what is to be done.
        display: where progress is shown.
        room: see there.
        gate: opens and closes the gate for the slots, which is closed at first.
        has: whether the store has a run's record.
        interrupted: set when the sweep is to end.
        deadline: of ``time.monotonic``, when it is to end at the latest.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        display: Shown,
        *,
        room: Room,
        gate: Callable[[bool], None],
        has: Callable[[str], bool],
        interrupted: threading.Event,
        deadline: float = math.inf,
    ) -> None:
        self._scheduler = scheduler
        self._display = display
        self._room = room
        self._gate = gate
        self._has = has
        self._interrupted = interrupted
        self._deadline = deadline
        self.slots, self._limit = room()
        self._looked = self._sought = time.monotonic()
        self._suggested = 0
        self._closed = True
        self._closed_at = 0.0
        self._waited_in_vain = False
        self.out_of_time = False

    def __getstate__(self) -> dict[str, Any]:
        """Tune saves its callbacks, for a resumption that is never asked of it."""
        return {}

    @property
    def stopping(self) -> bool:
        """Whether the sweep is to end now, whatever is left."""
        return self._interrupted.is_set() or bool(self._scheduler.stopped) or self.out_of_time

    @property
    def ending(self) -> bool:
        """Whether Tune is to end what it does now: the sweep ends, or only slots that train no more hold it up."""
        idle = self._suggested >= TRIALS_PER_FIT and self._scheduler.trials == len(self._scheduler.parked)
        return self.stopping or self._scheduler.over or idle

    def begin(self) -> None:
        """Tune is started, afresh, with slots of its own."""
        self._scheduler.restarted()
        self._suggested = 0
        self._waited_in_vain = False
        self._closed_at = time.monotonic()
        self._set_gate(open=False)

    # What Tune asks

    def suggest(self, trial: str) -> dict[str, Any] | None:
        """The configuration of the next block, None if there is none now.

        Raises:
            Over: nothing more is to be begun.
        """
        self._look()
        if self.stopping or self._scheduler.over:
            raise Over
        if self._scheduler.trials - len(self._scheduler.parked) >= self._limit:
            return None
        left = self._deadline - time.monotonic()
        block = self._scheduler.block(trial, left)
        if block is not None:
            self._suggested += 1
        elif left < math.inf and not self._scheduler.training and not self._scheduler.resting(left):
            self.out_of_time = True  # Nothing that is left would end in time.
            raise Over
        return block

    # What Tune tells

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A slot took on a block."""
        self._scheduler.started(trial.trial_id)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """A slot reported what it did since its last report."""
        self._scheduler.report(trial.trial_id, result)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A slot is through with its block."""
        self._scheduler.ended(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A slot is gone, with its node or alone, or has raised something."""
        gone, message = cause(trial)
        if gone:
            self._scheduler.lost(trial.trial_id, blame=gone == "actor", message=message)
        else:
            self._scheduler.broken(trial.trial_id, message)

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Several times a second."""
        self._look()
        self._tend_gate(trials)

    # In detail

    def _look(self) -> None:
        self._display.refresh()
        now = time.monotonic()
        if now >= self._deadline:
            self.out_of_time = True
        if now >= self._sought + ELSEWHERE_SECONDS:
            self._sought = now
            self._scheduler.elsewhere(self._has)
        if now < self._looked + LOOK_SECONDS:
            return
        self._looked = now
        before = self.slots
        slots, limit = self._room()
        if slots > before:
            # Those that are through with a block are to wait for the new ones, so first the gate.
            self._waited_in_vain = False
            self._set_gate(open=False)
        elif slots < before:
            self._scheduler.shrunk()
        if slots != before:
            self._display.say(f"{slots:,} side by side now")
        self.slots, self._limit = slots, limit
        self._scheduler.slots(max(1, slots))
        parked = len(self._scheduler.parked)
        if parked >= slots > 0 and not self._scheduler.stopped:
            reason = next(iter(self._scheduler.parked.values()))
            self._scheduler.stopped = f"no device is left that can be trusted: {reason}"

    def _tend_gate(self, trials: Sequence[Trial]) -> None:
        """Keep the gate closed while slots are being started that there is room for, but not for ever."""
        if self.slots <= 1 or self.ending:
            self._set_gate(open=True)
            return
        actors = starting = 0
        for trial in trials:
            if trial.status in (Trial.PENDING, Trial.RUNNING):
                has_actor = trial.status == Trial.RUNNING or trial.temporary_state.ray_actor is not None
                actors += has_actor
                starting += not has_actor
        awaited = min(starting, self.slots - actors) > 0
        if not awaited:
            self._waited_in_vain = False
        elif self._closed and time.monotonic() > self._closed_at + GATE_SECONDS:
            self._waited_in_vain = True
        self._set_gate(open=not awaited or self._waited_in_vain)

    def _set_gate(self, *, open: bool) -> None:
        if open == self._closed:
            self._closed = not open
            self._closed_at = time.monotonic()
            self._gate(open)


class Stopper(tune.Stopper):
    """Has Tune stop all slots, in good order, once the watcher says so."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether to stop one trial: it ends by itself."""
        return False

    def stop_all(self) -> bool:
        """Whether to stop; asked several times a second."""
        return self._watcher.ending


def cause(trial: Trial) -> tuple[str, str]:
    """What became of a trial's slot.

    Returns:
        ``node`` or ``actor`` if that is gone, and empty if it raised an exception; and what happened, in one line.
    """
    if not trial.pickled_error_file:
        return "actor", "its actor died"
    error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    if isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed:
        node = error.preempted or "node" in str(error).partition("\n")[0].lower()
        return ("node" if node else "actor"), "its slot died while it was trained"
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
        return "", f"{type(error).__name__}: {error}".splitlines()[0]
    return "", str(error).strip().splitlines()[-1]
