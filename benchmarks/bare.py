"""The bare loop: forward, backward and update of ResNet-14 on one resident batch, and nothing else.

Written without the trainers, for speed: channels last and the fused optimiser in PyTorch,
one ``tf.function`` over all steps in TensorFlow; float32, one thread, deterministic operations as in a held run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from protocols.contract import Dataset

STAGES = ((16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1))


def torch(data: Dataset, batch: int, steps: int) -> Callable[[], None]:
    """``steps`` updates in PyTorch."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    class Block(nn.Module):
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            self.stride = stride
            self.extra = width - inputs
            self.body = nn.Sequential(
                nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, 1, 1, bias=False),
                nn.BatchNorm2d(width),
            )
            self.shortcut = nn.BatchNorm2d(inputs) if self.extra else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            if self.shortcut is not None:
                x = self.shortcut(x[:, :, :: self.stride, :: self.stride])
                x = nn.functional.pad(x, (0, 0, 0, 0, 0, self.extra))
            return nn.functional.relu(x + y)

    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for width, stride in STAGES:
        layers.append(Block(inputs, width, stride))
        inputs = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model = model.to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    images = torch.tensor(normalised(data, batch)).permute(0, 3, 1, 2)
    labels = torch.tensor(data.train_labels[:batch])

    def loop() -> None:
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    return loop


def tensorflow(data: Dataset, batch: int, steps: int) -> Callable[[], None]:
    """``steps`` updates in TensorFlow."""
    import tensorflow as tf

    variables: list[Any] = []
    build: list[Callable[[Any], Any]] = []

    def variable(*shape: int) -> Any:
        variables.append(tf.Variable(tf.random.stateless_normal(shape, (0, len(variables))) * 0.1))
        return variables[-1]

    def conv(inputs: int, width: int, stride: int) -> Callable[[Any], Any]:
        weight = variable(3, 3, inputs, width)
        if stride == 1:
            return lambda x: tf.nn.conv2d(x, weight, 1, "SAME")
        pad = ((0, 0), (1, 1), (1, 1), (0, 0))
        return lambda x: tf.nn.conv2d(tf.pad(x, pad), weight, stride, "VALID")

    def norm(width: int) -> Callable[[Any], Any]:
        scale, offset = variable(width), variable(width)
        mean, variance = (tf.Variable(tf.zeros((width,)), trainable=False) for _ in range(2))

        def apply(x: Any) -> Any:
            y, batch_mean, batch_variance = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, is_training=True)
            mean.assign(0.9 * mean + 0.1 * batch_mean)
            variance.assign(0.9 * variance + 0.1 * batch_variance)
            return y

        return apply

    def block(inputs: int, width: int, stride: int) -> Callable[[Any], Any]:
        first, one, second, two = conv(inputs, width, stride), norm(width), conv(width, width, 1), norm(width)
        shortcut = norm(inputs) if inputs != width else None

        def apply(x: Any) -> Any:
            y = two(second(tf.nn.relu(one(first(x)))))
            if shortcut is not None:
                x = tf.pad(shortcut(x[:, ::stride, ::stride]), ((0, 0), (0, 0), (0, 0), (0, width - inputs)))
            return tf.nn.relu(x + y)

        return apply

    stem, stem_norm = conv(3, 16, 1), norm(16)
    inputs = 16
    for width, stride in STAGES:
        build.append(block(inputs, width, stride))
        inputs = width
    weight, bias = variable(64, 10), variable(10)
    momenta = [tf.Variable(tf.zeros_like(each)) for each in variables]
    images = tf.constant(normalised(data, batch))
    labels = tf.constant(data.train_labels[:batch])

    def step(index: Any, total: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            x = tf.nn.relu(stem_norm(stem(images)))
            for each in build:
                x = each(x)
            logits = tf.matmul(tf.reduce_mean(x, (1, 2)), weight) + bias
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for each, momentum, gradient in zip(variables, momenta, tape.gradient(loss, variables), strict=True):
            momentum.assign(0.9 * momentum + (gradient + 5e-4 * each))
            each.assign_sub(0.01 * momentum)
        return index + 1, total + loss

    @tf.function(autograph=False)
    def loop() -> Any:
        return tf.while_loop(lambda index, _: index < steps, step, (0, 0.0), parallel_iterations=1)[1]

    return lambda: float(loop()) and None


def normalised(data: Dataset, batch: int) -> np.ndarray:
    """One batch as the network wants it, NHWC."""
    return ((data.train_images[:batch] - data.shift) * data.scale).astype(np.float32)
