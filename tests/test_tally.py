"""Counts of a running sweep, when it will be done, and what is shown of that while it runs."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from orchestrator.analysis import intervals
from orchestrator.launch import progress
from orchestrator.launch.progress import Display, Rate, failures
from orchestrator.launch.tally import Tally
from orchestrator.plan import Plan, plan
from orchestrator.store import Store, StoreError, open_store
from orchestrator.watch.cells import Begun, Cell, cell_key, forecast
from orchestrator.watch.measures import Measures, Reader
from protocols import apply_settings, load_protocol
from protocols.until import Until
from tests import factory, fakes

ROOT = Path(__file__).parents[1]


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "results", create=True)


def planned(store: Store, *settings: str) -> Plan:
    return plan(apply_settings(load_protocol("quickstart-tiny"), settings), store)


def cell_of(tally: Tally, source: str) -> Cell:
    return next(cell for key, cell in tally.cells.items() if key[-1] == source)


def ids_of(plan: Plan, source: str) -> list[str]:
    return [entry.id for entry in plan.planned if entry.source == source]


# Counts


def test_a_tally_counts_each_thing_once_in_the_cell_it_belongs_to(store: Store) -> None:
    factory.fill(store, planned(store).planned[:1])
    made = planned(store, "replicates=4")
    tally = Tally(made)
    assert (tally.name, tally.planned, tally.done_count, tally.running) == ("quickstart-tiny", 12, 1, 0)
    assert [(cell.key[-1], cell.planned, cell.done) for cell in tally.cells.values()] == [
        ("none", 4, 1),
        ("init", 4, 0),
        ("onebit", 4, 0),
    ]
    first, second, third, fourth = ids_of(made, "init")
    for _ in range(2):
        tally.started(first)
    tally.started(second)
    assert (tally.running, cell_of(tally, "init").running) == (2, 2)
    assert [tally.done(first, 3.0), tally.done(first, 3.0)] == [True, False]
    assert (tally.done_count, tally.running, cell_of(tally, "init").done) == (2, 1, 1)
    tally.again(second)
    assert (tally.retried, cell_of(tally, "init").retried, tally.running) == (1, 1, 0)
    tally.started(second)
    tally.idle(second)
    tally.idle(second)
    assert tally.running == 0 and cell_of(tally, "init").left == 3
    for _ in range(2):
        tally.failed(third, "no")
    assert tally.failures == {third: "no"}
    assert (cell_of(tally, "init").failed, cell_of(tally, "init").left) == (1, 2)
    assert tally.has_ended(first) and tally.has_ended(third) and not tally.has_ended(fourth)
    tally.seen(10)
    tally.seen(5)
    assert tally.images == 15


def test_a_failed_run_that_has_a_record_after_all_is_done_and_a_done_one_cannot_fail(store: Store) -> None:
    made = planned(store)
    tally = Tally(made)
    one, other = ids_of(made, "init")
    tally.failed(one, "no")
    assert tally.done(one)
    assert tally.failures == {} and (cell_of(tally, "init").failed, cell_of(tally, "init").left) == (0, 1)
    tally.done(other)
    tally.failed(other, "no")
    assert tally.failures == {} and cell_of(tally, "init").done == 2


def test_runs_that_are_granted_later_are_planned(store: Store) -> None:
    tally = Tally(planned(store))
    more = planned(store, "replicates=3").planned
    tally.added(more)
    tally.added(more)
    assert tally.planned == len(more) == 9
    assert {cell.planned for cell in tally.cells.values()} == {3}


def test_a_tally_names_the_runs_whose_records_are_new(store: Store) -> None:
    factory.fill(store, planned(store).planned[:2])
    made = planned(store)
    tally = Tally(made)
    assert set(tally.fresh()) == {entry.id for entry in made.planned[:2]}
    assert tally.fresh() == {}
    tally.done(made.missing[0].id)
    assert {id: key[-1] for id, key in tally.fresh().items()} == {made.missing[0].id: made.missing[0].source}


# When it will be done


def cells_of(plan: Plan, **numbers: tuple[int, int]) -> dict[str, Cell]:
    """Cells of a plan by source, with so many runs planned and done."""
    first = {entry.source: entry for entry in plan.planned}
    return {
        source: Cell(key=("t", "a", "d", "g", source), first=first[source], planned=count, done=done)
        for source, (count, done) in numbers.items()
    }


def test_nothing_is_foretold_before_anything_is_known(store: Store, clock: Clock) -> None:
    made = planned(store)
    tally = Tally(made, clock=clock)
    assert tally.remaining() is None
    tally.started(made.planned[0].id)
    clock.now += 60
    found = tally.forecast()
    assert found.remaining is None and found.device_seconds is None
    assert set(found.cells.values()) == {None}


def test_before_a_run_is_done_its_images_tell(store: Store, clock: Clock) -> None:
    made = planned(store)  # 6 runs of 20 epochs of 1500 digits
    images = made.planned[0].examples * made.planned[0].run.recipe.epochs
    tally = Tally(made, clock=clock)
    for entry in made.planned[:2]:
        tally.started(entry.id)
    clock.now += 10
    tally.seen(images)  # half of both runs, in 10 seconds: a run takes 20
    assert tally.remaining() == pytest.approx((2 * 10 + 4 * 20) / 2)
    assert tally.forecast().device_seconds == pytest.approx(2 * 10 + 4 * 20)


def test_what_is_left_takes_what_done_runs_of_the_cell_took(store: Store) -> None:
    cells = cells_of(planned(store), init=(10, 4), onebit=(10, 6))
    cells["init"].time(40.0, count=4)
    cells["onebit"].time(120.0, count=6)
    begun = [Begun(key=cells["init"].key, seconds=4.0), Begun(key=cells["onebit"].key, seconds=5.0)]
    found = forecast(cells.values(), begun)
    # Of init 5.6 runs of 10 s are left, of onebit 3.75 of 20 s, on two devices.
    assert found.device_seconds == pytest.approx(56 + 75)
    assert found.remaining == pytest.approx((56 + 75) / 2)
    # They take turns until onebit is through.
    assert found.cells[cells["onebit"].key] == pytest.approx(3.75 * (10 + 20) / 2)
    assert found.cells[cells["init"].key] == found.remaining


def test_a_cell_of_a_higher_priority_comes_first(store: Store) -> None:
    cells = cells_of(planned(store), init=(10, 4), onebit=(10, 4))
    for cell in cells.values():
        cell.time(40.0, count=4)
    cells["onebit"].first = dataclasses.replace(cells["onebit"].first, priority=1)
    found = forecast(cells.values(), [Begun(key=cells["onebit"].key, seconds=0.0)])
    assert found.cells[cells["onebit"].key] == pytest.approx(60)
    assert found.cells[cells["init"].key] == found.remaining == pytest.approx(120)


def test_devices_are_told_apart(store: Store) -> None:
    cells = cells_of(planned(store), init=(9, 4), onebit=(5, 1))
    cells["init"].time(20.0, "fast", count=2)
    cells["init"].time(40.0, "slow", count=2)
    begun = [Begun(key=cells["init"].key, seconds=0.0, device=device) for device in ("fast", "slow")]
    # In 20 seconds the fast one does two runs and the slow one does one.
    cells["onebit"].done = 5
    assert forecast(cells.values(), begun).remaining == pytest.approx(5 / (1 / 10 + 1 / 20))
    # The slow one is known to be as much slower in a cell that it has no run of.
    cells["onebit"].done = 1
    cells["onebit"].time(30.0, "fast")
    found = forecast(cells.values(), begun)
    slow = 30 * (40 / 30) / 1  # twice 15 s on average, and a third slower than that
    assert found.remaining == pytest.approx(5 / (1 / 10 + 1 / 20) + 4 / (1 / 30 + 1 / slow))


def test_a_cell_without_a_done_run_goes_by_its_images(store: Store) -> None:
    made = planned(store, "recipe.epochs=10,20", "source=init")
    tally = Tally(made)
    short, long = (entry for entry in made.planned if entry.source == "init" and entry.run.replicate == 0)
    tally.done(short.id, 10.0)
    found = tally.forecast()
    per_epoch = 10.0 / short.run.recipe.epochs
    left = [entry for entry in made.planned if entry.id != short.id]
    assert found.device_seconds == pytest.approx(sum(entry.run.recipe.epochs * per_epoch for entry in left))
    assert long.run.recipe.epochs != short.run.recipe.epochs


@pytest.mark.parametrize(("ran", "left"), [(0.0, 100.0), (60.0, 40.0), (100.0, 5.0), (500.0, 5.0)])
def test_the_last_run_is_not_divided_among_devices_and_never_overdue(store: Store, ran: float, left: float) -> None:
    cells = cells_of(planned(store), init=(9, 8), onebit=(9, 9))
    cells["init"].time(800.0, count=8)
    assert forecast(cells.values(), [Begun(key=cells["init"].key, seconds=ran)]).remaining == pytest.approx(left)


def test_a_waiting_run_takes_at_least_its_time_however_many_devices_there_are(store: Store) -> None:
    cells = cells_of(planned(store), init=(10, 5), onebit=(10, 10))
    cells["init"].time(500.0, count=5)
    begun = [Begun(key=cells["init"].key, seconds=99.0) for _ in range(4)]
    assert forecast(cells.values(), begun).remaining == pytest.approx(100.0)


def test_nothing_running_leaves_the_end_open_but_not_the_device_time(store: Store) -> None:
    cells = cells_of(planned(store), init=(10, 5), onebit=(10, 10))
    cells["init"].time(500.0, count=5)
    found = forecast(cells.values(), [])
    assert (found.remaining, found.device_seconds) == (None, 500.0)
    cells["init"].given_up = 5
    assert forecast(cells.values(), []).remaining == 0


def test_a_forecast_gives_way_to_who_knows_better(store: Store) -> None:
    cells = cells_of(planned(store), init=(10, 4), onebit=(10, 8))
    cells["init"].time(40.0, count=4)
    cells["onebit"].time(80.0, count=8)
    found = forecast(cells.values(), [Begun(key=cells["init"].key, seconds=0.0)])
    halved = found.scaled(found.remaining / 2)
    assert halved.cells == {key: seconds / 2 for key, seconds in found.cells.items()}
    assert found.scaled(None).remaining is None


# Images a second


def test_the_rate_is_of_late_but_waits_for_reports_that_are_rare() -> None:
    rate = Rate()
    assert rate.value(1) is None
    for second in range(0, 100):
        rate.note(float(second), 100 * min(second, 50))
    assert rate.value(0) is None
    assert rate.value(2) == pytest.approx(0, abs=100 * 5 / 50)  # nothing for 49 seconds
    rare = Rate()
    for minute in range(10):
        rare.note(60.0 * minute, 6000 * minute)
    assert rare.value(2) == pytest.approx(100)


# What is shown


def display(tally: Tally, store: Store | None = None, **options: object) -> tuple[Display, io.StringIO]:
    stream = io.StringIO()
    options = {"width": 200, **options}
    return Display(tally, None, Console(file=stream, **options), store=store), stream  # type: ignore[arg-type]


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(store)
    tally = Tally(made)
    shown, stream = display(tally)
    with shown:
        shown.refresh()
        assert stream.getvalue() == ""
        monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
        tally.started(made.planned[0].id)
        shown.refresh()
        shown.say("failed: [a] :b:")
        for entry in made.planned:
            tally.done(entry.id, 2.0)
    assert stream.getvalue().splitlines() == [
        "0/6 done, 1 running, 0 failed, ETA not known yet",
        "failed: [a] :b:",
        "6/6 done, 0 running, 0 failed",
    ]


def test_a_line_has_the_time_left_from_the_tally_or_from_who_knows_better(store: Store) -> None:
    made = planned(store)
    tally = Tally(made)
    for entry in made.planned[:3]:
        tally.done(entry.id, 600.0)
    tally.started(made.planned[3].id)
    tally.again(made.planned[4].id)
    tally.failed(made.planned[5].id, "no")
    shown, _ = display(tally)
    assert shown.line() == "3/6 done, 1 running, 1 failed, 1 retried, about 20 min left, about 20 core minutes left"
    other = Display(tally, lambda: 7260.0, Console(file=io.StringIO()))
    assert "about 2 h 1 min left" in other.line()
    unknown = Display(tally, lambda: None, Console(file=io.StringIO()))
    assert "ETA not known yet" in unknown.line()


def lines_of(shown: Display, width: int, height: int) -> list[str]:
    """The screen as text."""
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(progress.view.screen(shown.view(), console))
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("height", [8, 24, 60])
def test_the_screen_fits_the_terminal_and_shows_the_most_active_cells(store: Store, width: int, height: int) -> None:
    made = planned(store, "recipe.epochs=5,10,20,40", "base_seeds=0,1", "replicates=5", "perturb.step=0,100")
    tally = Tally(made)
    keys = list(tally.cells)
    busy = next(entry for entry in reversed(made.planned) if entry.source == "onebit[step=100]")
    for entry in made.planned[:60]:
        tally.done(entry.id, 6000.0)
    tally.started(busy.id)
    failed = made.planned[-7]
    tally.failed(failed.id, "no")
    lines = lines_of(display(tally)[0], width, height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if re.search(r"\d+/5 ", line + " ")]
    more = [line for line in lines if line.startswith("... and ")]
    if height == 8:
        assert len(rows) <= 1
    elif height == 24:
        # The running one comes first, then the failed one.
        assert re.search(r"onebit", rows[0])
        assert int(re.search(r"and (\d+) more cells", more[0])[1]) + len(rows) == len(keys)  # type: ignore[index]
        assert re.search(r"\b1\b", rows[0].rpartition("/5")[2])
        assert re.search(r"\b1\b", rows[1].rpartition("/5")[2])
    else:
        assert len(rows) == len(keys) and not more
    assert lines[0].startswith("quickstart-tiny ")
    assert any("60/160 done, 1 running, 1 failed" in line for line in lines[1:3])


def test_running_measures_are_those_of_the_report(store: Store) -> None:
    made = planned(store, "replicates=6")
    tally = Tally(made)
    init = [entry for entry in made.planned if entry.source == "init"]
    accuracies = []
    shown, _ = display(tally, store)
    with shown:
        for entry in init[:5]:
            row = factory.record(entry, examples=100)
            accuracies.append(row["accuracy"])
            store.commit(row)
            tally.done(entry.id, 3.0)
        store.commit(factory.diverged(init[5]))
        tally.done(init[5].id, 3.0)
        shown.take(wait=60.0)
        measures = shown.view().measures
        measured = measures.of(cell_of(tally, "init").key)
        assert measured is not None and measured.n == 5
        expected = intervals.spread(np.array(accuracies)) * 100
        found = measured.sd.value, measured.sd.low, measured.sd.high
        assert found == pytest.approx((expected.value, expected.low, expected.high), rel=1e-9)
        mean = intervals.mean(np.array(accuracies), bounds=(0.0, 1.0)) * 100
        found = measured.mean.value, measured.mean.low, measured.mean.high
        assert found == pytest.approx((mean.value, mean.low, mean.high), rel=1e-9)
        assert measures.of(cell_of(tally, "none").key) is None
        assert measures.outcomes[cell_of(tally, "init").key] == {"ok": 5, "diverged": 1}
        text = "\n".join(lines_of(shown, 120, 30))
        assert f"{expected.value:.2f} [{expected.low:.2f}, {expected.high:.2f}]" in text
        assert f"{mean.value:.2f} [{mean.low:.2f}, {mean.high:.2f}]" in text


def test_each_record_is_read_once_and_a_store_that_fails_is_asked_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(store)
    factory.fill(store, made.planned[:4])
    tally = Tally(planned(store))
    asked: list[set[str]] = []
    table = Store.table

    def reading(self: Store, columns: Sequence[str], ids: set[str]) -> object:
        asked.append(set(ids))
        if len(asked) == 1:
            raise StoreError("the network is gone")
        return table(self, columns, ids)

    monkeypatch.setattr(Store, "table", reading)
    monkeypatch.setattr(progress, "READ_SECONDS", 0.01)
    shown, _ = display(tally, store)
    with shown:
        shown.take(wait=60.0)
        factory.fill(store, made.planned[4:5])
        tally.done(made.planned[4].id)
        shown.take(wait=60.0)
    ids = [entry.id for entry in made.planned]
    assert asked == [set(ids[:4]), set(ids[:4]), {ids[4]}]
    # The records tell how long runs took that were done before.
    assert cell_of(tally, "none").timed == {"cpu": (2, 2 * 0.5 * made.planned[0].run.recipe.epochs)}


def test_an_adaptive_cell_has_the_interval_of_its_looks(store: Store) -> None:
    until = Until(width=0.5, at_least=6, at_most=48)
    made = planned(store, "replicates=6")
    init = [entry for entry in made.planned if entry.source == "init"]
    rows = [factory.record(entry, examples=100) for entry in init]
    for row in rows:
        store.commit(row)
    measures = Measures(until)
    key = cell_key(init[0])
    measures.add(Reader(store).read({entry.id for entry in init}), {entry.id: key for entry in init})
    measured = measures.of(key, adaptive=True)
    expected = intervals.spread(np.array([row["accuracy"] for row in rows]), until.level) * 100
    assert measured is not None and until.level > 0.95
    assert (measured.sd.low, measured.sd.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_device_time_counts_the_share_of_a_gpu(store: Store, share: float) -> None:
    made, provenance = planned(store), json.dumps({"slot": {"gpus": share}})
    for entry in made.planned[:3]:
        store.commit(factory.record(entry, device="A100", provenance=provenance, seconds=1000.0, process="p"))
    store.commit(factory.record(made.planned[3], seconds=400.0))
    shown, _ = display(Tally(planned(store)), store)
    with shown:
        shown.take(wait=60.0)
        assert shown.view().measures.device_seconds == {"GPU": 3000 * share, "core": 400}


def test_failed_runs_are_named_up_to_a_limit() -> None:
    failed = {f"{number:064}": "no" for number in range(7)}
    assert failures(failed)[0] == f"failed: {0:012}: no"
    assert len(failures(failed)) == 6 and failures(failed)[-1] == "and 2 more"
    assert failures({}) == []


SCRIPT = """
import sys, time
from pathlib import Path
from rich.console import Console
from orchestrator.launch import progress
from orchestrator.launch.tally import Tally
from orchestrator.plan import plan
from orchestrator.store import open_store
from protocols import load_protocol
from tests import factory, fakes

