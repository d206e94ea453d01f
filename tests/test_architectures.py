"""Architectures against published parameter counts, and against the framework's own modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import tensorflow as tf
import torch

from protocols.contract import Network, Parameter
from protocols.errors import UserError
from protocols.recipe import Recipe
from tests.runs import make_run
from trainers import ARCHITECTURES
from trainers.initial import initial_weights
from trainers.network import Shape, Tokens, Tracer, trace
from trainers.resolve import architecture
from trainers.tensorflow import train as tensorflow_train
from trainers.tensorflow.operations import TensorFlowOperations
from trainers.torch.operations import TorchOperations

LANGUAGE = ("lstm", "qrnn")
CIFAR = (32, 32, 3)


PUBLISHED = {
    "resnet6": 9_978,
    "resnet10": 42_682,
    "resnet14": 172_602,
    "resnet14x1_8": 2_936,
    "resnet14x1_4": 11_190,
    "resnet14x1_2": 43_682,
    "resnet14x2": 686_186,
    "resnet14x4": 2_736_330,
    "resnet14x8": 10_928_522,
    "resnet18": 11_001_034,
    "resnet50": 23_520_842,
    "vgg11": 9_231_114,
    "shufflenet05": 352_042,
    # The published 2,278,604 have a head of 1000 classes.
    "shufflenet1": 2_278_604 - 990 * (1024 + 1),
    "linear": (3072 + 1) * 10,
    "hidden": (3072 + 1) * 512 + (512 + 1) * 10,
    "hiddenconv": (3 * 25 + 1) * 64 + (64 * 16 * 16 + 1) * 10,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts(name: str) -> None:
    assert trace(architecture(name), CIFAR, 10, Recipe()).count == PUBLISHED[name]


def test_parameter_counts_on_other_data() -> None:
    assert trace(architecture("mnistnet"), (28, 28, 1), 10, Recipe()).count == 1_199_882
    for depth, published in ((18, 11_689_512), (34, 21_797_672), (50, 25_557_032)):
        assert trace(architecture(f"imagenet_resnet{depth}"), (224, 224, 3), 1000, Recipe()).count == published


def test_parameter_counts_of_language_models() -> None:
    """Embedding, gates over input and state, head."""
    words = 10_000
    lstm = words * 200 + 4 * 200 * (200 + 200 + 1) + words * (200 + 1)
    qrnn = words * 256 + 2 * 3 * 256 * (2 * 256 + 1) + words * (256 + 1)
    assert trace(architecture("lstm"), (35,), words, Recipe()).count == lstm
    assert trace(architecture("qrnn"), (35,), words, Recipe()).count == qrnn


def test_rate_groups_and_last_scales() -> None:
    parameters = {
        parameter.name: parameter for parameter in trace(architecture("resnet14"), CIFAR, 10, Recipe()).parameters
    }
    slow = {name for name, parameter in parameters.items() if parameter.slow}
    full = {name for name, parameter in parameters.items() if parameter.trainable and not parameter.slow}
    assert "head.bias" in slow and "stem.bn.weight" in slow and "stage2.block1.shortcut.bn.bias" in slow
    assert "stage2.block1.shortcut.bn.weight" in full, "shortcut scales train at the full rate"
    assert all(".conv" in name or name in ("head.weight",) or "shortcut" in name for name in full)
    zero = {name for name, parameter in parameters.items() if name.endswith(".weight") and parameter.scale == 0}
    assert zero == {f"stage{stage}.block{block}.bn2.weight" for stage in (1, 2, 3) for block in (1, 2)}
    unit = trace(architecture("resnet14"), CIFAR, 10, Recipe(zero_gamma=False))
    assert all(parameter.scale for parameter in unit.parameters if parameter.name.endswith(".weight"))


def test_initial_laws_match_pytorch() -> None:
    """Spreads against the ones PyTorch's own initialisers produce for the same shapes."""
    network = trace(architecture("resnet14"), CIFAR, 10, Recipe())
    weights = initial_weights(make_run(architecture="resnet14"), network)
    convolution = torch.empty(64, 64, 3, 3)
    torch.nn.init.kaiming_normal_(convolution, mode="fan_out", nonlinearity="relu")
    assert weights["stage3.block2.conv2.weight"].std() == pytest.approx(float(convolution.std()), rel=0.02)
    head = torch.nn.Linear(64, 10)
    bound = float(head.weight.detach().abs().max())
    assert abs(weights["head.weight"]).max() == pytest.approx(bound, rel=0.05)
    assert abs(weights["head.bias"]).max() <= 1 / 8


