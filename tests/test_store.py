"""A store in a local folder: the contract, and what only real processes and file systems can show."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from orchestrator.plan import plan
from orchestrator.store import FAILURE_SCHEMA, RECORD_SCHEMA, Store, StoreError, open_store
from orchestrator.store.files import Entry
from orchestrator.store.local import LocalFiles
from protocols import load_protocol
from protocols.errors import UserError
from tests import factory
from tests.store_contract import StoreContract

ROOT = Path(__file__).parents[1]
ONE = factory.record(factory.plan(sources=["init"], replicates=1)[0])

# Each child is given a store and pickled rows, so that it imports nothing but the store.
CHILD = """
import os, pickle, resource, signal, sys
from orchestrator.store import StoreError, open_store
store = open_store(sys.argv[1], create=True)
rows = pickle.loads(open(sys.argv[2], "rb").read())
"""


class TestLocalStore(StoreContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "sub" / "store")

    @pytest.fixture
    def files(self, url: str) -> LocalFiles:
        return LocalFiles(Path(url))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def child(store: Store, rows: list[dict[str, Any]], code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own, with ``store`` and ``rows``."""
    path = Path(store.url).parent / "rows.pickle"
    path.write_bytes(pickle.dumps(rows))
    command = [sys.executable, "-c", CHILD + code, store.url, str(path), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


# Other readers


def count_pandas(folder: Path) -> int:
    return len(pd.read_parquet(folder))


def count_dataset(folder: Path) -> int:
    return pa.dataset.dataset(folder).to_table().num_rows


def count_duckdb(folder: Path) -> int:
    with duckdb.connect() as connection:
        return len(connection.sql(f"SELECT * FROM '{folder}/**/*.parquet'").fetchall())


def test_plain_readers_see_whole_records_in_mid_sweep(store: Store) -> None:
    fakes = factory.plan(replicates=12)
    rows = [factory.record(fake, examples=100) for fake in fakes]
    store.commit(rows[0])
    folder = Path(store.url) / "records"
    counts: list[int] = []
    with child(store, rows[1:], "for row in rows: store.commit(row)") as writer:
        while writer.poll() is None:
            counts += [count(folder) for count in (count_pandas, count_dataset, count_duckdb)]
    assert writer.returncode == 0
    assert counts == sorted(counts)
    assert len(set(counts)) > 1, "nothing was read while the writer was writing"
    assert [count(folder) for count in (count_pandas, count_dataset, count_duckdb)] == [len(rows)] * 3


def test_plain_readers_read_the_values(store: Store) -> None:
    fakes = factory.plan(sources=["none", "init", "onebit"], replicates=2)
    factory.fill(store, fakes)
    store.commit(factory.diverged(factory.plan(sources=["all"], replicates=1)[0]))
    folder = Path(store.url) / "records"
    expected = store.table(RECORD_SCHEMA.names).to_pandas()
    for frame in (pd.read_parquet(folder), pa.dataset.dataset(folder).to_table().to_pandas()):
        pd.testing.assert_frame_equal(frame.sort_values("id", ignore_index=True), expected)
    with duckdb.connect() as connection:
        result = connection.sql(
            f"SELECT source, count(*), avg(accuracy), max(len(logits)), max(history[-1].epoch), max(seeds['init']) "
            f"FROM '{folder}/**/*.parquet' WHERE outcome = 'ok' GROUP BY source ORDER BY source"
        ).fetchall()
    ok = expected.query("outcome == 'ok'").groupby("source")["accuracy"].mean()
    seed = {fake.source: factory.record(fake)["seeds"]["init"] for fake in fakes}  # of each source's last replicate
    assert result == [(source, 2, pytest.approx(ok[source]), 300, 6, seed[source]) for source in sorted(seed)]


def test_all_files_have_one_schema(store: Store) -> None:
    factory.fill(store, factory.plan(replicates=1))
    store.commit(factory.diverged(factory.plan(sources=["init"], replicates=2)[1]))
    first, *others = [pq.read_schema(path) for path in Path(store.url, "records").iterdir()]
    assert len(others) == 8
    assert all(schema.equals(first, check_metadata=True) for schema in others)
    assert first.equals(RECORD_SCHEMA) and first.metadata == RECORD_SCHEMA.metadata


# Processes


def test_of_two_processes_that_commit_one_id_one_does(store: Store) -> None:
    rows = [factory.record(fake, examples=30) for fake in factory.plan(replicates=4)]
    code = """
print("ready", flush=True)
sys.stdin.readline()
print(sum(store.commit(row) for row in rows))
"""
    processes = [child(store, rows, code) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    committed = [int(process.communicate()[0]) for process in processes]
    assert sum(committed) == len(rows)
    assert store.finished() == {row["id"] for row in rows}
    assert len(list(Path(store.url, "records").iterdir())) == len(rows)
    assert list(Path(store.url, "tmp").iterdir()) == []


def test_a_process_killed_at_any_step_of_a_commit_leaves_a_whole_record_or_none(tmp_path: Path) -> None:
    code = """
step = 0
def count(event, *_):
    global step
    if event in ("open", "os.mkdir", "os.link", "os.rename", "os.remove", "fsync"):
        step += 1
        if step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
assert store.commit(rows[1])  # so that everything is imported
sys.addaudithook(count)
fsync = os.fsync
os.fsync = lambda descriptor: (count("fsync"), fsync(descriptor))
assert store.commit(rows[0])
"""
    other = factory.record(factory.plan(sources=["init"], replicates=2)[1])
    outcomes = []
    for step in range(1, 100):
        store = open_store(tmp_path / str(step) / "store", create=True)
        store.begin(ONE["id"])
        process = child(store, [ONE, other], code, step)
        process.communicate()
        here = {path.stem for path in Path(store.url, "records").iterdir()}
        assert here <= {ONE["id"], other["id"]}
        assert store.corrupt() == {}
        outcomes.append(store.has(ONE["id"]))
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        assert store.live().num_rows == (0 if outcomes[-1] else 1)
        assert store.commit(ONE) is not outcomes[-1]
        assert store.finished() == {ONE["id"], other["id"]}
        assert store.live().num_rows == 0
    assert process.returncode == 0
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) >= 3 and outcomes.count(True) >= 3


def test_a_record_is_on_the_disk_before_it_has_its_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("fsync", "link", "unlink"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, call=function: (calls.append(name), call(*args))[1])
    store.commit(ONE)
    assert calls[:4] == ["fsync", "link", "fsync", "unlink"]


def test_a_process_killed_while_it_writes_leaves_no_unreadable_file(store: Store) -> None:
    code = """
print("ready", flush=True)
for row in rows: store.commit(row)
"""
    fakes = factory.plan(sources=["init", "shuffle"], replicates=8)
    rows = [factory.record(fake, examples=20_000) for fake in fakes]
    rng = random.Random(0)
    for _ in range(5):
        process = child(store, rows, code)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.01, 0.2))
        process.kill()
        process.communicate()
        assert store.corrupt() == {}
        for path in Path(store.url, "records").iterdir():
            assert pq.read_table(path).num_rows == 1
    process = child(store, rows, code)
    process.communicate()
    assert process.returncode == 0
    assert store.finished() == {row["id"] for row in rows}


