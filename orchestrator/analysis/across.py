"""Tables across cells and groups: what determinism costs, what hangs on the base seed, when a change still spreads."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from orchestrator.analysis import intervals
from orchestrator.analysis.bases import across, components
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.overheads import median_ratio
from orchestrator.analysis.quantities import QUANTITIES
from orchestrator.analysis.rows import CELL, ends, frame, identity, reasons, values
from protocols.sources import label_sources

if TYPE_CHECKING:
    from orchestrator.analysis.sweep import Cell, Sweep

TIMES = {"train_seconds": "training", "device_seconds": "training, on the device", "seconds": "whole run"}
"""What overheads are of, and what it is called: wall time, and what the device spent computing."""

KIND = ("trainer", "architecture", "dataset", "recipe")

OVERHEADS = (*KIND, "device", "time", "n_held", "n_released", "held", "released", *ends("ratio"), "notes")
BASES = (
    *(*KIND, "source", "library", "label", "measure", "bases", "n", *ends("mean"), "sd_between"),
    *(*ends("within"), *ends("between"), "notes"),
)
CHANGES = ("distance", "cosine", "predictions_changed", "weights_changed", "barrier_error", "barrier_loss")
BOUNDS = {
    "distance": (0.0, math.inf),
    "cosine": (-1.0, 1.0),
    "predictions_changed": (0.0, 100.0),
    "weights_changed": (0.0, 100.0),
}
"""The least and greatest possible values, where there are any."""
DIVERGENCE = (
    *CELL,
    "n",
    "step",
    "first_differing_step",
    *(column for name in CHANGES for column in ends(name)),
    "notes",
)


def overheads(sweep: Sweep) -> pd.DataFrame:
    """One row a network, device and kind of time; see :meth:`Sweep.overheads`."""
    runs = sweep.runs[(sweep.runs["outcome"] == "ok") & (sweep.runs["resumed_epochs"] == 0)]
    device = [json.loads(text).get("device_seconds") for text in runs["provenance"]]
    runs = runs.assign(device_seconds=np.array(device, np.float64))
    rows = []
    for key, alike in runs.groupby([*KIND, "device"], sort=False):
        released = alike["library"] == "native"
        if not released.any() or not (alike["library"] == "held").any():
            continue
        for column, title in TIMES.items():
            held_times, free_times = (
                alike.loc[which, column].dropna().to_numpy(np.float64)
                for which in (alike["library"] == "held", released)
            )
            if not len(held_times) or not len(free_times):
                continue
            ratio = median_ratio(held_times, free_times)
            rows.append(
                dict(zip((*KIND, "device"), key, strict=True))
                | {"time": title, "n_held": len(held_times), "n_released": len(free_times)}
                | {"held": float(np.median(held_times)), "released": float(np.median(free_times))}
                | values("ratio", ratio)
                | {"notes": ratio.reason}
            )
    return frame(rows, *OVERHEADS)


def bases(sweep: Sweep) -> pd.DataFrame:
    """One row a cell that several base seeds repeat, and measure; see :meth:`Sweep.bases`."""
    repeated: dict[tuple[Any, ...], list[int]] = {}
    for index, cell in enumerate(sweep.cells):
        own = identity(cell)
        if not cell.is_control and len(cell.ok):
            repeated.setdefault(tuple(own[name] for name in (*KIND, "source", "library", "label")), []).append(index)
    rows = []
    for key, places in repeated.items():
        if len(places) < 2:
            continue
        for name in QUANTITIES:
            values_of = np.array([sweep.measured[place].estimates[name].value for place in places])
            mean, sd = across(values_of)
            row = dict(zip((*KIND, "source", "library", "label"), key, strict=True))
            row |= {"measure": name, "bases": len(places), "n": sum(len(sweep.cells[place].ok) for place in places)}
            row |= values("mean", mean) | {"sd_between": sd, "notes": reasons(mean=mean)}
            if name == "accuracy_mean":
                samples = [sweep.measured[place].accuracies for place in places]
                parts = components([sample[np.isfinite(sample)] for sample in samples], np.random.default_rng(0))
                row |= values("within", parts.within) | values("between", parts.between)
                row["notes"] = reasons(mean=mean, within=parts.within, between=parts.between)
            rows.append(row)
    return frame(rows, *BASES)


def divergence(sweep: Sweep) -> pd.DataFrame:
    """One row a cell of the onebit source, by the step of the change; see :meth:`Sweep.divergence`."""
    rows = []
    for cell in sweep.cells:
        changed = cell.ok.dropna(subset=["onebit_step"])
        if "onebit" not in label_sources(cell.source) or not len(changed):
            continue
        estimates = {name: _mean(name, values_) for name, values_ in _changes(sweep, cell, changed).items()}
        row = identity(cell) | {
            "n": len(changed),
            "step": int(changed["onebit_step"].median()),
            "first_differing_step": changed["first_differing_step"].astype(float).median(),
            "notes": reasons(**{name: one for name, one in estimates.items() if one.reason != intervals.NONE}),
        }
        for name, estimate in estimates.items():
            row |= values(name, estimate)
        rows.append(row)
    return frame(rows, *DIVERGENCE)


def _changes(sweep: Sweep, cell: Cell, changed: pd.DataFrame) -> dict[str, pd.Series]:
    """For each of ``CHANGES`` the replicates' values, shares in percent."""
    labels = sweep.labels(cell)
    found = {name: changed[name].astype(np.float64) for name in CHANGES}
    found["predictions_changed"] *= 100 / len(labels) if labels is not None else np.nan
    found["weights_changed"] *= 100 / changed["weights_total"].astype(np.float64)
    found["barrier_error"] *= 100
    return found


def _mean(name: str, values_: pd.Series) -> Estimate:
    return intervals.mean(values_.dropna().to_numpy(np.float64), bounds=BOUNDS.get(name, (-math.inf, math.inf)))
