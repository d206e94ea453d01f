"""Runs that do everything a run should not: each ends with its outcome in the store, and the next one is trained."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.slot import memory
from orchestrator.slot.supervisor import Event, Job, Supervisor
from orchestrator.store import Store
from tests.fakes import planned
from tests.test_supervisor import Supervise, alive, jobs, kinds, processes


def pair(store: Store) -> list[Job]:
    """A run that is to misbehave after its first epoch, and another."""
    return jobs(planned(store, "init", replicates=2), "init")


def watched(supervisor: Supervisor, todo: list[Job]) -> list[Event]:
    """Train runs; the first counts as hung two seconds after its first epoch, since its process may start slowly."""
    events = []
    for event in supervisor.train(todo, tick=0.2):
        events.append(event)
        if event.id == todo[0].run.id:
            hanging = event.kind == "tick" and any(event.kind == "epoch" for event in events)
            supervisor._patience = 2.0 if hanging else 3600.0
    return events


def failure(store: Store) -> dict[str, Any]:
    """The only one."""
    (row,) = store.failures().to_pylist()
    return row


CASES = {
    "raise": ("error", r"ValueError: a mistake in the trainer \(fake_trainer.py:\d+\)"),
    "memory": ("out_of_memory", r"MemoryError: no room \(fake_trainer.py:\d+\)"),
    "illegal": ("hardware", r"RuntimeError: CUDA error: an illegal memory access was encountered \(fake.*"),
    "abort": ("hardware", r"the training process was killed by SIGABRT"),
    "segfault": ("error", r"the training process was killed by SIGSEGV"),
    "die": ("error", r"the training process was killed by SIGKILL.*"),
    "exit": ("error", r"the training process ended with exit code 7"),
    "silent": ("error", r"the training process ended with exit code 0"),
    "leave": ("error", r"the training process ended with exit code 0"),
    "fork": ("error", r"the training process ended with exit code 3"),
    "escape": ("error", r"ValueError: left somebody behind \(fake_trainer.py:\d+\)"),
    "close": ("error", r"the training process (ended with exit code 1|closed its connection)"),
    "fill": ("error", r".*File too large.*"),
    "hang": ("timeout", r"no epoch was finished for 2 s: the process was ended"),
    "stop": ("timeout", r"no epoch was finished for 2 s: the process was ended"),
    "deaf": ("timeout", r"no epoch was finished for 2 s: the process was ended"),
    "print": ("error", r"ValueError: said it all \(fake_trainer.py:\d+\)"),
}


@pytest.mark.parametrize("what", CASES)
def test_a_run_that_misbehaves_ends_and_the_next_is_trained(
    store: Store,
    supervise: Supervise,
    mischief: Path,
    what: str,
) -> None:
    outcome, message = CASES[what]
    todo = pair(store)
    (mischief / f"{what}-0").touch()
    supervisor = supervise()
    events = watched(supervisor, todo) if outcome == "timeout" else list(supervisor.train(todo))
    assert kinds(events) == ["failed", "done"]
    row = failure(store)
    assert (row["id"], row["attempt"], row["outcome"]) == (todo[0].run.id, 1, outcome)
    assert re.fullmatch(rf"{message} \(after epoch \d of 3\)", row["message"])
    (said,) = [event for event in events if event.kind == "failed"]
    assert (said.outcome, said.message, said.refused) == (outcome, row["message"], False)
    assert bool(row["traceback"]) == (("(fake_trainer" in row["message"]) or what == "fill")

    printed = store.log(todo[0].run.id)
    if outcome != "timeout":
        assert f"about to {what}" in printed
        assert row["log_tail"] and printed.endswith(row["log_tail"])
    assert len(printed) < 1.1 * 2**20
    supervisor.close()
    if (lingering := mischief / "lingering").exists():
        assert not alive(int(lingering.read_text())), "something outlived the supervisor"


def test_a_run_that_prints_a_gigabyte_leaves_its_beginning_and_its_end(
    store: Store,
    supervise: Supervise,
    mischief: Path,
) -> None:
    todo = pair(store)
    (mischief / "print-0").touch()
    list(supervise().train(todo[:1]))
    printed = store.log(todo[0].run.id)
    assert "training replicate 0 from epoch 0\nabout to print\n0123456789abcde\n" in printed[: 2**12]
    assert printed.endswith("0123456789abcde\n")
    (left_out,) = re.findall(r"\n\[\.\.\. ([\d,]+) bytes are left out here \.\.\.\]\n", printed)
    assert 0.99 * 2**30 < int(left_out.replace(",", "")) < 2**30


def test_a_run_that_is_not_a_number_is_recorded_as_diverged(store: Store, supervise: Supervise) -> None:
    todo = jobs(planned(store, "init", replicates=1, learning_rate=1000.0), "init") + pair(store)
    assert kinds(list(supervise().train(todo))) == 3 * ["done"]
    assert store.table(["outcome"], {todo[0].run.id})["outcome"].to_pylist() == ["diverged"]


def test_temporary_files_go_with_the_process(
    store: Store,
    supervise: Supervise,
    mischief: Path,
) -> None:
    todo = pair(store)
    (mischief / "fill-0").touch()
    supervisor = supervise()
    seen = set()
    for event in supervisor.train(todo[:1]):
        if event.kind == "epoch":
            seen = {path.name for path in supervisor._folder.glob("tmp-*")}
    assert len(seen) == 1 and list(supervisor._folder.glob("tmp-*")) == []


def test_a_long_path_to_temporary_files_has_a_short_name(
    store: Store,
    supervise: Supervise,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else no process could make a socket there; links that nobody could take away go with the next."""
    place = tmp_path / "links"
    place.mkdir()
    (place / "noisegrid-tmp-0").symlink_to(tmp_path / "gone")
    monkeypatch.setattr("tempfile.tempdir", str(place))
    supervisor = supervise()
    supervisor._folder = tmp_path / ("long" * 20)
    supervisor._folder.mkdir()
    list(supervisor.train(pair(store)[:1]))
    (link,) = place.glob("noisegrid-tmp-*")
    assert link.resolve().parent == supervisor._folder
    environment = Path(f"/proc/{supervisor._child.pid}/environ").read_bytes().split(b"\0")
    assert f"TMPDIR={link}".encode() in environment
    supervisor.close()
    assert not link.is_symlink()


