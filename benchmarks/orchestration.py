"""What a run costs beside its training: ``python -m benchmarks.orchestration MEASURE [--quick]`` prints it as JSON.

Four fake GPUs and runs that train nothing, or sleep. Both sides of a ratio are measured in turn on one Ray. Of many
runs the cost of one is the time between the first and the last to end over their number, so that what is paid once a
sweep (Ray itself, an actor and a process for each slot) counts on neither side.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SLOTS = 4
FIXED = {"max_concurrent": SLOTS, "gpus_per_run": 1.0}

Figure = dict[str, Any]


def main(name: str, *options: str) -> None:
    """Measure one thing."""
    with tempfile.TemporaryDirectory(prefix="ng") as folder:
        os.environ.update(RAY_TMPDIR=f"{folder}/ray", XDG_CACHE_HOME=f"{folder}/cache", TMPDIR=folder)
        tempfile.tempdir = None
        figures = MEASURES[name]("--quick" in options)
    print(json.dumps(figures))


# Short runs


def overhead(quick: bool) -> list[Figure]:
    """A no-op run in stock Ray Tune over one here, in blocks of one and in blocks as the project chooses them."""
    with _four_gpus():
        stock = _stock(24 if quick else 80)
        pool = _pool(200 if quick else 1000)
        single = _noops(100 if quick else 400, block=1)
        blocks = _noops(600 if quick else 2000)
        stock = min(stock, _stock(24 if quick else 80))
    shared = {"stock_seconds": stock, "pool_seconds": pool, "unit": "stock Tune, s a run / ours, s a run"}
    meaning = "a no-op trial of stock Ray Tune over a run here, record of 10,000 x 10 logits included"
    return [
        {
            "name": "overhead/block-1",
            "ratio": stock / single,
            "at_least": 10,
            "ours_seconds": single,
            "meaning": f"{meaning}; one run a Tune trial",
            **shared,
        },
        {
            "name": "overhead/block-chosen",
            "ratio": stock / blocks,
            "at_least": 50,
            "ours_seconds": blocks,
            "meaning": f"{meaning}; blocks as the project chooses them",
            **shared,
        },
        {
            "name": "overhead/pool",
            "ratio": blocks / pool,
            "ours_seconds": blocks,
            "meaning": "a run here, in blocks, over the same run and record in a bare pool of Ray actors",
            **shared,
        },
    ]


def _stock(trials: int) -> float:
    """Seconds a trial of a function trainable that does nothing, with Tune's default settings."""
    from ray import tune

    ended = []

    class Clock(tune.Callback):
        def on_trial_complete(self, *args: Any, **info: Any) -> None:
            ended.append(time.monotonic())

    def nothing(config: dict[str, Any]) -> None:
        tune.report({"accuracy": 0.1})

    with _silence(), tempfile.TemporaryDirectory() as scratch:
        tune.Tuner(
            tune.with_resources(nothing, {"CPU": 1, "GPU": 1}),
            param_space={"replicate": tune.grid_search(list(range(trials)))},
            run_config=tune.RunConfig(storage_path=scratch, callbacks=[Clock()]),
        ).fit()
    return (ended[-1] - ended[0]) / (len(ended) - 1)


def _pool(runs: int) -> float:
    """Seconds a run where actors of Ray's do nothing but train and record what they are given."""
    import ray
    from ray.util import ActorPool

    with tempfile.TemporaryDirectory() as folder:
        plan, store = _planned(runs, Path(folder))
        worker = ray.remote(num_cpus=1, num_gpus=1)(_Worker)
        actors = ActorPool([worker.remote(store.url) for _ in range(SLOTS)])
        jobs = [(entry.run.specification, entry.source) for entry in plan.missing]
        list(actors.map_unordered(lambda actor, job: actor.train.remote(*job), jobs))
        return _rate(store)


