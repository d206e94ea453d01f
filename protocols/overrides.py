"""Fields changed and cells selected on the command line: ``--set recipe.epochs=20``, ``--only source=init,shuffle``."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from protocols.errors import UserError, unknown
from protocols.perturbation import Perturbation
from protocols.protocol import Cell, DatasetSpec, Protocol
from protocols.recipe import Recipe
from protocols.sources import CONTROL, all_but_one, factorial, parse_sources
from protocols.until import Until

_DESCRIBED = ("name", "summary", "cells", "reference", "deviations")
"""What may not be set of a protocol: its cells and the texts that describe it."""

_DESIGNS: dict[str, Callable[..., tuple[str, ...]]] = {"factorial:": factorial, "all-but-one:": all_but_one}
"""Several sets of sources under one name: ``factorial:init+shuffle``, ``all-but-one:init+shuffle``."""


def apply_settings(protocol: Protocol, settings: Sequence[str]) -> Protocol:
    """The protocol with fields replaced.

    A field is one of the protocol's own (``replicates=10``) or one of its cells' (``recipe.epochs=20``,
    ``dataset.train_size=1000``, ``perturb.step=10``), which is set in every cell. Several values of a cell's field,
    joined by commas, multiply the cells; the members of one value that is a list are joined by ``+``
    (``recipe.views=flip+crop25``). Cells that become equal are kept once. ``source=factorial:init+shuffle`` stands for
    every set of these, ``source=all-but-one:init+shuffle`` for all sources but each of these in turn, and all.
    ``replicates`` holds for every cell. ``until.width=0.5`` makes the number of replicates depend on what is found
    (``until=none``: fixed), see :class:`protocols.until.Until`. Each setting is added to the protocol's deviations.

    What comes of it is held against itself before cells are selected: nothing may be set that is of no use in any cell.

    Args:
        protocol: what to change.
        settings: each ``field=value``.

    Raises:
        UserError: a setting is malformed, its field unknown or named twice, its value of the wrong type or out of
            range, or without effect.
    """
    shared = _cell_types()
    fields = {name: kind for name, kind in _types(Protocol).items() if name not in _DESCRIBED} | shared
    fields |= {f"until.{name}": kind for name, kind in _types(Until).items()}
    changes: dict[str, Any] = {}
    choices: dict[str, list[Any]] = {}
    for name, text in _assignments("--set", settings):
        if name not in fields:
            raise unknown("field", name, fields)
        if name in shared:
            parts = _parts("--set", name, text)
            if name == "source":
                parts = [source for part in parts for source in _design(part)]
            choices[name] = [_parse(name, part, fields[name], "+") for part in parts]
        else:
            changes[name] = _parse(name, text, fields[name], ",")
    until = {name: changes.pop(name) for name in list(changes) if name.startswith("until.")}
    sets = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    cells = [_with(cell, values) for cell in protocol.cells for values in sets]
    if "replicates" in changes:
        cells = [dataclasses.replace(cell, replicates=None) for cell in cells]
    changes |= _until(protocol, changes, until)
    if settings:
        changes["deviations"] = (*protocol.deviations, *(f"set for this study: {setting}" for setting in settings))
    changed = dataclasses.replace(protocol, cells=tuple(dict.fromkeys(cells)), **changes)
    _check_used(changed)
    return changed


def _until(protocol: Protocol, changes: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """What becomes of ``until`` and ``replicates``, which is its ``at_most``; setting one of the two sets both.

    Raises:
        UserError: something of it is missing, contradicts the rest or is out of range.
    """
    if "until" in changes and parts:
        raise UserError(f"until=none has no {next(iter(parts))}: set one of the two")
    if "until" in changes or not (parts or protocol.until):
        return {}
    fields = {name.removeprefix("until."): value for name, value in parts.items()}
    if protocol.until is None:
        for name in ("width", "at_least"):
            if name not in fields:
                raise UserError(f"until needs until.{name}, as in --set until.width=0.5 --set until.at_least=6")
        until = Until(**{"at_most": changes.get("replicates", protocol.replicates)} | fields)
    else:
        most = {"at_most": changes["replicates"]} if "replicates" in changes else {}
        until = dataclasses.replace(protocol.until, **most | fields)
    return {"until": until, "replicates": changes.get("replicates", until.at_most)}


def _check_used(protocol: Protocol) -> None:
    """Refuse what is set for a source that no cell varies.

    Raises:
        UserError: there is such a thing.
    """
    varied = {name for cell in protocol.cells for name in parse_sources(cell.source)}
    settings = [(f"perturb.{text}", "onebit") for cell in protocol.cells for text in cell.perturb.label.split()]
    if protocol.asynchrony != Protocol.asynchrony:
        settings.append((f"asynchrony={protocol.asynchrony}", "async"))
    if "barrier" in protocol.keep:
        settings.append(("keep=barrier", "onebit"))
    adaptive = (cell for cell in protocol.cells if cell.replicates is None and parse_sources(cell.source))
    if protocol.until is not None and not any(adaptive):
        raise UserError("until has no effect, since no cell that varies anything is without replicates of its own")
    for setting, source in settings:
        if source not in varied:
            raise UserError(f"{setting} has no effect, since no cell varies {source} (--set source={source})")


def select_cells(protocol: Protocol, selections: Sequence[str]) -> Protocol:
    """The protocol with some of its cells.

    A cell stays where, for every key named (source, architecture, dataset, trainer, or a field such as
    ``recipe.cycles`` or ``perturb.step``), it has one of the values given. Sets of sources are compared regardless of
    order. The control, which every group gets anyway, can be selected by ``source=none``.

    Args:
        protocol: what to select from.
        selections: each ``key=value,value...``.

    Raises:
        UserError: a selection is malformed, its key unknown, its value in no cell, or no cell has all that was asked
            for.
    """
    keys, wishes = _cell_types(), _assignments("--only", selections)
    all_cells = protocol.cells
    if any(key == "source" for key, _ in wishes):
        controls = (dataclasses.replace(cell, source=CONTROL) for cell in protocol.cells)
        all_cells = tuple(dict.fromkeys((*protocol.cells, *controls)))
    cells: Iterable[Cell] = all_cells
    for key, text in wishes:
        if key not in keys:
            raise unknown("key of --only", key, keys)
        present = {_comparable(key, _get(cell, key)) for cell in all_cells}
        wanted = {_comparable(key, _parse(key, value, keys[key], "+")) for value in _parts("--only", key, text)}
        for value in sorted(wanted - present):
            has = ", ".join(sorted(present))
            raise UserError(f"--only: no cell of protocol {protocol.name} has {key} {value!r}; it has {has}")
        cells = [cell for cell in cells if _comparable(key, _get(cell, key)) in wanted]
    if not selections:
        return protocol
    kept = tuple(cells)
    if not kept:
        raise UserError(f"no cell of protocol {protocol.name} has all of: {', '.join(selections)}")
    return dataclasses.replace(protocol, cells=kept)


def _assignments(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Each ``name=value`` in its two parts."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, value = (part.strip() for part in text.partition("=")[::2])
        if not (name and value):
            raise UserError(f"{option} {text!r} is not of the form name=value")
        if name in pairs:
            raise UserError(f"{option} names {name!r} twice; several values of one name are joined by commas")
        pairs[name] = value
    return list(pairs.items())


def _parts(option: str, name: str, text: str, joint: str = ",") -> list[str]:
    parts = [part.strip() for part in text.split(joint)]
    if not all(parts):
        raise UserError(
            f"{option} {name}={text}: a value between the {'commas' if joint == ',' else 'plus signs'} is empty"
        )
    return parts


def _design(text: str) -> tuple[str, ...]:
    """The sets of sources that a value of ``source`` stands for."""
    for prefix, design in _DESIGNS.items():
        if text.startswith(prefix):
            names = [name.strip() for name in text.removeprefix(prefix).split("+")]
            if not all(names):
                raise UserError(f"--set source={text}: a source is missing; write {prefix}init+shuffle, for example")
            return design(*names)
    return (text,)


def _comparable(key: str, value: Any) -> str:
    """A cell's value as it is written, sets of sources sorted."""
    if key == "source":
        return "+".join(parse_sources(value)) or CONTROL
    if isinstance(value, tuple):
        return "+".join(value) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _types(owner: type) -> Mapping[str, Any]:
    return typing.get_type_hints(owner)


