"""The PyTorch trainer's entry: hold the library, place the data, run the loop."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protocols.contract import Context, Dataset, Network, Outcome
from protocols.errors import UserError
from protocols.recipe import Recipe
from protocols.run import Run
from trainers import evaluation, loop
from trainers.network import trace
from trainers.resolve import architecture
from trainers.torch.engine import TorchEngine
from trainers.torch.examples import Examples, place
from trainers.torch.profiles import KERNELS, kernel_of
from trainers.torch.provenance import compiler


def train(run: Run, data: Dataset, context: Context) -> Outcome:
    """Train one run. The process must have been started with the environment of ``run.profile``.

    Raises:
        Interrupted: the context asked to stop; a checkpoint was saved.
        UserError: this machine cannot run the run's kernel environment.
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


def build(run: Run, data: Dataset, device: str, threads: int, decode_threads: int = 1) -> tuple[Network, TorchEngine]:
    """The run's network, held to its profile, on a device; its state is what the engine's ``load`` will be given."""
    hold(run.profile, threads)
    function = architecture(run.architecture)
    network = trace(function, data.image_shape, data.classes, run.recipe)
    placement = Recipe(crop=run.recipe.crop, flip=run.recipe.flip, dtype=run.recipe.dtype)
    where = torch.device(device)
    examples = _examples(data, placement, where, decode_threads)
    kernel = kernel_of(run.profile)
    return network, TorchEngine(function, network, run.recipe, examples, data.classes, where, kernel)


def hold(profile: str, threads: int) -> None:
    """Set PyTorch's process-wide switches for a determinism profile. Idempotent; a process serves one profile only.

    Raises:
        UserError: the profile needs a C++ compiler, and this machine has none.
    """
    kernel = kernel_of(profile)
    native = profile.startswith("native")
    if kernel.compiled:
        if compiler() is None:
            eager = sum(not other.compiled for other in KERNELS)
            raise UserError(
                f"library=kernel: the replicates from {eager} on are compiled, and this machine has no C++ compiler: "
                f"install g++, name one in CXX, or ask for at most {eager} replicates"
            )
        # What earlier runs left compiled must not decide how this one is.
        torch.compiler.reset()
    torch.set_num_threads(kernel.threads or threads)
    torch.backends.mkldnn.enabled = kernel.onednn
    torch.use_deterministic_algorithms(not native)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = not native
    torch.backends.cudnn.benchmark = native
    # TF32 would round a change of one bit away.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@functools.lru_cache(maxsize=1)
def _examples(data: Dataset, recipe: Recipe, device: torch.device, threads: int) -> Examples:
    """The placed dataset, kept for the process's next run."""
    return place(data, recipe, device, threads)
