"""ShuffleNetV2 (Ma et al., ECCV 2018) for small images: a stem of stride 1 without pooling.

Parameters for 3 channels and 10 classes: shufflenet05 352,042; shufflenet1 1,263,854.
"""

from __future__ import annotations

from typing import Any

from trainers.operations import Operations


def shufflenet05(net: Operations, x: Any, classes: int) -> Any:
    """At half the width: 48, 96 and 192 channels."""
    return _shufflenet(net, x, classes, (48, 96, 192))


def shufflenet1(net: Operations, x: Any, classes: int) -> Any:
    """At full width: 116, 232 and 464 channels."""
    return _shufflenet(net, x, classes, (116, 232, 464))


def _shufflenet(net: Operations, x: Any, classes: int, widths: tuple[int, int, int]) -> Any:
    x = net.observe(_conv(net, x, "stem", 24, 3), "stem")
    for stage, (width, blocks) in enumerate(zip(widths, (4, 8, 4), strict=True), start=1):
        for block in range(1, blocks + 1):
            x = _unit(net, x, f"stage{stage}.block{block}", width // 2, down=block == 1)
        x = net.observe(x, f"stage{stage}")
    x = net.global_average_pool(_conv(net, x, "last", 1024, 1))
    return net.observe(net.linear(net.observe(x, "features"), "head", classes), "head")


def _unit(net: Operations, x: Any, name: str, width: int, down: bool) -> Any:
    """Half of the channels pass by, or through a branch of their own where the image is halved; then a shuffle."""
    if down:
        aside = _depthwise(net, x, f"{name}.aside.depth", stride=2)
        aside = _conv(net, aside, f"{name}.aside.point", width, 1)
    else:
        aside, x = net.split(x)
    x = _conv(net, x, f"{name}.point1", width, 1)
    x = _depthwise(net, x, f"{name}.depth", stride=2 if down else 1)
    x = _conv(net, x, f"{name}.point2", width, 1)
    return net.channel_shuffle(net.concat(aside, x), 2)


def _conv(net: Operations, x: Any, name: str, width: int, kernel: int) -> Any:
    return net.relu(net.batch_norm(net.conv(x, f"{name}.conv", width, kernel), f"{name}.bn"))


def _depthwise(net: Operations, x: Any, name: str, stride: int) -> Any:
    """A 3x3 convolution of each channel by itself."""
    channels = net.channels(x)
    x = net.conv(x, f"{name}.conv", channels, 3, stride=stride, groups=channels)
    return net.batch_norm(x, f"{name}.bn")
