"""A store in a folder whose file system fails or is shared: what NFS says, full disks, file systems that go away."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from orchestrator.store import Store, StoreError, open_store
from orchestrator.store.local import LocalFiles
from tests import factory

ROW = factory.record(factory.plan(sources=["init"], replicates=1)[0])
RECORD = f"records/{ROW['id']}.parquet"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


@pytest.fixture
def files(store: Store) -> LocalFiles:
    files = LocalFiles(Path(store.url))
    files.put("kept/a", b"old")
    return files


def left(files: LocalFiles) -> list[str]:
    """Temporary files."""
    return os.listdir(files.root / "tmp")


def failing(code: int, call: Callable[..., Any] = lambda *arguments, **options: None) -> Callable[..., Any]:
    """A function that says that it failed, whatever it did."""

    def fail(*arguments: Any, **options: Any) -> Any:
        call(*arguments, **options)
        raise OSError(code, os.strerror(code))

    return fail


def stale_once(call: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    """A function that says at first that the handle is stale."""
    remaining = [None] * times

    def sometimes(*arguments: Any, **options: Any) -> Any:
        if remaining:
            remaining.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return call(*arguments, **options)

    return sometimes


# NFS


def test_a_link_that_succeeded_is_known_though_it_is_said_to_exist(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was sent twice since the first answer was lost."""
    monkeypatch.setattr(os, "link", failing(errno.EEXIST, os.link))
    assert files.put_if_absent("kept/b", b"ours")
    monkeypatch.undo()
    assert not files.put_if_absent("kept/b", b"theirs")
    assert files.get("kept/b") == b"ours"
    assert left(files) == []


