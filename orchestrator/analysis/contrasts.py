"""Cells of one group held against each other: ratios, shares of variance, verdicts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from orchestrator.analysis.comparisons import compare
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.rows import CELL, ends, frame, identity, reasons, values
from protocols.errors import unknown
from protocols.protocol import MEASURES

if TYPE_CHECKING:
    from orchestrator.analysis.sweep import Cell, Sweep

SPREADS = ("accuracy_sd", "cross_entropy_sd")

COLUMNS = (
    *(*CELL, "reference", "measure", "n", "n_reference", "value", "value_reference"),
    *(*ends("ratio"), *ends("difference"), *ends("share"), "margin", "verdict", "notes"),
)


def between(sweep: Sweep, first: str, second: str) -> pd.DataFrame:
    """Every cell of one source against the cell of another in its group.

    Raises:
        UserError: no cell has one of the two names.
    """
    names = list(dict.fromkeys(name for cell in sweep.cells for name in (cell.source, cell.label)))
    for name in (first, second):
        if name not in names:
            raise unknown("source of this sweep", name, names)
    found = [index for index, cell in enumerate(sweep.cells) if first in (cell.source, cell.label)]
    return _against(sweep, found, second)


def shares(sweep: Sweep, reference: str) -> pd.DataFrame:
    """Every cell in which something varies against the reference of its group."""
    others = [
        index
        for index, cell in enumerate(sweep.cells)
        if not cell.is_control and reference not in (cell.source, cell.label)
    ]
    return _against(sweep, others, reference)


def _against(sweep: Sweep, cells: list[int], reference: str) -> pd.DataFrame:
    rows = []
    for index in cells:
        for other, cell in enumerate(sweep.cells):
            same_group = cell.group == sweep.cells[index].group
            if same_group and other != index and reference in (cell.source, cell.label):
                rows += [_row(sweep, index, other, name) for name in MEASURES]
    return frame(rows, *COLUMNS)


def _row(sweep: Sweep, index: int, other: int, name: str) -> dict[str, Any]:
    cell: Cell = sweep.cells[index]
    one, two = (sweep.measured[place].distance(name) for place in (index, other))
    found = compare(one, two, sweep.margin)
    ratio = found.ratio
    # A ratio of SDs says how far, its square how much of the variance.
    share = Estimate(value=ratio.value**2, low=ratio.low**2, high=ratio.high**2)
    return {
        **identity(cell),
        "reference": sweep.cells[other].label,
        "measure": name,
        "n": len(one.without[0]),
        "n_reference": len(two.without[0]),
        "value": one.value,
        "value_reference": two.value,
        **values("ratio", ratio),
        **values("difference", found.difference),
        **values("share", share if name in SPREADS else Estimate(value=math.nan)),
        "margin": sweep.margin,
        "verdict": found.verdict,
        "notes": reasons(ratio=ratio),
    }
