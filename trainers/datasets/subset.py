"""Which examples of a dataset a specification means, and the fingerprint of exactly those."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
from numpy.typing import NDArray

from protocols.protocol import DatasetSpec
from protocols.run import canonical
from trainers.datasets.definition import Definition


def sizes(definition: Definition, spec: DatasetSpec) -> tuple[int, int]:
    """How many training and test examples a specification means.

    Raises:
        UserError: a size is larger than the dataset or smaller than its number of classes (text: than one window).
    """
    train = _size(definition, "train_size", spec.train_size, definition.train_size)
    test = _size(definition, "test_size", spec.test_size, definition.test_size)
    return train, test


def _size(definition: Definition, field: str, size: int | None, full: int) -> int:
    if size is None:
        return full
    least, why = (1, "one window") if definition.is_text else (definition.classes, "one example a class")
    if not least <= size <= full:
        raise definition.error(f"{field} must lie between {least} ({why}) and {full} (all of them), not {size}")
    return size


def image_shape(definition: Definition, spec: DatasetSpec) -> tuple[int, ...]:
    """The shape of the network's input: (height, width, channels); text: (length,). Reads no file.

    Raises:
        UserError: the images cannot be shrunk to ``spec.image_size``.
    """
    if spec.image_size is None:
        return definition.image_shape
    if definition.is_text:
        raise definition.error("image_size is for images, and this is text")
    height, width, channels = definition.image_shape
    if spec.image_size > min(height, width):
        raise definition.error(f"image_size must be at most {min(height, width)}, not {spec.image_size}")
    return spec.image_size, spec.image_size, channels


def fingerprint(definition: Definition, spec: DatasetSpec) -> str:
    """SHA-256 of everything about the data that a run's numbers depend on. Reads no file.

    Raises:
        UserError: as :func:`sizes` and :func:`image_shape`; or ``skip_broken`` for a dataset that holds no photographs.
    """
    train, test = sizes(definition, spec)
    image_shape(definition, spec)
    if spec.skip_broken and not definition.photographs:
        raise definition.error("skip_broken is for photographs, which this dataset does not hold")
    values = {field.name: getattr(definition, field.name) for field in dataclasses.fields(definition)}
    decisive = ["fingerprint", "classes", "image_shape", "mean", "std", "maximum"]
    if definition.photographs:
        decisive.append("test_resize")
    asked = {name: getattr(spec, name) for name in ("image_size", "skip_broken") if getattr(spec, name)}
    text = canonical({"train": train, "test": test, **{name: values[name] for name in decisive}, **asked})
    return hashlib.sha256(text.encode()).hexdigest()


def chosen(definition: Definition, spec: DatasetSpec, labels: NDArray[np.int64], part: str) -> NDArray[np.int64]:
    """The indices of a specification's examples among all of a part.

    Args:
        definition: the dataset.
        spec: which of its examples.
        labels: those of the whole part.
        part: ``train`` or ``test``.

    Returns:
        The first examples of each class (:func:`stratified`). Text has no classes to balance: its first windows.
    """
    size = sizes(definition, spec)[part == "test"]
    return np.arange(size) if definition.is_text else stratified(labels, definition.classes, size)


def stratified(labels: NDArray[np.int64], classes: int, size: int) -> NDArray[np.int64]:
    """The indices of ``size`` examples in which each class has its share of the full set, in their original order.

    A class's share is its exact quota rounded down; what is left over goes to the largest remainders (of equal ones, to
    the lower class). Each class gives its first examples.

    Args:
        labels: (N,) the labels of the full set.
        classes: number of classes.
        size: at most N.
    """
    counts = np.bincount(labels, minlength=classes)
    quotas, remainders = np.divmod(counts * size, len(labels))
    largest = np.argsort(-remainders, kind="stable")[: size - quotas.sum()]
    quotas[largest] += 1
    chosen = [np.flatnonzero(labels == label)[: quotas[label]] for label in range(classes)]
    return np.sort(np.concatenate(chosen))
