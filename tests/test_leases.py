"""Who trains what now: of any number of sweeps that claim a run one gets it, and a dead one's claim is taken over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.store import Store, StoreError, open_store
from orchestrator.store.files import Entry
from orchestrator.store.leases import Leases, sweeping
from orchestrator.store.local import LocalFiles
from tests import factory
from tests.store_contract import a_day_later

ROOT = Path(__file__).parents[1]
ID = "a" * 64
HOUR = 3600.0

CHILD = """
import sys
from orchestrator.store import open_store
from orchestrator.store.leases import Leases, sweeping
store = open_store(sys.argv[1])
with sweeping(store, seconds=3600.0) as sweep:
    leases = Leases(store, sweep.id, 3600.0)
    print("ready", flush=True)
    for id in sys.stdin:
        print(int(leases.claim(id.strip(), "slot")), flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


@pytest.fixture
def join(store: Store) -> Iterator[Callable[..., Leases]]:
    """Makes the leases of one more sweep of this process."""
    with ExitStack() as stack:

        def join(seconds: float = HOUR) -> Leases:
            return Leases(store, stack.enter_context(sweeping(store, seconds=seconds)).id, seconds)

        yield join


def file_of(leases: Leases, store: Store) -> Path:
    """The file that shows the sweep of some leases."""
    return Path(store.url, "sweeps", f"{leases._sweep}.json")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def race(sweeps: list[Leases], id: str) -> list[bool]:
    """What several sweeps get that claim a run at once."""
    barrier = threading.Barrier(len(sweeps))

    def claim(leases: Leases) -> bool:
        barrier.wait()
        return leases.claim(id, "x")

    with ThreadPoolExecutor(len(sweeps)) as pool:
        return list(pool.map(claim, sweeps))


def test_a_run_is_one_sweeps_until_it_is_released(join: Callable[..., Leases]) -> None:
    one, other = join(), join()
    assert one.claim(ID, "a")
    assert one.claim(ID, "b"), "a claim is the sweep's, whichever of its slots made it"
    assert not other.claim(ID, "c")
    assert other.claim("b" * 64, "c")
    other.release(ID)
    assert not other.claim(ID, "c")
    one.release(ID)
    assert other.claim(ID, "c")
    assert not one.claim(ID, "a")
    one.release(ID)
    assert not one.claim(ID, "a")


def test_a_later_process_of_a_sweep_has_its_claims(store: Store, join: Callable[..., Leases]) -> None:
    one, other = join(), join()
    assert one.claim(ID, "a")
    again = Leases(store, one._sweep, HOUR)
    assert again.claim(ID, "b")
    again.release(ID)
    assert other.claim(ID, "c")


def test_of_many_threads_one_gets_each_run(join: Callable[..., Leases]) -> None:
    sweeps = [join() for _ in range(8)]
    for id in ("a" * 64, "b" * 64, "c" * 64):
        for _ in range(4):  # released and claimed again
            won = race(sweeps, id)
            assert won.count(True) == 1
            sweeps[won.index(True)].release(id)


def children(store: Store, count: int) -> list[subprocess.Popen[str]]:
    """Sweeps in processes of their own, ready to claim the ids that they are sent."""
    command = [sys.executable, "-c", CHILD, store.url]
    started = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return started


def claim(process: subprocess.Popen[str], *ids: str) -> None:
    assert process.stdin is not None
    process.stdin.write("".join(f"{id}\n" for id in ids))
    process.stdin.flush()


def answers(process: subprocess.Popen[str], count: int) -> list[bool]:
    assert process.stdout is not None
    return [process.stdout.readline() == "1\n" for _ in range(count)]


def test_of_many_processes_one_gets_each_run(store: Store) -> None:
    ids = [f"{number:064x}" for number in range(40)]
    processes = children(store, 3)
    for process in processes:
        claim(process, *ids)
    won = [answers(process, len(ids)) for process in processes]
    assert [sum(each) for each in zip(*won, strict=True)] == [1] * len(ids)
    for process in processes:
        process.communicate()
    assert list(Path(store.url, "sweeps").iterdir()) == []


def test_a_killed_process_of_this_machine_holds_nothing(store: Store, join: Callable[..., Leases]) -> None:
    (process,) = children(store, 1)
    claim(process, ID)
    assert answers(process, 1) == [True]
    ours = join()
    assert not ours.claim(ID, "x")
    os.kill(process.pid, signal.SIGSTOP)
    assert not ours.claim(ID, "x"), "a stopped process is not a dead one"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ours.claim(ID, "x"), "a process that nobody has waited for yet is dead, too"
    process.communicate()
    assert ours.claim(ID, "x")


@pytest.mark.parametrize(("values", "taken"), [({"started": "1"}, True), ({"pid": 2**22 + 1}, True), ({}, False)])
def test_a_process_is_known_by_its_start(
    store: Store, join: Callable[..., Leases], values: dict[str, Any], taken: bool
) -> None:
    one, other = join(), join()
    assert one.claim(ID, "a")
    change(file_of(one, store), **values)
    assert other.claim(ID, "b") is taken


@pytest.mark.parametrize("values", [{"started": "1"}, {"pid": 1}])
def test_processes_of_other_machines_are_not_looked_for_here(
    store: Store, join: Callable[..., Leases], values: dict[str, Any]
) -> None:
    one, other = join(), join()
    assert one.claim(ID, "a")
    change(file_of(one, store), host="elsewhere", **values)
    assert not other.claim(ID, "b")


def test_a_sweep_without_a_heartbeat_is_dead_after_its_own_time(store: Store, join: Callable[..., Leases]) -> None:
    one, other = join(HOUR), join(1.0)
    assert one.claim(ID, "a")
    change(file_of(one, store), host="elsewhere")
    age(file_of(one, store), HOUR - 600)
    assert not other.claim(ID, "b"), "its time is what it declared, not what the other's is"
    age(file_of(one, store), HOUR + 600)
    assert other.claim(ID, "b")


def test_a_sweep_that_was_taken_for_dead_learns_it(store: Store, join: Callable[..., Leases]) -> None:
    one, other, third = join(), join(), join()
    assert one.claim(ID, "a")
    content = file_of(one, store).read_bytes()
    file_of(one, store).unlink()
    assert other.claim(ID, "b")
    file_of(one, store).write_bytes(content)  # its heartbeat is back
    assert not one.claim(ID, "a")
    one.release(ID)
    assert not one.claim(ID, "a") and not third.claim(ID, "c")
    assert other.claim(ID, "b")
    other.release(ID)
    assert third.claim(ID, "c")


def test_of_many_that_take_over_one_does(store: Store, join: Callable[..., Leases]) -> None:
    for number in range(5):
        id = f"{number:064x}"
        dead = join()
        assert dead.claim(id, "a")
        file_of(dead, store).unlink()
        sweeps = [join() for _ in range(6)]
        won = race(sweeps, id)
        assert won.count(True) == 1
        assert [leases.claim(id, "x") for leases in sweeps] == won


def test_the_claims_of_a_sweep_that_ended_are_free(store: Store, join: Callable[..., Leases]) -> None:
    with sweeping(store, seconds=HOUR) as sweep:
        assert Leases(store, sweep.id, HOUR).claim(ID, "a")
        ours = join()
        assert not ours.claim(ID, "b")
    assert ours.claim(ID, "b")


class Shifted(LocalFiles):
    """Files of a server whose clock is wrong."""

    def stat(self, path: str) -> Entry | None:
        entry = super().stat(path)
        return entry and Entry(entry.name, entry.size, entry.modified - 10**9 * 86_400)


def test_no_clock_but_the_stores_counts(
    store: Store, join: Callable[..., Leases], monkeypatch: pytest.MonkeyPatch
) -> None:
    shifted = Store(store.url, Shifted(Path(store.url)))
    one, other = join(), Leases(shifted, "other", HOUR)
    assert one.claim(ID, "a")
    change(file_of(one, store), host="elsewhere")
    for shift in (-86_400, 86_400):
        now = time.time() + shift
        monkeypatch.setattr(time, "time", lambda now=now: now)
        monkeypatch.setattr(time, "time_ns", lambda now=now: int(now * 1e9))
        assert not other.claim(ID, "b")
        monkeypatch.undo()
    age(file_of(one, store), HOUR + 600)
    assert other.claim(ID, "b")


def test_a_heartbeat_comes_as_long_as_the_sweep_lasts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put, refused = LocalFiles.put, threading.Event()

    def refusing(self: LocalFiles, path: str, *arguments: Any, **options: Any) -> None:
        if path.startswith("sweeps/") and not refused.is_set():
            refused.set()
            raise StoreError("for a moment there is no store")
        put(self, path, *arguments, **options)

    with sweeping(store, seconds=0.2) as sweep:
        path = Path(store.url, "sweeps", f"{sweep.id}.json")
        shown = json.loads(path.read_text())
        assert (shown["pid"], shown["seconds"], shown["heartbeat"]) == (os.getpid(), 0.2, 0)
        monkeypatch.setattr(LocalFiles, "put", refusing)
        assert refused.wait(60)
        beats = json.loads(path.read_text())["heartbeat"]
        deadline = time.monotonic() + 60
        while json.loads(path.read_text())["heartbeat"] < beats + 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not path.exists()
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_a_store_that_refuses_the_first_heartbeat_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store in"), sweeping(open_store(tmp_path / "none")):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"sweep": 7}'])
def test_a_damaged_claim_is_taken_over(store: Store, join: Callable[..., Leases], content: bytes) -> None:
    store.files.put(f"leases/{ID}.1.json", content)
    one, other = join(), join()
    assert one.claim(ID, "a")
    assert not other.claim(ID, "b")


@pytest.mark.parametrize("content", [b"", b'{"seconds": "long"}'])
def test_a_damaged_sweep_lives_by_its_heartbeat(store: Store, join: Callable[..., Leases], content: bytes) -> None:
    one, other = join(), join()
    assert one.claim(ID, "a")
    file_of(one, store).write_bytes(content)
    assert not other.claim(ID, "b")
    age(file_of(one, store), HOUR + 600)
    assert other.claim(ID, "b")


def test_the_claims_of_a_recorded_run_are_deleted(store: Store, join: Callable[..., Leases]) -> None:
    fakes = factory.plan(sources=["init"], replicates=3)
    first, second, third = (fake.run.id for fake in fakes)
    one, other = join(), join()
    for id in (first, second, third):
        assert one.claim(id, "a")
        one.release(id)
        assert other.claim(id, "b")
    factory.fill(store, fakes[:2])
    other.release(first)
    other.release(third)
    names = [entry.name for entry in store.files.entries("leases")]
    assert names == [f"{id}.{number}.json" for id in sorted((second, third)) for number in (1, 2)]
    store.tidy()  # as after a kill: the second was never released
    assert [entry.name for entry in store.files.entries("leases")] == [f"{third}.{number}.json" for number in (1, 2)]
    assert len(store.files.entries("sweeps")) == 2


def test_heartbeats_of_the_dead_are_tidied_away_in_time(
    store: Store, join: Callable[..., Leases], monkeypatch: pytest.MonkeyPatch
) -> None:
    join()
    store.tidy()
    assert len(store.files.entries("sweeps")) == 1
    a_day_later(monkeypatch)
    store.tidy()
    assert store.files.entries("sweeps") == []
