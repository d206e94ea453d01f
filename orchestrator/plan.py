"""From a protocol to its runs, and from its runs to what is still to be trained.

Everything that can be known to be wrong is found here, before anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from orchestrator import catalog
from orchestrator.looks import Looks, grant, read_looks
from protocols import protocol as grids
from protocols import streams
from protocols.contract import Network, Trainer
from protocols.errors import UserError
from protocols.protocol import Cell
from protocols.recipe import Recipe
from protocols.run import Replicates, Run
from protocols.sources import CONTROL, HELD, is_own, parse_sources, resolve_sources, source_label


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One run of a protocol, with what its cell has in common."""

    run: Run
    id: str
    """``run.id``"""
    source: str
    """How tables name the set of sources it varies."""
    group: str
    """``run.group``"""
    network: Network = field(compare=False)
    examples: int
    """Training examples of an epoch."""
    priority: int = field(default=0, compare=False)
    """Its cell's; of several cells that come to this run, the highest."""

    adaptive: bool = field(default=False, compare=False)
    """Whether looks decide how many replicates its cell has."""

    @property
    def parameters(self) -> int:
        """Trainable parameters of its network."""
        return self.network.count


class Records(Protocol):
    """The part of a store that planning needs."""

    def examined(self) -> tuple[Set[str], Mapping[str, str]]:
        """Ids of the runs with a readable record, and unreadable records: id or file name -> what is wrong with it."""

    def looks(self, declaration: str) -> Iterable[Mapping[str, Any]]:
        """Recorded looks of one declaration."""


class Replicated:
    """A cell at one base seed: its runs, made when they are asked for."""

    def __init__(self, cell: _Resolved, base_seed: int) -> None:
        self._cell = cell
        self._template = dataclasses.replace(cell.template, base_seed=base_seed)
        self._replicates = Replicates(self._template)
        self.name = self.id(0)
        """The id of its first replicate."""
        self.group = self._template.group
        self.source = cell.label
        self.most = cell.replicates
        """How many replicates it can have."""
        self.adaptive = cell.adaptive
        """Whether looks decide how many it has."""

    @property
    def identity(self) -> dict[str, Any]:
        """The cell in words."""
        run = self._template
        return {
            "trainer": run.trainer,
            "architecture": run.architecture,
            "dataset": str(run.dataset),
            "varies": list(run.varies),
            "library": run.library,
            "asynchrony": run.asynchrony,
            "base_seed": run.base_seed,
        }

    def id(self, replicate: int) -> str:
        """The id of one of its runs."""
        return self._replicates.id(replicate)

    def planned(self, replicate: int) -> Planned:
        """One of its runs."""
        return Planned(
            run=dataclasses.replace(self._template, replicate=replicate),
            id=self.id(replicate),
            source=self.source,
            group=self.group,
            network=self._cell.network,
            examples=self._cell.examples,
            priority=self._cell.priority,
            adaptive=self.adaptive,
        )


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
    growing: tuple[Replicated, ...] = ()
    """The cells whose number of replicates looks decide; ``planned`` has what recorded looks grant so far."""
    further: int = 0
    """How many runs the looks to come may add at most."""

    def cells(self) -> dict[tuple[str, str, str, str, str], list[Planned]]:
        """Planned runs by (trainer, architecture, dataset, group, source), in the protocol's order."""
        alike: dict[tuple[str, str], list[Planned]] = {}
        for planned in self.planned:
            alike.setdefault((planned.group, planned.source), []).append(planned)
        runs = ((entries[0].run, key, entries) for key, entries in alike.items())
        return {(run.trainer, run.architecture, str(run.dataset), *key): entries for run, key, entries in runs}


def plan(protocol: grids.Protocol, store: Records, *, gpus_per_run: float | None = None) -> Plan:
    """What of a protocol is done and what is missing.

    Args:
        protocol: what is to be run.
        store: where the records are.
        gpus_per_run: see :func:`expand`.

    Raises:
        UserError: see :func:`expand`.
    """
    cells = _cells(protocol, gpus_per_run)
    growing = tuple(cell for cell in cells if cell.adaptive)
    looks = read_looks(store.looks(protocol.until.declaration)) if protocol.until and growing else {}
    planned, further = _planned(protocol, cells, looks)
    finished, corrupt = store.examined()
    done = frozenset(run.id for run in planned) & finished
    return Plan(
        protocol=protocol,
        planned=tuple(planned),
        done=done,
        missing=tuple(run for run in planned if run.id not in done),
        corrupt=dict(corrupt),
        unplanned=len(finished - done),
        growing=growing,
        further=further,
    )


