"""Launching through Ray Tune: every missing run is trained once, whatever happens on the way."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from orchestrator.launch import Result, sweep
from orchestrator.launch import cluster as clusters
from orchestrator.launch.blocks import BLOCK_SECONDS, Blocks, Durations
from orchestrator.launch.cluster import cluster
from orchestrator.launch.driver import Watcher
from orchestrator.launch.progress import Display, Tally, failures
from orchestrator.launch.trainable import Gate
from orchestrator.plan import Plan
from orchestrator.store import Store, open_store
from protocols.errors import UserError
from tests.fakes import TRAINER, planned, runs_of


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


# Blocks


def blocks_of(plan: Plan, *, slots: int, seconds: float) -> list[list[tuple[str, str, int]]]:
    """Every block, as (trainer, source, replicate) of its runs."""
    blocks = Blocks(plan.missing, slots, Durations(lambda run: seconds))
    handed = []
    while block := blocks.next():
        handed.append([(entry.run.trainer, entry.source, entry.run.replicate) for entry in block])
    assert blocks.left == []
    return handed


def test_every_run_is_in_one_block_of_one_cell(store: Store) -> None:
    plan = planned(store, "init", "shuffle", "onebit", replicates=7)
    for slots, seconds in ((1, 0.0), (2, 3.0), (3, 100.0), (50, 0.1)):
        handed = blocks_of(plan, slots=slots, seconds=seconds)
        assert sorted(sum(handed, [])) == sorted(
            (entry.run.trainer, entry.source, entry.run.replicate) for entry in plan.missing
        )
        assert all(len({source for _, source, _ in block}) == 1 for block in handed)


def test_long_runs_come_alone_and_short_ones_together(store: Store) -> None:
    plan = planned(store, "init", "shuffle", replicates=40)
    assert {len(block) for block in blocks_of(plan, slots=2, seconds=BLOCK_SECONDS)} == {1}
    sizes = [len(block) for block in blocks_of(plan, slots=2, seconds=BLOCK_SECONDS / 5)]
    assert sizes[:3] == [5, 5, 5]


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_blocks_leave_work_for_every_slot(store: Store, slots: int) -> None:
    plan = planned(store, "init", "shuffle", replicates=40)
    left = len(plan.missing)
    for block in blocks_of(plan, slots=slots, seconds=0.0):
        assert len(block) <= -(-left // (2 * slots))
        left -= len(block)


def test_rounds_go_through_cells_and_back_through_trainers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = dataclasses.replace(__import__("tests.fake_trainer").fake_trainer.trainer, name="twin")
    monkeypatch.setattr("tests.fake_trainer.twin", twin, raising=False)
    other = "tests.fake_trainer:twin"
    plan = planned(store, "onebit", "init", replicates=3, trainers=(TRAINER, other))
    handed = [block[0] for block in blocks_of(plan, slots=2, seconds=100.0)]
    order = ("none", "init", "onebit")
    assert handed == [
        *((trainer, source, 0) for trainer in (TRAINER, other) for source in order),
        *((trainer, source, 1) for trainer in (other, TRAINER) for source in order),
        *((trainer, source, 2) for trainer in (TRAINER, other) for source in order),
    ]


def test_durations_are_learned_from_similar_runs(store: Store) -> None:
    run = planned(store, "init").missing[0].run
    like = planned(store, "init").missing[-1].run
    unlike = planned(store, "init", epochs=9).missing[0].run
    durations = Durations(lambda run: 100.0)
    assert durations.estimate(run) == 100.0
    durations.learn(run, 1.0)
    durations.learn(run, 3.0)
    assert (durations.estimate(like), durations.estimate(unlike)) == (2.0, 100.0)


# Progress


def test_progress_is_a_plain_line_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("orchestrator.launch.progress.time.monotonic", lambda: clock[0])
    tally = Tally(planned=10, done=2, running=3, images=6000, failed={"a": "b"})
    stream = io.StringIO()
    with Display(tally, lambda: 90.0, Console(file=stream, width=200)) as display:
        for clock[0] in (1.0, 29.0, 30.0, 31.0, 59.0):
            display.refresh()
        tally.images += 300
        clock[0] = 60.0
        display.refresh()
    first, second = stream.getvalue().splitlines()
    assert first == "2/10 done, 3 running, 1 failed, 200 images/s, about 0:01:30 left"
    assert second == "2/10 done, 3 running, 1 failed, 10 images/s, about 0:01:30 left"


def test_progress_is_one_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("orchestrator.launch.progress.time.monotonic", lambda: clock[0])
    tally = Tally(planned=10, done=2)
    stream = io.StringIO()
    with Display(tally, lambda: 90.0, Console(file=stream, width=200, force_terminal=True)) as display:
        clock[0] = 1.0
        display.refresh()
        tally.done = 10
        clock[0] = 2.0
        display.refresh()
    assert "2/10 done" in stream.getvalue() and "10/10 done" in stream.getvalue()


def test_many_failures_are_shortened() -> None:
    assert failures({f"{number}" * 64: "no room" for number in range(7)}, limit=2) == [
        "failed: 000000000000: no room",
        "failed: 111111111111: no room",
        "and 5 more",
    ]


# Slots


@pytest.mark.parametrize(
    ("nodes", "gpus", "expected"),
    [
        ([{"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}], 0.0, 6),
        ([{"CPU": 4.0}, {"CPU": 16.0, "GPU": 8.0}], 1.0, 8),
        ([{"CPU": 16.0, "GPU": 3.0}, {"CPU": 16.0, "GPU": 3.0}], 2.0, 2),
        ([{"CPU": 16.0, "GPU": 2.0}], 0.3, 6),
        ([{"CPU": 16.0, "GPU": 2.0}], 0.1, 16),
    ],
)
def test_slots(nodes: list[dict[str, float]], gpus: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = {"Alive": False, "Resources": {"CPU": 100.0, "GPU": 100.0}}
    alive = [{"Alive": True, "Resources": node} for node in nodes]
    monkeypatch.setattr("orchestrator.launch.cluster.ray.nodes", lambda: [*alive, dead])
    assert clusters.slots(gpus) == expected


def test_a_run_that_fits_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.launch.cluster.ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 4.0}}])
    with pytest.raises(UserError, match="1 GPUs"):
        clusters.slots(1.0)


def test_the_gate_opens_for_all_at_once() -> None:
    async def arrivals() -> list[bool]:
        gate = Gate(3)
        waiting = [asyncio.create_task(gate.arrive()) for _ in range(2)]
        await asyncio.sleep(0)
        before = [task.done() for task in waiting]
        await asyncio.wait_for(gate.arrive(), 10)
        await asyncio.gather(*waiting)
        await asyncio.wait_for(gate.arrive(), 10)  # an actor that was started again
        return before

    assert asyncio.run(arrivals()) == [False, False]


# Counting


@pytest.fixture
def watcher(store: Store) -> Watcher:
    """A watcher of six runs."""
    missing = planned(store, "init", replicates=3).missing
    durations = Durations(lambda run: 100.0)
    tally = Tally(planned=6, done=0)
    watcher = Watcher(missing, durations, tally, slots=2, interrupted=threading.Event())
    watcher.display = Display(tally, watcher.remaining, Console(file=io.StringIO()))
    return watcher


def trial_of(*ids: str, error: Path | None = None) -> Any:
    return SimpleNamespace(trial_id="trial", config={"runs": ids}, pickled_error_file=error)


def report(
    watcher: Watcher,
    *,
    finished: dict[str, float | None] | None = None,
    failed: Any = None,
    refused: Sequence[str] = (),
) -> None:
    counted = {"retried": 0, "images": 10}
    result = {"finished": finished or {}, "failed": failed or {}, "refused": list(refused), **counted}
    watcher.on_trial_result(0, [], trial_of(), result)


def test_a_run_that_is_reported_twice_counts_once(watcher: Watcher) -> None:
    ids = list(watcher.runs)
    report(watcher, finished={ids[0]: 3.0})
    report(watcher, finished={ids[0]: None, ids[1]: 5.0})
    assert watcher.tally.done == 2 and watcher.tally.images == 20
    assert watcher.remaining() == 4 * 4.0 / 2  # four runs of the mean duration on two slots


def test_a_block_whose_actor_kept_dying_fails_what_is_left_of_it(watcher: Watcher, tmp_path: Path) -> None:
    error = tmp_path / "error.pkl"
    error.write_bytes(pickle.dumps(RuntimeError("gone\nand more")))
    ids = list(watcher.runs)
    watcher.on_trial_start(0, [], trial_of(*ids[:3]))
    report(watcher, finished={ids[0]: 3.0})
    watcher.on_trial_error(0, [], trial_of(*ids[:3], error=error))
    watcher.on_step_end(0, [])
    assert watcher.tally.failed == dict.fromkeys(ids[1:3], "RuntimeError: gone")
    assert watcher.tally.running == 0 and not watcher.stopping


def test_only_failures_that_are_all_alike_end_a_sweep(watcher: Watcher) -> None:
    ids = list(watcher.runs)
    report(watcher, failed={ids[0]: "one"})
    report(watcher, failed={ids[1]: "other"})
    report(watcher, failed={ids[2]: "one", ids[3]: "one"})
    assert not watcher.stopping


def test_failures_that_differ_in_the_run_alone_are_alike(watcher: Watcher) -> None:
    report(watcher, failed={id: f"cannot write records/{id}.parquet" for id in watcher.runs})
    assert watcher.hopeless == "cannot write records/ID.parquet"


def test_refused_runs_do_not_end_a_sweep(watcher: Watcher) -> None:
    """Another machine of the cluster may train the rest."""
    ids = list(watcher.runs)
    report(watcher, failed=dict.fromkeys(ids[:3], "other hardware"), refused=ids[:3])
    assert len(watcher.tally.failed) == 3 and not watcher.stopping
    report(watcher, failed=dict.fromkeys(ids[3:], "a mistake"))
    assert watcher.hopeless == "a mistake"


def test_failures_after_a_success_do_not_end_a_sweep(watcher: Watcher) -> None:
    ids = list(watcher.runs)
    report(watcher, finished={ids[0]: 1.0})
    report(watcher, failed={id: "one" for id in ids[1:]})
    assert not watcher.stopping


def test_an_address_where_nothing_answers_is_an_error() -> None:
    with pytest.raises(UserError, match="no Ray cluster answers at '127.0.0.1:1'"), cluster("127.0.0.1:1", None):
        pass


MISTAKE = r"ValueError: a mistake in the trainer \(fake_trainer\.py:\d+\) \(after epoch 1 of 3\)"

# Sweeps


@pytest.fixture(scope="module")
def environment(cache: Path) -> Iterator[dict[str, str]]:
    """What this machine's Ray, and the tests' own drivers, are started with."""
    with tempfile.TemporaryDirectory(prefix="ng") as folder, pytest.MonkeyPatch.context() as patch:
        mischief = Path(folder, "mischief")
        mischief.mkdir()
        added = {
            "RAY_TMPDIR": f"{folder}/ray",
            "XDG_CACHE_HOME": str(cache),
            "NOISEGRID_FAKE": str(mischief),
            "FAKE_SECONDS": "0.05",
        }
        for name, value in added.items():
            patch.setenv(name, value)
        yield added


@pytest.fixture(scope="module")
def two_slots(environment: dict[str, str]) -> Iterator[None]:
    """A Ray cluster with two CPUs for all tests of this module, which sweeps find themselves connected to."""
    with cluster(None, 2):
        yield


@pytest.fixture
def mischief(environment: dict[str, str]) -> Path:
    return Path(environment["NOISEGRID_FAKE"])


def launch(plan: Plan, store: Store, **options: Any) -> tuple[Result, str]:
    """A sweep that checkpoints every epoch, and what it showed."""
    stream = io.StringIO()
    result = sweep(plan, store, checkpoint_every=0, console=Console(file=stream, width=200), **options)
    return result, stream.getvalue()


def test_a_sweep_trains_what_is_missing_and_nothing_else(
    two_slots: None, store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    scratch = set(Path(tempfile.gettempdir()).glob("noisegrid-*"))
    plan = planned(store, "init", "onebit", replicates=3)
    result, shown = launch(plan, store)
    assert (result.planned, result.done, result.failed, result.interrupted) == (9, 9, {}, False)
    assert result.complete
    assert store.finished() == {entry.id for entry in plan.planned}
    assert shown.startswith("training 9 runs, 2 side by side\n")
    assert capfd.readouterr() == ("", ""), "Ray reached the terminal"
    assert set(Path(tempfile.gettempdir()).glob("noisegrid-*")) == scratch

    records = {path.name: path.stat().st_mtime_ns for path in Path(store.url, "records").iterdir()}
    result, shown = launch(planned(store, "init", "onebit", replicates=3), store)
    assert (result.done, shown) == (9, "")
    more = planned(store, "init", "shuffle", "onebit", replicates=4, isolation="process", between_runs="exit 4")
    assert len(more.missing) == 7
    result, shown = launch(more, store)
    assert result.complete and shown.startswith("training 7 runs")
    rows = store.table(["process", "provenance"], {entry.id for entry in more.missing}).to_pylist()
    assert len({row["process"] for row in rows}) == 7
    assert {json.loads(row["provenance"])["between_runs"]["exit_code"] for row in rows} == {4}
    now = {path.name: path.stat().st_mtime_ns for path in Path(store.url, "records").iterdir()}
    assert len(now) == 16 and records.items() <= now.items()


def test_every_slot_is_used_and_controls_span_processes(two_slots: None, store: Store) -> None:
    plan = planned(store, "init", "shuffle", "augment", "library", replicates=6)
    result, _ = launch(plan, store)
    assert result.complete
    rows = store.table(["source", "replicate", "process", "final_digest", "provenance"]).to_pylist()
    trained = Counter(json.loads(row["provenance"])["trainer"]["supervisor"] for row in rows)
    assert len(trained) == 2 and min(trained.values()) >= 5, trained
    assert {json.loads(row["provenance"])["trainer"]["gpus"] for row in rows} == {""}
    control = [row for row in rows if row["source"] == "none"]
    assert len({row["process"] for row in control}) >= 2
    assert len({row["final_digest"] for row in control}) == 1
    assert len({row["final_digest"] for row in rows}) == 1 + 4 * 6


def test_tune_is_started_afresh_after_so_many_trials(
    two_slots: None, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.launch.driver.TRIALS_PER_FIT", 3)
    monkeypatch.setattr("orchestrator.launch.blocks.BLOCK_SECONDS", 0.0)
    result, _ = launch(planned(store, "init", replicates=4), store)
    assert result.complete and result.done == 8


def test_what_is_named_by_file_is_found_from_where_the_program_was_started(
    environment: dict[str, str], store: Store, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("from tests.fake_trainer import *\n")
    script = DRIVER.replace('"init", ', '"init", trainers=("./mine.py:trainer",), ')
    with driver(environment, store, epochs=1, script=script, cwd=tmp_path) as process:
        out, err = process.communicate(timeout=300)
    assert json.loads(out) == [8, False], err


def test_one_failing_run_does_not_stop_the_others(two_slots: None, store: Store, mischief: Path) -> None:
    plan = planned(store, "init", "shuffle", replicates=4)
    (mischief / "raise-3-always").touch()
    try:
        result, shown = launch(plan, store, retries=0)
    finally:
        (mischief / "raise-3-always").unlink()
    failed = {entry.id for entry in plan.planned if entry.run.replicate == 3}
    assert set(result.failed) == failed and len(failed) == 3
    assert (result.done, result.complete, result.hopeless) == (9, False, "")
    assert set(store.failures()["id"].to_pylist()) == failed
    assert len(re.findall(MISTAKE, shown)) == 3
    again, _ = launch(planned(store, "init", "shuffle", replicates=4), store)
    assert again.complete


def test_a_sweep_in_which_every_run_fails_alike_is_given_up(two_slots: None, store: Store, mischief: Path) -> None:
    plan = planned(store, "init", "shuffle", "augment", replicates=6)
    names = [f"raise-{replicate}-always" for replicate in range(6)]
    for name in names:
        (mischief / name).touch()
    try:
        result, _ = launch(plan, store, retries=0)
    finally:
        for name in names:
            (mischief / name).unlink()
    assert re.fullmatch(MISTAKE, result.hopeless)
    assert result.done == 0 and 3 <= len(store.failures()) < 24


def test_an_unreadable_record_is_set_aside_and_its_run_trained_again(two_slots: None, store: Store) -> None:
    launch(planned(store, "init", replicates=1), store)
    damaged = runs_of(planned(store, "init", replicates=1), "init")[0]
    path = Path(store.url, "records", f"{damaged.id}.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    result, shown = launch(planned(store, "init", replicates=1), store)
    assert result.complete and store.corrupt() == {}
    assert f"record {damaged.id[:12]} is unreadable" in shown
    assert len(list(Path(store.url, "corrupt").iterdir())) == 1


def test_a_block_goes_on_after_its_actor_was_killed(
    two_slots: None, store: Store, mischief: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The actor's death takes the training process with it; runs of the block that were done are not trained again."""
    plan = planned(store, "init", replicates=4, epochs=4)
    (mischief / "parent-1").touch()  # the second run of the first block to come to one
    result, _ = launch(plan, store)
    assert result.complete and result.failed == {}
    attempts = store.table(["replicate", "attempt", "resumed_epochs"]).to_pylist()
    again = [row for row in attempts if row["attempt"] > 1]
    assert again == [{"replicate": 1, "attempt": 2, "resumed_epochs": 1}]
    assert capfd.readouterr() == ("", ""), "Ray reached the terminal"
    assert len(store.failures()) == 0


