"""CIFAR ResNets of Summers & Dinneen (ICML 2021).

A 3x3 stem without pooling, basic blocks (He et al. 2016), global average pooling. Where the shape changes, the
shortcut is a subsampling, a batch normalisation and zero-padded channels; it has no convolution. The last scale of
each block starts at 0 (``recipe.zero_gamma``); the shortcut's scale trains at the full rate.

Parameters for 3x32x32 and 10 classes: resnet6 9,978; resnet10 42,682; resnet14 172,602.
"""

from __future__ import annotations

from typing import Any

from trainers.network import Operations


def resnet6(net: Operations, x: Any, classes: int) -> Any:
    """One stage of two blocks, 16 channels."""
    return resnet(net, x, classes, blocks=(2,), widths=(16,))


def resnet10(net: Operations, x: Any, classes: int) -> Any:
    """Two stages of two blocks, 16 and 32 channels."""
    return resnet(net, x, classes, blocks=(2, 2), widths=(16, 32))


def resnet14(net: Operations, x: Any, classes: int) -> Any:
    """Three stages of two blocks, 16, 32 and 64 channels."""
    return resnet(net, x, classes, blocks=(2, 2, 2), widths=(16, 32, 64))


def resnet(net: Operations, x: Any, classes: int, *, blocks: tuple[int, ...], widths: tuple[int, ...]) -> Any:
    """A ResNet with ``blocks[i]`` basic blocks of ``widths[i]`` channels in stage i; all stages but the first halve the
    image."""
    x = net.relu(net.batch_norm(net.conv(x, "stem.conv", widths[0], 3), "stem.bn"))
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _basic_block(net, x, f"stage{stage + 1}.block{block + 1}", width, stride)
    return net.linear(net.global_average_pool(x), "head", classes)


def _basic_block(net: Operations, x: Any, name: str, width: int, stride: int) -> Any:
    y = net.conv(x, f"{name}.conv1", width, 3, stride=stride)
    y = net.relu(net.batch_norm(y, f"{name}.bn1"))
    y = net.conv(y, f"{name}.conv2", width, 3)
    y = net.batch_norm(y, f"{name}.bn2", last_in_block=True)
    if stride > 1 or net.channels(x) != width:
        x = net.subsample(x, stride)
        x = net.batch_norm(x, f"{name}.shortcut.bn", full_rate=True)
        x = net.pad_channels(x, width)
    return net.relu(net.add(x, y))
