"""VGG-11 with batch normalisation (Simonyan & Zisserman 2015) and a single linear layer, for small images.

Its batch-norm scales train at the full rate (Summers & Dinneen, ICML 2021). Parameters for 3x32x32 and 10 classes:
9,231,114.
"""

from __future__ import annotations

from typing import Any

from trainers.operations import Operations


def vgg11(net: Operations, x: Any, classes: int) -> Any:
    """Eight 3x3 convolutions of 64 to 512 channels, pooling by 2 after each of five groups.

    An image smaller than 32x32 is not pooled any further once it is a single pixel, one that is larger is averaged.
    """
    layer = 0
    for group, widths in enumerate(((64,), (128,), (256, 256), (512, 512), (512, 512)), start=1):
        for width in widths:
            layer += 1
            x = net.conv(x, f"conv{layer}", width, 3, bias=True)
            x = net.relu(net.batch_norm(x, f"bn{layer}", full_rate=True))
        if min(net.size(x)) > 1:
            x = net.max_pool(x, 2)
        x = net.observe(x, f"group{group}")
    return net.observe(net.linear(net.global_average_pool(x), "head", classes), "head")
