"""Training processes: which run gets which, and what becomes of a run whose process fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.plan import Plan
from orchestrator.store import Store, open_store
from orchestrator.supervisor import Event, Job, Supervisor
from orchestrator.worker import Settings
from tests.fakes import planned, runs_of

Supervise = Callable[..., Supervisor]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


@pytest.fixture
def mischief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder whose files make runs misbehave."""
    folder = tmp_path / "mischief"
    folder.mkdir()
    monkeypatch.setenv("NOISEGRID_FAKE", str(folder))
    return folder


@pytest.fixture
def supervise(store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervise]:
    """Makes supervisors that are closed at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    made: list[Supervisor] = []

    def supervise(*, isolation: str = "profile", between_runs: str | None = None, **options: float) -> Supervisor:
        settings = Settings(store=store.url, checkpoint_every=0, isolation=isolation, between_runs=between_runs)
        made.append(Supervisor(settings, **options))
        return made[-1]

    yield supervise
    for supervisor in made:
        supervisor.close()


def jobs(plan: Plan, source: str) -> list[Job]:
    return [Job(run=run, source=source) for run in runs_of(plan, source)]


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events if event.kind not in ("tick", "started", "epoch")]


def processes(store: Store, todo: list[Job]) -> list[str]:
    """The training process of each run."""
    rows = {row["id"]: row["process"] for row in store.table(["id", "process"]).to_pylist()}
    return [rows[job.run.id] for job in todo]


def test_runs_share_a_warm_process_until_the_profile_changes(store: Store, supervise: Supervise) -> None:
    plan = planned(store, "init", "library", library="kernel", replicates=2)
    todo = [*jobs(plan, "init"), *jobs(plan, "library")]
    assert [job.run.profile for job in todo] == ["held", "held", "kernel-0", "kernel-1"]
    events = list(supervise().train(todo))
    assert kinds(events) == 4 * ["done"]
    assert [event.kind for event in events if event.id == todo[0].run.id and event.kind != "tick"] == [
        "started",
        *3 * ["epoch"],
        "done",
    ]
    used = processes(store, todo)
    assert used[0] == used[1] and len(set(used)) == 3
    assert all(not process.split(":")[1] == str(os.getpid()) for process in used)


def test_a_control_is_trained_in_two_processes(store: Store, supervise: Supervise) -> None:
    plan = planned(store, "init", replicates=4)
    control, init = jobs(plan, "none"), jobs(plan, "init")
    list(supervise().train([init[0], control[0], control[1], control[2], init[1]]))
    used = processes(store, [init[0], control[0], control[1], control[2], init[1]])
    assert used[0] == used[1] != used[2] == used[3] == used[4]


def test_a_control_is_trained_in_two_processes_in_whatever_order(store: Store, supervise: Supervise) -> None:
    control = jobs(planned(store, "init", replicates=3), "none")
    list(supervise().train([control[2], control[1], control[0]]))
    assert len(set(processes(store, control))) == 3


def test_every_run_has_a_process_of_its_own_where_that_is_asked(store: Store, supervise: Supervise) -> None:
    todo = jobs(planned(store, "init", replicates=3), "init")
    assert kinds(list(supervise(isolation="process").train(todo))) == 3 * ["done"]
    assert len(set(processes(store, todo))) == 3


def between(store: Store, job: Job) -> dict[str, Any]:
    (text,) = store.table(["provenance"], {job.run.id})["provenance"].to_pylist()
    found: dict[str, Any] = json.loads(text)["between_runs"]
    return found


def test_a_command_comes_before_each_run(store: Store, supervise: Supervise, tmp_path: Path) -> None:
    """Whatever its exit code, which is recorded."""
    todo = jobs(planned(store, "init", replicates=2), "init")
    command = f"echo x >> {tmp_path}/log; exit $(wc -l < {tmp_path}/log)"
    assert kinds(list(supervise(between_runs=command).train(todo))) == 2 * ["done"]
    assert (tmp_path / "log").read_text() == "x\nx\n"
    found = [between(store, job) for job in todo]
    assert [(each["command"], each["exit_code"]) for each in found] == [(command, 1), (command, 2)]
    assert all(0 < each["seconds"] < 60 for each in found)


def test_a_command_that_hangs_is_ended(store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.supervisor.BETWEEN_SECONDS", 0.2)
    todo = jobs(planned(store, "init", replicates=1), "init")
    assert kinds(list(supervise(between_runs="sleep 600 | cat").train(todo))) == ["done"]
    found = between(store, todo[0])
    assert found["exit_code"] is None and 0.2 <= found["seconds"] < 60


def test_other_hardware_is_not_tried_again(store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(store, "init", replicates=1)
    control, todo = jobs(plan, "none"), jobs(plan, "init")
    list(supervise().train(control[:1]))
    monkeypatch.setenv("FAKE_VERSION", "2.0")
    events = list(supervise(retries=3).train(todo))
    assert kinds(events) == ["failed"] and events[-1].refused
    (failure,) = store.failures().to_pylist()
    assert failure["outcome"] == "hardware" and failure["message"] == events[-1].message
    assert "'cpu, torch 1.0', but this is 'cpu, torch 2.0'" in failure["message"]


def test_a_run_with_a_record_starts_no_process(store: Store, supervise: Supervise) -> None:
    control = jobs(planned(store, "init"), "none")
    assert kinds(list(supervise().train(control))) == ["done", "done"]
    before = processes(store, control)
    supervisor = supervise()
    events = list(supervisor.train(control))
    assert supervisor._child is None
    assert [(event.kind, event.seconds) for event in events] == [("done", None), ("done", None)]
    assert processes(store, control) == before


@pytest.mark.parametrize(
    ("what", "outcome", "message", "traceback"),
    [
        ("raise", "error", "ValueError: a mistake in the trainer (fake_trainer.py:LINE)", "a mistake in the trainer"),
        ("memory", "out_of_memory", "MemoryError: no room (fake_trainer.py:LINE)", "no room"),
        ("die", "error", "was killed by SIGKILL, perhaps by the system for want of memory", ""),
        ("exit", "error", "ended with exit code 7", ""),
    ],
)
def test_a_failed_run_is_kept_as_such_and_tried_again_in_another_process(
    store: Store, supervise: Supervise, mischief: Path, what: str, outcome: str, message: str, traceback: str
) -> None:
    todo = jobs(planned(store, "init", replicates=3), "init")
    (mischief / f"{what}-1").touch()
    events = list(supervise().train(todo))
    assert kinds(events) == ["done", "retried", "done", "done"]
    failure = store.failures().to_pylist()
    assert len(failure) == 1 and (failure[0]["id"], failure[0]["attempt"]) == (todo[1].run.id, 1)
    assert failure[0]["outcome"] == outcome
    said = re.sub(r"\.py:\d+", ".py:LINE", failure[0]["message"])
    assert said.endswith(f"{message} (after epoch 1 of 3)")
    assert traceback in failure[0]["traceback"] and bool(traceback) == bool(failure[0]["traceback"])
    assert f"about to {what}" in failure[0]["log_tail"]
    row = store.table(["attempt", "resumed_epochs"], {todo[1].run.id}).to_pylist()[0]
    assert row == {"attempt": 2, "resumed_epochs": 1}
    used = processes(store, todo)
    assert used[0] != used[1] == used[2]


def test_a_run_that_keeps_failing_is_given_up_and_the_next_one_trained(
    store: Store, supervise: Supervise, mischief: Path
) -> None:
    todo = jobs(planned(store, "init", replicates=2, epochs=9), "init")
    (mischief / "raise-0-always").touch()
    events = list(supervise(retries=2).train(todo))
    assert kinds(events) == ["retried", "retried", "failed", "done"]
    assert [row["attempt"] for row in store.failures().to_pylist()] == [1, 2, 3]
    assert store.finished() == {todo[1].run.id}
    assert store.live()["id"].to_pylist() == []


def test_a_store_that_fails_fails_the_run(store: Store, supervise: Supervise, mischief: Path) -> None:
    todo = jobs(planned(store, "init", replicates=2), "init")
    (mischief / "raise-0-always").touch()
    Path(store.url, "failures").write_text("in the way")
    events = [event for event in supervise().train(todo) if event.kind == "failed"]
    assert [event.id for event in events] == [job.run.id for job in todo]
    assert all(f"{store.url}/failures" in event.message for event in events)


def test_a_hung_run_is_ended(store: Store, supervise: Supervise, mischief: Path) -> None:
    todo = jobs(planned(store, "init", replicates=1), "init")
    (mischief / "hang-0").touch()
    events = list(supervise(patience=6.0).train(todo, tick=0.2))
    assert kinds(events) == ["retried", "done"]
    assert [event.kind for event in events].count("tick") > 5
    failure = store.failures().to_pylist()[0]
    assert failure["outcome"] == "timeout" and "no epoch was finished for 6 s" in failure["message"]


def test_a_process_that_is_asked_to_end_saves_a_checkpoint_and_fails_no_run(
    store: Store, supervise: Supervise, mischief: Path
) -> None:
    todo = jobs(planned(store, "init", replicates=1, epochs=6), "init")
    (mischief / "term-0").touch()
    assert kinds(list(supervise(retries=0).train(todo))) == ["done"]
    assert len(store.failures()) == 0
    row = store.table(["attempt", "resumed_epochs"]).to_pylist()[0]
    assert row == {"attempt": 2, "resumed_epochs": 2}


def test_a_process_that_cannot_start_fails_its_run(
    store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    todo = jobs(planned(store, "init", replicates=1), "init")
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho no library\nexit 3\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    assert kinds(list(supervise(retries=0).train(todo))) == ["failed"]
    failure = store.failures().to_pylist()[0]
    assert failure["message"] == "the training process ended with exit code 3"
    assert failure["log_tail"] == "no library\n"


def test_closing_ends_the_process_at_once_and_keeps_the_checkpoint(
    store: Store, supervise: Supervise, mischief: Path
) -> None:
    todo = jobs(planned(store, "init", replicates=1), "init")
    (mischief / "hang-0-always").touch()
    supervisor = supervise()
    events = supervisor.train(todo)
    while next(events).kind != "epoch":
        pass
    while store.load_checkpoint(todo[0].run.id) is None:
        time.sleep(0.05)
    pid = supervisor._child._process.pid
    folder = supervisor._folder
    supervisor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not folder.exists()
    assert store.load_checkpoint(todo[0].run.id).epochs == 1
    assert len(store.failures()) == 0


SUPERVISOR = """
import sys
from orchestrator.store import open_store
from orchestrator.supervisor import Supervisor
from orchestrator.worker import Settings
from tests.fakes import planned
from tests.test_supervisor import jobs

store = open_store(sys.argv[1])
supervisor = Supervisor(Settings(store=store.url, checkpoint_every=0))
for event in supervisor.train(jobs(planned(store, "init", replicates=1), "init")):
    if event.kind == "epoch":
        print(supervisor._child._process.pid, supervisor._folder, flush=True)
"""


def test_a_process_dies_with_its_supervisor(store: Store, cache: Path, mischief: Path) -> None:
    (mischief / "hang-0-always").touch()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SUPERVISOR, store.url]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        pid = int(words[0])
        os.kill(pid, 0)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while _alive(pid):
        assert time.monotonic() < deadline, "the training process outlived its supervisor"
        time.sleep(0.05)
    shutil.rmtree(words[1])


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended and is not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
