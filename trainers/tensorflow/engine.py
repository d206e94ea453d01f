"""A network on one device, run by TensorFlow: one function over a stretch of steps, traced once, refilled per run."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework.config import is_op_determinism_enabled

from protocols.contract import Dataset, Network
from protocols.recipe import Recipe
from trainers.batches import EVALUATION_BATCH, EpochPlan, padded_pixels, pixel_grids
from trainers.network import Architecture
from trainers.tensorflow.operations import TensorFlowOperations


class Examples:
    """A dataset on a device: raw pixels, padded for crops once; normalised after a batch has been gathered."""

    def __init__(self, data: Dataset, recipe: Recipe) -> None:
        dtype = tf.as_dtype(recipe.dtype)
        pixels, test_images = padded_pixels(data, recipe.crop or 0), np.asarray(data.test_images)
        if tf.config.get_visible_devices("GPU"):
            # Bytes cannot be gathered there; as floating-point numbers they are the same values.
            pixels, test_images = pixels.astype(recipe.dtype), test_images.astype(recipe.dtype)
        self.pixels = tf.constant(pixels)
        self.labels = tf.constant(data.train_labels)
        self.test_images = tf.constant(test_images)
        plain, mirrored = pixel_grids(data.image_shape, recipe.crop or 0)
        self._plain = tf.constant(plain)
        self._mirrored = tf.constant(mirrored) if recipe.flip else None
        self._shift = tf.constant(data.shift, dtype)
        self._scale = tf.constant(data.scale, dtype)

    def batch(self, corners: Any, flips: Any) -> Any:
        """The crops at these corners, normalised, NHWC."""
        grid = self._plain
        if self._mirrored is not None:
            grid = tf.where(flips[:, None, None] == 1, self._mirrored, grid)
        return self.normalise(tf.gather(self.pixels, corners[:, None, None] + grid))

    def normalise(self, images: Any) -> Any:
        """(pixel - shift) * scale"""
        return (tf.cast(images, self._shift.dtype) - self._shift) * self._scale


class TensorFlowEngine:
    """See :class:`trainers.loop.Engine`. Built once per network and dataset in a process; ``load`` refills it."""

    def __init__(
        self, architecture: Architecture, network: Network, recipe: Recipe, examples: Examples, classes: int
    ) -> None:
        self._architecture = architecture
        self._network = network
        self._recipe = recipe
        self._examples = examples
        self._classes = classes
        self._variables = {
            parameter.name: tf.Variable(
                np.zeros(_stored(np.empty(parameter.shape)).shape, recipe.dtype), trainable=parameter.trainable
            )
            for parameter in network.parameters
        }
        self._momentum = {
            parameter.name: tf.Variable(tf.zeros_like(self._variables[parameter.name]), trainable=False)
            for parameter in network.parameters
            if parameter.trainable
        }
        dtype = tf.as_dtype(recipe.dtype)
        indices = tf.TensorSpec((None,), tf.int64)
        masks = {name: tf.TensorSpec((None, *shape), tf.bool) for name, (shape, _) in network.dropout.items()}
        # On a GPU only int32 counters stay on the host, where the loop looks at them without waiting for the device.
        bound = tf.TensorSpec((), tf.int32)
        self.steps = tf.function(
            self._steps,
            input_signature=(indices, indices, indices, tf.TensorSpec((None,), dtype), masks, bound, bound, bound),
            autograph=False,
        )
        shape = (None, *examples.test_images.shape[1:])
        self.evaluate = tf.function(
            self._evaluate, input_signature=(tf.TensorSpec(shape, examples.test_images.dtype),), autograph=False
        )

    def load(self, weights: dict[str, NDArray[Any]], momentum: dict[str, NDArray[Any]] | None) -> None:
        for name, variable in self._variables.items():
            variable.assign(_stored(weights[name]))
        for name, variable in self._momentum.items():
            variable.assign(tf.zeros_like(variable) if momentum is None else _stored(momentum[name]))

    def weights(self) -> dict[str, NDArray[Any]]:
        return {name: _canonical(variable.numpy()) for name, variable in self._variables.items()}

    def momentum(self) -> dict[str, NDArray[Any]]:
        return {name: _canonical(variable.numpy()) for name, variable in self._momentum.items()}

    def train(self, plan: EpochPlan, start: int, stop: int) -> Any:
        return self.steps(
            plan.examples,
            plan.corners,
            plan.flips,
            plan.rates.astype(self._recipe.dtype),
            plan.masks,
            np.int32(plan.batch_size),
            np.int32(start),
            np.int32(stop),
        )

    def losses(self, handle: Any) -> NDArray[np.float64]:
        return handle.numpy().astype(np.float64)

    def logits(self) -> NDArray[np.floating]:
        images = self._examples.test_images
        starts = range(0, images.shape[0], EVALUATION_BATCH)
        return np.concatenate([self.evaluate(images[start : start + EVALUATION_BATCH]).numpy() for start in starts])

    def provenance(self) -> dict[str, Any]:
        gpus = tf.config.list_physical_devices("GPU")
        build = tf.sysconfig.get_build_info()
        return {
            "tensorflow": tf.__version__,
            "keras": tf.keras.__version__,
            "device": tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU") if gpus else "cpu",
            "cuda": build.get("cuda_version") if gpus else None,
            "cudnn": build.get("cudnn_version") if gpus else None,
            "threads": tf.config.threading.get_intra_op_parallelism_threads(),
            "inter_op_threads": tf.config.threading.get_inter_op_parallelism_threads(),
            "op_determinism": is_op_determinism_enabled(),
            "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
        }

    def _steps(
        self, examples: Any, corners: Any, flips: Any, rates: Any, masks: Any, size: Any, start: Any, stop: Any
    ) -> Any:
        """The losses of the steps [start, stop); the last batch may be smaller, so shapes stay open."""

        def step(index: Any, losses: Any) -> tuple[Any, Any]:
            first, last = index * size, (index + 1) * size
            images = self._examples.batch(corners[first:last], flips[first:last])
            labels = tf.gather(self._examples.labels, examples[first:last])
            with tf.GradientTape() as tape:
                net = TensorFlowOperations(self._variables, {name: mask[first:last] for name, mask in masks.items()})
                logits = self._architecture(net, images, self._classes)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            trained = [parameter for parameter in self._network.parameters if parameter.trainable]
            gradients = tape.gradient(loss, [self._variables[parameter.name] for parameter in trained])
            for parameter, gradient in zip(trained, gradients, strict=True):
                rate = rates[index] * (self._recipe.bias_lr_factor if parameter.slow else 1.0)
                update(self._variables[parameter.name], self._momentum[parameter.name], gradient, rate, self._recipe)
            return index + 1, losses.write(index - start, loss)

        losses = tf.TensorArray(self._recipe.dtype, size=stop - start, element_shape=())
        _, losses = tf.while_loop(lambda index, _: index < stop, step, (start, losses), parallel_iterations=1)
        return losses.stack()

    def _evaluate(self, images: Any) -> Any:
        net = TensorFlowOperations(self._variables, None)
        return self._architecture(net, self._examples.normalise(images), self._classes)


def update(weight: Any, momentum: Any, gradient: Any, rate: Any, recipe: Recipe) -> None:
    """v = m v + (g + wd w); w -= rate v. Keras SGD would fold the rate into v and decouple the decay."""
    momentum.assign(recipe.momentum * momentum + (gradient + recipe.weight_decay * weight))
    weight.assign_sub(rate * momentum)


def _stored(tensor: NDArray[Any]) -> NDArray[Any]:
    """From the canonical layout to TensorFlow's: convolutions (height, width, in, out)."""
    return tensor.transpose(2, 3, 1, 0) if tensor.ndim == 4 else tensor


def _canonical(tensor: NDArray[Any]) -> NDArray[Any]:
    """A copy in the canonical layout, row-major."""
    return np.array(tensor.transpose(3, 2, 0, 1) if tensor.ndim == 4 else tensor, order="C")
