"""Which sweeps are at work on a store, and which runs are theirs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from orchestrator.store import Store
from orchestrator.store.files import Entry
from orchestrator.store.leases import ended_here

RUNNING, INTERRUPTED, EITHER = "running", "interrupted", "running or interrupted"
"""What a run is that was begun and has neither a record nor a failure: a living sweep has claimed it, the sweep that
had claimed it is gone, or nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Active:
    """A sweep at work."""

    id: str
    host: str
    pid: int
    command: str
    since: datetime
    heard: float
    """Seconds since its last heartbeat."""


class Sweeps:
    """Looks at the sweeps of a store again and again; never writes.

    A heartbeat's age is this machine's time minus the one that the store gave the file, until a second look shows a new
    heartbeat; from then on it is counted from there, so a clock that is wrong does no harm for long.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._files = store.files
        self._clock = clock
        self._contents: dict[str, tuple[Entry, dict[str, Any]]] = {}
        self._heard: dict[str, tuple[Entry, float]] = {}
        self._active: list[Active] = []

    def active(self) -> list[Active]:
        """The sweeps that live, the first to have started first."""
        now, found = self._clock(), []
        for entry in self._files.entries("sweeps"):
            content = self._content("sweeps", entry)
            before = self._heard.get(entry.name)
            if before is None:
                self._heard[entry.name] = entry, min(entry.modified / 1e9, now)
            elif before[0] != entry:
                self._heard[entry.name] = entry, now
            age = now - self._heard[entry.name][1]
            if content and age <= float(content["seconds"]) and not ended_here(content):
                found.append(
                    Active(
                        id=str(content["id"]),
                        host=str(content["host"]).partition(" ")[0],
                        pid=int(content["pid"]),
                        command=str(content["command"]),
                        since=datetime.fromisoformat(str(content["since"])).astimezone(UTC),
                        heard=age,
                    )
                )
        self._active = sorted(found, key=lambda sweep: sweep.since)
        return self._active

    def states(self, ids: Collection[str]) -> dict[str, str]:
        """``RUNNING``, ``INTERRUPTED`` or ``EITHER`` for runs that were begun, by the last call of :meth:`active`.

        A run that was never claimed is ``EITHER``.
        """
        if not ids:
            return {}
        claims: dict[str, tuple[int, Entry]] = {}
        for entry in self._files.entries("leases"):
            id, _, number = entry.name.removesuffix(".json").partition(".")
            if id in ids and number.isdecimal() and int(number) > claims.get(id, (0, entry))[0]:
                claims[id] = int(number), entry
        active = {sweep.id for sweep in self._active}
        states = dict.fromkeys(ids, EITHER)
        for id, (_, entry) in claims.items():
            claim = self._content("leases", entry)
            if claim:
                lives = claim.get("sweep") in active and not claim.get("released")
                states[id] = RUNNING if lives else INTERRUPTED
        return states

    def _content(self, folder: str, entry: Entry) -> dict[str, Any]:
        """What is in a file, read once; empty where it is not whole or was taken away."""
        path = f"{folder}/{entry.name}"
        known = self._contents.get(path)
        if known is None or known[0] != entry:
            try:
                content = json.loads(self._files.get(path) or b"")
            except ValueError:
                content = {}
            whole = isinstance(content, dict) and (folder == "leases" or _SWEEP <= set(content))
            self._contents[path] = known = entry, content if whole else {}
        return known[1]


_SWEEP = {"id", "host", "pid", "command", "since", "seconds"}
