"""Fields changed and cells selected on the command line: ``--set recipe.epochs=20``, ``--only source=init,shuffle``."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from protocols.errors import UserError, unknown
from protocols.protocol import Cell, DatasetSpec, Protocol
from protocols.recipe import Recipe
from protocols.sources import CONTROL, parse_sources

_PROTOCOL_FIELDS = ("replicates", "control_replicates", "base_seeds", "library", "measures", "margin")
"""What may be set of a protocol itself: all but its cells and the texts that describe it."""

_SELECTED: dict[str, Callable[[Cell], str]] = {
    "source": lambda cell: cell.source,
    "architecture": lambda cell: cell.architecture,
    "dataset": lambda cell: cell.dataset.name,
    "trainer": lambda cell: cell.trainer,
}


def apply_settings(protocol: Protocol, settings: Sequence[str]) -> Protocol:
    """The protocol with fields replaced.

    A field is one of the protocol's own (``replicates=10``) or one of its cells' (``recipe.epochs=20``,
    ``dataset.train_size=1000``), which is set in every cell. Several values of a cell's field, joined by commas,
    multiply the cells; cells that become equal are kept once. Each setting is added to the protocol's deviations.

    Args:
        protocol: what to change.
        settings: each ``field=value``.

    Raises:
        UserError: a setting is malformed, its field unknown or named twice, or its value of the wrong type or out of
            range.
    """
    own, shared = _types(Protocol), _cell_types()
    fields = {name: own[name] for name in _PROTOCOL_FIELDS} | shared
    changes: dict[str, Any] = {}
    cells: tuple[Cell, ...] = protocol.cells
    for name, text in _assignments("--set", settings):
        if name not in fields:
            raise unknown("field", name, fields)
        if name in shared:
            values = [_parse(name, part, fields[name]) for part in _parts("--set", name, text)]
            cells = tuple(dict.fromkeys(_with(cell, name, value) for cell in cells for value in values))
        else:
            changes[name] = _parse(name, text, fields[name])
    if settings:
        changes["deviations"] = (*protocol.deviations, *(f"set for this study: {setting}" for setting in settings))
    return dataclasses.replace(protocol, cells=cells, **changes)


def select_cells(protocol: Protocol, selections: Sequence[str]) -> Protocol:
    """The protocol with some of its cells.

    A cell stays where, for every key named (source, architecture, dataset, trainer), it has one of the values given.
    Sets of sources are compared regardless of order. The control, which every group gets anyway, can be selected by
    ``source=none``.

    Args:
        protocol: what to select from.
        selections: each ``key=value,value...``.

    Raises:
        UserError: a selection is malformed, its key unknown, its value in no cell, or no cell has all that was asked
            for.
    """
    controls = [dataclasses.replace(cell, source=CONTROL) for cell in protocol.cells]
    cells: Iterable[Cell] = dict.fromkeys((*protocol.cells, *controls))
    for key, text in _assignments("--only", selections):
        if key not in _SELECTED:
            raise unknown("key of --only", key, _SELECTED)
        present = {_comparable(key, _SELECTED[key](cell)) for cell in (*protocol.cells, *controls)}
        wanted = {_comparable(key, value) for value in _parts("--only", key, text)}
        for value in sorted(wanted - present):
            has = ", ".join(sorted(present))
            raise UserError(f"--only: no cell of protocol {protocol.name} has {key} {value!r}; it has {has}")
        cells = [cell for cell in cells if _comparable(key, _SELECTED[key](cell)) in wanted]
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


def _parts(option: str, name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UserError(f"{option} {name}={text}: a value between the commas is empty")
    return parts


def _comparable(key: str, value: str) -> str:
    return "+".join(parse_sources(value)) or CONTROL if key == "source" else value


def _types(owner: type) -> Mapping[str, Any]:
    return typing.get_type_hints(owner)


def _cell_types() -> dict[str, Any]:
    names = {"source": str, "architecture": str, "dataset": str, "trainer": str}
    recipe = {f"recipe.{name}": kind for name, kind in _types(Recipe).items()}
    sizes = {f"dataset.{name}": kind for name, kind in _types(DatasetSpec).items() if name != "name"}
    return names | recipe | sizes


def _with(cell: Cell, name: str, value: Any) -> Cell:
    """The cell with one field changed; ``dataset`` stands for the dataset's name and leaves its sizes."""
    owner, _, field = ("dataset.name" if name == "dataset" else name).rpartition(".")
    if not owner:
        return dataclasses.replace(cell, **{field: value})
    return dataclasses.replace(cell, **{owner: dataclasses.replace(getattr(cell, owner), **{field: value})})


def _parse(name: str, text: str, kind: Any) -> Any:
    """The value that ``text`` writes, of the annotated type ``kind``."""
    optional = isinstance(kind, types.UnionType)
    if optional:
        if text.lower() == "none":
            return None
        (kind,) = (member for member in typing.get_args(kind) if member is not type(None))
    if typing.get_origin(kind) is tuple:
        member = typing.get_args(kind)[0]
        return tuple(_parse(name, part, member) for part in _parts("--set", name, text))
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
