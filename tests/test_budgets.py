"""Every kind of failure has a budget of its own."""

from __future__ import annotations

import pytest

from orchestrator.launch.budgets import HARDWARE_RETRIES, Budgets


@pytest.mark.parametrize("errors", [0, 1, 3])
def test_errors_and_hangs_share_a_budget(errors: int) -> None:
    budgets = Budgets(errors)
    outcomes = ["error", "timeout"] * errors
    assert [budgets.after("a", outcome) for outcome in outcomes[:errors]] == ["again"] * errors
    assert budgets.after("a", "error") == "over"
    assert budgets.failed("a") == errors + 1


def test_out_of_memory_is_tried_once_more_whatever_errors_are_allowed() -> None:
    for errors in (0, 5):
        budgets = Budgets(errors)
        assert [budgets.after("a", "out_of_memory") for _ in range(2)] == ["again", "over"]


def test_hardware_moves_a_run_and_spends_no_other_budget() -> None:
    budgets = Budgets(0)
    moved = [budgets.after("a", "hardware") for _ in range(HARDWARE_RETRIES)]
    assert set(moved) == {"elsewhere"}
    assert budgets.after("a", "out_of_memory") == "again"
    assert budgets.after("a", "hardware") == "over"
    assert budgets.failed("a") == HARDWARE_RETRIES + 2


def test_budgets_are_a_runs_own() -> None:
    budgets = Budgets(1)
    assert [budgets.after(id, "error") for id in ("a", "b", "a", "b")] == ["again", "again", "over", "over"]
    assert budgets.failed("c") == 0
    budgets.forget("a")
    assert budgets.failed("a") == 0 and budgets.after("a", "error") == "again"
