"""The files of ``compacted/``: each repeats the short columns of many records, so that they are read in one go.

A part is a copy and never the truth. A row says which file it was read from (name, size, time of modification, and on
S3 its tag) and is believed only where ``records/`` lists that very file; so a part that is late, lost, repeated or
superseded can neither add, hide nor double a record. One that is not exactly what was written is overlooked.

Of a part, ``PART.parquet`` holds the columns that are asked for often, sealed as a record is. A column that is long and
seldom needed has a file of its own, ``PART.COLUMN.parquet``, whose digest stands in the metadata of the first. That one
is written last and deleted first.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from orchestrator.store import encoding
from orchestrator.store.files import Entry, Files, StoreError
from orchestrator.store.schema import RECORD_SCHEMA, SHORT_COLUMNS, VERSION, VERSION_KEY

FOLDER = "compacted"

RARE = ("specification", "tensor_digests", "seeds", "provenance")
"""Short columns that have files of their own."""

_COMMON = tuple(name for name in SHORT_COLUMNS if name not in RARE)
_OWN = {"size": pa.int64(), "modified": pa.int64(), "tag": pa.string()}
"""What of a record's file its row repeats, beside the id."""
_SCHEMA = pa.schema([*map(RECORD_SCHEMA.field, _COMMON), *_OWN.items()])
_DIGESTS = b"noisegrid_columns"
_NAME = re.compile(r"([0-9a-f]{32})(?:\.(\w+))?\.parquet")

Key = tuple[str, int, int, str]
"""A record's file: name, size, time of modification, tag."""


@dataclass(frozen=True, eq=False)
class Part:
    """One part that was read and found to be what was written."""

    name: str
    """32 hexadecimal digits."""
    data: bytes
    """Its first file, a few hundred bytes a record."""
    keys: list[Key]
    """The file that each row was read from."""
    digests: Mapping[str, str]
    """Of the files of :data:`RARE`, by column."""


