"""One self-contained HTML page from a sweep: no network, no script; figures inline, light, dark and in print."""

from __future__ import annotations

import importlib.resources
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from orchestrator.analysis.cell import Measured
from orchestrator.analysis.controls import NOT_HELD
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.quantities import QUANTITIES
from orchestrator.analysis.sweep import Cell, Sweep
from orchestrator.report import facts, figures, studies, study_figures, text
from orchestrator.report.files import save
from protocols.sources import ALL

HEAT_MAP_REPLICATES = 12
"""Replicates of a source that the heat map shows at most; more would be finer than a pixel."""

Limits = dict[tuple[str, str, str], tuple[float, float]]
"""The ends of the axis for an architecture, a dataset and a measure."""


def write_html(sweep: Sweep, path: str | os.PathLike[str], command: str | None = None) -> None:
    """Write a sweep's report as one HTML file.

    Args:
        sweep: what to report, finished or not.
        path: the file.
        command: what repeats the sweep; None: made from the protocol's name and the store's place.

    Raises:
        UserError: the file cannot be written.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = importlib.resources.files("orchestrator.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        name=sweep.protocol.name if sweep.protocol else os.path.basename(sweep.store.url),
        protocol=sweep.protocol,
        method=text.method(sweep),
        progress=facts.progress(sweep),
        controls=facts.controls(sweep),
        setting=facts.setting(sweep),
        sources=facts.sources(sweep),
        groups=_groups(sweep),
        sections=[(section, study_figures.figures(sweep, section.name)) for section in studies.sections(sweep)],
        outcomes=facts.outcomes(sweep),
        failures=facts.failures(sweep),
        corrupt=sweep.store.corrupt(),
        machines=facts.machines(sweep),
        provenance=facts.provenance(sweep),
        command=command or facts.command(sweep),
        store=sweep.store.url,
        runs=facts.runs(sweep),
    )
    save(path, page)


@dataclass(frozen=True)
class Row:
    """One cell, all that is shown of it."""

    cell: Cell
    measured: Measured
    notes: list[str]
    history: pd.DataFrame


def _groups(sweep: Sweep) -> list[dict[str, Any]]:
    rows = [
        Row(cell, measured, sweep.notes(cell, measured), history)
        for cell, measured, history in zip(sweep.cells, sweep.measured, sweep.histories(), strict=True)
    ]
    limits = _limits(rows)
    groups = []
    for index, group in enumerate(sweep.groups["group"]):
        own = [row for row in rows if row.cell.group == group]
        groups.append(
            {
                "title": sweep.group_title(group),
                "invalid": sweep.verdicts[group].verdict == NOT_HELD,
                "table": _table(own, text.columns(sweep)),
                "papers": [_papers(row) for row in own],
                "onebit": [sentence for row in own if (sentence := facts.onebit(row.cell))],
                "figures": _figures(sweep, f"g{index}", [row for row in own if len(row.cell.ok)], limits),
            }
        )
    return groups


def _table(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    marks, notes = text.footnotes(row.notes for row in rows)
    return {
        "heads": [QUANTITIES[name] for name in names],
        "notes": notes,
        "rows": [
            {
                "label": row.cell.label,
                "reference": row.cell.source == ALL,
                "mark": mark,
                "n": text.count(row.cell),
                "values": [
                    (text.number(estimate.value, name), text.interval(estimate, name))
                    for name in names
                    for estimate in [row.measured.estimates[name]]
                ],
            }
            for row, mark in zip(rows, marks, strict=True)
        ],
    }


def _papers(row: Row) -> dict[str, str]:
    """A row in the papers' own conventions, with Pearson's correlation beside them."""
    values = {"label": row.cell.label, "n": text.count(row.cell)}
    for name in ("accuracy_sd", "cross_entropy_sd"):
        value, error = row.measured.papers[name], row.measured.papers[f"{name}_se"]
        values[name] = f"{text.number(value, name)} ± {text.number(error, name)}"
    return values | {"pearson": text.number(row.measured.estimates["pearson"].value, "pearson")}


def _figures(sweep: Sweep, name: str, rows: Sequence[Row], limits: Limits) -> list[dict[str, str]]:
    """The figures of one group, each with its heading and what to look for."""
    if not rows:
        return []
    cells = [row.cell for row in rows]
    labels, counts = _short_labels(cells), [len(cell.ok) for cell in cells]
    found = []

    def add(title: str, caption: str, svg: str) -> None:
        found.append({"title": title, "caption": caption, "svg": svg})

    add(
        "Accuracy of every replicate",
        "One dot is one trained network; the control's must all fall on one value. From "
        f"{figures.BOX} replicates on a box spans the middle half, its line is the median.",
        figures.distributions(
            f"{name}-accuracy", labels, [100 * cell.ok["accuracy"].dropna().to_numpy(np.float64) for cell in cells]
        ),
    )
    reference = next((index for index, cell in enumerate(cells) if cell.source == ALL), None)
    for measure in text.columns(sweep)[1:]:
        estimates = [row.measured.estimates[measure] for row in rows]
        axis = limits[_shared(cells[0], measure)]
        add(
            QUANTITIES[measure].title,
            CAPTIONS[measure],
            figures.intervals(f"{name}-{measure}", measure, labels, counts, estimates, reference, axis),
        )
    models, matrix = sweep.disagreement_map(cells[0].group, HEAT_MAP_REPLICATES)
    short = {cell.label: label for cell, label in zip(cells, labels, strict=True)}
    if len(models) > 1:
        add(
            "Who disagrees with whom",
            "Every network against every other, columns in the order of the rows, with the mean of each block. Blocks "
            "on the diagonal compare replicates of one source, the others the networks of two sources. At most "
            f"{HEAT_MAP_REPLICATES} replicates a source.",
            figures.heat_map(f"{name}-map", [short[label] for label in models["label"]], matrix),
        )
    curves = {short[row.cell.label]: row.history for row in rows if len(row.history)}
    if curves:
        add(
            "Test error while training",
            "Line: mean of the replicates. Band: from the lowest to the highest. Look for when the band opens, and "
            "whether it closes towards the end.",
            figures.learning_curves(f"{name}-curves", list(curves), list(curves.values())),
        )
    return found


def _short_labels(cells: Sequence[Cell]) -> list[str]:
    """Labels for figures: without the library's kind, which the table names, unless two would be alike."""
    short = [cell.label if cell.source == "library" else cell.source for cell in cells]
    return short if len(set(short)) == len(short) else [cell.label for cell in cells]


