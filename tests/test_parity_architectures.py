"""Every architecture in both trainers: three steps in float64, under both schedules, equal to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocols.contract import Dataset
from protocols.errors import UserError
from tests.runs import make_run
from tests.small_data import text
from tests.test_parity import CONSTANT, WARMUP, agrees, both, differences
from trainers import ARCHITECTURES
from trainers.network import trace
from trainers.resolve import architecture

STEPS, BATCH = 3, 8


def noise(size: int, channels: int) -> Dataset:
    """Random images in ten classes, three batches of them."""
    rng = np.random.default_rng(size)
    images = rng.integers(0, 256, (STEPS * BATCH, size, size, channels), dtype=np.uint8)
    labels = rng.integers(0, 10, STEPS * BATCH)
    return Dataset(
        name="noise",
        fingerprint="noise",
        classes=10,
        train_images=images,
        train_labels=labels,
        test_images=images[:BATCH],
        test_labels=labels[:BATCH],
        shift=np.full(channels, 127.5),
        scale=np.full(channels, 1 / 74),
        train_samples=np.arange(len(labels)),
        full_train_size=len(labels),
    )


DATA = [noise(8, 1), noise(32, 3), text(classes=10, length=5, train=STEPS * BATCH, test=4)]


def smallest(name: str) -> Dataset:
    """The first of the data that an architecture fits."""
    for data in DATA:
        try:
            trace(architecture(name), data.image_shape, data.classes, make_run().recipe)
        except UserError:
            continue
        return data
    raise AssertionError(f"{name} fits nothing")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_three_steps(name: str) -> None:
    data = smallest(name)
    for schedule in (WARMUP, CONSTANT):
        fields: dict[str, Any] = {**schedule, "architecture": name, "batch_size": BATCH, "dtype": "float64"}
        torch_state, tensorflow_state = both(data, STEPS, crop=0 if data.is_text else 1, **fields)
        difference = differences(tensorflow_state, torch_state)
        # Relative: after three steps the running statistics are still those of the start, so that logits can be huge.
        difference["logits"] = difference["logits_sd"]
        assert agrees(difference), (schedule["schedule"], difference)
