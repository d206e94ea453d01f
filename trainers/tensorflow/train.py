"""The TensorFlow trainer's entry: hold the library, place the data, run the loop."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import tensorflow as tf

from protocols.contract import Context, Dataset, Network, Outcome
from protocols.recipe import Recipe
from protocols.run import Run
from trainers import loop
from trainers.network import trace
from trainers.resolve import architecture
from trainers.tensorflow.engine import Examples, TensorFlowEngine
from trainers.tensorflow.profiles import kernel_of


def train(run: Run, data: Dataset, context: Context) -> Outcome:
    """Train one run. The process must have been started with the environment of ``run.profile``.

    Raises:
        Interrupted: the context asked to stop; a checkpoint was saved.
    """
    started = time.perf_counter()
    network, engine = build(run, data, context.device, context.threads)
    return loop.fit(run, data, network, context, engine, started)


def build(run: Run, data: Dataset, device: str, threads: int) -> tuple[Network, TensorFlowEngine]:
    """The run's network, held to its profile; its state is what the engine's ``load`` will be given.

    Raises:
        RuntimeError: the run was given a GPU that TensorFlow cannot use.
    """
    hold(run.profile, threads, device)
    static = Recipe(
        momentum=run.recipe.momentum,
        weight_decay=run.recipe.weight_decay,
        bias_lr_factor=run.recipe.bias_lr_factor,
        zero_gamma=run.recipe.zero_gamma,
        crop=run.recipe.crop,
        flip=run.recipe.flip,
        dtype=run.recipe.dtype,
    )
    network = trace(architecture(run.architecture), data.image_shape, data.classes, run.recipe)
    return network, _engine(run.architecture, data, static)


@functools.cache
def hold(profile: str, threads: int, device: str) -> None:
    """Set TensorFlow's process-wide switches for a determinism profile, before its first operation.

    A process serves one profile only, so this takes effect once.
    """
    count = kernel_of(profile).threads or threads
    tf.config.threading.set_intra_op_parallelism_threads(count)
    tf.config.threading.set_inter_op_parallelism_threads(1)
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
    # TF32 would round a change of one bit away.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if profile != "native":
        tf.keras.utils.set_random_seed(0)
        tf.config.experimental.enable_op_determinism()


@functools.lru_cache(maxsize=4)
def _engine(name: str, data: Dataset, static: Recipe) -> TensorFlowEngine:
    """The traced engine, kept for the process's next runs: tracing costs more than a short run."""
    network = trace(architecture(name), data.image_shape, data.classes, static)
    return TensorFlowEngine(architecture(name), network, static, _examples(data, _placement(static)), data.classes)


@functools.lru_cache(maxsize=1)
def _examples(data: Dataset, placement: Recipe) -> Examples:
    """The placed dataset, kept for the process's next run."""
    return Examples(data, placement)


def _placement(static: Recipe) -> Recipe:
    return replace(Recipe(), crop=static.crop, flip=static.flip, dtype=static.dtype)
