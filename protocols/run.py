"""A run: one replicate of one cell, fully concrete, with an id that is a hash of everything that decides its bits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocols.perturbation import Perturbation
from protocols.protocol import DatasetSpec
from protocols.recipe import Recipe
from protocols.sources import HELD, is_own

SPECIFICATION_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """The specification of one training. A run's result is a function of these fields and nothing else."""

    varies: tuple[str, ...]
    """The varying sources, explicit and sorted; empty for the control."""
    library: str
    """The kind of library variation, or ``held``."""
    asynchrony: str = HELD
    """The kind of asynchrony where async varies; ``held``: the schedule of seed 0, or none with one worker."""
    perturb: Perturbation | None = None
    """What is changed where onebit varies."""
    keep: tuple[str, ...] = ()
    """What is left beside the record, sorted: see ``KEEP``."""
    architecture: str
    dataset: DatasetSpec
    dataset_fingerprint: str
    trainer: str
    numerics: int
    """The trainer's numerics version: raised whenever a change of its code changes bits."""
    recipe: Recipe
    base_seed: int
    replicate: int
    code: tuple[tuple[str, str], ...] = ()
    """For every module named by import path: (module, hash of its source or its declared version)."""

    @property
    def specification(self) -> str:
        """The canonical JSON of this run: sorted keys, no white space."""
        return canonical(_plain(self, version=SPECIFICATION_VERSION))

    @property
    def id(self) -> str:
        """SHA-256 of the specification, 64 hexadecimal digits."""
        return hashlib.sha256(self.specification.encode()).hexdigest()

    @property
    def group(self) -> str:
        """Names the group (architecture x dataset x trainer x recipe x base seed) that shares a control."""
        return hashlib.sha256(canonical(_plain(self.control)).encode()).hexdigest()[:16]

    @property
    def named(self) -> tuple[str, ...]:
        """Everything it is made of by name, each perhaps an import path."""
        return self.trainer, self.architecture, self.dataset.name, *(name for name in self.varies if is_own(name))

    @property
    def control(self) -> Run:
        """The first control of this run's group."""
        return self._varying(())

    @property
    def profile(self) -> str:
        """The determinism profile of the process this run needs: ``held``, ``native`` or ``kernel-N``, with ``+K``
        where K asynchronous workers race.

        Switches of a profile are global to a process and partly read at import, so one process serves one profile.
        """
        kind = f"kernel-{self.replicate}" if self.library == "kernel" else HELD
        if self.library == "native":
            kind = "native"
        return f"{kind}+{self.recipe.async_workers}" if self.asynchrony == "real" else kind

    def without(self, source: str) -> Run:
        """The same run with ``source`` held. The control has one replicate index, 0, since nothing in it varies."""
        return self._varying(tuple(name for name in self.varies if name != source))

    def _varying(self, varies: tuple[str, ...]) -> Run:
        """The same run with fewer sources varying."""
        fewer = dataclasses.replace(
            self,
            varies=varies,
            library=self.library if "library" in varies else HELD,
            asynchrony=self.asynchrony if "async" in varies else HELD,
            perturb=self.perturb if "onebit" in varies else None,
            replicate=self.replicate if varies else 0,
        )
        modules = {name.partition(":")[0] for name in fewer.named}
        return dataclasses.replace(fewer, code=tuple(pair for pair in self.code if pair[0] in modules))


class Replicates:
    """Specifications and ids of the runs of one cell, which differ in their replicate alone, at little cost each.

    Args:
        run: any of them.
    """

    def __init__(self, run: Run) -> None:
        values = _plain(run, version=SPECIFICATION_VERSION)
        before = canonical({name: value for name, value in values.items() if name < "replicate"})
        after = canonical({name: value for name, value in values.items() if name > "replicate"})
        self._before, self._after = f'{before[:-1]},"replicate":', f",{after[1:]}"
        self._hashed = hashlib.sha256(self._before.encode())

    def specification(self, replicate: int) -> str:
        """:attr:`Run.specification` of one of them."""
        return f"{self._before}{replicate}{self._after}"

    def id(self, replicate: int) -> str:
        """:attr:`Run.id` of one of them."""
        hashed = self._hashed.copy()
        hashed.update(f"{replicate}{self._after}".encode())
        return hashed.hexdigest()


def _plain(run: Run, **further: Any) -> dict[str, Any]:
    """The fields of a run as JSON knows them: ``dataclasses.asdict`` without its copies."""
    nested = {"dataset": vars(run.dataset), "recipe": vars(run.recipe)}
    if run.perturb is not None:
        nested["perturb"] = vars(run.perturb)
    return {**vars(run), **nested, **further}


def canonical(values: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no white space; equal values always give equal text."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


def run_from_specification(specification: str) -> Run:
    """The run that :attr:`Run.specification` was made from.

    Raises:
        ValueError: the text is not a specification of this version.
    """
    try:
        values = json.loads(specification)
        if values.pop("version") != SPECIFICATION_VERSION:
            raise ValueError("it was written by another version")
        values["dataset"] = DatasetSpec(**values["dataset"])
        values["recipe"] = Recipe(**values["recipe"] | {"views": tuple(values["recipe"]["views"])})
        values["perturb"] = None if values["perturb"] is None else Perturbation(**values["perturb"])
        values["varies"], values["keep"] = tuple(values["varies"]), tuple(values["keep"])
        values["code"] = tuple((module, version) for module, version in values["code"])
        return Run(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a run's specification: {error}") from error
