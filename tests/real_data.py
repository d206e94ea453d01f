"""Datasets for tests that are made of whatever real data the machine has, named by import path."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from protocols.errors import UserError
from trainers.datasets import from_arrays, from_text, image_folder
from trainers.datasets.cifar import read_batches

ROOT = Path(__file__).parents[1]


def data_root() -> Path:
    """Where the user's data are.

    Raises:
        UserError: NOISEGRID_DATA does not say.
    """
    if "NOISEGRID_DATA" not in os.environ:
        raise UserError("NOISEGRID_DATA does not say where real data are")
    return Path(os.environ["NOISEGRID_DATA"])


def _photographs() -> Any:
    """A few hundred photographs in ImageFolder layout."""
    folder = data_root() / "imagenette-mini"
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    return image_folder(name="photographs", path=folder, size=64, test_resize=72)


def _book() -> Any:
    """A licence, which is text."""
    return from_text(name="book", path=ROOT / "LICENSE", level="char")


def _cifar10_layout() -> Any:
    """CIFAR-10's layout with whatever pixels, as they come from a lossy copy."""
    folder = data_root() / "cifar-10-batches-py"
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return from_arrays(name=f"cifar10-layout-{name}", crop=4, flip=True, **vars(read_batches(folder)))


_MAKERS = {"photographs": _photographs, "book": _book, "cifar10_layout": _cifar10_layout}


@functools.cache
def __getattr__(name: str) -> Any:
    """A dataset of ``_MAKERS``, made when it is first asked for."""
    if name not in _MAKERS:
        raise AttributeError(name)
    return _MAKERS[name]()
