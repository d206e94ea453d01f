"""From a protocol to its runs, and from its runs to what is still to be trained.

Everything that can be known to be wrong is found here, before anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from orchestrator import catalog
from protocols import protocol as grids
from protocols import streams
from protocols.contract import Network, Trainer
from protocols.errors import UserError
from protocols.protocol import Cell
from protocols.recipe import Recipe
from protocols.run import Run
from protocols.sources import CONTROL, HELD, is_own, parse_sources, resolve_sources, source_label


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of a protocol, with what its cell has in common."""

    run: Run
    source: str
    """How tables name the set of sources it varies."""
    group: str
    """``run.group``"""
    network: Network = field(compare=False)
    examples: int
    """Training examples of an epoch."""

    @property
    def parameters(self) -> int:
        """Trainable parameters of its network."""
        return self.network.count

    @cached_property
    def id(self) -> str:
        """The run's id."""
        return self.run.id


class Records(Protocol):
    """The part of a store that planning needs."""

    def finished(self) -> Collection[str]:
        """Ids of the runs with a readable record."""

    def corrupt(self) -> Mapping[str, str]:
        """Unreadable records: id or file name -> what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A protocol's runs against what a store holds."""

    protocol: grids.Protocol
    planned: tuple[Planned, ...]
    """In the order to run."""
    done: frozenset[str]
    """Ids of the planned runs that have a record."""
    missing: tuple[Planned, ...]
    """Planned runs without a readable record, in the order to run."""
    corrupt: Mapping[str, str]
    """The store's unreadable records, planned or not."""
    unplanned: int
    """Records in the store that are none of the protocol's."""

    def cells(self) -> dict[tuple[str, str, str, str, str], list[Planned]]:
        """Planned runs by (trainer, architecture, dataset, group, source), in the protocol's order."""
        cells: dict[tuple[str, str, str, str, str], list[Planned]] = {}
        for planned in self.planned:
            run = planned.run
            key = (run.trainer, run.architecture, str(run.dataset), planned.group, planned.source)
            cells.setdefault(key, []).append(planned)
        return cells


def plan(protocol: grids.Protocol, store: Records, *, gpus_per_run: float | None = None) -> Plan:
    """What of a protocol is done and what is missing.

    Args:
        protocol: what is to be run.
        store: where the records are.
        gpus_per_run: see :func:`expand`.

    Raises:
        UserError: see :func:`expand`.
    """
    planned = expand(protocol, gpus_per_run=gpus_per_run)
    finished = frozenset(store.finished())
    done = frozenset(run.id for run in planned) & finished
    return Plan(
        protocol=protocol,
        planned=tuple(planned),
        done=done,
        missing=tuple(run for run in planned if run.id not in done),
        corrupt=dict(store.corrupt()),
        unplanned=len(finished - done),
    )


def expand(protocol: grids.Protocol, *, gpus_per_run: float | None = None) -> list[Planned]:
    """Every run of a protocol, in the order to run: replicate by replicate, within one by trainer, controls first.

    Every group gets its control, whether or not a cell asks for it. Cells that come to the same runs are one.

    Args:
        protocol: what is to be expanded.
        gpus_per_run: GPUs that each run will have, which ``library=native`` needs; None: not known, not checked.

    Raises:
        UserError: a name is unknown, a source has nothing to vary, a library kind is not to be had, there are more
            replicates than different ones, or a dataset is smaller than what is asked of it.
    """
    resolver = _Resolver(protocol, gpus_per_run)
    cells: dict[Run, _Resolved] = {}
    for cell in protocol.cells:
        for source in (CONTROL, cell.source):
            resolved = resolver.resolve(dataclasses.replace(cell, source=source))
            known = cells.get(resolved.template)
            if known is None or known.replicates < resolved.replicates:
                cells[resolved.template] = resolved
    # Sorting is stable: within a trainer, controls come first and the rest stays in the protocol's order.
    ordered = sorted(cells.values(), key=lambda cell: (cell.template.trainer, bool(cell.template.varies)))
    return list(_replicated(ordered, protocol.base_seeds))


@dataclass(frozen=True, kw_only=True)
class _Resolved:
    """A cell of which every name is resolved: a run to copy, and how often."""

    template: Run
    label: str
    replicates: int
    network: Network
    examples: int


