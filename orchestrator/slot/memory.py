"""Memory of this machine and of training processes: what a run may take, and when a process has grown too large.

Counted is anonymous memory, which nothing but its owner's end gives back; pages of files (memory-mapped datasets) are
the system's to drop. Pages that a process shares with one it was forked from count for both.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator import devices
from orchestrator.slot import processes

NEARLY_OUT = 0.1
"""A machine with less than this share of its memory left is nearly out of it. Ray kills workers at a twentieth."""

INTERVAL = 0.5
"""Seconds between two looks at a running process."""

FIRST_RUNS = 2
"""After so many runs a process has loaded and built what it keeps."""

MARGIN = 2**30
"""Bytes by which a process may grow after its first runs before another takes its place."""

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """The memory of this machine, or of the cgroup that has less left; bytes."""

    total: int
    available: int

    @property
    def nearly_out(self) -> bool:
        """Whether the system may soon have to kill something."""
        return self.available < NEARLY_OUT * self.total


def machine() -> Machine:
    """What there is, and what of it is left. A place that tells nothing counts as endless."""
    found = [Machine(sys.maxsize, sys.maxsize)]
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        values = {words[0]: 1024 * int(words[1]) for words in lines}
        found.append(Machine(values["MemTotal:"], values["MemAvailable:"]))
        found += [group for group in _cgroups() if group.total < values["MemTotal:"]]
    return min(found, key=lambda each: each.available / each.total)


def anonymous(pids: list[int]) -> int:
    """Bytes of anonymous memory of some processes; one that is gone has none."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += 1024 * int(line.split()[1])
    return total


def oom_kills() -> int | None:
    """How many processes of this machine the system has killed for want of memory; None where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def excess(used: int, state: Machine, limit: int | None, share: float) -> str | None:
    """Why a run must be ended that takes ``used`` bytes; None if it need not.

    Args:
        used: bytes of its process and all that this has started.
        state: of the machine.
        limit: bytes it may take at any time; None: there is no such limit.
        share: of the machine's memory that it may take even when the machine is nearly out of it.
    """
    if limit is not None and used > limit:
        return f"it took {_gib(used)} of memory, more than the {_gib(limit)} that a run may take"
    if state.nearly_out and used > share * state.total:
        return (
            f"it took {_gib(used)} of memory when the machine had {_gib(state.available)} of {_gib(state.total)} left, "
            f"more than its share of {_gib(int(share * state.total))}"
        )
    return None


class Guard:
    """Ends a process, and all that stem from it, before it takes what the machine does not have.

    Args:
        pid: of the process, which leads a session of its own.
        limit: see :func:`excess`, like ``share``.
        share: see :func:`excess`.
    """

    def __init__(self, pid: int, limit: int | None, share: float) -> None:
        self.verdict = ""
        """Why it was ended."""
        self._pid, self._limit, self._share = pid, limit, share
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer; call it before the process is waited for."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            if self._excess() is None:
                continue
            # One at a time: the end of one may leave enough for the others.
            with _alone():
                if (reason := self._excess()) is not None and not self._over.is_set():
                    self.verdict = reason
                    self._kill()
                    return

    def _excess(self) -> str | None:
        state = machine()
        if self._limit is None and not state.nearly_out:
            return None
        return excess(anonymous(processes.family(self._pid)), state, self._limit, self._share)

    def _kill(self) -> None:
        """And see to it that the memory is free before another guard looks."""
        deadline = time.monotonic() + 5
        while (left := processes.family(self._pid)) and time.monotonic() < deadline:
            processes.kill(left)
            time.sleep(0.02)


@dataclass
class Audit:
    """What a training process keeps from run to run, told by itself after each run.

    Args:
        margin: bytes by which it may grow after its first runs.
        measure: gives bytes by kind of memory.
    """

    margin: int
    measure: Callable[[], dict[str, int]]
    _first: dict[str, int] = field(default_factory=dict, init=False)
    _runs: int = field(default=0, init=False)

    def grown(self) -> str | None:
        """Call it after each run: why another process should do the next one, or None."""
        self._runs += 1
        now = self.measure()
        if self._runs <= FIRST_RUNS:
            self._first = {kind: max(size, self._first.get(kind, 0)) for kind, size in now.items()}
            return None
        if self._excess(now) is not None:
            gc.collect()  # What only waits to be collected is no leak.
            now = self.measure()
        return self._excess(now)

    def _excess(self, now: dict[str, int]) -> str | None:
        for kind, size in now.items():
            grown = size - self._first.get(kind, 0)
            if grown > self.margin:
                return f"its process had grown by {_gib(grown)} of {kind} memory in {self._runs - FIRST_RUNS} runs"
        return None


def own(framework: str) -> dict[str, int]:
    """Bytes that this process holds: of anonymous memory, and on a GPU of what its framework has given out there.

    Args:
        framework: the module that trains here. Others are not asked, since that would start them.
    """
    held = {"main": anonymous([os.getpid()])}
    module = sys.modules.get(framework)
    if framework == "torch" and module is not None and module.cuda.is_initialized():
        held["GPU"] = int(module.cuda.memory_allocated())
    if framework == "tensorflow" and module is not None and module.config.list_logical_devices("GPU"):
        held["GPU"] = int(module.config.experimental.get_memory_info("GPU:0")["current"])
    return held


def share(gpus: float, threads: int) -> float:
    """The share of this machine's memory that goes with so many GPUs, or else with so many threads; at most 1."""
    try:
        present = len(devices.gpus()) if gpus else 0
    except OSError:
        present = 0
    return min(1.0, gpus / present if present else threads / (os.cpu_count() or 1))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """While no other guard of this user on this machine does the same."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # Rather several at a time than none.
            file = stack.enter_context(Path(tempfile.gettempdir(), f"noisegrid-memory-{os.getuid()}.lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cgroups() -> Iterator[Machine]:
    """The cgroups that this process is in and that limit memory, of either version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = _CGROUPS / controllers
        names = ("memory.max", "memory.current", "inactive_file")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        place = root / path.lstrip("/")
        # A container may see its own cgroup as the root, under a path that is the host's.
        for folder in {root, place, *(parent for parent in place.parents if root in parent.parents)}:
            with contextlib.suppress(OSError, ValueError):
                limit = int((folder / names[0]).read_text())  # "max" where there is none
                used = int((folder / names[1]).read_text())
                stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                yield Machine(limit, max(0, limit - used + int(stat.get(names[2], 0))))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
