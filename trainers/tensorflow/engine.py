"""A network on one device, run by TensorFlow: traced once, refilled per run.

Where an epoch lies on the device and workers are synchronous, one traced function takes a whole stretch of steps. Else
the host leads: for each batch a traced gradient that takes weights as arguments, so that it can be of weights which
have changed since, and for each step a traced update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from protocols.contract import PLAIN, Network, View
from protocols.recipe import Recipe
from trainers.asynchrony import Commits
from trainers.batches import EVALUATION_BATCH, EpochPlan
from trainers.network import Architecture
from trainers.race import race
from trainers.tensorflow.examples import Columns, Examples, Fetch
from trainers.tensorflow.operations import TensorFlowOperations, updated_statistic
from trainers.tensorflow.profiles import Kernel
from trainers.tensorflow.provenance import provenance

Tensors = dict[str, Any]


class Gradient(NamedTuple):
    """What one batch gives: its mean loss, by name the gradients of that, and the batch-norm statistics."""

    loss: Any
    parts: Tensors
    """Without the tensors on which the loss does not depend."""
    statistics: Tensors


class TensorFlowEngine:
    """See :class:`trainers.loop.Engine`. Built once per network and dataset in a process; ``load`` refills it."""

    def __init__(
        self,
        architecture: Architecture,
        network: Network,
        recipe: Recipe,
        examples: Examples,
        classes: int,
        kernel: Kernel,
    ) -> None:
        self._architecture = architecture
        self._network = network
        self._trained = {parameter.name: parameter for parameter in network.parameters if parameter.trainable}
        self._recipe = recipe
        self._examples = examples
        self._classes = classes
        self._kernel = kernel
        self._variables = {
            parameter.name: tf.Variable(
                np.zeros(_stored(np.empty(parameter.shape)).shape, recipe.dtype), trainable=parameter.trainable
            )
            for parameter in network.parameters
        }
        self._momentum = {name: self._beside(name) for name in self._trained}
        self._averages = {name: self._beside(name) for name in self._variables} if recipe.ema_decay else {}
        self._waiting: dict[int, Gradient] = {}
        self._trace()

    def load(
        self,
        weights: Mapping[str, NDArray[Any]],
        momentum: Mapping[str, NDArray[Any]] | None,
        averages: Mapping[str, NDArray[Any]] | None,
    ) -> None:
        self._waiting.clear()
        for name, variable in self._variables.items():
            variable.assign(_stored(weights[name]))
        for name, variable in self._momentum.items():
            variable.assign(tf.zeros_like(variable) if momentum is None else _stored(momentum[name]))
        for name, variable in self._averages.items():
            variable.assign(_stored((weights if averages is None else averages)[name]))

    def weights(self) -> dict[str, NDArray[Any]]:
        return _arrays(self._variables)

    def momentum(self) -> dict[str, NDArray[Any]]:
        return _arrays(self._momentum)

    def averages(self) -> dict[str, NDArray[Any]]:
        return _arrays(self._averages)

    def assign(self, name: str, value: NDArray[Any]) -> None:
        self._variables[name].assign(_stored(value))

    def train(self, plan: EpochPlan, start: int, stop: int) -> Any:
        columns = self._examples.epoch(plan)
        if plan.commits is not None or columns is None or self._kernel.xla:
            return self._led(plan, start, stop)
        return self.steps(
            columns,
            plan.masks,
            plan.rates.astype(self._recipe.dtype),
            np.int32(plan.batch_size),
            np.int32(start),
            np.int32(stop),
        )

    def race(self, plan: EpochPlan, workers: int) -> tuple[NDArray[np.float64], Commits]:
        fetches, losses = self._examples.batches(plan, range(plan.steps)), []

        def read(batch: int) -> tuple[Tensors, Fetch]:
            return self._values(), next(fetches)

        def gradient(batch: int, snapshot: tuple[Tensors, Fetch]) -> Gradient:
            values, fetch = snapshot
            found = self._gradient_of(values, fetch(), plan, batch)
            # Only a gradient that is there can be committed: a GPU would otherwise race in the order of being asked.
            found.loss.numpy()
            return found

        def commit(step: int, gradient: Gradient) -> None:
            self._commit(gradient, plan.rates[step])
            losses.append(gradient.loss)

        commits = race(plan.steps, workers, read, gradient, commit)
        return self.losses(tf.stack(losses)), commits

    def device_seconds(self) -> float:
        # TensorFlow does not tell a GPU's own time: there it is the time that the losses are waited for.
        return time.perf_counter() if tf.config.get_visible_devices("GPU") else time.process_time()

    def losses(self, handle: Any) -> NDArray[np.float64]:
        return np.asarray(handle.numpy(), np.float64)

    def logits(self, view: View = PLAIN, weights: Mapping[str, NDArray[Any]] | None = None) -> NDArray[np.floating]:
        return np.concatenate(list(self._tested(view, weights)))

    def logits_by_batch(self, weights: Mapping[str, NDArray[Any]] | None = None) -> Iterator[NDArray[np.floating]]:
        return self._tested(PLAIN, weights)

    def reestimated(self, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if len(self._trained) == len(self._variables):
            return dict(weights)
        values, totals, count = self._values(weights), dict[str, Any](), 0
        for raw in self._examples.training(self._recipe.batch_size):
            for name, value in self._statistics(values, raw).items():
                totals[name] = totals.get(name, 0.0) + len(raw) * value.numpy().astype(np.float64)
            count += len(raw)
        return {**weights, **{name: (total / count).astype(self._recipe.dtype) for name, total in totals.items()}}

    def activations(self, examples: int) -> Iterator[tuple[str, NDArray[np.floating]]]:
        observed = self._observed(self._values(), next(self._examples.test(PLAIN, examples)))
        for name in self._network.layers:
            yield name, observed.pop(name).numpy().reshape(examples, -1)

    def provenance(self) -> dict[str, Any]:
        return {**provenance(self._kernel), **self._examples.provenance()}

    def _tested(self, view: View, weights: Mapping[str, NDArray[Any]] | None) -> Iterator[NDArray[np.floating]]:
        """The logits of the test set, batch by batch."""
        values = self._values(weights)
        return (self.evaluate(values, raw).numpy() for raw in self._examples.test(view, EVALUATION_BATCH))

    def _led(self, plan: EpochPlan, start: int, stop: int) -> Any:
        """The losses of the steps [start, stop), each led by the host."""
        # Synchronous training is that of one worker, who reads fresh weights for every batch.
        steps = np.arange(plan.steps)
        batches, reads = (steps, steps) if plan.commits is None else (plan.commits.batches, plan.commits.reads)
        due = {step: batches[reads == step].tolist() for step in range(start, stop)}
        fetches = self._examples.batches(plan, [batch for step in due.values() for batch in step])
        losses = []
        for step in range(start, stop):
            for batch in due[step]:
                self._waiting[batch] = self._gradient_of(self._values(), next(fetches)(), plan, batch)
            gradient = self._waiting.pop(int(batches[step]))
            self._commit(gradient, plan.rates[step])
            losses.append(gradient.loss)
        return tf.stack(losses)

    def _gradient_of(self, values: Tensors, columns: Columns, plan: EpochPlan, batch: int) -> Gradient:
        rows = plan.rows(batch)
        return Gradient(*self._gradient(values, columns, {name: mask[rows] for name, mask in plan.masks.items()}))

    def _commit(self, gradient: Gradient, rate: float) -> None:
        self._update(gradient.parts, gradient.statistics, tf.constant(rate, self._recipe.dtype))

    def _values(self, weights: Mapping[str, NDArray[Any]] | None = None) -> Tensors:
        """These tensors, or the state as it is now: later steps change no value that was read."""
        if weights is None:
            return {name: variable.read_value() for name, variable in self._variables.items()}
        return {name: tf.constant(_stored(weights[name]), self._recipe.dtype) for name in self._variables}

    def _beside(self, name: str) -> Any:
        return tf.Variable(tf.zeros_like(self._variables[name]), trainable=False)

    def _trace(self) -> None:
        """Declare what is traced, and once only: by signature, so that neither sizes nor rates trace it again."""
        dtype = tf.as_dtype(self._recipe.dtype)
        values = {name: tf.TensorSpec(variable.shape, dtype) for name, variable in self._variables.items()}
        columns, raw = self._examples.columns, self._examples.raw
        masks = {name: tf.TensorSpec((None, *shape), tf.bool) for name, (shape, _) in self._network.dropout.items()}
        # On a GPU only int32 counters stay on the host, where the loop looks at them without waiting for the device.
        bound = tf.TensorSpec((), tf.int32)
        rates = tf.TensorSpec((None,), dtype)

        def traced(function: Any, *signature: Any, xla: bool | None = None) -> Any:
            return tf.function(function, input_signature=signature, autograph=False, jit_compile=xla)

        self.steps = traced(self._stretch, columns, masks, rates, bound, bound, bound)
        self.evaluate = traced(self._evaluated, values, raw)
        self._gradient = traced(self._batch_gradient, values, columns, masks, xla=self._kernel.xla or None)
        self._update = tf.function(self._step, autograph=False)
        self._statistics = traced(self._batch_statistics, values, raw)
        self._observed = traced(self._activations, values, raw)

    def _stretch(self, columns: Any, masks: Any, rates: Any, size: Any, start: Any, stop: Any) -> Any:
        """The losses of the steps [start, stop); the last batch may be smaller, so shapes stay open."""

        def step(index: Any, losses: Any) -> tuple[Any, Any]:
            rows = slice(index * size, (index + 1) * size)
            loss, parts, statistics = self._batch_gradient(
                {name: variable.read_value() for name, variable in self._variables.items()},
                tuple(column[rows] for column in columns),
                {name: mask[rows] for name, mask in masks.items()},
            )
            self._step(parts, statistics, rates[index])
            return index + 1, losses.write(index - start, loss)

        losses = tf.TensorArray(self._recipe.dtype, size=stop - start, element_shape=())
        _, losses = tf.while_loop(lambda index, _: index < stop, step, (start, losses), parallel_iterations=1)
        return losses.stack()

    def _batch_gradient(self, values: Tensors, columns: Any, masks: Any) -> tuple[Any, Tensors, Tensors]:
        """See :class:`Gradient`."""
        inputs, labels = self._examples.batch(*columns)
        trained = {name: values[name] for name in self._trained}
        statistics: Tensors = {}
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trained)
            net = TensorFlowOperations(values, masks, statistics=statistics)
            loss = mean_loss(self._architecture(net, inputs, self._classes), labels, self._recipe)
        parts = tape.gradient(loss, trained)
        return loss, {name: part for name, part in parts.items() if part is not None}, statistics

    def _step(self, parts: Tensors, statistics: Tensors, rate: Any) -> None:
        """One step of the server."""
        for name, part in parts.items():
            factor = self._recipe.bias_lr_factor if self._trained[name].slow else 1.0
            update(self._variables[name], self._momentum[name], part, rate * factor, self._recipe)
        for name, value in statistics.items():
            self._variables[name].assign(updated_statistic(self._variables[name], value))
        decay = self._recipe.ema_decay
        for name, average in self._averages.items():
            average.assign(decay * average + (1 - decay) * self._variables[name])

    def _evaluated(self, values: Tensors, raw: Any) -> Any:
        logits = self._architecture(TensorFlowOperations(values, None), self._examples.inputs(raw), self._classes)
        return tf.reshape(logits, (-1, self._classes))

    def _batch_statistics(self, values: Tensors, raw: Any) -> Tensors:
        statistics: Tensors = {}
        net = TensorFlowOperations(values, None, statistics=statistics)
        self._architecture(net, self._examples.inputs(raw), self._classes)
        return statistics

    def _activations(self, values: Tensors, raw: Any) -> Tensors:
        observed: Tensors = {}
        net = TensorFlowOperations(values, None, observed=observed)
        self._architecture(net, self._examples.inputs(raw), self._classes)
        return observed


def mean_loss(logits: Any, labels: Any, recipe: Recipe) -> Any:
    """Cross-entropy; a share of each target is spread evenly over all classes where the recipe smooths labels."""
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    if not recipe.label_smoothing:
        return loss
    even = -tf.reduce_mean(tf.nn.log_softmax(logits))
    return (1 - recipe.label_smoothing) * loss + recipe.label_smoothing * even


def update(weight: Any, momentum: Any, gradient: Any, rate: Any, recipe: Recipe) -> None:
    """v = m v + (g + wd w); w -= rate v. Keras SGD would fold the rate into v and decouple the decay."""
    momentum.assign(recipe.momentum * momentum + (gradient + recipe.weight_decay * weight))
    weight.assign_sub(rate * momentum)


def _stored(tensor: NDArray[Any]) -> NDArray[Any]:
    """From the canonical layout to TensorFlow's: convolutions (height, width, in, out)."""
    return tensor.transpose(2, 3, 1, 0) if tensor.ndim == 4 else tensor


def _arrays(variables: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Copies in the canonical layout, row-major."""
    arrays = {name: variable.numpy() for name, variable in variables.items()}
    return {
        name: np.array(array.transpose(3, 2, 0, 1) if array.ndim == 4 else array, order="C")
        for name, array in arrays.items()
    }