CAPTIONS = {
    "accuracy_sd": "How far the accuracy moves when this source alone varies. Where intervals overlap widely, "
    "n is too small to rank the sources.",
    "cross_entropy_sd": "The same for the test loss, which also feels how sure a network is.",
    "perplexity_sd": "The same for the perplexity, by which language models are judged.",
    "disagreement": "Test examples on which two replicates differ. Networks of equal accuracy can still err "
    "on different examples.",
    "correlation": "1: two replicates rank all their logits alike. The further left, the further apart they are.",
    "ensemble_gain": "What averaging two replicates adds to one of them. Near 0 they make the same mistakes.",
}
"""What to look for in the interval plot of each measure."""


def _shared(cell: Cell, measure: str) -> tuple[str, str, str]:
    """What cells must have in common for their values of a measure to be drawn on one axis."""
    first = cell.runs.iloc[0]
    return first["architecture"], first["dataset"], measure


def _limits(rows: Sequence[Row]) -> Limits:
    """The axis of each measure, one for all groups of an architecture and dataset, so that they can be compared."""
    estimates: dict[tuple[str, str, str], list[Estimate]] = {}
    for row in rows:
        for measure, estimate in row.measured.estimates.items():
            estimates.setdefault(_shared(row.cell, measure), []).append(estimate)
    return {key: axis_limits(values, 1.0 if key[2] == "correlation" else 0.0) for key, values in estimates.items()}


def axis_limits(estimates: Sequence[Estimate], zero: float) -> tuple[float, float]:
    """Limits that show every value, its interval, and the point where models do not differ.

    An interval that reaches 2.5 times as far from that point as any value is cut off there, or one cell with few
    replicates would squeeze all the others.
    """
    values = [estimate.value - zero for estimate in estimates if math.isfinite(estimate.value)]
    ends = [e - zero for estimate in estimates for e in (estimate.low, estimate.high) if math.isfinite(e)]
    reach = 2.5 * max(map(abs, values), default=0.0) or 1.0
    low, high = max(min([0.0, *values, *ends]), -reach), min(max([0.0, *values, *ends]), reach)
    if low == high:
        low, high = (-1.0, 0.0) if zero else (0.0, 1.0)
    margin = 0.04 * (high - low)
    return zero + (low - margin if low < 0 else 0.0), zero + (high + margin if high > 0 else 0.0)
