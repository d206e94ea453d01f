"""A small convolutional network with dropout, for quick studies in which every source has something to vary."""

from __future__ import annotations

from typing import Any

from trainers.operations import Operations


def dropnet(net: Operations, x: Any, classes: int) -> Any:
    """Three 3x3 convolutions of 16, 32 and 64 channels with batch norm, dropout of .25 before the head."""
    for index, (width, stride) in enumerate(((16, 1), (32, 2), (64, 2)), start=1):
        x = net.conv(x, f"conv{index}", width, 3, stride=stride)
        x = net.observe(net.relu(net.batch_norm(x, f"bn{index}")), f"conv{index}")
    x = net.dropout(net.observe(net.global_average_pool(x), "features"), "dropout", 0.25)
    return net.observe(net.linear(x, "head", classes), "head")
