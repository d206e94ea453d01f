"""Protocols by name: short names, ``my_pkg.study:make`` and ``./study.py:make``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocols.errors import UserError, unknown
from protocols.imports import is_import_path, load_object
from protocols.protocol import Protocol

PROTOCOLS: dict[str, str] = {
    "quickstart": "protocols.quickstart:quickstart",
    "quickstart-tiny": "protocols.quickstart:tiny",
    "summers2021-table1": "protocols.summers2021:table1",
}
"""Protocols that ship with the project: short name -> import path of the function that makes it."""


def load_protocol(name: str) -> Protocol:
    """The protocol of that name: a short one, ``my_pkg.study:make``, or ``./study.py:make`` from the working directory.

    Raises:
        UserError: there is no such protocol, its function raises, or it returns something else.
    """
    make = load_named(name, "protocol", PROTOCOLS)
    if not callable(make):
        raise UserError(f"protocol {name!r} is {_article(make)}, not a function that returns a Protocol")
    try:
        protocol = make()
    except UserError as error:
        raise UserError(f"protocol {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"protocol {name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(protocol, Protocol):
        raise UserError(f"protocol {name!r} returned {_article(protocol)}, not a Protocol")
    return protocol


def load_named(name: str, kind: str, table: Mapping[str, str]) -> Any:
    """The object that a short name or an import path stands for.

    Args:
        name: what the user wrote.
        kind: what is being named, in words ("protocol"), for errors.
        table: short name -> import path.

    Raises:
        UserError: there is no such short name, module, file or attribute, or the module cannot be imported.
    """
    if name in table or is_import_path(name):
        return load_object(table.get(name, name), kind)
    if "." in name or "/" in name:
        raise UserError(f"{kind} {name!r} does not say what to take from there: write {name}:NAME")
    raise unknown(kind, name, table)


def _article(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
