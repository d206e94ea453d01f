"""One training process: how it is started, spoken to, watched over and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from orchestrator import catalog
from orchestrator.slot import memory, processes
from orchestrator.slot.context import Settings
from orchestrator.slot.outcomes import text_outcome
from orchestrator.slot.output import Output

LOG_TAIL = 4000
"""Bytes of a process's output that go into a failure's row."""

SLICE = 0.25
"""Seconds after which a silent process is looked at."""

_DYING_SECONDS = 10.0
"""How long a process that closed its connection may take to end."""

_LONGEST_FOLDER = 60
"""Letters of a temporary folder in which sockets can still be made, of whose paths the system allows about 107."""

_LINK = "noisegrid-tmp-"


class Died(Exception):
    """A training process ended without finishing its run; ``str`` says how."""

    def __init__(self, message: str, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Child:
    """One training process, the connection to it and what it prints.

    Args:
        trainer: the trainer that it serves.
        profile: the determinism profile that it serves.
        settings: passed on to it.
        folder: where its temporary files go; they are deleted when it is ended.
    """

    def __init__(self, trainer: str, profile: str, settings: Settings, folder: Path) -> None:
        self.serves = (trainer, profile)
        self.controls: set[str] = set()
        """Groups whose control was trained here."""
        self.training = False
        """Whether a run is under way."""
        self.attempt: int | None = None
        """Number of the attempt under way, once the process has given it one."""
        self.grown = ""
        """Why another process should do the next run; empty if this one can."""
        self.output = Output()
        self.shown, self.shown_size = time.monotonic(), 0
        """When what it printed was last kept in the store, and how many bytes that were."""
        self._used = False
        self._mark = uuid.uuid4().hex
        self._kills = memory.oom_kills()
        self._temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=folder))
        self._link = _link(self._temporary)
        self._connection, theirs = Pipe()
        environment = {
            **os.environ,
            # What can be imported here can be imported there.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TMPDIR": str(self._link or self._temporary),
            processes.MARK: self._mark,
            **({} if settings.gpus else {"CUDA_VISIBLE_DEVICES": ""}),
            **catalog.trainer(trainer).environment(profile, settings.threads, settings.gpus),
        }
        arguments = [str(os.getpid()), str(theirs.fileno()), json.dumps(dataclasses.asdict(settings))]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    # Unbuffered: what it printed before it was killed is worth having.
                    [sys.executable, "-u", "-P", "-m", "orchestrator.slot.worker", *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self.output.writing,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    # Out of reach of the terminal's Ctrl-C, and one session with whatever it starts.
                    start_new_session=True,
                )
        finally:
            os.close(self.output.writing)
        self._guard = memory.Guard(self._process.pid, settings.memory_limit, settings.memory_share or 1.0)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._exit_code() is None

    def begin(self) -> None:
        """Call it before each attempt. What a new process prints while it starts is its first one's."""
        self.attempt, self.training = None, True
        if self._used:
            self.output.begin()
        self._used = True
        self.shown, self.shown_size = time.monotonic(), 0
        self._kills = memory.oom_kills()

    def send(self, message: dict[str, Any]) -> None:
        """Raises Died if the process is gone."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            raise self._death() from None

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or None if none comes in time.

        Raises:
            Died: the process is gone. That is not left to the connection alone, whose other end something may hold
                that the process has started.
        """
        deadline = time.monotonic() + seconds
        try:
            while True:
                ended = not self.alive
                if self._connection.poll(0 if ended else max(0.0, min(SLICE, deadline - time.monotonic()))):
                    message: dict[str, Any] = json.loads(self._connection.recv_bytes())
                    return message
                if ended:
                    raise self._death()
                if time.monotonic() >= deadline:
                    return None
        except (EOFError, OSError, ValueError):
            raise self._death() from None

    def rest(self, seconds: float) -> None:
        """Have the run that is under way, if one is, stop after its epoch and leave a checkpoint, if it can in time."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Died, ProcessLookupError):
            if self.training:
                os.kill(self.pid, signal.SIGTERM)
            while self.training:
                message = self.receive(max(0.0, deadline - time.monotonic()))
                self.training = message is not None and message["kind"] in ("started", "epoch")

    def end(self) -> bool:
        """Kill the process and what it started, and delete its temporary files; returns whether all are gone.

        Safe at any moment: the store's writes are all or nothing.
        """
        self._guard.stop()
        gone = processes.end(self._process.pid, self._mark)
        if gone:
            self._process.wait()
        self._connection.close()
        self.output.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if self._link is not None:
            self._link.unlink(missing_ok=True)
        return gone

    def _exit_code(self) -> int | None:
        """How the process ended, a signal as a negative number; None while it runs.

        It is not waited for, so that its number, which is also that of its session, stays its own until the end.
        """
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _death(self) -> Died:
        deadline = time.monotonic() + _DYING_SECONDS
        while (code := self._exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.output.settle()
        if self._guard.verdict:
            return Died(f"{self._guard.verdict}: its process was ended", "out_of_memory")
        if code is None:
            return Died("the training process closed its connection", "error")
        if code >= 0:
            return Died(f"the training process ended with exit code {code}", "error")
        name = signal.Signals(-code).name
        if name != "SIGKILL":
            # What a framework prints before it aborts.
            return Died(f"the training process was killed by {name}", text_outcome(self.output.tail(LOG_TAIL)))
        kills = memory.oom_kills()
        if kills is None or self._kills is None:
            return Died("the training process was killed by SIGKILL, perhaps by the system for want of memory", "error")
        if kills > self._kills:
            return Died("the training process was killed by the system for want of memory", "out_of_memory")
        return Died("the training process was killed by SIGKILL", "error")


def _link(folder: Path) -> Path | None:
    """A short path to a folder, where its own is too long for sockets. Links that killed processes left are deleted."""
    if len(str(folder)) <= _LONGEST_FOLDER:
        return None
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"{_LINK}*"):
        if old.is_symlink() and not old.exists():
            with contextlib.suppress(OSError):
                old.unlink()
    link = place / f"{_LINK}{uuid.uuid4().hex[:12]}"
    link.symlink_to(folder)
    return link
