"""A run: one replicate of one cell, fully concrete, with an id that is a hash of everything that decides its bits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocols.protocol import DatasetSpec
from protocols.recipe import Recipe
from protocols.sources import HELD

SPECIFICATION_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """The specification of one training. A run's result is a function of these fields and nothing else."""

    varies: tuple[str, ...]
    """The varying sources, explicit and sorted; empty for the control."""
    library: str
    """The kind of library variation, or ``held``."""
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
        return canonical({"version": SPECIFICATION_VERSION, **dataclasses.asdict(self)})

    @property
    def id(self) -> str:
        """SHA-256 of the specification, 64 hexadecimal digits."""
        return hashlib.sha256(self.specification.encode()).hexdigest()

    @property
    def group(self) -> str:
        """Names the group (architecture x dataset x trainer x recipe x base seed) that shares a control."""
        values = dataclasses.asdict(dataclasses.replace(self, varies=(), library=HELD, replicate=0))
        return hashlib.sha256(canonical(values).encode()).hexdigest()[:16]

    @property
    def profile(self) -> str:
        """The determinism profile of the process this run needs: ``held``, ``native`` or ``kernel-N``.

        Switches of a profile are global to a process and partly read at import, so one process serves one profile.
        """
        if self.library == "kernel":
            return f"kernel-{self.replicate}"
        return "native" if self.library == "native" else HELD

    def without(self, source: str) -> Run:
        """The same run with ``source`` held. The control has one replicate index, 0, since nothing in it varies."""
        varies = tuple(name for name in self.varies if name != source)
        return dataclasses.replace(
            self,
            varies=varies,
            library=self.library if "library" in varies else HELD,
            replicate=self.replicate if varies else 0,
        )


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
        values["recipe"] = Recipe(**values["recipe"])
        values["varies"] = tuple(values["varies"])
        values["code"] = tuple((module, version) for module, version in values["code"])
        return Run(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a run's specification: {error}") from error
