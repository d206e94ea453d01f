"""Digests of weights and labels: equal digests mean equal bits, across processes, machines and frameworks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[np.floating]]
"""Trainable tensors and batch-norm mean and variance, under the architecture's own names, in the canonical layouts:
convolutions (out, in, height, width), dense (out, in), dense after a flatten in (channel, height, width) order."""


def tensor_digest(name: str, tensor: NDArray[np.floating]) -> str:
    """SHA-256 over name, element type, shape and little-endian bytes."""
    array = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
    sha = hashlib.sha256(f"{name}:{array.dtype.str}:{','.join(map(str, array.shape))}:".encode())
    sha.update(array.data if array.ndim else array.tobytes())
    return sha.hexdigest()


def tensor_digests(tensors: Tensors) -> dict[str, str]:
    """The digest of every tensor, sorted by name."""
    return {name: tensor_digest(name, tensors[name]) for name in sorted(tensors)}


def digest(tensors: Tensors) -> str:
    """SHA-256 over the digests of all tensors, in the order of their names."""
    return hashlib.sha256("\n".join(tensor_digests(tensors).values()).encode()).hexdigest()


def labels_fingerprint(labels: NDArray[np.integer]) -> str:
    """SHA-256 of the labels as little-endian int64, in test-set order."""
    return hashlib.sha256(np.ascontiguousarray(labels, dtype="<i8").tobytes()).hexdigest()