# A sweep as a program of its own

DRIVER = """
import json, sys
from orchestrator.launch import sweep
from orchestrator.store import open_store
from tests.fakes import planned

store = open_store(sys.argv[1], create=True)
result = sweep(planned(store, "init", replicates=4, epochs=int(sys.argv[2])), store, max_concurrent=2)
print(json.dumps([result.done, result.interrupted]))
"""


def driver(
    environment: dict[str, str], store: Store, epochs: int, *, script: str = DRIVER, cwd: Path | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, store.url, str(epochs)],
        cwd=cwd,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_sweep_in_good_order(environment: dict[str, str], store: Store, number: signal.Signals) -> None:
    with driver(environment, store, epochs=10_000) as process:
        wait_for(lambda: len(store.live()) == 2, process)
        # A terminal sends the one to the whole group, a batch system the other to its job.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, json.loads(out)) == (0, [0, True])
    assert "Traceback" not in err
    assert re.fullmatch(r"training 8 runs, 2 side by side\n(.* left\n)*", err)
    wait_for(lambda: not training(environment))


def test_a_cluster_in_place_leaves_nothing_behind(environment: dict[str, str], store: Store, tmp_path: Path) -> None:
    twice = DRIVER + DRIVER.partition("True)\n")[2].replace("replicates=4", "replicates=5")
    with driver({**environment, "HOME": str(tmp_path)}, store, epochs=1, script=twice) as process:
        out, err = process.communicate(timeout=300)
    assert [json.loads(line) for line in out.splitlines()] == [[8, False], [10, False]], err
    assert not (tmp_path / ".ray").exists(), "an authentication token was written for everyone to read"
    wait_for(lambda: not training(environment))


