"""Who trains what now, so that two sweeps on one store do not train a run twice.

A sweep says every few seconds that it lives, by rewriting ``sweeps/SWEEP.json``. Before a run is trained it is claimed:
the n-th claim of a run is the file ``leases/ID.N.json``, which can be created once only, and the highest N is the one
that counts. So a claim is taken over by creating the next one, and of any number of sweeps that try, one can. Claims of
a run are kept until it has a record; a released one says so.

Ages are compared within the store, which gives every file the time of its last change: no clock of any machine matters.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.slot import processes
from orchestrator.store.files import Files, StoreError, now
from orchestrator.store.records import record_path
from orchestrator.store.store import Store

_JOIN_SECONDS = 10.0
"""How long the end of a sweep waits for a heartbeat that is being written."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A driver that is at work on a store."""

    id: str
    host: str
    """Its machine, boot and process namespace: where a process id means the same process."""
    pid: int
    started: str
    """When the process started, in ticks since the machine did: tells a process from a later one of the same id."""
    since: str
    """When it began, in UTC, by its machine's clock: for people to read."""
    command: str
    seconds: float
    """The time without a heartbeat after which its claims are stale."""


@contextlib.contextmanager
def sweeping(store: Store, *, seconds: float = 60.0) -> Iterator[Sweep]:
    """Be a sweep that others see, inside the ``with`` block.

    A daemon thread writes the heartbeat every quarter of ``seconds``. A request that hangs is given up after as long:
    the next one comes in time. While the store cannot be reached it goes on trying: whether the sweep does is not for
    the heartbeat to decide.

    Raises:
        StoreError: the first heartbeat cannot be written.
    """
    sweep = Sweep(
        id=uuid.uuid4().hex,
        host=_host(),
        pid=os.getpid(),
        started=processes.began(os.getpid()) or "",
        since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(sys.argv),
        seconds=seconds,
    )
    ended = threading.Event()
    path = _sweep(sweep.id)

    def beat(files: Files, count: int) -> None:
        files.put(path, _encoded({**asdict(sweep), "heartbeat": count}), durable=False)

    def live() -> None:
        count, hurried = 0, store.files.hurried(seconds / 4)
        while not ended.wait(seconds / 4):
            count += 1
            with contextlib.suppress(StoreError):
                beat(hurried, count)

    beat(store.files, 0)
    thread = threading.Thread(target=live, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield sweep
    finally:
        ended.set()
        thread.join(_JOIN_SECONDS)
        with contextlib.suppress(StoreError):  # Without it the claims go stale a little later.
            store.files.delete(path)


class Leases:
    """The claims of one sweep.

    Args:
        store: where the runs' records go.
        sweep: id of the sweep that claims, see :func:`sweeping`.
        seconds: the time without a heartbeat after which a sweep is dead that does not say it of itself.
    """

    def __init__(self, store: Store, sweep: str, seconds: float) -> None:
        self._files = store.files
        self._sweep = sweep
        self._seconds = seconds
        self._held: dict[str, int] = {}

    def claim(self, id: str, holder: str) -> bool:
        """Claim a run for the sweep; returns whether it is the sweep's now.

        A claim of the same sweep is its own, whoever in it held it. Another's is stale where that sweep has ended, its
        heartbeat is too old, or it ran on this machine and its process is gone. Look for the run's record *after*
        claiming it: another sweep may just have finished it.

        Args:
            id: the run.
            holder: who in the sweep is going to train it; for people to read.

        Raises:
            StoreError: the store cannot be read or written.
        """
        while True:
            number, last = self._last(id)
            if last and not last.get("released"):
                if last.get("sweep") == self._sweep:
                    self._held[id] = number
                    return True
                if self._lives(last.get("sweep")):
                    return False
            claim = {"sweep": self._sweep, "holder": holder}
            if self._files.put_if_absent(_lease(id, number + 1), _encoded(claim), durable=False):
                self._held[id] = number + 1
                return True

    def release(self, id: str) -> None:
        """Give up a claim of this sweep, if it has one; a claim that was taken over is no longer affected.

        Raises:
            StoreError: the store cannot be written.
        """
        number = self._held.pop(id, None)
        if number is None:
            return
        if self._files.stat(record_path(id)) is not None:
            for entry in self._files.entries("leases", f"{id}."):
                self._files.delete(f"leases/{entry.name}")
        else:
            self._files.put(_lease(id, number), _encoded({"sweep": self._sweep, "released": True}), durable=False)

    def _last(self, id: str) -> tuple[int, dict[str, Any]]:
        """The number and content of the claim that counts; 0 where there is none, and empty where it is damaged.

        Claims are asked for one by one, since the listing of a folder may be out of date on a shared file system.
        """
        number, last = 0, b""
        while (data := self._files.get(_lease(id, number + 1))) is not None:
            number, last = number + 1, data
        return number, _decoded(last)

    def _lives(self, id: Any) -> bool:
        """Whether the sweep of that id may still be at work."""
        data = self._files.get(_sweep(str(id)))
        entry = self._files.stat(_sweep(str(id)))
        if data is None or entry is None:
            return False
        sweep = _decoded(data)
        if ended_here(sweep):
            return False
        seconds = sweep.get("seconds")
        allowed = seconds if isinstance(seconds, int | float) else self._seconds
        return now(self._files) - entry.modified <= 10**9 * allowed


def ended_here(sweep: Mapping[str, Any]) -> bool:
    """Whether a sweep, as its file says, ran on this machine and its process is gone."""
    return sweep.get("host") == _host() and _gone(sweep.get("pid"), sweep.get("started"))


def _lease(id: str, number: int) -> str:
    return f"leases/{id}.{number}.json"


def _sweep(id: str) -> str:
    return f"sweeps/{id}.json"


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _decoded(data: bytes) -> dict[str, Any]:
    """What is in a file of this module; empty if it is not whole, as a power failure may leave it."""
    try:
        content = json.loads(data)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _host() -> str:
    """Names the machine, since it was started, and the namespace of process ids, as far as the system tells."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _gone(pid: Any, started: Any) -> bool:
    """Whether a process of this machine has ended, though there be another of its id."""
    known = isinstance(pid, int) and isinstance(started, str) and started != ""
    return known and processes.began(pid) != started
