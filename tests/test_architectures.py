"""Architectures against published parameter counts, and against the framework's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protocols.errors import UserError
from protocols.recipe import Recipe
from tests.runs import make_run
from trainers.architectures.dropnet import dropnet
from trainers.architectures.resnet import resnet, resnet6, resnet10, resnet14
from trainers.initial import initial_weights
from trainers.network import Architecture, trace
from trainers.torch.operations import TorchOperations

CIFAR = (32, 32, 3)


@pytest.mark.parametrize(
    ("architecture", "published"), [(resnet6, 9_978), (resnet10, 42_682), (resnet14, 172_602), (dropnet, 24_346)]
)
def test_parameter_counts(architecture: Architecture, published: int) -> None:
    assert trace(architecture, CIFAR, 10, Recipe()).count == published


@pytest.mark.parametrize(
    ("width", "published"),
    [(1 / 8, 2_936), (1 / 4, 11_190), (1 / 2, 43_682), (2, 686_186), (4, 2_736_330), (8, 10_928_522)],
)
def test_published_counts_of_other_widths(width: float, published: int) -> None:
    widths = tuple(int(channels * width) for channels in (16, 32, 64))

    def scaled(net: object, x: object, classes: int) -> object:
        return resnet(net, x, classes, blocks=(2, 2, 2), widths=widths)  # type: ignore[arg-type]

    assert trace(scaled, CIFAR, 10, Recipe()).count == published


def test_rate_groups_and_last_scales() -> None:
    parameters = {parameter.name: parameter for parameter in trace(resnet14, CIFAR, 10, Recipe()).parameters}
    slow = {name for name, parameter in parameters.items() if parameter.slow}
    full = {name for name, parameter in parameters.items() if parameter.trainable and not parameter.slow}
    assert "head.bias" in slow and "stem.bn.weight" in slow and "stage2.block1.shortcut.bn.bias" in slow
    assert "stage2.block1.shortcut.bn.weight" in full, "shortcut scales train at the full rate"
    assert all(".conv" in name or name in ("head.weight",) or "shortcut" in name for name in full)
    zero = {name for name, parameter in parameters.items() if name.endswith(".weight") and parameter.scale == 0}
    assert zero == {f"stage{stage}.block{block}.bn2.weight" for stage in (1, 2, 3) for block in (1, 2)}
    unit = trace(resnet14, CIFAR, 10, Recipe(zero_gamma=False))
    assert all(parameter.scale for parameter in unit.parameters if parameter.name.endswith(".weight"))


def test_initial_laws_match_pytorch() -> None:
    """Spreads against the ones PyTorch's own initialisers produce for the same shapes."""
    network = trace(resnet14, CIFAR, 10, Recipe())
    weights = initial_weights(make_run(architecture="resnet14"), network)
    convolution = torch.empty(64, 64, 3, 3)
    torch.nn.init.kaiming_normal_(convolution, mode="fan_out", nonlinearity="relu")
    assert weights["stage3.block2.conv2.weight"].std() == pytest.approx(float(convolution.std()), rel=0.02)
    head = torch.nn.Linear(64, 10)
    bound = float(head.weight.detach().abs().max())
    assert abs(weights["head.weight"]).max() == pytest.approx(bound, rel=0.05)
    assert abs(weights["head.bias"]).max() <= 1 / 8


@pytest.mark.parametrize("size", [8, 28, 32, 9])
def test_traced_shapes_are_the_real_ones(size: int) -> None:
    """The tracer's image sizes, odd ones included, against what PyTorch computes."""
    shape = (size, size, 3)
    network = trace(resnet14, shape, 10, Recipe())
    tensors = {
        name: torch.from_numpy(value)
        for name, value in initial_weights(make_run(architecture="resnet14"), network).items()
    }
    sizes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    class Both(TorchOperations):
        def subsample(self, x: torch.Tensor, stride: int) -> torch.Tensor:
            y = super().subsample(x, stride)
            sizes.append((tuple(x.shape[1:]), tuple(y.shape[1:])))
            return y

    logits = resnet14(Both(tensors, {}), torch.zeros(2, 3, size, size), 10)
    assert logits.shape == (2, 10)
    assert [small[1] for _, small in sizes] == [-(-size // 2), -(-size // 4)]


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
    "image to linear": (lambda net, x: net.linear(x, "l", 4), "linear 'l' takes vectors, not images"),
    "no such operation": (lambda net, x: net.max_pool(x), r"AttributeError at test_architectures.py:\d+"),
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
