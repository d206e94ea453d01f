"""CIFAR-10 and CIFAR-100, each from either of its two published layouts, unpacked or as the archive it came in.

Both layouts hold the same examples in the same order, an image as 3,072 bytes, channel by channel, row by row: one
pickles a batch, the other (``binary``) puts the labels in bytes before each image. CIFAR-10 comes in five training
batches and a test batch of 10,000 images each; CIFAR-100 in one of 50,000 and one of 10,000, with two labels an image,
of which the fine one (of 100) is taken (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

Under a data root, or its folder ``cifar10/`` or ``cifar100/``, the published folder or archive is looked for under its
own name. Only the canonical files are CIFAR here. For other data in these layouts make a dataset of your own, with its
own fingerprint: ``from_arrays(name="my-cifar", crop=4, flip=True, **vars(read_batches(folder)))``.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.errors import UserError
from trainers.datasets.definition import Arrays, Definition
from trainers.datasets.download import download

URL = "https://www.cs.toronto.edu/~kriz/"

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


def _pickled(labels: bytes) -> Callable[[bytes], Batch]:
    """Reads a batch whose labels have that key."""

    def parse(content: bytes) -> Batch:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        return np.asarray(batch[b"data"], np.uint8), np.asarray(batch[labels], np.int64)

    return parse


def _binary(labels: int) -> Callable[[bytes], Batch]:
    """Reads a batch of records that start with that many labels, of which the last counts."""

    def parse(content: bytes) -> Batch:
        records = np.frombuffer(content, np.uint8).reshape(-1, labels + 3072)
        return records[:, labels:], records[:, labels - 1].astype(np.int64)

    return parse


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One of the published forms."""

    folder: str
    archive: str
    archive_md5: str
    checksums: Mapping[str, str]
    """MD5 of each batch file: the training batches in order, then the test batch."""
    parse: Callable[[bytes], Batch]


CIFAR10 = (
    Layout(
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        archive_md5="c58f30108f718f92721af3b95e74349a",
        checksums={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
        parse=_pickled(b"labels"),
    ),
    Layout(
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
        checksums={
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        parse=_binary(1),
    ),
)

CIFAR100 = (
    Layout(
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
        checksums={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        parse=_pickled(b"fine_labels"),
    ),
    Layout(
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        archive_md5="03b5dce01913d631647c71ecec9e9cb8",
        checksums={"train.bin": "6172c7755cfe09b2fe270c85cebc1b15", "test.bin": "4499cfba6c016c1be1438163640a0898"},
        parse=_binary(2),
    ),
)


def cifar_dataset(
    *,
    name: str,
    summary: str,
    classes: int,
    layouts: Sequence[Layout],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    train_size: int = 50_000,
    test_size: int = 10_000,
    url: str = URL,
) -> Definition:
    """A dataset of 32x32 colour images in batches.

    Args:
        name: its short name, also that of its folder under a data root.
        summary: one line for lists.
        classes: number of classes.
        layouts: the forms it was published in; the first one's archive is what is downloaded, and its checksums are the
            dataset's identity.
        mean: per channel, of all training pixels scaled to 0..1.
        std: as ``mean``.
        train_size: number of training images.
        test_size: number of test images.
        url: the folder to download from, ending in ``/``.
    """
    first = layouts[0]
    advice = f"put {first.folder}/ or {first.archive} in a folder given by --data-root or NOISEGRID_DATA"

    def places(root: Path) -> list[Path]:
        names = [name for layout in layouts for name in (layout.folder, layout.archive)]
        return [base / file for base in (root, root / name) for file in names] + [root]

    def read(root: Path | None) -> Arrays:
        if root is None:
            raise UserError(f"dataset {name!r} needs its files; {advice}")
        for place in places(root):
            layout = _layout(place, layouts)
            if layout is not None:
                contents = _contents(place, layout)
                if not (place.is_file() and _md5(place) == layout.archive_md5):
                    verify(place, layout, contents)
                return _parse(place, layout, contents)
        looked = ", ".join(map(str, places(root)))
        raise UserError(f"dataset {name!r}: no files in {root}: looked at {looked}; {advice}")

    def verify(place: Path, layout: Layout, contents: Mapping[str, bytes]) -> None:
        for batch, md5 in layout.checksums.items():
            found = hashlib.md5(contents[batch], usedforsecurity=False).hexdigest()
            if found != md5:
                raise UserError(
                    f"dataset {name!r}: {place / batch} has the wrong checksum (MD5 {found}, expected {md5}); data "
                    f"that only looks like {name} needs a dataset of its own: see trainers.datasets.from_arrays"
                )

    def fetch(folder: Path) -> Path:
        target = folder / first.archive
        if not target.exists():
            download(url + first.archive, target, verify_archive, advice)
        return folder

    def verify_archive(path: Path) -> None:
        found = _md5(path)
        if found != first.archive_md5:
            raise UserError(f"{path} has the wrong checksum: MD5 {found}, expected {first.archive_md5}")

    return Definition(
        name=name,
        summary=summary,
        classes=classes,
        image_shape=(32, 32, 3),
        train_size=train_size,
        test_size=test_size,
        fingerprint=hashlib.sha256("".join(first.checksums.values()).encode()).hexdigest(),
        mean=mean,
        std=std,
        crop=4,
        flip=True,
        read=read,
        fetch=fetch,
    )


def read_batches(source: Path) -> Arrays:
    """The examples of a folder or archive in any of the layouts, whatever they are: no checksum is compared.

    Raises:
        UserError: a batch is missing or cannot be read.
    """
    layout = _layout(source, (*CIFAR10, *CIFAR100))
    if layout is None:
        raise UserError(f"{source} holds no batches of CIFAR's layouts")
    return _parse(source, layout, _contents(source, layout))


def _layout(source: Path, layouts: Sequence[Layout]) -> Layout | None:
    """The layout of a folder by what it holds, of an archive by its name."""
    for layout in layouts:
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
            raise UserError(f"missing file {source / name}")
    return contents


def _parse(source: Path, layout: Layout, contents: Mapping[str, bytes]) -> Arrays:
    batches = []
    for name in layout.checksums:
        try:
            pixels, labels = layout.parse(contents[name])
            batches.append((pixels.reshape(len(labels), 3, 32, 32).transpose(0, 2, 3, 1), labels))
        except Exception as error:  # a damaged pickle can raise nearly anything, in any number of lines
            reason = " ".join(str(error).split())
            raise UserError(f"{source / name} is not a batch of the layout {layout.folder}: {reason}") from error
    return Arrays(
        train_images=np.concatenate([images for images, _ in batches[:-1]]),
        train_labels=np.concatenate([labels for _, labels in batches[:-1]]),
        test_images=np.ascontiguousarray(batches[-1][0]),
        test_labels=batches[-1][1],
    )


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


cifar10 = cifar_dataset(
    name="cifar10",
    summary="small photographs of ten kinds of things, 32x32 colour, 50,000 + 10,000",
    classes=10,
    layouts=CIFAR10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
)

cifar100 = cifar_dataset(
    name="cifar100",
    summary="small photographs of a hundred kinds of things, 32x32 colour, 50,000 + 10,000",
    classes=100,
    layouts=CIFAR100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)
