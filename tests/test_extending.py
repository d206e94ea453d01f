"""The files of docs/extending.md, each as it stands there, put together to a study and run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from orchestrator import catalog
from orchestrator.analysis import load
from orchestrator.cli.app import main
from orchestrator.plan import expand
from orchestrator.slot.context import Settings
from orchestrator.slot.worker import execute
from orchestrator.store import open_store
from protocols.errors import UserError
from protocols.load import load_protocol
from protocols.overrides import apply_settings
from protocols.protocol import Protocol

DOCS = Path(__file__).parents[1] / "docs" / "extending.md"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCS.read_text(), re.DOTALL))
STUDY = [
    "trainer=./softmax.py:trainer",
    "architecture=./net.py:net",
    "dataset=./blobs.py:blobs",
    "source=init,shuffle,./jitter.py:jitter",
    "recipe.epochs=3",
    "replicates=2",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study(*settings: str) -> Protocol:
    return apply_settings(load_protocol("quickstart"), settings)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_ones_own_has_under_40_lines(name: str) -> None:
    lines = [line for line in FILES[name].splitlines() if line.strip()]
    assert len(lines) < 40
    assert max(map(len, lines)) <= 120


def test_there_is_one_of_each_kind() -> None:
    assert set(FILES) == {"jitter.py", "net.py", "blobs.py", "softmax.py"}


def test_a_study_of_nothing_but_ones_own(folder: Path) -> None:
    store = open_store(str(folder / "store"), create=True)
    planned = expand(study(*STUDY))
    assert {entry.source for entry in planned} == {"none", "init", "shuffle", "./jitter.py:jitter"}
    for entry in planned:
        data = catalog.prepare(entry.run.dataset, None)
        row = execute(entry.run, entry.source, store, data, Settings(store=str(folder / "store")))
        assert row is not None and row["outcome"] == "ok" and row["accuracy"] > 0.9
    table = load(store, study(*STUDY), planned).table().set_index("source")
    assert (table["control"] == "not shown").all(), "one process alone shows nothing"
    records = store.table(["source", "replicate", "initial_digest", "final_digest"]).to_pandas()
    digests = {source: set(rows["final_digest"]) for source, rows in records.groupby("source")}
    assert [len(digests[source]) for source in ("none", "init", "shuffle", "./jitter.py:jitter")] == [1, 2, 2, 2]
    assert len(set.union(*digests.values())) == 7, "each varies something, and nothing twice"
    jittered = records[records["source"] == "./jitter.py:jitter"]
    assert set(jittered["initial_digest"]) == set(records.loc[records["source"] == "none", "initial_digest"])


@pytest.mark.parametrize("trainer", ["torch", "tensorflow"])
def test_a_source_a_network_and_a_dataset_serve_both_trainers(folder: Path, trainer: str) -> None:
    settings = [f"trainer={trainer}", *STUDY[1:3], "source=./jitter.py:jitter+init", "recipe.epochs=1", "replicates=1"]
    store = open_store(str(folder / "store"), create=True)
    for entry in expand(study(*settings)):
        data = catalog.prepare(entry.run.dataset, None)
        row = execute(entry.run, entry.source, store, data, Settings(store=str(folder / "store")))
        assert row is not None and np.isfinite(row["cross_entropy"])


def test_an_edited_source_gives_new_runs_and_leaves_the_controls(folder: Path) -> None:
    before = {entry.id: entry.source for entry in expand(study(*STUDY))}
    (folder / "jitter.py").write_text(FILES["jitter.py"].replace("1e-3", "1e-2"))
    import sys

    for name in [name for name in sys.modules if name.startswith("jitter_")]:
        del sys.modules[name]
    after = {entry.id for entry in expand(study(*STUDY))}
    assert {before[id] for id in before.keys() - after} == {"./jitter.py:jitter"}
    assert {before[id] for id in before.keys() & after} == {"none", "init", "shuffle"}


def test_a_source_that_is_none_is_one_clear_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "wrong.py").write_text("half = 1\n")
    with pytest.raises(UserError, match="must be a Source with a function for weights or plan"):
        expand(study("source=./wrong.py:half"))
    assert main(["plan", "quickstart", "--set", "source=./absent.py:half", "--store", str(folder / "s")]) == 2
    assert "there is no file ./absent.py" in capsys.readouterr().err
