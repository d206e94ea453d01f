"""Small language models: the next token from those before it, in windows that each start from a zero state.

Dropout of .2 before and after the recurrent layers, the same features at every position.
"""

from __future__ import annotations

from typing import Any

from trainers.operations import Operations


def lstm(net: Operations, x: Any, classes: int) -> Any:
    """An embedding of 200 and one LSTM layer of 200 units."""
    x = net.lstm(_embedded(net, x, classes, 200), "lstm", 200)
    return _head(net, net.observe(x, "lstm"), classes)


def qrnn(net: Operations, x: Any, classes: int) -> Any:
    """An embedding of 256 and two quasi-recurrent layers of 256 units (Bradbury et al. 2017)."""
    x = _embedded(net, x, classes, 256)
    for layer in ("qrnn1", "qrnn2"):
        x = net.observe(net.qrnn(x, layer, 256), layer)
    return _head(net, x, classes)


def _embedded(net: Operations, x: Any, classes: int, width: int) -> Any:
    x = net.observe(net.embedding(x, "embedding", classes, width), "embedding")
    return net.dropout(x, "dropout1", 0.2)


def _head(net: Operations, x: Any, classes: int) -> Any:
    return net.observe(net.linear(net.dropout(x, "dropout2", 0.2), "head", classes), "head")