def test_a_renaming_that_succeeded_is_known_though_the_file_is_said_to_be_missing(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", failing(errno.ENOENT, os.replace))
    files.put("kept/a", b"new")
    assert files.get("kept/a") == b"new"
    assert files.move("kept/a", "kept/b")
    assert files.get("kept/b") == b"new"
    assert not files.move("kept/a", "kept/b")


def test_a_renaming_that_did_not_happen_is_no_success(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", failing(errno.ENOENT))
    assert not files.move("kept/a", "kept/b")
    with pytest.raises(StoreError, match=f"^cannot write {files.root}/kept/a: its folder or the written file was"):
        files.put("kept/a", b"new")
    assert files.get("kept/a") == b"old" and left(files) == []


READS: dict[str, tuple[Any, str, Callable[[LocalFiles], Any], Any]] = {
    "get": (Path, "read_bytes", lambda files: files.get("kept/a"), b"old"),
    "open": (pa, "OSFile", lambda files: files.open("kept/a").read(), b"old"),
    "stat": (os, "fstat", lambda files: files.stat("kept/a").size, 3),
    "entries": (os, "scandir", lambda files: len(files.entries("kept")), 1),
    "names": (os, "listdir", lambda files: "kept" in files.names(), True),
}


@pytest.mark.parametrize("name", READS)
def test_a_stale_handle_is_asked_again(files: LocalFiles, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place, function, read, expected = READS[name]
    genuine = getattr(place, function)
    once, twice = stale_once(genuine), stale_once(genuine, times=2)
    monkeypatch.setattr(place, function, lambda *arguments: once(*arguments))
    assert read(files) == expected
    monkeypatch.setattr(place, function, lambda *arguments: twice(*arguments))
    with pytest.raises(StoreError, match=f"^cannot read {files.root}.*: Stale file handle$"):
        read(files)


def test_what_is_known_of_a_file_is_not_taken_from_memory(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attributes of a name may be a minute old; those of an open file are not."""
    old = os.stat(files.root / "kept" / "a")
    files.put("kept/a", b"new and longer")
    monkeypatch.setattr(os, "stat", lambda *arguments, **options: old)
    entry = files.stat("kept/a")
    assert entry is not None and entry.size == 14


def test_deleted_files_that_are_still_read_are_overlooked(store: Store, files: LocalFiles) -> None:
    for folder in ("", "records", "kept", "leases"):
        (files.root / folder).mkdir(exist_ok=True)
        (files.root / folder / ".nfs000000000a1b2c3d00000001").write_bytes(b"gone")
    assert [entry.name for entry in files.entries("kept")] == ["a"]
    assert store.finished() == set() and store.corrupt() == {}
    (files.root / "store.json").unlink()
    assert open_store(store.url, create=True).commit(ROW)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_is_refused_when_the_file_is_closed(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    genuine = Path.open

    class Refusing:
        def __init__(self, path: Path, mode: str) -> None:
            self.file = genuine(path, mode)

        def __enter__(self) -> Any:
            return self.file

        def __exit__(self, *error: object) -> None:
            self.file.close()
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "open", lambda path, mode: Refusing(path, mode))
    for write in (files.put, files.put_if_absent):
        for path in ("kept/a", "kept/b"):
            with pytest.raises(StoreError, match=f"^cannot write {files.root}/{path}: {os.strerror(code)}$"):
                write(path, b"new", durable=False)
    monkeypatch.undo()
    assert files.get("kept/a") == b"old" and files.get("kept/b") is None
    assert left(files) == []


def test_only_what_is_to_last_is_synced(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    files.put("kept/a", b"new", durable=False)
    assert files.put_if_absent("kept/b", b"new", durable=False)
    assert synced == []
    files.put("kept/a", b"newer")
    assert len(synced) == 2  # the file and its folder


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_without_hard_links_a_store_is_not_exclusive(store: Store, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store.probe()
    assert store.exclusive
    monkeypatch.setattr(os, "link", failing(code))
    store.probe()
    assert not store.exclusive
    assert store.files.entries("tmp") == []
    assert store.commit(ROW) and not store.commit(ROW)


# File systems that go away


def test_nothing_is_written_into_an_empty_mount_point(store: Store) -> None:
    root = Path(store.url)
    shutil.move(root, root.parent / "elsewhere")
    root.mkdir()
    for write in (lambda: store.commit(ROW), lambda: store.begin(ROW["id"]), lambda: store.files.delete("live/a")):
        with pytest.raises(StoreError, match="there is no store.json in .* any more; is its file system still mounted"):
            write()
    assert list(root.iterdir()) == []
    root.rmdir()
    with pytest.raises(StoreError, match="still mounted"):
        store.commit(ROW)
    shutil.move(root.parent / "elsewhere", root)
    assert store.commit(ROW)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with room for little."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a file system, and not in every container")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def test_a_full_disk(small: Path) -> None:
    store = open_store(small / "store", create=True)
    store.probe()
    store.begin(ROW["id"])
    rows = [factory.record(fake) for fake in factory.plan(sources=["init"], replicates=20)]
    committed = []
    with pytest.raises(StoreError) as caught:
        for row in rows:
            store.commit(row)
            committed.append(row["id"])
    assert 1 <= len(committed) < 20
    full = rows[len(committed)]
    assert str(caught.value) == f"cannot write {store.url}/records/{full['id']}.parquet: No space left on device"
    reader = open_store(store.url)
    assert reader.finished() == set(committed) and reader.corrupt() == {}
    assert left(LocalFiles(small / "store")) == []
    (small / "store" / "records" / f"{committed[0]}.parquet").unlink()
    assert store.commit(full)


def test_a_disk_that_may_not_be_written_any_more(small: Path) -> None:
    store = open_store(small / "store", create=True)
    store.commit(ROW)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    for write in (store.probe, lambda: store.commit(ROW), lambda: store.begin("a")):
        with pytest.raises(StoreError, match=f"^cannot write {store.url}/.*: Read-only file system$"):
            write()
    assert open_store(store.url).finished() == {ROW["id"]}


def test_a_file_system_that_is_unmounted_in_between(small: Path) -> None:
    store = open_store(small, create=True)
    store.begin(ROW["id"])
    subprocess.run(["umount", "-l", str(small)], check=True)
    with pytest.raises(StoreError, match="still mounted") as caught:
        store.commit(ROW)
    assert "\n" not in str(caught.value)
    assert list(small.iterdir()) == []
