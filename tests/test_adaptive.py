"""Adaptive replicates: looks are taken once, grants follow from them alone, and the interval keeps its promise."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from rich.console import Console

from orchestrator import catalog
from orchestrator.adaptive import Looking, take
from orchestrator.analysis import load
from orchestrator.analysis.intervals import spread
from orchestrator.cli.app import app
from orchestrator.cli.training import chosen
from orchestrator.launch import sweep
from orchestrator.looks import AT_MOST, GOES_ON, NARROW, Look, grant, read_looks
from orchestrator.plan import Plan, Planned, plan
from orchestrator.report import write_latex, write_studies, write_table
from orchestrator.slot.context import Settings
from orchestrator.slot.worker import execute
from orchestrator.store import Store, StoreError, open_store
from protocols import DatasetSpec, Protocol, Recipe, Until, apply_settings, grid, load_protocol
from tests import factory, fakes

SHORT = Until(width=0.5, at_least=4, at_most=10, looks=(4, 6, 10))
QUIET, LOUD = 0.005, 5.0
"""Accuracy SDs, in percentage points, far below and far above what the width asks for."""


def adaptive(until: Until = SHORT, sources: Iterable[str] = ("init", "shuffle"), **fields: Any) -> Protocol:
    base = fakes.protocol(tuple(sources), replicates=until.at_most)
    return dataclasses.replace(base, until=until, control_replicates=2, **fields)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"), create=True)


def accuracy(entry: Planned, sd: float) -> float:
    """A share of right answers, drawn for the run, of an SD in percentage points."""
    rng = np.random.default_rng(int(entry.id[:8], 16))
    return 0.9 + sd / 100 * float(rng.standard_normal())


def commit(store: Store, entry: Planned, value: float | None) -> None:
    """A record of that accuracy; None: it diverged."""
    fake = factory.Fake(entry.run, entry.source)
    small = {"examples": 4, "classes": 2}
    if value is None:
        store.commit(factory.record(fake, outcome="diverged", accuracy=None, cross_entropy=None, **small))
    else:
        store.commit(factory.record(fake, accuracy=value, **small))


def train(store: Store, missing: Iterable[Planned], sds: Mapping[str, float]) -> list[str]:
    """Records of accuracies with the SD of their source; returns the ids."""
    ids = []
    for entry in missing:
        commit(store, entry, accuracy(entry, sds.get(entry.source, 0.0)))
        ids.append(entry.id)
    return ids


def finish(protocol: Protocol, store: Store, sds: Mapping[str, float]) -> Plan:
    """All of a study, as one driver would train it."""
    found = plan(protocol, store)
    looking, missing = Looking(found, store), list(found.missing)
    missing += looking.after(())
    while missing:
        missing = looking.after(train(store, missing, sds))
    return plan(protocol, store)


def counts(found: Plan) -> dict[str, int]:
    return {
        source: sum(entry.source == source for entry in found.planned)
        for source in dict.fromkeys(entry.source for entry in found.planned)
    }


def looks_of(store: Store, until: Until = SHORT) -> dict[tuple[str, int], Look]:
    """By source and number."""
    return {(look.source, look.look): look for look in read_looks(store.looks(until.declaration)).values()}


# What a look finds


def test_a_quiet_cell_stops_early_and_a_loud_one_at_the_last_look(store: Store) -> None:
    found = finish(adaptive(), store, {"init": LOUD, "shuffle": QUIET})
    assert counts(found) == {"none": 2, "init": 10, "shuffle": 4}
    assert not found.missing and found.further == 0
    looks = looks_of(store)
    assert {key: look.decision for key, look in looks.items()} == {
        ("init", 1): GOES_ON,
        ("init", 2): GOES_ON,
        ("init", 3): AT_MOST,
        ("shuffle", 1): NARROW,
    }
    cell = next(entry for entry in found.planned if entry.source == "init")
    values = [accuracy(entry, LOUD) for entry in found.planned if entry.source == "init"][:6]
    estimate, second = spread(100 * np.array(values), SHORT.level), looks["init", 2]
    assert (second.sd, second.low, second.high) == pytest.approx((estimate.value, estimate.low, estimate.high))
    assert (second.n, second.replicates, second.looks, second.level) == (6, 6, 3, SHORT.level)
    assert second.cell == cell.id and second.group == cell.group and second.reason == ""
    assert second.identity["architecture"] == "tests.fake_trainer:architecture"
    assert second.identity["varies"] == ["init"]


def test_a_look_says_what_it_left_out(store: Store) -> None:
    found = plan(adaptive(sources=("init",)), store)
    looking = Looking(found, store)
    first = [entry for entry in found.planned if entry.source == "init"]
    commit(store, first[1], None)
    train(store, (first[0], first[3]), {"init": QUIET})
    granted = looking.after([entry.id for entry in found.planned])  # the third replicate failed for good
    look = looks_of(store)["init", 1]
    assert (look.n, look.diverged, look.absent) == (2, (1,), (2,))
    assert look.decision == GOES_ON and look.reason == "an interval of an SD needs at least 4 replicates"
    assert (look.low, look.high) == (None, None) and look.sd is not None
    assert [entry.run.replicate for entry in granted] == [4, 5]


def test_a_cell_that_does_not_vary_goes_on_with_the_reason(store: Store) -> None:
    found = finish(adaptive(sources=("init",)), store, {"init": 0.0})
    assert counts(found)["init"] == 10
    looks = looks_of(store)
    assert [looks["init", number].decision for number in (1, 2, 3)] == [GOES_ON, GOES_ON, AT_MOST]
    assert looks["init", 1].reason == "all 4 values are equal" and looks["init", 1].sd == 0


def test_a_look_waits_for_the_last_of_its_replicates(store: Store) -> None:
    found = plan(adaptive(), store)
    looking = Looking(found, store)
    ids = train(store, found.missing, {"init": LOUD, "shuffle": LOUD})
    own = [entry.id for entry in found.planned if entry.source == "init"]
    assert looking.after([id for id in ids if id != own[2]]) != []
    assert set(looks_of(store)) == {("shuffle", 1)}
    assert looking.after(["0" * 64]) == [], "what is none of the plan's is overlooked"
    assert {entry.source for entry in looking.after([own[2]])} == {"init"}
    assert looking.after([own[2]]) == [], "and nothing is granted twice"


@pytest.mark.parametrize("refusing", ["record_look", "looks", "table", "has"])
def test_a_store_that_refuses_for_a_while_loses_no_look_and_no_grant(
    store: Store, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    found = plan(adaptive(), store)
    looking = Looking(found, store)
    ids = train(store, found.missing, {"init": LOUD, "shuffle": LOUD})
    times = itertools.count()

    def refuses(*arguments: Any, **keywords: Any) -> Any:
        if next(times) == (1 if refusing in ("record_look", "has") else 0):  # in the midst of it, where there is one
            raise StoreError("cannot do that: Connection timed out")
        return getattr(type(store), refusing)(store, *arguments, **keywords)

    monkeypatch.setattr(store, refusing, refuses)
    with pytest.raises(StoreError):
        looking.after(ids)
    granted = looking.after(())
    assert sorted((entry.source, entry.run.replicate) for entry in granted) == [
        (source, replicate) for source in ("init", "shuffle") for replicate in (4, 5)
    ]
    assert set(looks_of(store)) == {("init", 1), ("shuffle", 1)} and looking.after(()) == []


def test_only_failed_runs_are_tried_again_where_that_is_asked_for(store: Store) -> None:
    """A look falls due, and what it would grant has not failed."""
    found = plan(adaptive(sources=("init",)), store)
    (last,) = [entry for entry in found.missing if entry.source == "init" and entry.run.replicate == 3]
    train(store, [entry for entry in found.missing if entry.id != last.id], {"init": LOUD})
    store.fail(factory.failure(factory.Fake(last.run, last.source)))
    again = plan(found.protocol, store)
    few = chosen(again, store, "failed")
    assert [entry.id for entry in few.missing] == [last.id]
    train(store, few.missing, {"init": LOUD})
    assert Looking(few, store).after([last.id]) == [] and looks_of(store) == {}
    assert [entry.run.replicate for entry in Looking(again, store).after([last.id])] == [4, 5]


# Once taken


def test_a_look_is_never_taken_again_with_other_numbers(store: Store) -> None:
    protocol = adaptive(sources=("init",))
    found = plan(protocol, store)
    first = [entry for entry in found.planned if entry.source == "init"]
    train(store, first[:3], {"init": LOUD})
    Looking(found, store).after([entry.id for entry in found.planned])
    before = looks_of(store)["init", 1]
    commit(store, first[3], 0.1)  # it ended after all
    again = plan(protocol, store)
    Looking(again, store).after([first[3].id])
    assert looks_of(store) == {("init", 1): before}
    assert before.absent == (3,)
    assert not store.record_look(before.declaration, before.cell, 1, {**vars(before), "sd": 0.0})
    assert looks_of(store) == {("init", 1): before}


def test_an_unreadable_look_is_moved_away_and_taken_again(store: Store, tmp_path: Path) -> None:
    protocol = adaptive(sources=("init",))
    finish(protocol, store, {"init": QUIET})
    (path,) = (tmp_path / "store" / "looks").iterdir()
    look = looks_of(store)["init", 1]
    for damage in (b"", path.read_bytes()[:40], b"[]", json.dumps({**vars(look), "look": 2}).encode()):
        path.write_bytes(damage)
        found = plan(protocol, open_store(str(tmp_path / "store")))
        assert counts(found)["init"] == 4 and not found.missing
        Looking(found, store).after(())
        assert dataclasses.replace(looks_of(store)["init", 1], time="") == dataclasses.replace(look, time="")
    assert (tmp_path / "store" / "corrupt" / path.name).exists()


def test_another_width_or_schedule_begins_afresh(store: Store) -> None:
    finish(adaptive(sources=("init",)), store, {"init": LOUD})
    wide = dataclasses.replace(SHORT, width=100.0)
    found = plan(adaptive(wide, sources=("init",)), store)
    assert counts(found)["init"] == 4 and found.unplanned == 6
    Looking(found, store).after(())
    assert looks_of(store, wide)["init", 1].decision == NARROW
    assert len(looks_of(store)) == 3


def test_another_budget_goes_on_from_the_same_looks(store: Store) -> None:
    sds = {"init": LOUD, "shuffle": LOUD}
    tight = dataclasses.replace(SHORT, budget=10)
    assert sum(counts(finish(adaptive(tight), store, sds)).values()) == 2 + 10
    found = finish(adaptive(), store, sds)
    assert counts(found) == {"none": 2, "init": 10, "shuffle": 10}


# Whoever takes them


def test_a_sweep_that_is_stopped_at_any_moment_comes_to_the_same(store: Store, tmp_path: Path) -> None:
    protocol, sds = adaptive(), {"init": 0.35, "shuffle": QUIET}
    calm = finish(protocol, store, sds)
    other = open_store(str(tmp_path / "other"), create=True)
    rng = np.random.default_rng(0)
    for _ in itertools.count():
        found = plan(protocol, other)
        looking = Looking(found, other)
        missing = [*found.missing, *looking.after(())]
        if not missing:
            break
        some = rng.permutation(len(missing))[: rng.integers(1, 4)]
        ids = train(other, [missing[index] for index in some], sds)
        if rng.random() < 0.5:  # else it is stopped before the driver heard of them
            looking.after(ids)
    assert [entry.id for entry in plan(protocol, other).planned] == [entry.id for entry in calm.planned]
    one, two = looks_of(store), looks_of(other)
    assert {key: dataclasses.replace(look, time="") for key, look in one.items()} == {
        key: dataclasses.replace(look, time="") for key, look in two.items()
    }


def test_records_that_are_there_already_are_looked_at_step_by_step(store: Store) -> None:
    fixed = plan(dataclasses.replace(adaptive(), until=None), store)
    train(store, fixed.missing, {"init": LOUD, "shuffle": QUIET})
    found = plan(adaptive(), store)
    assert not found.missing and counts(found) == {"none": 2, "init": 4, "shuffle": 4}
    assert Looking(found, store).after(()) == [], "whatever was granted has a record"
    found = plan(adaptive(), store)
    assert counts(found) == {"none": 2, "init": 10, "shuffle": 4} and not found.missing
    assert looks_of(store)["init", 3].n == 10


def test_two_drivers_on_one_store_take_each_look_once(store: Store) -> None:
    sds = {"init": LOUD, "shuffle": LOUD}
    found = plan(adaptive(dataclasses.replace(SHORT, budget=16)), store)
    one, two = Looking(found, store), Looking(found, store)
    mine = [entry for entry in found.missing if entry.source != "shuffle"]
    theirs = [entry for entry in found.missing if entry.source == "shuffle"]
    assert len(one.after(train(store, mine, sds))) == 2, "both cells can afford the second look"
    assert len(two.after([*train(store, theirs, sds), *(entry.id for entry in mine)])) == 4
    taken = looks_of(store)
    assert set(taken) == {("init", 1), ("shuffle", 1)}
    one.after([entry.id for entry in theirs])
    assert looks_of(store) == taken


def test_a_protocol_without_looks_costs_nothing() -> None:
    class Nothing:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the store was asked for {name}")

    found = plan(fakes.protocol(), Records())
    assert Looking(found, Nothing()).after(["0" * 64]) == []  # type: ignore[arg-type]


class Records:
    """An empty store, as planning sees it."""

    def examined(self) -> tuple[set[str], dict[str, str]]:
        return set(), {}

    def looks(self, declaration: str) -> list[dict[str, Any]]:
        return []


# The budget


def look(cell: str, number: int, width: float, until: Until) -> Look:
    """A look that found an interval of that width; NaN: none."""
    last = number == len(until.schedule)
    decision = NARROW if width < until.width else AT_MOST if last else GOES_ON
    known = not math.isnan(width)
    return Look(
        declaration=until.declaration,
        cell=cell,
        identity={},
        group="",
        source="",
        look=number,
        looks=len(until.schedule),
        replicates=until.schedule[number - 1],
        n=until.schedule[number - 1],
        diverged=(),
        absent=(),
        sd=1.0,
        low=1.0 if known else None,
        high=1.0 + width if known else None,
        level=until.level,
        width=until.width,
        decision=decision,
        reason="",
        time="",
    )


def test_the_widest_intervals_get_what_is_left_of_the_budget() -> None:
    until = Until(width=0.5, at_least=4, at_most=20, looks=(4, 6, 20), budget=4 * 4 + 4 * 2 + 14)
    widths = {"a": 1.0, "b": 3.0, "c": math.nan, "d": 2.0}
    first = {(cell, 1): look(cell, 1, width, until) for cell, width in widths.items()}
    granted = grant(until, list(widths), first)
    assert granted.replicates == {"a": 6, "b": 6, "c": 6, "d": 6}, "all four can have 2 more"
    second = {(cell, 2): look(cell, 2, width, until) for cell, width in widths.items()}
    waiting = grant(until, list(widths), {**first, **dict(list(second.items())[:3])})
    assert waiting.replicates == granted.replicates, "one cell has not been looked at, and may have the widest"
    assert waiting.most == until.budget == 38
    done = grant(until, list(widths), {**first, **second})
    assert done.replicates == {"a": 6, "b": 20, "c": 6, "d": 6}, "one step of 14 is left"
    assert done.short == frozenset("acd")


def test_the_narrower_ones_stop_for_the_budgets_sake() -> None:
    until = Until(width=0.5, at_least=4, at_most=8, looks=(4, 8), budget=4 * 4 + 4 * 2 + 3)
    widths = {"a": 1.0, "b": 3.0, "c": math.nan, "d": 2.0}
    looks = {(cell, 1): look(cell, 1, width, until) for cell, width in widths.items()}
    granted = grant(until, list(widths), looks)
    assert granted.replicates == {"a": 4, "b": 8, "c": 4, "d": 8}
    assert granted.short == {"a", "c"} and granted.most == 4 * 4 + 4 * 2
    looks["b", 1] = look("b", 1, 0.1, until)
    assert grant(until, list(widths), looks).replicates == {"a": 8, "b": 4, "c": 4, "d": 8}


@pytest.mark.parametrize("seed", range(8))
def test_grants_do_not_hang_on_the_order_in_which_runs_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cells = [f"cell {number}" for number in range(6)]
    until = Until(width=0.5, at_least=4, at_most=18, budget=int(rng.integers(24, 110)))
    widths = {
        (cell, number): float(rng.choice([0.3, 1.0, rng.uniform(0.5, 9), math.nan], p=[0.2, 0.2, 0.5, 0.1]))
        for cell in cells
        for number in range(1, len(until.schedule) + 1)
    }
    ends = set()
    for _ in range(20):
        looks: dict[tuple[str, int], Look] = {}
        granted = grant(until, cells, looks)
        while True:
            due = [
                (cell, until.schedule.index(count) + 1)
                for cell, count in granted.replicates.items()
                if (cell, until.schedule.index(count) + 1) not in looks
            ]
            if not due:
                break
            cell, number = due[rng.integers(len(due))]
            looks[cell, number] = look(cell, number, widths[cell, number], until)
            before, granted = granted, grant(until, cells, looks)
            assert all(granted.replicates[cell] >= count for cell, count in before.replicates.items())
            assert sum(granted.replicates.values()) <= granted.most <= before.most <= until.budget  # type: ignore[operator]
        ends.add((tuple(granted.replicates.values()), granted.short))
        stopped = {cell for (cell, _), found in looks.items() if found.decision != GOES_ON}
        assert stopped | granted.short == set(cells), "every cell came to an end"
    assert len(ends) == 1


def test_a_budget_is_kept_by_a_study(store: Store) -> None:
    sources = ("init", "shuffle", "augment")
    until = dataclasses.replace(SHORT, budget=3 * 4 + 3 * 2 + 4)
    found = finish(adaptive(until, sources), store, {"init": 1.0, "shuffle": 20.0, "augment": 5.0})
    second = {source: look.spread for (source, number), look in looks_of(store).items() if number == 2}
    widest = max(second, key=second.__getitem__)
    assert counts(found) == {"none": 2, **dict.fromkeys(sources, 6), widest: 10}
    assert found.further == 0 and not found.missing


# What the interval promises

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

DRAWS: dict[str, Draw] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "t5": lambda rng, n: rng.standard_t(5, n) / math.sqrt(5 / 3),
}
CELLS = 1500
UNTIL = Until(width=0.5, at_least=6, at_most=48)
ERROR = math.sqrt(0.05 * 0.95 / CELLS)


def simulate(until: Until, draw: Draw, sd: float, seed: int) -> tuple[float, float]:
    """The share of cells whose interval at stopping covers the SD, and the mean number of replicates."""
    (cell,) = plan(adaptive(until, ("init",)), Records()).growing
    rng, covered, replicates = np.random.default_rng(seed), 0, 0
    for _ in range(CELLS):
        values = 0.9 + sd / 100 * draw(rng, until.at_most)
        for count in until.schedule:
            found = take(until, cell, list(values[:count]))
            if found.decision != GOES_ON:
                break
        assert found.low is not None and found.high is not None
        covered, replicates = covered + (found.low <= sd <= found.high), replicates + count
    return covered / CELLS, replicates / CELLS


@pytest.mark.parametrize(("name", "sd"), [("normal", 0.1), ("normal", 0.5), ("normal", 1.0), ("t5", 0.1), ("t5", 0.3)])
def test_the_interval_at_stopping_covers(name: str, sd: float) -> None:
    coverage, replicates = simulate(UNTIL, DRAWS[name], sd, seed=int(100 * sd))
    assert coverage >= 0.95 - 3 * ERROR
    assert (replicates < 12) == (sd == 0.1), "quiet cells take a fourth of what a fixed number would"


def test_heavy_tails_in_a_loud_cell_cost_less_than_with_a_fixed_number() -> None:
    """No interval of this kind covers 95 % there; looking and stopping makes it no worse."""
    fixed = Until(width=0.5, at_least=48, at_most=48)
    looked, _ = simulate(UNTIL, DRAWS["t5"], 1.0, seed=1)
    at_once, _ = simulate(fixed, DRAWS["t5"], 1.0, seed=1)
    assert looked >= at_once + ERROR
    assert looked >= 0.95 - 6 * ERROR


def test_the_usual_level_at_every_look_would_not_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Until, "level", 0.95)
    coverage, _ = simulate(UNTIL, DRAWS["normal"], 0.5, seed=2)
    assert coverage < 0.95 - 3 * ERROR


# What is reported


def test_a_report_uses_the_looks_level_and_shows_them(store: Store, tmp_path: Path) -> None:
    protocol = adaptive(dataclasses.replace(SHORT, budget=4 + 4 + 2 + 2), ("init", "shuffle", "augment"))
    own = dataclasses.replace(protocol.cells[2], replicates=5)
    protocol = dataclasses.replace(protocol, cells=(*protocol.cells[:2], own))
    found = finish(protocol, store, {"init": LOUD, "shuffle": QUIET, "augment": 1.0})
    sweep = load(store, protocol, found.planned)
    table = sweep.table().set_index("source")
    for source, level in (("init", SHORT.level), ("shuffle", SHORT.level), ("augment", 0.95)):
        values = [
            accuracy(entry, {"init": LOUD, "shuffle": QUIET, "augment": 1.0}[source])
            for entry in found.planned
            if entry.source == source
        ]
        expected = spread(100 * np.array(values), level)
        row = table.loc[source]
        assert (row["accuracy_sd_low"], row["accuracy_sd_high"]) == pytest.approx((expected.low, expected.high))
    assert table.loc["init", "n"] == 6 and table.loc["augment", "n"] == 5
    assert (
        "stopped at look 2 of 3 for the budget's sake, n = 6: interval of the accuracy SD at level 98.33 %"
        in table.loc["init", "notes"]
    )
    assert "stopped at look 1 of 3, n = 4: interval" in table.loc["shuffle", "notes"]
    assert "look" not in table.loc["augment", "notes"] + table.loc["none", "notes"]
    looks = sweep.looks()
    assert list(zip(looks["source"], looks["look"], looks["n"], looks["decision"], strict=True)) == [
        ("init", 1, 4, "goes on"),
        ("init", 2, 6, "budget"),
        ("shuffle", 1, 4, "narrow"),
    ]
    assert looks["accuracy_sd_high"].iloc[-1] - looks["accuracy_sd_low"].iloc[-1] < looks["width"].iloc[-1]
    output = io.StringIO()
    write_table(sweep, Console(file=output, width=100))
    text = " ".join(output.getvalue().split())
    assert "When did each cell stop?" in text and "1 of 3" in text and "for the budget's sake" in text
    assert "accuracy SDs at the level of each look, 98.33 %" in text
    assert "looks.csv" in {path.name for path in write_studies(sweep, tmp_path)}
    write_latex(sweep, tmp_path / "table.tex")
    assert "that were looked at: 98.33 %" in (tmp_path / "table.tex").read_text().splitlines()[0]


def test_an_unfinished_study_says_how_far_its_looks_are(store: Store) -> None:
    protocol = adaptive()
    found = plan(protocol, store)
    note = "not looked at yet: interval of the accuracy SD at level 98.33 %"
    table = load(store, protocol, found.planned).table().set_index("source")
    assert note in table.loc["init", "notes"]
    Looking(found, store).after(train(store, found.missing, {"init": LOUD, "shuffle": QUIET}))
    found = plan(protocol, store)
    commit(store, found.missing[0], 0.9)
    table = load(store, protocol, found.planned).table().set_index("source")
    assert (
        "goes on after look 1 of 3, n = 4: interval of the accuracy SD at level 98.33 %; 1 more since"
        in table.loc["init", "notes"]
    )
    alone = load(store, protocol).table().set_index("source")
    assert "goes on after look 1 of 3" in alone.loc["init", "notes"], "looks are known without a plan, too"
    fixed = load(store, dataclasses.replace(protocol, until=None)).table().set_index("source")
    assert "look" not in fixed.loc["init", "notes"]


# Real networks


def test_real_networks_save_replicates_where_it_is_quiet(store: Store) -> None:
    """After little training the initial weights decide, and dropout hardly matters."""
    until = Until(width=6.0, at_least=6, at_most=14, looks=(6, 10, 14))
    protocol = Protocol(
        name="digits",
        summary="",
        cells=grid(
            sources=("init", "dropout"),
            architectures=("dropnet",),
            datasets=(DatasetSpec(name="digits", train_size=400),),
            trainers=("torch",),
            recipe=Recipe(epochs=3, batch_size=50, learning_rate=0.02, warmup_epochs=0.5),
        ),
        replicates=until.at_most,
        until=until,
        control_replicates=2,
    )
    found = plan(protocol, store)
    looking, missing = Looking(found, store), list(found.missing)
    while missing:
        for entry in missing:
            data = catalog.prepare(entry.run.dataset, None)
            assert execute(entry.run, entry.source, store, data, Settings(store=store.url)) is not None
        missing = looking.after([entry.id for entry in missing])
    found = plan(protocol, store)
    looks = looks_of(store, until)
    assert not found.missing and found.further == 0
    assert counts(found)["dropout"] < counts(found)["init"], looks
    last = max(number for source, number in looks if source == "dropout")
    assert looks["dropout", last].decision == NARROW and looks["init", last].decision == GOES_ON


def test_run_takes_the_looks_that_a_stopped_sweep_did_not_come_to(store: Store) -> None:
    settings = ("until.width=100", "until.at_least=4", "until.at_most=6")
    protocol = apply_settings(load_protocol("quickstart-tiny"), settings)
    until = protocol.until
    assert until is not None
    train(store, plan(protocol, store).missing, {"init": QUIET, "onebit": QUIET})
    options = [part for setting in settings for part in ("--set", setting)]
    result = CliRunner().invoke(app, ["run", "quickstart-tiny", *options, "--store", store.url])
    assert result.exit_code == 0, result.output
    assert "Nothing to train: all 12 runs are done." in result.output and "1 of 2" in result.output
    assert {key: look.decision for key, look in looks_of(store, until).items()} == {
        ("init", 1): NARROW,
        ("onebit", 1): NARROW,
    }


def test_a_sweep_trains_what_its_looks_grant(store: Store) -> None:
    """By Ray Tune, which is told of new runs while it schedules others."""
    until = Until(width=1e-6, at_least=4, at_most=6, looks=(4, 6))
    protocol = adaptive(until, ("init", "onebit"))
    result = sweep(plan(protocol, store), store, max_concurrent=2, console=Console(file=io.StringIO()))
    assert result.complete and (result.planned, result.done) == (14, 14)
    found = plan(protocol, store)
    assert counts(found) == {"none": 2, "init": 6, "onebit": 6} and not found.missing and found.further == 0
    assert {key: look.decision for key, look in looks_of(store, until).items()} == {
        ("init", 1): GOES_ON,
        ("init", 2): AT_MOST,
        ("onebit", 1): GOES_ON,
        ("onebit", 2): AT_MOST,
    }
