"""Feeds runs to a warm training process, and ends it whenever that is the right answer.

A process serves one (trainer, determinism profile), because a profile's switches are global to a process and partly
read at import. Another profile, an error, a crash, a hang, a leak: all are answered by one act, ending the process and
starting the next. The supervisor itself imports no framework, so nothing that a framework does can take it down.

It makes one attempt at each run and tells how that ended; whether there is another, and where, its caller decides.
``docs/faults.md`` says what ends how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator import devices, records
from orchestrator.slot import canary, memory
from orchestrator.slot.between_runs import between_runs
from orchestrator.slot.child import LOG_TAIL, Child, Died
from orchestrator.slot.context import Settings
from orchestrator.slot.retrying import patiently
from orchestrator.store import Spool, StoreError, open_store
from orchestrator.store.leases import Leases
from protocols.run import Run, run_from_specification

HARDWARE_FAILURES = 3
"""After so many in a row, whatever the runs, the device is given up."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt at a run, and the label of the run's varying sources."""

    run: Run
    source: str
    log: Sequence[Sequence[int]] | None = None
    """What asynchronous training must follow, see :attr:`protocols.contract.Outcome.commits`."""
    failed: int = 0
    """How many attempts have failed so far; after one the next has a fresh process."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened while a run was trained."""

    kind: str
    """``started``, ``epoch``, ``done``, ``failed`` (an attempt ended without a record), ``busy`` (another sweep is
    training the run, and nothing was done), ``unstored`` (the store did not answer, so that the run was not tried or
    what it came to is lost, which is no failure of the run's), ``replaced`` (the process had grown too large, and
    another takes its place), ``parked`` (the device is not to be trusted; nothing follows), or ``tick`` (time has
    passed)."""
    id: str
    images: int = 0
    """Training images seen since the last event."""
    seconds: float | None = None
    """Of ``done``: what the run took; None where its record was there already."""
    outcome: str = ""
    """Of ``failed``: ``out_of_memory``, ``error``, ``hardware`` or ``timeout``."""
    message: str = ""
    """Of ``failed``, ``unstored``, ``replaced`` and ``parked``: what happened, in one line."""
    refused: bool = False
    """Of ``failed``: whether it is only that the run's group has trained on hardware of another class."""
    withdrawn: tuple[str, ...] = ()
    """Of ``parked``, the first time: the runs whose records were moved to ``corrupt/``, so that they are missing."""


Events = Generator[Event, None, None]
Ending = Generator[Event, None, dict[str, Any]]
"""Events, and then the message that ended an attempt."""