def _cell_types() -> dict[str, Any]:
    names = {"source": str, "architecture": str, "dataset": str, "trainer": str}
    owners = {"recipe": Recipe, "dataset": DatasetSpec, "perturb": Perturbation}
    fields = {f"{owner}.{name}": kind for owner, values in owners.items() for name, kind in _types(values).items()}
    return names | {name: kind for name, kind in fields.items() if name != "dataset.name"}


def _field(name: str) -> tuple[str, str]:
    """The part of a cell that a field belongs to, and its name there; ``dataset`` is the name, apart from the sizes."""
    owner, _, field = ("dataset.name" if name == "dataset" else name).rpartition(".")
    return owner, field


def _get(cell: Cell, name: str) -> Any:
    owner, field = _field(name)
    return getattr(getattr(cell, owner) if owner else cell, field)


def _with(cell: Cell, values: Mapping[str, Any]) -> Cell:
    """The cell with some fields changed, those of one part at once, since they are checked together."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        owner, field = _field(name)
        changes.setdefault(owner, {})[field] = value
    own = changes.pop("", {})
    parts = {owner: dataclasses.replace(getattr(cell, owner), **fields) for owner, fields in changes.items()}
    return dataclasses.replace(cell, **own, **parts)


def _parse(name: str, text: str, kind: Any, joint: str) -> Any:
    """The value that ``text`` writes, of the annotated type ``kind``; ``joint`` joins the members of a list."""
    optional = isinstance(kind, types.UnionType)
    if optional:
        if text.lower() == "none":
            return None
        (kind,) = (member for member in typing.get_args(kind) if member is not type(None))
    if typing.get_origin(kind) is tuple:
        if text.lower() == "none":
            return ()
        member = typing.get_args(kind)[0]
        return tuple(_parse(name, part, member, joint) for part in _parts("--set", name, text, joint))
    if kind is Until:
        raise UserError(f"until is none or set field by field (until.width=0.5), not {text!r}")
    read, wanted = _READERS[kind]
    try:
        return read(text)
    except ValueError:
        raise UserError(f"{name} must be {wanted}{' or none' if optional else ''}, not {text!r}") from None


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_READERS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (_read_bool, "true or false"),
    str: (str, "a text"),
}
