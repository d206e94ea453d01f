"""Sources of nondeterminism: what may vary between two trainings of the same network."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from protocols.errors import UserError, unknown
from protocols.imports import is_import_path, load_object


@dataclass(frozen=True, kw_only=True)
class Source:
    """One named origin of nondeterminism.

    One of your own is a module with such an object, named by import path (``--set source=./jitter.py:jitter``). It acts
    where it varies, by one of its two functions or both, and is absent where it is held.
    """

    name: str = ""
    """Of your own source: left out, its import path is its name."""
    number: int = 0
    """Enters every seed of this source. Fixed for ever and append-only: changing one changes every run. Of your own
    source: left out, it follows from its name."""
    summary: str
    in_all: bool = True
    """Whether ``all`` includes it, where network and recipe honour it; never one of your own."""
    weights: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None
    """Of your own source: from the initial weights (names to arrays, canonical layouts) and a ``numpy`` generator to
    the weights that training starts from."""
    plan: Callable[[Any, Any], Any] | None = None
    """Of your own source: from an epoch's plan (``trainers.batches.EpochPlan``) and a ``numpy`` generator to the plan
    that is followed."""


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(name="init", number=1, summary="the values the weights start from"),
        Source(name="shuffle", number=2, summary="the order in which training examples are visited"),
        Source(name="augment", number=3, summary="the random crops and flips of training images"),
        Source(name="dropout", number=4, summary="the units that dropout silences"),
        Source(name="library", number=5, summary="the order of floating-point operations in the numerical library"),
        Source(
            name="onebit",
            number=6,
            summary="one weight moved to the neighbouring floating-point number",
            in_all=False,
        ),
        Source(
            name="async",
            number=7,
            summary="how stale the weights are that asynchronous workers compute their gradients from",
            in_all=False,
        ),
        Source(
            name="hardware",
            number=8,
            summary="the devices, drivers and library versions that a cell's replicates happen to run on: "
            "observed, not driven",
            in_all=False,
        ),
    )
}

LIBRARY_KINDS: dict[str, str] = {
    "order": "a seeded permutation of the samples inside each batch: the same mathematics, another order of sums; "
    "replayable on any device",
    "kernel": "another set of kernels per replicate (threads, instruction set, oneDNN, memory format, compiler): "
    "replayable on one machine",
    "native": "nondeterministic GPU kernels and autotuning, released: cannot be seeded; needs a GPU",
}

ASYNCHRONIES: dict[str, str] = {
    "simulated": "the workers' service times are drawn: replayable on any device",
    "real": "threads race for shared weights, and their log is kept: another run can only follow that log",
}

HELD = "held"
"""Stands where a library kind or a kind of asynchrony would, for a run in which it does not vary."""

CONTROL = "none"
ALL = "all"
ALL_BUT = "all-"
"""``all-init``: every source of ``all`` except init."""


def is_own(name: str) -> bool:
    """Whether a source is a user's own, named by import path."""
    return is_import_path(name)


def source(name: str) -> Source:
    """The source of that name.

    Raises:
        UserError: it is an import path that leads to no source.
    """
    if not is_own(name):
        return SOURCES[name]
    found = load_object(name, "source")
    if not isinstance(found, Source) or (found.weights is None and found.plan is None):
        raise UserError(f"source {name!r} must be a Source with a function for weights or plan")
    return dataclasses.replace(found, name=name, number=source_number(name), in_all=False)


def source_number(name: str) -> int:
    """The number that enters a source's seeds; of a user's own it is a hash of its name, at least 2^31."""
    if name in SOURCES:
        return SOURCES[name].number
    return 1 << 31 | int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") >> 1


