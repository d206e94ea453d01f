"""Architectures by name."""

from __future__ import annotations

from protocols.load import load_named
from trainers import ARCHITECTURES
from trainers.network import Architecture


def architecture(name: str) -> Architecture:
    """The architecture of a short name or import path.

    Raises:
        UserError: there is none.
    """
    found: Architecture = load_named(name, "architecture", ARCHITECTURES)
    return found
