"""The operations that architectures are written in.

An activation is whatever an implementation calls one: images, sequences of vectors, vectors, or the tokens of a text,
many examples at a time. Names are the architecture's own; parameters are called ``NAME.weight`` and the like.
"""

from __future__ import annotations

from typing import Any, Protocol

BN_EPSILON = 1e-5
BN_MOMENTUM = 0.1
"""Share of the new batch in the running statistics (PyTorch's convention; Keras writes it .9)."""


class Operations(Protocol):
    """What a trainer supplies. Parameters start in NumPy by the laws named here, the same in every framework."""

    def channels(self, x: Any) -> int:
        """Number of channels of an image, or of features of a vector."""

    def size(self, x: Any) -> tuple[int, int]:
        """Height and width of an image."""

    def conv(
        self,
        x: Any,
        name: str,
        out: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        bias: bool = False,
        law: str = "kaiming",
    ) -> Any:
        """Convolution with symmetric zero padding at every stride, ``kernel // 2`` unless another is named.

        ``groups``: output channels in that many groups, each of which sees its share of the input channels only.
        ``law``: ``kaiming``, normal with fan_out (He et al. 2015) and a bias from 0; ``default``, PyTorch's: weight and
        bias uniform within 1/sqrt(fan_in).
        """

    def batch_norm(self, x: Any, name: str, *, last_in_block: bool = False, full_rate: bool = False) -> Any:
        """Batch normalisation over examples and positions; eps 1e-5, momentum .1, unbiased running variance.

        ``last_in_block``: the scale starts at 0 where the recipe says ``zero_gamma``.
        ``full_rate``: the scale trains at the full rate, not at the biases' fraction of it.
        """

    def relu(self, x: Any) -> Any:
        """max(x, 0)"""

    def dropout(self, x: Any, name: str, rate: float) -> Any:
        """Inverted dropout: in training, units are silenced with probability ``rate`` and the others scaled up.

        In a sequence the same features are silent at every position (Gal & Ghahramani 2016).
        """

    def linear(self, x: Any, name: str, out: int) -> Any:
        """Dense layer with bias, on vectors or on each position of a sequence; uniform within 1/sqrt(fan_in)."""

    def max_pool(self, x: Any, kernel: int, stride: int | None = None, padding: int = 0) -> Any:
        """Largest value of each window; ``stride`` is ``kernel`` unless named, and padding never wins."""

    def global_average_pool(self, x: Any) -> Any:
        """Mean over positions: images to vectors."""

    def flatten(self, x: Any) -> Any:
        """Images to vectors, in (channel, height, width) order."""

    def subsample(self, x: Any, stride: int) -> Any:
        """Every ``stride``-th row and column, from the first."""

    def pad_channels(self, x: Any, channels: int) -> Any:
        """Append zero channels until there are ``channels``."""

    def split(self, x: Any) -> tuple[Any, Any]:
        """The first and the second half of an image's channels."""

    def concat(self, x: Any, y: Any) -> Any:
        """The channels of one image, then those of another of the same size."""

    def channel_shuffle(self, x: Any, groups: int) -> Any:
        """Interleave ``groups`` groups of channels: the first of each group, then the second of each, and so on."""

    def add(self, x: Any, y: Any) -> Any:
        """Elementwise sum."""

    def embedding(self, x: Any, name: str, vocabulary: int, width: int) -> Any:
        """Tokens to sequences of vectors; starts standard normal, as PyTorch's."""

    def lstm(self, x: Any, name: str, hidden: int) -> Any:
        """Long short-term memory (Hochreiter & Schmidhuber 1997) over a sequence, from a zero state.

        Gates in the order input, forget, cell, output, with one bias; all uniform within 1/sqrt(hidden).
        """

    def qrnn(self, x: Any, name: str, hidden: int, window: int = 2) -> Any:
        """Quasi-recurrent layer (Bradbury et al. 2017): a causal convolution over ``window`` positions, fo-pooling.

        Gates in the order candidate, forget, output; uniform within 1/sqrt(fan_in).
        """

    def observe(self, x: Any, name: str) -> Any:
        """The same activation, marked as a layer by which trained networks are compared."""