def parse_sources(text: str) -> tuple[str, ...]:
    """The varying sources that a text names, sorted: ``"none"`` is ``()``, ``"shuffle+init"`` ``("init", "shuffle")``.

    ``"all"`` and ``"all-init"`` (all but init) stay as they are, ``("all",)``: what they stand for depends on network
    and recipe (see :func:`resolve_sources`).

    Raises:
        UserError: a name is unknown, repeated, or ``none`` or ``all`` is joined with others.
    """
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name.startswith(ALL_BUT):
            if name.removeprefix(ALL_BUT) not in every_source(SOURCES):
                raise unknown("source to leave out of all", name.removeprefix(ALL_BUT), every_source(SOURCES))
        elif name not in SOURCES and name not in (CONTROL, ALL) and not is_own(name):
            raise unknown("source", name, [*SOURCES, CONTROL, ALL])
    if len(names) > 1 and any(name in (CONTROL, ALL) or name.startswith(ALL_BUT) for name in names):
        raise UserError(f"source {text!r}: 'none', 'all' and 'all-...' stand alone and cannot be joined with '+'")
    if len(set(names)) < len(names):
        raise UserError(f"source {text!r} names one source twice")
    return () if names == [CONTROL] else tuple(sorted(names))


def every_source(honoured: Collection[str]) -> tuple[str, ...]:
    """What ``all`` stands for where the sources in ``honoured`` can vary."""
    return tuple(sorted(name for name in honoured if SOURCES[name].in_all))


def resolve_sources(text: str, honoured: Collection[str], where: str) -> tuple[str, ...]:
    """The explicit, sorted set of sources that a cell varies.

    Args:
        text: the cell's sources as written.
        honoured: the sources that the cell's trainer, network and recipe can vary.
        where: the cell in words, for the error.

    Raises:
        UserError: a named source cannot be honoured.
    """
    names = parse_sources(text)
    if names == (ALL,):
        return every_source(honoured)
    if names and names[0].startswith(ALL_BUT):
        left_out = names[0].removeprefix(ALL_BUT)
        if left_out not in honoured:
            raise UserError(f"{names[0]} in {where}: {left_out!r} does not vary there anyway; write all")
        return tuple(name for name in every_source(honoured) if name != left_out)
    for name in names:
        if is_own(name):
            source(name)
        elif name not in honoured:
            raise UserError(
                f"source {name!r} cannot vary in {where}: nothing there uses it; valid: {', '.join(sorted(honoured))}"
            )
    return names


def source_label(varies: Collection[str], honoured: Collection[str], choices: str = "") -> str:
    """How records and tables name a set of sources: ``none``, ``all``, or the sorted names joined by ``+``.

    Args:
        varies: the set.
        honoured: the sources that could vary there.
        choices: what onebit changes, where it is not the default: ``onebit[step=10]``.
    """
    names = tuple(sorted(varies))
    if not names:
        return CONTROL
    if len(names) > 1 and names == every_source(honoured):
        return ALL
    return "+".join(f"{name}[{choices}]" if name == "onebit" and choices else name for name in names)


def source_title(label: str, library: str, asynchrony: str = HELD) -> str:
    """A label of :func:`source_label` with the kinds of library and asynchrony, never left out: ``library (order)``."""
    kinds = {name: kind for name, kind in (("library", library), ("async", asynchrony)) if kind != HELD}
    if label in kinds and len(kinds) == 1:
        return f"{label} ({kinds[label]})"
    return f"{label} ({', '.join(f'{name}: {kind}' for name, kind in kinds.items())})" if kinds else label


def label_sources(label: str) -> tuple[str, ...]:
    """The sources that a label of :func:`source_label` names, without their choices; ``none`` and ``all`` stand for
    themselves."""
    return tuple(part.partition("[")[0] for part in label.split("+"))


def factorial(*names: str) -> tuple[str, ...]:
    """Every set of the named sources, the empty one (the control) first: the cells of a full factorial design."""
    sets = itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(len(names) + 1))
    return tuple("+".join(chosen) or CONTROL for chosen in sets)


def all_but_one(*names: str) -> tuple[str, ...]:
    """For each of the named sources, all sources but that one; ``all`` itself last."""
    return (*(f"{ALL_BUT}{name}" for name in names), ALL)
