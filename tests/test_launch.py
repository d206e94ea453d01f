"""Launching through Ray Tune: every missing run is trained once, whatever happens on the way."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestrator.launch import Result, sweep
from orchestrator.launch import cluster as clusters
from orchestrator.launch.cluster import cluster
from orchestrator.launch.gate import Gate
from orchestrator.plan import Plan
from orchestrator.store import Store, open_store
from protocols.errors import UserError
from tests.fakes import planned, runs_of


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


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


@pytest.mark.parametrize(
    ("fitting", "largest", "allowed", "joined", "expected"),
    [
        (4, None, None, False, 4),
        (4, None, 3, False, 3),
        (4, None, 30, False, 4),
        (0, None, None, True, 4),
        (16, None, None, True, 32),
        (16, 20, None, True, 20),
        (16, 8, None, True, 16),
        (16, 20, 50, True, 50),
        (16, None, 2, True, 2),
    ],
)
def test_blocks_at_a_time(fitting: int, largest: int | None, allowed: int | None, joined: bool, expected: int) -> None:
    assert clusters.at_a_time(fitting, largest, allowed, joined=joined) == expected


def test_memory_is_a_share_of_a_node_too(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"CPU": 8.0, "memory": 10.0 * 2**30}
    monkeypatch.setattr("orchestrator.launch.cluster.ray.nodes", lambda: [{"Alive": True, "Resources": node}] * 2)
    assert [clusters.slots(0.0, memory) for memory in (0, 2**30, 3 * 2**30)] == [16, 16, 6]
    with pytest.raises(UserError, match="no node of the Ray cluster has a free CPU and 11 GiB of memory for a run"):
        clusters.slots(0.0, 11 * 2**30)


def test_the_gate_opens_and_closes() -> None:
    async def story() -> list[bool]:
        gate = Gate()
        waiting = asyncio.create_task(gate.passed())
        await asyncio.sleep(0)
        before = waiting.done()
        await gate.set(True)
        await asyncio.wait_for(waiting, 10)
        await asyncio.wait_for(gate.passed(), 10)
        await gate.set(False)
        waiting = asyncio.create_task(gate.passed())
        await asyncio.sleep(0)
        after = waiting.done()
        waiting.cancel()
        return [before, after]

    assert asyncio.run(story()) == [False, False]


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
    two_slots: None,
    store: Store,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scratch = set(tmp_path.iterdir())
    plan = planned(store, "init", "onebit", replicates=3)
    result, shown = launch(plan, store)
    assert (result.planned, result.done, result.failed, result.interrupted) == (9, 9, {}, False), result
    assert result.complete
    assert store.finished() == {entry.id for entry in plan.planned}
    assert shown.startswith("training 9 runs, 2 side by side\n")
    assert capfd.readouterr() == ("", ""), "Ray reached the terminal"
    assert set(tmp_path.iterdir()) == scratch

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
    trained = Counter(json.loads(row["provenance"])["slot"]["supervisor"] for row in rows)
    assert len(trained) == 2 and min(trained.values()) >= 5, trained
    assert {json.loads(row["provenance"])["environment"]["CUDA_VISIBLE_DEVICES"] for row in rows} == {""}
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
    assert (result.done, result.complete, result.stopped) == (9, False, "")
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
    assert re.fullmatch(f"every run failed alike: {MISTAKE}", result.stopped)
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
    assert re.fullmatch(r"training 8 runs, 2 side by side\n(\d/8 done, .*\n)*", err)
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
                if b"orchestrator.slot.worker" in (folder / "cmdline").read_bytes():
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
        assert re.fullmatch(r"training 8 runs, 3 side by side\n(\d/8 done, .*\n)*", err)
        texts = store.table(["provenance"])["provenance"].to_pylist()
        used = {json.loads(text)["environment"]["CUDA_VISIBLE_DEVICES"] for text in texts}
        assert used == {"0", "1"}, "a run was given no GPU, or more than one"
    finally:
        nodes.shutdown()


LATE = """
import orchestrator.slot.canary

late = [1, 1]

def settle(store):
    if not late:
        return []
    late.pop()
    wrong = [entry for entry in store.listed() if store.withdraw(entry)]
    return [("somewhere GPU 7", "GPU 7 miscounts", [entry.name.removesuffix(".parquet") for entry in wrong])]

orchestrator.slot.canary.settle = settle
"""


def test_what_a_gpu_is_found_to_have_trained_wrong_in_the_end_is_trained_again(
    environment: dict[str, str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
    try:
        script = LATE + DRIVER.replace("max_concurrent=2", f"gpus_per_run=1, address={nodes.address!r}")
        with driver(environment, store, epochs=1, script=script) as process:
            out, err = process.communicate(timeout=300)
        assert json.loads(out) == [8, False], err
        assert err.count("somewhere GPU 7 trains no more: GPU 7 miscounts") == 1
        assert len(store.finished()) == 8
        assert len(list(Path(store.url, "corrupt").iterdir())) == 16, "all were withdrawn, twice"
    finally:
        nodes.shutdown()


STORE_AWAY = """
import orchestrator.slot.retrying
from orchestrator.launch import driver
from orchestrator.store import StoreError

orchestrator.slot.retrying.WAITS = ()
times = [0]

class Looking(driver.Looking):
    def after(self, ids):
        times[0] += bool(ids)
        if times[0]:
            raise StoreError("cannot write looks/x: Connection timed out")
        return super().after(ids)

driver.Looking = Looking
"""


def test_a_store_that_leaves_the_driver_without_an_answer_ends_a_sweep_in_a_sentence(
    environment: dict[str, str], store: Store
) -> None:
    script = STORE_AWAY + DRIVER.replace("result.interrupted", "result.stopped")
    with driver(environment, store, epochs=1, script=script) as process:
        out, err = process.communicate(timeout=300)
    assert "Traceback" not in err and process.returncode == 0, err
    done, stopped = json.loads(out)
    assert stopped == "the store has not answered for about a minute: cannot write looks/x: Connection timed out"
    assert 0 < done <= 8


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
