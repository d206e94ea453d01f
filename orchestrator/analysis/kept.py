"""Tables from tensors: layers aligned between replicates, and weights held against each other tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from orchestrator.analysis import similarity
from orchestrator.analysis.intervals import pairwise_mean
from orchestrator.analysis.rows import CELL, ends, frame, identity, values
from orchestrator.analysis.weights import Apart, tensors_apart
from orchestrator.records import first_difference

if TYPE_CHECKING:
    from orchestrator.analysis.sweep import Cell, Sweep

LAYERS, WEIGHTS = "layers", "weights"
"""What of a run is kept, as its record says."""
PREFIXES = {LAYERS: "gram/", WEIGHTS: "weights/"}
"""What the names of its tensors start with."""

CKA = (*CELL, "layer", "depth", "n", "examples", *ends("cka"), "notes")
EQUALITY = (
    *(*CELL, "tensor", "n", "pairs", "equal_pairs", "first_step_min", "first_step_median"),
    *("compared", "largest_ulp", "distance", "cosine"),
)


def cka(sweep: Sweep) -> pd.DataFrame:
    """One row a cell and layer; see :meth:`Sweep.cka`."""
    rows: list[dict[str, Any]] = []
    for cell in (cell for cell in sweep.cells if not cell.is_control):
        layers: dict[str, list[Any]] = {}
        for id in _with(cell, LAYERS):
            for name, gram in _tensors(sweep, id, LAYERS).items():
                layers.setdefault(name, []).append(gram)
        for depth, (layer, grams) in enumerate(layers.items()):
            if len({gram.shape for gram in grams}) > 1 or len(grams) < 2 or len(grams[0]) < similarity.FEWEST:
                continue  # no pair of one test set, or too small a one
            estimate = pairwise_mean(similarity.alignments(np.stack(grams)), bounds=(-1.0, 1.0))
            rows.append(
                identity(cell)
                | {"layer": layer, "depth": depth, "n": len(grams), "examples": len(grams[0])}
                | values("cka", estimate)
                | {"notes": estimate.reason}
            )
    return frame(rows, *CKA)


def equality(sweep: Sweep) -> pd.DataFrame:
    """One row a cell and tensor; see :meth:`Sweep.equality`."""
    rows: list[dict[str, Any]] = []
    for cell in sweep.cells:
        ids = list(cell.ok["id"])
        if len(ids) < 2:
            continue
        table = sweep.store.table(["id", "tensor_digests", "losses"], ids)
        digests = [dict(row) for row in table["tensor_digests"].to_pylist()]
        steps = _first_steps([losses.values.to_numpy() for losses in table["losses"]])
        distances = _from_first(sweep, cell)
        for tensor in digests[0]:
            known = pd.Series([row.get(tensor) for row in digests]).dropna()
            n, counts = len(known), known.value_counts()
            apart = [one[tensor] for one in distances if tensor in one]
            rows.append(
                identity(cell)
                | {
                    "tensor": tensor,
                    "n": n,
                    "pairs": n * (n - 1) // 2,
                    "equal_pairs": int((counts * (counts - 1) // 2).sum()),
                    "first_step_min": min(steps, default=None),
                    "first_step_median": float(np.median(steps)) if steps else None,
                    "compared": len(apart),
                    "largest_ulp": max((one.largest_ulp for one in apart), default=None),
                    "distance": float(np.median([one.distance for one in apart])) if apart else None,
                    "cosine": float(np.median([one.cosine for one in apart])) if apart else None,
                }
            )
    return frame(rows, *EQUALITY)


def _first_steps(losses: list[Any]) -> list[int]:
    """For every pair of replicates whose losses ever differ, the first step at which they do."""
    steps = [first_difference(one, other) for index, one in enumerate(losses) for other in losses[:index]]
    return [step for step in steps if step is not None]


def _from_first(sweep: Sweep, cell: Cell) -> list[dict[str, Apart]]:
    """Every replicate's kept weights against the first's, so that no more than two are in memory."""
    kept = (tensors for id in _with(cell, WEIGHTS) if (tensors := _tensors(sweep, id, WEIGHTS)))
    first = next(kept, {})
    return [tensors_apart(first, tensors) for tensors in kept]


def _with(cell: Cell, kind: str) -> list[str]:
    """The finished runs that left tensors of one kind."""
    return [id for id, kinds in zip(cell.ok["id"], cell.ok["kept"], strict=True) if kind in kinds]


def _tensors(sweep: Sweep, id: str, kind: str) -> dict[str, Any]:
    """A run's kept tensors of one kind, layers from input to output; none where the file is lost or another's."""
    kept, prefix = sweep.store.kept(id) or {}, PREFIXES[kind]
    return {name.removeprefix(prefix): one for name, one in kept.items() if name.startswith(prefix)}
