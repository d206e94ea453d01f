"""From a definition to examples that every process of a node shares: read once, kept as files, memory-mapped.

The files of one dataset (in one choice of sizes) are a folder that is written aside and renamed when complete, under a
lock that the operating system drops when its holder dies. So a folder that exists is whole, whoever was killed when.
Arrays are .npy files, photographs are packed as they are (:mod:`trainers.datasets.pack`).
Since a run's result is a function of its data, every process holds arrays against their checksums before it uses them,
and each photograph whenever it is decoded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from protocols.contract import Dataset
from protocols.errors import UserError
from protocols.protocol import DatasetSpec
from trainers.datasets.definition import Arrays, Definition, Files
from trainers.datasets.pack import Pack, load_pack, write_pack
from trainers.datasets.photographs import PackedPhotographs
from trainers.datasets.shrink import shrink
from trainers.datasets.subset import chosen, fingerprint, image_shape

PARTS = ("train_images", "train_labels", "test_images", "test_labels", "train_samples")
CHECKSUMS = "checksums.json"


def default_cache() -> Path:
    """Where prepared and downloaded files are kept: ``noisegrid`` in XDG_CACHE_HOME, else in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noisegrid"


def find_root(data_root: Path | None) -> Path | None:
    """The folder that holds the user's data: the given one, else NOISEGRID_DATA, else None (fetch it)."""
    if data_root is not None:
        return Path(data_root)
    variable = os.environ.get("NOISEGRID_DATA")
    return Path(variable) if variable else None


def prepare(
    definition: Definition, spec: DatasetSpec, data_root: Path | None = None, cache: Path | None = None
) -> Dataset:
    """The examples that ``spec`` means, memory-mapped and read-only.

    The first call on a node reads and checks the dataset's own files; others wait for it. Every later call only checks
    and maps what is in the cache, which is found by the fingerprint of the content.

    Args:
        definition: the dataset.
        spec: which of its examples.
        data_root: folder with the dataset's files; None: NOISEGRID_DATA, else they are fetched into the cache.
        cache: None: :func:`default_cache`.

    Raises:
        UserError: a size is out of range, or the files are missing or wrong, or the cache cannot be written.
    """
    identity = fingerprint(definition, spec)
    cache = default_cache() if cache is None else Path(cache)
    folder = _folder(definition, spec, cache)
    load, write = (load_pack, write_pack) if definition.photographs else (_load, _write)
    stored: Any = load(folder)
    if stored is None:
        with _lock(folder):
            stored = load(folder)
            if stored is None:
                examples: Any = _read(definition, find_root(data_root), cache)
                try:
                    write(folder, definition, spec, examples)
                except OSError as error:
                    raise _unwritable(folder.parent, error) from error
                stored = load(folder)
    if stored is None:
        raise definition.error(f"the files just written to {folder} cannot be read back")
    return Dataset(
        name=definition.name,
        fingerprint=identity,
        classes=definition.classes,
        shift=definition.shift,
        scale=definition.scale,
        full_train_size=definition.train_size,
        **(_photographs(definition, spec, stored) if definition.photographs else stored),
    )


def check(definition: Definition, spec: DatasetSpec, data_root: Path | None = None, cache: Path | None = None) -> None:
    """Read the dataset's own files and hold them against what is known of them; nothing is kept but downloads.

    Photographs are counted, and decoded only when they are prepared. Where the user named a data root, its files are
    read even if the cache already holds the dataset.

    Raises:
        UserError: as :func:`prepare`.
    """
    cache = default_cache() if cache is None else Path(cache)
    folder, root = _folder(definition, spec, cache), find_root(data_root)
    if root is None and (load_pack if definition.photographs else _load)(folder) is not None:
        return
    _read(definition, root, cache)


def _folder(definition: Definition, spec: DatasetSpec, cache: Path) -> Path:
    identity = fingerprint(definition, spec)
    if definition.photographs:  # one pack serves every size, since it is resized while decoding
        identity = fingerprint(definition, dataclasses.replace(spec, image_size=None))
    return cache / f"{_slug(definition)}-{identity}"


def _read(definition: Definition, root: Path | None, cache: Path) -> Arrays | Files:
    try:
        if root is None and definition.fetch is not None:
            downloads = cache / "downloads" / _slug(definition)
            with _lock(downloads):
                root = definition.fetch(downloads)
        examples = definition.read(root)
    except OSError as error:
        raise definition.error(f"cannot use {error.filename or root}: {error.strerror or error}") from error
    definition.verify(examples)
    return examples


def _photographs(definition: Definition, spec: DatasetSpec, pack: Pack) -> dict[str, Any]:
    size, full = image_shape(definition, spec)[0], definition.image_shape[0]
    none = np.empty((0, *image_shape(definition, spec)), np.uint8)
    return {
        "train_images": none,
        "train_labels": pack.train.column("label"),
        "test_images": none,
        "test_labels": pack.test.column("label"),
        "train_samples": pack.train.column("sample"),
        "photographs": PackedPhotographs(pack, size, definition.test_resize * size // full),
    }


def _load(folder: Path) -> dict[str, Any] | None:
    """The arrays of a prepared folder; None if there is none, or if a file of it was changed since."""
    try:
        checksums = json.loads((folder / CHECKSUMS).read_text())
        if any(_checksum(folder / f"{part}.npy") != checksums[part] for part in PARTS):
            return None
        return {part: np.load(folder / f"{part}.npy", mmap_mode="r", allow_pickle=False) for part in PARTS}
    except (OSError, ValueError, EOFError, KeyError, TypeError):
        return None


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(folder: Path, definition: Definition, spec: DatasetSpec, arrays: Arrays) -> None:
    train = chosen(definition, spec, arrays.train_labels, "train")
    test = chosen(definition, spec, arrays.test_labels, "test")
    images = {"train_images": arrays.train_images[train], "test_images": arrays.test_images[test]}
    if spec.image_size is not None:
        images = {part: shrink(values, spec.image_size) for part, values in images.items()}
    # Of text, a window has one label a token.
    test_labels = arrays.test_labels.reshape(len(arrays.test_images), -1)[test].reshape(-1)
    parts = {**images, "train_labels": arrays.train_labels[train], "test_labels": test_labels, "train_samples": train}
    aside = folder.with_name(folder.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed here
    aside.mkdir()
    for part, array in parts.items():
        with (aside / f"{part}.npy").open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    checksums = {part: _checksum(aside / f"{part}.npy") for part in parts}
    (aside / CHECKSUMS).write_text(json.dumps(checksums))
    shutil.rmtree(folder, ignore_errors=True)  # only ever there if damaged
    aside.rename(folder)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    from filelock import FileLock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(path.name + ".lock"))
        lock.acquire()
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    try:
        yield
    finally:
        lock.release()


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot write the dataset cache {folder}: {error.strerror or error}")


def _slug(definition: Definition) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", definition.name)
