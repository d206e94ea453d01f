"""Tables from what each replicate predicts for each test example: classes, floors, and variances apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from orchestrator.analysis import independence, measures
from orchestrator.analysis.classes import class_spreads
from orchestrator.analysis.intervals import Estimate, pairwise_mean
from orchestrator.analysis.rows import CELL, ends, frame, identity, reasons, values
from orchestrator.analysis.variances import variances

if TYPE_CHECKING:
    from orchestrator.analysis.sweep import Cell, Sweep

Integers = NDArray[np.integer[Any]]

MANY_CLASSES = 1000
"""Above so many, a table of classes would be one of a vocabulary."""

CLASSES = (*CELL, "n", "class", "examples", *ends("accuracy"), *ends("sd"), *ends("mean_sd"), *ends("largest_sd"))
FLOORS = (
    *(*CELL, "n", *ends("disagreement"), *ends("least"), *ends("independent"), *ends("independent_by_class")),
    *(*ends("accuracy_sd"), *ends("accuracy_sd_floor"), "notes"),
)
VARIANCES = (*CELL, "n", "examples", *ends("test_set_sd"), *ends("floor_sd"), *ends("distribution_sd"), "notes")


def classes(sweep: Sweep) -> pd.DataFrame:
    """One row a cell and class; see :meth:`Sweep.classes`."""
    rows = []
    for cell, predictions, labels in _predictions(sweep):
        if len(np.unique(labels)) > MANY_CLASSES:
            continue
        found = class_spreads(predictions, labels)
        shared = identity(cell) | {"n": len(predictions)}
        shared |= values("mean_sd", found.mean * 100) | values("largest_sd", found.largest * 100)
        for label, count, accuracy, spread in zip(
            found.labels, found.examples, found.accuracies, found.spreads, strict=True
        ):
            row = shared | {"class": int(label), "examples": int(count)}
            rows.append(row | values("accuracy", accuracy * 100) | values("sd", spread * 100))
    return frame(rows, *CLASSES)


def floors(sweep: Sweep) -> pd.DataFrame:
    """One row a cell; see :meth:`Sweep.floors`."""
    rows = []
    for cell, predictions, labels in _predictions(sweep):
        accuracies = (predictions == labels).mean(axis=1)
        count = int(max(labels.max(), predictions.max())) + 1
        apart = variances(predictions == labels, sweep.stopping.level(cell))
        estimates: dict[str, Estimate] = {
            "disagreement": pairwise_mean(measures.disagreement(predictions), bounds=(0.0, 1.0)),
            "least": pairwise_mean(independence.least(accuracies), bounds=(0.0, 1.0)),
            "independent": pairwise_mean(independence.uniform(accuracies, max(count, 2)), bounds=(0.0, 1.0)),
            "independent_by_class": pairwise_mean(independence.confused(predictions, labels), bounds=(0.0, 1.0)),
            "accuracy_sd": apart.test_set,
            "accuracy_sd_floor": apart.floor,
        }
        row = identity(cell) | {"n": len(predictions), "notes": reasons(**estimates)}
        for name, estimate in estimates.items():
            row |= values(name, estimate * 100)
        rows.append(row)
    return frame(rows, *FLOORS)


def apart(sweep: Sweep) -> pd.DataFrame:
    """One row a cell; see :meth:`Sweep.variances`."""
    rows = []
    for cell, predictions, labels in _predictions(sweep):
        found = variances(predictions == labels, sweep.stopping.level(cell))
        estimates = {
            "test_set_sd": found.test_set,
            "floor_sd": found.floor,
            "distribution_sd": found.distribution,
        }
        row = identity(cell) | {"n": len(predictions), "examples": len(labels), "notes": reasons(**estimates)}
        for name, estimate in estimates.items():
            row |= values(name, estimate * 100)
        rows.append(row)
    return frame(rows, *VARIANCES)


def _predictions(sweep: Sweep) -> Iterator[tuple[Cell, Integers, Integers]]:
    """The cells in which something varies, with their (models, examples) predictions and labels, where both are known
    and there are two models or more."""
    for cell in sweep.cells:
        labels = None if cell.is_control else sweep.labels(cell)
        if labels is not None:
            known = [one for one in sweep.arrays(cell.ok["id"], "predictions") if one is not None]
            known = [one for one in known if one.shape == labels.shape]
            if len(known) > 1:
                yield cell, np.stack(known), labels
