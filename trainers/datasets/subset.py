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
        UserError: a size is larger than the dataset or smaller than its number of classes.
    """
    train = _size(definition, "train_size", spec.train_size, definition.train_size)
    test = _size(definition, "test_size", spec.test_size, definition.test_size)
    return train, test


def _size(definition: Definition, field: str, size: int | None, full: int) -> int:
    if size is None:
        return full
    if not definition.classes <= size <= full:
        raise definition.error(
            f"{field} must lie between {definition.classes} (one example a class) and {full} (all of them), not {size}"
        )
    return size


def fingerprint(definition: Definition, spec: DatasetSpec) -> str:
    """SHA-256 of everything about the data that a run's numbers depend on. Reads no file.

    Raises:
        UserError: as :func:`sizes`.
    """
    train, test = sizes(definition, spec)
    values = {field.name: getattr(definition, field.name) for field in dataclasses.fields(definition)}
    decisive = ("fingerprint", "classes", "image_shape", "mean", "std", "maximum")
    text = canonical({"train": train, "test": test, **{name: values[name] for name in decisive}})
    return hashlib.sha256(text.encode()).hexdigest()


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
