"""What the options of ``run`` come to, and how it says that it ended."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from orchestrator import launch
from orchestrator.cli import training
from orchestrator.cli.amounts import Duration, Memory
from orchestrator.cli.app import app
from orchestrator.cli.training import OUT_OF_TIME, chosen, prioritised
from orchestrator.launch import Result
from orchestrator.plan import plan
from orchestrator.store import Store, open_store
from protocols.errors import UserError
from protocols.load import load_protocol
from tests import factory
from tests.fakes import planned, protocol

TINY = "quickstart-tiny"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("45m", 2700), ("3h30m", 12_600), ("1.5h", 5400), ("2d", 172_800), ("1d 2H 3m 4s", 93_784)],
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "90", "3.5", "30m3h", "-1h", "1h1h", "soon", "0s", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter, match="no duration|no time at all"):
        Duration().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("500MB", 500_000_000), ("4GB", 4 * 10**9), ("1.5GiB", 1_610_612_736), ("2 gib", 2 * 2**30), ("1tb", 10**12)],
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert Memory().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "4", "4G", "GB", "-1GB", "4 potatoes"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(click.BadParameter, match="no amount of memory"):
        Memory().convert(text, None, None)


def test_the_first_cells_come_before_all_others() -> None:
    fake = protocol(("init", "shuffle", "augment", "dropout"))
    order = {cell.source: cell.priority for cell in prioritised(fake, ("source=shuffle", "source=augment,init")).cells}
    assert order["shuffle"] > order["augment"] == order["init"] > order["dropout"] == 0


def test_controls_can_come_first(store: Store) -> None:
    fake = protocol(("init", "shuffle"))
    first = plan(prioritised(fake, ("source=none",)), store)
    assert {entry.source: entry.priority for entry in first.planned} == {"none": 1, "init": 0, "shuffle": 0}
    assert {entry.id for entry in first.planned} == {entry.id for entry in plan(fake, store).planned}


def test_first_that_names_no_cell_is_an_error() -> None:
    with pytest.raises(UserError, match="^--first: no cell of protocol fake has source 'all'"):
        prioritised(protocol(("init",)), ("source=all",))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def test_which_runs_are_tried_again(store: Store) -> None:
    whole = planned(store, "init", replicates=3)
    failed = whole.missing[2]
    store.fail(factory.failure(factory.Fake(failed.run, failed.source)))
    assert chosen(whole, store, "all").missing == whole.missing
    assert chosen(whole, store, "failed").missing == (failed,)
    assert chosen(whole, store, "none").missing == tuple(entry for entry in whole.missing if entry != failed)
    assert chosen(whole, store, "none").planned == whole.planned


def run(monkeypatch: pytest.MonkeyPatch, store: Store, *arguments: str, **ended: Any) -> tuple[Any, dict[str, Any]]:
    """The verb, with a sweep that is over at once, with 4 of its 6 runs done; what it was asked for beside that."""
    asked: dict[str, Any] = {}

    def sweep(plan: Any, store: Store, **options: Any) -> Result:
        asked.update(options, plan=plan)
        stored = ended.get("done", 4) - ended.pop("withdrawn", 0)
        for entry in plan.missing[:stored]:
            store.commit(factory.record(factory.Fake(entry.run, entry.source)))
        sound = {"planned": 6, "done": 4, "failed": {}, "interrupted": False, "seconds": 61.0}
        return Result(**sound | ended)

    monkeypatch.setattr(launch, "sweep", sweep)
    monkeypatch.setattr(training, "publish", lambda *arguments, **options: None)
    options = ("--store", store.url, "--gpus-per-run", "0")
    return CliRunner().invoke(app, ["run", TINY, *options, *arguments], standalone_mode=False), asked


def test_options_reach_the_sweep(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    options = ("--time-budget", "2h", "--patience", "90m", "--memory-per-run", "2GB", "--lease-seconds", "5")
    _, asked = run(monkeypatch, store, *options, "--first", "source=onebit")
    assert asked["time_budget"] == 7200 and asked["patience"] == 5400
    assert asked["memory_per_run"] == 2 * 10**9 and asked["lease_seconds"] == 5
    priorities = {entry.source: entry.priority for entry in asked["plan"].missing}
    assert priorities["onebit"] == priorities["none"] == 1 and priorities["init"] == 0


def test_without_options_there_is_no_limit(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    _, asked = run(monkeypatch, store)
    assert asked["time_budget"] == math.inf and asked["patience"] == 3600
    assert "memory_per_run" not in asked and asked["lease_seconds"] == 60


@pytest.mark.parametrize(
    ("ended", "code", "text"),
    [
        ({"done": 6}, 0, "All 6 planned runs are done"),
        ({"failed": {"a": "x"}}, 1, "4 of 6 planned runs done, 1 failed (see status); the same command tries again."),
        (
            {"stopped": "no slot can be set up: x"},
            1,
            "Given up with 4 of 6 planned runs done, since no slot can be set up: x",
        ),
        (
            {"out_of_time": True, "left": 5400.0},
            OUT_OF_TIME,
            "The time budget is used up with 4 of 6 planned runs done; about 1 h 30 min are left, on as many slots",
        ),
        ({"out_of_time": True, "done": 6}, 0, "All 6 planned runs are done"),
        (
            {"done": 6, "withdrawn": 2},
            1,
            "4 of 6 planned runs done, 0 failed (see status); the same command tries again.",
        ),
    ],
)
def test_how_a_launch_ended(
    monkeypatch: pytest.MonkeyPatch, store: Store, ended: dict[str, Any], code: int, text: str
) -> None:
    result, _ = run(monkeypatch, store, **ended)
    assert result.return_value == code and text in result.output


def test_nothing_is_started_where_no_run_has_failed(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    result, asked = run(monkeypatch, store, "--retry", "failed")
    missing = len(plan(load_protocol(TINY), store).missing)
    assert result.return_value == 1 and asked == {}
    assert f"Nothing to train with --retry failed: none of {missing} missing runs has failed." in result.output
