"""Sources of nondeterminism: what may vary between two trainings of the same network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from protocols.errors import UserError, unknown


@dataclass(frozen=True, kw_only=True)
class Source:
    """One named origin of nondeterminism."""

    name: str
    number: int
    """Enters every seed of this source. Fixed for ever and append-only: changing one changes every run."""
    summary: str
    in_all: bool = True
    """Whether ``all`` includes it, where network and recipe honour it."""


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
            summary="one initial weight moved to the neighbouring floating-point number",
            in_all=False,
        ),
    )
}

LIBRARY_KINDS: dict[str, str] = {
    "order": "a seeded permutation of the samples inside each batch: the same mathematics, another order of sums; "
    "replayable on any device",
    "kernel": "another set of kernels per replicate (threads, instruction set, oneDNN): replayable on one machine",
    "native": "nondeterministic GPU kernels and autotuning, released: cannot be seeded; needs a GPU",
}

HELD = "held"
"""Stands where a library kind would, for a run whose library is held deterministic."""

CONTROL = "none"
ALL = "all"


def parse_sources(text: str) -> tuple[str, ...]:
    """The varying sources that a text names, sorted: ``"none"`` is ``()``, ``"shuffle+init"`` ``("init", "shuffle")``.

    ``"all"`` stays the one-element tuple ``("all",)``: what it stands for depends on network and recipe
    (see :func:`resolve_sources`).

    Raises:
        UserError: a name is unknown, repeated, or ``none`` or ``all`` is joined with others.
    """
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name not in SOURCES and name not in (CONTROL, ALL):
            raise unknown("source", name, [*SOURCES, CONTROL, ALL])
    if len(names) > 1 and (CONTROL in names or ALL in names):
        raise UserError(f"source {text!r}: 'none' and 'all' stand alone and cannot be joined with '+'")
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
    for name in names:
        if name not in honoured:
            raise UserError(
                f"source {name!r} cannot vary in {where}: nothing there uses it; valid: {', '.join(sorted(honoured))}"
            )
    return names


def source_label(varies: Collection[str], honoured: Collection[str]) -> str:
    """How records and tables name a set of sources: ``none``, ``all``, or the sorted names joined by ``+``."""
    names = tuple(sorted(varies))
    if not names:
        return CONTROL
    if len(names) > 1 and names == every_source(honoured):
        return ALL
    return "+".join(names)
