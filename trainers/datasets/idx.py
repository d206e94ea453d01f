"""MNIST and Fashion-MNIST, from the canonical idx files (plain or gzipped).

The format: two zero bytes, the element type (8: unsigned byte), the number of dimensions, each dimension as a
big-endian 32-bit integer, then the values in row-major order (Y. LeCun, C. Cortes, C. Burges, "The MNIST database").

Under a data root the four files are looked for in ``NAME/``, ``NAME/raw/``, torchvision's ``MNIST/raw/`` or
``FashionMNIST/raw/``, and the root itself; the first of these that holds any of them counts.

Checksums are those of the uncompressed files, since gzip files are often packed anew. Both datasets are trained with
a crop of one pixel and without flips, where the publications do not augment MNIST: without it the source "augment"
would have nothing to vary.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocols.errors import UserError
from trainers.datasets.definition import Arrays, Definition
from trainers.datasets.download import download

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"

SYSTEM = Path("/usr/share/datasets")
"""Where Debian's package dataset-fashion-mnist puts its files; looked at where the user gave no data root."""


def idx_dataset(
    *,
    name: str,
    summary: str,
    checksums: Mapping[str, str],
    url: str,
    mean: float,
    std: float,
    torchvision: str,
    train_size: int = 60_000,
    test_size: int = 10_000,
    side: int = 28,
) -> Definition:
    """A dataset of ten classes of square grey images in four idx files.

    Args:
        name: its short name, also that of its folder under a data root.
        summary: one line for lists.
        checksums: SHA-256 of each uncompressed file, by its name without ``.gz``.
        url: the folder to download from, ending in ``/``.
        mean: of all training pixels scaled to 0..1.
        std: as ``mean``.
        torchvision: what torchvision calls its folder.
        train_size: number of training images.
        test_size: number of test images.
        side: height and width in pixels.
    """
    shapes = {
        TRAIN_IMAGES: (train_size, side, side),
        TRAIN_LABELS: (train_size,),
        TEST_IMAGES: (test_size, side, side),
        TEST_LABELS: (test_size,),
    }
    advice = f"put the four files in {name}/ under a folder given by --data-root or NOISEGRID_DATA"

    def find(root: Path) -> Path | None:
        for folder in places(root):
            if any(_present(folder, file) for file in shapes):
                return folder
        return None

    def places(root: Path) -> tuple[Path, ...]:
        return root / name, root / name / "raw", root / torchvision / "raw", root

    def read(root: Path | None) -> Arrays:
        folder = None if root is None else find(root)
        if root is None or folder is None:
            looked = "" if root is None else f" in {root}: looked in {', '.join(map(str, places(root)))}"
            raise UserError(f"dataset {name!r}: no idx files{looked}; {advice}")
        arrays = {}
        for file, shape in shapes.items():
            path = _present(folder, file)
            if path is None:
                raise UserError(f"dataset {name!r}: missing file {folder / file}[.gz]; {advice}")
            arrays[file] = read_idx(path, shape, checksums[file])
        return Arrays(
            train_images=arrays[TRAIN_IMAGES][..., None],
            train_labels=arrays[TRAIN_LABELS].astype(np.int64),
            test_images=arrays[TEST_IMAGES][..., None],
            test_labels=arrays[TEST_LABELS].astype(np.int64),
        )

    def fetch(folder: Path) -> Path:
        if _present(SYSTEM / name, TRAIN_IMAGES):
            return SYSTEM
        for file, shape in shapes.items():
            if not (folder / f"{file}.gz").exists():
                verify = partial(read_idx, shape=shape, sha256=checksums[file])
                download(f"{url}{file}.gz", folder / f"{file}.gz", verify, advice)
        return folder

    return Definition(
        name=name,
        summary=summary,
        classes=10,
        image_shape=(side, side, 1),
        train_size=train_size,
        test_size=test_size,
        fingerprint=hashlib.sha256("".join(checksums[file] for file in shapes).encode()).hexdigest(),
        mean=(mean,),
        std=(std,),
        crop=1,
        flip=False,
        read=read,
        fetch=fetch,
    )


def read_idx(path: Path, shape: tuple[int, ...], sha256: str) -> NDArray[np.uint8]:
    """The unsigned bytes of one idx file, plain or gzipped, checked.

    Args:
        path: the file.
        shape: what its header must say.
        sha256: of the uncompressed file.

    Raises:
        UserError: the file is not idx, holds another shape, is truncated or is not the canonical one.
    """
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} is a truncated or damaged gzip file ({error})") from error
    header = struct.Struct(f">4B{len(shape)}I")
    if len(content) < header.size:
        raise UserError(f"{path} is truncated: {len(content)} bytes, shorter than an idx header")
    magic, found = header.unpack_from(content)[:4], header.unpack_from(content)[4:]
    if magic != (0, 0, 8, len(shape)):
        raise UserError(
            f"{path} is not the right idx file: it starts with the bytes {magic}, not {(0, 0, 8, len(shape))}"
        )
    if found != shape:
        raise UserError(f"{path} holds {_times(found)} values where {_times(shape)} are expected")
    size = header.size + int(np.prod(shape))
    if len(content) != size:
        what = "truncated" if len(content) < size else "too long"
        raise UserError(f"{path} is {what}: {len(content)} bytes uncompressed, its header promises {size}")
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != sha256:
        raise UserError(f"{path} has the wrong checksum: SHA-256 {checksum} uncompressed, expected {sha256}")
    return np.frombuffer(content, np.uint8, offset=header.size).reshape(shape)


def _present(folder: Path, file: str) -> Path | None:
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    return None


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


mnist = idx_dataset(
    name="mnist",
    summary="handwritten digits, 28x28 grey, 60,000 + 10,000",
    checksums={
        TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    mean=0.1307,
    std=0.3081,
    torchvision="MNIST",
)

fashion_mnist = idx_dataset(
    name="fashion-mnist",
    summary="articles of clothing, 28x28 grey, 60,000 + 10,000",
    checksums={
        TRAIN_IMAGES: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        TRAIN_LABELS: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        TEST_IMAGES: "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        TEST_LABELS: "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    mean=0.2860,
    std=0.3530,
    torchvision="FashionMNIST",
)
