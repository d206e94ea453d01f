"""Seeds and counter-based streams: every random number of a run, as a pure function of what it is for.

No stream has a position that one use could leave behind for the next. A number is named by its purpose (source, epoch,
step, layer), so neither the order of execution, nor the number of workers, nor an interruption can change it, and both
frameworks draw the same values.

Each source has its own seed ``SeedSequence(base_seed, spawn_key=(n, r))`` with n the source's number, r = 0 where it is
held and replicate + 1 where it varies. A cell that varies several sources appends the set of their numbers as a
bit mask, so that no two cells of a group share a varied seed. onebit does not count here, since a run with a changed
bit is held against the same run without it; nor does hardware, which no seed drives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from protocols.perturbation import Perturbation
from protocols.run import Run
from protocols.sources import SOURCES, source_number

Int64 = NDArray[np.int64]
Floats = NDArray[np.floating]

_FIELD = np.uint64(2**24 - 1)
_SHORT = np.uint64(2**16 - 1)
_TRIES = 10
_CROP_WORDS = 12


def seed_key(run: Run, source: str) -> tuple[int, ...]:
    """The spawn key of a source's seed in this run."""
    number = source_number(source)
    # The replicates of onebit share one permutation and take different entries of it.
    if source not in run.varies or source in ("onebit", "hardware"):
        return (number, 0)
    # Not counting onebit: a run must share every seed with the same run without the changed bit. Nor hardware,
    # which has no seed and lets one see the same runs elsewhere.
    varied = [name for name in run.varies if name not in ("onebit", "hardware")]
    if len(varied) == 1:
        return (number, run.replicate + 1)
    own = sorted(source_number(name) for name in varied if name not in SOURCES)
    return (number, run.replicate + 1, sum(1 << SOURCES[name].number for name in varied if name in SOURCES), *own)


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


def resized_crops(run: Run, epoch: int, sizes: Int64, samples: Int64) -> Int64:
    """Random parts of photographs, and whether they are mirrored: top, left, height, width and flip, (n, 5).

    The usual law (Szegedy et al. 2015): the part has a share of the area uniform in 0.08 to 1 and an aspect ratio
    (width over height) log-uniform in 3/4 to 4/3; the first of ten that fits into the photograph is placed uniformly.
    Where none fits it is the largest central part of an allowed aspect ratio. Without crops it is the central square of
    7/8 of the shorter side, which is what a test image shows.

    Twelve 64-bit Philox words belong to each sample: one a try (16 bits each for area, aspect, top and left), one for
    the flip. So its draw depends on (augment seed, epoch, sample) alone.

    Args:
        run: the run.
        epoch: from 0.
        sizes: (n, 2) height and width of each photograph.
        samples: (n,) its index in the full dataset.
    """
    raw = generator(run, "augment", epoch, "photographs").bit_generator.random_raw(
        _CROP_WORDS * (int(samples.max()) + 1)
    )
    words = raw.astype(np.uint64).reshape(-1, _CROP_WORDS)[samples]
    boxes = _central(sizes) if run.recipe.crop else _central_square(sizes)
    pending = np.arange(len(samples)) if run.recipe.crop else np.arange(0)
    for number in range(_TRIES):
        area, aspect, top, left = ((words[pending, number] >> np.uint64(16 * part)) & _SHORT for part in range(4))
        height, width = sizes[pending].T
        pixels = height * width * (0.08 + 0.92 * (area + 0.5) / 2**16)
        ratio = (3 / 4) * (16 / 9) ** ((aspect + 0.5) / 2**16)
        high = np.rint(np.sqrt(pixels / ratio)).astype(np.int64)
        wide = np.rint(np.sqrt(pixels * ratio)).astype(np.int64)
        fits = (high > 0) & (high <= height) & (wide > 0) & (wide <= width)
        rows = (top.astype(np.int64) * (height - high + 1)) >> 16
        columns = (left.astype(np.int64) * (width - wide + 1)) >> 16
        boxes[pending[fits]] = np.stack([rows, columns, high, wide], axis=1)[fits]
        pending = pending[~fits]
    flips = (words[:, _TRIES] >> np.uint64(63)) if run.recipe.flip else np.zeros(len(samples), np.uint64)
    return np.concatenate([boxes, flips[:, None].astype(np.int64)], axis=1)


def plain_crops(sizes: Int64) -> Int64:
    """The part of each training photograph that a test image would show, in the form of :func:`resized_crops`."""
    return np.concatenate([_central_square(sizes), np.zeros((len(sizes), 1), np.int64)], axis=1)


