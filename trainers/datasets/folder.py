"""Photographs in folders, one a class (ImageFolder layout), and ImageNet in that layout.

    FOLDER/train/CLASS/*.JPEG
    FOLDER/val/CLASS/*.JPEG

Classes are numbered by the sorted names of their folders, images stand in the order of class and file name. A set of
your own is one line of a module, named by import path (``./flowers.py:flowers``)::

    flowers = image_folder(name="flowers", path="/data/flowers")
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from protocols.errors import UserError
from trainers.datasets.definition import Definition, Files
from trainers.datasets.pack import manifest
from trainers.datasets.prepare import default_cache, find_root

KINDS = (".jpeg", ".jpg", ".png", ".webp")
TRAIN, TEST = ("train",), ("val", "validation", "test")
"""What the folders of the two parts are called; the first that is there counts."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, as is usual."""


def image_folder(
    *,
    name: str,
    path: str | os.PathLike[str] | None = None,
    places: Sequence[str] = (),
    classes: int | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    fingerprint: str | None = None,
    size: int = 224,
    test_resize: int = 256,
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
    crop: int = 1,
    flip: bool = True,
    summary: str = "",
    advice: str = "",
) -> Definition:
    """A dataset of photographs in ImageFolder layout.

    What is not said about its size and content is found by looking, when the definition is made: the files are counted
    and hashed (once: as long as no size or time of change differs, the hash is remembered). For a set that is too large
    for that, or not on the machine that plans, say all four.

    Args:
        name: what records and tables call it, also a folder under a data root.
        path: its folder; None: looked for under the data root by its name.
        places: other folders under the data root to look in.
        classes: number of classes.
        train_size: number of training images.
        test_size: number of test images.
        fingerprint: names the content: change it when you change the images.
        size: height and width of the network's input.
        test_resize: what a test image's shorter side is resized to before its centre is cropped.
        mean: per channel, of pixels scaled to 0..1.
        std: as ``mean``.
        crop: 1: the standard recipe trains on random resized crops; 0: on the centre.
        flip: random horizontal flips in the standard recipe.
        summary: one line for lists.
        advice: what to do where there is no such folder.

    Raises:
        UserError: the folder has to be looked at, and is not there or not in this layout.
    """
    where = f"{name}/train/CLASS/ and {name}/val/CLASS/"
    advice = advice or f"put the images in {where} in a folder given by --data-root or NOISEGRID_DATA"

    def read(root: Path | None) -> Files:
        if path is not None:
            candidates = [Path(path)]
        elif root is not None:
            candidates = [root / place for place in (name, *places)] + [root]
        else:
            raise UserError(f"dataset {name!r} needs its files; {advice}")
        for candidate in candidates:
            if _part(candidate, TRAIN) is not None:
                return list_files(candidate)
        looked = ", ".join(str(candidate / TRAIN[0]) for candidate in candidates)
        raise UserError(f"dataset {name!r}: no photographs: looked for {looked}; {advice}")

    manifested = fingerprint is None
    if classes is None or train_size is None or test_size is None or fingerprint is None:
        files = read(find_root(None))
        classes = len(files.classes) if classes is None else classes
        train_size = len(files.train) if train_size is None else train_size
        test_size = len(files.test) if test_size is None else test_size
        fingerprint = content(files) if fingerprint is None else fingerprint
    return Definition(
        name=name,
        summary=summary or f"photographs of {classes} classes, {train_size:,} + {test_size:,}",
        classes=classes,
        image_shape=(size, size, 3),
        train_size=train_size,
        test_size=test_size,
        fingerprint=fingerprint,
        manifested=manifested,
        mean=mean,
        std=std,
        crop=crop,
        flip=flip,
        photographs=True,
        test_resize=test_resize,
        read=read,
    )


def list_files(folder: Path) -> Files:
    """The photographs of a folder in ImageFolder layout; reads none of them.

    Raises:
        UserError: a part or a class is missing, or holds no image.
    """
    train, test = _part(folder, TRAIN), _part(folder, TEST)
    for part, names in ((train, TRAIN), (test, TEST)):
        if part is None:
            raise UserError(
                f"there is no folder {folder / names[0]}: put the images of each class in {names[0]}/CLASS/"
            )
    assert train is not None and test is not None
    classes, tested = _classes(train), _classes(test)
    for name in tested:
        if name not in classes:
            raise UserError(f"{test / name} is a class without training images: there is no folder {train / name}")
    listed = {}
    for part in (train, test):
        images = [(label, file) for label, name in enumerate(classes) for file in _images(part / name)]
        counts = np.bincount([label for label, _ in images], minlength=len(classes))
        if not counts.all():
            raise UserError(f"{part / classes[int(np.argmin(counts))]} holds no image ({', '.join(KINDS)})")
        listed[part] = (
            tuple(f"{part.name}/{classes[label]}/{file}" for label, file in images),
            np.array([label for label, _ in images], np.int64),
        )
    return Files(
        folder=folder,
        classes=tuple(classes),
        train=listed[train][0],
        train_labels=listed[train][1],
        test=listed[test][0],
        test_labels=listed[test][1],
    )


def content(files: Files) -> str:
    """What names the content of all files: see :func:`trainers.datasets.pack.manifest`.

    Remembered in the cache under their names, sizes and times of change.
    """
    names = (*files.train, *files.test)
    stats = [os.stat(files.folder / name) for name in names]
    signature = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in zip(names, stats, strict=True)]
    text = json.dumps([str(files.folder.resolve()), signature])
    known = default_cache() / "manifests" / hashlib.sha256(text.encode()).hexdigest()
    try:
        return known.read_text()
    except OSError:
        pass
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: hashlib.sha256((files.folder / name).read_bytes()).digest(), names)
        found = manifest(zip(names, digests, strict=True))
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        aside = known.with_name(f"{known.name}.{os.getpid()}")
        aside.write_text(found)
        aside.replace(known)
    except OSError:
        pass  # it is found out again next time
    return found


def _part(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def _classes(part: Path) -> list[str]:
    classes = sorted(entry.name for entry in os.scandir(part) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise UserError(f"{part} holds no folders: put the images of each class in {part.name}/CLASS/")
    return classes


def _images(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    names = (entry.name for entry in os.scandir(folder) if entry.is_file())
    return sorted(name for name in names if name.lower().endswith(KINDS) and not name.startswith("."))


imagenet = image_folder(
    name="imagenet",
    summary="photographs of a thousand kinds of things, 1,281,167 + 50,000 (ILSVRC 2012)",
    places=("ILSVRC2012", "ILSVRC/Data/CLS-LOC"),
    classes=1000,
    train_size=1_281_167,
    test_size=50_000,
    fingerprint="ILSVRC2012 classification: 1,281,167 training and 50,000 validation images of 1,000 classes",
    advice="get ILSVRC 2012 from image-net.org and put its images in imagenet/train/CLASS/*.JPEG and "
    "imagenet/val/CLASS/*.JPEG (CLASS being n01440764 and so on) in a folder given by --data-root or NOISEGRID_DATA",
)
"""ImageNet is not hashed to be planned: its numbers of classes and images name it, and what was packed on a machine has
a manifest of its own (:attr:`trainers.datasets.pack.Pack.manifest`)."""
