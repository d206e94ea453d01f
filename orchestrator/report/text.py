"""How numbers, intervals and notes are written, the same in the terminal, in LaTeX and in HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.sweep import Cell, Sweep
from protocols.protocol import MEASURES
from protocols.until import percent

DECIMALS = {
    "accuracy_mean": 2,
    "accuracy_sd": 2,
    "cross_entropy_sd": 4,
    "perplexity_sd": 3,
    "disagreement": 2,
    "correlation": 3,
    "pearson": 3,
    "ensemble_gain": 2,
    "ratio": 2,
    "share": 0,
    "sd": 3,
    "reduction": 0,
    "cka": 3,
    "distance": 2,
    "cosine": 4,
    "predictions_changed": 2,
    "barrier_error": 2,
    "barrier_loss": 3,
}

NOTHING = "–"
"""Stands for a value that cannot be given."""

METHOD = (
    "Values are per replicate or per pair of replicates; intervals are 95 %: a jackknife on the logarithm for SDs, "
    "a jackknife over models for means over pairs (pairs that share a model are dependent), Student's t for the mean."
)


def method(sweep: Sweep) -> str:
    """How values and intervals were come by."""
    until = sweep.protocol.until if sweep.protocol else None
    if until is None:
        return METHOD
    return (
        f"{METHOD} Cells whose replicates were decided by looks have accuracy SDs at the level of each look, "
        f"{percent(until.level)}, so that those at stopping hold together at 95 %."
    )


def columns(sweep: Sweep) -> list[str]:
    """The measures that a table shows: the accuracy, and those that the protocol declares (else the papers' five)."""
    declared = list(MEASURES)
    if sweep.protocol is not None:
        declared = list(sweep.protocol.measures)
    return ["accuracy_mean", *declared]


def number(value: float, name: str) -> str:
    """A value of a measure, with its decimals and without a leading zero, as the papers write it."""
    if not math.isfinite(value):
        return NOTHING
    if abs(value) >= 1000:
        return f"{value:.0e}"
    if value == int(value) and abs(value) <= 1:
        # Written whole, so that it differs from what is only rounded to it.
        return str(int(value)).replace("-", "−")
    text = f"{abs(value):.{DECIMALS[name]}f}"
    sign = "−" if value < 0 and float(text) else ""
    return sign + (text.removeprefix("0") if text.startswith("0.") else text)


def interval(estimate: Estimate, name: str) -> str:
    """``low to high``; empty where there is none."""
    if not math.isfinite(estimate.low + estimate.high):
        return ""
    low, high = number(estimate.low, name), number(estimate.high, name)
    return f"{low} to {high}" if "−" in low + high or "e" in high else f"{low}–{high}"


def count(cell: Cell) -> str:
    """How many replicates entered, and of how many where some are missing or diverged."""
    n, planned = len(cell.ok), len(cell.runs)
    return str(n) if n == planned else f"{n}/{planned}"


def footnotes(notes: Iterable[Sequence[str]]) -> tuple[list[str], Mapping[str, str]]:
    """Letters for the notes of a table's rows, equal notes sharing one.

    Returns:
        For every row its letters, such as ``"a,c"``, and the text of every letter.
    """
    letters: dict[str, str] = {}
    marks = []
    for row in notes:
        own = [letters.setdefault(note, _letter(len(letters))) for note in row]
        marks.append(",".join(sorted(own, key=lambda letter: (len(letter), letter))))
    return marks, {letter: note for note, letter in letters.items()}


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else _letter(index // 26 - 1) + chr(ord("a") + index % 26)
