"""A store in a folder of a local or shared file system.

A shared folder is as a rule NFS, of which little can be taken for granted. A request whose answer was lost is sent
again, so that a link or a renaming that succeeded can be reported as failed: then the file's inode tells. What a name
stands for is remembered for up to a minute, but asked anew when the file is opened. A file that is replaced while it is
read goes stale. A deleted file that someone still reads stays as ``.nfs...``, a name that is overlooked. A refused
write may be reported as late as at the end, when the file is closed or synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from orchestrator.store.files import MARKER, TEMPORARY, Entry, StoreError

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}

Value = TypeVar("Value")


class LocalFiles:
    """Files below a folder, see :class:`orchestrator.store.files.Files`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writable = True
        self.exclusive = True
        """False once the file system has refused a hard link."""

    @property
    def url(self) -> str:
        """The folder."""
        return str(self.root)

    def create(self, folder: str) -> None:
        """Make a folder and all that it lies in, unless they exist."""
        with self._reporting("create", folder):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Write a file aside, sync it, and rename it over any other of that path."""
        with self._writing("write", path) as target, self._staged(data, durable) as staged:
            if not _rename(staged, target):
                raise FileNotFoundError(errno.ENOENT, "its folder or the written file was taken away")
            if durable:
                _sync(target.parent)

    def put_if_absent(self, path: str, data: bytes, *, durable: bool = True) -> bool:
        """Write a file aside, sync it, and link it to its name, which fails where the name is taken.

        On a file system without links the file is looked for and then renamed.
        """
        with self._writing("write", path) as target, self._staged(data, durable) as staged:
            try:
                os.link(staged, target)
            except FileExistsError:
                if not _is(target, os.stat(staged)):
                    return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self.exclusive = False
                if target.exists():
                    return False
                os.rename(staged, target)
            if durable:
                _sync(target.parent)
            return True

    def get(self, path: str) -> bytes | None:
        """The bytes of a file, or None if there is none."""
        return self._read(path, Path.read_bytes)

    def open(self, path: str) -> pa.NativeFile | None:
        """A file opened for reading parts of it, or None if there is none."""
        return self._read(path, lambda place: pa.OSFile(str(place)))

    def stat(self, path: str) -> Entry | None:
        """What is known of a file, or None if there is none; asked of an open file, which NFS answers afresh."""

        def look(place: Path) -> Entry:
            descriptor = os.open(place, os.O_RDONLY)
            try:
                stat = os.fstat(descriptor)
            finally:
                os.close(descriptor)
            return Entry(place.name, stat.st_size, stat.st_mtime_ns)

        return self._read(path, look)

    def entries(self, folder: str, prefix: str = "") -> list[Entry]:
        """The files of a folder whose names start with ``prefix``, sorted by name."""

        def listed(place: Path) -> list[Entry]:
            found = []
            with os.scandir(place) as items:
                for item in items:
                    if item.name.startswith(prefix) and not item.name.startswith((".", "_")):
                        with contextlib.suppress(FileNotFoundError):  # moved away since it was listed
                            stat = item.stat()
                            if not item.is_dir():
                                found.append(Entry(item.name, stat.st_size, stat.st_mtime_ns))
            return sorted(found, key=lambda entry: entry.name)

        return self._read(folder, listed) or []

    def names(self) -> list[str]:
        """What lies in the folder itself, files and folders, sorted; nothing if it is missing."""
        return self._read("", lambda place: sorted(os.listdir(place))) or []

    def delete(self, path: str) -> None:
        """Delete a file, if there is one."""
        with self._writing("delete", path) as target:
            target.unlink(missing_ok=True)

    def move(self, path: str, to: str) -> bool:
        """Rename a file; returns whether there was one."""
        with self._writing("move", path) as source, self._writing("write", to) as target:
            if not _rename(source, target):
                return False
            _sync(target.parent)
            return True

    def probe(self) -> None:
        """Find out whether there are hard links."""
        path = f"{TEMPORARY}/probe-{uuid.uuid4().hex}"
        self.put_if_absent(path, b"", durable=False)
        self.delete(path)

    def hurried(self, seconds: float) -> LocalFiles:
        """The same files: how long a file system takes to answer is its own affair."""
        return self

    def _read(self, path: str, read: Callable[[Path], Value]) -> Value | None:
        """What ``read`` makes of a file, or None if there is none. A stale handle is no answer: asked once more."""
        with self._reporting("read", path):
            try:
                try:
                    return read(self.root / path)
                except OSError as error:
                    if error.errno != errno.ESTALE:
                        raise
                    return read(self.root / path)
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _staged(self, data: bytes, durable: bool) -> Iterator[Path]:
        """A whole temporary file, synced if it is to be durable; gone afterwards."""
        staged = self.root / TEMPORARY / uuid.uuid4().hex
        staged.parent.mkdir(exist_ok=True)
        try:
            with staged.open("wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            yield staged
        finally:
            with contextlib.suppress(OSError):  # what happened to the file itself is what counts
                staged.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self, verb: str, path: str) -> Iterator[Path]:
        if not self.writable:
            raise StoreError(f"cannot {verb} {self.root / path}: there is no store in {self.root} yet")
        with self._reporting(verb, path):
            target = self.root / path
            if not target.parent.is_dir():
                # An unmounted file system leaves an empty folder, in which nobody would find what is written now.
                if path != MARKER and not (self.root / MARKER).exists():
                    raise StoreError(
                        f"cannot {verb} {target}: there is no {MARKER} in {self.root} any more; is its file system "
                        "still mounted?"
                    )
                target.parent.mkdir(exist_ok=True)
            yield target

    @contextlib.contextmanager
    def _reporting(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"cannot {verb} {self.root / path}: {error.strerror or error}") from error


def _rename(source: Path, target: Path) -> bool:
    """Rename a file; returns whether there was one."""
    try:
        file = os.stat(source)
    except FileNotFoundError:
        return False
    try:
        os.replace(source, target)
    except FileNotFoundError:
        return _is(target, file)  # NFS says so, too, of a renaming that was asked for twice as its answer was lost.
    return True


def _is(path: Path, file: os.stat_result) -> bool:
    """Whether a name stands for that very file."""
    try:
        return os.path.samestat(os.stat(path), file)
    except FileNotFoundError:
        return False


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
