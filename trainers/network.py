"""What can be known of an architecture without a framework.

An architecture is one function ``f(net, x, classes) -> logits`` over :class:`trainers.operations.Operations`. Each
trainer supplies the operations, so every architecture exists once and means the same in each framework. Run over
:class:`Tracer`, the same function tells the parameters' names, shapes, initial laws and rate groups, which is all that
planning, initialisation and digests need.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocols.contract import Network, Parameter
from protocols.errors import UserError, unknown
from protocols.recipe import Recipe

Architecture = Callable[[Any, Any, int], Any]
"""``f(net: Operations, x, classes) -> logits``"""


@dataclass(frozen=True)
class Tokens:
    """The shape of text."""

    length: int
    """Tokens in an example."""
    kinds: int
    """Different tokens."""


Shape = tuple[int, ...] | Tokens
"""Of one example: images (channels, height, width), sequences (features, length), vectors (features,), or tokens."""
_KINDS = {3: "images", 2: "sequences", 1: "vectors"}


class Tracer:
    """Operations over shapes: collects what a network consists of."""

    def __init__(self, recipe: Recipe) -> None:
        self._zero_gamma = recipe.zero_gamma
        self.parameters: dict[str, Parameter] = {}
        self.dropouts: dict[str, tuple[tuple[int, ...], float]] = {}
        self.layers: list[str] = []

    def channels(self, x: Shape) -> int:
        return _any(x, "channels")[0]

    def size(self, x: Shape) -> tuple[int, int]:
        _, height, width = _image(x, "size")
        return height, width

    def conv(
        self,
        x: Shape,
        name: str,
        out: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        bias: bool = False,
        law: str = "kaiming",
    ) -> Shape:
        where = f"conv {name!r}"
        channels, height, width = _image(x, where)
        _positive(where, out=out, kernel=kernel, stride=stride, groups=groups)
        if channels % groups or out % groups:
            raise UserError(f"{where}: {channels} channels in and {out} out do not divide into {groups} groups")
        bound = 1 / math.sqrt(channels // groups * kernel**2)
        laws = {
            "kaiming": (("normal", math.sqrt(2 / (out * kernel * kernel))), ("constant", 0.0)),
            "default": (("uniform", bound), ("uniform", bound)),
        }
        if law not in laws:
            raise unknown(f"law of {where}", law, laws)
        (weight_law, weight_scale), (bias_law, bias_scale) = laws[law]
        shape = (out, channels // groups, kernel, kernel)
        self._add(name=f"{name}.weight", shape=shape, law=weight_law, scale=weight_scale)
        if bias:
            self._add(name=f"{name}.bias", shape=(out,), law=bias_law, scale=bias_scale, slow=True)
        pad = kernel // 2 if padding is None else padding
        return out, *_windows(where, (height, width), kernel, stride, pad)

    def batch_norm(self, x: Shape, name: str, *, last_in_block: bool = False, full_rate: bool = False) -> Shape:
        channels = _image(x, f"batch_norm {name!r}")[:1]
        gamma = 0.0 if last_in_block and self._zero_gamma else 1.0
        for part, value, slow, trainable in (
            ("weight", gamma, not full_rate, True),
            ("bias", 0.0, True, True),
            ("mean", 0.0, False, False),
            ("var", 1.0, False, False),
        ):
            self._add(
                name=f"{name}.{part}", shape=channels, law="constant", scale=value, slow=slow, trainable=trainable
            )
        return x

    def relu(self, x: Shape) -> Shape:
        return _any(x, "relu")

    def dropout(self, x: Shape, name: str, rate: float) -> Shape:
        shape = _any(x, f"dropout {name!r}")
        if not 0 <= rate < 1:
            raise UserError(f"dropout {name!r}: the rate must be at least 0 and below 1, not {rate}")
        if name in self.dropouts:
            raise UserError(f"the architecture uses the layer name {name!r} twice")
        self.dropouts[name] = (shape[:1] if _kind(shape) == "sequences" else shape, rate)
        return x

    def linear(self, x: Shape, name: str, out: int) -> Shape:
        features, *length = _expect(x, f"linear {name!r}", "vectors", "sequences")
        _positive(f"linear {name!r}", out=out)
        self._dense(name, out, features, 1 / math.sqrt(features))
        return (out, *length)

    def max_pool(self, x: Shape, kernel: int, stride: int | None = None, padding: int = 0) -> Shape:
        channels, *size = _image(x, "max_pool")
        step = kernel if stride is None else stride
        _positive("max_pool", kernel=kernel, stride=step)
        if padding > kernel // 2:
            raise UserError(f"max_pool: a padding of {padding} is more than half the kernel of {kernel}")
        return channels, *_windows("max_pool", size, kernel, step, padding)

    def global_average_pool(self, x: Shape) -> Shape:
        return _image(x, "global_average_pool")[:1]

    def flatten(self, x: Shape) -> Shape:
        return (math.prod(_image(x, "flatten")),)

    def subsample(self, x: Shape, stride: int) -> Shape:
        channels, height, width = _image(x, "subsample")
        _positive("subsample", stride=stride)
        return channels, -(-height // stride), -(-width // stride)

    def pad_channels(self, x: Shape, channels: int) -> Shape:
        present, *size = _image(x, "pad_channels")
        _positive("pad_channels", channels=channels)
        if channels < present:
            raise UserError(f"pad_channels: there are {present} channels already, more than {channels}")
        return channels, *size

    def split(self, x: Shape) -> tuple[Shape, Shape]:
        channels, *size = _image(x, "split")
        if channels % 2:
            raise UserError(f"split: {channels} channels have no halves")
        half = (channels // 2, *size)
        return half, half

    def concat(self, x: Shape, y: Shape) -> Shape:
        one, other = _image(x, "concat"), _image(y, "concat")
        if one[1:] != other[1:]:
            raise UserError(f"concat: the images have unequal sizes, {one[1:]} and {other[1:]}")
        return one[0] + other[0], *one[1:]

    def channel_shuffle(self, x: Shape, groups: int) -> Shape:
        channels, *_ = _image(x, "channel_shuffle")
        _positive("channel_shuffle", groups=groups)
        if channels % groups:
            raise UserError(f"channel_shuffle: {channels} channels do not divide into {groups} groups")
        return x

    def add(self, x: Shape, y: Shape) -> Shape:
        if _any(x, "add") != _any(y, "add"):
            raise UserError(f"the architecture adds activations of shapes {x} and {y}")
        return x

    def embedding(self, x: Shape, name: str, vocabulary: int, width: int) -> Shape:
        where = f"embedding {name!r}"
        if not isinstance(x, Tokens):
            raise UserError(f"{where} takes tokens, not {_described(x)}")
        _positive(where, vocabulary=vocabulary, width=width)
        if vocabulary < x.kinds:
            raise UserError(f"{where}: a vocabulary of {vocabulary} is too small for {x.kinds} different tokens")
        self._add(name=f"{name}.weight", shape=(vocabulary, width), law="normal", scale=1.0)
        return width, x.length

    def lstm(self, x: Shape, name: str, hidden: int) -> Shape:
        features, length = _expect(x, f"lstm {name!r}", "sequences")
        _positive(f"lstm {name!r}", hidden=hidden)
        bound = 1 / math.sqrt(hidden)
        self._dense(name, 4 * hidden, features, bound)
        self._add(name=f"{name}.recurrent", shape=(4 * hidden, hidden), law="uniform", scale=bound)
        return hidden, length

    def qrnn(self, x: Shape, name: str, hidden: int, window: int = 2) -> Shape:
        features, length = _expect(x, f"qrnn {name!r}", "sequences")
        _positive(f"qrnn {name!r}", hidden=hidden, window=window)
        self._dense(name, 3 * hidden, window * features, 1 / math.sqrt(window * features))
        return hidden, length

    def observe(self, x: Shape, name: str) -> Shape:
        _any(x, f"observe {name!r}")
        if name in self.layers:
            raise UserError(f"the architecture observes two layers as {name!r}")
        self.layers.append(name)
        return x

    def _dense(self, name: str, out: int, features: int, bound: float) -> None:
        self._add(name=f"{name}.weight", shape=(out, features), law="uniform", scale=bound)
        self._add(name=f"{name}.bias", shape=(out,), law="uniform", scale=bound, slow=True)

    def _add(self, **values: Any) -> None:
        parameter = Parameter(**values)
        if parameter.name in self.parameters:
            raise UserError(f"the architecture uses the parameter name {parameter.name!r} twice")
        self.parameters[parameter.name] = parameter


def _kind(x: Any) -> str:
    if isinstance(x, Tokens):
        return "tokens"
    shape = isinstance(x, tuple) and all(isinstance(length, int) for length in x)
    return _KINDS.get(len(x), "") if shape else ""


def _described(x: Any) -> str:
    kind = _kind(x)
    return f"{kind} of shape {x}" if isinstance(x, tuple) and kind else kind or f"the value {x!r}"


def _expect(x: Any, where: str, *kinds: str) -> tuple[int, ...]:
    """The shape, if it is of one of these kinds."""
    if _kind(x) in kinds:
        return tuple(x)
    remedies = {"tokens": ": embed them first", "images": ": flatten or pool them first" if "vectors" in kinds else ""}
    raise UserError(f"{where} takes {' or '.join(kinds)}, not {_described(x)}{remedies.get(_kind(x), '')}")


def _image(x: Any, where: str) -> tuple[int, int, int]:
    channels, height, width = _expect(x, where, "images")
    return channels, height, width


def _any(x: Any, where: str) -> tuple[int, ...]:
    return _expect(x, where, "images", "sequences", "vectors")


def _windows(where: str, size: Sequence[int], kernel: int, stride: int, padding: int) -> tuple[int, ...]:
    """How many windows fit along each side."""
    if not isinstance(padding, int) or padding < 0:
        raise UserError(f"{where}: padding must be a whole number, at least 0, not {padding!r}")
    if min(size) + 2 * padding < kernel:
        height, width = size
        raise UserError(f"{where}: a kernel of {kernel} does not fit in {height}x{width} with a padding of {padding}")
    return tuple((length + 2 * padding - kernel) // stride + 1 for length in size)


def _positive(where: str, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{where}: {name} must be a whole number, at least 1, not {value!r}")


def trace(architecture: Architecture, image_shape: tuple[int, ...], classes: int, recipe: Recipe) -> Network:
    """What a network of this architecture consists of.

    Args:
        architecture: a function over :class:`trainers.operations.Operations`.
        image_shape: (height, width, channels) of the input; text: (length,)
        classes: number of logits, of each position where the input is text.
        recipe: says whether last scales start at 0.

    Raises:
        UserError: the architecture does not end in one logit per class, names two layers alike, or does not fit
            the input.
    """
    tracer = Tracer(recipe)
    x: Shape
    ending: tuple[int, ...]
    if len(image_shape) == 1:
        (length,) = image_shape
        x, ending, data = Tokens(length, classes), (classes, length), f"text in windows of {length} tokens"
    else:
        height, width, channels = image_shape
        x, ending, data = (channels, height, width), (classes,), f"images of {height}x{width}x{channels}"
    try:
        logits = architecture(tracer, x, classes)
    except UserError as error:
        raise UserError(f"the architecture does not fit {data}: {error}") from error
    except Exception as error:
        # It is the user's code, so whatever it raises is his to know: what, and where.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise UserError(f"the architecture raises {type(error).__name__} at {place}: {error}") from error
    if logits != ending:
        each = " at each position" if len(ending) == 2 else ""
        raise UserError(f"the architecture ends in shape {logits}, not in {classes} logits{each}")
    parameters = tuple(tracer.parameters.values())
    trained = [parameter for parameter in parameters if parameter.trainable]
    if not trained:
        raise UserError("the architecture has no trainable parameter")
    matrices = [parameter for parameter in trained if len(parameter.shape) > 1]
    return Network(
        parameters=parameters,
        dropout=tracer.dropouts,
        perturbed=trained[0].name,
        head=(matrices or trained)[-1].name,
        layers=tuple(tracer.layers),
    )
