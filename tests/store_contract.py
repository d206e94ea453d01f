"""What every store must do, wherever its files lie: subclass :class:`StoreContract` and say where that is."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load

from orchestrator.store import FAILURE_SCHEMA, RECORD_SCHEMA, Reference, Store, StoreError, open_store
from orchestrator.store import files as places
from orchestrator.store.files import Files
from orchestrator.store.records import WHOLE
from orchestrator.store.store import FOLDERS
from protocols.contract import Checkpoint, Epoch, epoch_values
from protocols.digest import tensor_digests
from protocols.errors import UserError
from tests import factory

EPOCHS = tuple(
    Epoch(
        epoch=n, learning_rate=0.1 / n, train_loss=1 / 3**n, test_loss=2 / 3**n, test_accuracy=1 - 1 / 7**n, seconds=0.5
    )
    for n in (1, 2, 3)
)


def plain(value: Any) -> Any:
    """A value of a row as Arrow gives it back."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value.items()) if isinstance(value, dict) else value


def rewritten(data: bytes, change: Callable[[pa.Table], pa.Table]) -> bytes:
    """A Parquet file as another program would write it."""
    sink = io.BytesIO()
    pq.write_table(change(pq.read_table(io.BytesIO(data))), sink)
    return sink.getvalue()


def column(name: str, value: Any) -> Callable[[pa.Table], pa.Table]:
    """The change of one column's only value."""
    field = RECORD_SCHEMA.field(name)
    position = RECORD_SCHEMA.get_field_index(name)
    return lambda table: table.set_column(position, field, pa.array([value], field.type))


