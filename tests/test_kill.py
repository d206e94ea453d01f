"""Ten times ``kill -9``: the program, Ray's actors, training processes. Nothing is lost, nothing done twice."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.plan import expand
from orchestrator.store import Store, open_store
from tests.kill_study import LOG, study

ROOT = Path(__file__).parents[1]
KILLS = ("driver",) * 3 + ("actor",) * 3 + ("process",) * 4
PATIENCE = 600.0
"""Seconds after which something that should happen counts as not happening; far more than it takes."""


@pytest.fixture
def environment(cache: Path) -> Iterator[dict[str, str]]:
    """What the program is started with: a Ray of its own, whose sockets want a short path, and the log."""
    folder = Path(tempfile.mkdtemp(prefix="ng"))
    values = {
        **os.environ,
        "RAY_TMPDIR": str(folder / "ray"),
        "XDG_CACHE_HOME": str(cache),
        "TMPDIR": str(folder),
        LOG: str(folder / "log"),
    }
    yield values
    for pid in processes(values):  # None, unless a test failed.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not processes(values))
    shutil.rmtree(folder)


def start(environment: dict[str, str], store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "sweep.py"), "run", "tests.kill_study:study", "--store", str(store)]
    options = ["--checkpoint-every", "0", "--max-concurrent", "2", "--retries", "10"]
    return subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes(environment: dict[str, str], name: str = "") -> list[int]:
    """Processes that a program of this test started, by what their environment says and what their command holds."""
    mark = f"{LOG}={environment[LOG]}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                own = mark in (folder / "environ").read_bytes().split(b"\0")
                if own and name.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def progress(store: Store) -> dict[str, int]:
    """Epochs in the checkpoint of each unfinished run."""
    folder = Path(store.url, "checkpoints")
    ids = [path.stem for path in folder.iterdir()] if folder.exists() else []
    return {id: checkpoint.epochs for id in ids if (checkpoint := store.load_checkpoint(id)) is not None}


class Moment:
    """Whether it is time for the next kill, and which run it is to hit.

    It is time once a run that was not hit before is so many epochs further than when this object was made. Progress is
    counted, not seconds, so that a slow machine does as well.
    """

    def __init__(self, program: subprocess.Popen[str], store: Store, epochs: int, hit: set[str]) -> None:
        self._program = program
        self._store = store
        self._epochs = epochs
        self._hit = hit
        self._before = progress(store)
        self.run = ""

    def __call__(self) -> bool:
        assert self._program.poll() is None, "the program ended by itself: " + self._program.communicate()[0]
        for id, epochs in progress(self._store).items():
            if id not in self._hit and epochs >= self._before.get(id, 0) + self._epochs:
                self.run = id
                return True
        return False


def training(environment: dict[str, str]) -> list[tuple[str, int, int]]:
    """(run, when it began, process) for every training so far."""
    lines = [line.split() for line in Path(environment[LOG]).read_text().splitlines()]
    return [(id, int(began), int(pid)) for id, began, pid in lines]


def records(store: Store) -> dict[str, tuple[int, int]]:
    """Inode and time of every record's file."""
    paths = Path(store.url, "records").glob("*.parquet")
    return {path.stem: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


@pytest.mark.slow
def test_ten_kills_change_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    with start(environment, tmp_path / "whole") as program:
        shown = program.communicate(timeout=PATIENCE)[0]
    assert program.returncode == 0, shown
    whole = open_store(tmp_path / "whole")
    Path(environment[LOG]).unlink()

    rng = random.Random(1)
    kills = list(KILLS)
    rng.shuffle(kills)
    store = open_store(tmp_path / "killed", create=True)
    program = start(environment, tmp_path / "killed")
    committed: dict[str, tuple[int, int]] = {}
    hit: set[str] = set()
    for kill in kills:
        moment = Moment(program, store, rng.randint(1, 3), hit)
        wait_for(moment)
        hit.add(moment.run)
        time.sleep(rng.uniform(0, 0.1))
        found = records(store)
        assert committed.items() <= found.items(), "a record was written again"
        committed = found
        if kill == "driver":
            program.kill()
            program.communicate()
            program = start(environment, tmp_path / "killed")
        else:
            pid = [pid for id, _, pid in training(environment) if id == moment.run][-1]
            assert pid in processes(environment, "orchestrator.slot.worker"), "not one of ours, or not there any more"
            os.kill(parent(pid) if kill == "actor" else pid, signal.SIGKILL)
    shown = program.communicate(timeout=PATIENCE)[0]
    assert program.returncode == 0, shown

    planned = {entry.id for entry in expand(study())}
    found = records(store)
    assert set(found) == planned and len(planned) == 16
    assert committed.items() <= found.items(), "a record was written again"

    columns = ["id", "initial_digest", "first_step_digest", "final_digest", "accuracy", "cross_entropy"]
    assert store.table(columns).equals(whole.table(columns))
    assert sum(epochs > 0 for epochs in store.table(["resumed_epochs"])["resumed_epochs"].to_pylist()) >= 3

    late = [id for id, began, _ in training(environment) if id in found and began > found[id][1]]
    assert not late, "runs were trained although they had a record"
    assert store.corrupt() == {} and progress(store) == {} and len(store.live()) == 0
    assert {row["outcome"] for row in store.failures().to_pylist()} == {"error"}
    wait_for(lambda: not processes(environment))