class _Worker:
    """A bare actor."""

    def __init__(self, url: str) -> None:
        from orchestrator.slot.context import Settings
        from orchestrator.store import open_store

        self._store, self._settings = open_store(url), Settings(store=url)
        self._data: Any = None

    def train(self, specification: str, source: str) -> None:
        from orchestrator import catalog
        from orchestrator.slot.worker import execute
        from protocols.run import run_from_specification

        run = run_from_specification(specification)
        self._data = self._data or catalog.prepare(run.dataset, None)
        execute(run, source, self._store, self._data, self._settings)


def _noops(runs: int, block: int | None = None) -> float:
    """Seconds a run of a sweep of runs that train nothing."""
    from orchestrator.launch import blocks, sweep

    seconds, blocks.BLOCK_SECONDS = blocks.BLOCK_SECONDS, 0.0 if block == 1 else blocks.BLOCK_SECONDS
    try:
        with tempfile.TemporaryDirectory() as folder:
            plan, store = _planned(runs, Path(folder))
            assert sweep(plan, store, console=_nowhere(), **FIXED).complete
            return _rate(store)
    finally:
        blocks.BLOCK_SECONDS = seconds


# Slots in use


def slots(quick: bool) -> list[Figure]:
    """Whether all slots are used where runs take 0.3 s."""
    runs = 80 if quick else 160
    with _four_gpus(seconds=0.3), tempfile.TemporaryDirectory() as folder:
        from orchestrator.launch import sweep

        plan, store = _planned(runs, Path(folder))
        assert sweep(plan, store, console=_nowhere(), **FIXED).complete
        texts = store.table(["provenance"])["provenance"].to_pylist()
        used = Counter(json.loads(text)["trainer"]["supervisor"] for text in texts)
    return [
        {
            "name": "slots/in-use",
            "ratio": len(used) / SLOTS,
            "at_least": 1,
            "least_runs": min(used.values()),
            "most_runs": max(used.values()),
            "meaning": f"slots that trained some of {runs} runs of 0.3 s, over slots",
        }
    ]


def ideal(quick: bool) -> list[Figure]:
    """How long 24 runs of 15 s take on four slots."""
    runs, seconds = 24, 15.0
    with _four_gpus(seconds=seconds), tempfile.TemporaryDirectory() as folder:
        from orchestrator.launch import sweep

        plan, store = _planned(runs, Path(folder), epochs=30)
        took = sweep(plan, store, console=_nowhere(), **FIXED).seconds
    return [
        {
            "name": "slots/ideal",
            "ratio": took / (runs * seconds / SLOTS),
            "at_most": 1.08,
            "seconds": took,
            "meaning": f"wall time of {runs} runs of {seconds:g} s on {SLOTS} slots, all of a launch but Ray's start, "
            "over the ideal",
        }
    ]


# Many runs, simulated


def scale(quick: bool) -> list[Figure]:
    """What many runs cost the driver: slots answer at once that a block is done, and that each run took a second."""
    few, many, most = (_simulated(count) for count in (1000, 10_000, 20_000))
    return [
        {
            "name": "scale/cost",
            "ratio": many["seconds"] / many["runs"] / (few["seconds"] / few["runs"]),
            "at_most": 1.5,
            "few_seconds": few["seconds"],
            "many_seconds": many["seconds"],
            "meaning": "time of a run in a sweep of 10,000 simulated runs over that in one of 1,000, planning included",
        },
        {
            "name": "scale/memory",
            "ratio": most["bytes"] / 600e6,
            "at_most": 1,
            "bytes": most["bytes"],
            "meaning": "largest resident memory of the driver in a sweep of 20,000 simulated runs, over 600 MB",
        },
    ]


def _simulated(runs: int) -> dict[str, Any]:
    """A sweep in a process of its own."""
    import subprocess

    command = [sys.executable, "-m", "benchmarks.orchestration", "simulated", str(runs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def simulate(runs: int) -> None:
    """Print how long a sweep of simulated runs takes, and the driver's largest resident memory."""
    with _four_gpus(), tempfile.TemporaryDirectory() as folder:
        from orchestrator.launch import driver

        simulated = _simulated_slot()
        driver.Slot = simulated
        driver.SECONDS_PER_IMAGE = 0.1  # A second a run is what is expected, too.
        began = time.monotonic()
        plan, store = _planned(runs, Path(folder))
        result = driver.sweep(plan, store, console=_nowhere(), **FIXED)
        seconds = time.monotonic() - began
        assert result.complete
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"runs": runs, "seconds": seconds, "bytes": peak}))


