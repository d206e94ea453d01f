"""Compaction: a store reads the same before, while and after it is compacted, whatever becomes of the parts."""

from __future__ import annotations

import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from orchestrator.store import RECORD_SCHEMA, Store, StoreError, compaction, open_store, parts
from orchestrator.store.compaction import compact
from orchestrator.store.files import Files
from orchestrator.store.local import LocalFiles
from orchestrator.store.schema import SHORT_COLUMNS
from tests import factory
from tests.store_contract import a_day_later

ROOT = Path(__file__).parents[1]
COLUMNS = ["id", "accuracy", "provenance"]

# Each child is given a store and pickled rows.
CHILD = """
import os, pickle, signal, sys
from orchestrator.store import open_store
from orchestrator.store.compaction import compact
store = open_store(sys.argv[1], create=True)
rows = pickle.loads(open(sys.argv[2], "rb").read())
"""
COMPACTOR = """
print("ready", flush=True)
while not store.files.entries("report"):
    compact(store)
"""
WRITER = """
for row in rows:
    store.commit(row)
"""


def child(folder: Path, url: str, rows: Iterable[dict[str, Any]], code: str, *more: object) -> subprocess.Popen[str]:
    """A process of its own, with ``store`` and ``rows``."""
    path = folder / "rows.pickle"
    path.write_bytes(pickle.dumps(list(rows)))
    command = [sys.executable, "-c", CHILD + code, url, str(path), *map(str, more)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def part_names(files: Files) -> list[str]:
    return [entry.name for entry in files.entries("compacted") if parts.is_part(entry.name)]


def flipped(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


def same_reading(url: str, expected: Store) -> None:
    """A store reads as ``expected`` does, which looks at no part."""
    reader = open_store(url)
    assert reader.finished() == expected.finished()
    assert reader.corrupt() == expected.corrupt()
    for columns in (SHORT_COLUMNS, ["provenance"], ["id", "outcome"], ["accuracy", "losses"]):
        assert reader.table(columns).equals(expected.table(columns)), columns


class Loose(parts.Parts):
    """No parts at all."""

    def refresh(self) -> None:
        pass


def loose(url: str) -> Store:
    """The store as it reads without any part."""
    store = open_store(url)
    store.parts = Loose(store.files)
    return store


class CompactionContract:
    """Tests of any store. A subclass gives ``url``, where there is no store yet, and ``files``, what lies there."""

    share = 1.0
    """Of the many bytes that are changed one by one, how many are."""

    commits = 60
    """Records that are written while others read and compact."""

    kills = 3

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def files(self, url: str) -> Files:
        raise NotImplementedError

    @pytest.fixture
    def store(self, url: str) -> Store:
        """A store of eight records, one of them diverged, and one file that is no record."""
        store = open_store(url, create=True)
        fakes = factory.plan(sources=["none", "init", "onebit", "all"], replicates=2)
        factory.fill(store, fakes[:-1])
        store.commit(factory.diverged(fakes[-1]))
        store.files.put(f"records/{'f' * 64}.parquet", b"damaged")
        return store

    @pytest.fixture
    def more(self) -> list[dict[str, Any]]:
        """Rows of runs that the store has no record of."""
        return [factory.record(fake) for fake in factory.plan(sources=["shuffle"], replicates=6)]

    def test_a_compacted_store_reads_the_same(self, url: str, store: Store, files: Files) -> None:
        before = files.entries("records")
        done = compact(store)
        assert done == compaction.Compaction(added=8, records=8, parts=1, unreadable=1)
        assert files.entries("records") == before
        same_reading(url, loose(url))
        ids = sorted(store.finished())
        assert open_store(url).table(None, ids[2:5]).equals(loose(url).table(None, ids[2:5]))
        ok = loose(url).table(["id", "outcome"]).filter(pc.field("outcome") == "ok")["id"].to_pylist()
        assert len(ok) == 7
        assert open_store(url).table(RECORD_SCHEMA.names, ok).equals(loose(url).table(RECORD_SCHEMA.names, ok))
        for (id, values), (other, expected) in zip(store.logits(ids), loose(url).logits(ids), strict=True):
            assert id == other and np.array_equal(values, expected, equal_nan=True)

    def test_compacted_records_are_not_opened_for_short_columns(
        self, url: str, store: Store, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compact(store)
        files.delete(f"records/{'f' * 64}.parquet")
        read: list[str] = []
        kind = type(files)
        get, open_ = kind.get, kind.open
        monkeypatch.setattr(kind, "get", lambda self, path: (read.append(path), get(self, path))[1])
        monkeypatch.setattr(kind, "open", lambda self, path: (read.append(path), open_(self, path))[1])
        reader = open_store(url)
        assert len(reader.finished()) == reader.table(["id", "accuracy"]).num_rows == 8
        assert reader.corrupt() == {}
        (name,) = part_names(files)
        assert [path for path in read if path != "store.json"] == [f"compacted/{name}"]
        assert reader.table().num_rows == 8
        assert not [path for path in read if path.startswith("records/")]

    def test_new_records_are_there_at_once_and_merged_later(
        self, url: str, store: Store, files: Files, more: list[dict[str, Any]]
    ) -> None:
        compact(store)
        old = part_names(files)
        store.commit(more[0])
        assert store.has(more[0]["id"]) and more[0]["id"] in store.finished()
        same_reading(url, loose(url))
        assert compact(store, at_least=3) is None
        assert part_names(files) == old
        done = compact(store)
        assert done == compaction.Compaction(added=1, records=9, parts=1, unreadable=1)
        assert len(part_names(files)) == 1 and part_names(files) != old
        assert len(files.entries("compacted")) == 1 + len(parts.RARE)
        same_reading(url, loose(url))

        unchanged = files.entries("compacted")
        assert compact(store) == compaction.Compaction(added=0, records=9, parts=1, unreadable=1)
        assert files.entries("compacted") == unchanged

    def test_full_parts_stay(
        self, url: str, store: Store, files: Files, more: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compaction, "ROWS", 3)
        done = compact(store)
        assert done is not None and done.parts == 3
        full = set(part_names(files))
        for row in more[:2]:
            store.commit(row)
        compact(store)
        assert len(full & set(part_names(files))) == 2
        assert len(part_names(files)) == 4
        same_reading(url, loose(url))
        store.set_aside("f" * 64)
        id = sorted(store.finished())[0]
        files.delete(f"records/{id}.parquet")
        assert id not in open_store(url).finished()
        done = compact(store)
        assert done is not None and (done.records, done.unreadable) == (9, 0)
        same_reading(url, loose(url))

    @pytest.mark.parametrize("change", ["another size", "another byte", "another record"])
    def test_a_record_that_changes_after_its_compaction_is_seen_as_it_is(
        self, url: str, store: Store, files: Files, change: str
    ) -> None:
        compact(store)
        id = sorted(store.finished())[3]
        path = f"records/{id}.parquet"
        whole = files.get(path)
        assert whole is not None
        readers = [store, open_store(url)]
        assert all(id in reader.finished() for reader in readers)
        if change == "another record":
            other = factory.plan(sources=["shuffle"], replicates=1)[0]
            store.commit(factory.record(other))
            files.put(path, files.get(f"records/{other.run.id}.parquet") or b"")
        else:
            files.put(path, whole + b"!" if change == "another size" else flipped(whole, len(whole) // 2))
        for reader in (*readers, open_store(url)):
            assert id not in reader.finished() and id in reader.corrupt() and not reader.has(id)
            assert id not in reader.table(["id"])["id"].to_pylist()
            assert not dict(reader.logits([id]))
        compact(store)
        same_reading(url, loose(url))
        assert store.set_aside(id) is not None
        row = {fake.run.id: factory.record(fake) for fake in factory.plan(sources=["none", "init", "onebit", "all"])}[
            id
        ]
        assert store.commit(row | {"host": "another"})
        for reader in (*readers, open_store(url)):
            assert reader.table(["host"], [id])["host"].to_pylist() == ["another"]

    def test_a_part_with_any_byte_changed_is_not_believed(self, url: str, store: Store, files: Files) -> None:
        compact(store)
        rng = np.random.default_rng(0)
        expected = loose(url)
        tables = {name: expected.table([name, "id"]) for name in ("accuracy", *parts.RARE)}
        for entry in files.entries("compacted"):
            path = f"compacted/{entry.name}"
            whole = files.get(path)
            assert whole is not None
            column = entry.name.split(".")[1]
            column = column if column in parts.RARE else "accuracy"
            count = int((10 if column in parts.RARE else 60) * self.share)
            positions = rng.choice(len(whole), count, replace=False)
            for damaged in (b"", whole[:-1], *(flipped(whole, place) for place in (0, len(whole) - 1, *positions))):
                files.put(path, damaged)
                assert open_store(url).table([column, "id"]).equals(tables[column]), column
            assert open_store(url).finished() == expected.finished()
        damaged_parts = {entry.name for entry in files.entries("compacted")}
        compact(store)
        assert damaged_parts.isdisjoint(entry.name for entry in files.entries("compacted"))
        same_reading(url, expected)
        assert all(part is not None and store.parts.is_whole(part) for part in _parts(url))

    def test_what_is_no_part_is_overlooked(self, url: str, store: Store, files: Files) -> None:
        compact(store)
        (name,) = part_names(files)
        data = files.get(f"compacted/{name}")
        assert data is not None
        files.put(f"compacted/{'0' * 32}.parquet", data)  # Under another name it is not what was written.
        files.put(f"compacted/{'1' * 32}.parquet", b"hello")
        files.put("compacted/notes.txt", b"hello")
        same_reading(url, loose(url))
        compact(store)
        assert part_names(files) == [name]
        assert files.get("compacted/notes.txt") == b"hello"

    def test_a_part_that_cannot_be_delivered_is_done_without(
        self, url: str, store: Store, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compact(store)
        expected = loose(url)
        get = type(files).get

        def refuse(self: Files, path: str) -> bytes | None:
            if path.startswith("compacted/"):
                raise StoreError(f"cannot read {path}: Input/output error")
            return get(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(type(files), "get", refuse)
            same_reading(url, expected)
        assert len(part_names(files)) == 1

    @pytest.mark.parametrize("rare", [False, True])
    def test_a_part_that_is_merged_under_a_readers_hands(
        self,
        url: str,
        store: Store,
        files: Files,
        more: list[dict[str, Any]],
        monkeypatch: pytest.MonkeyPatch,
        rare: bool,
    ) -> None:
        """Between listing a part and reading it, or one of its columns, another process merges it with a new record."""
        compact(store)
        get, left = type(files).get, list(more)

        def merge_first(self: Files, path: str) -> bytes | None:
            if left and path.startswith("compacted/") and path.endswith("provenance.parquet") == rare:
                row = left.pop()
                with monkeypatch.context() as patch:
                    patch.setattr(type(files), "get", get)
                    other = open_store(url)
                    other.commit(row)
                    compact(other)
            return get(self, path)

        ids = store.finished()
        reader = open_store(url)
        with monkeypatch.context() as patch:
            patch.setattr(type(files), "get", merge_first)
            found = reader.table(["provenance", "id"])["id"].to_pylist()
        assert len(left) < len(more)
        assert len(found) == len(set(found)) and set(found) >= ids
        same_reading(url, loose(url))

    def test_leftovers_of_killed_compactors_go_in_time(
        self, store: Store, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = f"compacted/{'0' * 32}.provenance.parquet"
        files.put(left, b"half a part")
        compact(store)
        assert files.get(left) is not None  # It may be another compactor's, at this moment.
        with monkeypatch.context() as patch:
            wrong = time.time_ns() + 90_000 * 10**9
            patch.setattr(time, "time_ns", lambda: wrong)
            compact(store)
        assert files.get(left) is not None, "this machine's clock says nothing of a file's age"
        a_day_later(monkeypatch)
        compact(store)
        assert files.get(left) is None
        assert len(files.entries("compacted")) == 1 + len(parts.RARE)

    def test_a_reader_never_misses_a_record_nor_sees_it_twice(
        self, url: str, store: Store, files: Files, tmp_path: Path
    ) -> None:
        """While two processes compact over and over and a third commits."""
        fakes = factory.plan(sources=["shuffle"], replicates=self.commits)
        rows = [factory.record(fake, examples=20) for fake in fakes]
        accuracy = {row["id"]: row["accuracy"] for row in rows}
        old = open_store(url)
        accuracy |= {row["id"]: row["accuracy"] for row in old.table(["id", "accuracy"]).to_pylist()}
        compactors = [child(tmp_path, url, rows, COMPACTOR) for _ in range(2)]
        try:
            for compactor in compactors:
                assert compactor.stdout is not None and compactor.stdout.readline() == "ready\n"
            counts = set()
            with child(tmp_path, url, rows, WRITER) as writer:
                going = True
                while going:
                    going = writer.poll() is None
                    for reader in (old, open_store(url)):
                        before = {entry.name for entry in files.entries("records")} - {f"{'f' * 64}.parquet"}
                        found = reader.table(COLUMNS).to_pylist()
                        ids = [row["id"] for row in found]
                        assert len(ids) == len(set(ids))
                        assert before <= {f"{id}.parquet" for id in ids}
                        assert before <= {f"{id}.parquet" for id in reader.finished()}
                        assert {row["id"]: row["accuracy"] for row in found}.items() <= accuracy.items()
                        counts.add(len(ids))
            assert writer.returncode == 0
        finally:
            files.put("report/stop", b"")
            for compactor in compactors:
                compactor.communicate()
        assert [compactor.returncode for compactor in compactors] == [0, 0]
        assert len(counts) > 2, "nothing was read while the writer was writing"
        compact(store)
        assert len(part_names(files)) == 1
        same_reading(url, loose(url))
        assert len(store.finished()) == len(accuracy)

    def test_a_killed_compactor_leaves_a_right_store(
        self, url: str, store: Store, files: Files, tmp_path: Path
    ) -> None:
        rng = random.Random(0)
        code = 'print("ready", flush=True)\nfor row in rows:\n    store.commit(row)\n    compact(store)'
        rows = [factory.record(fake, examples=20) for fake in factory.plan(sources=["shuffle"], replicates=400)]
        for _ in range(self.kills):
            process = child(tmp_path, url, rows, code)
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            count = len(files.entries("records"))
            while len(files.entries("records")) == count:  # So that kills fall into the midst of its work.
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.3))
            process.kill()
            process.communicate()
            assert process.returncode == -signal.SIGKILL
            same_reading(url, loose(url))
        compact(store)
        assert len(part_names(files)) == 1
        same_reading(url, loose(url))


def _parts(url: str) -> list[parts.Part | None]:
    store = open_store(url)
    store.listed()
    return list(store.parts.all.values())


class TestLocalCompaction(CompactionContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")

    @pytest.fixture
    def files(self, url: str) -> Files:
        return LocalFiles(Path(url))

    def test_killed_at_any_step_of_a_compaction(self, url: str, store: Store, files: Files, tmp_path: Path) -> None:
        """Before every third change of a file, from the first to the last."""
        code = """
step = 0
def count(event, *_):
    global step
    if event in ("os.link", "os.rename", "os.remove", "fsync"):
        step += 1
        if step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
fsync = os.fsync
os.fsync = lambda descriptor: (count("fsync"), fsync(descriptor))
compact(store)
"""
        more = [factory.record(fake) for fake in factory.plan(sources=["shuffle"], replicates=40)]
        compact(store)
        expected, codes = store.finished(), []
        for step in range(1, 200, 4):
            store.commit(more[step // 4])
            expected.add(more[step // 4]["id"])
            process = child(tmp_path, url, [], code, step)
            process.communicate()
            codes.append(process.returncode)
            same_reading(url, loose(url))
            assert open_store(url).finished() == expected
            if codes[-1] == 0:
                break
        assert codes[-1] == 0 and set(codes[:-1]) == {-signal.SIGKILL} and len(codes) > 4
        compact(store)
        assert len(part_names(files)) == 1
