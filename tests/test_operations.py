"""Each operation: the same numbers and gradients in both frameworks, and those of PyTorch's own modules."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from numpy.typing import NDArray

from protocols.recipe import Recipe
from trainers.network import Shape, Tokens, Tracer
from trainers.tensorflow import train as tensorflow_train
from trainers.tensorflow.operations import TensorFlowOperations
from trainers.torch.operations import TorchOperations

BATCH = 3
IMAGES, SEQUENCES, VECTORS = (4, 7, 6), (5, 9), (6,)
TOKENS = Tokens(length=9, kinds=11)

OPERATIONS: dict[str, tuple[Shape, Callable[[Any, Any], Any]]] = {
    "conv": (IMAGES, lambda net, x: net.conv(x, "c", 6, 3)),
    "conv with bias": (IMAGES, lambda net, x: net.conv(x, "c", 6, 3, bias=True, law="default")),
    "conv of stride 2": (IMAGES, lambda net, x: net.conv(x, "c", 6, 3, stride=2)),
    "conv of kernel 5, stride 2": (IMAGES, lambda net, x: net.conv(x, "c", 6, 5, stride=2)),
    "conv without padding": (IMAGES, lambda net, x: net.conv(x, "c", 6, 3, padding=0)),
    "conv of 1x1, stride 2": (IMAGES, lambda net, x: net.conv(x, "c", 6, 1, stride=2)),
    "conv of an even kernel": (IMAGES, lambda net, x: net.conv(x, "c", 6, 2)),
    "conv in groups": (IMAGES, lambda net, x: net.conv(x, "c", 6, 3, groups=2, bias=True)),
    "conv in groups, stride 2": (IMAGES, lambda net, x: net.conv(x, "c", 6, 3, groups=2, stride=2)),
    "conv of each channel": (IMAGES, lambda net, x: net.conv(x, "c", 4, 3, groups=4)),
    "conv of each channel, stride 2": (IMAGES, lambda net, x: net.conv(x, "c", 4, 3, groups=4, stride=2)),
    "two from each channel": (IMAGES, lambda net, x: net.conv(x, "c", 8, 3, groups=4)),
    "batch_norm": (IMAGES, lambda net, x: net.batch_norm(x, "b")),
    "relu": (IMAGES, lambda net, x: net.relu(x)),
    "dropout of images": (IMAGES, lambda net, x: net.dropout(x, "d", 0.4)),
    "dropout of sequences": (SEQUENCES, lambda net, x: net.dropout(x, "d", 0.4)),
    "dropout of vectors": (VECTORS, lambda net, x: net.dropout(x, "d", 0.4)),
    "linear": (VECTORS, lambda net, x: net.linear(x, "l", 4)),
    "linear on sequences": (SEQUENCES, lambda net, x: net.linear(x, "l", 4)),
    "max_pool": (IMAGES, lambda net, x: net.max_pool(x, 2)),
    "max_pool of overlapping windows": (IMAGES, lambda net, x: net.max_pool(x, 3, stride=2, padding=1)),
    "global_average_pool": (IMAGES, lambda net, x: net.global_average_pool(x)),
    "flatten": (IMAGES, lambda net, x: net.linear(net.flatten(x), "l", 4)),
    "subsample": (IMAGES, lambda net, x: net.subsample(x, 2)),
    "pad_channels": (IMAGES, lambda net, x: net.pad_channels(x, 7)),
    "split and concat": (IMAGES, lambda net, x: net.concat(*reversed(net.split(x)))),
    "channel_shuffle": (IMAGES, lambda net, x: net.channel_shuffle(x, 2)),
    "add": (IMAGES, lambda net, x: net.add(x, net.relu(x))),
    "embedding": (TOKENS, lambda net, x: net.embedding(x, "e", 11, 4)),
    "lstm": (SEQUENCES, lambda net, x: net.lstm(x, "r", 4)),
    "qrnn": (SEQUENCES, lambda net, x: net.qrnn(x, "q", 4)),
    "qrnn of a wide window": (SEQUENCES, lambda net, x: net.qrnn(x, "q", 4, window=3)),
    "observe": (IMAGES, lambda net, x: net.observe(x, "o")),
}

Values = dict[str, NDArray[Any]]


class Case:
    """One operation with drawn inputs, weights and masks; a weighted sum of its output has gradients to compare."""

    def __init__(self, shape: Shape, operation: Callable[[Any, Any], Any], name: str) -> None:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.operation = operation
        tracer = Tracer(Recipe())
        ending = operation(tracer, shape)
        self.parameters = tracer.parameters
        self.weights = {key: rng.normal(size=parameter.shape) for key, parameter in tracer.parameters.items()}
        self.masks = {key: rng.random((BATCH, *size)) > rate for key, (size, rate) in tracer.dropouts.items()}
        if isinstance(shape, Tokens):
            self.x = rng.integers(0, shape.kinds, (BATCH, shape.length)).astype(np.int32)
        else:
            self.x = rng.normal(size=_batch(shape))
        self.cotangent = rng.normal(size=_batch(ending))

    def torch(self) -> tuple[NDArray[Any], Values, Values]:
        """Output, statistics and gradients."""
        tensors = {key: torch.tensor(value) for key, value in self.weights.items()}
        x = torch.tensor(self.x)
        sources = {key: tensors[key] for key, parameter in self.parameters.items() if parameter.trainable}
        if x.is_floating_point():
            sources["x"] = x
        for tensor in sources.values():
            tensor.requires_grad_()
        statistics: dict[str, torch.Tensor] = {}
        masks = {key: torch.tensor(mask) for key, mask in self.masks.items()}
        y = self.operation(TorchOperations(tensors, masks, statistics=statistics), x)
        gradients = torch.autograd.grad((y * torch.tensor(self.cotangent)).sum(), list(sources.values()))
        return (
            y.detach().numpy(),
            {key: value.numpy() for key, value in statistics.items()},
            {key: value.numpy() for key, value in zip(sources, gradients, strict=True)},
        )

    def tensorflow(self) -> tuple[NDArray[Any], Values, Values]:
        """Likewise, inside a graph whose batch size is open, and in the canonical layout."""
        tensorflow_train.hold("held", 1, "cpu")
        variables = {key: tf.Variable(_inner(value, (2, 3, 1, 0))) for key, value in self.weights.items()}
        x, cotangent = (_inner(value, (0, 2, 3, 1)) for value in (self.x, self.cotangent))
        sources = [key for key, parameter in self.parameters.items() if parameter.trainable]

        def call(x: Any, cotangent: Any, masks: Any) -> Any:
            statistics: dict[str, Any] = {}
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = self.operation(TensorFlowOperations(variables, masks, statistics=statistics), x)
                total = tf.reduce_sum(y * cotangent)
            wanted = {key: variables[key] for key in sources} | ({"x": x} if x.dtype.is_floating else {})
            return y, statistics, tape.gradient(total, wanted)

        signature = [tf.TensorSpec((None, *value.shape[1:]), value.dtype) for value in (x, cotangent)]
        masks = {key: tf.TensorSpec((None, *mask.shape[1:]), tf.bool) for key, mask in self.masks.items()}
        function = tf.function(call, input_signature=[*signature, masks], autograph=False)
        y, statistics, gradients = tf.nest.map_structure(
            lambda value: value.numpy(), function(x, cotangent, self.masks)
        )
        gradients = {
            key: _inner(value, (0, 3, 1, 2) if key == "x" else (3, 2, 0, 1)) for key, value in gradients.items()
        }
        return _inner(y, (0, 3, 1, 2)), statistics, gradients


def _batch(shape: Any) -> tuple[int, ...]:
    """The run-time shape of a batch, channels first: sequences have their features last."""
    return (BATCH, *(reversed(shape) if len(shape) == 2 else shape))


def _inner(value: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
    return value.transpose(axes) if value.ndim == 4 else value


@pytest.mark.parametrize("name", OPERATIONS)
def test_both_frameworks_agree_in_float64(name: str) -> None:
    case = Case(*OPERATIONS[name], name)
    one, other = case.torch(), case.tensorflow()
    assert one[0].shape == other[0].shape == case.cotangent.shape
    np.testing.assert_allclose(other[0], one[0], rtol=1e-12, atol=1e-13)
    for mine, yours in zip(one[1:], other[1:], strict=True):
        assert set(mine) == set(yours)
        for key in mine:
            np.testing.assert_allclose(yours[key], mine[key], rtol=1e-12, atol=1e-13, err_msg=key)
    assert all(np.abs(gradient).max() > 0 for gradient in one[2].values())


def test_every_operation_is_compared() -> None:
    """And only operations that the tracer knows are called."""
    called: set[str] = set()

    class Recorder(Tracer):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_"):
                called.add(name)
            return super().__getattribute__(name)

    for shape, operation in OPERATIONS.values():
        operation(Recorder(Recipe()), shape)
    offered = {name for name in vars(TorchOperations) if not name.startswith("_")}
    assert offered - called == {"channels", "size"}
    assert offered == {name for name in vars(TensorFlowOperations) if not name.startswith("_")}


def _torch(name: str) -> tuple[Case, NDArray[Any]]:
    case = Case(*OPERATIONS[name], name)
    return case, case.torch()[0]


def _equal(module: Any, x: Any, ours: NDArray[Any]) -> None:
    with torch.no_grad():
        y = module(torch.tensor(x))
    y = y[0] if isinstance(y, tuple) else y
    np.testing.assert_allclose(ours, y.numpy(), rtol=1e-12, atol=1e-13)


def _filled(module: torch.nn.Module, **weights: NDArray[Any]) -> torch.nn.Module:
    module.double().load_state_dict({key: torch.tensor(value) for key, value in weights.items()})
    return module


def test_lstm_is_pytorchs() -> None:
    case, ours = _torch("lstm")
    module = _filled(
        torch.nn.LSTM(5, 4, batch_first=True),
        weight_ih_l0=case.weights["r.weight"],
        weight_hh_l0=case.weights["r.recurrent"],
        bias_ih_l0=case.weights["r.bias"],
        bias_hh_l0=np.zeros(16),
    )
    _equal(module, case.x, ours)


def test_pooling_convolution_in_groups_and_shuffle_are_pytorchs() -> None:
    for name, module in (
        ("max_pool", torch.nn.MaxPool2d(2)),
        ("max_pool of overlapping windows", torch.nn.MaxPool2d(3, 2, 1)),
        ("channel_shuffle", torch.nn.ChannelShuffle(2)),
    ):
        case, ours = _torch(name)
        _equal(module, case.x, ours)
    case, ours = _torch("conv in groups")
    grouped = torch.nn.Conv2d(4, 6, 3, padding=1, groups=2)
    _equal(_filled(grouped, weight=case.weights["c.weight"], bias=case.weights["c.bias"]), case.x, ours)


def test_qrnn_by_its_definition() -> None:
    """Bradbury et al. 2017, equations 1 to 5, position by position; nothing later in a sequence is looked at."""
    case, ours = _torch("qrnn of a wide window")
    weight = case.weights["q.weight"].reshape(3, 4, 3, 5)  # gate, unit, position in the window, feature
    bias = case.weights["q.bias"].reshape(3, 4)
    cell = np.zeros((BATCH, 4))
    for time in range(9):
        window = np.stack(
            [case.x[:, t] if t >= 0 else np.zeros((BATCH, 5)) for t in (time - 2, time - 1, time)], axis=1
        )
        candidate, forget, leave = np.einsum("guwf,bwf->gbu", weight, window) + bias[:, None]
        keep = 1 / (1 + np.exp(-forget))
        cell = keep * cell + (1 - keep) * np.tanh(candidate)
        np.testing.assert_allclose(ours[:, time], cell / (1 + np.exp(-leave)), rtol=1e-10)


def test_dropout_on_a_sequence_is_the_same_at_every_position() -> None:
    case, y = _torch("dropout of sequences")
    silent = y == 0
    assert (silent == silent[:, :1]).all() and 0 < silent.mean() < 1
    np.testing.assert_allclose(y[~silent], (case.x / 0.6)[~silent], rtol=1e-15)


def test_a_pass_that_collects_statistics_normalises_by_them_and_updates_nothing() -> None:
    case = Case(*OPERATIONS["batch_norm"], "batch_norm")
    for y, statistics, _ in (case.torch(), case.tensorflow()):
        assert set(statistics) == {"b.mean", "b.var"}
        np.testing.assert_allclose(statistics["b.mean"], case.x.mean(axis=(0, 2, 3)), rtol=1e-12)
        np.testing.assert_allclose(statistics["b.var"], case.x.var(axis=(0, 2, 3)) * 126 / 125, rtol=1e-12)
        np.testing.assert_allclose(y.mean(axis=(0, 2, 3)), case.weights["b.bias"], rtol=1e-12)
    tensors = {key: torch.tensor(np.abs(value)) for key, value in case.weights.items()}
    before = {key: value.clone() for key, value in tensors.items()}
    TorchOperations(tensors, {}, statistics={}).batch_norm(torch.tensor(case.x), "b")
    assert all(torch.equal(tensors[key], value) for key, value in before.items())


def test_a_pass_that_collects_none_normalises_by_the_running_ones() -> None:
    tensorflow_train.hold("held", 1, "cpu")
    case = Case(*OPERATIONS["batch_norm"], "batch_norm")
    weights = {key: np.abs(value) for key, value in case.weights.items()}
    scale, offset, mean, variance = (weights[f"b.{part}"][:, None, None] for part in ("weight", "bias", "mean", "var"))
    expected = (case.x - mean) / np.sqrt(variance + 1e-5) * scale + offset
    net = TorchOperations({key: torch.tensor(value) for key, value in weights.items()}, None)
    np.testing.assert_allclose(net.batch_norm(torch.tensor(case.x), "b").numpy(), expected, rtol=1e-9)
    other = TensorFlowOperations({key: tf.constant(value) for key, value in weights.items()}, None)
    y = other.batch_norm(tf.constant(_inner(case.x, (0, 2, 3, 1))), "b").numpy()
    np.testing.assert_allclose(_inner(y, (0, 3, 1, 2)), expected, rtol=1e-9)


@pytest.mark.parametrize("masks", [None, {}], ids=["evaluation", "training"])
def test_observed_activations_are_the_ones_that_go_on(masks: Any) -> None:
    tensorflow_train.hold("held", 1, "cpu")
    observed: dict[str, Any] = {}
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = TorchOperations({}, masks, observed=observed).observe(x, "here")
    assert y is x and torch.equal(observed["here"], x) and not observed["here"].requires_grad
    observed.clear()
    z = tf.constant(x.detach().numpy())
    assert TensorFlowOperations({}, masks, observed=observed).observe(z, "there") is z
    assert (observed["there"].numpy() == z.numpy()).all()
