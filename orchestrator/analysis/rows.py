"""Rows of tables: what a cell is, and an estimate as three columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from orchestrator.analysis.intervals import Estimate

if TYPE_CHECKING:
    from orchestrator.analysis.sweep import Cell

SETTING = ("trainer", "architecture", "dataset", "base_seed")
CELL = ("group", *SETTING, "recipe", "source", "library", "asynchrony", "label")


def identity(cell: Cell) -> dict[str, Any]:
    """The columns ``CELL`` of a cell."""
    first = cell.runs.iloc[0]
    return {name: cell.label if name == "label" else first[name] for name in CELL}


def ends(name: str) -> tuple[str, str, str]:
    """The columns of an estimate."""
    return name, f"{name}_low", f"{name}_high"


def values(name: str, estimate: Estimate) -> dict[str, float]:
    """An estimate in the columns of :func:`ends`."""
    return dict(zip(ends(name), (estimate.value, estimate.low, estimate.high), strict=True))


def reasons(**estimates: Estimate) -> str:
    """Why values or intervals are missing: each reason once, after what it concerns."""
    concerned: dict[str, list[str]] = {}
    for name, estimate in estimates.items():
        if estimate.reason:
            concerned.setdefault(estimate.reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in concerned.items())


def frame(rows: Sequence[dict[str, Any]], *columns: str) -> pd.DataFrame:
    """A table with these columns, also where it has no row."""
    return pd.DataFrame(list(rows), columns=list(columns))
