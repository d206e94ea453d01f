"""One run in this process: what its record holds, what is kept beside it, and what is never done twice."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator import catalog, provenance, records
from orchestrator.slot import retrying, worker
from orchestrator.slot.context import OtherHardware, RunContext, Settings
from orchestrator.slot.worker import execute
from orchestrator.store import RECORD_SCHEMA, Spool, Store, StoreError, open_store
from protocols.contract import Checkpoint, Dataset, Epoch, Interrupted
from protocols.digest import digest
from protocols.perturbation import Perturbation
from protocols.run import Run
from tests import factory, fake_trainer
from tests.fakes import blobs_data, planned, runs_of

RUN = factory.plan(sources=["init"], replicates=1)[0].run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


@pytest.fixture
def settings(store: Store, tmp_path: Path) -> Settings:
    return Settings(store=store.url, spool=str(tmp_path / "spool"), checkpoint_every=0)


@pytest.fixture
def runs(store: Store) -> dict[str, list[Run]]:
    plan = planned(store, "init", "onebit", "init+onebit", epochs=4)
    return {source: runs_of(plan, source) for source in ("none", "init", "onebit", "init+onebit")}


@pytest.fixture
def data(runs: dict[str, list[Run]], cache: Path) -> Dataset:
    return blobs_data(runs["none"][0], cache)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the runs that are really trained, as they are."""
    ids: list[str] = []
    original = fake_trainer.train

    def train(run: Run, *rest: Any) -> Any:
        ids.append(run.id)
        return original(run, *rest)

    monkeypatch.setattr(fake_trainer, "train", train)
    return ids


def stop_after(epochs: int) -> tuple[Callable[[dict[str, Any]], None], Callable[[], bool]]:
    """A listener and a stop condition that end a run after so many epochs."""
    seen: list[int] = []
    return lambda message: seen.append(1) if message["kind"] == "epoch" else None, lambda: len(seen) >= epochs


def test_the_record_holds_what_was_trained(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]]
) -> None:
    run = runs["init"][1]
    messages: list[dict[str, Any]] = []
    row = execute(run, "init", store, data, settings, listener=messages.append)
    assert row is not None and set(row) == set(RECORD_SCHEMA.names)
    kept = store.table(None, {run.id}).to_pylist()[0]
    assert (kept["id"], kept["source"], kept["replicate"], kept["group"]) == (run.id, "init", 1, run.group)
    assert (kept["outcome"], kept["attempt"], kept["resumed_epochs"], kept["parameters"]) == ("ok", 1, 0, 48)
    assert json.loads(kept["specification"]) == json.loads(run.specification)

    logits = next(store.logits([run.id]))[1].astype(np.float64)
    odds = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    truth = odds[np.arange(len(logits)), data.test_labels]
    assert kept["cross_entropy"] == pytest.approx(-np.log(truth).mean(), rel=1e-6)
    assert kept["accuracy"] == np.mean(logits.argmax(axis=1) == data.test_labels)
    assert store.labels(kept["labels_fingerprint"]).tolist() == data.test_labels.tolist()

    assert kept["process"] == worker.process() and kept["process"].count(":") == 2
    assert dict(kept["seeds"])["init"] == "[1, 2]"
    assert json.loads(kept["provenance"])["packages"]["numpy"] == np.__version__
    assert [message["kind"] for message in messages] == ["started"] + 4 * ["epoch"]
    history = store.table(["history"], {run.id}).to_pylist()[0]["history"]
    assert [epoch["epoch"] for epoch in history] == [1, 2, 3, 4]


def test_a_run_with_a_record_is_never_trained_again(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]], trained: list[str]
) -> None:
    run = runs["init"][0]
    assert execute(run, "init", store, data, settings) is not None
    assert execute(run, "init", store, data, settings) is None
    assert trained == [run.id]


