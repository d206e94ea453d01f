"""Networks of one to four layers, with which Summers & Dinneen (ICML 2021) ask how little depth instability needs.

Without normalisation or dropout; every layer starts by PyTorch's default law. Parameters of mnistnet for 1x28x28 and
10 classes: 1,199,882.
"""

from __future__ import annotations

from typing import Any

from trainers.operations import Operations


def linear(net: Operations, x: Any, classes: int) -> Any:
    """Multinomial logistic regression."""
    return net.observe(net.linear(net.flatten(x), "head", classes), "head")


def hidden(net: Operations, x: Any, classes: int) -> Any:
    """One hidden layer of 512 units."""
    x = net.observe(net.relu(net.linear(net.flatten(x), "hidden", 512)), "hidden")
    return net.observe(net.linear(x, "head", classes), "head")


def hiddenconv(net: Operations, x: Any, classes: int) -> Any:
    """One hidden layer of 64 5x5 convolutions of stride 2."""
    x = net.relu(net.conv(x, "hidden", 64, 5, stride=2, bias=True, law="default"))
    x = net.flatten(net.observe(x, "hidden"))
    return net.observe(net.linear(x, "head", classes), "head")


def mnistnet(net: Operations, x: Any, classes: int) -> Any:
    """3x3 convolutions of 32 and 64 channels without padding, pooling by 2, 128 hidden units."""
    for index, width in enumerate((32, 64), start=1):
        x = net.conv(x, f"conv{index}", width, 3, padding=0, bias=True, law="default")
        x = net.observe(net.relu(x), f"conv{index}")
    x = net.relu(net.linear(net.flatten(net.max_pool(x, 2)), "hidden", 128))
    return net.observe(net.linear(net.observe(x, "hidden"), "head", classes), "head")
