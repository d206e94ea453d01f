"""Which runs go together, and in which order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.launch.blocks import BLOCK_SECONDS, Blocks, Durations
from orchestrator.launch.jobs import configuration, jobs
from orchestrator.plan import Plan, Planned
from orchestrator.plan import plan as make_plan
from orchestrator.store import Store, open_store
from protocols.run import Run
from tests.fakes import TRAINER, planned, protocol


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def names(block: Sequence[Planned]) -> list[tuple[str, str, int]]:
    return [(entry.run.trainer, entry.source, entry.run.replicate) for entry in block]


def blocks_of(plan: Plan, *, slots: int, seconds: float) -> list[list[tuple[str, str, int]]]:
    """Every block, as (trainer, source, replicate) of its runs."""
    blocks = Blocks(plan.missing, slots, Durations(lambda run: seconds))
    handed = []
    while block := blocks.next():
        handed.append(names(block))
    assert len(blocks) == 0
    return handed


def test_every_run_is_in_one_block_of_one_cell(store: Store) -> None:
    plan = planned(store, "init", "shuffle", "onebit", replicates=7)
    for slots, seconds in ((1, 0.0), (2, 3.0), (3, 100.0), (50, 0.1)):
        handed = blocks_of(plan, slots=slots, seconds=seconds)
        assert sorted(sum(handed, [])) == sorted(names(plan.missing))
        assert all(len({source for _, source, _ in block}) == 1 for block in handed)


def test_long_runs_come_alone_and_short_ones_together(store: Store) -> None:
    plan = planned(store, "init", "shuffle", replicates=40)
    assert {len(block) for block in blocks_of(plan, slots=2, seconds=BLOCK_SECONDS)} == {1}
    sizes = [len(block) for block in blocks_of(plan, slots=2, seconds=BLOCK_SECONDS / 5)]
    assert sizes[:3] == [5, 5, 5]


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_blocks_leave_work_for_every_slot(store: Store, slots: int) -> None:
    plan = planned(store, "init", "shuffle", replicates=40)
    left = len(plan.missing)
    for block in blocks_of(plan, slots=slots, seconds=0.0):
        assert len(block) <= -(-left // (2 * slots))
        left -= len(block)


def test_rounds_go_through_cells_and_back_through_trainers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = dataclasses.replace(__import__("tests.fake_trainer").fake_trainer.trainer, name="twin")
    monkeypatch.setattr("tests.fake_trainer.twin", twin, raising=False)
    other = "tests.fake_trainer:twin"
    plan = planned(store, "onebit", "init", replicates=3, trainers=(TRAINER, other))
    handed = [block[0] for block in blocks_of(plan, slots=2, seconds=100.0)]
    order = ("none", "init", "onebit")
    assert handed == [
        *((trainer, source, 0) for trainer in (TRAINER, other) for source in order),
        *((trainer, source, 1) for trainer in (other, TRAINER) for source in order),
        *((trainer, source, 2) for trainer in (TRAINER, other) for source in order),
    ]


def prioritised(store: Store, **priorities: int) -> Plan:
    fake = protocol(("init", "shuffle", "augment"), replicates=3)
    cells = tuple(dataclasses.replace(cell, priority=priorities.get(cell.source, 0)) for cell in fake.cells)
    return make_plan(dataclasses.replace(fake, cells=cells), store)


def test_cells_of_a_higher_priority_come_first_with_their_control(store: Store) -> None:
    plan = prioritised(store, shuffle=2, augment=1)
    handed = [source for block in blocks_of(plan, slots=1, seconds=100.0) for _, source, _ in block]
    assert handed == ["none", "shuffle"] * 3 + ["augment"] * 3 + ["init"] * 3
    plain = prioritised(store)
    assert {entry.id for entry in plain.planned} == {entry.id for entry in plan.planned}, "a priority changed an id"


def test_cells_that_come_to_the_same_runs_have_the_highest_of_their_priorities(store: Store) -> None:
    fake = protocol(("init",), replicates=2)
    low, high = (dataclasses.replace(fake.cells[0], priority=priority, replicates=4 - priority) for priority in (0, 2))
    for cells in ((low, high), (high, low)):
        entries = make_plan(dataclasses.replace(fake, cells=cells), store).planned
        assert {entry.priority for entry in entries} == {2}
        assert sum(entry.source == "init" for entry in entries) == 4


def mixed(store: Store, *, long: int, short: int) -> tuple[list[Planned], Durations]:
    """Runs of 30 s and runs of 1 s, the short ones first."""
    runs = [entry for entry in planned(store, "init", replicates=short).missing if entry.source == "init"]
    runs += [entry for entry in planned(store, "init", replicates=long, epochs=9).missing if entry.source == "init"]
    return runs, Durations(lambda run: 30.0 if run.recipe.epochs == 9 else 1.0)


def test_no_long_run_starts_last(store: Store) -> None:
    runs, durations = mixed(store, long=4, short=40)
    blocks = Blocks(runs, 4, durations)
    order = []
    while block := blocks.next():
        order += [entry.run.recipe.epochs for entry in block]
    last = max(number for number, epochs in enumerate(order) if epochs == 9)
    after = order[last + 1 :]
    assert order.count(9) == 4 and len(after) >= 20, order


def test_runs_that_would_not_end_in_time_are_left(store: Store) -> None:
    runs, durations = mixed(store, long=2, short=3)
    blocks = Blocks(runs, 1, durations)
    assert len(blocks.next(within=0.5)) == 1, "a guess keeps no run from being started"
    for entry in runs:
        durations.learn(entry.run, durations.estimate(entry.run))
    assert {entry.run.recipe.epochs for entry in blocks.next(within=29.0)} == {3}
    assert blocks.next(within=0.5) == [] and len(blocks) > 0
    while block := blocks.next(within=29.0):
        assert {entry.run.recipe.epochs for entry in block} == {3}
    assert len(blocks) in (1, 2) and blocks.next(within=30.0) != []


def test_a_block_is_no_longer_than_the_time_that_is_left(store: Store) -> None:
    runs = planned(store, "init", replicates=20).missing
    durations = Durations(lambda run: 30.0)
    durations.learn(runs[0].run, 1.0)
    assert len(Blocks(runs, 1, durations).next(within=3.5)) == 3


def test_runs_that_were_put_back_come_before_new_ones_once_they_have_rested(store: Store) -> None:
    plan = planned(store, "init", "shuffle", replicates=6)
    clock = [0.0]
    blocks = Blocks(plan.missing, 1, Durations(lambda run: 2.0), clock=lambda: clock[0])
    total = len(blocks)
    first = blocks.next()
    for entry in first:
        blocks.put_back(entry, 5.0)
    assert len(blocks) == total and blocks.resting()
    assert not set(names(blocks.next())) & set(names(first))
    clock[0] = 5.0
    again: list[Planned] = []
    while blocks.resting():
        again += blocks.next()
    assert names(again) == names(first)


def test_nothing_rests_that_would_not_fit_in_any_more(store: Store) -> None:
    run = planned(store, "init").missing[0]
    clock = [0.0]
    durations = Durations(lambda run: 100.0)
    blocks = Blocks((), 1, durations, clock=lambda: clock[0])
    blocks.put_back(run, 5.0)
    assert blocks.resting(50.0), "a guess keeps no run from being started"
    durations.learn(run.run, 100.0)
    assert [blocks.resting(within) for within in (50.0, 104.0, 106.0)] == [False, False, True]
    clock[0] = 10.0
    assert blocks.next(within=50.0) == [] and not blocks.resting(50.0) and blocks.resting(100.0)


def test_runs_of_several_cells_that_were_put_back_come_in_blocks_of_one(store: Store) -> None:
    plan = planned(store, "init", "shuffle", replicates=3)
    blocks = Blocks((), 1, Durations(lambda run: 0.1))
    for entry in plan.missing:
        blocks.put_back(entry)
    handed = []
    while block := blocks.next():
        assert len({entry.source for entry in block}) == 1
        handed += names(block)
    assert sorted(handed) == sorted(names(plan.missing))


def test_runs_can_be_added_at_any_time(store: Store) -> None:
    few, more = planned(store, "init", replicates=2), planned(store, "init", "shuffle", replicates=4)
    known = {entry.id for entry in few.missing}
    blocks = Blocks(few.missing, 1, Durations(lambda run: 100.0))
    handed = blocks.next()
    blocks.add([entry for entry in more.missing if entry.id not in known])
    while block := blocks.next():
        handed += block
    assert sorted(names(handed)) == sorted(names(more.missing))


def test_what_is_left_is_added_up(store: Store) -> None:
    runs, durations = mixed(store, long=2, short=3)
    blocks = Blocks(runs, 1, durations)
    assert blocks.remaining() == 63.0
    handed = blocks.next()
    left = 63.0 - sum(durations.estimate(entry.run) for entry in handed)
    assert blocks.remaining() == pytest.approx(left)
    blocks.put_back(handed[0], 100.0)
    assert blocks.remaining() == pytest.approx(left + durations.estimate(handed[0].run))
    assert math.isfinite(blocks.remaining())


def test_durations_are_learned_from_similar_runs(store: Store) -> None:
    run = planned(store, "init").missing[0].run
    like = planned(store, "init").missing[-1].run
    unlike = planned(store, "init", epochs=9).missing[0].run
    durations = Durations(lambda run: 100.0)
    assert (durations.estimate(run), durations.known(run)) == (100.0, None)
    durations.learn(run, 1.0)
    durations.learn(run, 3.0)
    assert (durations.estimate(like), durations.estimate(unlike)) == (2.0, 100.0)
    assert (durations.known(like), durations.known(unlike)) == (2.0, None)


# A block's way to its slot


def test_a_slot_makes_the_same_jobs_of_a_configuration(store: Store) -> None:
    plan = planned(store, "init", "onebit", "library", replicates=3, library="kernel")
    for source in ("none", "init", "onebit", "library"):
        block = [entry for entry in plan.missing if entry.source == source]
        failed = block[1].id
        made = jobs(configuration(block, failed={failed: 2}, avoid={}))
        assert [job.run for job in made] == [entry.run for entry in block]
        assert [job.failed for job in made] == [0, 2, 0][: len(block)]
        assert {job.source for job in made} == {source}


def test_a_machine_with_other_code_is_told_from_a_right_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    block = planned(store, "init").missing[:1]
    config = configuration(block, failed={}, avoid={})
    monkeypatch.setattr(Run, "id", property(lambda run: "0" * 64))
    with pytest.raises(RuntimeError, match="another version of the code"):
        jobs(config)
