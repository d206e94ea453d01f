"""A process with everything that it has started, found and ended through ``/proc``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "NOISEGRID_MARK"
"""An environment variable that a process hands down to everything it starts, whoever becomes its parent."""

END_SECONDS = 30.0
"""How long to wait for killed processes to be gone. One that waits for a broken device or file system may never be."""

_PROC = Path("/proc")


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    group: int
    session: int
    ended: bool
    """Whether it is gone but for its exit code."""


def family(pid: int, mark: str = "") -> list[int]:
    """A process and all that stem from it and still live, as far as that can be seen.

    These are its descendants, whatever is of its session, and, if a ``mark`` is given, whatever was started with that
    value of ``MARK``: a process that has left the session and lost its parents has kept its environment.
    """
    processes = _processes()
    members = {each.pid for each in processes if pid in (each.pid, each.group, each.session)}
    if mark:
        members |= {each.pid for each in processes if each.pid not in members and _mark(each.pid) == mark}
    while more := {each.pid for each in processes if each.parent in members and each.pid not in members}:
        members |= more
    return sorted(each.pid for each in processes if each.pid in members and not each.ended)


def end(pid: int, mark: str) -> bool:
    """Kill a process and all that stem from it; returns whether all are gone.

    Args:
        pid: a process that leads a session of its own and has not been waited for, so that the number is still its.
        mark: the value of ``MARK`` that it was started with.
    """
    deadline = time.monotonic() + END_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    # Again and again, since one of them may have been starting another.
    while left := family(pid, mark):
        kill(left)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def kill(pids: list[int]) -> None:
    """Kill some processes, of which some may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def began(pid: int) -> str | None:
    """When a process of this machine started, in clock ticks since the machine did.

    Together with its number that names it: numbers are given anew. Empty where the system does not tell, None if it is
    gone, be it but for its exit code.
    """
    try:
        state, *fields = _stat(pid)
    except FileNotFoundError:
        return None if (_PROC / "self" / "stat").exists() else ""
    except ProcessLookupError:
        return None
    return None if state in "ZX" else fields[18]


def _stat(pid: int | str) -> list[str]:
    """What the system says of a process, from its state on: before that is its name, which may hold anything."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _processes() -> list[_Process]:
    """All processes of this machine; none where there is no ``/proc``."""
    found = []
    try:
        names = os.listdir(_PROC)
    except OSError:
        return []
    for name in names:
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent, group, session = _stat(name)[:4]
            found.append(_Process(int(name), int(parent), int(group), int(session), state in "ZX"))
    return found


def _mark(pid: int) -> str:
    """The value of ``MARK`` that a process was started with; empty if it has none or belongs to someone else."""
    prefix = f"{MARK}=".encode()
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            if line.startswith(prefix):
                return line.removeprefix(prefix).decode(errors="replace")
    return ""