def _simulated_slot() -> type:
    from ray.tune import Trainable

    class Simulated(Trainable):
        """Says of every run that it is done."""

        def setup(self, config: dict[str, Any], **options: Any) -> None:  # type: ignore[override]
            self._runs = config["runs"]

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self._runs = new_config["runs"]
            return True

        def step(self) -> dict[str, Any]:
            finished = dict.fromkeys(self._runs, 1.0)
            nothing = {"failed": {}, "unstored": {}, "busy": [], "returned": [], "withdrawn": [], "parked": ""}
            return {"done": True, "finished": finished, "images": 10 * len(finished), "device": "simulated", **nothing}

    return Simulated


def resume(quick: bool) -> list[Figure]:
    """How long it takes to find that nothing is left of a finished sweep."""
    import subprocess

    from orchestrator.store import open_store
    from orchestrator.store.compaction import compact

    runs = 2000 if quick else 20_000
    with tempfile.TemporaryDirectory() as folder:
        plan, store = _planned(runs, Path(folder))
        for entry in plan.missing:
            _put_record(store, entry)
        compact(open_store(store.url))
        code = f"from benchmarks.orchestration import left; print(left({runs}, {store.url!r}))"
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        seconds = time.monotonic() - began
        assert done.stdout.strip() == "0", done.stdout
    return [
        {
            "name": "scale/resume",
            "ratio": seconds / 10 * (20_000 / runs),
            "at_most": 1,
            "seconds": seconds,
            "runs": runs,
            "meaning": "time of a new process until it knows that nothing is left of a finished and compacted sweep of "
            "20,000 runs, over 10 s" + (f" (of {runs:,}, times {20_000 // runs})" if quick else ""),
        }
    ]


def left(runs: int, url: str) -> int:
    """How many runs are missing in a store."""
    from benchmarks.noop import study
    from orchestrator.plan import plan
    from orchestrator.store import open_store

    return len(plan(study(runs), open_store(url)).missing)


def _put_record(store: Any, entry: Any) -> None:
    """Leave a record that no one trained, with few logits, and without waiting for the disk."""
    from orchestrator.store import encoding
    from tests import factory

    row = factory.record(factory.Fake(entry.run, entry.source), examples=10)
    Path(store.url, "records", f"{entry.id}.parquet").write_bytes(encoding.encode_record(row))


# What they share


def _planned(runs: int, folder: Path, epochs: int = 1) -> tuple[Any, Any]:
    from benchmarks.noop import study
    from orchestrator.plan import plan
    from orchestrator.store import open_store

    store = open_store(folder / "store", create=True)
    return plan(study(runs, epochs), store), store


def _rate(store: Any) -> float:
    """Seconds a record, from the first to the last."""
    times = sorted(path.stat().st_mtime for path in Path(store.url, "records").glob("*.parquet"))
    return (times[-1] - times[0]) / (len(times) - 1)


@contextlib.contextmanager
def _four_gpus(seconds: float = 0.0) -> Iterator[None]:
    """A Ray with four slots, in which runs take so long."""
    import logging

    import ray

    from benchmarks.noop import SECONDS
    from orchestrator.launch.cluster import DRIVER_VARIABLES

    os.environ.update({SECONDS: str(seconds), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = DRIVER_VARIABLES["RAY_CHDIR_TO_TRIAL_DIR"]
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    ray.init(
        num_cpus=SLOTS, num_gpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Tune prints a table, as it does by default, where nobody sees it."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _nowhere() -> Any:
    from rich.console import Console

    return Console(file=io.StringIO())


MEASURES: dict[str, Callable[[bool], Sequence[Figure]]] = {
    "overhead": overhead,
    "slots": slots,
    "ideal": ideal,
    "scale": scale,
    "resume": resume,
}

if __name__ == "__main__":
    if sys.argv[1] == "simulated":
        simulate(int(sys.argv[2]))
    else:
        main(*sys.argv[1:])
