"""The records of a store: one immutable file a run, of which any number of readers see whole files only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchestrator.store import encoding
from orchestrator.store.files import Entry, LocalFiles
from orchestrator.store.schema import RECORD_SCHEMA, SHORT_COLUMNS
from protocols.contract import Variant
from protocols.errors import unknown

WHOLE = 2**20
"""Bytes up to which a record is checked whole. Of a larger one the long columns are checked when they are read."""

THREADS = 8

Value = TypeVar("Value")


class Records:
    """What of ``records/`` can be read, and what cannot and why.

    A file is examined once, and again when it has changed. Unreadable files are left out everywhere and named by
    :meth:`corrupt`. Methods raise :class:`orchestrator.store.StoreError` where the file system refuses, or where a
    record is of a newer schema.
    """

    def __init__(self, url: str, files: LocalFiles) -> None:
        self.url = url
        self._files = files
        self._faults: dict[Entry, str | None] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def finished(self) -> set[str]:
        """The ids of all readable records."""
        return {_id(entry) for entry in self._readable()}

    def corrupt(self) -> dict[str, str]:
        """What is wrong with each file of ``records/`` that is no record, by id, or by name where that is no id."""
        faults = {entry.name: fault for entry, fault in self._examined() if fault is not None}
        return {_key(name): fault for name, fault in faults.items()}

    def has(self, id: str) -> bool:
        """Whether there is a readable record; looks at one file."""
        entry = self._files.stat(record_path(id))
        return entry is not None and self._fault(entry) is None

    def set_aside(self, id: str) -> str | None:
        """Move an unreadable record to ``corrupt/``, so that its run can be committed again.

        Args:
            id: a key of :meth:`corrupt`.

        Returns:
            Where it is now; None if nothing unreadable of that id is left in ``records/``.
        """
        for path in (record_path(id), f"records/{id}"):
            entry = self._files.stat(path)
            if entry is not None and self._fault(entry) is not None:
                break
        else:
            return None
        target, number = f"corrupt/{entry.name}", 1
        while self._files.stat(target) is not None:
            number += 1
            target = f"corrupt/{entry.name}.{number}"
        return f"{self.url}/{target}" if self._files.move(path, target) else None

    def table(self, columns: Sequence[str] | None = None, ids: Collection[str] | None = None) -> pa.Table:
        """Records, one row each, sorted by id; unreadable ones are left out.

        Args:
            columns: names, in order; None: all but those with a value per example, step or epoch.
            ids: the runs wanted; None: all.

        Raises:
            UserError: there is no such column.
        """
        names = list(dict.fromkeys(SHORT_COLUMNS if columns is None else columns))
        for name in names:
            if name not in RECORD_SCHEMA.names:
                raise unknown("column of records", name, RECORD_SCHEMA.names)

        def rows(entry: Entry) -> pa.Table | None:
            return self._read(entry, lambda source: encoding.read(source, names))

        entries = self._readable(None if ids is None else set(ids))
        with ThreadPoolExecutor(THREADS) as pool:
            found = [table for table in pool.map(rows, entries) if table is not None]
        return pa.concat_tables([RECORD_SCHEMA.empty_table().select(names), *found])

    def logits(self, ids: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """(id, logits of shape (examples, classes)) in the given order; runs without a readable record are left out.

        A few are read ahead, so memory does not grow with the number of runs. Arrays are read-only.
        """

        return self._each(ids, encoding.read_logits)

    def variants(self, ids: Sequence[str]) -> Iterator[tuple[str, tuple[Variant, ...]]]:
        """(id, the other evaluations of that run, with their logits), like :meth:`logits`."""
        return self._each(ids, encoding.read_variants)

    def _each(self, ids: Sequence[str], read: Callable[[pa.NativeFile], Value]) -> Iterator[tuple[str, Value]]:
        def one(id: str) -> Value | None:
            entry = self._files.stat(record_path(id))
            return None if entry is None or self._fault(entry) is not None else self._read(entry, read)

        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(ids), THREADS):
                batch = ids[start : start + THREADS]
                for id, values in zip(batch, pool.map(one, batch), strict=True):
                    if values is not None:
                        yield id, values

    def _examined(self, ids: set[str] | None = None) -> list[tuple[Entry, str | None]]:
        """The files of ``records/`` (of some runs), sorted by name, each with what is wrong with it."""
        entries = [entry for entry in self._files.entries("records") if ids is None or _id(entry) in ids]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._fault, [entry for entry in entries if entry not in self._faults]))
        return [(entry, self._fault(entry)) for entry in entries]

    def _readable(self, ids: set[str] | None = None) -> list[Entry]:
        return [entry for entry, fault in self._examined(ids) if fault is None]

    def _fault(self, entry: Entry) -> str | None:
        """Why a file of ``records/`` is not what its name says, or None; remembered until the file changes."""
        if entry not in self._faults:
            self._faults[entry] = self._examine(entry)
        return self._faults[entry]

    def _examine(self, entry: Entry) -> str | None:
        path, id = f"records/{entry.name}", _id(entry)
        where = f"{self.url}/{path}"
        if not encoding.is_id(id) or record_path(id) != path:
            return "its name is not that of a record, ID.parquet"
        if entry.size > WHOLE:
            source = self._files.open(path)
            if source is None:
                return "it was moved away"
            with source:
                return encoding.record_fault(source, id, where)
        data = self._files.get(path)
        if data is None:
            return "it was moved away"
        if encoding.seal_holds(data, id):
            return None
        return encoding.record_fault(data, id, where) or "its checksum does not match: it was changed after its commit"

    def _read(self, entry: Entry, read: Callable[[pa.NativeFile], Value]) -> Value | None:
        """Part of a record; None if it turns out to be unreadable."""
        path = f"records/{entry.name}"
        source = self._files.open(path)
        if source is None:
            return None
        with source:
            try:
                return read(source)
            except encoding.UNREADABLE as error:
                self._faults[entry] = encoding.decoding_fault(error, f"{self.url}/{path}")
                return None


def record_path(id: str) -> str:
    """Where the record of a run lies in a store."""
    return f"records/{id}.parquet"


def _id(entry: Entry) -> str:
    return entry.name.removesuffix(".parquet")


def _key(name: str) -> str:
    id = name.removesuffix(".parquet")
    return id if encoding.is_id(id) and name.endswith(".parquet") else name
