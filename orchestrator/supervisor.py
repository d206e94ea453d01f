"""Feeds runs to a warm training process, and ends it whenever that is the right answer.

A process serves one (trainer, determinism profile), because a profile's switches are global to a process and partly
read at import. Another profile, an error, a crash, a hang: all are answered by one act, ending the process and starting
the next. The supervisor itself imports no framework, so nothing that a framework does can take it down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from orchestrator import catalog, devices, records
from orchestrator.store import Spool, StoreError, open_store
from orchestrator.worker import Settings
from protocols.run import Run

BETWEEN_SECONDS = 120.0
"""How long the command between runs may take before it is ended."""

LOG_TAIL = 4000
"""Bytes of a process's output that go into a failure's row."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to be trained, and the label of its varying sources."""

    run: Run
    source: str
    log: Sequence[Sequence[int]] | None = None
    """What asynchronous training must follow, see :attr:`protocols.contract.Outcome.commits`."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened while a run was trained."""

    kind: str
    """``started``, ``epoch``, ``done``, ``retried`` (an attempt failed and another follows), ``failed`` (none follows),
    or ``tick`` (time has passed)."""
    id: str
    images: int = 0
    """Training images seen since the last event."""
    seconds: float | None = None
    """Of ``done``: what the run took; None where its record was there already."""
    message: str = ""
    """Of ``retried`` and ``failed``: what happened, in one line."""
    refused: bool = False
    """Of ``failed``: whether the run may well be trained on another machine."""


class Died(Exception):
    """A training process ended without finishing its run; ``str`` says how."""


