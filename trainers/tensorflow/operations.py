"""The operations of :mod:`trainers.operations` in TensorFlow.

Images are NHWC, sequences (examples, length, features).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainers.operations import BN_EPSILON, BN_MOMENTUM


class TensorFlowOperations:
    """One forward pass."""

    def __init__(
        self,
        variables: Mapping[str, Any],
        masks: Mapping[str, Any] | None,
        *,
        statistics: dict[str, Any] | None = None,
        observed: dict[str, Any] | None = None,
    ) -> None:
        """Args:
        variables: weights and statistics by name; convolutions are stored (height, width, in, out).
        masks: dropout layer -> which units of this batch stay on; None: all do, and nothing is scaled.
        statistics: takes the batch's means and unbiased variances by name, by which batch norm then normalises; None:
            it normalises by the running ones in ``variables``.
        observed: takes the activations of observed layers by name.
        """
        self._variables = variables
        self._masks = masks
        self._statistics = statistics
        self._observed = observed

    def channels(self, x: Any) -> int:
        return int(x.shape[-1])

    def size(self, x: Any) -> tuple[int, int]:
        return int(x.shape[1]), int(x.shape[2])

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
        weight, pad = self._variables[f"{name}.weight"], kernel // 2 if padding is None else padding
        # SAME is the symmetric padding at stride 1, and twice as fast as the same padding spelled out; at other
        # strides it would pad unevenly.
        same = stride == 1 and kernel == 2 * pad + 1
        if pad and not same:
            x = tf.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        y = _convolution(x, tf.convert_to_tensor(weight), stride, "SAME" if same else "VALID", groups)
        return y + self._variables[f"{name}.bias"] if bias else y

    def batch_norm(self, x: Any, name: str, *, last_in_block: bool = False, full_rate: bool = False) -> Any:
        scale, offset = self._variables[f"{name}.weight"], self._variables[f"{name}.bias"]
        if self._statistics is None:
            mean, variance = self._variables[f"{name}.mean"], self._variables[f"{name}.var"]
            return _normalise(x, scale, offset, mean, variance)
        y, mean, variance = _batch_normalise(x, scale, offset)
        self._statistics[f"{name}.mean"] = tf.stop_gradient(mean)
        self._statistics[f"{name}.var"] = tf.stop_gradient(variance)
        return y

    def relu(self, x: Any) -> Any:
        return tf.nn.relu(x)

    def dropout(self, x: Any, name: str, rate: float) -> Any:
        if self._masks is None:
            return x
        mask = tf.cast(self._masks[name], x.dtype)
        if len(x.shape) == 4:
            mask = tf.transpose(mask, (0, 2, 3, 1))
        elif len(x.shape) == 3:
            mask = mask[:, None]
        return x * mask * (1 / (1 - rate))

    def linear(self, x: Any, name: str, out: int) -> Any:
        return _dense(x, self._variables[f"{name}.weight"]) + self._variables[f"{name}.bias"]

    def max_pool(self, x: Any, kernel: int, stride: int | None = None, padding: int = 0) -> Any:
        sides = ((0, 0), (padding, padding), (padding, padding), (0, 0))
        return tf.nn.max_pool2d(x, kernel, kernel if stride is None else stride, sides if padding else "VALID")

    def global_average_pool(self, x: Any) -> Any:
        return tf.reduce_mean(x, axis=(1, 2))

    def flatten(self, x: Any) -> Any:
        height, width, channels = x.shape[1:]
        return tf.reshape(tf.transpose(x, (0, 3, 1, 2)), (-1, height * width * channels))

    def subsample(self, x: Any, stride: int) -> Any:
        return x[:, ::stride, ::stride, :]

    def pad_channels(self, x: Any, channels: int) -> Any:
        return tf.pad(x, ((0, 0), (0, 0), (0, 0), (0, channels - x.shape[-1])))

    def split(self, x: Any) -> tuple[Any, Any]:
        one, other = tf.split(x, 2, axis=-1)
        return one, other

    def concat(self, x: Any, y: Any) -> Any:
        return tf.concat((x, y), axis=-1)

    def channel_shuffle(self, x: Any, groups: int) -> Any:
        height, width, channels = x.shape[1:]
        grouped = tf.reshape(x, (-1, height, width, groups, channels // groups))
        return tf.reshape(tf.transpose(grouped, (0, 1, 2, 4, 3)), (-1, height, width, channels))

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def embedding(self, x: Any, name: str, vocabulary: int, width: int) -> Any:
        return _rows(tf.convert_to_tensor(self._variables[f"{name}.weight"]), x)

    def lstm(self, x: Any, name: str, hidden: int) -> Any:
        recurrent = tf.convert_to_tensor(self._variables[f"{name}.recurrent"])

        def step(before: Any, gates: Any) -> Any:
            state, cell = before
            gates = gates + tf.matmul(state, recurrent, transpose_b=True)
            enter, forget, candidate, leave = tf.split(gates, 4, axis=1)
            cell = tf.sigmoid(forget) * cell + tf.sigmoid(enter) * tf.tanh(candidate)
            return tf.sigmoid(leave) * tf.tanh(cell), cell

        zeros = tf.zeros((tf.shape(x)[0], hidden), x.dtype)
        states, _ = _over_time(step, self.linear(x, name, 4 * hidden), (zeros, zeros))
        return states

    def qrnn(self, x: Any, name: str, hidden: int, window: int = 2) -> Any:
        past = [tf.pad(x, ((0, 0), (lag, 0), (0, 0)))[:, : x.shape[1]] for lag in reversed(range(window))]
        gates = self.linear(tf.concat(past, axis=2), name, 3 * hidden)
        candidate, forget, leave = tf.split(gates, 3, axis=2)
        new = tf.sigmoid(-forget) * tf.tanh(candidate)

        def step(cell: Any, gates: Any) -> Any:
            keep, value = gates
            return keep * cell + value

        cells = _over_time(step, (tf.sigmoid(forget), new), tf.zeros_like(new[:, 0]))
        return tf.sigmoid(leave) * cells

    def observe(self, x: Any, name: str) -> Any:
        if self._observed is not None:
            self._observed[name] = tf.stop_gradient(x)
        return x


def _convolution(x: Any, weight: Any, stride: int, padding: str, groups: int) -> Any:
    if groups == 1 or tf.config.get_visible_devices("GPU"):
        return tf.nn.conv2d(x, weight, stride, padding)
    # On a CPU grouped convolutions have gradients for one element type only, and not in every build.
    if x.shape[-1] == weight.shape[-1] == groups:
        return tf.nn.depthwise_conv2d(x, tf.transpose(weight, (0, 1, 3, 2)), (1, stride, stride, 1), padding)
    parts = zip(tf.split(x, groups, axis=-1), tf.split(weight, groups, axis=-1), strict=True)
    return tf.concat([tf.nn.conv2d(part, kernel, stride, padding) for part, kernel in parts], axis=-1)


def _dense(x: Any, weight: Any) -> Any:
    """x W', for the vector at each position of a sequence too."""
    if len(x.shape) == 2:
        return tf.matmul(x, weight, transpose_b=True)
    return tf.tensordot(x, weight, ((2,), (1,)))