class Parts:
    """The parts that a store has, each read once."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known: dict[Entry, Part | None] = {}
        self._rows: dict[Key, tuple[Part, int]] = {}

    def refresh(self) -> None:
        """Read what has been added to ``compacted/``, and forget what has been deleted.

        A part that is deleted between being listed and being read has been superseded: then the list is read again.
        """
        for _ in range(3):
            listed = [entry for entry in self._files.entries(FOLDER) if is_part(entry.name)]
            known, vanished = {}, False
            for entry in listed:
                if entry in self._known:
                    known[entry] = self._known[entry]
                elif (data := self._get(entry.name)) is None:
                    vanished = True
                else:
                    known[entry] = decode(entry.name.removesuffix(".parquet"), data)
            if known.keys() != self._known.keys():
                whole = [part for part in known.values() if part is not None]
                self._rows = {file: (part, row) for part in whole for row, file in enumerate(part.keys)}
            self._known = known
            if not vanished:
                return

    def __contains__(self, entry: Entry) -> bool:
        """Whether a part repeats this very file."""
        return key(entry) in self._rows

    @property
    def all(self) -> dict[str, Part | None]:
        """The parts by name, as of the last refresh; None: it is not what was written."""
        return {entry.name.removesuffix(".parquet"): part for entry, part in self._known.items()}

    def rows(self, entries: Sequence[Entry], names: Sequence[str]) -> tuple[list[int], list[pa.Table]]:
        """What is known of some records.

        Args:
            entries: their files.
            names: short columns.

        Returns:
            The positions in ``entries`` of those that a part repeats, and their rows in that order.
        """
        found: list[int] = []
        tables: list[pa.Table] = []
        for _ in range(2):  # A column's file may have been superseded since the part was read.
            asked: dict[Part, tuple[list[int], list[int]]] = {}
            left = sorted(set(range(len(entries))) - set(found)) if found else range(len(entries))
            for position in left:
                if (place := self._rows.get(key(entries[position]))) is not None:
                    positions, rows = asked.setdefault(place[0], ([], []))
                    positions.append(position)
                    rows.append(place[1])
            failed = False
            for part, (positions, rows) in asked.items():
                table = self.columns(part, names)
                if table is None:
                    failed = True
                    continue
                whole = rows == list(range(table.num_rows))
                tables.append(table if whole else take(table, rows))
                found += positions
            if not failed:
                break
            self.refresh()
        return found, tables

    def columns(self, part: Part, names: Sequence[str]) -> pa.Table | None:
        """Short columns of a part; None if the file of one is not there or not what was written."""
        common = encoding.read(part.data, [name for name in names if name not in RARE])
        columns = {}
        for name in names:
            column = self._rare(part, name) if name in RARE else common[name]
            if column is None:
                return None
            columns[name] = column
        return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(map(RECORD_SCHEMA.field, columns)))

    def is_whole(self, part: Part) -> bool:
        """Whether all its other files are there and what was written."""
        return all(self._rare_file(part, name) is not None for name in RARE)

    def _rare(self, part: Part, name: str) -> pa.ChunkedArray | None:
        data = self._rare_file(part, name)
        return None if data is None else encoding.read(data)[name]

    def _rare_file(self, part: Part, name: str) -> bytes | None:
        data = self._get(f"{part.name}.{name}.parquet")
        return data if data is not None and hashlib.sha256(data).hexdigest() == part.digests[name] else None

    def _get(self, name: str) -> bytes | None:
        """A file; None also where it cannot be delivered, since the records themselves are there to be read."""
        try:
            return self._files.get(f"{FOLDER}/{name}")
        except StoreError:
            return None


def write(files: Files, table: pa.Table, entries: Sequence[Entry]) -> Part:
    """Add a part.

    Args:
        files: the store's.
        table: the short columns of some records.
        entries: their files, in the same order.
    """
    name, digests = uuid.uuid4().hex, {}
    for column in RARE:
        data = encoding.encode_table(table.select([column]))
        files.put(f"{FOLDER}/{name}.{column}.parquet", data)
        digests[column] = hashlib.sha256(data).hexdigest()
    own = [pa.array([getattr(entry, field) for entry in entries], kind) for field, kind in _OWN.items()]
    metadata = {VERSION_KEY: str(VERSION), _DIGESTS: json.dumps(digests)}
    common = pa.Table.from_arrays([*table.select(list(_COMMON)).columns, *own], schema=_SCHEMA.with_metadata(metadata))
    data = encoding.sealed(encoding.encode_table(common), _title(name))
    files.put(f"{FOLDER}/{name}.parquet", data)
    return Part(name, data, list(map(key, entries)), digests)


def delete(files: Files, name: str) -> None:
    """Delete a part."""
    for path in (f"{FOLDER}/{name}.parquet", *(f"{FOLDER}/{name}.{column}.parquet" for column in RARE)):
        files.delete(path)


def decode(name: str, data: bytes) -> Part | None:
    """A part from its first file; None if that is not exactly what was written under this name."""
    if not encoding.is_sealed(data, _title(name)):
        return None
    try:
        table = encoding.read(data, ["id", *_OWN])
        metadata: Mapping[bytes, Any] = table.schema.metadata
        digests = json.loads(metadata[_DIGESTS])
    except (*encoding.UNREADABLE, KeyError, TypeError):
        return None
    names = [f"{id}.parquet" for id in table["id"].to_pylist()]
    own = [table[name].to_pylist() for name in _OWN]
    return Part(name, data, list(zip(names, *own, strict=True)), digests)


def is_part(name: str) -> bool:
    """Whether a file of ``compacted/`` is named as the first one of a part."""
    match = _NAME.fullmatch(name)
    return match is not None and match[2] is None


def part_of(name: str) -> str | None:
    """The part that a file of ``compacted/`` belongs to by its name; None if it is none of the project's."""
    match = _NAME.fullmatch(name)
    return match[1] if match is not None and match[2] in (None, *RARE) else None


def take(table: pa.Table, rows: Sequence[int]) -> pa.Table:
    """Some rows of a table.

    Their numbers do not go through :func:`pyarrow.array`, which imports pandas: that takes longer than the reading.
    """
    numbers = pa.py_buffer(np.array(rows, np.int64))
    return table.take(pa.Array.from_buffers(pa.int64(), len(rows), [None, numbers]))


def key(entry: Entry) -> Key:
    """What names a file of ``records/``."""
    return entry.name, entry.size, entry.modified, entry.tag


def _title(name: str) -> str:
    return f"compacted {VERSION} {name}"
