"""The operations of :mod:`trainers.network` in TensorFlow. Activations are NHWC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainers.network import BN_EPSILON, BN_MOMENTUM


class TensorFlowOperations:
    """One forward pass. Batch-norm statistics in ``variables`` are updated in place while training."""

    def __init__(self, variables: Mapping[str, Any], masks: Mapping[str, Any] | None) -> None:
        """Args:
        variables: weights and statistics by name; convolutions are stored (height, width, in, out).
        masks: dropout layer -> which units of this batch stay on; None in evaluation mode.
        """
        self._variables = variables
        self._masks = masks

    def channels(self, x: Any) -> int:
        return int(x.shape[-1])

    def conv(self, x: Any, name: str, out: int, kernel: int, *, stride: int = 1) -> Any:
        weight, pad = self._variables[f"{name}.weight"], kernel // 2
        if stride == 1 and kernel % 2:
            # Here SAME is the symmetric padding, and twice as fast as the same padding spelled out.
            return tf.nn.conv2d(x, weight, 1, "SAME")
        # At other strides SAME would pad unevenly.
        x = tf.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        return tf.nn.conv2d(x, weight, stride, "VALID")

    def batch_norm(self, x: Any, name: str, *, last_in_block: bool = False, full_rate: bool = False) -> Any:
        scale, offset = self._variables[f"{name}.weight"], self._variables[f"{name}.bias"]
        mean, variance = self._variables[f"{name}.mean"], self._variables[f"{name}.var"]
        if self._masks is None:
            return _normalise(x, scale, offset, mean, variance)
        y, batch_mean, batch_variance = _batch_normalise(x, scale, offset)
        mean.assign(updated_statistic(mean, batch_mean))
        variance.assign(updated_statistic(variance, batch_variance))
        return y

    def relu(self, x: Any) -> Any:
        return tf.nn.relu(x)

    def dropout(self, x: Any, name: str, rate: float) -> Any:
        if self._masks is None:
            return x
        return x * tf.cast(self._masks[name], x.dtype) * (1 / (1 - rate))

    def linear(self, x: Any, name: str, out: int) -> Any:
        return tf.matmul(x, self._variables[f"{name}.weight"], transpose_b=True) + self._variables[f"{name}.bias"]

    def global_average_pool(self, x: Any) -> Any:
        return tf.reduce_mean(x, axis=(1, 2))

    def flatten(self, x: Any) -> Any:
        height, width, channels = x.shape[1:]
        return tf.reshape(tf.transpose(x, (0, 3, 1, 2)), (-1, height * width * channels))

    def subsample(self, x: Any, stride: int) -> Any:
        return x[:, ::stride, ::stride, :]

    def pad_channels(self, x: Any, channels: int) -> Any:
        return tf.pad(x, ((0, 0), (0, 0), (0, 0), (0, channels - x.shape[-1])))

    def add(self, x: Any, y: Any) -> Any:
        return x + y


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
