"""The TensorFlow trainer's entry: hold the library, place the data, run the loop."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from protocols.contract import Context, Dataset, Network, Outcome
from protocols.recipe import Recipe
from protocols.run import Run
from trainers import evaluation, loop
from trainers.network import trace
from trainers.resolve import architecture
from trainers.tensorflow.engine import TensorFlowEngine
from trainers.tensorflow.examples import Examples, place
from trainers.tensorflow.profiles import Kernel, kernel_of, racing


def train(run: Run, data: Dataset, context: Context) -> Outcome:
    """Train one run. The process must have been started with the environment of ``run.profile``.

    Raises:
        Interrupted: the context asked to stop; a checkpoint was saved.
    """
    started = time.perf_counter()
    network, engine = build(run, data, context.device, context.threads, context.decode_threads)
    return loop.fit(run, data, network, context, engine, started)


def evaluate(
    run: Run, data: Dataset, context: Context, weights: Mapping[str, NDArray[Any]], reestimate: bool
) -> NDArray[np.floating]:
    """Logits of the test set under these weights: see :class:`protocols.contract.Evaluate`."""
    _, engine = build(run, data, context.device, context.threads, context.decode_threads)
    return evaluation.evaluate(data, engine, engine.reestimated(weights) if reestimate else weights).logits


def build(
    run: Run, data: Dataset, device: str, threads: int, decode_threads: int = 1
) -> tuple[Network, TensorFlowEngine]:
    """The run's network, held to its profile; its state is what the engine's ``load`` will be given.

    Raises:
        RuntimeError: the run was given a GPU that TensorFlow cannot use.
    """
    hold(run.profile, threads, device)
    recipe = run.recipe
    static = Recipe(
        batch_size=recipe.batch_size,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        bias_lr_factor=recipe.bias_lr_factor,
        zero_gamma=recipe.zero_gamma,
        crop=recipe.crop,
        flip=recipe.flip,
        dtype=recipe.dtype,
        label_smoothing=recipe.label_smoothing,
        ema_decay=recipe.ema_decay,
    )
    network = trace(architecture(run.architecture), data.image_shape, data.classes, recipe)
    return network, _engine(run.architecture, data, static, decode_threads, kernel_of(run.profile))


@functools.cache
def hold(profile: str, threads: int, device: str) -> None:
    """Set TensorFlow's process-wide switches for a determinism profile, before its first operation.

    A process serves one profile only, so this takes effect once.

    Raises:
        RuntimeError: there is no GPU, or the process has served another profile.
    """
    tf.config.threading.set_intra_op_parallelism_threads(kernel_of(profile).threads or threads)
    # All functions of a process share these threads: with a single one, gradients would take turns instead of racing.
    tf.config.threading.set_inter_op_parallelism_threads(racing(profile))
    gpus = tf.config.list_physical_devices("GPU")
    if device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    elif not gpus:
        # It would train on the CPU without a word.
        raise RuntimeError("no GPU is visible to TensorFlow: install noisegrid[tensorflow], or use --gpus-per-run 0")
    else:
        # TensorFlow places on the process's only GPU by itself.
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    # They regroup sums and products in one graph and not in another: bits would depend on what a step is traced into.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False, "constant_folding": False})
    # TF32 would round a change of one bit away.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if not profile.startswith("native"):
        tf.keras.utils.set_random_seed(0)
        tf.config.experimental.enable_op_determinism()


@functools.lru_cache(maxsize=4)
def _engine(name: str, data: Dataset, static: Recipe, threads: int, kernel: Kernel) -> TensorFlowEngine:
    """The traced engine, kept for the process's next runs: tracing costs more than a short run."""
    network = trace(architecture(name), data.image_shape, data.classes, static)
    placement = Recipe(crop=static.crop, flip=static.flip, dtype=static.dtype)
    examples = _examples(data, placement, threads)
    return TensorFlowEngine(architecture(name), network, static, examples, data.classes, kernel)


@functools.lru_cache(maxsize=1)
def _examples(data: Dataset, placement: Recipe, threads: int) -> Examples:
    """The placed dataset, kept for the process's next run."""
    return place(data, placement, threads)
