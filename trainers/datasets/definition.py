"""What a dataset is before any of its files is read, and how to make one of your own arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.digest import digest
from protocols.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """All examples of a dataset, as stored."""

    train_images: NDArray[Any]
    """(N, height, width, channels), uint8 or float32; text: (N, length) int32."""
    train_labels: NDArray[np.int64]
    """(N,), 0 to classes - 1; text: (N, length)."""
    test_images: NDArray[Any]
    test_labels: NDArray[np.int64]
    """As those of training; text: flat, (N length,)."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """All examples of a dataset of photographs: where they lie."""

    folder: Path
    classes: tuple[str, ...]
    """The name of each class, also that of its folder."""
    train: tuple[str, ...]
    """Each training photograph, relative to ``folder``."""
    train_labels: NDArray[np.int64]
    test: tuple[str, ...]
    test_labels: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Definition:
    """One dataset: everything that a plan needs to know, and the function that reads the examples.

    A pixel p enters a network as ``(p / maximum - mean) / std``, per channel. A dataset of text has windows of tokens
    in place of images and neither mean nor std; one of photographs is decoded while it is trained on.

    Raises:
        UserError: the values do not fit together.
    """

    name: str
    summary: str
    classes: int
    image_shape: tuple[int, ...]
    """(height, width, channels) of the network's input; text: (length,)."""
    train_size: int
    test_size: int
    fingerprint: str
    """Names the content: two definitions whose examples differ must differ here. A constant for known files."""
    manifested: bool = False
    """Photographs: whether the fingerprint is their manifest (:func:`trainers.datasets.pack.manifest`)."""
    mean: tuple[float, ...]
    """Per channel, of pixels scaled to 0..1; text: empty."""
    std: tuple[float, ...]
    maximum: float = 255.0
    """The pixel value that is scaled to 1."""
    crop: int = 0
    """Padding in pixels of the random crop in the dataset's standard recipe; 0: no crop. Of photographs a random part
    is resized (:func:`protocols.streams.resized_crops`), where it is not 0."""
    flip: bool = False
    """Whether the standard recipe flips images horizontally at random."""
    photographs: bool = False
    """Whether ``read`` lists files, which are packed once and decoded as they are needed."""
    test_resize: int = 0
    """Photographs: pixels of a test image's shorter side before its centre is cropped to ``image_shape``."""
    read: Callable[[Path | None], Arrays | Files]
    """Reads the examples from a data root (None where the user gave none), checks them against what is known of the
    files, and raises :class:`UserError` naming the file that is missing or wrong."""
    fetch: Callable[[Path], Path] | None = None
    """Called where the user gave no data root: finds the files on this machine or downloads them into the given folder,
    and returns the root to read from. None: there is nothing to fetch."""

    def __post_init__(self) -> None:
        channels = 0 if self.is_text else self.image_shape[-1]
        if not len(self.mean) == len(self.std) == channels:
            raise self.error(f"mean and std must have one value for each of the {channels} channels")
        if not min(self.std, default=1.0) > 0 or not self.maximum > 0:
            raise self.error("std and maximum must be above 0")
        if self.photographs and not max(self.image_shape[:2]) <= self.test_resize:
            raise self.error(f"test_resize must be at least {max(self.image_shape[:2])}, not {self.test_resize}")
        if self.classes < 2:
            raise self.error(f"classes must be at least 2, not {self.classes}")

    @property
    def is_text(self) -> bool:
        """Whether the examples are windows of tokens."""
        return len(self.image_shape) == 1

    @property
    def shift(self) -> NDArray[np.float64]:
        """(channels,) What is subtracted from a stored pixel."""
        return np.array(self.mean) * self.maximum

    @property
    def scale(self) -> NDArray[np.float64]:
        """(channels,) What the shifted pixel is multiplied by."""
        return 1 / (np.array(self.std) * self.maximum)

    def error(self, problem: str) -> UserError:
        """A mistake in this dataset, in one line."""
        return UserError(f"dataset {self.name!r}: {problem}")

    def verify(self, examples: Arrays | Files) -> None:
        """Hold examples against the definition.

        Raises:
            UserError: a shape, an element type, a number of files or a label is not what the definition says.
        """
        if isinstance(examples, Files):
            self._verify_files(examples)
        else:
            self._verify_arrays(examples)

    def _verify_files(self, files: Files) -> None:
        if len(files.classes) != self.classes:
            raise self.error(f"{files.folder} holds {len(files.classes)} classes where {self.classes} are expected")
        for part, names, size in (("train", files.train, self.train_size), ("test", files.test, self.test_size)):
            if len(names) != size:
                raise self.error(f"{files.folder} holds {len(names)} {part} images where {size} are expected")

    def _verify_arrays(self, arrays: Arrays) -> None:
        kinds = (np.int32,) if self.is_text else (np.uint8, np.float32)
        expected = " or ".join(kind.__name__ for kind in kinds)
        for part, images, labels, size in (
            ("train", arrays.train_images, arrays.train_labels, self.train_size),
            ("test", arrays.test_images, arrays.test_labels, self.test_size),
        ):
            shape = (size, *self.image_shape)
            if images.shape != shape or images.dtype not in kinds:
                raise self.error(
                    f"{part}_images must be {expected} of shape {shape}, not {images.dtype} of {images.shape}"
                )
            shape = (size,) if not self.is_text else shape if part == "train" else (size * self.image_shape[0],)
            if labels.shape != shape or labels.dtype != np.int64:
                raise self.error(f"{part}_labels must be int64 of shape {shape}, not {labels.dtype} of {labels.shape}")
            for what, values in ((f"{part}_labels", labels), *([(f"{part}_images", images)] if self.is_text else [])):
                if values.min() < 0 or values.max() >= self.classes:
                    raise self.error(
                        f"{what} must lie in 0 to {self.classes - 1}, not {values.min()} to {values.max()}"
                    )


