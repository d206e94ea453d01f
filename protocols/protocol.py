"""Cells and protocols: the grid of what is to be compared, before it is expanded into runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocols.errors import UserError, unknown
from protocols.recipe import Recipe
from protocols.sources import LIBRARY_KINDS, parse_sources

MEASURES = ("accuracy_sd", "cross_entropy_sd", "disagreement", "correlation", "ensemble_gain")


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Which examples: a dataset by short name or import path, or a stratified part of it."""

    name: str
    train_size: int | None = None
    """Number of training examples, the same share of each class, the first of each class; None: all."""
    test_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("train_size", "test_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"dataset.{name} must be at least 1, not {value}")

    def __str__(self) -> str:
        sizes = "/".join("all" if size is None else str(size) for size in (self.train_size, self.test_size))
        return self.name if sizes == "all/all" else f"{self.name}[{sizes}]"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination. ``source`` varies between its replicates; everything else is held bit for bit."""

    source: str
    """A source, several joined by ``+``, ``none`` or ``all``."""
    architecture: str
    dataset: DatasetSpec
    trainer: str
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        parse_sources(self.source)

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
    control_replicates: int | None = None
    """Replicates of the control that every group gets; None: as many as ``replicates``, but at least 2."""
    base_seeds: tuple[int, ...] = (0,)
    """Each gives the whole grid once more. Cells that share a base seed are conditional on it."""
    library: str = "order"
    """What the ``library`` source is, where it varies: see ``LIBRARY_KINDS``."""
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
        if self.control_replicates is not None and self.control_replicates < 2:
            raise UserError(f"control_replicates must be at least 2, not {self.control_replicates}")
        if not self.cells:
            raise UserError(f"protocol {self.name!r} has no cells")
        if not self.base_seeds:
            raise UserError("base_seeds must hold at least one seed")
        for seed in self.base_seeds:
            if seed < 0:
                raise UserError(f"base_seeds must be at least 0, not {seed}")
        if len(set(self.base_seeds)) < len(self.base_seeds):
            raise UserError("base_seeds holds one seed twice")
        if self.library not in LIBRARY_KINDS:
            raise unknown("library kind", self.library, LIBRARY_KINDS)
        for measure in self.measures:
            if measure not in MEASURES:
                raise unknown("measure", measure, MEASURES)
        if not (self.margin > 1 and math.isfinite(self.margin)):
            raise UserError(f"margin must be a finite number above 1, not {self.margin}")

    @property
    def controls(self) -> int:
        """How many control replicates a group gets."""
        return max(2, self.replicates) if self.control_replicates is None else self.control_replicates


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
