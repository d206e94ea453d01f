"""The two trainers step by step: equal to rounding, and unequal after each mistake that is easily made.

In float64 nothing but the order of sums can differ. Each injected mistake must break the same comparison, which shows
that the comparison would catch it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from protocols.contract import Dataset, View
from protocols.run import Run
from tests.runs import make_run
from trainers.asynchrony import Schedule
from trainers.batches import plan_epoch, steps_per_epoch
from trainers.initial import initial_weights
from trainers.tensorflow import engine as tensorflow_engine
from trainers.tensorflow import operations
from trainers.tensorflow import train as tensorflow_train

STEPS = 10
WARMUP = {"schedule": "cosine", "learning_rate": 0.4, "warmup_epochs": 3.0, "epochs": 500}
CONSTANT = {"schedule": "constant", "learning_rate": 0.1, "warmup_epochs": 0.0, "epochs": 500}


class State:
    """What a few steps leave behind."""

    def __init__(self, run: Run, data: Dataset, steps: int = STEPS) -> None:
        module = importlib.import_module(f"trainers.{run.trainer}.train")
        network, self.engine = module.build(run, data, "cpu", 1)
        self.engine.load(initial_weights(run, network), None, None)
        count = steps_per_epoch(run, data)
        schedule = Schedule(run).epoch(0, count) if run.recipe.async_workers > 1 else None
        plan = plan_epoch(run, data, network, 0, schedule)
        assert plan.steps >= steps
        self.losses = self.engine.losses(self.engine.train(plan, 0, steps))
        self.weights, self.momentum = self.engine.weights(), self.engine.momentum()
        self.logits = self.engine.logits()


def differences(one: State, other: State) -> dict[str, float]:
    """The largest differences: losses relative, tensors absolute, logits in units of their SD."""
    return {
        "losses": float(np.max(np.abs(one.losses - other.losses) / np.abs(other.losses))),
        "weights": max(float(np.abs(one.weights[name] - other.weights[name]).max()) for name in one.weights),
        "momentum": max(float(np.abs(one.momentum[name] - other.momentum[name]).max()) for name in one.momentum),
        "logits": float(np.abs(one.logits - other.logits).max()),
        "logits_sd": float(np.abs(one.logits - other.logits).max() / other.logits.std()),
    }


def both(data: Dataset, steps: int = STEPS, **fields: Any) -> tuple[State, State]:
    """The same run in both trainers."""
    run = make_run("torch", **fields)
    return State(run, data, steps), State(replace(run, trainer="tensorflow"), data, steps)


def agrees(difference: dict[str, float]) -> bool:
    return difference["losses"] <= 1e-9 and all(difference[name] <= 1e-7 for name in ("weights", "momentum", "logits"))


@pytest.mark.parametrize("schedule", [WARMUP, CONSTANT], ids=["warmup", "constant"])
@pytest.mark.parametrize("zero_gamma", [True, False], ids=["zero_gamma", "unit_gamma"])
@pytest.mark.parametrize("architecture", ["resnet6", "resnet14", "dropnet"])
def test_float64(digits: Dataset, architecture: str, zero_gamma: bool, schedule: dict[str, Any]) -> None:
    torch_state, tensorflow_state = both(
        digits, architecture=architecture, zero_gamma=zero_gamma, dtype="float64", **schedule
    )
    difference = differences(tensorflow_state, torch_state)
    assert agrees(difference), difference
    assert set(torch_state.weights) == set(tensorflow_state.weights)
    moved = [name for name in torch_state.weights if name.endswith(".var")]
    assert all(np.abs(torch_state.weights[name] - 1).max() > 1e-3 for name in moved), "statistics have moved"


@pytest.mark.parametrize("architecture", ["resnet6", "resnet14"])
def test_float32_under_warmup(digits: Dataset, architecture: str) -> None:
    torch_state, tensorflow_state = both(digits, architecture=architecture, **WARMUP)
    first = np.abs(tensorflow_state.losses[:5] - torch_state.losses[:5]) / torch_state.losses[:5]
    assert first.max() <= 1e-5
    assert differences(tensorflow_state, torch_state)["logits_sd"] <= 1e-4


def test_augmentation_and_flips_agree(digits: Dataset) -> None:
    torch_state, tensorflow_state = both(digits, architecture="resnet6", dtype="float64", flip=True, crop=2, **WARMUP)
    assert agrees(differences(tensorflow_state, torch_state))
    other, _ = both(digits, architecture="resnet6", dtype="float64", flip=False, crop=2, **WARMUP)
    assert not agrees(differences(other, torch_state)), "flips reach the network"


def test_what_averages_and_what_is_stale_agrees(few_digits: Dataset) -> None:
    recipe = {"ema_decay": 0.7, "label_smoothing": 0.2, "async_workers": 3, "batch_size": 16}
    torch_state, tensorflow_state = both(few_digits, dtype="float64", **{**CONSTANT, **recipe})
    assert agrees(differences(tensorflow_state, torch_state))
    plain, _ = both(few_digits, dtype="float64", **{**CONSTANT, **recipe, "label_smoothing": 0.0})
    assert not agrees(differences(plain, torch_state)), "smoothing reaches the loss"
    one, other = torch_state.engine, tensorflow_state.engine
    averages, weights = one.averages(), torch_state.weights
    for tensors, others in (
        (averages, other.averages()),
        (one.reestimated(weights), other.reestimated(weights)),
        (dict(one.activations(20)), dict(other.activations(20))),
    ):
        assert list(tensors) == list(others) != []
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                # The order of features is each engine's own.
                np.testing.assert_allclose(tensor @ tensor.T, others[name] @ others[name].T, rtol=1e-7, atol=1e-9)
            else:
                np.testing.assert_allclose(tensor, others[name], rtol=0, atol=1e-7, err_msg=name)
    view = View(1, -2, True)
    np.testing.assert_allclose(one.logits(view, averages), other.logits(view, averages), rtol=0, atol=1e-7)


def keras_momentum(weight: Any, momentum: Any, gradient: Any, rate: Any, recipe: Any) -> None:
    momentum.assign(recipe.momentum * momentum - rate * (gradient + recipe.weight_decay * weight))
    weight.assign_add(momentum)


def decoupled_decay(weight: Any, momentum: Any, gradient: Any, rate: Any, recipe: Any) -> None:
    weight.assign_sub(rate * recipe.weight_decay * weight)
    momentum.assign(recipe.momentum * momentum + gradient)
    weight.assign_sub(rate * momentum)


def no_decay(weight: Any, momentum: Any, gradient: Any, rate: Any, recipe: Any) -> None:
    momentum.assign(recipe.momentum * momentum + gradient)
    weight.assign_sub(rate * momentum)


def same_padding(self: Any, x: Any, name: str, out: int, kernel: int, *, stride: int = 1) -> Any:
    return tf.nn.conv2d(x, self._variables[f"{name}.weight"], stride, "SAME")


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "keras momentum": lambda patch: patch.setattr(tensorflow_engine, "update", keras_momentum),
    "decoupled weight decay": lambda patch: patch.setattr(tensorflow_engine, "update", decoupled_decay),
    "no weight decay": lambda patch: patch.setattr(tensorflow_engine, "update", no_decay),
    "batch-norm eps 1e-3": lambda patch: patch.setattr(operations, "BN_EPSILON", 1e-3),
    "batch-norm momentum .99": lambda patch: patch.setattr(operations, "BN_MOMENTUM", 0.01),
    "no Bessel correction": lambda patch: patch.setattr(operations, "bessel", lambda count: 1.0),
    "SAME padding at stride 2": lambda patch: patch.setattr(operations.TensorFlowOperations, "conv", same_padding),
}


@pytest.fixture
def untraced() -> Iterator[None]:
    """No traced function from before a patch, and none that was traced under it."""
    tensorflow_train._engine.cache_clear()
    yield
    tensorflow_train._engine.cache_clear()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(digits: Dataset, monkeypatch: pytest.MonkeyPatch, untraced: None, mistake: str) -> None:
    MISTAKES[mistake](monkeypatch)
    torch_state, tensorflow_state = both(digits, architecture="resnet14", dtype="float64", **WARMUP)
    assert not agrees(differences(tensorflow_state, torch_state))


def test_a_missing_slow_group_is_caught(digits: Dataset) -> None:
    run = make_run("torch", architecture="resnet14", dtype="float64", **WARMUP)
    wrong = replace(run, trainer="tensorflow", recipe=replace(run.recipe, bias_lr_factor=1.0))
    assert not agrees(differences(State(wrong, digits), State(run, digits)))


@pytest.mark.parametrize("mistake", ["batch-norm eps 1e-3", "batch-norm momentum .99", "SAME padding at stride 2"])
def test_mistakes_in_batch_norm_and_padding_are_caught_in_float32(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch, untraced: None, mistake: str
) -> None:
    """float32 uses the fused kernel, so its settings are held against PyTorch's too."""
    MISTAKES[mistake](monkeypatch)
    torch_state, tensorflow_state = both(digits, architecture="resnet14", **WARMUP)
    assert differences(tensorflow_state, torch_state)["logits_sd"] > 1e-4


def test_fused_variance_is_unbiased(digits: Dataset) -> None:
    """The float32 kernel's running variance against NumPy's, with Bessel's correction and without."""
    tensorflow_train.hold("held", 1, "cpu")
    x = np.random.default_rng(0).normal(size=(3, 2, 2, 1)).astype(np.float32)
    one, zero = tf.ones((1,)), tf.zeros((1,))
    _, _, variance = operations._batch_normalise(tf.constant(x), one, zero)
    assert variance.numpy()[0] == pytest.approx(x.var(ddof=1), rel=1e-5)
    assert variance.numpy()[0] != pytest.approx(x.var(ddof=0), rel=1e-2)