# Errors of the file system


def test_a_full_disk_is_one_sentence_and_leaves_nothing(store: Store) -> None:
    # A limit on the size of a file makes the system refuse a write in the middle of a file, as a full disk does.
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    store.commit(rows[0])
except StoreError as error:
    print(error)
"""
    store.begin(ONE["id"])
    output, _ = child(store, [ONE], code).communicate()
    assert output == f"cannot write {store.url}/records/{ONE['id']}.parquet: File too large\n"
    assert list(Path(store.url, "records").iterdir()) == list(Path(store.url, "tmp").iterdir()) == []
    assert store.live().num_rows == 1
    assert store.commit(ONE)


@pytest.mark.parametrize("function", ["fsync", "link"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_an_error_of_the_file_system_is_one_sentence(
    store: Store, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    store.begin(ONE["id"])

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, refuse)
    with pytest.raises(StoreError) as caught:
        store.commit(ONE)
    assert str(caught.value) == f"cannot write {store.url}/records/{ONE['id']}.parquet: {os.strerror(code)}"
    assert list(Path(store.url, "records").iterdir()) == list(Path(store.url, "tmp").iterdir()) == []
    monkeypatch.undo()
    assert store.live().num_rows == 1
    assert store.commit(ONE)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_without_hard_links_a_record_is_not_replaced_either(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert store.commit(ONE)
    path = Path(store.url, "records", f"{ONE['id']}.parquet")
    before = path.read_bytes()
    assert not store.commit(ONE | {"accuracy": 0.1})
    assert path.read_bytes() == before
    assert list(Path(store.url, "tmp").iterdir()) == []


@pytest.mark.parametrize("examples", [300, 40_000])
def test_a_disk_that_cannot_be_read_does_not_make_records_corrupt(
    store: Store, monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    fake = factory.plan(sources=["init"], replicates=1)[0]
    store.commit(factory.record(fake, examples=examples))
    fresh = open_store(store.url)

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    class Broken(io.BytesIO):
        read = refuse

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(pa, "OSFile", lambda path: pa.PythonFile(Broken(bytes(Path(path).stat().st_size)), "r"))
    for read in (fresh.finished, fresh.corrupt, lambda: fresh.set_aside(fake.run.id)):
        with pytest.raises(StoreError, match=f"^cannot read {store.url}/records/.*: Input/output error$"):
            read()
    monkeypatch.undo()
    assert fresh.finished() == {fake.run.id}


def test_planning_lists_the_records_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000 records a listing is 20 requests to S3."""
    factory.fill(store, factory.plan(sources=["init"], replicates=2))
    listed: list[str] = []
    entries = LocalFiles.entries

    def list_(self: LocalFiles, folder: str, prefix: str = "") -> list[Entry]:
        listed.append(folder)
        return entries(self, folder, prefix)

    monkeypatch.setattr(LocalFiles, "entries", list_)
    assert plan(load_protocol("quickstart-tiny"), store).unplanned == 2
    assert listed.count("records") == 1