# Memory


def test_a_run_that_takes_too_much_memory_is_ended(
    store: Store,
    supervise: Supervise,
    mischief: Path,
) -> None:
    todo = pair(store)
    (mischief / "hog-0").touch()
    events = list(supervise(memory_limit=700 * 2**20).train(todo))
    assert kinds(events) == ["failed", "done"]
    row = failure(store)
    assert row["outcome"] == "out_of_memory"
    assert re.match(r"it took \d\.\d\d GiB of memory, more than the 0.68 GiB that a run may take: ", row["message"])


def test_when_memory_runs_out_a_run_above_its_share_is_ended(
    store: Store,
    supervise: Supervise,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = [memory.Machine(2**30, 2**20)]
    monkeypatch.setattr(memory, "machine", lambda: state[0])
    monkeypatch.setenv("FAKE_SECONDS", "0.5")
    todo = pair(store)
    supervisor = supervise(memory_share=0.01)
    assert kinds(list(supervisor.train(todo[:1]))) == ["failed"]
    row = failure(store)
    assert row["outcome"] == "out_of_memory"
    assert "of memory when the machine had 0.00 GiB of 1.00 GiB left, more than its share of 0.01 GiB" in row["message"]
    state[0] = memory.Machine(2**30, 2**29)
    assert kinds(list(supervisor.train(todo[1:]))) == ["done"]


def test_a_process_that_has_grown_is_replaced_before_the_next_run(
    store: Store,
    supervise: Supervise,
    mischief: Path,
) -> None:
    """Which is no failure: the run that grew it is done."""
    todo = jobs(planned(store, "init", replicates=6), "init")
    for replicate in range(2, 4):
        (mischief / f"leak-{replicate}").touch()
    events = list(supervise(memory_margin=100 * 2**20).train(todo))
    assert kinds(events) == ["done", "done", "done", "done", "replaced", "done", "done"]
    (said,) = [event for event in events if event.kind == "replaced"]
    assert said.id == todo[4].run.id
    assert re.fullmatch(r"its process had grown by 0\.\d\d GiB of main memory in 2 runs", said.message)
    used = processes(store, todo)
    assert len(set(used[:4])) == len(set(used[4:])) == 1 and used[3] != used[4]
    assert len(store.failures()) == 0


def test_what_a_process_builds_in_its_first_runs_is_no_leak() -> None:
    sizes = iter([100, 300, 350, 399, 401, 401])
    audit = memory.Audit(100, lambda: {"main": next(sizes)})
    assert [audit.grown() for _ in range(4)] == 4 * [None]
    assert audit.grown() == "its process had grown by 0.00 GiB of main memory in 3 runs"


def test_garbage_is_no_leak() -> None:
    sizes = iter([100, 100, 500, 100])
    audit = memory.Audit(100, lambda: {"main": next(sizes)})
    assert [audit.grown() for _ in range(3)] == 3 * [None]


@pytest.mark.parametrize(
    ("used", "available", "limit", "share", "ended"),
    [
        (50, 0, None, 0.5, False),
        (51, 0, None, 0.5, True),
        (51, 9, None, 0.5, True),
        (51, 10, None, 0.5, False),
        (51, 100, 51, 0.5, False),
        (52, 100, 51, 0.5, True),
    ],
)
def test_who_is_ended_for_want_of_memory(
    used: int, available: int, limit: int | None, share: float, ended: bool
) -> None:
    assert (memory.excess(used, memory.Machine(100, available), limit, share) is not None) == ended


def test_memory_is_that_of_this_machine_and_process() -> None:
    state = memory.machine()
    assert 0 < state.available <= state.total
    before = memory.anonymous([os.getpid()])
    held = b"x" * 2**27
    assert 2**26 < memory.anonymous([os.getpid()]) - before < 2**28
    assert len(held) == 2**27 and memory.anonymous([2**22 + 1]) == 0


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_may_have_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    folder = tmp_path / ("memory" if version == 1 else "") / "jobs"
    folder.mkdir(parents=True)
    names = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    limit, usage, cached = names if version == 1 else ("max", "current", "inactive_file")
    (folder / f"memory.{limit}").write_text("1000\n")
    (folder / f"memory.{usage}").write_text("950\n")
    (folder / "memory.stat").write_text(f"other 5\n{cached} 20\n")
    own = "4:memory:/jobs/own\n" if version == 1 else "0::/jobs/own\n"
    original = Path.read_text
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(
        Path, "read_text", lambda path, *rest: own if str(path) == "/proc/self/cgroup" else original(path, *rest)
    )
    assert memory.machine() == memory.Machine(1000, 70)
    (folder / f"memory.{limit}").write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    assert memory.machine().total > 2**20


def test_a_process_that_the_system_killed_for_want_of_memory(
    store: Store,
    supervise: Supervise,
    mischief: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = iter(range(1000))
    monkeypatch.setattr(memory, "oom_kills", lambda: next(counts))
    todo = pair(store)
    (mischief / "die-0").touch()
    assert kinds(list(supervise().train(todo))) == ["failed", "done"]
    row = failure(store)
    assert row["outcome"] == "out_of_memory"
    assert row["message"].startswith("the training process was killed by the system for want of memory")


def test_a_process_that_ended_between_two_runs_fails_neither(
    store: Store,
    supervise: Supervise,
) -> None:
    todo = pair(store)
    supervisor = supervise()
    assert kinds(list(supervisor.train(todo[:1]))) == ["done"]
    os.kill(supervisor._child.pid, 9)
    deadline = time.monotonic() + 60
    while supervisor._child.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert kinds(list(supervisor.train(todo[1:]))) == ["done"]
    assert len(store.failures()) == 0