class Supervisor:
    """Trains runs one after another in processes of its own.

    Args:
        settings: passed on to every process.
        folder: where the processes' output and the rows of unfinished runs are kept; None: a temporary one.
        retries: how often a run that failed is tried again, each time in a fresh process.
        patience: seconds without a finished epoch after which a run counts as hung.
    """

    def __init__(
        self, settings: Settings, *, folder: Path | None = None, retries: int = 1, patience: float = 3600.0
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="noisegrid-", dir=folder))
        self._settings = dataclasses.replace(settings, spool=str(self._folder))
        self._retries = retries
        self._patience = patience
        self._store = open_store(settings.store)
        self._child: _Child | None = None

    def train(self, jobs: Iterable[Job], *, tick: float = 1.0) -> Iterator[Event]:
        """Train runs in the given order, and tell what happens as it happens.

        A run that has a record already is passed over. A run that fails leaves a row among the store's failures for
        every attempt, and the next run follows, even if it is the store that failed.

        Args:
            jobs: the runs.
            tick: seconds after which an event comes even if nothing happened.
        """
        for job in jobs:
            try:
                yield from self._job(job, tick)
            except StoreError as error:
                yield Event(kind="failed", id=job.run.id, message=str(error))

    def close(self) -> None:
        """End the process, whatever it is doing, and delete its files on this machine. Records and checkpoints stay."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _job(self, job: Job, tick: float) -> Iterator[Event]:
        run, failed = job.run, 0
        while not self._store.has(run.id):
            if not self._serves(run, fresh=failed > 0):
                self._end()
            between_runs = self._between_runs()
            child = self._child_for(run)
            started = records.now()
            end = yield from self._follow(child, job, between_runs, tick)
            if end["kind"] == "done":
                yield Event(kind="done", id=run.id, seconds=end["seconds"])
                return
            self._end()
            if self._store.has(run.id):  # It died after the commit, before it could say so.
                break
            if end["kind"] == "interrupted":  # Someone asked the process to go, which is no failure of the run's.
                continue
            number = child.attempt or self._store.begin(run.id)
            attempt = records.Attempt(
                number=number,
                started=started,
                finished=records.now(),
                host=socket.gethostname(),
                process="",
                device=devices.device(self._settings.gpus),
            )
            message = end["message"] + self._progress(run)
            self._store.fail(
                records.failure(
                    run, job.source, attempt, end["outcome"], message, end.get("traceback", ""), child.log_tail()
                )
            )
            failed += 1
            refused = end["outcome"] == "hardware"  # Other hardware will not come by itself.
            kind = "retried" if failed <= self._retries and not refused else "failed"
            yield Event(kind=kind, id=run.id, message=message, refused=refused)
            if kind == "failed":
                return
        yield Event(kind="done", id=run.id)

    def _between_runs(self) -> dict[str, Any] | None:
        """Run the command that comes before each run, and say what became of it; None where there is none."""
        command = self._settings.between_runs
        if command is None:
            return None
        began = time.monotonic()
        code: int | None = None
        with subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                code = process.wait(BETWEEN_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        return {"command": command, "exit_code": code, "seconds": round(time.monotonic() - began, 3)}

    def _follow(
        self, child: _Child, job: Job, between_runs: dict[str, Any] | None, tick: float
    ) -> Generator[Event, None, dict[str, Any]]:
        """One attempt at a run; returns the message that ended it."""
        images, heard = 0, time.monotonic()
        try:
            child.send(
                {
                    "specification": job.run.specification,
                    "source": job.source,
                    "log": job.log,
                    "between_runs": between_runs,
                }
            )
            while True:
                message = child.receive(tick)
                if message is None:
                    if time.monotonic() - heard > self._patience:
                        problem = f"no epoch was finished for {self._patience:g} s: the process was ended"
                        return {"kind": "failed", "outcome": "timeout", "message": problem}
                    yield Event(kind="tick", id=job.run.id)
                    continue
                heard = time.monotonic()
                if message["kind"] == "started":
                    child.attempt, images = message["attempt"], message["images"]
                    yield Event(kind="started", id=job.run.id)
                elif message["kind"] == "epoch":
                    yield Event(kind="epoch", id=job.run.id, images=images)
                else:
                    return message
        except Died as death:
            return {"kind": "failed", "outcome": "error", "message": str(death)}

    def _serves(self, run: Run, *, fresh: bool) -> bool:
        """Whether a run may be trained in the process that is there.

        A group's control proves that its sources are held across processes. So its replicate 1 is the first run of a
        process, and its replicate 0 never shares one with an earlier replicate.
        """
        child = self._child
        if child is None or fresh or self._settings.isolation == "process":
            return False
        again = not run.varies and (run.replicate == 1 or (run.replicate == 0 and run.group in child.controls))
        return child.serves == (run.trainer, run.profile) and not again

    def _child_for(self, run: Run) -> _Child:
        """The process that is there, else the next one."""
        if self._child is None:
            self._child = _Child(run.trainer, run.profile, self._settings, self._folder)
        self._child.attempt = None
        if not run.varies:
            self._child.controls.add(run.group)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _progress(self, run: Run) -> str:
        """How far an attempt came, from the rows that it left on this machine."""
        rows = Spool.read(self._folder / f"{run.id}.arrows")
        return f" (after epoch {rows[-1].epoch} of {run.recipe.epochs})" if rows else ""


class _Child:
    """One training process and the connection to it."""

    def __init__(self, trainer: str, profile: str, settings: Settings, folder: Path) -> None:
        self.serves = (trainer, profile)
        self.controls: set[str] = set()
        """Groups whose control was trained here."""
        self.attempt: int | None = None
        """Number of the attempt under way, once the process has given it one."""
        self._log = folder / f"{time.monotonic_ns()}.log"
        self._connection, theirs = Pipe()
        environment = {
            **os.environ,
            # What can be imported here can be imported there.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **({} if settings.gpus else {"CUDA_VISIBLE_DEVICES": ""}),
            **catalog.trainer(trainer).environment(profile, settings.threads, settings.gpus),
        }
        arguments = [str(os.getpid()), str(theirs.fileno()), json.dumps(dataclasses.asdict(settings))]
        with self._log.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "orchestrator.worker", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                # Out of reach of the terminal's Ctrl-C, and one group with whatever it starts.
                start_new_session=True,
            )

    def send(self, message: dict[str, Any]) -> None:
        """Raises Died if the process is gone."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            raise Died(self._death()) from None

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or None if none comes in time. Raises Died if the process is gone."""
        try:
            if self._connection.poll(seconds):
                message: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return message
        except (EOFError, OSError):
            raise Died(self._death()) from None
        return None

    def end(self) -> None:
        """Kill the process and what it started. Safe at any moment: the store's writes are all or nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def log_tail(self) -> str:
        """The end of what the process printed."""
        return self._log.read_bytes()[-LOG_TAIL:].decode(errors="replace")

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "the training process closed its connection"
        if code >= 0:
            return f"the training process ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = ", perhaps by the system for want of memory" if name == "SIGKILL" else ""
        return f"the training process was killed by {name}{hint}"