def test_default_laws_match_pytorch() -> None:
    """Bounds against those of PyTorch's layers: convolutions, in groups too, recurrence and embedding."""

    def uniform(parameter: Parameter, theirs: torch.Tensor) -> None:
        assert parameter.shape == tuple(theirs.shape) and parameter.law == "uniform"
        assert parameter.scale == pytest.approx(float(theirs.detach().abs().max()), rel=0.02)

    tracer = Tracer(Recipe())
    for groups in (1, 4):
        layer = torch.nn.Conv2d(16, 256, 5, groups=groups)
        tracer.conv((16, 8, 8), f"c{groups}", 256, 5, groups=groups, bias=True, law="default")
        uniform(tracer.parameters[f"c{groups}.weight"], layer.weight)
        uniform(tracer.parameters[f"c{groups}.bias"], layer.bias)
    lstm = torch.nn.LSTM(64, 128)
    tracer.lstm((64, 5), "r", 128)
    uniform(tracer.parameters["r.weight"], lstm.weight_ih_l0)
    uniform(tracer.parameters["r.bias"], lstm.bias_ih_l0)
    uniform(tracer.parameters["r.recurrent"], lstm.weight_hh_l0)
    tracer.embedding(Tokens(5, 10), "e", 1000, 64)
    embedding, theirs = tracer.parameters["e.weight"], torch.nn.Embedding(1000, 64).weight.detach()
    assert embedding.law == "normal" and embedding.scale == pytest.approx(float(theirs.std()), rel=0.02)


def test_vgg_scales_train_at_the_full_rate() -> None:
    parameters = trace(architecture("vgg11"), CIFAR, 10, Recipe()).parameters
    slow = {parameter.name for parameter in parameters if parameter.slow}
    assert slow == {parameter.name for parameter in parameters if parameter.name.endswith(".bias")}


class Both:
    """A network's operations on shapes and on arrays side by side: the tracer's shapes must be the real ones."""

    def __init__(self, tracer: Tracer, net: Any, canonical: Callable[[Any], tuple[int, ...]]) -> None:
        self._tracer = tracer
        self._net = net
        self._canonical = canonical

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            shape = getattr(self._tracer, name)(*(self._part(value, 0) for value in arguments), **options)
            array = getattr(self._net, name)(*(self._part(value, 1) for value in arguments), **options)
            if name in ("channels", "size"):
                assert shape == array
                return shape
            if name == "split":
                return tuple(self._pair(*pair) for pair in zip(shape, array, strict=True))
            return self._pair(shape, array)

        return call

    def _part(self, value: Any, index: int) -> Any:
        return value[index] if isinstance(value, Pair) else value

    def _pair(self, shape: Any, array: Any) -> Pair:
        assert shape == self._canonical(array)
        return Pair(shape, array)


class Pair(NamedTuple):
    """One activation: its shape, and two examples of it."""

    shape: Any
    array: Any


def smallest(name: str) -> tuple[tuple[int, ...], Shape]:
    """The smallest input that an architecture makes sense for, as a dataset and as the tracer say it."""
    if name in LANGUAGE:
        return (5,), Tokens(5, 10)
    return ((32, 32, 3), (3, 32, 32)) if name.startswith("imagenet") else ((8, 8, 1), (1, 8, 8))


def torch_net(network: Network, **options: Any) -> TorchOperations:
    tensors = {parameter.name: torch.zeros(parameter.shape) for parameter in network.parameters}
    return TorchOperations(
        tensors, {name: torch.ones(2, *shape) for name, (shape, _) in network.dropout.items()}, **options
    )


def tensorflow_net(network: Network, **options: Any) -> TensorFlowOperations:
    tensorflow_train.hold("held", 1, "cpu")
    shapes = {parameter.name: parameter.shape for parameter in network.parameters}
    stored = {name: (*shape[2:], *reversed(shape[:2])) if len(shape) == 4 else shape for name, shape in shapes.items()}
    masks = {name: tf.ones((2, *shape)) for name, (shape, _) in network.dropout.items()}
    return TensorFlowOperations({name: tf.zeros(shape) for name, shape in stored.items()}, masks, **options)


def channels_first(array: Any) -> tuple[int, ...]:
    """The shape of one example where images are NCHW."""
    shape = tuple(array.shape[1:])
    return tuple(reversed(shape)) if len(shape) == 2 else shape


def channels_last(array: Any) -> tuple[int, ...]:
    """Likewise, where images are NHWC."""
    shape = tuple(array.shape[1:])
    return (shape[-1], *shape[:-1])