def test_an_interrupted_run_resumes_to_the_same_bits(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]], tmp_path: Path
) -> None:
    run = runs["init"][0]
    listener, stop = stop_after(2)
    with pytest.raises(Interrupted):
        execute(run, "init", store, data, settings, listener=listener, stop=stop)
    assert store.finished() == set() and store.load_checkpoint(run.id).epochs == 2

    resumed = execute(run, "init", store, data, settings)
    whole = execute(run, "init", open_store(tmp_path / "other", create=True), data, settings)
    assert (resumed["resumed_epochs"], resumed["attempt"]) == (2, 2)
    assert (whole["resumed_epochs"], whole["attempt"]) == (0, 1)
    assert resumed["final_digest"] == whole["final_digest"]
    assert [epoch["epoch"] for epoch in resumed["history"]] == [1, 2, 3, 4]
    assert store.load_checkpoint(run.id) is None and len(store.live()) == 0


def test_one_bit_is_held_against_the_control(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]], trained: list[str]
) -> None:
    control, run = runs["none"][0], runs["onebit"][1]
    reference = execute(control, "none", store, data, settings)
    row = execute(run, "onebit", store, data, settings)
    assert trained == [control.id, run.id]

    weights = store.load_reference(control.id).weights
    assert digest(weights) == reference["final_digest"]
    one, other = next(store.logits([run.id]))[1], next(store.logits([control.id]))[1]
    assert row["predictions_changed"] == np.sum(one.argmax(axis=1) != other.argmax(axis=1))
    assert row["weights_total"] == 48 and 0 < row["weights_changed"] <= 48
    differ = [one != other for one, other in zip(row["losses"], reference["losses"], strict=True)]
    assert 0 <= row["first_differing_step"] <= differ.index(True)  # losses are compared before they are rounded
    assert row["onebit_tensor"] == "head.weight" and row["onebit_before"] != row["onebit_after"]
    assert reference["weights_changed"] is None and reference["onebit_tensor"] is None


def test_a_missing_reference_is_trained_once_and_leaves_no_record(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]], trained: list[str], tmp_path: Path
) -> None:
    control = runs["none"][0]
    rows = [execute(run, "onebit", store, data, settings) for run in runs["onebit"]]
    first, *others = (run.id for run in runs["onebit"])
    assert trained == [first, control.id, *others]
    assert store.finished() == {run.id for run in runs["onebit"]}
    assert store.load_checkpoint(control.id) is None and control.id not in store.live()["id"].to_pylist()

    other = open_store(tmp_path / "other", create=True)
    execute(control, "none", other, data, settings)
    assert execute(runs["onebit"][0], "onebit", other, data, settings)["weights_changed"] == rows[0]["weights_changed"]


def test_a_reference_from_another_kind_of_machine_is_trained_again(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]], trained: list[str]
) -> None:
    control, run = runs["none"][0], runs["onebit"][0]
    execute(control, "none", store, data, settings)
    kept = store.load_reference(control.id)
    store.save_reference(control.id, dataclasses.replace(kept, losses=kept.losses + 1, fingerprint="another"))
    row = execute(run, "onebit", store, data, settings)
    assert trained == [control.id, run.id, control.id]
    assert store.load_reference(control.id).fingerprint == row["fingerprint"] == kept.fingerprint


def test_one_bit_among_other_sources_is_held_against_those(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]], trained: list[str]
) -> None:
    run = runs["init+onebit"][1]
    execute(run, "init+onebit", store, data, settings)
    assert trained == [run.id, run.without("onebit").id]
    assert run.without("onebit").varies == ("init",) and run.without("onebit").replicate == 1


