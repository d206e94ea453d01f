"""What an architecture is written in, and what can be known of it without a framework.

An architecture is one function ``f(net, x, classes) -> logits`` over the operations below. Each trainer supplies the
operations, so every architecture exists once and means the same in each framework. Run over :class:`Tracer`, the same
function tells the parameters' names, shapes, initial laws and rate groups, which is all that planning, initialisation
and digests need.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from protocols.contract import Network, Parameter
from protocols.errors import UserError
from protocols.recipe import Recipe

BN_EPSILON = 1e-5
BN_MOMENTUM = 0.1
"""Share of the new batch in the running statistics (PyTorch's convention; Keras writes it .9)."""


class Operations(Protocol):
    """The operations that architectures are written in. ``x`` is whatever the implementation calls an activation."""

    def channels(self, x: Any) -> int:
        """Number of channels of an image, or of features of a vector."""

    def conv(self, x: Any, name: str, out: int, kernel: int, *, stride: int = 1) -> Any:
        """Convolution without bias, with explicit symmetric zero padding ``kernel // 2`` at every stride.

        Starts Kaiming-normal with fan_out (He et al. 2015).
        """

    def batch_norm(self, x: Any, name: str, *, last_in_block: bool = False, full_rate: bool = False) -> Any:
        """Batch normalisation over examples and positions; eps 1e-5, momentum .1, unbiased running variance.

        ``last_in_block``: the scale starts at 0 where the recipe says ``zero_gamma``.
        ``full_rate``: the scale trains at the full rate, not at the biases' fraction of it.
        """

    def relu(self, x: Any) -> Any:
        """max(x, 0)"""

    def dropout(self, x: Any, name: str, rate: float) -> Any:
        """Inverted dropout: in training, units are silenced with probability ``rate`` and the others scaled up."""

    def linear(self, x: Any, name: str, out: int) -> Any:
        """Dense layer with bias, on vectors; starts as PyTorch's: uniform within 1/sqrt(fan_in)."""

    def global_average_pool(self, x: Any) -> Any:
        """Mean over positions: images to vectors."""

    def flatten(self, x: Any) -> Any:
        """Images to vectors, in (channel, height, width) order."""

    def subsample(self, x: Any, stride: int) -> Any:
        """Every ``stride``-th row and column, from the first."""

    def pad_channels(self, x: Any, channels: int) -> Any:
        """Append zero channels until there are ``channels``."""

    def add(self, x: Any, y: Any) -> Any:
        """Elementwise sum."""


Architecture = Callable[[Any, Any, int], Any]
"""``f(net: Operations, x, classes) -> logits``"""


class Tracer:
    """Operations over shapes: collects what a network consists of.

    Activations are (channels, height, width) or (features,).
    """

    def __init__(self, recipe: Recipe) -> None:
        self._zero_gamma = recipe.zero_gamma
        self.parameters: dict[str, Parameter] = {}
        self.dropouts: dict[str, tuple[tuple[int, ...], float]] = {}

    def channels(self, x: tuple[int, ...]) -> int:
        return x[0]

    def conv(self, x: tuple[int, ...], name: str, out: int, kernel: int, *, stride: int = 1) -> tuple[int, ...]:
        channels, height, width = _image(x, f"conv {name!r}")
        _positive(f"conv {name!r}", out=out, kernel=kernel, stride=stride)
        std = math.sqrt(2 / (out * kernel * kernel))
        self._add(name=f"{name}.weight", shape=(out, channels, kernel, kernel), law="normal", scale=std)
        reach = 2 * (kernel // 2) - kernel
        return out, (height + reach) // stride + 1, (width + reach) // stride + 1

    def batch_norm(
        self, x: tuple[int, ...], name: str, *, last_in_block: bool = False, full_rate: bool = False
    ) -> tuple[int, ...]:
        _image(x, f"batch_norm {name!r}")
        gamma = 0.0 if last_in_block and self._zero_gamma else 1.0
        for part, value, slow, trainable in (
            ("weight", gamma, not full_rate, True),
            ("bias", 0.0, True, True),
            ("mean", 0.0, False, False),
            ("var", 1.0, False, False),
        ):
            self._add(name=f"{name}.{part}", shape=(x[0],), law="constant", scale=value, slow=slow, trainable=trainable)
        return x

    def relu(self, x: tuple[int, ...]) -> tuple[int, ...]:
        return x

    def dropout(self, x: tuple[int, ...], name: str, rate: float) -> tuple[int, ...]:
        if not 0 <= rate < 1:
            raise UserError(f"dropout {name!r}: the rate must be at least 0 and below 1, not {rate}")
        if name in self.dropouts:
            raise UserError(f"the architecture uses the layer name {name!r} twice")
        self.dropouts[name] = (x, rate)
        return x

    def linear(self, x: tuple[int, ...], name: str, out: int) -> tuple[int, ...]:
        if len(x) != 1:
            raise UserError(f"linear {name!r} takes vectors, not images of shape {x}: flatten or pool them first")
        _positive(f"linear {name!r}", out=out)
        (features,) = x
        bound = 1 / math.sqrt(features)
        self._add(name=f"{name}.weight", shape=(out, features), law="uniform", scale=bound)
        self._add(name=f"{name}.bias", shape=(out,), law="uniform", scale=bound, slow=True)
        return (out,)

    def global_average_pool(self, x: tuple[int, ...]) -> tuple[int, ...]:
        return _image(x, "global_average_pool")[:1]

    def flatten(self, x: tuple[int, ...]) -> tuple[int, ...]:
        return (math.prod(_image(x, "flatten")),)

    def subsample(self, x: tuple[int, ...], stride: int) -> tuple[int, ...]:
        channels, height, width = _image(x, "subsample")
        _positive("subsample", stride=stride)
        return channels, -(-height // stride), -(-width // stride)

    def pad_channels(self, x: tuple[int, ...], channels: int) -> tuple[int, ...]:
        _positive("pad_channels", channels=channels)
        if channels < _image(x, "pad_channels")[0]:
            raise UserError(f"pad_channels: there are {x[0]} channels already, more than {channels}")
        return channels, *x[1:]

    def add(self, x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
        if x != y:
            raise UserError(f"the architecture adds activations of shapes {x} and {y}")
        return x

    def _add(self, **values: Any) -> None:
        parameter = Parameter(**values)
        if parameter.name in self.parameters:
            raise UserError(f"the architecture uses the parameter name {parameter.name!r} twice")
        self.parameters[parameter.name] = parameter


def _image(x: tuple[int, ...], where: str) -> tuple[int, int, int]:
    if len(x) != 3:
        raise UserError(f"{where} takes images, not vectors of {x[0]}")
    channels, height, width = x
    return channels, height, width


def _positive(where: str, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{where}: {name} must be a whole number, at least 1, not {value!r}")


def trace(architecture: Architecture, image_shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Network:
    """What a network of this architecture consists of.

    Args:
        architecture: a function over :class:`Operations`.
        image_shape: (height, width, channels) of the input.
        classes: number of logits.
        recipe: says whether last scales start at 0.

    Raises:
        UserError: the architecture does not end in one logit per class, names two layers alike, or does not fit
            the input.
    """
    height, width, channels = image_shape
    tracer = Tracer(recipe)
    try:
        logits = architecture(tracer, (channels, height, width), classes)
    except UserError as error:
        raise UserError(f"the architecture does not fit images of {height}x{width}x{channels}: {error}") from error
    except Exception as error:
        # It is the user's code, so whatever it raises is his to know: what, and where.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise UserError(f"the architecture raises {type(error).__name__} at {place}: {error}") from error
    if logits != (classes,):
        raise UserError(f"the architecture ends in shape {logits}, not in {classes} logits")
    parameters = tuple(tracer.parameters.values())
    first = next((parameter.name for parameter in parameters if parameter.trainable), None)
    if first is None:
        raise UserError("the architecture has no trainable parameter")
    return Network(parameters=parameters, dropout=tracer.dropouts, perturbed=first)
