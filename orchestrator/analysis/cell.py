"""The measures of one cell, from the arrays of its replicates: whatever can be estimated, and why the rest cannot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.analysis import intervals, measures
from orchestrator.analysis.intervals import LEVEL, Estimate
from orchestrator.analysis.jackknife import Jackknife
from orchestrator.analysis.quantities import QUANTITIES
from orchestrator.analysis.reductions import PAIRS, distance
from protocols.protocol import MEASURES

Array = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """A measure of every pair of a cell's replicates."""

    models: tuple[int, ...]
    """Which replicates, as indices into those that were given."""
    matrix: Floats
    """(models, models)"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of one cell; shares are in the unit of ``QUANTITIES``."""

    estimates: Mapping[str, Estimate]
    """For every name of ``QUANTITIES``."""
    pairs: Mapping[str, Pairs]
    """For those measures of pairs that could be computed."""
    accuracies: Floats
    """(models,) of those that were given, in the unit of ``accuracy_sd``; NaN where unknown."""
    cross_entropies: Floats
    """(models,) likewise."""
    papers: Mapping[str, float]
    """The same SDs as the papers compute them (ddof=0) and, as ``..._se``, their bootstrap standard errors."""
    notes: tuple[str, ...]
    """What was left out."""

    @property
    def reasons(self) -> list[str]:
        """Why values or intervals are missing: each reason once, after the measures that it concerns."""
        concerned: dict[str, list[str]] = {}
        for name, estimate in self.estimates.items():
            if estimate.reason and name != "perplexity_sd":  # the cross-entropy's, whose exponential it is
                concerned.setdefault(estimate.reason, []).append(QUANTITIES[name].title)
        return [
            reason if len(titles) == len(self.estimates) - 1 else f"{', '.join(titles)}: {reason}"
            for reason, titles in concerned.items()
        ]

    def models(self, name: str) -> tuple[int, ...]:
        """The models, as indices into those that were given, that enter one of the five measures."""
        if name in PAIRS:
            return self.pairs[name].models if name in self.pairs else ()
        values = self.accuracies if name == "accuracy_sd" else self.cross_entropies
        return tuple(np.flatnonzero(np.isfinite(values)).tolist())

    @property
    def comparable(self) -> tuple[int, ...]:
        """The models that enter all five measures."""
        return tuple(sorted(set.intersection(*(set(self.models(name)) for name in MEASURES))))

    def distance(
        self, name: str, models: Sequence[int] | None = None, blocks: NDArray[np.integer[Any]] | None = None
    ) -> Jackknife:
        """One of the five measures as a number that is 0 where models do not differ, in the unit of ``QUANTITIES``.

        Args:
            name: of ``protocols.protocol.MEASURES``.
            models: some of :meth:`models`; None: all of them.
            blocks: see :func:`orchestrator.analysis.jackknife.deviation`.
        """
        rows = list(self.models(name) if models is None else models)
        if name in PAIRS:
            place = [self.pairs[name].models.index(model) for model in rows]
            matrix = self.pairs[name].matrix[np.ix_(place, place)] if rows else np.empty((0, 0))
            return distance(name, matrix, blocks)
        return distance(name, (self.accuracies if name == "accuracy_sd" else self.cross_entropies)[rows], blocks)

    def distances(
        self, models: Sequence[int] | None = None, blocks: NDArray[np.integer[Any]] | None = None
    ) -> dict[str, Jackknife]:
        """:meth:`distance` of all five measures."""
        return {name: self.distance(name, models, blocks) for name in MEASURES}


