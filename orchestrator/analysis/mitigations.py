"""What reduces the noise, and what it costs: evaluations, recipes and deep ensembles against the base recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from orchestrator.analysis import measures
from orchestrator.analysis.cell import Floats, Measured, measure
from orchestrator.analysis.jackknife import Integers, Jackknife
from orchestrator.analysis.reductions import reduction
from orchestrator.analysis.rows import SETTING, ends, frame, reasons, values
from protocols.protocol import MEASURES

if TYPE_CHECKING:
    from orchestrator.analysis.sweep import Cell, Sweep

EVALUATIONS = ("views", "ema_decay", "swa_epochs")
"""Settings of a recipe that add evaluations and change nothing about the training."""

BASE, EVALUATION, RECIPE, ENSEMBLE = "base", "evaluation", "recipe", "ensemble"

SHOWN = ("accuracy_mean", *MEASURES)

COLUMNS = (
    *("group", *SETTING, "source", "label", "mitigation", "kind", "paired", "n", "n_base"),
    *(column for name in SHOWN for column in ends(name)),
    *(column for name in MEASURES for column in (*ends(f"{name}_reduction"), f"{name}_verdict")),
    *(*ends("reduction"), "training_cost", "inference_cost", "notes"),
)

TITLES = {
    "cycles": "accelerated ensembling, {} cycles",
    "label_smoothing": "label smoothing {}",
    "warmup_epochs": "warm-up {} epochs",
    "learning_rate": "learning rate {}",
}
"""What a setting that differs from the base recipe's is called; others by their names."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train or evaluate, and its models' measures."""

    title: str
    kind: str
    measured: Measured
    base: Measured
    """What it is held against."""
    paired: bool
    blocks: Integers | None
    """Deep ensembles: for each of the base's models the ensemble that it is part of; -1: of none."""
    training: float
    """Training examples visited, times those of the base."""
    inference: float
    """Forward passes for each test example, times those of the base."""


def mitigations(sweep: Sweep) -> pd.DataFrame:
    """One row for each base cell and whatever is held against it; see :meth:`Sweep.mitigations`."""
    rows = []
    for group, others in _studies(sweep).items():
        for index, cell in enumerate(sweep.cells):
            if cell.group == group and not cell.is_control and len(cell.ok):
                found = list(_candidates(sweep, index, others))
                if found:
                    rows.append(_base_row(sweep, index))
                rows += [_row(sweep, index, candidate) for candidate in found]
    return frame(rows, *COLUMNS)


def _studies(sweep: Sweep) -> dict[str, list[str]]:
    """For each group whose recipe is the base, the groups of other recipes that are held against it.

    The base recipe of a trainer, architecture and dataset is that of the protocol's first cell with these. Of several
    groups that are trained by it the base is the one with the most evaluations, whose effects are paired.
    """
    studies: dict[str, list[str]] = {}
    for _, groups in sweep.groups.groupby(list(SETTING), sort=False):
        names = [str(group) for group in groups["group"]]
        bases = [name for name in names if _is_base(sweep, name)]
        base = max(bases, key=lambda name: _evaluated(_recipe(sweep, name)), default=None)
        studies |= {name: [] for name in names} if base is None else {base: [name for name in names if name != base]}
    return studies


def _is_base(sweep: Sweep, group: str) -> bool:
    first = sweep.groups[sweep.groups["group"] == group].iloc[0]
    for cell in sweep.protocol.cells if sweep.protocol else ():
        if (cell.trainer, cell.architecture, str(cell.dataset)) == tuple(first[list(SETTING[:3])]):
            own = _recipe(sweep, group)
            declared = json.loads(json.dumps(asdict(cell.recipe)))
            # What the protocol leaves to the dataset's standard recipe is filled in by the plan.
            shared = {name: value for name, value in declared.items() if name not in EVALUATIONS and value is not None}
            return all(own.get(name) == value for name, value in shared.items())
    return False


def _evaluated(recipe: dict[str, Any]) -> int:
    """How many further evaluations a recipe asks for."""
    return len(recipe["views"]) + bool(recipe["ema_decay"]) + bool(recipe["swa_epochs"])


