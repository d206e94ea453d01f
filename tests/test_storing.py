"""``verify`` finds all damage and changes nothing; ``export`` and ``import`` copy bit for bit or say why not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.cli import storing
from orchestrator.cli.app import main
from orchestrator.plan import plan
from orchestrator.store import Reference, Store, StoreError, encoding, open_store, parts, records
from orchestrator.store.compaction import compact
from orchestrator.store.files import Files
from orchestrator.store.local import LocalFiles
from orchestrator.store.schema import SHORT_COLUMNS
from orchestrator.store.transfer import COPIED, DAMAGED, PRESENT, WITHHELD, transfer
from orchestrator.store.verify import verify
from protocols.digest import tensor_digests
from protocols.load import load_protocol
from protocols.overrides import apply_settings, select_cells
from tests import factory
from tests.store_contract import checkpoint, page

WEIGHTS = {"head.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
KEPT = {f"weights/{name}": tensor for name, tensor in WEIGHTS.items()}
COPIED_FOLDERS = ("records", "kept", "labels", "references", "hardware", "looks")

FAKES = factory.plan(sources=["none", "init"], replicates=2)
ONE, OTHER = FAKES[0].run.id, FAKES[3].run.id
GROUP = FAKES[0].run.group
LABELS = factory.labels_fingerprint(factory.labels())
UNFINISHED = factory.plan(sources=["shuffle"], replicates=2)


def fill(store: Store) -> None:
    """One of everything that a store can hold."""
    for fake in FAKES:
        row = factory.record(fake, kept=["weights"], tensor_digests=tensor_digests(WEIGHTS))
        store.save_kept(row["id"], KEPT)
        store.put_labels(row["labels_fingerprint"], factory.labels())
        assert store.claim_hardware(row["group"], row["hardware"]) == row["hardware"]
        store.commit(row)
    predictions = np.zeros(300, np.int32)
    reference = Reference(weights=WEIGHTS, losses=np.ones(3), predictions=predictions, fingerprint="f00d" * 4)
    store.save_reference(ONE, reference)
    store.save_checkpoint(UNFINISHED[0].run.id, checkpoint())
    store.begin(UNFINISHED[0].run.id)
    store.fail(factory.failure(UNFINISHED[1]))
    store.record_look("d" * 16, FAKES[1].run.id, 1, {"cell": FAKES[1].run.id, "look": 1})


def contents(files: Files, folders: tuple[str, ...]) -> dict[str, bytes | None]:
    return {
        path: files.get(path) for folder in folders for path in [f"{folder}/{e.name}" for e in files.entries(folder)]
    }


def flip(files: Files, path: str, position: int) -> None:
    data = files.get(path)
    assert data is not None
    changed = bytearray(data)
    changed[position] ^= 1
    files.put(path, bytes(changed))


def middle(data: bytes) -> int:
    return len(data) // 2


def footer(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


REGIONS: dict[str, Callable[[bytes], int]] = {
    "first byte": lambda data: 0,
    "first page's header": lambda data: 6,
    "short column": lambda data: page(data, "accuracy") + 20,
    "specification": lambda data: page(data, "specification") + 100,
    "logits": lambda data: page(data, "logits") + 5000,
    "losses": lambda data: page(data, "losses") + 30,
    "last page": lambda data: footer(data) - 40,
    "seal": lambda data: footer(data) - 10,
    "footer": lambda data: footer(data) + 200,
    "footer's length": lambda data: len(data) - 6,
    "last byte": lambda data: len(data) - 1,
}

OTHERS = {
    "kept": f"kept/{ONE}.safetensors",
    "labels": f"labels/{LABELS}.parquet",
    "references": f"references/{ONE}.safetensors",
    "checkpoints": f"checkpoints/{UNFINISHED[0].run.id}.safetensors",
    "hardware": f"hardware/{GROUP}.json",
    "failures": f"failures/{UNFINISHED[1].run.id}.1.parquet",
    "live": f"live/{UNFINISHED[0].run.id}.parquet",
    "looks": f"looks/{'d' * 16}.{FAKES[1].run.id}.1.json",
}

SHORT = np.zeros((7, 10), np.float32)
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "its predictions are not the classes with the highest logits": {"predictions": np.zeros(300, np.int32)},
    "its predictions are no classes": {"predictions": np.full(300, 10, np.int32)},
    "it has 7 predictions for 300 labels": {"predictions": np.zeros(7, np.int32)},
    "it has the logits of 7 examples and 300 predictions": {"logits": SHORT},
    "its accuracy is not the share of its predictions that are right": {"accuracy": 0.5},
    "its variant flip has the logits of 7 examples, not 300": {
        "variants": [{"name": "flip", "passes": 2, "accuracy": 0.5, "cross_entropy": 1.0, "logits": SHORT}]
    },
}


class StoringContract:
    """Tests of any store.

    A subclass gives ``url``, where there is no store yet, ``files``, what lies there, and ``elsewhere``, another url.
    """

    every = 1
    """Of the places where bytes are changed, every how many-th is."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def files(self, url: str) -> Files:
        raise NotImplementedError

    @pytest.fixture
    def elsewhere(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def store(self, url: str) -> Store:
        store = open_store(url, create=True)
        fill(store)
        return store

    # verify

    @pytest.mark.parametrize("compacted", [False, True])
    def test_a_whole_store_has_no_problem(self, url: str, store: Store, compacted: bool) -> None:
        diverged = factory.plan(sources=["all"], replicates=2)
        store.commit(factory.diverged(diverged[0]))
        store.commit(factory.record(diverged[1], outcome="diverged", logits=[], predictions=[], accuracy=None))
        if compacted:
            compact(store)
        seen: list[tuple[int, int]] = []
        found = verify(open_store(url), lambda done, total: seen.append((done, total)))
        assert found.problems == [] and found.unreadable == {}
        counts = {"records": 6, "kept": 4, **dict.fromkeys(OTHERS.keys() - {"kept"}, 1)}
        assert found.checked == counts | {"canaries": 0, "compacted": int(compacted)}
        assert seen[-1] == (sum(found.checked.values()),) * 2 and seen == sorted(seen)

    @pytest.mark.parametrize("large", [False, True])
    def test_a_changed_byte_of_a_record_is_found(
        self, url: str, store: Store, files: Files, monkeypatch: pytest.MonkeyPatch, large: bool
    ) -> None:
        if large:
            monkeypatch.setattr(records, "WHOLE", 1000)
        path = f"records/{ONE}.parquet"
        data = files.get(path)
        assert data is not None
        for region, position in list(REGIONS.items())[:: self.every]:
            files.put(path, data)
            flip(files, path, position(data))
            found = verify(open_store(url))
            assert [(problem.kind, problem.file) for problem in found.problems] == [("records", path)], region
            noticed = ONE not in open_store(url).finished()
            assert noticed or large, region
            remedy = "the same run command" if noticed else "verify --set-aside"
            assert found.problems[0].remedy.startswith(remedy), region

    def test_a_changed_byte_of_anything_else_is_found(self, url: str, store: Store, files: Files) -> None:
        for kind, path in OTHERS.items():
            data = files.get(path)
            assert data is not None
            json_or_else = 3 if path.endswith(".json") else middle(data)
            flip(files, path, page(data, "label") + 40 if kind == "labels" else json_or_else)
            (problem,) = verify(open_store(url)).problems
            assert (problem.kind, problem.file) == (kind, path)
            assert problem.remedy and "\n" not in problem.fault
            files.put(path, data)

    @pytest.mark.parametrize("column", ["", ".specification", ".provenance"])
    def test_a_changed_byte_of_a_part_is_found_and_mended_by_compacting(
        self, url: str, store: Store, files: Files, column: str
    ) -> None:
        compact(store)
        (name,) = [entry.name for entry in files.entries("compacted") if parts.is_part(entry.name)]
        flip(files, f"compacted/{name.removesuffix('.parquet')}{column}.parquet", 100)
        (problem,) = verify(open_store(url)).problems
        assert (problem.kind, problem.file) == ("compacted", f"compacted/{name}")
        compact(store)
        assert verify(open_store(url)).problems == []

    def test_a_part_that_says_something_else_than_its_records_is_found(
        self, url: str, store: Store, files: Files
    ) -> None:
        entries, table = store.rows(store.listed(), SHORT_COLUMNS)
        position = table.schema.get_field_index("host")
        wrong = table.set_column(position, table.schema.field("host"), [["node", "node", "elsewhere", "node"]])
        part = parts.write(files, wrong, entries)
        (problem,) = verify(open_store(url)).problems
        assert problem.file == f"compacted/{part.name}.parquet"
        assert problem.fault == f"its row of {table['id'][2]} is not that record's"

    @pytest.mark.parametrize("kind", ["kept", "labels"])
    def test_what_a_record_refers_to_is_missed(self, url: str, store: Store, files: Files, kind: str) -> None:
        files.delete(OTHERS[kind])
        (problem,) = verify(open_store(url)).problems
        assert (problem.kind, problem.file, problem.fault) == (kind, OTHERS[kind], "it is missing")

    def test_kept_tensors_of_other_weights_are_found(self, url: str, store: Store, files: Files) -> None:
        id = factory.plan(sources=["init"], replicates=3)[2].run.id
        store.save_kept(id, {"weights/head.weight": np.zeros((2, 3), np.float32)})
        data = files.get(f"kept/{id}.safetensors")
        files.put(OTHERS["kept"], data or b"")
        (problem,) = verify(open_store(url)).problems
        assert (problem.file, problem.fault) == (OTHERS["kept"], "it is not the record's")

    def test_columns_that_contradict_each_other_are_found(self, url: str, store: Store, files: Files) -> None:
        fake = factory.plan(sources=["all"], replicates=1)[0]
        path = f"records/{fake.run.id}.parquet"
        for fault, change in CONTRADICTIONS.items():
            store.commit(factory.record(fake, **change))
            (problem,) = verify(open_store(url)).problems
            assert (problem.file, problem.fault) == (path, fault)
            files.delete(path)

    def test_what_is_no_record_is_found(self, url: str, store: Store, files: Files) -> None:
        files.put("records/notes.txt", b"hello")
        (problem,) = verify(open_store(url)).problems
        assert problem.file == "records/notes.txt" and problem.remedy == "move it out of records/"

    def test_verifying_changes_nothing(self, url: str, store: Store, files: Files) -> None:
        compact(store)
        flip(files, f"records/{ONE}.parquet", 1000)
        flip(files, OTHERS["hardware"], 3)
        folders = (*COPIED_FOLDERS, "compacted", "live", "failures", "checkpoints", "corrupt")
        before = {folder: files.entries(folder) for folder in folders}
        assert len(verify(open_store(url)).problems) == 2
        assert before == {folder: files.entries(folder) for folder in folders}

    # export and import

    @pytest.mark.parametrize("compacted", [False, True])
    def test_a_copy_is_the_same_bit_for_bit(
        self, url: str, store: Store, files: Files, elsewhere: str, compacted: bool
    ) -> None:
        if compacted:
            compact(store)
        target = open_store(elsewhere, create=True)
        seen: list[tuple[int, int]] = []
        done = transfer(open_store(url), target, report=lambda *counts: seen.append(counts))
        assert done.complete and done.counts == {COPIED: 4}
        assert seen[-1] == (4, 4)
        assert contents(target.files, COPIED_FOLDERS) == contents(files, COPIED_FOLDERS)
        assert contents(target.files, ("live", "checkpoints", "failures", "corrupt")) == {}
        assert verify(open_store(elsewhere)).problems == []

        before = target.files.entries("records")
        assert transfer(open_store(url), open_store(elsewhere)).counts == {PRESENT: 4}
        assert target.files.entries("records") == before

    def test_a_part_of_a_store(self, url: str, store: Store, elsewhere: str) -> None:
        target = open_store(elsewhere, create=True)
        assert transfer(open_store(url), target, [OTHER, "0" * 64]).counts == {COPIED: 1}
        assert target.finished() == {OTHER}
        copied = contents(target.files, COPIED_FOLDERS)
        assert {path.partition("/")[0] for path in copied} == {"records", "kept", "labels", "hardware"}
        assert transfer(open_store(url), target).counts == {COPIED: 3, PRESENT: 1}

    def test_the_reference_of_a_perturbed_run_comes_along(self, url: str, store: Store, elsewhere: str) -> None:
        fake = factory.plan(sources=["onebit"], replicates=1)[0]
        assert fake.run.without("onebit").id == ONE
        store.commit(factory.record(fake))
        target = open_store(elsewhere, create=True)
        transfer(open_store(url), target, [fake.run.id])
        assert target.load_reference(ONE) is not None and target.finished() == {fake.run.id}

    def test_only_whole_records_are_copied(self, url: str, store: Store, files: Files, elsewhere: str) -> None:
        flip(files, f"records/{ONE}.parquet", 1000)
        flip(files, f"kept/{OTHER}.safetensors", 200)
        target = open_store(elsewhere, create=True)
        done = transfer(open_store(url), target)
        assert not done.complete and done.counts == {COPIED: 2, DAMAGED: 2}
        assert set(done.damaged) == {ONE, OTHER}
        assert target.finished() == {fake.run.id for fake in FAKES} - {ONE, OTHER}
        assert verify(open_store(elsewhere)).problems == []

    def test_a_readable_record_is_never_replaced_and_an_unreadable_one_is(
        self, url: str, store: Store, elsewhere: str
    ) -> None:
        target = open_store(elsewhere, create=True)
        target.commit(factory.record(FAKES[0], host="another"))
        target.files.put(f"records/{OTHER}.parquet", b"damaged")
        done = transfer(open_store(url), target)
        assert done.complete and done.counts == {COPIED: 3, PRESENT: 1}
        assert target.table(["host"], [ONE])["host"].to_pylist() == ["another"]
        assert target.files.get(f"corrupt/{OTHER}.parquet") == b"damaged"
        assert target.finished() == store.finished() and target.corrupt() == {}

    def test_groups_of_other_hardware_are_refused(self, url: str, store: Store, elsewhere: str) -> None:
        free = factory.plan(sources=["init"], replicates=1, varies=("hardware", "init"))
        alike = factory.plan(sources=["init"], replicates=1, base_seed=1)
        factory.fill(store, [*free, *alike])
        assert free[0].run.group == GROUP != alike[0].run.group
        target = open_store(elsewhere, create=True)
        target.claim_hardware(GROUP, "a GPU")
        done = transfer(open_store(url), target)
        assert not done.complete and done.counts == {COPIED: 2, WITHHELD: 4}
        assert target.finished() == {free[0].run.id, alike[0].run.id}
        assert target.hardware(GROUP) == "a GPU" and target.hardware(alike[0].run.group) == "cpu, torch 2.13.0"
        (sentence,) = done.refused.values()
        assert f"'cpu, torch 2.13.0' in {store.url} and on 'a GPU' in {target.url}" in sentence

    def test_looks_at_runs_that_are_not_copied_stay(self, url: str, store: Store, elsewhere: str) -> None:
        """A look that was taken of other runs than the target has would decide there how many more there are."""
        target = open_store(elsewhere, create=True)
        target.claim_hardware(GROUP, "a GPU")
        assert transfer(open_store(url), target).counts == {WITHHELD: 4}
        assert target.files.entries("looks") == []
        target.commit(factory.record(FAKES[1], hardware="a GPU"))
        assert transfer(open_store(url), target).counts == {PRESENT: 1, WITHHELD: 3}
        assert target.files.entries("looks") == []

    def test_the_looks_of_a_damaged_record_stay(self, url: str, store: Store, files: Files, elsewhere: str) -> None:
        flip(files, f"kept/{FAKES[1].run.id}.safetensors", 200)
        target = open_store(elsewhere, create=True)
        assert transfer(open_store(url), target).counts == {COPIED: 3, DAMAGED: 1}
        assert target.files.entries("looks") == []

    def test_an_interrupted_copy_is_gone_on_with(
        self, url: str, store: Store, elsewhere: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = open_store(elsewhere, create=True)
        kind, left = type(target.files), [7]

        def limited(name: str) -> Callable[..., Any]:
            write = getattr(kind, name)

            def wrapped(self: Files, path: str, data: bytes, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise StoreError(f"cannot write {path}: No space left on device")
                return write(self, path, data, **options)

            return wrapped

        with monkeypatch.context() as patch:
            for name in ("put", "put_if_absent"):
                patch.setattr(kind, name, limited(name))
            with pytest.raises(StoreError, match="No space left"):
                transfer(open_store(url), target)
        assert all(target.kept(id) is not None and target.labels(LABELS) is not None for id in target.finished())
        done = transfer(open_store(url), open_store(elsewhere))
        assert done.complete and sum(done.counts.values()) == 4
        assert verify(open_store(elsewhere)).problems == []


class TestLocalStoring(StoringContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")

    @pytest.fixture
    def files(self, url: str) -> Files:
        return LocalFiles(Path(url))

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> str:
        return str(tmp_path / "elsewhere")

    def test_a_disk_that_rots_is_seen_by_verifying_alone(self, url: str, store: Store, files: Files) -> None:
        """The file has its size and its time, so a compacted store takes it for the one that it was."""
        compact(store)
        path = Path(url, "records", f"{ONE}.parquet")
        times = path.stat()
        flip(files, f"records/{ONE}.parquet", 2000)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert ONE in open_store(url).finished()
        assert not dict(open_store(url).logits([ONE])), "a damaged record was read"
        assert main(["verify", "--store", url]) == 1
        assert ONE in open_store(url).finished()
        assert main(["verify", "--store", url, "--set-aside"]) == 1
        assert ONE not in open_store(url).finished()
        assert Path(url, "corrupt", f"{ONE}.parquet").exists()


# The verbs


@pytest.fixture
def study(tmp_path: Path) -> str:
    """A store of quickstart's runs with PyTorch, two replicates each, and the arguments that name them."""
    url = str(tmp_path / "study")
    protocol = select_cells(apply_settings(load_protocol("quickstart"), STUDY[2:3]), STUDY[4:])
    store = open_store(url, create=True)
    factory.fill(store, plan(protocol, store).planned, examples=30)
    return url


STUDY = ("quickstart", "--set", "replicates=2", "--only", "trainer=torch")


def test_verify_says_what_is_wrong_and_what_mends_it(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--store", study]) == 0
    assert "No problem in" in capsys.readouterr().out
    name = sorted(os.listdir(Path(study, "records")))[0]
    Path(study, "records", name).write_bytes(b"damaged")
    assert main(["verify", "--store", study]) == 1
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("records/" + name)]
    assert "cannot be read as Parquet" in line and "the same run command sets it aside and trains it again" in line
    assert "1 problem in" in shown
    assert main(["verify", "--store", study, "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["checked"]["records"] == len(os.listdir(Path(study, "records")))
    assert [problem["file"] for problem in values["problems"]] == [f"records/{name}"]
    assert encoding.is_id(name.removesuffix(".parquet"))


def test_compact_counts(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    count = len(os.listdir(Path(study, "records")))
    for new in (count, 0):
        assert main(["compact", "--store", study]) == 0
        assert capsys.readouterr().out.startswith(f"{count} records in 1 part under {study}/compacted, {new} of them")


def test_run_compacts_where_many_records_are_loose(
    study: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(study)
    storing.compact_many(store)
    assert store.files.entries("compacted") == []
    monkeypatch.setattr(storing, "MANY", 5)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "put", refuse_to_write)
        storing.compact_many(store)
    assert capsys.readouterr().err == "warning: the store was not compacted: No space left on device\n"
    storing.compact_many(store)
    assert len(store.files.entries("compacted")) == 1 + len(parts.RARE)
    assert capsys.readouterr() == ("", "")


def refuse_to_write(*_: object, **__: object) -> None:
    raise StoreError("No space left on device")


def test_a_sub_grid_goes_out_and_comes_back(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    command = ["export", *STUDY, "--only", "source=init,onebit", "--store", study, "--to", out]
    assert main(command) == 0
    assert f"6 records copied to {out}, 0 there already." in capsys.readouterr().out
    assert set(open_store(out).table(["source"])["source"].to_pylist()) == {"none", "init", "onebit"}
    assert main(command) == 0
    assert f"0 records copied to {out}, 6 there already." in capsys.readouterr().out
    assert main(["import", "--from", out, "--store", back]) == 0
    assert contents(open_store(back).files, COPIED_FOLDERS) == contents(open_store(out).files, COPIED_FOLDERS)
    command[2:4] = ["--set", "replicates=3"]
    assert main(command) == 0
    assert "3 of 9 planned runs without a record" in capsys.readouterr().out


def test_mistakes_are_one_sentence(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = str(tmp_path / "nothing")
    for command, message in (
        (["export", *STUDY, "--store", study, "--to", study], "both the store to copy from and the one to copy into"),
        (["import", "--from", nothing, "--store", study], f"there is no store in {nothing}"),
        (["export", *STUDY, "--store", nothing, "--to", study], f"there is no store in {nothing}"),
        (["compact", "--store", nothing], f"there is no store in {nothing}"),
        (["verify", "--store", nothing], f"there is no store in {nothing}"),
    ):
        assert main(command) == 2
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1
    assert not Path(nothing).exists()


def test_what_is_not_copied_is_said(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = sorted(os.listdir(Path(study, "records")))[0]
    group = open_store(study).table(["group"])["group"][0].as_py()
    Path(study, "records", name).write_bytes(b"damaged")
    assert main(["import", "--from", study, "--store", str(tmp_path / "one")]) == 1
    assert f"error: record {name.removesuffix('.parquet')} was not copied: it cannot be read" in capsys.readouterr().err
    other = open_store(tmp_path / "other", create=True)
    other.claim_hardware(group, "a GPU")
    assert main(["import", "--from", study, "--store", other.url]) == 1
    assert (
        f"error: group {group} was trained on 'cpu, torch 2.13.0' in {study} and on 'a GPU'" in capsys.readouterr().err
    )
    assert other.finished() == set()