progress.LIVE_SECONDS = 0.0
store = open_store(sys.argv[1], create=True)
made = plan(load_protocol("quickstart-tiny"), store)
tally = Tally(made)
with progress.Display(tally, None, Console(stderr=True), store=store) as display:
    display.say("training")
    for entry in made.planned:
        tally.started(entry.id, "cpu")
        display.refresh()
        store.commit(factory.record(entry, examples=100))
        tally.done(entry.id, 600.0)
        display.refresh()
    display.take(wait=60.0)
    display.refresh()
"""


def on_terminal(command: Sequence[str], width: int = 100, height: int = 30, **environment: str) -> str:
    """What a command writes to a terminal of its own."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    variables |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **environment}
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=variables)
    os.close(follower)
    written = b""
    try:
        while True:
            if select.select([leader], [], [], 300)[0]:
                written += os.read(leader, 65536)
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(leader)
    assert process.wait(60) == 0, written.decode()
    return written.decode()


@pytest.mark.parametrize(
    ("environment", "redrawn", "coloured"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, False, False)],
)
def test_a_terminal_is_redrawn_as_far_as_it_can_be(
    tmp_path: Path, environment: dict[str, str], redrawn: bool, coloured: bool
) -> None:
    text = on_terminal([sys.executable, "-c", SCRIPT, str(tmp_path / "store")], **environment)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert ("\x1b[2K" in text) == redrawn
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", text)) == coloured
    assert ("about 30 min left" in plain and re.search(r"init +1/2", plain) is not None) == redrawn
    assert "0:00:00" not in plain
    assert plain.splitlines()[0] == "training"
    assert plain.splitlines()[-1].startswith("6/6 done, 0 running, 0 failed, 60 core seconds spent")


def test_a_run_whose_record_is_gone_is_to_be_done_again(store: Store) -> None:
    made = fakes.planned(store, "init", replicates=2)
    tally, first = Tally(made), made.planned[0]
    tally.done(first.id, 1.0)
    for _ in range(2):
        tally.undone(first.id)
        assert tally.done_count == 0 and sum(cell.left for cell in tally.cells.values()) == 4
    assert tally.done(first.id, 1.0) and tally.done_count == 1


def test_a_device_may_become_known_while_a_run_is_trained(store: Store) -> None:
    made = fakes.planned(store, "init", replicates=2)
    tally, first = Tally(made), made.planned[0]
    tally.started(first.id)
    tally.started(first.id, "host one")
    tally.done(first.id, 7.0)
    assert [cell.timed for cell in tally.cells.values() if cell.done] == [{"host one": (1, 7.0)}]
