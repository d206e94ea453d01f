"""The few operations that a store needs of the place it lies in.

Paths are relative to the store and use ``/``; there is one level of folders. :mod:`orchestrator.store.local` and
:mod:`orchestrator.store.s3` are the places there are.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from protocols.errors import UserError

MARKER = "store.json"
"""The file that makes a place a store."""

TEMPORARY = "tmp"
"""Where files are written before they are moved into place, if they need to be."""

_DAY = 86_400 * 10**9


class StoreError(UserError):
    """A store cannot be used as it was asked to be; one sentence."""


@dataclass(frozen=True)
class Entry:
    """A file of one folder. Equal entries mean that the file has not been replaced."""

    name: str
    size: int
    """Bytes."""
    modified: int
    """Nanoseconds since 1970, by the clock of the place."""
    tag: str = ""
    """What tells apart two contents of one size within one tick of that clock, where the place gives it."""


class Files(Protocol):
    """Files below a folder or a prefix.

    Every method raises :class:`StoreError` where the place refuses. None but the writing ones, and :meth:`create`,
    change anything. Whatever :meth:`put` and :meth:`put_if_absent` are doing when the process is killed, the disk is
    full or the network is gone, a path holds either all of the old bytes or all of the new ones.
    """

    writable: bool
    """False where there is no store yet: everything that writes is refused."""

    exclusive: bool
    """Whether :meth:`put_if_absent` holds against a writer of the same instant, as far as is known yet."""

    @property
    def url(self) -> str:
        """Where the files are, as one would give it on the command line."""

    def create(self, folder: str) -> None:
        """Make a folder and all that it lies in, unless they exist."""

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Write a file, in place of any other of that path.

        Args:
            path: where.
            data: all of it.
            durable: whether it survives a power failure once this returns. Without, it is still whole or absent for
                every reader.
        """

    def put_if_absent(self, path: str, data: bytes, *, durable: bool = True) -> bool:
        """Write a file unless there is one of that path, whoever else is trying to; returns whether it was written.

        Where the place cannot do that in one step (see :attr:`exclusive`), the file is looked for and then written, so
        that two writers within the same instant leave the later one's file, whole.
        """

    def get(self, path: str) -> bytes | None:
        """The bytes of a file, or None if there is none."""

    def open(self, path: str) -> pa.NativeFile | None:
        """A file opened for reading parts of it, or None if there is none."""

    def stat(self, path: str) -> Entry | None:
        """What is known of a file without reading it, or None if there is none."""

    def entries(self, folder: str, prefix: str = "") -> list[Entry]:
        """The files of a folder whose names start with ``prefix``, sorted by name.

        Names that start with ``.`` or ``_`` are left out, as readers of Parquet folders do. A missing folder is empty.
        """

    def names(self) -> list[str]:
        """What lies in the place itself, files and folders, sorted; nothing if it is missing."""

    def delete(self, path: str) -> None:
        """Delete a file, if there is one."""

    def move(self, path: str, to: str) -> bool:
        """Rename a file, in place of any other of that name; returns whether there was one."""

    def probe(self) -> None:
        """Find out about :attr:`exclusive`, in a place that can be written."""

    def hurried(self, seconds: float) -> Files:
        """The same files, for what is better not done than late: nothing is asked twice, nor longer for than this.

        A file system gives no choice in this, so a local place ignores it.
        """


def now(files: Files) -> int:
    """The time by the clock of the place, which may be another than this machine's: nanoseconds since 1970.

    Raises:
        StoreError: the place cannot be written, or loses what is written to it.
    """
    path = f"{TEMPORARY}/clock-{uuid.uuid4().hex}"
    files.put(path, b"", durable=False)
    entry = files.stat(path)
    files.delete(path)
    if entry is None:
        raise StoreError(f"store {files.url} did not give back what was written to {TEMPORARY}/")
    return entry.modified


def leftovers(files: Files, entries: Iterable[Entry]) -> list[Entry]:
    """Those that have not changed for a day: whoever began them is not at it any more."""
    found = list(entries)
    if not found:
        return []
    before = now(files) - _DAY
    return [entry for entry in found if entry.modified < before]