# Opening


def test_reading_changes_nothing(store: Store) -> None:
    one, other = factory.plan(sources=["init"], replicates=2)
    factory.fill(store, [one])
    store.begin(other.run.id)
    store.fail(factory.failure(other, attempt=3))
    store.begin(other.run.id)
    Path(store.url, "records", "bad.parquet").write_bytes(b"damaged")
    before = snapshot(Path(store.url))
    reader = open_store(store.url)
    assert reader.finished() == {one.run.id}
    assert list(reader.corrupt()) == ["bad.parquet"]
    assert [reader.table().num_rows, reader.failures().num_rows, reader.live().num_rows] == [1, 1, 1]
    assert len(dict(reader.logits([one.run.id]))) == 1
    assert reader.load_checkpoint(one.run.id) is reader.load_reference(one.run.id) is None
    open_store(store.url, create=True)
    assert snapshot(Path(store.url)) == before


@pytest.mark.parametrize("create", [False, True])
def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path, create: bool) -> None:
    (tmp_path / "file").write_text("hello")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("hello")
    before = snapshot(tmp_path)
    for url, message in [
        (tmp_path / "file", "file is not a folder"),
        (tmp_path / "file" / "store", "file is not a folder"),
        (tmp_path / "home", r"no store.json but other things \(thesis.tex\)"),
        ("gs://bucket/store", "a store is a folder or s3://bucket/folder; gs:// is not supported"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            open_store(url, create=create)
        assert "\n" not in str(caught.value)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("url", ["/proc/store", "/sys/store", "/dev/null/store"])
def test_a_store_that_cannot_be_made_is_one_sentence(url: str) -> None:
    message = "^(cannot create /|store '/dev/null/store': /dev/null is not a folder)"
    with pytest.raises(UserError, match=message) as caught:
        open_store(url, create=True)
    assert "\n" not in str(caught.value)


def test_a_store_that_cannot_be_written_fails_the_probe(store: Store) -> None:
    # Root may write whatever the modes say, but not below a file.
    Path(store.url, "records").rmdir()
    Path(store.url, "records").write_text("in the way")
    with pytest.raises(UserError, match=f"^cannot write {store.url}/records/.probe-[0-9a-f]+: ") as caught:
        store.probe()
    assert "\n" not in str(caught.value)
    assert list(Path(store.url, "tmp").iterdir()) == []


def test_an_empty_folder_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*")
    assert open_store(tmp_path).finished() == set()
    assert [path.name for path in tmp_path.iterdir()] == [".gitignore"]
    assert open_store(f"file://{tmp_path}", create=True).commit(ONE)
    assert open_store(tmp_path).finished() == {ONE["id"]}


def test_a_store_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("results/", create=True)
    monkeypatch.chdir("/")
    assert store.url == str(tmp_path / "results")
    assert store.commit(ONE)


# Documentation


@pytest.mark.parametrize(("title", "schema"), [("Records", RECORD_SCHEMA), ("Failures", FAILURE_SCHEMA)])
def test_every_column_is_documented_with_its_type(title: str, schema: pa.Schema) -> None:
    section = re.split(r"^## ", (ROOT / "docs" / "store.md").read_text(), flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(title)]
    documented = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, flags=re.MULTILINE))
    assert list(documented) == schema.names
    for field in schema:
        nullable = documented[field.name].endswith("?")
        assert nullable == field.nullable, field.name
        assert pa.array([], field.type).type == TYPES[documented[field.name].rstrip("?")], field.name


TYPES = {
    "string": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "map<string, string>": pa.map_(pa.string(), pa.string()),
    "list<list<float32>>": pa.list_(pa.list_(pa.float32())),
    "list<int32>": pa.list_(pa.int32()),
    "list<float32>": pa.list_(pa.float32()),
    "list<string>": pa.list_(pa.string()),
    "list<epoch>": RECORD_SCHEMA.field("history").type,
    "list<variant>": RECORD_SCHEMA.field("variants").type,
    "list<commit>": RECORD_SCHEMA.field("commits").type,
}