def expand(protocol: grids.Protocol, *, gpus_per_run: float | None = None) -> list[Planned]:
    """Every run of a protocol, in the order to run: replicate by replicate, within one by trainer, controls first.

    Every group gets its control, whether or not a cell asks for it. Cells that come to the same runs are one. Cells
    whose number of replicates looks decide have those of the first look.

    Args:
        protocol: what is to be expanded.
        gpus_per_run: GPUs that each run will have, which ``library=native`` needs; None: not known, not checked.

    Raises:
        UserError: a name is unknown, a source has nothing to vary, a library kind is not to be had, there are more
            replicates than different ones, a dataset is smaller than what is asked of it, or a budget does not suffice
            for the first looks.
    """
    return _planned(protocol, _cells(protocol, gpus_per_run), {})[0]


def further_runs(protocol: grids.Protocol) -> int:
    """How many runs looks may add to those of :func:`expand` at most."""
    return _planned(protocol, _cells(protocol, None), {})[1] if protocol.until else 0


def _cells(protocol: grids.Protocol, gpus_per_run: float | None) -> list[Replicated]:
    """The different cells of a protocol, in the order to run."""
    resolver = _Resolver(protocol, gpus_per_run)
    cells: dict[Run, _Resolved] = {}
    for cell in protocol.cells:
        for source in (CONTROL, cell.source):
            resolved = resolver.resolve(dataclasses.replace(cell, source=source))
            known = cells.get(resolved.template, resolved)
            more = known if known.replicates >= resolved.replicates else resolved
            priority = max(known.priority, resolved.priority)
            cells[resolved.template] = dataclasses.replace(more, priority=priority)
    # Sorting is stable: within a trainer, controls come first and the rest stays in the protocol's order.
    ordered = sorted(cells.values(), key=lambda cell: (cell.template.trainer, bool(cell.template.varies)))
    return [Replicated(cell, seed) for cell in ordered for seed in protocol.base_seeds]


def _planned(protocol: grids.Protocol, cells: Sequence[Replicated], looks: Looks) -> tuple[list[Planned], int]:
    """The runs that are planned by what looks have found, in the order to run, and how many more there may be."""
    counts, further = {cell.name: cell.most for cell in cells}, 0
    growing = [cell.name for cell in cells if cell.adaptive]
    if protocol.until is not None and growing:
        budget, begin = protocol.until.budget, len(growing) * protocol.until.at_least
        if budget is not None and budget < begin:
            raise UserError(
                f"until.budget is {budget:,}, but {len(growing):,} cells begin with {protocol.until.at_least} "
                f"replicates each, {begin:,} runs in all"
            )
        granted = grant(protocol.until, growing, looks)
        counts |= granted.replicates
        further = granted.most - sum(granted.replicates.values())
    rounds = range(max(counts[cell.name] for cell in cells))
    return [cell.planned(number) for number in rounds for cell in cells if number < counts[cell.name]], further


@dataclass(frozen=True, kw_only=True)
class _Resolved:
    """A cell of which every name is resolved: a run to copy, and how often."""

    template: Run
    label: str
    replicates: int
    adaptive: bool
    network: Network
    examples: int
    priority: int


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
        adaptive = self._protocol.until is not None and bool(varies) and cell.replicates is None
        self._check_kernels(template, replicates, trainer)
        if template.perturb is not None:
            steps = -(-examples // recipe.batch_size)
            self._check_perturbation(template, replicates, network, steps, where)
        return _Resolved(
            template=template,
            label=source_label(varies, honoured, "" if template.perturb is None else template.perturb.label),
            replicates=replicates,
            adaptive=adaptive,
            network=network,
            examples=examples,
            priority=cell.priority,
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
