"""Photographs packed once into two Arrow files, ``train.arrows`` and ``test.arrows``, which processes share.

Each is a stream of record batches in Arrow's IPC format (``pyarrow.ipc.open_stream``), one row an image: its bytes as
they were, their SHA-256, its label, height and width, and which file it was. Every image is decoded once while packing,
so what is broken is known by name before anything is trained.

A stream is only ever appended to. One that was interrupted is cut after its last whole batch and goes on from there,
and batch k always holds the k-th so many files: the packed file is the same, byte for byte, however often it was
interrupted.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocols.errors import UserError
from protocols.protocol import DatasetSpec
from trainers.datasets.bar import bar
from trainers.datasets.definition import Definition, Files
from trainers.datasets.subset import chosen

ROWS = 256
"""Files a record batch; some 30 MB of ImageNet."""
SUMMARY = "pack.json"
END = b"\xff\xff\xff\xff\0\0\0\0"
"""The end of an Arrow stream."""


class Part:
    """The images of one packed file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path = path
        self._file = pa.memory_map(str(path))
        self._batches = list(pa.ipc.open_stream(self._file))
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def column(self, name: str) -> NDArray[np.int64]:
        """A column of numbers, one value an image."""
        values = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self._batches]
        column = np.concatenate([np.zeros(0, np.int64), *values]).astype(np.int64)
        column.flags.writeable = False
        return column

    def names(self) -> list[str]:
        """The file of each image."""
        return [name for batch in self._batches for name in batch.column("file").to_pylist()]

    def digests(self) -> list[bytes]:
        """The SHA-256 of each image's bytes."""
        return [digest for batch in self._batches for digest in batch.column("sha256").to_pylist()]

    def content(self, index: int) -> memoryview:
        """The bytes of one image, held against their checksum.

        Raises:
            UserError: they have changed since they were packed.
        """
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch, row = self._batches[number], index - int(self._starts[number])
        content = memoryview(batch.column("image")[row].as_buffer())
        if hashlib.sha256(content).digest() != batch.column("sha256")[row].as_py():
            folder, name = self.path.parent, batch.column("file")[row].as_py()
            raise UserError(f"{self.path} is damaged (at {name}): delete {folder}, and the images are packed again")
        return content


class Row(NamedTuple):
    """A file to pack."""

    folder: Path
    file: str
    """Relative to the folder."""
    label: int
    sample: int
    """Its index in the full dataset."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A packed dataset."""

    train: Part
    test: Part
    manifest: str
    """Names its content: see :func:`manifest`."""
    skipped: tuple[str, ...]
    """Files left out because they could not be decoded."""