@tf.custom_gradient
def _rows(table: Any, tokens: Any) -> Any:
    """The table's rows at these tokens. Its gradient is dense, as that of every other weight."""

    def gradient(upstream: Any) -> tuple[Any, None]:
        rows = tf.reshape(upstream, (-1, table.shape[1]))
        return tf.math.unsorted_segment_sum(rows, tf.reshape(tokens, (-1,)), table.shape[0]), None

    return tf.gather(table, tokens), gradient


def _over_time(step: Any, sequences: Any, initial: Any) -> Any:
    """``tf.scan`` over the second axis instead of the first."""
    swapped = tf.nest.map_structure(lambda x: tf.transpose(x, (1, 0, 2)), sequences)
    results = tf.scan(step, swapped, initial, parallel_iterations=1)
    return tf.nest.map_structure(lambda x: tf.transpose(x, (1, 0, 2)), results)


def updated_statistic(running: Any, batch: Any) -> Any:
    """The running statistic after one more batch."""
    return running * (1 - BN_MOMENTUM) + batch * BN_MOMENTUM


def bessel(count: Any) -> Any:
    """From the variance of ``count`` values to the unbiased estimate that running variances collect."""
    return count / (count - 1)


def _batch_normalise(x: Any, scale: Any, offset: Any) -> tuple[Any, Any, Any]:
    """Normalised activations, the batch's mean, and its unbiased variance."""
    if x.dtype == tf.float32:
        # The raw operation: the public wrapper raises epsilon to 1.001e-5. Its variance carries Bessel's correction.
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=scale,
            offset=offset,
            mean=tf.zeros((0,)),
            variance=tf.zeros((0,)),
            epsilon=BN_EPSILON,
            exponential_avg_factor=1.0,
            is_training=True,
        )
        return y, mean, variance
    mean, variance = tf.nn.moments(x, axes=(0, 1, 2))
    y = tf.nn.batch_normalization(x, mean, variance, offset, scale, BN_EPSILON)
    return y, mean, variance * bessel(tf.cast(tf.size(x) / x.shape[-1], x.dtype))


def _normalise(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
    """Normalisation by the running statistics."""
    if x.dtype == tf.float32:
        return tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=BN_EPSILON, is_training=False
        ).y
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, BN_EPSILON)
