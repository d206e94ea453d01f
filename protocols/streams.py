"""Seeds and counter-based streams: every random number of a run, as a pure function of what it is for.

No stream has a position that one use could leave behind for the next. A number is named by its purpose (source, epoch,
step, layer), so neither the order of execution, nor the number of workers, nor an interruption can change it, and both
frameworks draw the same values.

Each source has its own seed ``SeedSequence(base_seed, spawn_key=(n, r))`` with n the source's number, r = 0 where it is
held and replicate + 1 where it varies. A cell that varies several sources appends the set of their numbers as a
bit mask, so that no two cells of a group share a varied seed. onebit does not count here, since a run with a changed
bit is held against the same run without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from protocols.run import Run
from protocols.sources import SOURCES

Int64 = NDArray[np.int64]
Floats = NDArray[np.floating]

_FIELD = np.uint64(2**24 - 1)


def seed_key(run: Run, source: str) -> tuple[int, ...]:
    """The spawn key of a source's seed in this run."""
    number = SOURCES[source].number
    # The replicates of onebit share one permutation and take different entries of it.
    if source not in run.varies or source == "onebit":
        return (number, 0)
    # Not counting onebit: a run must share every seed with the same run without the changed bit.
    varied = [name for name in run.varies if name != "onebit"]
    if len(varied) == 1:
        return (number, run.replicate + 1)
    return (number, run.replicate + 1, sum(1 << SOURCES[name].number for name in varied))


def generator(run: Run, source: str, *purpose: int | str) -> np.random.Generator:
    """A Philox generator for one purpose of one source, e.g. ``generator(run, "dropout", step, "head")``."""
    key = seed_key(run, source)
    # The length of the key keeps (n, r) + purpose and (n, r, mask) + purpose apart.
    words = (len(key), *key, *(_word(part) for part in purpose)) if purpose else key
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(run.base_seed, spawn_key=words)))


def initial_normal(run: Run, parameter: str, shape: tuple[int, ...], std: float) -> NDArray[np.float64]:
    """Normal values of mean 0 for the parameter of that name."""
    return generator(run, "init", parameter).standard_normal(shape) * std


def initial_uniform(run: Run, parameter: str, shape: tuple[int, ...], bound: float) -> NDArray[np.float64]:
    """Uniform values between -bound and bound for the parameter of that name."""
    return generator(run, "init", parameter).uniform(-bound, bound, shape)


def epoch_order(run: Run, epoch: int, examples: int) -> Int64:
    """The order in which an epoch visits its examples, shape (examples,).

    Where the library source varies by ``order``, the samples inside each batch are permuted after everything else was
    drawn: see :func:`batch_permutation`.
    """
    return generator(run, "shuffle", epoch).permutation(examples).astype(np.int64)


def batch_permutation(run: Run, epoch: int, examples: int) -> Int64 | None:
    """Positions within an epoch, shape (examples,), permuted inside each batch; None where the order is held."""
    if run.library != "order":
        return None
    rng = generator(run, "library", epoch)
    size = run.recipe.batch_size
    return np.concatenate(
        [start + rng.permutation(min(size, examples - start)) for start in range(0, examples, size)]
    ).astype(np.int64)


def crops_and_flips(run: Run, epoch: int, samples: int) -> tuple[Int64, Int64, Int64]:
    """Row and column offset (0 to 2 crop) and flip (0 or 1) of every sample of the full dataset, each (samples,).

    One 64-bit Philox word belongs to each sample, so its draw depends on (augment seed, epoch, sample) alone.
    """
    words = generator(run, "augment", epoch).bit_generator.random_raw(samples).astype(np.uint64)
    choices = np.uint64(2 * (run.recipe.crop or 0) + 1)
    rows = ((words & _FIELD) * choices) >> np.uint64(24)
    columns = (((words >> np.uint64(24)) & _FIELD) * choices) >> np.uint64(24)
    flips = (words >> np.uint64(63)) if run.recipe.flip else np.zeros(samples, np.uint64)
    return rows.astype(np.int64), columns.astype(np.int64), flips.astype(np.int64)


def dropout_keep(run: Run, step: int, layer: str, shape: tuple[int, ...], rate: float) -> NDArray[np.bool_]:
    """Which units stay on in one step of one dropout layer; each is dropped with probability ``rate``."""
    return generator(run, "dropout", step, layer).random(shape, dtype=np.float32) >= np.float32(rate)


def onebit_pairs(tensor: Floats) -> int:
    """How many different one-bit changes a tensor admits: two directions for each element that is not zero."""
    return 2 * int(np.count_nonzero(tensor))


def flip_one_bit(run: Run, tensor: Floats) -> tuple[Floats, dict[str, float | int]]:
    """Move one nonzero element to its neighbouring floating-point number.

    The pair (element, direction) is the replicate-th entry of a permutation that all replicates share, so no two
    replicates make the same change.

    Returns:
        The changed copy, and what was changed: flat index (row-major), value before, value after.

    Raises:
        ValueError: the replicate index is not below :func:`onebit_pairs`.
    """
    elements = np.flatnonzero(tensor)
    if run.replicate >= 2 * len(elements):
        raise ValueError(f"replicate {run.replicate} of onebit, but the tensor admits {2 * len(elements)} changes")
    entry = int(generator(run, "onebit").permutation(2 * len(elements))[run.replicate])
    index, up = int(elements[entry // 2]), bool(entry % 2)
    changed = tensor.copy()
    before = changed.flat[index]
    after = np.nextafter(before, before.dtype.type(np.inf if up else -np.inf))
    changed.flat[index] = after
    return changed, {"index": index, "before": float(before), "after": float(after)}


def seeds(run: Run) -> Mapping[str, tuple[int, ...]]:
    """The spawn key of every source, for the record."""
    return {name: seed_key(run, name) for name in SOURCES}


def _word(part: int | str) -> int:
    """A 32-bit word for one part of a purpose; names are hashed."""
    return part if isinstance(part, int) else int.from_bytes(hashlib.sha256(part.encode()).digest()[:4], "little")
