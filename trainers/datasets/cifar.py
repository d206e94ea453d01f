"""CIFAR-10, from either of its two published layouts, unpacked or as the archive it came in.

Both layouts hold the same examples in the same order: five training batches and a test batch of 10,000 images each, an
image as 3,072 bytes, channel by channel, row by row. ``cifar-10-batches-py`` pickles a batch, ``cifar-10-batches-bin``
puts the label in a byte before each image (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images",
2009).

Under a data root, or its folder ``cifar10/``, the published folder or archive is looked for under its own name.
Only the canonical files are CIFAR-10 here. For other data in these layouts make a dataset of your own, with its own
fingerprint: ``from_arrays(name="my-cifar", crop=4, flip=True, **vars(read_batches(folder)))``.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.errors import UserError
from trainers.datasets.definition import Arrays, Definition
from trainers.datasets.download import download

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
ADVICE = "put cifar-10-batches-py/ or cifar-10-python.tar.gz in a folder given by --data-root or NOISEGRID_DATA"

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images (n, 3072) and labels (n,)."""


class _ArraysOnly(pickle.Unpickler):
    """Reads basic types and NumPy arrays; a pickle that names anything else could run code and is refused."""

    ALLOWED = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy._core.numeric", "_frombuffer"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, where only arrays are expected")
        if name == "dtype":
            return _dtype
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _dtype(kind: bytes | str, align: int = 0, copy: int = 0) -> np.dtype[Any]:
    # Python 2 pickled the flags as integers, which NumPy 2.4 and later complain about.
    return np.dtype(kind.decode() if isinstance(kind, bytes) else kind, align=bool(align), copy=bool(copy))


def _python_batch(content: bytes) -> Batch:
    batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    return np.asarray(batch[b"data"], np.uint8), np.asarray(batch[b"labels"], np.int64)


def _binary_batch(content: bytes) -> Batch:
    records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    return records[:, 1:], records[:, 0].astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One of the published forms."""

    folder: str
    archive: str
    checksums: Mapping[str, str]
    """MD5 of each batch file: the training batches in order, then the test batch."""
    parse: Callable[[bytes], Batch]


LAYOUTS = (
    Layout(
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        checksums={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
        parse=_python_batch,
    ),
    Layout(
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        checksums={
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        parse=_binary_batch,
    ),
)


def read_batches(source: Path) -> Arrays:
    """The examples of a folder or archive in either layout, whatever they are: no checksum is compared.

    Raises:
        UserError: a batch is missing or cannot be read.
    """
    layout = _layout(source)
    if layout is None:
        raise UserError(f"{source} holds no batches of CIFAR-10's layout")
    return _parse(source, layout, _contents(source, layout))


def _read(root: Path | None) -> Arrays:
    if root is None:
        raise UserError(f"dataset 'cifar10' needs its files; {ADVICE}")
    for place in _places(root):
        layout = _layout(place)
        if layout is None:
            continue
        contents = _contents(place, layout)
        for name, md5 in layout.checksums.items():
            found = hashlib.md5(contents[name], usedforsecurity=False).hexdigest()
            if found != md5:
                raise UserError(
                    f"dataset 'cifar10': {place / name} has the wrong checksum (MD5 {found}, expected {md5}); data "
                    "that only looks like CIFAR-10 needs a dataset of its own: see trainers.datasets.from_arrays"
                )
        return _parse(place, layout, contents)
    places = ", ".join(map(str, _places(root)))
    raise UserError(f"dataset 'cifar10': no files in {root}: looked at {places}; {ADVICE}")


def _places(root: Path) -> list[Path]:
    names = [name for layout in LAYOUTS for name in (layout.folder, layout.archive)]
    return [base / name for base in (root, root / "cifar10") for name in names] + [root]


def _layout(source: Path) -> Layout | None:
    """The layout of a folder by what it holds, of an archive by its name."""
    for layout in LAYOUTS:
        if source.is_dir() and any((source / name).is_file() for name in layout.checksums):
            return layout
        if source.is_file() and source.name == layout.archive:
            return layout
    return None


def _contents(source: Path, layout: Layout) -> dict[str, bytes]:
    """The bytes of every batch file."""
    contents = {}
    if source.is_dir():
        contents = {name: (source / name).read_bytes() for name in layout.checksums if (source / name).is_file()}
    else:
        try:
            with tarfile.open(source, "r:gz") as archive:
                for member in archive:
                    folder, _, name = member.name.rpartition("/")
                    if folder == layout.folder and name in layout.checksums and (file := archive.extractfile(member)):
                        contents[name] = file.read()
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise UserError(f"{source} is a truncated or damaged archive ({error})") from error
    for name in layout.checksums:
        if name not in contents:
            raise UserError(f"dataset 'cifar10': missing file {source / name}")
    return contents


def _parse(source: Path, layout: Layout, contents: Mapping[str, bytes]) -> Arrays:
    batches = []
    for name in layout.checksums:
        try:
            pixels, labels = layout.parse(contents[name])
            batches.append((pixels.reshape(len(labels), 3, 32, 32).transpose(0, 2, 3, 1), labels))
        except Exception as error:  # a damaged pickle can raise nearly anything, in any number of lines
            reason = " ".join(str(error).split())
            raise UserError(f"{source / name} is not a batch of CIFAR-10's layout: {reason}") from error
    return Arrays(
        train_images=np.concatenate([images for images, _ in batches[:-1]]),
        train_labels=np.concatenate([labels for _, labels in batches[:-1]]),
        test_images=np.ascontiguousarray(batches[-1][0]),
        test_labels=batches[-1][1],
    )


def _fetch(folder: Path) -> Path:
    target = folder / URL.rsplit("/", 1)[-1]
    if not target.exists():
        download(URL, target, _verify_archive, ADVICE)
    return folder


def _verify_archive(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != ARCHIVE_MD5:
        raise UserError(f"{path} has the wrong checksum: MD5 {found}, expected {ARCHIVE_MD5}")


cifar10 = Definition(
    name="cifar10",
    summary="small photographs of ten kinds of things, 32x32 colour, 50,000 + 10,000",
    classes=10,
    image_shape=(32, 32, 3),
    train_size=50_000,
    test_size=10_000,
    fingerprint=hashlib.sha256("".join(LAYOUTS[0].checksums.values()).encode()).hexdigest(),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    crop=4,
    flip=True,
    read=_read,
    fetch=_fetch,
)