def manifest(entries: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 over (file, SHA-256 of its bytes) of all images, in their order."""
    sha = hashlib.sha256()
    for name, digest in entries:
        sha.update(f"{digest.hex()}  {name}\n".encode())
    return sha.hexdigest()


def load_pack(folder: Path) -> Pack | None:
    """The pack in a folder; None if there is none, or if a file of it was cut off since.

    The bytes of an image are held against their checksum whenever they are used.
    """
    try:
        summary = json.loads((folder / SUMMARY).read_text())
        parts = [folder / f"{part}.arrows" for part in ("train", "test")]
        if [path.stat().st_size for path in parts] != summary["bytes"]:
            return None
        train, test = map(Part, parts)
        return Pack(train=train, test=test, manifest=summary["manifest"], skipped=tuple(summary["skipped"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_pack(folder: Path, definition: Definition, spec: DatasetSpec, files: Files) -> None:
    """Pack the photographs that a specification means, going on from where an earlier call was interrupted.

    Raises:
        UserError: an image cannot be decoded, and the specification does not say to skip it; or none is left; or the
            images are not those that the definition was made of, as far as all of them are packed.
        OSError: the folder cannot be written.
    """
    aside = folder.with_name(folder.name + ".part")
    aside.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    entries: list[tuple[str, bytes]] = []
    skipped: list[str] = []
    with ThreadPoolExecutor(_cores()) as pool:
        for name, paths, labels in (
            ("train", files.train, files.train_labels),
            ("test", files.test, files.test_labels),
        ):
            samples = chosen(definition, spec, labels, name)
            path = aside / f"{name}.arrows"
            rows = [Row(files.folder, paths[sample], int(labels[sample]), int(sample)) for sample in samples]
            _append(path, rows, spec.skip_broken, pool, f"{definition.name}: packing {name} images")
            part = Part(path)
            packed = set(part.names())
            skipped += [row.file for row in rows if row.file not in packed]
            entries += zip(part.names(), part.digests(), strict=True)
            if not packed:
                raise definition.error(f"none of the {len(rows)} {name} images in {files.folder} can be decoded")
            parts.append(path)
    found = manifest(entries)
    everything = spec.train_size is None and spec.test_size is None and not skipped
    if definition.manifested and everything and found != definition.fingerprint:
        shutil.rmtree(aside)  # else it would be gone on from, under the name of other images
        raise definition.error(
            f"the images in {files.folder} have changed since the study was planned; the same command again plans it "
            "with what is there now"
        )
    if skipped:
        print(
            f"{definition.name}: left out {len(skipped)} images that cannot be decoded: {skipped[0]} ...",
            file=sys.stderr,
        )
    summary = {"bytes": [path.stat().st_size for path in parts], "manifest": found, "skipped": skipped}
    (aside / SUMMARY).write_text(json.dumps(summary))
    shutil.rmtree(folder, ignore_errors=True)  # only ever there if damaged
    aside.rename(folder)


def _append(path: Path, rows: Sequence[Row], skip: bool, pool: ThreadPoolExecutor, what: str) -> None:
    import pyarrow as pa

    chunks = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    schema = pa.schema(
        {
            "image": pa.binary(),
            "sha256": pa.binary(32),
            "label": pa.int64(),
            "sample": pa.int64(),
            "height": pa.int64(),
            "width": pa.int64(),
            "file": pa.string(),
        }
    )
    done = _resume(path, chunks, skip)
    with path.open("ab") as file, bar(what, len(rows), min(done * ROWS, len(rows))) as advance:
        if not file.tell():
            file.write(schema.serialize())
        for chunk in chunks[done:]:
            images = [image for image in pool.map(lambda row: _examine(row, skip), chunk) if image is not None]
            file.write(pa.RecordBatch.from_pylist(images, schema).serialize())
            file.flush()
            os.fsync(file.fileno())
            advance(len(chunk))
        file.write(END)


def _resume(path: Path, chunks: Sequence[Sequence[Row]], skip: bool) -> int:
    """How many whole batches an interrupted file holds; whatever follows them is cut off."""
    import pyarrow as pa

    if not path.exists():
        return 0
    done = end = 0
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_stream(file)
            end = file.tell()
            for chunk in chunks:
                batch = reader.read_next_batch()
                names, packed = [row.file for row in chunk], batch.column("file").to_pylist()
                if packed != names and not (skip and set(packed) <= set(names)):
                    break
                done, end = done + 1, file.tell()
    except (OSError, ValueError, StopIteration):
        pass  # cut off in the middle of a batch
    os.truncate(path, end)
    return done


def _examine(row: Row, skip: bool) -> dict[str, Any] | None:
    """One file, decoded to see that it is whole; None where it is not and is to be skipped."""
    path = row.folder / row.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        width, height = rgb(content).size
    except Exception as error:  # a damaged file can raise nearly anything
        if skip:
            return None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{path} cannot be decoded: {reason}; mend or remove it, or leave such images out with "
            "--set dataset.skip_broken=true"
        ) from error
    digest = hashlib.sha256(content).digest()
    return {
        "image": content,
        "sha256": digest,
        "label": row.label,
        "sample": row.sample,
        "height": height,
        "width": width,
        "file": row.file,
    }


def rgb(content: Any) -> Any:
    """An image of any kind, decoded by Pillow, in red, green and blue."""
    return pillow().open(io.BytesIO(content)).convert("RGB")


def pillow() -> Any:
    """Pillow's module for images.

    Raises:
        UserError: Pillow is not installed.
    """
    try:
        from PIL import Image as module
    except ImportError as error:
        raise UserError("photographs need Pillow, which is not installed: pip install pillow") from error
    return module


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
