"""Training processes: which run gets which, and what becomes of a run whose process fails."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.plan import Plan
from orchestrator.slot.supervisor import Event, Job, Supervisor
from orchestrator.store import Store, StoreError
from orchestrator.store.leases import Leases, sweeping
from tests.fakes import planned, runs_of

Supervise = Callable[..., Supervisor]


def insist(supervisor: Supervisor, todo: list[Job], **options: Any) -> list[Event]:
    """Train runs, each until it is done; all events."""
    events: list[Event] = []
    for job in todo:
        for failed in range(5):
            events += supervisor.train([dataclasses.replace(job, failed=failed)], **options)
            if events[-1].kind == "done":
                break
    return events


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
    monkeypatch.setattr("orchestrator.slot.between_runs.SECONDS", 0.2)
    todo = jobs(planned(store, "init", replicates=1), "init")
    assert kinds(list(supervise(between_runs="sleep 600 | cat").train(todo))) == ["done"]
    found = between(store, todo[0])
    assert found["exit_code"] is None and 0.2 <= found["seconds"] < 60


def test_other_hardware_refuses_a_run(store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(store, "init", replicates=1)
    control, todo = jobs(plan, "none"), jobs(plan, "init")
    list(supervise().train(control[:1]))
    monkeypatch.setenv("FAKE_VERSION", "2.0")
    events = list(supervise().train(todo))
    assert kinds(events) == ["failed"] and events[-1].refused and events[-1].outcome == "hardware"
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


def test_a_job_that_has_failed_has_a_fresh_process(store: Store, supervise: Supervise, mischief: Path) -> None:
    todo = jobs(planned(store, "init", replicates=3, epochs=9), "init")
    (mischief / "raise-1").touch()
    events = insist(supervise(), todo)
    assert kinds(events) == ["done", "failed", "done", "done"]
    row = store.table(["attempt", "resumed_epochs"], {todo[1].run.id}).to_pylist()[0]
    assert row == {"attempt": 2, "resumed_epochs": 1}
    used = processes(store, todo)
    assert used[0] != used[1] == used[2]


def test_a_run_is_attempted_once_and_the_next_one_trained(store: Store, supervise: Supervise, mischief: Path) -> None:
    todo = jobs(planned(store, "init", replicates=2, epochs=9), "init")
    (mischief / "raise-0-always").touch()
    supervisor = supervise()
    assert kinds(list(supervisor.train(todo))) == ["failed", "done"]
    again = [dataclasses.replace(todo[0], failed=1), dataclasses.replace(todo[0], failed=2), todo[1]]
    assert kinds(list(supervisor.train(again))) == ["failed", "failed", "done"]
    assert [row["attempt"] for row in store.failures().to_pylist()] == [1, 2, 3]
    assert store.finished() == {todo[1].run.id}
    assert store.live()["id"].to_pylist() == []


def test_a_store_that_fails_in_the_process_fails_no_run(
    store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = jobs(planned(store, "init", replicates=2), "init")
    failures = Path(store.url, "failures")
    failures.write_text("in the way")
    supervisor = supervise()
    events = list(supervisor.train(todo[:1]))
    assert kinds(events) == ["unstored"] and f"{store.url}/failures" in events[-1].message
    failures.unlink()
    assert kinds(list(supervisor.train(todo))) == ["done", "done"]
    assert len(store.failures()) == 0


def test_a_failure_that_cannot_be_kept_is_told(
    store: Store, supervise: Supervise, mischief: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.slot.retrying.WAITS", (0.0,))
    (job,) = jobs(planned(store, "init", replicates=1), "init")
    (mischief / "raise-0").touch()
    supervisor = supervise()
    monkeypatch.setattr(supervisor._store, "fail", refusing(99))
    (event,) = [event for event in supervisor.train([job]) if event.kind == "failed"]
    assert event.outcome == "error" and event.message.endswith("; and of that nothing could be kept: no network")


def refusing(times: int, then: Callable[..., Any] = lambda *arguments: None) -> Callable[..., Any]:
    """What a store does that is away for so many tries."""
    left = [times]

    def refuse(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise StoreError("no network")
        return then(*arguments)

    return refuse


@pytest.mark.parametrize("what", ["has", "claim", "canaries", "put_canary"])
@pytest.mark.parametrize("times", [3, 4])
def test_a_store_that_is_away_fails_no_run(
    store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch, what: str, times: int
) -> None:
    """It has a while to come back; then the run is given back untried, and the next one follows."""
    monkeypatch.setattr("orchestrator.slot.retrying.WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    todo = jobs(planned(store, "init", replicates=2), "init")
    with sweeping(store) as sweep:
        supervisor = supervise(sweep=sweep.id, gpus=1.0)
        owner = supervisor._leases if what == "claim" else supervisor._store
        monkeypatch.setattr(owner, what, refusing(times, getattr(owner, what)))
        events = list(supervisor.train(todo))
        assert kinds(events) == ["done" if times == 3 else "unstored", "done"]
        if times == 4:
            assert next(event.message for event in events if event.kind == "unstored") == "no network"
            assert kinds(list(supervisor.train(todo[:1]))) == ["done"]
    assert len(store.failures()) == 0


def test_a_process_that_is_asked_to_end_saves_a_checkpoint_and_fails_no_run(
    store: Store, supervise: Supervise, mischief: Path
) -> None:
    todo = jobs(planned(store, "init", replicates=1, epochs=6), "init")
    (mischief / "term-0").touch()
    assert kinds(list(supervise().train(todo))) == ["done"]
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
    assert kinds(list(supervise().train(todo))) == ["failed"]
    failure = store.failures().to_pylist()[0]
    assert failure["message"] == "the training process ended with exit code 3"
    assert failure["log_tail"] == "no library\n"


# Leases


def leased(store: Store, job: Job) -> bool:
    """Whether a sweep of the name ``other`` could have a run."""
    with sweeping(store) as other:
        leases = Leases(store, other.id, 60.0)
        claimed = leases.claim(job.run.id, "other")
        if claimed:
            leases.release(job.run.id)
    return not claimed


def test_a_run_is_leased_while_it_is_trained(store: Store, supervise: Supervise, mischief: Path) -> None:
    todo = jobs(planned(store, "init", replicates=2), "init")
    (mischief / "raise-0").touch()
    with sweeping(store) as sweep:
        supervisor = supervise(sweep=sweep.id)
        seen = [(event.kind, leased(store, todo[0])) for event in supervisor.train(todo[:1]) if event.kind != "tick"]
        assert [kind for kind, _ in seen] == ["started", "epoch", "failed"] and all(held for _, held in seen)
        assert not leased(store, todo[0])
        assert kinds(list(supervisor.train(todo))) == ["done", "done"]


def test_a_run_that_another_sweep_trains_is_left_alone(store: Store, supervise: Supervise) -> None:
    todo = jobs(planned(store, "init", replicates=2), "init")
    with sweeping(store) as sweep, sweeping(store) as other:
        leases = Leases(store, other.id, 60.0)
        assert leases.claim(todo[0].run.id, "other")
        supervisor = supervise(sweep=sweep.id)
        assert [(event.kind, event.id) for event in supervisor.train(todo) if event.kind in ("busy", "done")] == [
            ("busy", todo[0].run.id),
            ("done", todo[1].run.id),
        ]
        assert store.finished() == {todo[1].run.id} and len(store.live()) == 0
        leases.release(todo[0].run.id)
        assert kinds(list(supervisor.train(todo[:1]))) == ["done"]


def test_a_run_that_another_sweep_has_just_done_is_not_trained(
    store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for its record and the lease."""
    (job,) = jobs(planned(store, "init", replicates=1), "init")
    claim = Leases.claim

    def late(leases: Leases, id: str, holder: str) -> bool:
        list(supervise().train([job]))
        return claim(leases, id, holder)

    monkeypatch.setattr(Leases, "claim", late)
    with sweeping(store) as sweep:
        supervisor = supervise(sweep=sweep.id)
        assert [(event.kind, event.seconds) for event in supervisor.train([job])] == [("done", None)]
        assert supervisor._child is None and not leased(store, job)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_lease_is_given_back_when_a_slot_is_stopped(
    store: Store, supervise: Supervise, mischief: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its process has ended."""
    (job,) = jobs(planned(store, "init", replicates=1), "init")
    (mischief / "hang-0").touch()
    with sweeping(store) as sweep:
        supervisor = supervise(sweep=sweep.id)
        events = supervisor.train([job], tick=0.1)
        while next(events).kind != "epoch":
            pass
        assert leased(store, job)
        pid, alive = supervisor._child.pid, []
        release = supervisor._leases.release
        monkeypatch.setattr(supervisor._leases, "release", lambda id: (alive.append(running(pid)), release(id)))
        events.close()
        assert not leased(store, job) and alive == [False], "the process still trained what another sweep could claim"


# Logs


def test_what_a_run_printed_is_found_by_its_id(store: Store, supervise: Supervise, mischief: Path) -> None:
    """Attempt by attempt, and nothing of the run before it in the same process."""
    todo = jobs(planned(store, "init", replicates=2), "init")
    (mischief / "raise-1").touch()
    insist(supervise(), todo)
    ids = [job.run.id for job in todo]
    assert store.logs() == {ids[0]: [1], ids[1]: [1, 2]} or store.logs() == {ids[1]: [1, 2], ids[0]: [1]}
    assert store.log(ids[0]) == "training replicate 0 from epoch 0\n"
    assert store.log(ids[1], 1) == "training replicate 1 from epoch 0\nabout to raise\n"
    assert store.log(ids[1]) == store.log(ids[1], 2) == "training replicate 1 from epoch 1\n"
    assert store.log(ids[0], 2) is None and store.log("0" * 64) is None
    assert store.logs(ids[0][:8]) == {ids[0]: [1]}


def test_what_a_running_run_prints_is_shown_now_and_then(store: Store, supervise: Supervise, mischief: Path) -> None:
    (job,) = jobs(planned(store, "init", replicates=1), "init")
    (mischief / "hang-0").touch()
    written = 0
    put = store.put_log
    supervisor = supervise(publish_every=0.5)

    def count(*arguments: Any) -> None:
        nonlocal written
        written += 1
        put(*arguments)

    supervisor._store.put_log = count
    for ticks, _ in enumerate(supervisor.train([job], tick=0.2)):
        if (store.log(job.run.id) or "").endswith("about to hang\n") and ticks > 30:
            break
    assert 1 <= written <= 3, "it is written when it has changed"


def test_a_run_that_prints_nothing_leaves_no_log(
    store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_QUIET", "1")
    assert kinds(list(supervise().train(jobs(planned(store, "init", replicates=1), "init")))) == ["done"]
    assert store.logs() == {} and not list(Path(store.url, "logs").glob("*"))


def test_a_device_whose_process_cannot_be_ended_is_parked(
    store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the device, and so would the next one."""
    todo = jobs(planned(store, "init", "library", library="kernel", replicates=1), "init")
    todo += jobs(planned(store, "init", "library", library="kernel", replicates=1), "library")
    supervisor = supervise(gpus=1.0)
    assert kinds(list(supervisor.train(todo[:1]))) == ["done"]
    child = supervisor._child
    monkeypatch.setattr("orchestrator.slot.processes.end", lambda pid, mark: False)
    events = list(supervisor.train(todo[1:]))
    assert kinds(events) == ["parked"] and f"process {child.pid} on GPU " in events[-1].message
    monkeypatch.undo()
    os.killpg(child.pid, signal.SIGKILL)
    child._process.wait()


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
    pid = supervisor._child.pid
    folder = supervisor._folder
    supervisor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not folder.exists()
    assert store.load_checkpoint(todo[0].run.id).epochs == 1
    assert len(store.failures()) == 0


def test_a_run_that_is_stopped_in_good_order_goes_on_where_it_was(
    store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However seldom checkpoints are due: a short time budget would train the same epochs for ever."""
    monkeypatch.setenv("FAKE_SECONDS", "0.5")
    todo = jobs(planned(store, "init", replicates=1), "init")
    supervisor = supervise(checkpoint_every=3600.0)
    events = supervisor.train(todo)
    while next(events).kind != "epoch":
        pass
    supervisor.close(60.0)
    events.close()
    checkpoint = store.load_checkpoint(todo[0].run.id)
    assert checkpoint is not None and checkpoint.epochs >= 1
    assert len(store.failures()) == 0
    monkeypatch.setenv("FAKE_SECONDS", "0")
    assert kinds(list(supervise().train(todo))) == ["done"]
    assert store.table(["resumed_epochs"]).to_pylist() == [{"resumed_epochs": checkpoint.epochs}]


def test_a_run_that_hangs_is_not_waited_for_for_ever(store: Store, supervise: Supervise, mischief: Path) -> None:
    (mischief / "hang-0-always").touch()
    supervisor = supervise()
    events = supervisor.train(jobs(planned(store, "init", replicates=1), "init"))
    while next(events).kind != "epoch":
        pass
    pid = supervisor._child.pid
    supervisor.close(0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SUPERVISOR = """
import sys
from orchestrator.store import open_store
from orchestrator.slot.supervisor import Supervisor
from orchestrator.slot.context import Settings
from tests.fakes import planned
from tests.test_supervisor import jobs

store = open_store(sys.argv[1])
supervisor = Supervisor(Settings(store=store.url, checkpoint_every=0))
for event in supervisor.train(jobs(planned(store, "init", replicates=1), "init")):
    if event.kind == "epoch":
        print(supervisor._child.pid, supervisor._folder, flush=True)
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
    while alive(pid):
        assert time.monotonic() < deadline, "the training process outlived its supervisor"
        time.sleep(0.05)
    shutil.rmtree(words[1])


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and is not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