def _central(sizes: Int64) -> Int64:
    """The largest central part whose width over height lies in 3/4 to 4/3: top, left, height, width, (n, 4)."""
    heights, widths = sizes.T
    high = np.minimum(heights, np.rint(widths * 4 / 3).astype(np.int64))
    wide = np.minimum(widths, np.rint(heights * 4 / 3).astype(np.int64))
    return np.stack([(heights - high) // 2, (widths - wide) // 2, high, wide], axis=1)


def _central_square(sizes: Int64) -> Int64:
    sides = np.maximum(sizes.min(axis=1) * 7 // 8, 1)
    return np.stack([(sizes[:, 0] - sides) // 2, (sizes[:, 1] - sides) // 2, sides, sides], axis=1)


def dropout_keep(run: Run, step: int, layer: str, shape: tuple[int, ...], rate: float) -> NDArray[np.bool_]:
    """Which units stay on in one step of one dropout layer; each is dropped with probability ``rate``."""
    return generator(run, "dropout", step, layer).random(shape, dtype=np.float32) >= np.float32(rate)


def service_times(run: Run, epoch: int, batches: int) -> NDArray[np.float64]:
    """How long an asynchronous worker takes for each batch of an epoch, exponential with mean 1; (batches,)."""
    return generator(run, "async", epoch).exponential(size=batches)


def onebit_choices(perturbation: Perturbation, tensor: Floats) -> int | None:
    """How many different changes of one element a tensor admits; None: as many as one likes (noise, many elements)."""
    if perturbation.kind == "gaussian" or perturbation.fraction:
        return None
    elements = int(np.count_nonzero(tensor)) if perturbation.element is None else 1
    return elements * (2 if perturbation.direction == "either" else 1)


def nothing_to_change(perturbation: Perturbation, tensor: Floats) -> str:
    """Why a tensor cannot be changed in this way, as what is said of it; empty where it can."""
    if perturbation.kind == "gaussian" and tensor.min() == tensor.max():
        return "has equal elements, and noise is scaled to their SD, which is 0"
    if perturbation.kind == "ulp" and perturbation.element is None and not tensor.any():
        return "has no element that is not 0"
    return ""


def perturbed(run: Run, tensor: Floats) -> tuple[Floats, dict[str, float | int]]:
    """Change a tensor as ``run.perturb`` says, for the run's replicate.

    One element by one ulp: the pair (element that is not 0, direction) is the replicate-th entry of a permutation that
    all replicates share, so no two replicates make the same change. A share of the elements, or noise: drawn by
    replicate.

    Returns:
        The changed copy, and what was changed: how many elements, and of the first of them the flat index (row-major),
        the value before and the value after.

    Raises:
        ValueError: there are fewer different changes than replicates, or none.
    """
    assert run.perturb is not None
    if lack := nothing_to_change(run.perturb, tensor):
        raise ValueError(f"the perturbed tensor {lack}")
    how, choices = run.perturb, onebit_choices(run.perturb, tensor)
    candidates = np.flatnonzero(tensor) if how.element is None else np.array([how.element])
    if choices is not None:
        if run.replicate >= choices:
            raise ValueError(f"replicate {run.replicate} of onebit, but the tensor admits {choices} changes")
        entry = int(generator(run, "onebit").permutation(choices)[run.replicate])
        chosen, upwards = candidates[[entry // (choices // len(candidates))]], np.array([bool(entry % 2)])
    else:
        rng = generator(run, "onebit", "elements", run.replicate)
        count = max(1, round(how.fraction * len(candidates)))
        chosen = np.sort(rng.permutation(candidates)[:count])
        upwards = rng.random(count) < 0.5
    if how.direction != "either":
        upwards = np.full(len(chosen), how.direction == "up")
    before = tensor.flat[chosen]
    if how.kind == "gaussian":
        noise = generator(run, "onebit", "noise", run.replicate).standard_normal(len(chosen))
        after = (before + how.scale * tensor.std(dtype=np.float64) * noise).astype(tensor.dtype)
    else:
        after = np.nextafter(before, np.where(upwards, np.inf, -np.inf).astype(tensor.dtype))
    changed = tensor.copy()
    changed.flat[chosen] = after
    first = {"index": int(chosen[0]), "before": float(before[0]), "after": float(after[0])}
    return changed, {"elements": len(chosen), **first}


def seeds(run: Run) -> Mapping[str, tuple[int, ...]]:
    """The spawn key of every source, for the record."""
    return {name: seed_key(run, name) for name in dict.fromkeys((*SOURCES, *run.varies))}


def _word(part: int | str) -> int:
    """A 32-bit word for one part of a purpose; names are hashed."""
    return part if isinstance(part, int) else int.from_bytes(hashlib.sha256(part.encode()).digest()[:4], "little")