def _replicated(cells: Sequence[_Resolved], base_seeds: Sequence[int]) -> Iterator[Planned]:
    seeded = [(cell, dataclasses.replace(cell.template, base_seed=seed)) for cell in cells for seed in base_seeds]
    groups = [run.group for _, run in seeded]
    for replicate in range(max(cell.replicates for cell in cells)):
        for (cell, run), group in zip(seeded, groups, strict=True):
            if replicate < cell.replicates:
                yield Planned(
                    run=dataclasses.replace(run, replicate=replicate),
                    source=cell.label,
                    group=group,
                    network=cell.network,
                    examples=cell.examples,
                )


class _Resolver:
    """Resolves the cells of one protocol; what several cells share is looked up once."""

    def __init__(self, protocol: grids.Protocol, gpus_per_run: float | None) -> None:
        self._protocol = protocol
        self._gpus = gpus_per_run
        self._networks: dict[Cell, Network] = {}
        self._code: dict[tuple[str, ...], tuple[tuple[str, str], ...]] = {}

    def resolve(self, cell: Cell) -> _Resolved:
        trainer, definition = catalog.trainer(cell.trainer), catalog.dataset(cell.dataset.name)
        fingerprint = catalog.dataset_fingerprint(definition, cell.dataset)
        examples = cell.dataset.train_size or definition.train_size
        shape = catalog.image_shape(definition, cell.dataset)
        recipe = dataclasses.replace(
            cell.recipe,
            crop=definition.crop if cell.recipe.crop is None else cell.recipe.crop,
            flip=definition.flip if cell.recipe.flip is None else cell.recipe.flip,
        )
        where = f"{cell.architecture} on {cell.dataset} with trainer {cell.trainer}"
        _check_recipe(cell, recipe, examples, definition, shape)
        network = self._network(dataclasses.replace(cell, source=CONTROL, recipe=recipe), trainer, definition, shape)
        honoured = _honoured(trainer, network, recipe)
        varies = self._varies(cell.source, honoured, recipe, where)
        template = Run(
            varies=varies,
            library=self._library(trainer, recipe) if "library" in varies else HELD,
            asynchrony=self._protocol.asynchrony if "async" in varies else HELD,
            perturb=cell.perturb if "onebit" in varies else None,
            keep=tuple(sorted(self._protocol.keep)),
            architecture=cell.architecture,
            dataset=cell.dataset,
            dataset_fingerprint=fingerprint,
            trainer=cell.trainer,
            numerics=trainer.numerics,
            recipe=recipe,
            base_seed=self._protocol.base_seeds[0],
            replicate=0,
            code=self._code_of(cell, varies),
        )
        self._check_keep(trainer, network, where)
        replicates = (cell.replicates or self._protocol.replicates) if varies else self._protocol.controls
        self._check_kernels(template, replicates, trainer)
        if template.perturb is not None:
            steps = -(-examples // recipe.batch_size)
            self._check_perturbation(template, replicates, network, steps, where)
        return _Resolved(
            template=template,
            label=source_label(varies, honoured, "" if template.perturb is None else template.perturb.label),
            replicates=replicates,
            network=network,
            examples=examples,
        )

    def _network(self, cell: Cell, trainer: Trainer, definition: Any, shape: tuple[int, ...]) -> Network:
        if cell not in self._networks:
            architecture = catalog.architecture(cell.architecture)
            try:
                self._networks[cell] = trainer.network(architecture, shape, definition.classes, cell.recipe)
            except UserError as error:
                raise UserError(f"architecture {cell.architecture!r} on {cell.dataset}: {error}") from error
        return self._networks[cell]

    def _varies(self, source: str, honoured: Collection[str], recipe: Recipe, where: str) -> tuple[str, ...]:
        if "async" in parse_sources(source) and recipe.async_workers == 1:
            raise UserError(
                f"source 'async' cannot vary in {where}: one worker is never stale; set recipe.async_workers to 2 "
                "or more"
            )
        return resolve_sources(source, honoured, where)

    def _code_of(self, cell: Cell, varies: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        paths = (cell.trainer, cell.architecture, cell.dataset.name, *filter(is_own, varies))
        if paths not in self._code:
            self._code[paths] = catalog.code(*paths)
        return self._code[paths]

    def _library(self, trainer: Trainer, recipe: Recipe) -> str:
        kind = self._protocol.library
        if kind not in trainer.library_kinds:
            raise UserError(
                f"trainer {trainer.name!r} has no library kind {kind!r}; it has {', '.join(trainer.library_kinds)} "
                "(choose with --set library=KIND)"
            )
        if kind == "native" and self._gpus == 0:
            raise UserError(
                "library=native varies nondeterministic GPU kernels, but runs are given no GPU, where its SD is "
                "exactly 0; give runs a GPU (--gpus-per-run 1) or choose another kind (--set library=order)"
            )
        if kind == "kernel" and self._gpus:
            raise UserError(
                "library=kernel varies CPU kernels, but runs are given a GPU, where its SD is exactly 0; "
                "give runs none (--gpus-per-run 0) or choose another kind (--set library=native)"
            )
        if kind == "order" and recipe.batch_size == 1:
            raise UserError("library=order permutes the samples of a batch, but recipe.batch_size is 1")
        return kind

    def _check_keep(self, trainer: Trainer, network: Network, where: str) -> None:
        if "layers" in self._protocol.keep and not network.layers:
            raise UserError(f"keep=layers: {where} marks no layer; mark some with net.observe(x, name)")
        if "barrier" in self._protocol.keep and not trainer.evaluate:
            raise UserError(f"keep=barrier: trainer {trainer.name!r} cannot test given weights")

    def _check_kernels(self, template: Run, replicates: int, trainer: Trainer) -> None:
        if template.library == "kernel" and replicates > trainer.kernels:
            raise UserError(
                f"{replicates} replicates of library=kernel are planned, but trainer {trainer.name!r} has "
                f"{trainer.kernels} kernel environments"
            )

    def _check_perturbation(self, template: Run, replicates: int, network: Network, steps: int, where: str) -> None:
        how = template.perturb
        assert how is not None
        name = catalog.perturbed_tensor(template, network)
        total = template.recipe.epochs * steps
        if how.epoch * steps + how.step >= total:
            raise UserError(
                f"perturb.epoch {how.epoch} and perturb.step {how.step} lie behind the last of {total} steps "
                f"({template.recipe.epochs} epochs of {steps}) of {where}"
            )
        if template.asynchrony == "real" and how.step % steps:
            raise UserError("with asynchrony=real weights can be perturbed between epochs only: set perturb.epoch")
        if not any(map(is_own, template.varies)):
            # Each tensor is drawn by itself, so there is no need for the others, unless a user's source wants them.
            alone = tuple(parameter for parameter in network.parameters if parameter.name == name)
            network = dataclasses.replace(network, parameters=alone)
        for seed in self._protocol.base_seeds:
            run = dataclasses.replace(template, base_seed=seed)
            tensor = catalog.initial_weights(run, network)[name]
            if how.epoch or how.step:
                tensor = np.ones_like(tensor)  # What it will hold by then is not known; zeros will be rare.
            elif lack := streams.nothing_to_change(how, tensor):
                raise UserError(
                    f"onebit cannot vary at the start of {where}: {name} {lack}; set perturb.step or perturb.epoch "
                    "for a later change, or another perturb.tensor"
                )
            choices = streams.onebit_choices(how, tensor)
            if choices is not None and replicates > choices:
                raise UserError(
                    f"{replicates} replicates of onebit are planned, but {name} of {where} admits "
                    f"{choices} one-bit changes"
                )


def _honoured(trainer: Trainer, network: Network, recipe: Recipe) -> set[str]:
    """The sources that have something to vary."""
    drops = any(rate > 0 for _, rate in network.dropout.values())
    unused = {"dropout": not drops, "augment": not recipe.augments, "async": recipe.async_workers == 1}
    return {source for source in trainer.sources if not unused.get(source)}


def _check_recipe(cell: Cell, recipe: Recipe, examples: int, definition: Any, shape: tuple[int, ...]) -> None:
    if recipe.batch_size > examples:
        raise UserError(
            f"recipe.batch_size is {recipe.batch_size}, but {cell.dataset} has {examples} training examples; "
            f"set it to {examples} or fewer"
        )
    if len(shape) == 1 and (recipe.views or recipe.augments):
        raise UserError(f"{cell.dataset} is text: recipe.views, recipe.crop and recipe.flip are of images")
    kept, tested = catalog.kept_logits(definition, cell.dataset)
    if recipe.cycles > 1 and kept < tested:
        raise UserError(
            f"recipe.cycles averages all logits of the test set, but of {cell.dataset} only {kept:,} of {tested:,} are "
            f"kept; set dataset.test_size to {kept // definition.classes // shape[0]} windows or fewer"
        )
    if definition.photographs:
        for view in recipe.views:
            if view in ("crop25", "crop81", "flip-crop25", "flip-crop81"):
                raise UserError(f"recipe.views: {view} is of small images; photographs have flip, crop9 and flip-crop9")
