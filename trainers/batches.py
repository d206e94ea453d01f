"""The batch plan: everything random or scheduled about one epoch, decided on the host before the epoch starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocols import streams
from protocols.contract import Dataset, Network
from protocols.run import Run
from trainers.schedule import learning_rates

EVALUATION_BATCH = 500
"""Test examples per forward pass. It can change last bits, so changing it means a new numerics version."""


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """One epoch. Rows of the per-example arrays stand in the order of training; batch s is rows [s b, (s + 1) b)."""

    examples: NDArray[np.int64]
    """(N,) index into the training set."""
    corners: NDArray[np.int64]
    """(N,) index of the crop's first pixel in the padded training set, flattened over (example, row, column)."""
    flips: NDArray[np.int64]
    """(N,) 1 where the crop is mirrored."""
    rates: NDArray[np.float64]
    """(steps,)"""
    masks: dict[str, NDArray[np.bool_]]
    """Dropout layer -> (N, ...): which units stay on."""
    batch_size: int

    @property
    def steps(self) -> int:
        """Number of batches; the last may be smaller."""
        return len(self.rates)

    def rows(self, step: int) -> slice:
        """The rows of one batch."""
        return slice(step * self.batch_size, (step + 1) * self.batch_size)


def steps_per_epoch(run: Run, data: Dataset) -> int:
    """Number of batches of an epoch; the last one is never dropped."""
    return -(-len(data.train_labels) // run.recipe.batch_size)


def plan_epoch(run: Run, data: Dataset, network: Network, epoch: int) -> EpochPlan:
    """The plan of an epoch (counted from 0).

    Order, augmentation and dropout masks are drawn first; where the library source varies by ``order``, the samples
    inside each batch are permuted last, masks and all: the same mathematics, another order of sums.
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
    rows, columns, flips = streams.crops_and_flips(run, epoch, data.full_train_size)
    samples = data.train_samples[examples]
    height, width, _ = data.image_shape
    pad = 2 * (run.recipe.crop or 0)
    corners = (examples * (height + pad) + rows[samples]) * (width + pad) + columns[samples]
    return EpochPlan(
        examples=examples,
        corners=corners,
        flips=flips[samples],
        rates=learning_rates(run.recipe, epoch, steps),
        masks=masks,
        batch_size=size,
    )


def pixel_grids(image_shape: tuple[int, int, int], crop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets from a crop's corner to its pixels in the flattened padded set, plain and mirrored: (height, width)."""
    height, width, _ = image_shape
    rows = np.arange(height, dtype=np.int64)[:, None] * (width + 2 * crop)
    columns = np.arange(width, dtype=np.int64)
    return rows + columns, rows + columns[::-1]


def padded_pixels(data: Dataset, crop: int) -> NDArray[np.generic]:
    """The training images with ``crop`` zeros on each side, (N (height + 2 crop) (width + 2 crop), channels)."""
    pad = ((0, 0), (crop, crop), (crop, crop), (0, 0))
    return np.pad(data.train_images, pad).reshape(-1, data.image_shape[2])
