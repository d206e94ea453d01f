"""A store of many records, loose and compacted: ``python -m benchmarks.store [--quick]`` prints figures as JSON.

The records are made up, and schema-true: ten cells of one group, each with the logits of 300 test examples, under the
ids that the planner plans. They are written without waiting for the disk, since writing is not what is measured. Every
figure is taken at the full number of records and at a tenth of it, in the same run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from orchestrator.plan import Planned, plan
from orchestrator.store import Store, encoding, open_store
from orchestrator.store.compaction import compact
from orchestrator.store.records import record_path
from protocols.protocol import Protocol, grid
from protocols.recipe import Recipe
from tests import factory

ROOT = Path(__file__).parents[1]
SOURCES = ("init", "shuffle", "augment", "dropout", "library", "all")
PAIRS = ("init+shuffle", "init+dropout", "shuffle+dropout", "augment+dropout")
COLUMNS = ["id", "outcome", "accuracy"]
LIMITS = {"status/loose": 30.0, "status/compacted": 2.0, "compaction": 180.0, "resume/compacted": 10.0}
"""Seconds that 20,000 records may take."""

RESUME = """
import sys
from orchestrator.plan import plan
from orchestrator.store import open_store
from benchmarks.store import of_runs
assert not plan(of_runs(int(sys.argv[2])), open_store(sys.argv[1])).missing
"""


def main(*options: str) -> None:
    """Measure, and print the figures."""
    many = 2_000 if "--quick" in options else 20_000
    with tempfile.TemporaryDirectory(prefix="noisegrid-store-") as folder:
        few_took, took = (measure(Path(folder, str(count)), count) for count in (many // 10, many))
    figures = []
    for name, (seconds, cpu) in took.items():
        few_seconds, few_cpu = few_took[name]
        figure: dict[str, Any] = {"name": f"store/{name}", "records": many, "seconds": seconds, "cpu_seconds": cpu}
        # Of the time of the processor, which other programs disturb less.
        figure |= {"ratio": cpu / few_cpu / 10, "meaning": "cost a record over that of a tenth as many"}
        figure |= {"few_seconds": few_seconds, "few_cpu_seconds": few_cpu, "limit_seconds": LIMITS.get(name)}
        figures.append(figure)
    for name in ("finished", "table", "status"):
        loose, compacted = (took[f"{name}/{kind}"][1] for kind in ("loose", "compacted"))
        meaning = f"cost compacted over loose, {many:,} records"
        figures.append({"name": f"store/{name}", "records": many, "ratio": compacted / loose, "meaning": meaning})
    print(json.dumps(figures))


def study() -> Protocol:
    """Ten cells in one group; ``--set replicates=N`` makes it 10 N runs and two controls."""
    recipe = Recipe(epochs=6, batch_size=64, learning_rate=0.1, warmup_epochs=1.0)
    cells = grid(
        sources=(*SOURCES, *PAIRS), architectures=("dropnet",), datasets=("digits",), trainers=("torch",), recipe=recipe
    )
    return Protocol(name="store-benchmark", summary="many runs", cells=cells, replicates=1)


def of_runs(count: int) -> Protocol:
    """The study with that many runs, beside the controls."""
    return dataclasses.replace(study(), replicates=count // len(study().cells))


def measure(folder: Path, count: int) -> dict[str, tuple[float, float]]:
    """(wall, processor) seconds of what users and programs do with a store, by name."""
    store = open_store(folder, create=True)
    fill(store, count)
    took = {f"{name}/loose": seconds for name, seconds in reading(store.url, count).items()}
    took["compaction"] = timed(lambda: compact(open_store(store.url)))
    return took | {f"{name}/compacted": seconds for name, seconds in reading(store.url, count).items()}


def reading(url: str, count: int) -> dict[str, tuple[float, float]]:
    """What reading takes: in this process, and as whole commands."""
    status = [str(ROOT / "sweep.py"), "status", "benchmarks.store:study", "--set", f"replicates={count // 10}"]
    return {
        "finished": timed(lambda: open_store(url).finished()),
        "table": timed(lambda: open_store(url).table(COLUMNS)),
        "status": command(*status, "--store", url),
        "resume": command("-c", RESUME, url, str(count)),
    }


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def command(*arguments: str) -> tuple[float, float]:
    """Wall and processor seconds of a Python process."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT)
    seconds, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fill(store: Store, count: int) -> None:
    """Give every planned run a record."""
    planned = plan(of_runs(count), store).planned
    blocks = [planned[start : start + 500] for start in range(0, len(planned), 500)]
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(write, [store.url] * len(blocks), blocks))


def write(url: str, planned: Sequence[Planned]) -> None:
    """Write the records of some runs."""
    files = open_store(url).files
    for entry in planned:
        row = factory.record(factory.Fake(entry.run, entry.source))
        files.put(record_path(entry.id), encoding.encode_record(row), durable=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
