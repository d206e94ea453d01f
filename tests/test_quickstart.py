"""A whole sweep through the command line and Ray: every source, both trainers, what is held and what varies.

It is ``quickstart`` with fewer epochs, run twice into two stores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from orchestrator import catalog
from protocols.digest import digest
from protocols.protocol import DatasetSpec
from protocols.run import run_from_specification
from trainers.initial import initial_weights, perturb

ROOT = Path(__file__).parent.parent
SHORT = ("--set", "recipe.epochs=3")
SOURCES = {"none", "init", "shuffle", "augment", "dropout", "library", "onebit", "all"}
CHANGES_THE_START = {"init", "onebit", "all"}


def sweep(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``sweep.py`` in a process of its own, with Ray's files in a folder of the test's own."""
    return subprocess.run(
        [sys.executable, str(ROOT / "sweep.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "RAY_TMPDIR": str(folder / "r"), "XDG_CACHE_HOME": str(folder / "cache")},
        check=False,
    )


def read(store: Path) -> pd.DataFrame:
    return pd.read_parquet(store / "records")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path, since Ray's sockets want one."""
    with tempfile.TemporaryDirectory(prefix="ng", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def stores(folder: Path) -> tuple[Path, Path]:
    """Two stores, each with the whole sweep."""
    for name in ("one", "two"):
        done = sweep("run", "quickstart", *SHORT, "--store", name, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "All 64 planned runs are done" in done.stdout
    return folder / "one", folder / "two"


def test_every_planned_run_is_there_once(stores: tuple[Path, Path], folder: Path) -> None:
    records = read(stores[0])
    plan = json.loads(sweep("plan", "quickstart", *SHORT, "--store", "one", "--json", folder=folder).stdout)
    assert (plan["planned"], plan["done"], plan["missing"]) == (64, 64, 0)
    assert len(records) == records["id"].nunique() == 64
    counts = records.groupby(["trainer", "source"]).size()
    assert set(counts) == {4} and set(counts.index) == {(t, s) for t in ("torch", "tensorflow") for s in SOURCES}
    assert set(records[records["source"] == "library"]["library"]) == {"order"}


def test_the_control_has_one_digest_in_warm_and_fresh_processes_and_both_sweeps(stores: tuple[Path, Path]) -> None:
    controls = pd.concat(read(store).assign(store=store.name) for store in stores)
    controls = controls[controls["source"] == "none"]
    for _, group in controls.groupby("trainer"):
        assert group["final_digest"].nunique() == group["first_step_digest"].nunique() == 1
        for _, one in group.groupby("store"):
            assert 2 <= one["process"].nunique() <= 4, "several processes"
    per_trainer = controls.groupby("trainer")["final_digest"].first()
    assert per_trainer.nunique() == 2, "the frameworks differ in last bits"


def test_the_second_sweep_repeats_every_bit_of_the_first(stores: tuple[Path, Path]) -> None:
    one, two = (read(store).set_index("id").sort_index() for store in stores)
    columns = ["initial_digest", "first_step_digest", "final_digest", "accuracy", "cross_entropy", "specification"]
    pd.testing.assert_frame_equal(one[columns], two[columns])
    for first, second in zip(one["logits"], two["logits"], strict=True):
        assert np.array_equal(np.stack(first), np.stack(second))


def test_no_other_two_runs_end_alike(stores: tuple[Path, Path]) -> None:
    records = read(stores[0])
    varied = records[records["source"] != "none"]
    assert varied["final_digest"].is_unique
    assert not set(varied["final_digest"]) & set(records[records["source"] == "none"]["final_digest"])


def test_initial_digests(stores: tuple[Path, Path]) -> None:
    records = read(stores[0])
    starts = records["source"].isin(CHANGES_THE_START)
    assert records[~starts]["initial_digest"].nunique() == 1, "shared by all others, across trainers too"
    shared = records[~starts]["initial_digest"].iloc[0]
    for _, group in records[starts].groupby("trainer"):
        assert group["initial_digest"].is_unique and shared not in set(group["initial_digest"])
    across = records[starts].groupby(["source", "replicate"])["initial_digest"]
    assert (across.nunique() == 1).all() and (across.size() == 2).all()


def test_onebit_is_one_nonzero_element_and_one_ulp(stores: tuple[Path, Path]) -> None:
    records = read(stores[0])
    control = records[records["source"] == "none"].groupby("trainer").first()
    for _, record in records[records["source"] == "onebit"].iterrows():
        run = run_from_specification(record["specification"])
        network = catalog.trainer(run.trainer).network(
            catalog.architecture(run.architecture), (8, 8, 1), 10, run.recipe
        )
        held = initial_weights(run.without("onebit"), network)
        changed, _ = perturb(run, network, held, 0)
        assert digest(held) == control.loc[run.trainer, "initial_digest"]
        assert digest(changed) == record["initial_digest"]
        differing = {name: np.flatnonzero(held[name] != changed[name]) for name in held}
        assert {name: len(where) for name, where in differing.items() if len(where)} == {record["onebit_tensor"]: 1}
        before, after = (
            tensors[record["onebit_tensor"]].flat[int(record["onebit_index"])] for tensors in (held, changed)
        )
        assert before != 0 and after in (np.nextafter(before, np.float32(9)), np.nextafter(before, np.float32(-9)))
        assert (before, after) == (np.float32(record["onebit_before"]), np.float32(record["onebit_after"]))

        reference = control.loc[run.trainer]
        steps = np.flatnonzero(np.asarray(record["losses"]) != np.asarray(reference["losses"]))
        assert record["first_differing_step"] == steps[0]
        assert record["predictions_changed"] == (record["predictions"] != reference["predictions"]).sum()
        assert record["weights_total"] == record["parameters"] and 0 < record["weights_changed"] <= record["parameters"]


def test_what_a_record_says_agrees_with_its_logits(stores: tuple[Path, Path], digits: Any) -> None:
    from orchestrator.store import open_store

    store = open_store(str(stores[0]))
    for _, record in read(stores[0]).head(8).iterrows():
        logits = np.stack(record["logits"]).astype(np.float64)
        labels = store.labels(record["labels_fingerprint"])
        assert np.array_equal(labels, digits.test_labels)
        assert record["accuracy"] == np.mean(logits.argmax(1) == labels)
        shifted = logits - logits.max(1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]
        assert record["cross_entropy"] == pytest.approx(losses.mean(), rel=1e-12)
        assert record["history"][-1]["test_accuracy"] == pytest.approx(record["accuracy"])
        assert json.loads(record["provenance"])["trainer"]["threads"] == 1


def test_the_report_is_left_beside_the_records(stores: tuple[Path, Path]) -> None:
    names = {path.name for path in (stores[0] / "report").iterdir()}
    assert {"report.html", "table.csv", "table.tex"} <= names
    table = pd.read_csv(stores[0] / "report" / "table.csv")
    assert len(table) == 16 and set(table["source"]) == SOURCES


def test_more_replicates_and_cells_run_only_what_is_new(stores: tuple[Path, Path], folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (stores[0] / "records").iterdir()}
    more = (*SHORT, "--only", "source=init", "--only", "trainer=torch", "--store", "one")
    same = sweep("run", "quickstart", *more, folder=folder)
    assert same.returncode == 0 and "Nothing to train" in same.stdout
    grown = sweep("run", "quickstart", *more, "--set", "replicates=5", folder=folder)
    assert grown.returncode == 0, grown.stdout + grown.stderr
    after = {path.name: path.stat().st_mtime_ns for path in (stores[0] / "records").iterdir()}
    assert before.items() <= after.items(), "no record was touched"
    new = [run for name in after.keys() - before.keys() for run in [read(stores[0]).set_index("id").loc[name[:64]]]]
    assert sorted((run["source"], run["replicate"]) for run in new) == [("init", 4), ("none", 4)]
    other = json.loads(
        sweep(
            "plan", "quickstart", *SHORT, "--set", "recipe.momentum=0.8", "--store", "one", "--json", folder=folder
        ).stdout
    )
    assert other["done"] == 0, "another recipe is another run"


def test_subset_of_digits_is_part_of_the_identity() -> None:
    definition = catalog.dataset("digits")
    whole, part = (
        catalog.dataset_fingerprint(definition, DatasetSpec(name="digits", train_size=size)) for size in (None, 100)
    )
    assert whole != part
