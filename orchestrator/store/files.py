"""The few operations that a store needs of the place it lies in; here, a folder of a local or shared file system.

Paths are relative to the store and use ``/``. Whatever :meth:`LocalFiles.put` and :meth:`LocalFiles.put_if_absent` are
doing when the process is killed or the disk is full, a path holds either all of the old bytes or all of the new ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from protocols.errors import UserError

TEMPORARY = "tmp"
"""Where files are written before they are moved into place."""

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}


class StoreError(UserError):
    """A store cannot be used as it was asked to be; one sentence."""


@dataclass(frozen=True)
class Entry:
    """A file of one folder. Equal entries mean that the file has not been replaced."""

    name: str
    size: int
    """Bytes."""
    modified: int
    """Nanoseconds since 1970."""


class LocalFiles:
    """Files below a folder.

    Every method raises :class:`StoreError` where the file system refuses. None but the writing ones, and
    :meth:`create`, change anything.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writable = True
        """False where there is no store yet: everything that writes is refused."""

    def create(self, folder: str) -> None:
        """Make a folder and all that it lies in, unless they exist."""
        with self._reporting("create", folder):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    def put(self, path: str, data: bytes) -> None:
        """Write a file, in place of any other of that path."""
        with self._writing("write", path) as target, self._staged(data) as staged:
            os.replace(staged, target)
            _sync(target.parent)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write a file unless there is one of that path, whoever else is trying to; returns whether it was written.

        A hard link is what never replaces. On a file system without links the file is looked for and then renamed, so
        two writers within the same instant leave the later one's file, whole.
        """
        with self._writing("write", path) as target, self._staged(data) as staged:
            try:
                os.link(staged, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if target.exists():
                    return False
                os.rename(staged, target)
            _sync(target.parent)
            return True

    def get(self, path: str) -> bytes | None:
        """The bytes of a file, or None if there is none."""
        with self._reporting("read", path):
            try:
                return (self.root / path).read_bytes()
            except FileNotFoundError:
                return None

    def open(self, path: str) -> pa.NativeFile | None:
        """A file opened for reading parts of it, or None if there is none."""
        with self._reporting("read", path):
            try:
                return pa.OSFile(str(self.root / path))
            except FileNotFoundError:
                return None

    def stat(self, path: str) -> Entry | None:
        """What is known of a file without reading it, or None if there is none."""
        with self._reporting("read", path):
            try:
                stat = os.stat(self.root / path)
            except FileNotFoundError:
                return None
            return Entry(os.path.basename(path), stat.st_size, stat.st_mtime_ns)

    def entries(self, folder: str, prefix: str = "") -> list[Entry]:
        """The files of a folder whose names start with ``prefix``, sorted by name.

        Names that start with ``.`` or ``_`` are left out, as readers of Parquet folders do. A missing folder is empty.
        """
        found = []
        with self._reporting("read", folder):
            try:
                for item in os.scandir(self.root / folder):
                    if item.name.startswith(prefix) and not item.name.startswith((".", "_")):
                        with contextlib.suppress(FileNotFoundError):  # moved away since it was listed
                            stat = item.stat()
                            if not item.is_dir():
                                found.append(Entry(item.name, stat.st_size, stat.st_mtime_ns))
            except FileNotFoundError:
                return []
        return sorted(found, key=lambda entry: entry.name)

    def names(self) -> list[str]:
        """What lies in the folder itself, files and folders, sorted; nothing if it is missing."""
        with self._reporting("read", ""):
            try:
                return sorted(os.listdir(self.root))
            except FileNotFoundError:
                return []

    def delete(self, path: str) -> None:
        """Delete a file, if there is one."""
        with self._writing("delete", path) as target:
            target.unlink(missing_ok=True)

    def move(self, path: str, to: str) -> bool:
        """Rename a file; returns whether there was one."""
        with self._writing("move", path) as source, self._writing("write", to) as target:
            try:
                os.rename(source, target)
            except FileNotFoundError:
                return False
            _sync(target.parent)
            return True

    @contextlib.contextmanager
    def _staged(self, data: bytes) -> Iterator[Path]:
        """A whole, synced temporary file, gone afterwards."""
        staged = self.root / TEMPORARY / uuid.uuid4().hex
        staged.parent.mkdir(exist_ok=True)
        try:
            with staged.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self, verb: str, path: str) -> Iterator[Path]:
        if not self.writable:
            raise StoreError(f"cannot {verb} {self.root / path}: there is no store in {self.root} yet")
        with self._reporting(verb, path):
            target = self.root / path
            target.parent.mkdir(exist_ok=True)
            yield target

    @contextlib.contextmanager
    def _reporting(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"cannot {verb} {self.root / path}: {error.strerror or error}") from error


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power failure, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
