"""Cells and protocols: the grid of what is to be compared, before it is expanded into runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocols.errors import UserError, unknown
from protocols.perturbation import Perturbation
from protocols.recipe import Recipe
from protocols.sources import ASYNCHRONIES, LIBRARY_KINDS, parse_sources
from protocols.until import Until

MEASURES = ("accuracy_sd", "cross_entropy_sd", "disagreement", "correlation", "ensemble_gain")
"""The five of Summers & Dinneen (ICML 2021)."""
DECLARED = (*MEASURES, "perplexity_sd")
"""What a protocol can declare; the perplexity is of language models."""

KEEP = {
    "weights": "the final weights, as a safetensors file beside the record",
    "layers": "the inner products of every layer's activations on the first test examples, which CKA compares",
    "barrier": "onebit only: the loss barrier on the straight line to the unchanged run's weights, with batch-norm "
    "statistics estimated anew",
}
"""What a run may leave beside what every record holds."""

ISOLATIONS = {
    "profile": "a process trains one run after another while the determinism profile stays the same",
    "process": "every run has a process of its own",
}


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Which examples: a dataset by short name or import path, or a stratified part of it."""

    name: str
    train_size: int | None = None
    """Number of training examples, the same share of each class, the first of each class; None: all."""
    test_size: int | None = None
    image_size: int | None = None
    """Images are shrunk to this many pixels a side, by the mean over squares; None: as they are."""
    skip_broken: bool = False
    """Photographs that cannot be decoded are left out, and counted, instead of stopping the study."""

    def __post_init__(self) -> None:
        for name in ("train_size", "test_size", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"dataset.{name} must be at least 1, not {value}")

    def __str__(self) -> str:
        sizes = "/".join("all" if size is None else str(size) for size in (self.train_size, self.test_size))
        parts = [] if sizes == "all/all" else [sizes]
        if self.image_size is not None:
            parts.append(f"{self.image_size}px")
        if self.skip_broken:
            parts.append("skip broken")
        return f"{self.name}[{' '.join(parts)}]" if parts else self.name


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination. ``source`` varies between its replicates; everything else is held bit for bit."""

    source: str
    """A source, several joined by ``+``, ``none`` or ``all``."""
    architecture: str
    dataset: DatasetSpec
    trainer: str
    recipe: Recipe = field(default_factory=Recipe)
    perturb: Perturbation = field(default_factory=Perturbation)
    """What onebit changes, where it varies."""
    replicates: int | None = None
    """How often the cell is repeated, where that differs from the protocol's ``replicates``."""
    priority: int = 0
    """Cells of a higher one are trained first. Part of no run's id, and changes no bit."""

    def __post_init__(self) -> None:
        parse_sources(self.source)
        if self.replicates is not None and self.replicates < 1:
            raise UserError(f"replicates of a cell must be at least 1, not {self.replicates}")

    def __str__(self) -> str:
        return f"{self.source} / {self.architecture} / {self.dataset} / {self.trainer}"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A named set of cells, how often each is repeated, and what is declared before looking at a result.

    Raises:
        UserError: a value lies outside its range.
    """

    name: str
    summary: str
    cells: tuple[Cell, ...]
    replicates: int
    """Of each cell; with ``until`` the most of them, ``until.at_most``."""
    until: Until | None = None
    """Cells that have no number of replicates of their own get more until their spread is known; None: all at once."""
    control_replicates: int | None = None
    """Replicates of the control that every group gets; None: as many as ``replicates`` (with ``until`` as many as
    ``until.at_least``), but at least 2."""
    base_seeds: tuple[int, ...] = (0,)
    """Each gives the whole grid once more. Cells that share a base seed are conditional on it."""
    library: str = "order"
    """What the ``library`` source is, where it varies: see ``LIBRARY_KINDS``."""
    asynchrony: str = "simulated"
    """What the ``async`` source is, where it varies: see ``ASYNCHRONIES``."""
    keep: tuple[str, ...] = ()
    """What runs leave beside their records: see ``KEEP``."""
    ensemble: int | None = None
    """Reports show deep ensembles of so many replicates beside what reduces the noise at less cost."""
    isolation: str = "profile"
    """How runs share processes: see ``ISOLATIONS``. Changes no bit."""
    between_runs: str | None = None
    """A command run before each run, e.g. to reset a GPU; its exit code is recorded. Changes no bit."""
    measures: tuple[str, ...] = MEASURES
    margin: float = 1.25
    """Two SDs whose ratio lies within 1/margin to margin count as alike."""
    reference: str = ""
    """The publication it follows."""
    deviations: tuple[str, ...] = ()
    """What differs from that publication."""

    def __post_init__(self) -> None:
        if self.replicates < 1:
            raise UserError(f"replicates must be at least 1, not {self.replicates}")
        if self.until is not None and self.until.at_most != self.replicates:
            raise UserError(f"replicates is {self.replicates}, but until.at_most is {self.until.at_most}")
        if self.control_replicates is not None and self.control_replicates < 2:
            raise UserError(f"control_replicates must be at least 2, not {self.control_replicates}")
        if not self.cells:
            raise UserError(f"protocol {self.name!r} has no cells")
        if not self.base_seeds:
            raise UserError("base_seeds must hold at least one seed")
        for seed in self.base_seeds:
            if not 0 <= seed < 2**63:
                raise UserError(f"base_seeds must be at least 0 and below 2^63, not {seed}")
        if len(set(self.base_seeds)) < len(self.base_seeds):
            raise UserError("base_seeds holds one seed twice")
        if self.library not in LIBRARY_KINDS:
            raise unknown("library kind", self.library, LIBRARY_KINDS)
        for measure in self.measures:
            if measure not in DECLARED:
                raise unknown("measure", measure, DECLARED)
        if self.asynchrony not in ASYNCHRONIES:
            raise unknown("kind of asynchrony", self.asynchrony, ASYNCHRONIES)
        if self.isolation not in ISOLATIONS:
            raise unknown("isolation", self.isolation, ISOLATIONS)
        for kept in self.keep:
            if kept not in KEEP:
                raise unknown("thing to keep", kept, KEEP)
        if len(set(self.keep)) < len(self.keep):
            raise UserError("keep names one thing twice")
        if self.ensemble is not None and self.ensemble < 2:
            raise UserError(f"ensemble must be at least 2, not {self.ensemble}")
        if not (self.margin > 1 and math.isfinite(self.margin)):
            raise UserError(f"margin must be a finite number above 1, not {self.margin}")

    @property
    def controls(self) -> int:
        """How many control replicates a group gets."""
        if self.control_replicates is not None:
            return self.control_replicates
        return max(2, self.replicates if self.until is None else self.until.at_least)


def grid(
    *,
    sources: Iterable[str],
    architectures: Iterable[str],
    datasets: Iterable[str | DatasetSpec],
    trainers: Iterable[str],
    recipe: Recipe | None = None,
) -> tuple[Cell, ...]:
    """Every combination of the given sources, architectures, datasets and trainers, with one recipe."""
    return tuple(
        Cell(
            source=source,
            architecture=architecture,
            dataset=DatasetSpec(name=dataset) if isinstance(dataset, str) else dataset,
            trainer=trainer,
            recipe=recipe or Recipe(),
        )
        for trainer, architecture, dataset, source in itertools.product(trainers, architectures, datasets, sources)
    )