def measure(
    accuracies: Floats,
    cross_entropies: Floats,
    predictions: Sequence[Array | None],
    logits: Sequence[Array | None],
    labels: Array | None,
    accuracy_level: float = LEVEL,
) -> Measured:
    """All measures of one cell.

    Args:
        accuracies: (models,), 0 to 1, NaN where unknown.
        cross_entropies: (models,), NaN where unknown.
        predictions: for each model (examples,), or None.
        logits: for each model (examples, classes), or None. Fewer examples than there are labels are the first ones.
        labels: (examples,), or None if they are not known.
        accuracy_level: the nominal coverage of the interval of the accuracy's SD.
    """
    given = QUANTITIES["accuracy_sd"].scale * accuracies, cross_entropies
    estimates: dict[str, Estimate] = {}
    papers: dict[str, float] = {}
    notes: list[str] = []

    accuracies = _known(accuracies, "accuracy", notes)
    cross_entropies = _known(cross_entropies, "cross-entropy", notes)
    estimates["accuracy_mean"] = intervals.mean(accuracies, bounds=(0.0, 1.0))
    estimates["perplexity_sd"] = intervals.spread(np.exp(cross_entropies))
    for name, values in (("accuracy_sd", accuracies), ("cross_entropy_sd", cross_entropies)):
        estimates[name] = intervals.spread(values, accuracy_level if name == "accuracy_sd" else LEVEL)
        scale = QUANTITIES[name].scale
        papers[name] = scale * measures.standard_deviation(values, ddof=0)
        # A generator of its own for every number, so that none depends on what else is in the table.
        papers[f"{name}_se"] = scale * intervals.bootstrap_error(values, np.random.default_rng(0))

    matrices: dict[str, Pairs] = {}

    def add(
        name: str, function: Callable[[Sequence[Array]], Floats], models: tuple[int, ...], arrays: Sequence[Array]
    ) -> None:
        matrix = function(arrays) if models else np.empty((0, 0))
        matrices[name] = Pairs(models=models, matrix=matrix * QUANTITIES[name].scale)
        estimates[name] = intervals.pairwise_mean(matrix, bounds=QUANTITIES[name].bounds)

    models, arrays = _comparable(predictions, "predictions", notes)
    add("disagreement", lambda arrays: measures.disagreement(np.stack(arrays)), models, arrays)
    total = len(arrays[0]) if models else 0
    models, arrays = _comparable(logits, "logits", notes)
    add("correlation", measures.spearman, models, arrays)
    add("pearson", measures.pearson, models, arrays)
    tested = len(arrays[0]) if models else 0
    if 0 < tested < total:
        notes.append(f"correlations and gain are over the first {tested:,} of {total:,} test examples")
    if labels is not None and 0 < tested <= len(labels):
        known = labels[:tested]
        add("ensemble_gain", lambda arrays: measures.ensemble_gain(arrays, known), models, arrays)
    elif not models:
        estimates["ensemble_gain"] = estimates["correlation"]
    else:
        estimates["ensemble_gain"] = Estimate(value=math.nan, reason="the labels of the test set are not in the store")

    return Measured(
        estimates={name: estimates[name] * quantity.scale for name, quantity in QUANTITIES.items()},
        pairs={name: pairs for name, pairs in matrices.items() if len(pairs.models) > 1},
        accuracies=given[0],
        cross_entropies=given[1],
        papers=papers,
        notes=tuple(notes),
    )


def _known(values: Floats, what: str, notes: list[str]) -> Floats:
    known = values[np.isfinite(values)]
    if len(known) < len(values):
        notes.append(f"{len(values) - len(known)} of {len(values)} replicates have no finite {what} and are left out")
    return known


def _comparable(arrays: Sequence[Array | None], what: str, notes: list[str]) -> tuple[tuple[int, ...], list[Array]]:
    """Those models whose arrays are there, finite and of one shape, and these arrays."""
    usable = {model: array for model, array in enumerate(arrays) if array is not None and np.isfinite(array).all()}
    if len(usable) < len(arrays):
        notes.append(f"{len(arrays) - len(usable)} of {len(arrays)} replicates have no finite {what}: in no pair")
    shapes = {array.shape for array in usable.values()}
    if len(shapes) > 1:
        notes.append(f"the replicates' {what} differ in shape ({', '.join(map(str, sorted(shapes)))}): no pairs")
        usable = {}
    return tuple(usable), list(usable.values())
