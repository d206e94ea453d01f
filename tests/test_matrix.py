"""The rows, the columns and a seeded sample of the inside of the table of everything: see tests/matrix.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from orchestrator import catalog
from orchestrator.plan import expand
from protocols.digest import digest
from protocols.errors import UserError
from protocols.run import Run
from tests.matrix import (
    DATASETS,
    SMALLEST,
    SOURCES,
    TRAINERS,
    Combination,
    architectures,
    attempt,
    data,
    everything,
    protocol,
    sample,
)
from tests.runs import MemoryContext
from trainers.asynchrony import simulate

NETWORK = {True: "qrnn", False: "resnet6"}
"""One network for text and one for images."""
ALONE = [Combination("dropnet", "digits", trainer, source) for trainer in TRAINERS for source in SOURCES] + [
    Combination(NETWORK[dataset in ("ptb", "tests.real_data:book")], dataset, trainer)
    for trainer in TRAINERS
    for dataset in DATASETS
]
SAMPLE = sample(set(everything()) - set(ALONE), 0.02)


def check(combination: Combination) -> None:
    result = attempt(combination)
    if result.startswith("no data"):
        pytest.skip(result)
    assert result == "ok" or result.startswith("senseless: ")


def bits(run: Run, log: np.ndarray | None = None) -> tuple[str, bytes]:
    """Final weights and losses of one training."""
    context = MemoryContext()
    context.log = log
    outcome = catalog.train(run.trainer)(run, data(run.dataset), context)
    return digest(outcome.weights), outcome.losses.tobytes()


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("architecture", architectures())
def test_every_architecture_takes_three_steps_and_the_same_ones_again(architecture: str, trainer: str) -> None:
    """On the smallest data that it fits; its control is held, and so is asynchronous training that follows a log."""
    for dataset in SMALLEST:
        combination = Combination(architecture, dataset, trainer)
        result = attempt(combination)
        if not result.startswith("senseless"):
            break
    if result.startswith("no data"):
        pytest.skip(result)
    assert result == "ok"
    control = expand(protocol(combination))[0].run
    assert not control.varies
    assert bits(control) == bits(control)
    workers = dataclasses.replace(control.recipe, async_workers=2)
    raced = dataclasses.replace(control, varies=("async",), asynchrony="simulated", recipe=workers)
    log = simulate(np.array([1.0, 0.3, 0.3]), 2).log()
    assert bits(raced, log) == bits(raced, log) != bits(control)


@pytest.mark.parametrize("combination", ALONE, ids=str)
def test_every_source_and_every_dataset_takes_three_steps_in_either_trainer(combination: Combination) -> None:
    result = attempt(combination)
    if result.startswith("no data"):
        pytest.skip(result)
    assert result == "ok"


@pytest.mark.parametrize("combination", sorted(SAMPLE), ids=str)
def test_a_sample_of_everything_else(combination: Combination) -> None:
    check(combination)


SENSELESS = {
    "text to images": (Combination("resnet6", "tests.real_data:book", "torch"), "takes images"),
    "images to text": (Combination("lstm", "digits", "torch"), "token"),
    "too small": (Combination("imagenet_resnet50", "digits", "torch"), "does not fit images of 8x8x1"),
    "nothing drops": (Combination("resnet6", "digits", "torch", "dropout"), "nothing there uses it"),
    "nothing moves": (Combination("lstm", "tests.real_data:book", "torch", "augment"), "nothing there uses it"),
}


@pytest.mark.parametrize("what", SENSELESS)
def test_a_senseless_combination_is_one_clear_line(what: str) -> None:
    combination, words = SENSELESS[what]
    with pytest.raises(UserError, match=words) as raised:
        expand(protocol(combination))
    assert "\n" not in str(raised.value)
