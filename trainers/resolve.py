"""Architectures by name."""

from __future__ import annotations

from protocols.errors import unknown
from protocols.imports import is_import_path, load_object
from trainers import ARCHITECTURES
from trainers.network import Architecture


def architecture(name: str) -> Architecture:
    """The architecture of a short name or import path.

    Raises:
        UserError: there is none, or the import path does not lead to a function.
    """
    if not is_import_path(name) and name not in ARCHITECTURES:
        raise unknown("architecture", name, ARCHITECTURES)
    found: Architecture = load_object(ARCHITECTURES.get(name, name), "architecture")
    return found