class Supervisor:
    """Trains runs one after another in processes of its own.

    Args:
        settings: passed on to every process.
        folder: where the processes' temporary files and the rows of unfinished runs are kept; None: a temporary one.
        patience: seconds without a finished epoch after which a run counts as hung.
    """

    def __init__(self, settings: Settings, *, folder: Path | None = None, patience: float = 3600.0) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="noisegrid-", dir=folder))
        share = settings.memory_share or memory.share(settings.gpus, settings.threads)
        self._settings = dataclasses.replace(settings, spool=str(self._folder), memory_share=share)
        self._patience = patience
        self._store = patiently(lambda: open_store(settings.store))
        self._leases = Leases(self._store, settings.sweep, settings.lease_seconds) if settings.sweep else None
        self._device = devices.device(settings.gpus)
        self._holder = f"{socket.gethostname()}:{os.getpid()} {self._device}"
        self._child: Child | None = None
        self._sighting: canary.Sighting | None = None
        """What this device's canary came to, once it has been trained, or again after an error of the hardware."""
        self._sightings = canary.Sightings(self._store)
        self._look = True
        """Whether to look what other devices have left since."""
        self._canary: Run | None = run_from_specification(settings.canary) if settings.canary else None
        self._faults = 0
        """Errors of the hardware in a row."""
        self._parked = ""
        self._withdrawn: tuple[str, ...] = ()
        """Runs whose records were moved away, of which nobody was told yet."""

    def train(self, jobs: Iterable[Job], *, tick: float = 1.0) -> Events:
        """Make one attempt at each of some runs, in the given order, and tell what happens as it happens.

        A run that has a record already is passed over. An attempt that leaves none leaves a row among the store's
        failures, and the next run follows. If it is the store that fails, it has a while to come back, and then the
        run is ``unstored``.

        Args:
            jobs: the runs.
            tick: seconds after which an event comes even if nothing happened.
        """
        self._look = True
        for job in jobs:
            if not self._parked:
                try:
                    yield from self._job(job, tick)
                except StoreError as error:
                    yield Event(kind="unstored", id=job.run.id, message=str(error))
            if self._parked:
                self._end()
                withdrawn, self._withdrawn = self._withdrawn, ()
                yield Event(kind="parked", id=job.run.id, message=self._parked, withdrawn=withdrawn)
                return

    def close(self, grace: float = 0.0) -> None:
        """End the process, whatever it is doing, and delete its files on this machine. Records and checkpoints stay.

        Args:
            grace: seconds that a run under way has to come to the end of its epoch and leave a checkpoint.
        """
        if self._child is not None and grace:
            self._child.rest(grace)
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _job(self, job: Job, tick: float) -> Events:
        run = job.run
        if self._has(run):
            yield Event(kind="done", id=run.id)
        elif self._leases is None:
            yield from self._attempt(job, tick)
        elif not self._claim(run, self._leases):
            yield Event(kind="busy", id=run.id)
        else:
            try:
                yield from self._attempt(job, tick)
            except GeneratorExit:
                self._end()  # Before another sweep can begin the run.
                raise
            finally:
                with contextlib.suppress(StoreError):  # It goes stale with the sweep.
                    self._leases.release(run.id)

    def _has(self, run: Run) -> bool:
        return patiently(lambda: self._store.has(run.id))

    def _claim(self, run: Run, leases: Leases) -> bool:
        return patiently(lambda: leases.claim(run.id, self._holder))

    def _attempt(self, job: Job, tick: float) -> Events:
        run, fresh = job.run, job.failed > 0
        started = records.now()
        end = (yield from self._inspect(run, tick)) if self._settings.gpus else None
        while end is None and not self._parked and not self._has(run):
            if grown := self._retire(run, fresh=fresh):
                yield Event(kind="replaced", id=run.id, message=grown)
            if self._parked:
                return
            child = self._child_for(run)
            if not run.varies:
                child.controls.add(run.group)
            command = self._settings.between_runs
            came = None if command is None else between_runs(command)
            started = records.now()
            request = {"source": job.source, "log": job.log, "between_runs": came, "canary": False}
            end = yield from self._follow(child, run, request, tick)
            if end["kind"] != "done":
                self._end()
            if end["attempt"] is not None:
                self._keep_log(run, end["attempt"], end["printed"])
            if end["kind"] == "interrupted":  # Someone asked the process to go, which is no failure of the run's.
                end, fresh = None, True
        if end is None and self._parked:
            return
        if end is None or end["kind"] == "done" or self._has(run):
            # A process may die after the commit, before it can say so.
            self._faults = 0
            yield Event(kind="done", id=run.id, seconds=None if end is None else end.get("seconds"))
        elif end["kind"] == "unstored":
            yield Event(kind="unstored", id=run.id, message=end["message"])
        else:
            yield self._fail(job, started, end)

    def _fail(self, job: Job, started: datetime, end: dict[str, Any]) -> Event:
        """Keep what is known of an attempt that left no record."""
        run, outcome = job.run, end["outcome"]
        refused = end.get("refused", False)
        message = end["message"] + self._progress(run)
        if outcome == "hardware" and not refused:
            self._faults += 1
            self._sighting = None  # The canary comes first again.
            if self._faults == HARDWARE_FAILURES:
                self._parked = (
                    f"{self._device} of {socket.gethostname()} failed {self._faults} times in a row, the last time "
                    f"with: {end['message']}; nothing more is trained on it"
                )
        try:
            if outcome == "hardware" and not refused:
                self._forget(run)
            number = end["attempt"] or patiently(lambda: self._store.begin(run.id))
            attempt = records.Attempt(
                number=number,
                started=started,
                finished=records.now(),
                host=socket.gethostname(),
                process="",
                device=self._device,
            )
            tail = end["printed"][-LOG_TAIL:]
            row = records.failure(run, job.source, attempt, outcome, message, end.get("traceback", ""), tail)
            if end["attempt"] is None:
                self._keep_log(run, number, end["printed"])
            patiently(lambda: self._store.fail(row))
        except StoreError as error:
            message += f"; and of that nothing could be kept: {error}"
        return Event(kind="failed", id=run.id, outcome=outcome, message=message, refused=refused)

    def _forget(self, run: Run) -> None:
        """Have nobody go on from what this device computed of a run."""
        place = devices.place(socket.gethostname(), self._device)
        patiently(lambda: self._store.forget(place, run.id))
        if "onebit" in run.varies:
            reference = run.without("onebit").id
            patiently(lambda: self._store.forget(place, reference))

    def _inspect(self, run: Run, tick: float) -> Generator[Event, None, dict[str, Any] | None]:
        """See to it that this slot's device computes what others compute, else park the slot.

        Returns:
            What came of it where that could not be found out, as the end of an attempt at ``run``.
        """
        self._canary = self._canary or run.control
        if self._sighting is None:
            found = yield from self._glimpse(self._canary, tick)
            if not isinstance(found, canary.Sighting):
                return found
            left = found
            patiently(lambda: self._sightings.leave(left))
            self._sighting = left
        elif not self._look:
            return None
        if self._doubt(self._sighting) is not None:
            self._end()
            if self._parked:
                return None
            again = yield from self._glimpse(self._canary, tick)
            if not isinstance(again, canary.Sighting):
                return again
            doubt: canary.Doubt | None = canary.Doubt("does not compute it twice to the same bits", proven=False)
            if again.digest == self._sighting.digest:
                doubt = self._doubt(again)
            if doubt is not None:
                sentence = canary.sentence(self._store, again, doubt)
                self._parked, self._withdrawn = sentence.text, sentence.withdrawn
        self._look = False
        return None

    def _doubt(self, own: canary.Sighting) -> canary.Doubt | None:
        """Whether what the devices left so far speaks against this one."""
        return canary.doubt(own, patiently(lambda: self._sightings.beside(own)))

    def _glimpse(self, control: Run, tick: float) -> Generator[Event, None, canary.Sighting | dict[str, Any]]:
        """Train the first epoch of a control here; what it came to, else how it ended."""
        self._retire(control, fresh=False)
        end = yield from self._follow(self._child_for(control), control, {"canary": True}, tick)
        if end["kind"] == "canary":
            return canary.Sighting(
                group=control.group,
                fingerprint=end["fingerprint"],
                host=socket.gethostname(),
                device=self._device,
                digest=end["digest"],
            )
        self._end()
        return {**end, "message": f"the canary, the first epoch of its group's control, ended with: {end['message']}"}

    def _follow(self, child: Child, run: Run, request: dict[str, Any], tick: float) -> Ending:
        """One attempt at a run; returns the message that ended it, with the number that the attempt got, if any, and
        what it printed."""
        images, heard = 0, time.monotonic()
        child.begin()
        try:
            child.send({"specification": run.specification, **request})
            while True:
                message = child.receive(tick)
                self._show_log(child, run)
                if message is None:
                    if time.monotonic() - heard > self._patience:
                        problem = f"no epoch was finished for {self._patience:g} s: the process was ended"
                        message = {"kind": "failed", "outcome": "timeout", "message": problem}
                        break
                    yield Event(kind="tick", id=run.id)
                    continue
                heard = time.monotonic()
                if message["kind"] == "started":
                    child.attempt, images = message["attempt"], message["images"]
                    yield Event(kind="started", id=run.id)
                elif message["kind"] == "epoch":
                    yield Event(kind="tick" if request["canary"] else "epoch", id=run.id, images=images)
                else:
                    break
        except Died as death:
            message = {"kind": "failed", "outcome": death.outcome, "message": str(death)}
        child.training = False
        child.grown = message.get("grown", "")
        child.output.settle()
        return {**message, "attempt": child.attempt, "printed": child.output.text()}

    def _show_log(self, child: Child, run: Run) -> None:
        """Keep in the store what a running attempt has printed so far, now and then and when it has changed."""
        due = time.monotonic() - child.shown >= self._settings.publish_every
        if due and child.attempt is not None and child.output.size != child.shown_size:
            self._keep_log(run, child.attempt, child.output.text())
            child.shown, child.shown_size = time.monotonic(), child.output.size

    def _keep_log(self, run: Run, attempt: int, text: str) -> None:
        if text:
            with contextlib.suppress(StoreError):  # No run fails for the want of its log.
                self._store.put_log(run.id, attempt, text)

    def _retire(self, run: Run, *, fresh: bool) -> str:
        """End the process that is there unless it can train a run; how it had grown, where that is the reason.

        A group's control proves that its sources are held across processes. So its replicate 1 is the first run of a
        process, and its replicate 0 never shares one with an earlier replicate.
        """
        child = self._child
        if child is None:
            return ""
        again = not run.varies and (run.replicate == 1 or (run.replicate == 0 and run.group in child.controls))
        serves = child.serves == (run.trainer, run.profile) and child.alive
        if fresh or again or not serves or self._settings.isolation == "process":
            self._end()
        elif child.grown:
            self._end()
            return child.grown
        return ""

    def _child_for(self, run: Run) -> Child:
        """The process that is there, else the next."""
        if self._child is None:
            self._child = Child(run.trainer, run.profile, self._settings, self._folder)
        return self._child

    def _end(self) -> None:
        if self._child is None:
            return
        gone, pid, self._child = self._child.end(), self._child.pid, None
        if not gone and self._settings.gpus:
            self._parked = (
                f"process {pid} on {self._device} of {socket.gethostname()} cannot be ended, as where a device hangs: "
                "nothing more is trained on it"
            )

    def _progress(self, run: Run) -> str:
        """How far an attempt came, from the rows that it left on this machine."""
        rows = Spool.read(self._folder / f"{run.id}.arrows")
        return f" (after epoch {rows[-1].epoch} of {run.recipe.epochs})" if rows else ""