def from_arrays(
    *,
    name: str,
    train_images: NDArray[Any],
    train_labels: Sequence[int] | NDArray[np.integer],
    test_images: NDArray[Any],
    test_labels: Sequence[int] | NDArray[np.integer],
    classes: int | None = None,
    maximum: float | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    crop: int = 0,
    flip: bool = False,
    summary: str = "",
) -> Definition:
    """A dataset of arrays that you already have; the fingerprint is the SHA-256 of their content.

    Args:
        name: what records and tables call it.
        train_images: (N, height, width, channels), or (N, height, width) for one channel; uint8 or float32.
        train_labels: (N,) integers from 0.
        test_images: as ``train_images``.
        test_labels: as ``train_labels``.
        classes: None: one more than the largest label.
        maximum: the pixel value that counts as 1; None: 255 for uint8, 1 for float32.
        mean: per channel, of pixels scaled to 0..1; None: that of the training images, to four digits.
        std: as ``mean``.
        crop: padding of the random crop in the standard recipe.
        flip: random horizontal flips in the standard recipe.
        summary: one line for lists.

    Raises:
        UserError: the arrays do not fit together.
    """
    train, test = (images[..., None] if images.ndim == 3 else images for images in (train_images, test_images))
    if train.ndim != 4 or test.ndim != 4 or not len(train) or not len(test):
        raise UserError(
            f"dataset {name!r}: images must be arrays (N, height, width, channels), not {train.shape} and {test.shape}"
        )
    arrays = Arrays(
        train_images=train,
        train_labels=_integers(name, "train_labels", train_labels),
        test_images=test,
        test_labels=_integers(name, "test_labels", test_labels),
    )
    if maximum is None:
        maximum = 255.0 if train.dtype == np.uint8 else 1.0
    pixels = train.reshape(-1, train.shape[-1])
    definition = Definition(
        name=name,
        summary=summary or name,
        classes=int(arrays.train_labels.max()) + 1 if classes is None else classes,
        image_shape=train.shape[1:],
        train_size=len(train),
        test_size=len(test),
        fingerprint=digest(vars(arrays)),
        mean=_four_digits(pixels.mean(0, dtype=np.float64) / maximum) if mean is None else tuple(mean),
        std=_four_digits(pixels.std(0, dtype=np.float64) / maximum) if std is None else tuple(std),
        maximum=maximum,
        crop=crop,
        flip=flip,
        read=lambda root: arrays,
    )
    definition.verify(arrays)
    return definition


def _integers(name: str, what: str, labels: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    array = np.asarray(labels)
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"dataset {name!r}: {what} must be integers, not {array.dtype}")
    return array.astype(np.int64)


def _four_digits(values: NDArray[np.float64]) -> tuple[float, ...]:
    # Rounded so that machines that sum in another order agree on the value, and with it on every run's id.
    return tuple(float(f"{value:.4g}") for value in values)