@pytest.mark.parametrize("trainer", ["torch", "tensorflow"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_traced_shapes_are_the_real_ones(name: str, trainer: str) -> None:
    """On the smallest input, in a training pass; every batch norm and every observed layer leaves what it should."""
    function, (image_shape, shape) = architecture(name), smallest(name)
    network = trace(function, image_shape, 10, Recipe())
    statistics: dict[str, Any] = {}
    observed: dict[str, Any] = {}
    make, canonical = (torch_net, channels_first) if trainer == "torch" else (tensorflow_net, channels_last)
    net = make(network, statistics=statistics, observed=observed)
    if isinstance(shape, Tokens):
        array = torch.zeros((2, 5), dtype=torch.int32) if trainer == "torch" else tf.zeros((2, 5), tf.int32)
    else:
        array = torch.zeros((2, *shape)) if trainer == "torch" else tf.zeros((2, *shape[1:], shape[0]))
    logits = function(Both(Tracer(Recipe()), net, canonical), Pair(shape, array), 10).array
    assert tuple(logits.shape) == ((2, 5, 10) if isinstance(shape, Tokens) else (2, 10))
    assert tuple(observed) == network.layers and network.layers[-1] == "head"
    assert set(statistics) == {parameter.name for parameter in network.parameters if not parameter.trainable}
    assert all(
        tuple(statistics[parameter.name].shape) == parameter.shape
        for parameter in network.parameters
        if not parameter.trainable
    )


@pytest.mark.parametrize("size", [9, 28, 32])
@pytest.mark.parametrize("name", ["resnet14", "mnistnet", "hiddenconv", "vgg11", "shufflenet05"])
def test_traced_shapes_are_the_real_ones_at_other_sizes(name: str, size: int) -> None:
    function = architecture(name)
    net = torch_net(trace(function, (size, size, 3), 10, Recipe()))
    x = Pair((3, size, size), torch.zeros(2, 3, size, size))
    assert function(Both(Tracer(Recipe()), net, channels_first), x, 10).array.shape == (2, 10)


def test_imagenet_networks_refuse_images_that_they_would_shrink_to_nothing() -> None:
    with pytest.raises(UserError, match="does not fit images of 28x28x1: .* at least 32x32"):
        trace(architecture("imagenet_resnet18"), (28, 28, 1), 10, Recipe())


def test_an_architecture_that_does_not_fit_is_one_clear_error() -> None:
    def no_head(net: object, x: object, classes: int) -> object:
        return net.global_average_pool(net.conv(x, "a", 4, 3))  # type: ignore[attr-defined]

    def twice(net: object, x: object, classes: int) -> object:
        return net.linear(net.flatten(net.conv(net.conv(x, "a", 4, 3), "a", 4, 3)), "b", classes)  # type: ignore[attr-defined]

    with pytest.raises(UserError, match=r"shape \(4,\), not in 10 logits"):
        trace(no_head, CIFAR, 10, Recipe())
    with pytest.raises(UserError, match=r"'a.weight' twice"):
        trace(twice, CIFAR, 10, Recipe())


MISFITS = {
    "dropout rate": (lambda net, x: net.dropout(net.flatten(x), "d", 1.5), "dropout 'd': the rate must be at least 0"),
    "stride 0": (lambda net, x: net.conv(x, "c", 4, 3, stride=0), "conv 'c': stride must be a whole number"),
    "no channels": (lambda net, x: net.conv(x, "c", 0, 3), "conv 'c': out must be a whole number"),
    "features not whole": (lambda net, x: net.linear(net.flatten(x), "l", 8.0), "linear 'l': out must be a whole"),
    "backwards": (lambda net, x: net.subsample(x, -1), "subsample: stride must be"),
    "fewer channels": (lambda net, x: net.pad_channels(x, 2), "pad_channels: there are 3 channels already"),
    "vector to conv": (lambda net, x: net.conv(net.flatten(x), "c", 4, 3), "conv 'c' takes images, not vectors"),
    "vector to norm": (lambda net, x: net.batch_norm(net.flatten(x), "b"), "batch_norm 'b' takes images"),
    "vector to pool": (lambda net, x: net.global_average_pool(net.flatten(x)), "global_average_pool takes images"),
    "image to linear": (
        lambda net, x: net.linear(x, "l", 4),
        "linear 'l' takes vectors or sequences, not images .*: flatten or pool",
    ),
    "padding below 0": (lambda net, x: net.conv(x, "c", 4, 3, padding=-1), "conv 'c': padding must be a whole number"),
    "kernel too large": (lambda net, x: net.conv(x, "c", 4, 33, padding=0), "conv 'c': a kernel of 33 does not fit"),
    "uneven groups": (lambda net, x: net.conv(x, "c", 4, 3, groups=2), "conv 'c': 3 channels in and 4 out do not"),
    "unknown law": (lambda net, x: net.conv(x, "c", 4, 3, law="defualt"), "law of conv 'c' .*did you mean 'default'"),
    "window too large": (lambda net, x: net.max_pool(x, 40), "max_pool: a kernel of 40 does not fit in 32x32"),
    "padding too large": (lambda net, x: net.max_pool(x, 3, padding=2), "more than half the kernel of 3"),
    "no halves": (lambda net, x: net.split(x)[0], "split: 3 channels have no halves"),
    "both halves": (lambda net, x: net.relu(net.split(net.pad_channels(x, 4))), "relu takes images .* not the value"),
    "unequal sizes": (lambda net, x: net.concat(x, net.subsample(x, 2)), "concat: the images have unequal sizes"),
    "uneven shuffle": (lambda net, x: net.channel_shuffle(x, 2), "channel_shuffle: 3 channels do not divide"),
    "unequal sum": (lambda net, x: net.add(x, net.flatten(x)), "adds activations of shapes"),
    "observed twice": (lambda net, x: net.observe(net.observe(x, "o"), "o"), "observes two layers as 'o'"),
    "images to embedding": (lambda net, x: net.embedding(x, "e", 10, 4), "embedding 'e' takes tokens, not images"),
    "images to lstm": (lambda net, x: net.lstm(x, "r", 4), "lstm 'r' takes sequences, not images"),
    "images to qrnn": (lambda net, x: net.qrnn(x, "r", 4), "qrnn 'r' takes sequences, not images"),
    "no such operation": (lambda net, x: net.softmax(x), r"AttributeError at test_architectures.py:\d+"),
    "its own mistake": (lambda net, x: [][0], r"IndexError at test_architectures.py:\d+"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_mistake_in_a_network_is_one_clear_error(misfit: str) -> None:
    network, words = MISFITS[misfit]

    def architecture(net: Any, x: Any, classes: int) -> Any:
        y = network(net, x)
        return net.linear(net.flatten(y) if len(y) == 3 else y, "head", classes)

    with pytest.raises(UserError, match=words) as raised:
        trace(architecture, CIFAR, 10, Recipe())
    assert "\n" not in str(raised.value)


TEXT_MISFITS = {
    "tokens to conv": (lambda net, x: net.conv(x, "c", 4, 3), "conv 'c' takes images, not tokens: embed them first"),
    "tokens to linear": (lambda net, x: net.linear(x, "l", 4), "takes vectors or sequences, not tokens: embed them"),
    "tokens to relu": (lambda net, x: net.relu(x), "relu takes images or sequences or vectors, not tokens"),
    "tokens observed": (lambda net, x: net.observe(x, "o"), "observe 'o' takes .*, not tokens"),
    "small vocabulary": (lambda net, x: net.embedding(x, "e", 9, 4), "a vocabulary of 9 is too small for 10 different"),
    "sequences to norm": (lambda net, x: net.batch_norm(net.embedding(x, "e", 10, 4), "b"), "not sequences of shape"),
    "no window": (lambda net, x: net.qrnn(net.embedding(x, "e", 10, 4), "q", 4, 0), "qrnn 'q': window must be"),
    "too few logits": (
        lambda net, x: net.embedding(x, "e", 10, 4),
        r"shape \(4, 5\), not in 10 logits at each position",
    ),
}


@pytest.mark.parametrize("misfit", TEXT_MISFITS)
def test_a_mistake_in_a_text_network_is_one_clear_error(misfit: str) -> None:
    network, words = TEXT_MISFITS[misfit]
    with pytest.raises(UserError, match=words) as raised:
        trace(lambda net, x, classes: network(net, x), (5,), 10, Recipe())
    assert "\n" not in str(raised.value)


def test_images_and_text_are_told_apart() -> None:
    with pytest.raises(UserError, match="does not fit text in windows of 5 tokens: conv 'stem.conv' takes images"):
        trace(architecture("resnet6"), (5,), 10, Recipe())
    with pytest.raises(UserError, match="does not fit images of 32x32x3: embedding 'embedding' takes tokens"):
        trace(architecture("lstm"), CIFAR, 10, Recipe())


def test_first_and_last_weight() -> None:
    """Of every architecture; where no linear layer ends it, the last convolution is the head."""
    for name in ARCHITECTURES:
        network = trace(architecture(name), smallest(name)[0], 10, Recipe())
        assert network.perturbed == network.parameters[0].name and network.head == "head.weight"

    def convolutional(net: Any, x: Any, classes: int) -> Any:
        return net.global_average_pool(net.batch_norm(net.conv(x, "last", classes, 3), "bn"))

    assert trace(convolutional, CIFAR, 10, Recipe()).head == "last.weight"