def _recipe(sweep: Sweep, group: str) -> dict[str, Any]:
    specification = sweep.runs.loc[sweep.runs["group"] == group, "specification"].iloc[0]
    recipe: dict[str, Any] = json.loads(specification)["recipe"]
    return recipe


def _candidates(sweep: Sweep, index: int, others: list[str]) -> Iterator[Candidate]:
    """All that is held against one base cell: its own further evaluations, other recipes and theirs, ensembles."""
    cell = sweep.cells[index]
    whole, kept = sweep.measured[index], _of_kept_logits(sweep, index)
    passes = _passes(cell)
    for name, measured, count in _evaluations(sweep, cell):
        yield Candidate(
            title=name,
            kind=EVALUATION,
            measured=measured,
            base=kept,
            paired=True,
            blocks=None,
            training=1.0,
            inference=count / passes,
        )
    base = _recipe(sweep, cell.group)
    for place, other in enumerate(sweep.cells):
        if other.group in others and other.label == cell.label and len(other.ok):
            recipe = _recipe(sweep, other.group)
            title = _title(base, recipe)
            cost = recipe["epochs"] / base["epochs"]
            found = [(title, sweep.measured[place], whole, _passes(other))] if title else []
            for name, measured, count in _evaluations(sweep, other):
                found.append((f"{title} + {name}" if title else f"{name} (trained apart)", measured, kept, count))
            for name, measured, before, count in found:
                yield Candidate(
                    title=name,
                    kind=RECIPE,
                    measured=measured,
                    base=before,
                    paired=False,
                    blocks=None,
                    training=cost,
                    inference=count / passes,
                )
    size = sweep.protocol.ensemble if sweep.protocol else None
    if size is not None and len(cell.ok) >= 2 * size:
        measured, blocks = _ensembles(sweep, cell, size)
        yield Candidate(
            title=f"deep ensemble of {size}",
            kind=ENSEMBLE,
            measured=measured,
            base=kept,
            paired=True,
            blocks=blocks,
            training=float(size),
            inference=float(size),
        )


def _title(base: dict[str, Any], recipe: dict[str, Any]) -> str:
    """What the training of a recipe differs in from the base's; empty where it does not."""
    changed = [name for name in recipe if name not in EVALUATIONS and recipe[name] != base.get(name)]
    texts = []
    for name in changed:
        value = f"{recipe[name]:g}" if isinstance(recipe[name], float) else str(recipe[name])
        texts.append(TITLES.get(name, f"{name}={{}}").format(value))
    return ", ".join(texts)


def _passes(cell: Cell) -> int:
    return int(cell.ok["passes"].iloc[0])


def _evaluations(sweep: Sweep, cell: Cell) -> Iterator[tuple[str, Measured, int]]:
    """The further evaluations of a cell's models: name, measures, forward passes an example."""
    ids = list(cell.ok["id"])
    variants = {id: {variant.name: variant for variant in found} for id, found in sweep.store.variants(ids)}
    names = dict.fromkeys(name for found in variants.values() for name in found)
    for name in names:
        found = [variants.get(id, {}).get(name) for id in ids]
        count = next(variant.passes for variant in found if variant is not None)
        yield name, _measured(sweep, cell, [None if one is None else one.logits for one in found]), count


