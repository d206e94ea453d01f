"""ResNets: those of Summers & Dinneen (ICML 2021) for small images, and the standard ones for ImageNet.

For small images: a 3x3 stem without pooling, basic blocks (He et al. 2016), global average pooling. Where the shape
changes, the papers' shortcut is a subsampling, a batch normalisation and zero-padded channels; it has no convolution.
ResNet-50 and the ImageNet networks have the standard shortcut, a strided 1x1 convolution and a batch normalisation.
Bottlenecks halve the image in their 3x3 convolution ("v1.5"), not in their first 1x1. The last scale of each block
starts at 0 (``recipe.zero_gamma``); the shortcut's scale trains at the full rate.

Parameters for 3x32x32 and 10 classes: resnet6 9,978; resnet10 42,682; resnet14 172,602, at widths of 1/8 to 8 2,936,
11,190, 43,682, 686,186, 2,736,330 and 10,928,522; resnet18 11,001,034; resnet50 23,520,842. For 3x224x224 and 1000
classes: imagenet_resnet18 11,689,512; imagenet_resnet34 21,797,672; imagenet_resnet50 25,557,032.
"""

from __future__ import annotations

import functools
from typing import Any

from protocols.errors import UserError
from trainers.operations import Operations

_IMAGENET_WIDTHS = (64, 128, 256, 512)


def resnet6(net: Operations, x: Any, classes: int) -> Any:
    """One stage of two blocks, 16 channels."""
    return resnet(net, x, classes, blocks=(2,), widths=(16,))


def resnet10(net: Operations, x: Any, classes: int) -> Any:
    """Two stages of two blocks, 16 and 32 channels."""
    return resnet(net, x, classes, blocks=(2, 2), widths=(16, 32))


def resnet14(net: Operations, x: Any, classes: int, *, width: int = 16) -> Any:
    """Three stages of two blocks, 16, 32 and 64 channels unless the first has another ``width``."""
    return resnet(net, x, classes, blocks=(2, 2, 2), widths=(width, 2 * width, 4 * width))


resnet14x1_8 = functools.partial(resnet14, width=2)
resnet14x1_4 = functools.partial(resnet14, width=4)
resnet14x1_2 = functools.partial(resnet14, width=8)
resnet14x2 = functools.partial(resnet14, width=32)
resnet14x4 = functools.partial(resnet14, width=64)
resnet14x8 = functools.partial(resnet14, width=128)


def resnet18(net: Operations, x: Any, classes: int) -> Any:
    """Four stages of two blocks, 64 to 512 channels, for small images."""
    return resnet(net, x, classes, blocks=(2, 2, 2, 2), widths=_IMAGENET_WIDTHS)


def resnet34(net: Operations, x: Any, classes: int) -> Any:
    """Four stages of 3, 4, 6 and 3 blocks, 64 to 512 channels, for small images."""
    return resnet(net, x, classes, blocks=(3, 4, 6, 3), widths=_IMAGENET_WIDTHS)


def resnet50(net: Operations, x: Any, classes: int) -> Any:
    """Four stages of 3, 4, 6 and 3 bottlenecks, 64 to 512 channels wide, for small images; standard shortcuts."""
    return resnet(net, x, classes, blocks=(3, 4, 6, 3), widths=_IMAGENET_WIDTHS, standard=True, bottleneck=True)


def imagenet_resnet18(net: Operations, x: Any, classes: int) -> Any:
    """The standard ResNet-18."""
    return _stages(net, _imagenet_stem(net, x), classes, (2, 2, 2, 2), _IMAGENET_WIDTHS, standard=True)


def imagenet_resnet34(net: Operations, x: Any, classes: int) -> Any:
    """The standard ResNet-34."""
    return _stages(net, _imagenet_stem(net, x), classes, (3, 4, 6, 3), _IMAGENET_WIDTHS, standard=True)


def imagenet_resnet50(net: Operations, x: Any, classes: int) -> Any:
    """The standard ResNet-50."""
    stem = _imagenet_stem(net, x)
    return _stages(net, stem, classes, (3, 4, 6, 3), _IMAGENET_WIDTHS, standard=True, bottleneck=True)


def resnet(
    net: Operations,
    x: Any,
    classes: int,
    *,
    blocks: tuple[int, ...],
    widths: tuple[int, ...],
    standard: bool = False,
    bottleneck: bool = False,
) -> Any:
    """A ResNet for small images, with ``blocks[i]`` blocks of ``widths[i]`` channels in stage i.

    All stages but the first halve the image.

    Args:
        net: the operations.
        x: images.
        classes: number of logits.
        blocks: of each stage.
        widths: of each stage; bottlenecks end in four times as many channels.
        standard: shortcuts are convolutions.
        bottleneck: blocks are bottlenecks.
    """
    x = net.relu(net.batch_norm(net.conv(x, "stem.conv", widths[0], 3), "stem.bn"))
    return _stages(net, net.observe(x, "stem"), classes, blocks, widths, standard=standard, bottleneck=bottleneck)


def _imagenet_stem(net: Operations, x: Any) -> Any:
    if min(net.size(x)) < 32:
        raise UserError("the network halves the image five times, so it takes images of at least 32x32")
    x = net.relu(net.batch_norm(net.conv(x, "stem.conv", 64, 7, stride=2), "stem.bn"))
    return net.observe(net.max_pool(x, 3, stride=2, padding=1), "stem")


def _stages(
    net: Operations,
    x: Any,
    classes: int,
    blocks: tuple[int, ...],
    widths: tuple[int, ...],
    *,
    standard: bool = False,
    bottleneck: bool = False,
) -> Any:
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
        for block in range(1, count + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            # (kernel, channels, stride) of the block's convolutions
            layers = [(3, width, stride), (3, width, 1)]
            if bottleneck:
                layers = [(1, width, 1), (3, width, stride), (1, 4 * width, 1)]
            x = _block(net, x, f"stage{stage}.block{block}", layers, standard)
        x = net.observe(x, f"stage{stage}")
    x = net.observe(net.global_average_pool(x), "features")
    return net.observe(net.linear(x, "head", classes), "head")


def _block(net: Operations, x: Any, name: str, layers: list[tuple[int, int, int]], standard: bool) -> Any:
    y, last = x, len(layers)
    for index, (kernel, channels, stride) in enumerate(layers, start=1):
        y = net.conv(y, f"{name}.conv{index}", channels, kernel, stride=stride)
        y = net.batch_norm(y, f"{name}.bn{index}", last_in_block=index == last)
        if index < last:
            y = net.relu(y)
    stride = max(stride for _, _, stride in layers)
    if stride > 1 or net.channels(x) != channels:
        x = _shortcut(net, x, f"{name}.shortcut", channels, stride, standard)
    return net.relu(net.add(x, y))


def _shortcut(net: Operations, x: Any, name: str, channels: int, stride: int, standard: bool) -> Any:
    if standard:
        return net.batch_norm(net.conv(x, f"{name}.conv", channels, 1, stride=stride), f"{name}.bn", full_rate=True)
    x = net.batch_norm(net.subsample(x, stride), f"{name}.bn", full_rate=True)
    return net.pad_channels(x, channels)
