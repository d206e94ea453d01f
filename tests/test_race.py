"""Racing threads: turns are taken one at a time, and a failure ends the race."""

from __future__ import annotations

import threading
import time

import pytest

from trainers.race import race


def test_reads_and_commits_take_turns_and_the_log_says_what_happened() -> None:
    inside, seen = threading.Semaphore(1), []

    def turn(kind: str, number: int) -> int:
        assert inside.acquire(blocking=False), "two threads in one turn"
        time.sleep(0.0005)
        seen.append((kind, number))
        inside.release()
        return len([entry for entry in seen if entry[0] == "commit"])

    def gradient(batch: int, version: int) -> tuple[int, int]:
        time.sleep(0.004 if batch % 3 == 0 else 0.001)
        return batch, version

    found: list[tuple[int, int]] = []

    def commit(step: int, gradient: tuple[int, int]) -> None:
        found.append(gradient)
        turn("commit", step)

    commits = race(30, 3, lambda batch: turn("read", batch), gradient, commit)
    assert [number for kind, number in seen if kind == "read"] == list(range(30)), "batches in their order"
    assert [number for kind, number in seen if kind == "commit"] == list(range(30)), "steps in their order"
    assert list(zip(commits.batches, commits.reads, strict=True)) == found
    assert sorted(commits.batches) == list(range(30)) and set(commits.workers) == {0, 1, 2}
    assert commits.staleness.min() >= 0 and commits.staleness.mean() > 0.5


def test_a_failing_worker_ends_the_race_with_its_error() -> None:
    before, committed = threading.active_count(), []

    def gradient(batch: int, snapshot: None) -> int:
        if batch == 5:
            raise ArithmeticError("batch 5")
        time.sleep(0.001)
        return batch

    with pytest.raises(ArithmeticError, match="batch 5"):
        race(1000, 4, lambda batch: None, gradient, lambda step, found: committed.append(found))
    assert threading.active_count() == before
    assert len(committed) < 20


def test_more_workers_than_batches() -> None:
    assert sorted(race(2, 5, lambda batch: None, lambda batch, _: batch, lambda step, _: None).batches) == [0, 1]