def _ensembles(sweep: Sweep, cell: Cell, size: int) -> tuple[Measured, Integers]:
    """Replicates averaged in blocks of ``size``, in their order; what is left over is in none."""
    ids = list(cell.ok["id"])
    whole = len(ids) // size
    blocks = np.where(np.arange(len(ids)) < whole * size, np.arange(len(ids)) // size, -1)
    logits = dict(sweep.store.logits(ids))
    means: list[Floats | None] = []
    for block in range(whole):
        members = [logits.get(id) for id in np.array(ids)[blocks == block]]
        known = [one.astype(np.float64) for one in members if one is not None]
        means.append(sum(known[1:], known[0]) / size if len(known) == size else None)
    return _measured(sweep, cell, means), blocks


def _of_kept_logits(sweep: Sweep, index: int) -> Measured:
    """The measures of a cell's own models, of all five on the examples whose logits are kept: almost always all."""
    cell = sweep.cells[index]
    ids, labels = list(cell.ok["id"]), sweep.labels(cell)
    first = dict(sweep.store.logits(ids[:1])).get(ids[0])
    if first is None or labels is None or not 0 < len(first) < len(labels):
        return sweep.measured[index]
    logits = dict(sweep.store.logits(ids))
    return _measured(sweep, cell, [logits.get(id) for id in ids])


def _measured(sweep: Sweep, cell: Cell, logits: list[Any]) -> Measured:
    """The measures of other logits of a cell's models; None where a model has none."""
    labels, note = sweep.labels(cell), ""
    rows = next((len(one) for one in logits if one is not None), 0)
    if labels is not None and 0 < rows < len(labels):
        note = (
            f"held against each other over the first {rows:,} of {len(labels):,} test examples, whose logits are kept"
        )
        labels = labels[:rows]
    scored = [one is not None and labels is not None and one.shape[:1] == labels.shape for one in logits]

    def each(function: Any) -> Floats:
        scores = [function(one[None], labels)[0] if ok else np.nan for one, ok in zip(logits, scored, strict=True)]
        return np.array(scores, np.float64)

    found = measure(
        each(measures.accuracy),
        each(measures.cross_entropy),
        [None if one is None else measures.predictions(one[None])[0] for one in logits],
        logits,
        labels,
    )
    return replace(found, notes=(*found.notes, note)) if note else found


def _row(sweep: Sweep, index: int, candidate: Candidate) -> dict[str, Any]:
    before, after = _distances(candidate)
    found = reduction(before, after, sweep.margin, candidate.paired)
    notes = [*candidate.measured.notes, reasons(**{**found.measures, "mean reduction": found.mean})]
    row = _shared(sweep.cells[index], candidate.measured) | {
        "mitigation": candidate.title,
        "kind": candidate.kind,
        "paired": candidate.paired,
        "n": len(candidate.measured.comparable),
        "n_base": len(candidate.base.comparable),
        "training_cost": candidate.training,
        "inference_cost": candidate.inference,
        "notes": "; ".join(note for note in notes if note),
    }
    for name in MEASURES:
        row |= values(f"{name}_reduction", found.measures[name] * 100)
        row[f"{name}_verdict"] = found.comparisons[name].verdict
    return row | values("reduction", found.mean * 100)


def _distances(candidate: Candidate) -> tuple[dict[str, Jackknife], dict[str, Jackknife]]:
    """The five measures before and after: of the same models, or of all of either."""
    base, other, blocks = candidate.base, candidate.measured, candidate.blocks
    if not candidate.paired:
        return base.distances(), other.distances()
    if blocks is None:
        both = sorted(set(base.comparable) & set(other.comparable))
        return base.distances(both), other.distances(both)
    members = {block: np.flatnonzero(blocks == block).tolist() for block in other.comparable}
    whole = [block for block in members if set(members[block]) <= set(base.comparable)]
    models = [model for block in whole for model in members[block]]
    numbers = np.array([number for number, block in enumerate(whole) for _ in members[block]], np.int64)
    return base.distances(models, numbers), other.distances(whole)


def _base_row(sweep: Sweep, index: int) -> dict[str, Any]:
    measured = sweep.measured[index]
    n = len(measured.comparable)
    costs = {"training_cost": 1.0, "inference_cost": 1.0}
    own = {"mitigation": "none", "kind": BASE, "paired": True, "n": n, "n_base": n, "notes": ""}
    return _shared(sweep.cells[index], measured) | own | costs


def _shared(cell: Cell, measured: Measured) -> dict[str, Any]:
    first = cell.runs.iloc[0]
    row: dict[str, Any] = {name: first[name] for name in ("group", *SETTING, "source")} | {"label": cell.label}
    for name in SHOWN:
        row |= values(name, measured.estimates[name])
    return row