def version(text: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.replace_schema_metadata({"noisegrid_schema": text})


def page(data: bytes, name: str) -> int:
    """Where the first page of a column starts in a file."""
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    return next(chunk.data_page_offset for chunk in chunks if chunk.path_in_schema.split(".")[0] == name)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def own_digests(kept: dict[str, Any]) -> dict[str, str]:
    """What the record of a run says of the weights that were kept of it."""
    return tensor_digests({name[8:]: tensor for name, tensor in kept.items() if name.startswith("weights/")})


def unversioned(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata()


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "cannot be read as Parquet"),
    "one byte": (lambda data: data[:1], "cannot be read as Parquet"),
    "truncated": (lambda data: data[: len(data) // 2], "cannot be read as Parquet"),
    "last byte missing": (lambda data: data[:-1], "cannot be read as Parquet"),
    "garbage": (lambda data: np.random.default_rng(0).bytes(5000), "cannot be read as Parquet"),
    "text": (lambda data: b"not a record\n", "cannot be read as Parquet"),
    "appended to": (lambda data: data + b"PAR1", "cannot be read as Parquet"),
    "older schema": (lambda data: rewritten(data, version("0")), "not of schema 3"),
    "no schema version": (lambda data: rewritten(data, unversioned), "not of schema 3"),
    "column missing": (lambda data: rewritten(data, lambda table: table.drop_columns("host")), "columns are not those"),
    "two rows": (lambda data: rewritten(data, lambda table: pa.concat_tables([table, table])), "it has 2 rows"),
    "another id": (lambda data: rewritten(data, column("id", "f" * 64)), "it is the record of ffff"),
    "another specification": (lambda data: rewritten(data, column("specification", "{}")), "SHA-256 of its spec"),
    "another accuracy": (lambda data: rewritten(data, column("accuracy", 0.99)), "changed after its commit"),
}


def a_day_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the clocks of all stores forward."""
    now = places.now
    monkeypatch.setattr(places, "now", lambda files: now(files) + 90_000 * 10**9)


class StoreContract:
    """Tests of a store. A subclass gives ``url``, where there is no store yet, and ``files``, what lies there."""

    share = 1.0
    """Of the many bytes that are changed one by one, how many are."""

    folders = True
    """Whether there are folders in which nothing lies."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def files(self, url: str) -> Files:
        raise NotImplementedError

    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url, create=True)

    @pytest.fixture
    def row(self) -> dict[str, Any]:
        return factory.record(factory.plan(sources=["onebit"], replicates=1)[0])

    # Records

    def test_every_column_comes_back_as_it_was_given(self, store: Store, row: dict[str, Any]) -> None:
        assert store.commit(row)
        (stored,) = store.table(RECORD_SCHEMA.names).to_pylist()
        assert list(stored) == RECORD_SCHEMA.names
        assert set(row) == set(RECORD_SCHEMA.names)
        for name, value in row.items():
            assert stored[name] == plain(value), name

    def test_logits_keep_their_bits(self, store: Store, row: dict[str, Any]) -> None:
        logits = row["logits"]
        logits[0, :5] = np.nan, np.inf, -np.inf, -0.0, 1e-45
        store.commit(row)
        ((id, stored),) = store.logits([row["id"]])
        assert id == row["id"]
        assert same_bits(stored, logits)

    def test_variants_keep_their_bits(self, store: Store, row: dict[str, Any]) -> None:
        logits = np.random.default_rng(0).standard_normal((2, 300, 10)).astype(np.float32)
        scores = {"passes": 26, "accuracy": 0.5, "cross_entropy": None}
        variants = [
            {"name": name, **scores, "logits": own} for name, own in zip(("crop25", "ema"), logits, strict=True)
        ]
        store.commit(row | {"variants": variants})
        ((id, stored),) = store.variants(["0" * 64, row["id"]])
        assert id == row["id"]
        assert [(variant.name, variant.passes) for variant in stored] == [("crop25", 26), ("ema", 26)]
        assert all(same_bits(variant.logits, own) for variant, own in zip(stored, logits, strict=True))
        (whole,) = store.table(["variants"])["variants"].to_pylist()
        assert [{**item, "logits": None} for item in whole] == [{**item, "logits": None} for item in variants]
        assert whole[1]["logits"] == logits[1].tolist()

    def test_a_run_without_variants_has_none(self, store: Store, row: dict[str, Any]) -> None:
        store.commit(row)
        assert dict(store.variants([row["id"]])) == {row["id"]: ()}

    def test_commits_come_back(self, store: Store, row: dict[str, Any]) -> None:
        commits = [{"worker": 1, "batch": 0, "read": 0}, {"worker": 0, "batch": 1, "read": 1}]
        store.commit(row | {"commits": commits})
        assert store.table(["commits"]).to_pylist() == [{"commits": commits}]

    def test_a_diverged_run_has_a_record(self, store: Store) -> None:
        fake = factory.plan(sources=["init"], replicates=1)[0]
        store.commit(factory.diverged(fake))
        (stored,) = store.table(["outcome", "accuracy", "cross_entropy"]).to_pylist()
        assert stored == {"outcome": "diverged", "accuracy": None, "cross_entropy": None}
        assert np.isnan(dict(store.logits([fake.run.id]))[fake.run.id]).all()

    def test_a_run_without_logits_has_none(self, store: Store, row: dict[str, Any]) -> None:
        store.commit(row | {"outcome": "diverged", "logits": [], "predictions": []})
        assert dict(store.logits([row["id"]]))[row["id"]].shape == (0, 0)

    def test_epochs_are_taken_as_they_are(self, store: Store, row: dict[str, Any]) -> None:
        store.commit(row | {"history": EPOCHS})
        assert store.table(["history"]).to_pylist() == [{"history": [epoch_values(epoch) for epoch in EPOCHS]}]

    def test_an_existing_record_is_never_replaced(self, store: Store, files: Files, row: dict[str, Any]) -> None:
        store.commit(row)
        before = files.get(f"records/{row['id']}.parquet")
        assert not store.commit(row | {"accuracy": 0.1})
        assert files.get(f"records/{row['id']}.parquet") == before

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"acuracy": 0.5}, "no such columns: acuracy"),
            ({"final_digest": None}, "final_digest must have a value"),
            ({"accuracy": "high"}, "column accuracy"),
            ({"replicate": 2**40}, "column replicate"),
            ({"specification": "{}"}, "SHA-256 of its specification"),
            ({"outcome": "error"}, "outcome must be one of ok, diverged"),
        ],
    )
    def test_a_row_that_does_not_fit_is_refused(
        self, store: Store, files: Files, row: dict[str, Any], change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            store.commit(row | change)
        assert files.entries("records") == []

    def test_records_are_found_by_id(self, store: Store) -> None:
        fakes = factory.plan(replicates=3)
        factory.fill(store, fakes)
        rows = {fake.run.id: factory.record(fake) for fake in fakes}
        ids = list(rows)
        assert store.finished() == set(ids)
        assert all(store.has(id) for id in ids)
        assert not store.has("0" * 64)

        table = store.table(["accuracy", "id"])
        assert table.schema.names == ["accuracy", "id"]
        assert table["id"].to_pylist() == sorted(ids)
        assert table["accuracy"].to_pylist() == [rows[id]["accuracy"] for id in sorted(ids)]

        some = [ids[17], "0" * 64, ids[3]]
        assert store.table(["id"], some)["id"].to_pylist() == sorted([ids[3], ids[17]])
        assert store.table(["id"], []).num_rows == 0
        assert [id for id, _ in store.logits(some)] == [ids[17], ids[3]]
        for id, logits in store.logits(ids[::-1]):
            assert same_bits(logits, rows[id]["logits"])

    def test_a_table_has_the_short_columns_unless_asked(self, store: Store, row: dict[str, Any]) -> None:
        assert store.table().num_rows == 0
        store.commit(row)
        missing = [name for name in RECORD_SCHEMA.names if name not in store.table().schema.names]
        assert missing == ["logits", "predictions", "variants", "losses", "history", "commits"]

    def test_an_unknown_column_is_named_with_the_nearest(self, store: Store) -> None:
        with pytest.raises(UserError, match="unknown column of records 'acuracy'; did you mean 'accuracy'"):
            store.table(["id", "acuracy"])

    # Damage

    def check_corrupt(self, url: str, key: str, others: set[str], reason: str) -> None:
        """A damaged file is named with the reason, counts as missing, and harms no other, in any order of asking."""
        for ask in ("finished", "corrupt", "table"):
            store = open_store(url)
            getattr(store, ask)()
            assert store.finished() == others
            assert set(store.table(["id"])["id"].to_pylist()) == others
            assert set(dict(store.logits([*others, key]))) == others
            assert not store.has(key)
            faults = store.corrupt()
            assert list(faults) == [key]
            assert reason in faults[key]
            assert "\n" not in faults[key]

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_a_damaged_record_is_named_and_counts_as_missing(
        self, url: str, store: Store, files: Files, damage: str
    ) -> None:
        fakes = factory.plan(sources=["none", "init"], replicates=2)
        factory.fill(store, fakes)
        id, *others = [fake.run.id for fake in fakes]
        path = f"records/{id}.parquet"
        whole = files.get(path)
        assert whole is not None
        assert store.finished() == {id, *others}

        change, reason = DAMAGE[damage]
        files.put(path, change(whole))
        assert store.finished() == set(others)
        self.check_corrupt(url, id, set(others), reason)

        assert not store.has(id)
        aside = store.set_aside(id)
        assert aside is not None and aside.endswith(f"/corrupt/{id}.parquet")
        assert files.get(f"corrupt/{id}.parquet") == change(whole)
        assert store.corrupt() == {}
        assert store.set_aside(id) is None
        assert store.commit(factory.record(fakes[0]))
        assert store.finished() == {id, *others}

    def test_a_changed_byte_is_found_wherever_it_is(self, store: Store, files: Files) -> None:
        fake = factory.plan(sources=["init"], replicates=1)[0]
        store.commit(factory.record(fake, examples=40))
        path = f"records/{fake.run.id}.parquet"
        whole = files.get(path)
        assert whole is not None
        rng = np.random.default_rng(0)
        for position in [0, len(whole) - 1, *rng.choice(len(whole), int(150 * self.share), replace=False)]:
            changed = bytearray(whole)
            changed[position] ^= 1 << rng.integers(8)
            files.put(path, bytes(changed))
            assert open_store(store.url).finished() == set(), f"byte {position}"
            assert list(open_store(store.url).corrupt()) == [fake.run.id], f"byte {position}"

    def test_a_record_under_another_name_is_no_record(self, url: str, store: Store, files: Files) -> None:
        one, other = factory.plan(sources=["init"], replicates=2)
        store.commit(factory.record(one))
        data = files.get(f"records/{one.run.id}.parquet")
        assert data is not None
        files.put(f"records/{other.run.id}.parquet", data)
        self.check_corrupt(url, other.run.id, {one.run.id}, f"it is the record of {one.run.id}")

    @pytest.mark.parametrize("name", ["part-0.parquet", "notes.txt", "F" * 64 + ".parquet", "f" * 64])
    def test_a_file_that_is_no_record_is_named(
        self, url: str, store: Store, files: Files, row: dict[str, Any], name: str
    ) -> None:
        store.commit(row)
        files.put(f"records/{name}", b"hello")
        self.check_corrupt(url, name, {row["id"]}, "its name is not that of a record")
        assert store.set_aside(name) == f"{store.url}/corrupt/{name}"
        assert store.corrupt() == {}
        assert store.has(row["id"])

    @pytest.mark.parametrize("name", [".probe-0", "_metadata"])
    def test_a_name_that_parquet_readers_overlook_is_overlooked(
        self, store: Store, files: Files, row: dict[str, Any], name: str
    ) -> None:
        store.commit(row)
        files.put(f"records/{name}", b"hello")
        assert store.corrupt() == {}
        assert store.finished() == {row["id"]}

    def test_a_large_record_is_checked_where_it_is_read(self, url: str, files: Files) -> None:
        fakes = factory.plan(sources=["init"], replicates=2)
        store = open_store(url, create=True)
        factory.fill(store, fakes, examples=40_000)
        one, other = [fake.run.id for fake in fakes]
        whole = files.get(f"records/{one}.parquet")
        assert whole is not None and len(whole) > WHOLE

        damaged = bytearray(whole)
        damaged[page(whole, "logits") + 100_000] ^= 1
        for ask in (lambda s: dict(s.logits([one, other])), lambda s: s.table(["id", "logits"])):
            files.put(f"records/{one}.parquet", bytes(damaged))
            store = open_store(url)
            assert store.finished() == {one, other}
            assert len(ask(store)) == 1
            assert store.finished() == {other}
            assert "cannot be read as Parquet" in store.corrupt()[one]

        damaged = bytearray(whole)
        damaged[page(whole, "group") + 40] ^= 1
        files.put(f"records/{one}.parquet", bytes(damaged))
        self.check_corrupt(url, one, {other}, "cannot be read as Parquet")

    def test_a_readable_record_is_not_set_aside(self, store: Store, row: dict[str, Any]) -> None:
        store.commit(row)
        assert store.set_aside(row["id"]) is None
        assert store.has(row["id"])

    def test_commit_sets_aside_what_is_unreadable(self, store: Store, files: Files, row: dict[str, Any]) -> None:
        for number in (1, 2):
            files.put(f"records/{row['id']}.parquet", b"damaged %d" % number)
            assert store.commit(row)
            assert store.finished() == {row["id"]}
        assert files.get(f"corrupt/{row['id']}.parquet") == b"damaged 1"
        assert files.get(f"corrupt/{row['id']}.parquet.2") == b"damaged 2"

    # Versions

    def test_a_newer_store_is_refused(self, url: str, store: Store, files: Files) -> None:
        files.put("store.json", b'{"schema": 4}')
        for create in (False, True):
            with pytest.raises(UserError, match="is of schema 4, newer than the 3 that this version") as caught:
                open_store(url, create=create)
            assert "\n" not in str(caught.value)

    def test_an_older_store_is_refused_and_left_alone(self, url: str, store: Store, files: Files) -> None:
        files.put("store.json", b'{"schema": 2}')
        for create in (False, True):
            with pytest.raises(UserError, match="is of schema 2, and .* 3 only; give another folder") as caught:
                open_store(url, create=create)
            assert "\n" not in str(caught.value)
        assert files.get("store.json") == b'{"schema": 2}'

    @pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b'{"schema": "1"}', b'{"schema": 0}', b"\xff\xfe"])
    def test_a_store_without_a_version_is_refused(self, url: str, store: Store, files: Files, text: bytes) -> None:
        files.put("store.json", text)
        with pytest.raises(UserError, match="store.json must hold"):
            open_store(url)

    def test_a_newer_record_is_refused_and_left_alone(self, store: Store, files: Files, row: dict[str, Any]) -> None:
        store.commit(row)
        path = f"records/{row['id']}.parquet"
        data = files.get(path)
        assert data is not None
        newer = rewritten(data, version("4"))
        files.put(path, newer)
        for use in (
            store.finished,
            store.corrupt,
            store.table,
            lambda: store.has(row["id"]),
            lambda: list(store.logits([row["id"]])),
            lambda: store.set_aside(row["id"]),
            lambda: store.commit(row),
        ):
            with pytest.raises(StoreError, match=f"{path} is of schema 4, newer than the 3"):
                use()
        assert files.get(path) == newer

    # Opening

    def test_reading_where_there_is_no_store(self, url: str, files: Files, row: dict[str, Any]) -> None:
        store = open_store(url)
        assert store.finished() == set()
        assert store.corrupt() == {}
        assert store.table().num_rows == store.failures().num_rows == store.live().num_rows == 0
        assert store.labels("0" * 64) is None
        assert not store.has(row["id"])
        for use in (lambda: store.commit(row), lambda: store.begin(row["id"]), store.probe):
            with pytest.raises(StoreError, match="there is no store in"):
                use()
        assert files.names() == []

    def test_opening_twice_gives_one_store(self, url: str, store: Store, row: dict[str, Any]) -> None:
        store.commit(row)
        assert open_store(url, create=True).finished() == open_store(url).finished() == {row["id"]}
        assert open_store(url).url == store.url

    def test_probe_leaves_nothing(self, store: Store, files: Files) -> None:
        store.probe()
        folders = [folder for folder in files.names() if "." not in folder]
        assert set(folders) == (set(FOLDERS) if self.folders else set())
        assert store.exclusive
        assert not any(files.entries(folder) for folder in folders)

    def test_a_file_is_examined_once(
        self, store: Store, files: Files, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.commit(row)
        read: list[str] = []
        kind = type(files)
        get, open_ = kind.get, kind.open
        monkeypatch.setattr(kind, "get", lambda self, path: (read.append(path), get(self, path))[1])
        monkeypatch.setattr(kind, "open", lambda self, path: (read.append(path), open_(self, path))[1])
        for _ in range(3):
            store.finished()
            store.corrupt()
            store.has(row["id"])
        assert read == [f"records/{row['id']}.parquet"]
        files.put(f"records/{row['id']}.parquet", b"other")
        assert store.finished() == set()

    # Attempts

    def test_attempts_are_counted_though_they_were_killed(self, store: Store) -> None:
        one, other = factory.plan(sources=["init"], replicates=2)
        id = one.run.id
        assert [store.begin(id) for _ in range(3)] == [1, 2, 3]
        assert open_store(store.url, create=True).begin(id) == 4
        store.fail(factory.failure(one, attempt=4))
        assert store.begin(id) == 5
        store.fail(factory.failure(one, attempt=5))
        store.fail(factory.failure(one, attempt=11))
        assert store.begin(id) == 12
        assert store.begin(other.run.id) == 1

    def test_a_checkpoint_counts_as_an_attempt(self, store: Store, files: Files, row: dict[str, Any]) -> None:
        store.save_checkpoint(row["id"], checkpoint())
        assert store.begin(row["id"]) == 2
        files.put(f"live/{row['id']}.parquet", b"damaged")
        assert store.live().num_rows == 0
        assert store.begin(row["id"]) == 2

    def test_live_shows_the_newest_attempt(self, store: Store, row: dict[str, Any]) -> None:
        id = row["id"]
        began = datetime.datetime.now(datetime.UTC)
        store.begin(id)
        (shown,) = store.live().to_pylist()
        assert began <= shown.pop("updated") <= datetime.datetime.now(datetime.UTC)
        nothing = dict.fromkeys(["learning_rate", "train_loss", "test_loss", "test_accuracy", "seconds"])
        assert shown == {"id": id, "attempt": 1, "epochs": 0, **nothing}

        store.publish(id, 2, EPOCHS[:1])
        store.publish(id, 2, EPOCHS)
        (shown,) = store.live().to_pylist()
        assert shown.pop("updated") >= began
        last = epoch_values(EPOCHS[-1])
        assert shown == {"id": id, "attempt": 2, "epochs": last.pop("epoch"), **last}

    def test_commit_and_fail_end_an_attempt(self, store: Store) -> None:
        one, other, third = factory.plan(sources=["init"], replicates=3)
        for fake in (one, other, third):
            store.begin(fake.run.id)
            store.save_checkpoint(fake.run.id, checkpoint())
        store.commit(factory.record(one))
        store.fail(factory.failure(other))
        assert store.live()["id"].to_pylist() == [third.run.id]
        assert store.load_checkpoint(one.run.id) is None
        assert store.load_checkpoint(other.run.id) is not None

        store.begin(one.run.id)
        store.save_checkpoint(one.run.id, checkpoint())
        assert one.run.id not in store.live()["id"].to_pylist()
        assert not store.commit(factory.record(one))
        assert store.load_checkpoint(one.run.id) is None

    def test_failures_are_kept_by_attempt(self, store: Store, files: Files) -> None:
        fakes = factory.plan(sources=["init"], replicates=2)
        rows = [factory.failure(fake, attempt) for fake in fakes for attempt in (2, 10, 1)]
        for row in rows:
            store.fail(row)
        files.put(f"failures/{fakes[0].run.id}.3.parquet", b"damaged")
        table = store.failures()
        assert table.schema.equals(FAILURE_SCHEMA)
        assert table.to_pylist() == sorted(rows, key=lambda row: (row["id"], row["attempt"]))
        assert store.finished() == set()
        with pytest.raises(ValueError, match="outcome must be one of out_of_memory, error, hardware, timeout"):
            store.fail(rows[0] | {"outcome": "ok"})

    def test_tidy_deletes_only_what_is_of_no_more_use(
        self, store: Store, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done, running = factory.plan(sources=["init"], replicates=2)
        store.commit(factory.record(done))
        for fake in (done, running):  # as if the process had been killed within the commit
            store.begin(fake.run.id)
            store.save_checkpoint(fake.run.id, checkpoint())
        files.put("tmp/left", b"half a file")
        store.tidy()
        assert store.finished() == {done.run.id}
        assert store.load_checkpoint(done.run.id) is None
        assert store.load_checkpoint(running.run.id) is not None
        assert [entry.name for entry in files.entries("live")] == [f"{running.run.id}.parquet"]
        assert files.get("tmp/left") is not None
        with monkeypatch.context() as patch:  # This machine's clock says nothing of a file's age.
            wrong = time.time_ns() + 90_000 * 10**9
            patch.setattr(time, "time_ns", lambda: wrong)
            patch.setattr(time, "time", lambda: wrong / 10**9)
            store.tidy()
        assert files.get("tmp/left") is not None
        a_day_later(monkeypatch)
        store.tidy()
        assert files.get("tmp/left") is None

    # Checkpoints, references, labels

    def test_a_checkpoint_keeps_every_bit(self, store: Store, row: dict[str, Any]) -> None:
        saved = checkpoint()
        store.save_checkpoint(row["id"], dataclasses.replace(saved, epochs=1))
        store.save_checkpoint(row["id"], saved)
        loaded = store.load_checkpoint(row["id"])
        assert loaded is not None
        assert (loaded.epochs, loaded.history) == (saved.epochs, saved.history)
        assert (loaded.initial_digest, loaded.first_step_digest) == (saved.initial_digest, saved.first_step_digest)
        assert same_bits(loaded.losses, saved.losses)
        assert set(loaded.tensors) == set(saved.tensors)
        for name, tensor in saved.tensors.items():
            assert same_bits(loaded.tensors[name], tensor), name
        store.delete_checkpoint(row["id"])
        store.delete_checkpoint(row["id"])
        assert store.load_checkpoint(row["id"]) is None

    def test_a_damaged_checkpoint_is_none(self, store: Store, files: Files, row: dict[str, Any]) -> None:
        store.save_checkpoint(row["id"], checkpoint(), ["here"])
        path = f"checkpoints/{row['id']}.safetensors"
        whole = files.get(path)
        assert whole is not None
        rng = np.random.default_rng(0)
        damaged = [b"", whole[:7], whole[: len(whole) // 2], whole[:-1], whole + b"\0", b"\xff" * 100]
        for position in rng.choice(len(whole), int(300 * self.share), replace=False):
            changed = bytearray(whole)
            changed[position] ^= 1 << rng.integers(8)
            damaged.append(bytes(changed))
        for data in damaged:
            files.put(path, data)
            assert store.load_checkpoint(row["id"]) is None
            assert all(isinstance(device, str) for device in store.checkpoint_devices(row["id"]))

    def test_what_a_device_had_a_part_in_is_forgotten(self, store: Store) -> None:
        ids = ["a" * 64, "b" * 64, "c" * 64]
        for id, devices in zip(ids, (("here",), ("here", "there"), ("there",)), strict=True):
            store.save_checkpoint(id, checkpoint(), devices)
            reference = Reference(weights={}, losses=np.ones(1), predictions=np.ones(1, np.int32), fingerprint="f")
            store.save_reference(id, dataclasses.replace(reference, devices=devices))
        assert [store.checkpoint_devices(id) for id in ids] == [("here",), ("here", "there"), ("there",)]
        assert store.checkpoint_devices("d" * 64) == ()
        assert store.load_reference(ids[1]).devices == ("here", "there")
        store.forget("here", "b")
        assert [store.load_checkpoint(id) is None for id in ids] == [False, True, False]
        store.forget("here")
        assert [store.load_checkpoint(id) is None for id in ids] == [True, True, False]
        assert [store.load_reference(id) is None for id in ids] == [True, True, False]

    def test_a_record_is_withdrawn_unless_it_has_been_replaced(self, store: Store, row: dict[str, Any]) -> None:
        store.commit(row)
        (entry,) = store.listed()
        store.withdraw(entry)
        assert not store.has(row["id"]) and store.withdraw(entry) is None
        store.commit({**row, "attempt": row["attempt"] + 1, "host": row["host"] + " by another name"})
        assert store.withdraw(entry) is None and store.has(row["id"])
        (other,) = store.listed()
        assert store.withdraw(other) == f"{store.url}/corrupt/{entry.name}.2"

    def test_a_reference_keeps_every_bit(self, store: Store, files: Files, row: dict[str, Any]) -> None:
        weights, losses = checkpoint().tensors, checkpoint().losses
        predictions = np.arange(50, dtype=np.int32)
        assert store.load_reference(row["id"]) is None
        reference = Reference(weights=weights, losses=losses, predictions=predictions, fingerprint="this machine")
        store.save_reference(row["id"], reference)
        loaded = store.load_reference(row["id"])
        assert loaded is not None
        assert same_bits(loaded.losses, losses)
        assert same_bits(loaded.predictions, predictions)
        assert all(same_bits(loaded.weights[name], tensor) for name, tensor in weights.items())
        assert len(loaded.weights) == len(weights)
        files.put(f"references/{row['id']}.safetensors", b"damaged")
        assert store.load_reference(row["id"]) is None

    def test_kept_tensors_keep_every_bit(self, store: Store, files: Files, row: dict[str, Any]) -> None:
        tensors = checkpoint().tensors | {"gram/stem": np.eye(4, dtype=np.float32)}
        path = f"kept/{row['id']}.safetensors"
        assert store.kept(row["id"]) is None
        store.save_kept(row["id"], {"weights/other": np.zeros(3)})
        store.save_kept(row["id"], tensors)
        store.commit(row | {"tensor_digests": own_digests(tensors)})
        for kept in (store.kept(row["id"]), load(files.get(path) or b"")):  # as any other reader sees them
            assert kept is not None and set(kept) == set(tensors)
            assert all(same_bits(kept[name], tensor) for name, tensor in tensors.items())
        whole = files.get(path)
        assert whole is not None
        for position in np.random.default_rng(0).choice(len(whole), int(50 * self.share), replace=False):
            changed = bytearray(whole)
            changed[position] ^= 1
            files.put(path, bytes(changed))
            assert store.kept(row["id"]) is None

    def test_kept_tensors_are_those_of_the_record(self, store: Store, row: dict[str, Any]) -> None:
        """Of two attempts at a time, which ended in other bits, only the one that left the record counts."""
        ours, theirs = ({"weights/a": np.full(3, value), "gram/stem": np.eye(2)} for value in (1.0, 2.0))
        store.save_kept(row["id"], ours)
        store.commit(row | {"tensor_digests": own_digests(ours)})
        store.save_kept(row["id"], theirs)  # Too late: its record would be refused.
        kept = store.kept(row["id"])
        assert kept is not None and kept["weights/a"].tolist() == [1, 1, 1]

        other = factory.plan(sources=["onebit"], replicates=2)[1]
        store.save_kept(other.run.id, ours)
        store.save_kept(other.run.id, theirs)
        assert store.kept(other.run.id) is not None
        store.commit(factory.record(other, tensor_digests=own_digests(ours)))
        assert store.kept(other.run.id) is None

    def test_kept_tensors_of_no_record_are_tidied_away_in_time(
        self, store: Store, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done, running = factory.plan(sources=["init"], replicates=2)
        for fake in (done, running):
            store.save_kept(fake.run.id, {"weights/w": np.zeros(3)})
        store.commit(factory.record(done, tensor_digests=own_digests({"weights/w": np.zeros(3)})))
        store.tidy()
        assert store.kept(running.run.id) is not None
        a_day_later(monkeypatch)
        store.tidy()
        assert store.kept(running.run.id) is None
        assert store.kept(done.run.id) is not None

    def test_hardware_belongs_to_who_claims_it_first(self, store: Store, files: Files) -> None:
        assert store.hardware("a" * 16) is None
        assert store.claim_hardware("a" * 16, "cpu") == "cpu"
        assert store.claim_hardware("a" * 16, "a GPU") == store.hardware("a" * 16) == "cpu"
        assert open_store(store.url).claim_hardware("b" * 16, "a GPU") == "a GPU"
        files.put(f"hardware/{'a' * 16}.json", b"damaged")
        assert store.hardware("a" * 16) is None
        assert store.claim_hardware("a" * 16, "a GPU") == "a GPU"

    def test_labels_are_kept_by_their_fingerprint(self, store: Store, files: Files) -> None:
        labels = np.random.default_rng(0).integers(0, 10, 100)
        fingerprint = hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()
        assert store.labels(fingerprint) is None
        with pytest.raises(ValueError, match="do not have that fingerprint"):
            store.put_labels("0" * 64, labels)
        for dtype in (np.int64, np.uint8):
            store.put_labels(fingerprint, labels.astype(dtype))
            stored = store.labels(fingerprint)
            assert stored is not None and same_bits(stored, labels)
        path = f"labels/{fingerprint}.parquet"
        for damaged in (b"damaged", rewritten(files.get(path) or b"", lambda table: table.slice(1))):
            files.put(path, damaged)
            assert store.labels(fingerprint) is None
            store.put_labels(fingerprint, labels)
            assert store.labels(fingerprint) is not None


def checkpoint() -> Checkpoint:
    """One with every kind of array and value that is easily lost."""
    rng = np.random.default_rng(0)
    odd = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, 3.4e38], np.float32)
    odd_nan = np.array([0x7FC00001, 0xFF800001], np.uint32).view(np.float32)
    return Checkpoint(
        epochs=3,
        tensors={
            "weights/conv": rng.standard_normal((4, 3, 3, 3)).astype(np.float32),
            "weights/transposed": rng.standard_normal((5, 7)).astype(np.float32).T,
            "weights/strided": rng.standard_normal((8, 8))[::2, 1::3],
            "weights/double": np.array([np.pi, np.nextafter(1, 2), 5e-324]),
            "weights/scalar": np.float32(0.1) * np.ones((), np.float32),
            "weights/empty": np.zeros((0, 3), np.float32),
            "logits/flip": rng.standard_normal((6, 3)),
            "commits": np.zeros((0, 3), np.int64),
            "perturbation": np.frombuffer(b'{"step": 3}', np.uint8),
            "momentum/odd": odd,
            "momentum/nan": odd_nan,
            "momentum/steps": np.array([2**62, -1], np.int64),
        },
        losses=np.array([0.1, np.nan, 1e300, 1 / 3]),
        history=(*EPOCHS, dataclasses.replace(EPOCHS[0], test_loss=float("inf"))),
        first_step_digest="a" * 64,
        initial_digest="b" * 64,
    )
