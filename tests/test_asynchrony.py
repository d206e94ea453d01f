"""Schedules of asynchronous training: pure functions, whatever trains by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.run import Run
from tests.runs import make_run
from trainers.asynchrony import Commits, Schedule, from_log, simulate


def asynchronous(workers: int = 4, **fields: Any) -> Run:
    return make_run(async_workers=workers, **fields)


def epoch(run: Run, number: int = 0, steps: int = 200) -> Commits:
    commits = Schedule(run).epoch(number, steps)
    assert commits is not None
    return commits


def test_one_worker_is_synchronous() -> None:
    commits = epoch(asynchronous(1))
    assert (commits.batches == np.arange(200)).all()
    assert (commits.staleness == 0).all()


@given(st.integers(1, 9), st.lists(st.floats(0.01, 9), min_size=1, max_size=40))
def test_every_batch_is_applied_once_and_never_before_it_was_read(workers: int, times: list[float]) -> None:
    commits = simulate(np.array(times), workers)
    assert sorted(commits.batches) == list(range(len(times)))
    assert (commits.reads <= np.arange(len(times))).all() and (commits.reads >= 0).all()
    for worker in range(workers):
        own = np.flatnonzero(commits.workers == worker)
        assert list(commits.reads[own[1:]]) == list(own[:-1] + 1), "it reads right after it was applied"
        assert list(commits.batches[own]) == sorted(commits.batches[own])
    assert from_log(commits.log(), len(times)).log().tolist() == commits.log().tolist()


def test_a_slow_batch_is_overtaken_until_its_time_has_come() -> None:
    """Two workers; the first is busy until 3 and then comes before the second, which ends its third batch then."""
    commits = simulate(np.array([3.0, 1.0, 1.0, 1.0, 1.0]), 2)
    assert commits.log().tolist() == [[1, 1, 0], [1, 2, 1], [0, 0, 0], [1, 3, 2], [0, 4, 3]]


def test_staleness_is_what_the_number_of_workers_makes_it() -> None:
    """With K workers always at work, a gradient waits for K - 1 others on average."""
    for workers in (2, 4, 8):
        staleness = epoch(asynchronous(workers), steps=4000).staleness
        assert staleness.mean() == pytest.approx(workers - 1, rel=0.02)
        assert staleness.max() > workers


def test_a_schedule_depends_on_its_seed_and_epoch_alone() -> None:
    held = epoch(asynchronous()).log()
    assert (epoch(asynchronous(varies=("init", "shuffle"), replicate=3)).log() == held).all()
    assert (epoch(asynchronous(trainer="tensorflow")).log() == held).all()
    assert (epoch(asynchronous(), 1).log() != held).any()
    varied = [epoch(asynchronous(varies=("async",), replicate=replicate)).log().tobytes() for replicate in range(3)]
    assert len({held.tobytes(), *varied}) == 4


def test_modes() -> None:
    race = asynchronous(varies=("async",), asynchrony="real")
    assert Schedule(race).mode == "real" and Schedule(race).epoch(0, 8) is None
    assert Schedule(asynchronous()).mode == "simulated"
    log = np.concatenate([epoch(race_held, number, 8).log() for race_held in (asynchronous(),) for number in (0, 1)])
    replay = Schedule(race, log)
    second = replay.epoch(1, 8)
    assert replay.mode == "replay" and second is not None
    assert (second.log() == log[8:]).all()


@pytest.mark.parametrize("fault", ["short", "twice", "future", "negative"])
def test_an_impossible_log_is_refused(fault: str) -> None:
    log = epoch(asynchronous(), steps=8).log()
    if fault == "short":
        log = log[:7]
    elif fault == "twice":
        log[1, 1] = log[0, 1]
    else:
        log[2, 2] = 3 if fault == "future" else -1
    with pytest.raises(ValueError, match="log"):
        from_log(log, 8)
