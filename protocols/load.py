"""Protocols by name: short names, ``my_pkg.study:make`` and ``./study.py:make``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from protocols.errors import UserError, unknown
from protocols.imports import is_import_path, load_object
from protocols.protocol import Protocol

_FULL: dict[str, str] = {
    "summers2021": "protocols.summers2021:summers2021",
    "summers2021-table1": "protocols.summers2021:table1",
    "summers2021-onebit": "protocols.summers2021:onebit",
    "summers2021-instability": "protocols.summers2021:instability",
    "summers2021-architectures": "protocols.summers2021:architectures",
    "summers2021-mnist": "protocols.summers2021:mnist",
    "summers2021-imagenet": "protocols.summers2021:imagenet",
    "summers2021-mitigation": "protocols.summers2021:mitigation",
    "summers2021-grid": "protocols.summers2021:factors",
    "summers2021-language": "protocols.summers2021:language",
    "morin2020": "protocols.morin2020:morin2020",
    "zhuang2022": "protocols.zhuang2022:zhuang2022",
    "jordan2024": "protocols.jordan2024:jordan2024",
    "butterfly": "protocols.butterfly:butterfly",
}
_SMALL = {f"{name}-small": name for name in _FULL}

PROTOCOLS: dict[str, str] = {
    "quickstart": "protocols.quickstart:quickstart",
    "quickstart-tiny": "protocols.quickstart:tiny",
    **_FULL,
    **{small: _FULL[name] for small, name in _SMALL.items()},
}
"""Protocols that ship with the project: short name -> import path of the function that makes it. A small form is made
by the module's function ``small`` from the full one."""


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
    if name in _SMALL:
        small: Callable[[Protocol], Protocol] = load_object(f"{PROTOCOLS[name].partition(':')[0]}:small", "small form")
        return small(protocol)
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
