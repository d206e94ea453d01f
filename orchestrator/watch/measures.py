"""The measures of a sweep that is still running, and what it has cost: from the records, each read once."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from orchestrator.naming import CellKey
from orchestrator.store import Store
from protocols.until import Until

if TYPE_CHECKING:
    from orchestrator.analysis.intervals import Estimate

COLUMNS = ("id", "outcome", "accuracy", "seconds", "device", "process")
"""What is read of a record."""

CPU = "cpu"
"""The device of a run that has a CPU core."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a cell's accuracy, in percent (of the SD: in percentage points)."""

    n: int
    """Replicates that enter."""
    mean: Estimate
    sd: Estimate


class Measures:
    """Accuracies and device time of records, added as they come; each record enters once.

    Args:
        until: the protocol's.
    """

    def __init__(self, until: Until | None = None) -> None:
        self._until = until
        self.device_seconds: dict[str, float] = {}
        """``core`` or ``GPU`` -> seconds of it that runs took; a share of a GPU counts as that share."""
        self.outcomes: dict[CellKey, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        """How many records of each outcome a cell has."""
        self.ids: set[str] = set()
        """The records that have been added."""
        self.unit = "core"
        """What the newest record's run had: a ``core`` or a ``GPU``."""
        self.share = 1.0
        """How much of it: less than 1 where several runs share a GPU."""
        self._accuracies: dict[CellKey, list[float]] = defaultdict(list)
        self._shares: dict[str, float] = {}
        self._measured: dict[CellKey, Measured] = {}

    def add(self, records: Batch, keys: Mapping[str, CellKey]) -> None:
        """Take note of records.

        Args:
            records: what :func:`read` returned.
            keys: the cell of each of their ids, and perhaps of others.
        """
        self._shares |= records.shares
        columns = (records.table[name].to_pylist() for name in COLUMNS)
        for id, outcome, accuracy, seconds, device, process in zip(*columns, strict=True):
            if id in self.ids:
                continue
            self.ids.add(id)
            key = keys[id]
            self.outcomes[key][outcome] += 1
            if accuracy is not None and math.isfinite(accuracy):
                self._accuracies[key].append(accuracy)
            self.runs_have(0.0 if device == CPU else self._shares.get(process, self.share))
            self.spend(seconds, device)

    def runs_have(self, gpus: float) -> None:
        """From now on runs have so many GPUs; 0: a CPU core."""
        self.unit, self.share = ("GPU", gpus) if gpus else ("core", 1.0)

    def spend(self, seconds: float, device: str) -> None:
        """Add device time: of an attempt that left no record, too.

        Args:
            seconds: wall time.
            device: ``cpu``, else a GPU, of which the attempt is taken to have had what the newest record's run had.
        """
        unit = "core" if device == CPU else "GPU"
        share = self.share if unit == self.unit else 1.0
        self.device_seconds[unit] = self.device_seconds.get(unit, 0.0) + seconds * share

    def of(self, key: CellKey, *, adaptive: bool = False) -> Measured | None:
        """Mean and SD of a cell's accuracies, with intervals as in the report; None without any.

        Args:
            key: the cell.
            adaptive: whether its replicates follow from looks, whose level the interval of its SD then has.
        """
        values = self._accuracies.get(key, [])
        known = self._measured.get(key)
        if values and (known is None or known.n != len(values)):
            self._measured[key] = known = _measure(values, self._until if adaptive else None)
        return known


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Part of the store's records."""

    table: pa.Table
    """``COLUMNS``"""
    shares: Mapping[str, float]
    """Process -> the share of a GPU that its runs had, for processes that were not known."""


class Reader:
    """Reads records of a store.

    A run's share of a GPU stands in its provenance, which is long. A process has one share for all of its runs, so one
    record of each process is asked for it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._processes: set[str] = set()

    def read(self, ids: set[str]) -> Batch:
        """Some runs' records; runs without a readable one are left out."""
        table = self._store.table(COLUMNS, ids)
        unknown: dict[str, str] = {}
        for id, device, process in zip(*(table[name].to_pylist() for name in ("id", "device", "process")), strict=True):
            if device != CPU and process not in self._processes:
                unknown.setdefault(process, id)
        self._processes |= set(unknown)
        shares: dict[str, float] = {}
        if unknown:
            asked = self._store.table(["process", "provenance"], set(unknown.values()))
            shares = dict(zip(asked["process"].to_pylist(), map(_share, asked["provenance"].to_pylist()), strict=True))
        return Batch(table=table, shares=shares)


def _share(provenance: str) -> float:
    values: dict[str, Any] = json.loads(provenance)
    return float(values["slot"]["gpus"])


def _measure(values: list[float], until: Until | None) -> Measured:
    from orchestrator.analysis import intervals  # with SciPy, which is only needed once there is something to measure
    from orchestrator.analysis.quantities import QUANTITIES

    accuracies = np.array(values)
    level = intervals.LEVEL if until is None else until.level
    return Measured(
        n=len(values),
        mean=intervals.mean(accuracies, bounds=(0.0, 1.0)) * QUANTITIES["accuracy_mean"].scale,
        sd=intervals.spread(accuracies, level) * QUANTITIES["accuracy_sd"].scale,
    )
