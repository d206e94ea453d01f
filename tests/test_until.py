"""What is declared of adaptive replicates: its range, its looks, how it is set and how it is shown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.app import app
from orchestrator.cli.looking import count_runs
from orchestrator.plan import expand, further_runs
from protocols import Protocol, Until, UserError, apply_settings, load_protocol, select_cells
from tests import fakes

UNTIL = Until(width=0.5, at_least=6, at_most=48)
SETTINGS = ("until.width=0.5", "until.at_least=6", "until.at_most=48")


def adaptive(until: Until = UNTIL, sources: tuple[str, ...] = ("init", "shuffle")) -> Protocol:
    return dataclasses.replace(fakes.protocol(sources, replicates=until.at_most), until=until)


def test_looks_grow_by_half_from_the_least_to_the_most() -> None:
    assert UNTIL.schedule == (6, 9, 14, 21, 32, 48)
    assert Until(width=1, at_least=4, at_most=4).schedule == (4,)
    assert Until(width=1, at_least=4, at_most=5).schedule == (4, 5)
    assert Until(width=1, at_least=4, at_most=20, looks=(4, 10, 20)).schedule == (4, 10, 20)


def test_the_level_is_shared_out_over_the_looks() -> None:
    assert UNTIL.level == pytest.approx(1 - 0.05 / 6)
    assert Until(width=1, at_least=4, at_most=4).level == pytest.approx(0.95)


def test_the_declaration_is_of_width_and_looks_but_not_of_the_budget() -> None:
    assert len(UNTIL.declaration) == 16
    spelled_out = dataclasses.replace(UNTIL, looks=UNTIL.schedule, budget=99, width=0.50)
    assert spelled_out.declaration == UNTIL.declaration
    assert Until(width=1, at_least=6, at_most=48).declaration == Until(width=1.0, at_least=6, at_most=48).declaration
    others = {dataclasses.replace(UNTIL, **change).declaration for change in ({"width": 0.6}, {"at_most": 50}, {})}
    assert len(others) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 0}, "until.width must be a finite number above 0"),
        ({"width": float("nan")}, "until.width must be a finite number above 0"),
        ({"width": float("inf")}, "until.width must be a finite number above 0"),
        ({"at_least": 3}, "until.at_least must be at least 4"),
        ({"at_most": 5}, "until.at_most is 5, but until.at_least is 6"),
        ({"looks": (6, 9, 9, 48)}, "until.looks must grow from look to look, which 6, 9, 9, 48 does not"),
        ({"looks": (6, 9)}, r"until.looks must begin with until.at_least \(6\) and end with until.at_most \(48\)"),
        ({"looks": (5, 48)}, "until.looks must begin with"),
        ({"budget": 5}, r"until.budget must be at least until.at_least \(6\), not 5"),
    ],
)
def test_what_is_out_of_range_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dataclasses.replace(UNTIL, **changes)  # type: ignore[arg-type]


def test_a_protocols_replicates_are_the_most() -> None:
    assert adaptive().replicates == 48
    with pytest.raises(UserError, match="replicates is 10, but until.at_most is 48"):
        dataclasses.replace(adaptive(), replicates=10)


def test_controls_have_the_first_looks_replicates_unless_they_are_counted() -> None:
    assert adaptive().controls == 6
    assert dataclasses.replace(adaptive(), control_replicates=3).controls == 3


def test_it_is_set_field_by_field() -> None:
    quickstart = load_protocol("quickstart")
    changed = apply_settings(quickstart, SETTINGS)
    assert changed.until == UNTIL and changed.replicates == 48
    assert apply_settings(quickstart, ["replicates=48", *SETTINGS[:2]]).until == UNTIL, "at_most is replicates"
    more = apply_settings(quickstart, [*SETTINGS, "until.looks=6,20,48", "until.budget=300"]).until
    assert more == dataclasses.replace(UNTIL, looks=(6, 20, 48), budget=300)
    assert "set for this study: until.width=0.5" in changed.deviations


def test_a_declared_one_is_changed_or_switched_off() -> None:
    assert apply_settings(adaptive(), ["until.width=2"]).until == dataclasses.replace(UNTIL, width=2.0)
    for setting in ("until.at_most=60", "replicates=60"):
        changed = apply_settings(adaptive(), [setting])
        assert changed.until == dataclasses.replace(UNTIL, at_most=60) and changed.replicates == 60
    off = apply_settings(adaptive(), ["until=none"])
    assert off.until is None and off.replicates == 48
    assert apply_settings(adaptive(), ["until=none", "replicates=7"]).replicates == 7
    budgeted = dataclasses.replace(UNTIL, budget=100)
    assert apply_settings(adaptive(budgeted), ["until.budget=none"]).until == UNTIL


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["until.width=0.5"], "until needs until.at_least"),
        (["until.at_least=6"], "until needs until.width"),
        (["until=5"], r"until is none or set field by field \(until.width=0.5\), not '5'"),
        (["until=none", "until.width=1"], "until=none has no until.width"),
        (["until.wdith=1"], "unknown field 'until.wdith'; did you mean 'until.width'"),
        (["until.width=wide", "until.at_least=6"], "until.width must be a number, not 'wide'"),
        (["until.width=1", "until.at_least=6"], "until.at_most is 4, but until.at_least is 6"),
        ([*SETTINGS, "replicates=50"], "replicates is 50, but until.at_most is 48"),
        ([*SETTINGS, "source=none"], "until has no effect"),
    ],
)
def test_a_senseless_setting_is_refused(settings: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        apply_settings(load_protocol("quickstart"), settings)


def test_cells_with_replicates_of_their_own_and_controls_are_not_adaptive() -> None:
    base = adaptive()
    own = dataclasses.replace(base.cells[0], replicates=5)
    runs = expand(dataclasses.replace(base, cells=(own, base.cells[1]), control_replicates=3))
    counts = {source: [entry.adaptive for entry in runs if entry.source == source] for source in ("none", "init")}
    assert counts == {"none": [False] * 3, "init": [False] * 5}
    assert [entry.adaptive for entry in runs if entry.source == "shuffle"] == [True] * 6
    with pytest.raises(UserError, match="until has no effect"):
        apply_settings(dataclasses.replace(base, cells=(own,)), ["until.width=1"])


def test_a_plan_without_looks_has_the_first_looks_runs_and_says_how_many_there_may_be() -> None:
    assert len(expand(adaptive())) == 3 * 6
    assert further_runs(adaptive()) == 2 * 42
    assert count_runs(adaptive()) == 6 + 2 * 48
    budgeted = adaptive(dataclasses.replace(UNTIL, budget=30))
    assert further_runs(budgeted) == 30 - 12
    assert count_runs(budgeted) == 6 + 30
    assert further_runs(fakes.protocol()) == 0


def test_a_budget_must_pay_for_the_first_looks_of_the_cells_that_are_selected() -> None:
    tight = adaptive(dataclasses.replace(UNTIL, budget=11))
    with pytest.raises(UserError, match="until.budget is 11, but 2 cells begin with 6 replicates each, 12 runs in all"):
        expand(tight)
    assert len(expand(select_cells(tight, ["source=init"]))) == 12


def test_more_replicates_than_different_ones_are_refused_before_the_first_look() -> None:
    base = apply_settings(load_protocol("quickstart"), ["source=library", "library=kernel", "trainer=torch", *SETTINGS])
    with pytest.raises(UserError, match="48 replicates of library=kernel are planned"):
        expand(base)


def invoke(folder: Path, *arguments: str) -> Result:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return CliRunner().invoke(app, [*arguments, *settings, "--store", str(folder)], catch_exceptions=False)


def test_plan_spells_it_out(tmp_path: Path) -> None:
    text = " ".join(invoke(tmp_path, "plan", "quickstart-tiny").output.split())
    assert "18 runs planned, 0 done, 18 missing" in text
    assert "Up to 84 more runs may be added, as looks decide." in text
    assert (
        "Replicates: until the 99.17 % interval of the accuracy SD is narrower than 0.5 percentage points; "
        "looks at 6, 9, 14, 21, 32, 48 replicates." in text
    )
    values = json.loads(invoke(tmp_path, "plan", "quickstart-tiny", "--json").output)
    assert values["further"] == 84
    assert values["until"] == {
        "width": 0.5,
        "at_least": 6,
        "at_most": 48,
        "looks": [6, 9, 14, 21, 32, 48],
        "budget": None,
        "level": UNTIL.level,
    }


def test_show_and_list_say_what_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    text = " ".join(CliRunner().invoke(app, ["show", "quickstart-tiny", *settings]).output.split())
    assert "looks at 6, 9, 14, 21, 32, 48 replicates, and 6 of every group's control" in text
    assert "18 in 1 group, and up to 84 more, as looks decide" in text
    monkeypatch.setattr("orchestrator.cli.looking.PROTOCOLS", ("mine",))
    monkeypatch.setattr("orchestrator.cli.looking.load_protocol", lambda name: adaptive())
    assert "(2 cells, at most 102 runs)" in CliRunner().invoke(app, ["list", "protocols"]).output
