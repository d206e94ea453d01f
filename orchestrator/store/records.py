"""The records of a store: one immutable file a run, of which any number of readers see whole files only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchestrator.store import encoding
from orchestrator.store.files import Entry, Files
from orchestrator.store.parts import Parts, take
from orchestrator.store.schema import LONG_COLUMNS, RECORD_SCHEMA, SHORT_COLUMNS
from protocols.contract import Variant
from protocols.errors import unknown

WHOLE = 2**20
"""Bytes up to which a record is checked whole. Of a larger one the long columns are checked when they are read."""

THREADS = 8

BATCH = 512
"""Records that are read before they are put together, so that a table of many has few pieces."""

Value = TypeVar("Value")


class Records:
    """What of ``records/`` can be read, and what cannot and why.

    A file is examined once, and again when it has changed; one that a part of ``compacted/`` repeats was examined when
    that was written, and its short columns are read there. Unreadable files are left out everywhere and named by
    :meth:`corrupt`. Methods raise :class:`orchestrator.store.StoreError` where the file system refuses, or where a
    record is of a newer schema.
    """

    def __init__(self, url: str, files: Files) -> None:
        self.url = url
        self._files = files
        self.parts = Parts(files)
        """What ``compacted/`` repeats of them."""
        self._faults: dict[Entry, str | None] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def finished(self) -> set[str]:
        """The ids of all readable records."""
        return self.examined()[0]

    def corrupt(self) -> dict[str, str]:
        """What is wrong with each file of ``records/`` that is no record, by id, or by name where that is no id."""
        return self.examined()[1]

    def examined(self) -> tuple[set[str], dict[str, str]]:
        """What :meth:`finished` and :meth:`corrupt` are at one moment, for one listing of ``records/``."""
        found = self._examined()
        finished = {_id(entry) for entry, fault in found if fault is None}
        return finished, {_key(entry.name): fault for entry, fault in found if fault is not None}

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
        return self.withdraw(entry)

    def withdraw(self, entry: Entry) -> str | None:
        """Move a file of ``records/`` to ``corrupt/``, so that its run is trained again.

        Args:
            entry: of :meth:`listed`.

        Returns:
            Where it is now; None if there is no such file any more, or another in its place.
        """
        path = f"records/{entry.name}"
        target, number = f"corrupt/{entry.name}", 1
        while self._files.stat(target) is not None:
            number += 1
            target = f"corrupt/{entry.name}.{number}"
        if self._files.stat(path) != entry:
            return None
        return f"{self.url}/{target}" if self._files.move(path, target) else None

    def condemn(self, entry: Entry, fault: str) -> None:
        """Take a file of ``records/`` for unreadable, for what a closer look has found."""
        self._faults[entry] = fault

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
        wanted = None if ids is None else set(ids)
        return self.rows([entry for entry in self.listed() if wanted is None or _id(entry) in wanted], names)[1]

    def logits(self, ids: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """(id, logits of shape (examples, classes)) in the given order; runs without a readable record are left out.

        A few are read ahead, so memory does not grow with the number of runs. Arrays are read-only.
        """

        return self._each(ids, encoding.read_logits)

    def variants(self, ids: Sequence[str]) -> Iterator[tuple[str, tuple[Variant, ...]]]:
        """(id, the other evaluations of that run, with their logits), like :meth:`logits`."""
        return self._each(ids, encoding.read_variants)

    # By file

    @property
    def files(self) -> Files:
        """The place that the store lies in."""
        return self._files

    def listed(self) -> list[Entry]:
        """The files of ``records/``, sorted by name, after a look at what ``compacted/`` repeats of them."""
        self.parts.refresh()
        return self._files.entries("records")

    def rows(
        self, entries: Sequence[Entry], names: Sequence[str], report: Callable[[int], None] = lambda count: None
    ) -> tuple[list[Entry], pa.Table]:
        """The readable ones of some files of ``records/``, and their rows, in the order given.

        Args:
            entries: of :meth:`listed`.
            names: columns of ``RECORD_SCHEMA``.
            report: is told from time to time how many have been gone through.
        """

        def read(entry: Entry) -> pa.Table | None:
            return self._read(entry, lambda source: encoding.read(source, list(names)))

        readable = [entry for entry in entries if self._faults.get(entry) is None] if self._faults else entries
        short = not set(names) & set(LONG_COLUMNS)
        positions, tables = self.parts.rows(readable, names) if short else ([], [])
        loose = sorted(set(range(len(readable))) - set(positions))
        report(len(entries) - len(loose))
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(loose), BATCH):
                batch = loose[start : start + BATCH]
                rows = list(pool.map(read, [readable[position] for position in batch]))
                positions += [position for position, row in zip(batch, rows, strict=True) if row is not None]
                if pieces := [row for row in rows if row is not None]:
                    tables.append(pa.concat_tables(pieces).combine_chunks())
                report(len(entries) - len(loose) + start + len(batch))
        # Not Schema.empty_table, which imports pandas, and that takes longer than the reading.
        schema = pa.schema(map(RECORD_SCHEMA.field, names), metadata=RECORD_SCHEMA.metadata)
        table = pa.concat_tables([pa.Table.from_batches([], schema), *tables])
        if positions != sorted(positions):
            order = sorted(range(len(positions)), key=positions.__getitem__)
            positions, table = [positions[place] for place in order], take(table, order)
        return [readable[position] for position in positions], table

    def _each(self, ids: Sequence[str], read: Callable[[pa.NativeFile], Value]) -> Iterator[tuple[str, Value]]:
        def one(id: str) -> Value | None:
            entry = self._files.stat(record_path(id))
            return None if entry is None else self._read(entry, read)

        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(ids), THREADS):
                batch = ids[start : start + THREADS]
                for id, values in zip(batch, pool.map(one, batch), strict=True):
                    if values is not None:
                        yield id, values

    def _examined(self) -> list[tuple[Entry, str | None]]:
        """The files of ``records/``, sorted by name, each with what is wrong with it."""
        entries = self.listed()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._fault, [entry for entry in entries if not self._is_known(entry)]))
        faults = {entry: fault for entry, fault in self._faults.items() if fault is not None}
        return [(entry, faults.get(entry) if faults else None) for entry in entries]

    def _is_known(self, entry: Entry) -> bool:
        return entry in self.parts or entry in self._faults

    def _fault(self, entry: Entry) -> str | None:
        """Why a file of ``records/`` is not what its name says, or None; remembered until the file changes."""
        if not self._is_known(entry):
            self._read(entry, lambda source: None)
        return self._faults.get(entry)

    def _read(self, entry: Entry, read: Callable[[pa.NativeFile], Value]) -> Value | None:
        """Part of a record, which is examined first; None if it is or turns out to be unreadable."""
        if self._faults.get(entry) is not None:
            return None
        path, id = f"records/{entry.name}", _id(entry)
        where = f"{self.url}/{path}"
        fault: str | None = "it was moved away"
        if not encoding.is_id(id) or record_path(id) != path:
            fault = "its name is not that of a record, ID.parquet"
        elif entry.size > WHOLE:
            if (source := self._files.open(path)) is not None:
                with source:
                    fault = None if self._is_known(entry) else encoding.record_fault(source, id, where)
                    if fault is None:
                        try:
                            value = read(source)
                            self._faults[entry] = None
                            return value
                        except encoding.UNREADABLE as error:
                            fault = encoding.decoding_fault(error, where)
        elif (data := self._files.get(path)) is not None:
            # The seal says all that an examination would, in a hundredth of the time, so it is looked at every time.
            if encoding.seal_holds(data, id):
                self._faults[entry] = None
                return read(pa.BufferReader(data))
            fault = (
                encoding.record_fault(data, id, where) or "its checksum does not match: it was changed after its commit"
            )
        self._faults[entry] = fault
        return None


def record_path(id: str) -> str:
    """Where the record of a run lies in a store."""
    return f"records/{id}.parquet"


def _id(entry: Entry) -> str:
    return entry.name.removesuffix(".parquet")


def _key(name: str) -> str:
    id = name.removesuffix(".parquet")
    return id if encoding.is_id(id) and name.endswith(".parquet") else name
