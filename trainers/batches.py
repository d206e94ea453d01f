"""The batch plan: everything random or scheduled about one epoch, decided on the host before the epoch starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocols import streams
from protocols.contract import Dataset, Network
from protocols.run import Run
from protocols.sources import source
from trainers.asynchrony import Commits
from trainers.schedule import learning_rates

EVALUATION_BATCH = 500
"""Test examples per forward pass. It can change last bits, so changing it means a new numerics version."""


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """One epoch. Rows of the per-example arrays stand in the order of training; batch s is rows [s b, (s + 1) b)."""

    examples: NDArray[np.int64]
    """(N,) index into the training set."""
    corners: NDArray[np.int64]
    """(N,) index of the crop's first pixel in the padded training set, flattened over (example, row, column); zeros for
    photographs and text."""
    flips: NDArray[np.int64]
    """(N,) 1 where the crop is mirrored; zeros for photographs and text."""
    boxes: NDArray[np.int64] | None
    """(N, 5) for photographs, see :meth:`protocols.contract.Photographs.train`; None for everything else."""
    rates: NDArray[np.float64]
    """(steps,) By step, not by batch: the two differ where workers are asynchronous."""
    masks: dict[str, NDArray[np.bool_]]
    """Dropout layer -> (N, ...): which units stay on."""
    batch_size: int
    commits: Commits | None = None
    """Which batch each step applies, and to which weights; None: step s applies batch s, as usual."""

    @property
    def steps(self) -> int:
        """Number of batches; the last may be smaller."""
        return len(self.rates)

    def rows(self, step: int) -> slice:
        """The rows of one batch."""
        return slice(step * self.batch_size, (step + 1) * self.batch_size)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(steps,) Examples of the batch that each step applies."""
        batches = np.arange(self.steps) if self.commits is None else self.commits.batches
        starts = batches * self.batch_size
        return np.minimum(self.batch_size, len(self.examples) - starts)


def steps_per_epoch(run: Run, data: Dataset) -> int:
    """Number of batches of an epoch; the last one is never dropped."""
    return -(-len(data.train_labels) // run.recipe.batch_size)


def plan_epoch(run: Run, data: Dataset, network: Network, epoch: int, commits: Commits | None = None) -> EpochPlan:
    """The plan of an epoch (counted from 0), in the order that ``commits`` gives where workers are asynchronous.

    Order, augmentation and dropout masks are drawn first; where the library source varies by ``order``, the samples
    inside each batch are permuted last, masks and all: the same mathematics, another order of sums. All of it belongs
    to batches, so that the order in which asynchronous workers apply them changes none of it.
    """
    size, count = run.recipe.batch_size, len(data.train_labels)
    steps = steps_per_epoch(run, data)
    examples = streams.epoch_order(run, epoch, count)
    masks = {
        name: np.concatenate(
            [
                streams.dropout_keep(run, epoch * steps + step, name, (min(size, count - step * size), *shape), rate)
                for step in range(steps)
            ]
        )
        for name, (shape, rate) in network.dropout.items()
    }
    permutation = streams.batch_permutation(run, epoch, count)
    if permutation is not None:
        examples = examples[permutation]
        masks = {name: mask[permutation] for name, mask in masks.items()}
    samples = data.train_samples[examples]
    corners, flips, boxes = np.zeros(count, np.int64), np.zeros(count, np.int64), None
    if data.photographs is not None:
        boxes = streams.resized_crops(run, epoch, data.photographs.train_sizes[examples], samples)
    elif not data.is_text:
        rows, columns, mirrored = streams.crops_and_flips(run, epoch, data.full_train_size)
        height, width, _ = data.image_shape
        pad = 2 * (run.recipe.crop or 0)
        corners = (examples * (height + pad) + rows[samples]) * (width + pad) + columns[samples]
        flips = mirrored[samples]
    plan = EpochPlan(
        examples=examples,
        corners=corners,
        flips=flips,
        boxes=boxes,
        rates=learning_rates(run.recipe, epoch, steps),
        masks=masks,
        batch_size=size,
        commits=commits,
    )
    for name in run.varies:
        if (change := source(name).plan) is not None:
            plan = change(plan, streams.generator(run, name, epoch))
    return plan


def pixel_grids(image_shape: tuple[int, ...], crop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets from a crop's corner to its pixels in the flattened padded set, plain and mirrored: (height, width)."""
    height, width, _ = image_shape
    rows = np.arange(height, dtype=np.int64)[:, None] * (width + 2 * crop)
    columns = np.arange(width, dtype=np.int64)
    return rows + columns, rows + columns[::-1]


def padded_pixels(data: Dataset, crop: int) -> NDArray[np.generic]:
    """The training images with ``crop`` zeros on each side, (N (height + 2 crop) (width + 2 crop), channels)."""
    pad = ((0, 0), (crop, crop), (crop, crop), (0, 0))
    return np.pad(data.train_images, pad).reshape(-1, data.image_shape[2])