def test_one_bit_under_released_kernels_is_held_against_nothing(
    store: Store, settings: Settings, data: Dataset, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run without the bit would end elsewhere by itself."""
    plan = planned(store, "library+onebit", epochs=4, library="native", keep=("barrier",))
    (run, _) = runs_of(plan, "library+onebit")
    monkeypatch.setenv("FAKE_PROFILE", run.profile)
    row = execute(run, "library+onebit", store, data, settings)
    assert trained == [run.id] and row["onebit_index"] is not None
    assert {row[field.name] for field in dataclasses.fields(records.Comparison)} == {None}


def test_how_far_a_perturbation_led(store: Store, settings: Settings, data: Dataset) -> None:
    plan = planned(store, "onebit", epochs=4, keep=("weights", "barrier"))
    control, run = runs_of(plan, "none")[0], runs_of(plan, "onebit")[1]
    for each, source in ((control, "none"), (run, "onebit")):
        execute(each, source, store, data, settings)
    row = store.table(None, {run.id}).to_pylist()[0]
    one, other = (store.kept(each.id)["weights/head.weight"] for each in (run, control))
    assert row["distance"] == pytest.approx(np.linalg.norm((one - other).ravel()), rel=1e-6)
    assert row["cosine"] == pytest.approx(np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other), rel=1e-5)
    assert row["largest_ulp"] >= 1 and (row["onebit_step"], row["onebit_elements"]) == (0, 1)
    assert row["onebit_digest"] == row["initial_digest"]

    images = data.test_images.reshape(60, -1).astype(np.float32) / 255
    errors, losses = [], []
    for share in np.arange(11) / 10:
        logits = images @ ((1 - share) * one + share * other).T
        errors.append(np.mean(logits.argmax(axis=1) != data.test_labels))
        losses.append(records.cross_entropy(logits, data.test_labels))
    assert row["barrier_error"] == pytest.approx(max(errors) - (errors[0] + errors[-1]) / 2)
    assert row["barrier_loss"] == pytest.approx(max(losses) - (losses[0] + losses[-1]) / 2, abs=1e-6)


def test_what_is_kept_is_there_before_the_record_and_as_large_as_planned(
    store: Store, settings: Settings, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run, _) = runs_of(planned(store, "init", keep=("weights", "layers")), "init")
    kept: list[Any] = []
    monkeypatch.setattr(store, "commit", lambda row: (kept.append(store.kept(row["id"])), Store.commit(store, row)))
    row = execute(run, "init", store, data, settings)
    assert set(kept[0]) == {"weights/head.weight", "weights/norm.mean", "gram/head"}
    assert digest({name[8:]: kept[0][name] for name in kept[0] if name[0] == "w"}) == row["final_digest"]
    assert row["kept"] == ["layers", "weights"]

    network = fake_trainer.network(None, data.image_shape, data.classes, run.recipe)
    weights = dataclasses.replace(run, keep=("weights",))
    assert records.kept_bytes(weights, network) == 4 * (48 + 3)
    assert records.kept_bytes(run, network) == 4 * (48 + 3 + catalog.probes() ** 2)
    few = dataclasses.replace(run, keep=("layers",), dataset=dataclasses.replace(run.dataset, test_size=30))
    assert records.kept_bytes(few, network) == 4 * 30**2
    assert records.kept_bytes(dataclasses.replace(run, keep=("barrier",)), network) == 0


def test_every_evaluation_leaves_logits(runs: dict[str, list[Run]]) -> None:
    run = runs["init"][0]
    views = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, views=("flip", "crop25"), ema_decay=0.9))
    assert records.logits_bytes(run, 1000) == 4 * 1000
    assert records.logits_bytes(views, 1000) == 6 * 4 * 1000, "two kinds of weights, each seen plain and in two ways"
    assert records.logits_bytes(run, 10_000_000) == 2 * 10_000_000


def test_a_run_that_keeps_nothing_leaves_no_file(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]]
) -> None:
    row = execute(runs["init"][0], "init", store, data, settings)
    assert store.kept(row["id"]) is None and row["kept"] == []
    assert row["barrier_error"] is None and row["distance"] is None


def test_variants_are_scored(store: Store, settings: Settings, data: Dataset) -> None:
    (run, _) = runs_of(planned(store, "init", views=("flip",)), "init")
    row = execute(run, "init", store, data, settings)
    ((_, (variant,)),) = store.variants([run.id])
    plain = next(store.logits([run.id]))[1]
    assert (variant.name, variant.passes, row["passes"]) == ("flip", 2, 1)
    assert variant.logits.tobytes() == (2 * plain).tobytes()
    (kept,) = row["variants"]
    assert kept["accuracy"] == row["accuracy"]
    assert kept["cross_entropy"] == pytest.approx(records.cross_entropy(2 * plain, data.test_labels))


# Asynchronous training


def asynchronous(store: Store, source: str, **changes: Any) -> list[Run]:
    return runs_of(planned(store, source, async_workers=3, epochs=4, **changes), source)


def test_a_simulated_schedule_leaves_its_staleness_and_no_log(store: Store, settings: Settings, data: Dataset) -> None:
    control = planned(store, "async", async_workers=3, epochs=4).planned[0].run
    for run, source in ((control, "none"), (asynchronous(store, "async")[0], "async")):
        row = execute(run, source, store, data, settings)
        assert 0 < row["staleness_mean"] < row["staleness_max"] <= fake_trainer.STEPS - 1
        assert row["commits"] == [] and row["asynchrony"] == run.asynchrony


def test_staleness_is_counted_within_an_epoch() -> None:
    reads = np.array([0, 0, 1, 0, 1, 0])
    commits = np.stack([np.zeros(6, np.int64), np.tile([0, 1, 2], 2), reads], axis=1)
    assert records.staleness(commits, 2).tolist() == [0, 1, 1, 0, 0, 2]
    assert records.staleness(None, 2) is None


def test_a_race_is_logged_and_its_log_replays_it(
    store: Store, settings: Settings, data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = asynchronous(store, "async", asynchrony="real")[0]
    monkeypatch.setenv("FAKE_PROFILE", run.profile)
    raced = execute(run, "async", store, data, settings)
    log = np.array([[item[name] for name in ("worker", "batch", "read")] for item in raced["commits"]])
    assert len(log) == 4 * fake_trainer.STEPS and raced["asynchrony"] == "real"

    def elsewhere(name: str, log: Any) -> dict[str, Any]:
        return execute(run, "async", open_store(tmp_path / name, create=True), data, settings, log=log)

    assert elsewhere("replayed", log)["final_digest"] == raced["final_digest"]
    assert elsewhere("raced", None)["final_digest"] != raced["final_digest"]


def test_a_bit_changed_in_a_race_is_held_against_its_own_log(
    store: Store, settings: Settings, data: Dataset, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = asynchronous(store, "async+onebit", asynchrony="real")[0]
    monkeypatch.setenv("FAKE_PROFILE", run.profile)
    run = dataclasses.replace(run, perturb=Perturbation(kind="gaussian", fraction=1.0, scale=0.1, epoch=2))
    row = execute(run, "async+onebit", store, data, settings)
    assert trained == [run.id, run.without("onebit").id]
    # Two races would differ from their first steps on.
    assert row["first_differing_step"] == 2 * fake_trainer.STEPS and row["weights_changed"] > 0
    assert store.load_reference(run.without("onebit").id) is None


def test_a_replay_leaves_the_checkpoints_of_the_race_alone(store: Store, settings: Settings) -> None:
    log = np.zeros((4, 3), np.int64)
    context = RunContext(RUN, store, settings, lambda message: None, None, lambda: False, log)
    saved = Checkpoint(epochs=1, tensors={}, losses=np.zeros(1), history=(), first_step_digest="", initial_digest="")
    store.save_checkpoint(RUN.id, saved)
    assert context.load_checkpoint() is None and not context.checkpoint_due()
    context.save_checkpoint(dataclasses.replace(saved, epochs=2))
    assert store.load_checkpoint(RUN.id).epochs == 1
    assert context.commit_log() is log


# Hardware


@pytest.mark.parametrize("silent", [False, True])
def test_a_group_stays_on_one_class_of_hardware(
    store: Store,
    settings: Settings,
    data: Dataset,
    runs: dict[str, list[Run]],
    monkeypatch: pytest.MonkeyPatch,
    silent: bool,
) -> None:
    """Even where the trainer never asks for its fingerprint; then the run is refused when it is done."""
    assert execute(runs["none"][0], "none", store, data, settings)["hardware"] == "cpu, torch 1.0"
    monkeypatch.setenv("FAKE_VERSION", "2.0")
    if silent:
        monkeypatch.setenv("FAKE_SILENT", "1")
    messages: list[dict[str, Any]] = []
    with pytest.raises(OtherHardware, match="'cpu, torch 1.0', but this is 'cpu, torch 2.0'; use .*hardware") as caught:
        execute(runs["init"][0], "init", store, data, settings, listener=messages.append)
    assert "\n" not in str(caught.value)
    assert [message["kind"] for message in messages] == ["started", *(4 * ["epoch"] if silent else [])]
    assert store.finished() == {runs["none"][0].id}

    other = runs_of(planned(store, "init", epochs=5), "init")[0]  # another group
    assert execute(other, "init", store, data, settings)["hardware"] == "cpu, torch 2.0"


def test_a_run_that_fails_binds_no_other(
    store: Store,
    settings: Settings,
    data: Dataset,
    runs: dict[str, list[Run]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = runs["init"]
    (tmp_path / "mischief").mkdir()
    (tmp_path / "mischief" / "raise-0").touch()
    with monkeypatch.context() as patch:
        patch.setenv("NOISEGRID_FAKE", str(tmp_path / "mischief"))
        with pytest.raises(ValueError, match="a mistake in the trainer"):
            execute(first, "init", store, data, settings)
    monkeypatch.setenv("FAKE_VERSION", "2.0")
    for run in (second, first):
        assert execute(run, "init", store, data, settings)["hardware"] == "cpu, torch 2.0"


def test_of_two_classes_at_a_time_the_first_to_finish_counts(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runs["init"]

    def overtaken(message: dict[str, Any]) -> None:
        if message["kind"] == "epoch" and not store.finished():
            with monkeypatch.context() as patch:
                patch.setenv("FAKE_VERSION", "2.0")
                execute(second, "init", store, data, settings)

    with pytest.raises(OtherHardware, match="'cpu, torch 2.0', but this is 'cpu, torch 1.0'.* the same command trains"):
        execute(first, "init", store, data, settings, listener=overtaken)
    assert store.finished() == {second.id}


def test_runs_that_list_hardware_go_anywhere(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = runs_of(planned(store, "hardware+init", epochs=4), "hardware+init")
    monkeypatch.setenv("FAKE_VERSION", "2.0")
    assert free[0].group == runs["init"][0].group
    execute(free[0], "hardware+init", store, data, settings)
    monkeypatch.setenv("FAKE_VERSION", "1.0")
    for run, source in ((free[1], "hardware+init"), (runs["init"][0], "init")):
        assert execute(run, source, store, data, settings)["hardware"] == "cpu, torch 1.0"


def test_hardware_in_words() -> None:
    trainer = {"torch": "2.6", "device": "NVIDIA H200", "cuda": "12.4", "cudnn": 90100, "threads": 1, "tf32": False}
    origin = {"trainer": trainer, "gpus": ["NVIDIA H200, 143771 MiB, 550.54"], "cpu": "a CPU", "isa": ["avx"]}
    assert provenance.hardware(origin) == "NVIDIA H200, driver 550.54, CUDA 12.4, cuDNN 90100, torch 2.6"
    other = {**origin, "trainer": {**trainer, "threads": 4, "tf32": True}, "cpu": "another", "isa": []}
    assert provenance.hardware(other) == provenance.hardware(origin)
    on_cpu = {**origin, "trainer": {"tensorflow": "2.21", "keras": "3.1", "device": "cpu", "cuda": None}}
    assert provenance.hardware(on_cpu) == "cpu, tensorflow 2.21, keras 3.1"


def test_what_came_between_runs_is_in_the_provenance(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]]
) -> None:
    came = {"command": "nvidia-smi -rac", "exit_code": 9, "seconds": 0.1}
    one = execute(runs["init"][0], "init", store, data, settings, between_runs=came)
    other = execute(runs["init"][1], "init", store, data, settings)
    assert json.loads(one["provenance"])["between_runs"] == came
    assert "between_runs" not in json.loads(other["provenance"])
    assert one["fingerprint"] == other["fingerprint"]


def test_a_diverged_run_has_a_record_without_measures(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]]
) -> None:
    run = runs["init"][0]
    run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, learning_rate=1000.0))
    execute(run, "init", store, data, settings)
    kept = store.table(None, {run.id}).to_pylist()[0]
    assert (kept["outcome"], kept["accuracy"], kept["cross_entropy"]) == ("diverged", None, None)


def failing(times: int, action: Callable[..., Any]) -> Callable[..., Any]:
    """An action of a store that refuses at first."""
    left = [times]

    def refuse(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise StoreError("cannot write: no space left on device")
        return action(*arguments)

    return refuse


@pytest.mark.parametrize("what", ["commit", "put_labels", "claim_hardware", "save_checkpoint"])
def test_a_store_that_refuses_for_a_moment_costs_nothing(
    store: Store,
    settings: Settings,
    data: Dataset,
    runs: dict[str, list[Run]],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    monkeypatch.setattr("orchestrator.slot.retrying.WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(store, what, failing(3, getattr(store, what)))
    run = runs["none"][0]
    assert execute(run, "none", store, data, settings) is not None
    assert store.finished() == {run.id} and store.load_reference(run.id) is not None


def test_a_store_that_refuses_for_good_fails_the_run(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("orchestrator.slot.retrying.time.sleep", waited.append)
    monkeypatch.setattr(store, "commit", failing(99, store.commit))
    with pytest.raises(StoreError, match="no space left"):
        execute(runs["none"][0], "none", store, data, settings)
    assert store.finished() == set() and [wait for wait in waited if wait] == list(retrying.WAITS)


def test_epochs_that_cannot_be_shown_fail_no_run(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context, clock = context_at(store, settings, monkeypatch, attempt=1)
    monkeypatch.setattr(store, "publish", failing(99, store.publish))
    clock[0] = 31.0
    with context:
        context.report(row_of(1))
    assert capsys.readouterr().err == "epoch 1 is not shown in the store: cannot write: no space left on device\n"


def test_what_a_slot_was_given_is_in_the_provenance(
    store: Store, settings: Settings, data: Dataset, runs: dict[str, list[Run]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not in the fingerprint, since it changes no bit."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    whole = dataclasses.replace(settings, gpus=1.0)
    quarter = dataclasses.replace(settings, gpus=0.25, memory_limit=2**33)
    one = execute(runs["init"][0], "init", store, data, whole)
    other = execute(runs["init"][1], "init", store, data, quarter)
    slots = [json.loads(row["provenance"])["slot"] for row in (one, other)]
    assert [slot["gpus"] for slot in slots] == [1.0, 0.25]
    assert [slot["memory_limit"] for slot in slots] == [None, 2**33]
    assert [slot["device"] for slot in slots] == 2 * ["GPU 3"]
    assert one["fingerprint"] == other["fingerprint"] and one["hardware"] == other["hardware"]


def row_of(number: int) -> Epoch:
    return Epoch(epoch=number, learning_rate=0.1, train_loss=1.0, test_loss=1.0, test_accuracy=0.5, seconds=0.1)


def context_at(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, attempt: int | None = None
) -> tuple[RunContext, list[float]]:
    """A context, and a list that holds the time."""
    clock = [0.0]
    monkeypatch.setattr("orchestrator.slot.worker.time.monotonic", lambda: clock[0])
    return RunContext(RUN, store, settings, lambda message: None, attempt, lambda: False), clock


def test_epochs_are_published_now_and_then_and_spooled_at_once(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, clock = context_at(store, settings, monkeypatch, attempt=1)
    spool = Path(settings.spool) / f"{RUN.id}.arrows"
    for number, seconds in enumerate((10.0, 29.0, 31.0, 50.0), 1):
        clock[0] = seconds
        context.report(row_of(number))
    assert store.live()["epochs"].to_pylist() == [3]
    assert [row.epoch for row in Spool.read(spool)] == [1, 2, 3, 4]
    with context:
        pass
    assert not spool.exists()


def test_checkpoints_are_due_by_time(store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    context, clock = context_at(store, dataclasses.replace(settings, checkpoint_every=60.0), monkeypatch)
    clock[0] = 59.0
    assert not context.checkpoint_due()
    clock[0] = 61.0
    assert context.checkpoint_due()
    context.save_checkpoint(
        Checkpoint(
            epochs=1,
            tensors={},
            losses=np.zeros(1),
            history=(row_of(1),),
            first_step_digest="",
            initial_digest="",
        )
    )
    clock[0] = 100.0
    assert not context.checkpoint_due()


def test_checkpoints_of_every_epoch(store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    context, _ = context_at(store, settings, monkeypatch)
    assert context.checkpoint_due()


def test_large_logits_are_rounded_and_small_ones_kept() -> None:
    values = np.random.default_rng(0).standard_normal((1000, 10)).astype(np.float32)
    kept, precision = records.rounded(values)
    assert precision == "float32" and kept.tobytes() == values.tobytes()
    large = np.tile(values, (263, 1))  # just above 10 MiB
    kept, precision = records.rounded(large)
    assert precision == "float16" and kept.dtype == np.float32
    assert kept.tobytes() == large.astype(np.float16).astype(np.float32).tobytes() != large.tobytes()


@pytest.mark.parametrize(
    ("one", "other", "step"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], None),
        ([1.0, 2.5, 3.5], [1.0, 2.0, 3.0], 1),
        ([np.nan, 2.0], [np.nan, 2.0], None),
        ([np.nan], [2.0], 0),
        ([1.0, 2.0], [1.0, 2.0, 3.0], 2),
    ],
)
def test_first_difference(one: list[float], other: list[float], step: int | None) -> None:
    assert records.first_difference(np.array(one), np.array(other)) == step


@pytest.mark.parametrize("field", ["code", "numerics", "dataset_fingerprint"])
def test_what_was_edited_since_it_was_planned_is_not_trained(
    field: str, data: Dataset, runs: dict[str, list[Run]]
) -> None:
    run = runs["init"][0]
    worker._check_unchanged(run, data)
    other = {"code": (("tests.fake_trainer", "0"),), "numerics": 2, "dataset_fingerprint": "0"}[field]
    with pytest.raises(RuntimeError, match=field):
        worker._check_unchanged(dataclasses.replace(run, **{field: other}), data)


def test_the_fingerprint_is_of_what_decides_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    here = provenance.provenance({"torch": "2.0", "threads": 1})
    same = provenance.fingerprint(here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    elsewhere = {**provenance.provenance({"torch": "2.0", "threads": 1}), "host": "elsewhere", "git": None}
    assert elsewhere["environment"]["CUDA_VISIBLE_DEVICES"] == "3"
    assert provenance.fingerprint(elsewhere) == same
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    others = [
        provenance.provenance({"torch": "2.0", "threads": 1}),
        {**here, "cpu": "another"},
        {**here, "isa": ["avx"]},
        {**here, "trainer": {"torch": "2.0", "threads": 2}},
        {**here, "trainer": {"torch": "2.1", "threads": 1}},
    ]
    assert len({same, *map(provenance.fingerprint, others)}) == 6


def test_the_commit_is_that_of_the_code_or_none(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.com", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert provenance._git(tmp_path) is None
    git("init")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", "code.py")
    git("commit", "-m", "first")
    assert provenance._git(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "notes.txt").write_text("untracked\n")
    assert provenance._git(tmp_path)["dirty"] is False
    (tmp_path / "code.py").write_text("a = 2\n")
    assert provenance._git(tmp_path)["dirty"] is True
    (tmp_path / "site-packages").mkdir()  # a package that is installed inside of somebody's repository
    assert provenance._git(tmp_path / "site-packages") is None
