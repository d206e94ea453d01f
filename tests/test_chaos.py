"""More than twenty times ``kill -9`` on a cluster: training processes, slots, nodes, the program itself.

The sweep ends with exactly what was planned, each run once, with the bits of a calm run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.plan import plan
from orchestrator.slot.context import Settings
from orchestrator.slot.supervisor import Job, Supervisor
from orchestrator.store import Store, open_store
from tests import chaos_study
from tests.chaos_study import trainings
from tests.clusters import Nodes, environment, outcome, parent, processes, start, wait_for, workers

KILLS = ("process",) * 9 + ("slot",) * 6 + ("program",) * 3 + ("node",) * 3
STRIKES = "the training process was killed by SIGKILL"


@pytest.fixture
def nodes(cache: Path) -> Iterator[Nodes]:
    with environment(cache, FAKE_SECONDS="0.3"):
        nodes = Nodes(3)
        yield nodes
        nodes.shutdown()


def calm(study: str, folder: Path) -> Store:
    """The same runs, one after another, with nobody about."""
    store = open_store(folder, create=True)
    entries = plan(getattr(chaos_study, study)(), store).missing
    supervisor = Supervisor(Settings(store=store.url))
    events = list(supervisor.train([Job(run=entry.run, source=entry.source) for entry in entries]))
    supervisor.close()
    assert {event.kind for event in events} <= {"started", "epoch", "done", "tick"}
    return store


def strike(kill: str, nodes: Nodes, rng: random.Random) -> None:
    """Kill one, which there must be."""
    if kill == "node":
        nodes.kill(rng.randrange(len(nodes.nodes)))
        nodes.add()
        return
    wait_for(workers)
    pid = rng.choice(workers())
    try:
        os.kill(pid if kill == "process" else parent(pid), signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):  # It has just ended: another one, then.
        strike(kill, nodes, rng)


def names(store: Store, folder: str) -> set[str]:
    """The runs, or whatever else, that files of a folder are of."""
    return {entry.name.partition(".")[0] for entry in store.files.entries(folder)}


@pytest.mark.parametrize("study", ["fakes_study", pytest.param("digits_study", marks=pytest.mark.slow)])
def test_chaos_changes_nothing(nodes: Nodes, tmp_path: Path, study: str) -> None:
    rng = random.Random(4)
    kills = list(KILLS)
    rng.shuffle(kills)
    store = open_store(tmp_path / "chaos", create=True)
    planned = plan(getattr(chaos_study, study)(), store).planned
    program = start(study, tmp_path / "chaos", nodes.address)
    # A sweep whose first runs all fail alike is given up, and rightly so.
    wait_for(store.finished, program)
    for number, kill in enumerate(kills):
        seen, aim = len(trainings()), rng.randint(1, 3)
        # Progress is counted, not seconds, so that a slow machine does as well. The last kills need not wait.
        wait_for(lambda: len(trainings()) >= seen + aim or len(store.finished()) > len(planned) - 12, program)  # noqa: B023
        time.sleep(rng.uniform(0, 0.2))
        assert len(store.finished()) < len(planned), f"only {number} kills hit a sweep that was at work"
        if kill == "program":
            program.kill()
            program.communicate()
            program = start(study, tmp_path / "chaos", nodes.address)
        else:
            strike(kill, nodes, rng)
    assert outcome(program) == {"done": len(planned), "planned": len(planned), "stopped": ""}

    assert store.finished() == {entry.id for entry in planned} and len(planned) >= 60
    assert store.corrupt() == {} and len(store.live()) == 0
    # What is left is of those killed between a record and the end of their turn, and goes with the next sweep.
    left = {folder: names(store, folder) for folder in ("leases", "checkpoints", "sweeps")}
    assert len(left["sweeps"]) <= kills.count("program"), left["sweeps"]
    assert len(left["leases"]) <= len(kills) - kills.count("process"), left["leases"]
    assert len(left["checkpoints"]) <= len(kills), left["checkpoints"]
    store.tidy()
    assert [names(store, folder) for folder in ("leases", "checkpoints", "live")] == [set()] * 3
    rows = store.failures().to_pylist()
    assert len(rows) <= kills.count("process"), "what was no fault of a run counts as one"
    assert all(STRIKES in row["message"] for row in rows), [row["message"] for row in rows]
    columns = ["id", "initial_digest", "final_digest", "accuracy", "cross_entropy"]
    assert store.table(columns).equals(calm(study, tmp_path / "calm").table(columns))
    wait_for(lambda: not processes("orchestrator.slot.worker"))