def wait_for(condition: Any, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def training(environment: dict[str, str]) -> list[int]:
    """Training processes of this module's sweeps that are alive; other tests' have other folders."""
    mark = f"NOISEGRID_FAKE={environment['NOISEGRID_FAKE']}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if b"orchestrator.worker" in (folder / "cmdline").read_bytes():
                    if mark in (folder / "environ").read_bytes():
                        found.append(int(folder.name))
            except OSError:
                pass
    return found


def test_a_sweep_uses_every_gpu_of_a_cluster_at_an_address(
    environment: dict[str, str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    node = {"num_cpus": 2, "num_gpus": 1}  # Ray takes our word for it.
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=4, num_gpus=2)
        script = DRIVER.replace("max_concurrent=2", f"gpus_per_run=1, address={nodes.address!r}")
        with driver(environment, store, epochs=1, script=script) as process:
            out, err = process.communicate(timeout=300)
        assert json.loads(out) == [8, False], err
        assert err == "training 8 runs, 3 side by side\n"
        used = {json.loads(text)["trainer"]["gpus"] for text in store.table(["provenance"])["provenance"].to_pylist()}
        assert used == {"0", "1"}, "a run was given no GPU, or more than one"
    finally:
        nodes.shutdown()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_ray_that_is_slow_to_start_is_tried_again_once(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    from orchestrator.launch import cluster

    tried: list[int | None] = []

    def init(cpus: int | None) -> None:
        tried.append(cpus)
        if len(tried) <= failures:
            raise Exception("The current node timed out during startup.\nMore.")  # noqa: TRY002

    monkeypatch.setattr(cluster, "_init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    if failures == 1:
        cluster._start(2)
    else:
        with pytest.raises(UserError, match=r"^Ray cannot start on this machine: The current node timed out .*\.$"):
            cluster._start(2)
    assert tried == [2, 2]
