"""The trained weights of two runs, tensor by tensor: equal or not, and how far apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Apart:
    """One tensor of two runs."""

    equal: bool
    """Bit for bit."""
    changed: int
    """Elements whose bits differ."""
    size: int
    distance: float
    """L2 norm of the difference."""
    cosine: float
    """Of the angle between the two; NaN where one is 0 throughout."""
    largest_ulp: int
    """The largest number of floating-point values that an element moved by; -1 where an element is not a number."""


def apart(first: Array, second: Array) -> Apart:
    """Hold one tensor of two runs against each other.

    Raises:
        ValueError: they differ in shape or type.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(f"{first.dtype} {first.shape} and {second.dtype} {second.shape} cannot be compared")
    one, other = first.astype(np.float64).ravel(), second.astype(np.float64).ravel()
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    changed = int(np.count_nonzero(bits(first) != bits(second)))
    return Apart(
        equal=changed == 0,
        changed=changed,
        size=first.size,
        distance=float(np.linalg.norm(one - other)),
        # Rounding aside, a tensor lies in its own direction.
        cosine=min(float(one @ other) / norms, 1.0) if norms > 0 else float("nan"),
        largest_ulp=largest_ulp(first, second),
    )


def tensors_apart(first: Mapping[str, Array], second: Mapping[str, Array]) -> dict[str, Apart]:
    """:func:`apart` for every tensor that both runs have."""
    return {name: apart(first[name], second[name]) for name in first if name in second}


def largest_ulp(first: Array, second: Array) -> int:
    """The largest distance of two elements in units in the last place; -1 where an element is not a number."""
    if not first.size:
        return 0
    if np.isnan(first).any() or np.isnan(second).any():
        return -1
    one, other = ordered(first), ordered(second)
    # As unsigned numbers a difference of 64 bits cannot overflow.
    return int((np.maximum(one, other) - np.minimum(one, other)).max())


def ordered(values: Array) -> NDArray[np.uint64]:
    """Floating-point numbers as integers in the same order, neighbours 1 apart and both zeros the same."""
    width = 8 * values.dtype.itemsize
    half = np.uint64(1 << (width - 1))
    raw = bits(values).astype(np.uint64)
    size = raw & (half - np.uint64(1))  # without the sign
    return np.where(raw & half, half - size, half + size)


def bits(values: Array) -> NDArray[np.unsignedinteger]:
    """The elements as unsigned integers, so that -0 differs from 0 and NaN equals itself."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
