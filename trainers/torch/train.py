"""The PyTorch trainer's entry: hold the library, place the data, run the loop."""

from __future__ import annotations

import functools
import time

import torch

from protocols.contract import Context, Dataset, Network, Outcome
from protocols.recipe import Recipe
from protocols.run import Run
from trainers import loop
from trainers.network import trace
from trainers.resolve import architecture
from trainers.torch.engine import Examples, TorchEngine
from trainers.torch.profiles import kernel_of


def train(run: Run, data: Dataset, context: Context) -> Outcome:
    """Train one run. The process must have been started with the environment of ``run.profile``.

    Raises:
        Interrupted: the context asked to stop; a checkpoint was saved.
    """
    started = time.perf_counter()
    network, engine = build(run, data, context.device, context.threads)
    return loop.fit(run, data, network, context, engine, started)


def build(run: Run, data: Dataset, device: str, threads: int) -> tuple[Network, TorchEngine]:
    """The run's network, held to its profile, on a device; its state is what the engine's ``load`` will be given."""
    hold(run.profile, threads)
    function = architecture(run.architecture)
    network = trace(function, data.image_shape, data.classes, run.recipe)
    placement = Recipe(crop=run.recipe.crop, flip=run.recipe.flip, dtype=run.recipe.dtype)
    place = torch.device(device)
    examples = _examples(data, placement, place)
    return network, TorchEngine(function, network, run.recipe, examples, data.classes, place)


def hold(profile: str, threads: int) -> None:
    """Set PyTorch's process-wide switches for a determinism profile. Idempotent; a process serves one profile only."""
    kernel = kernel_of(profile)
    native = profile == "native"
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
def _examples(data: Dataset, recipe: Recipe, device: torch.device) -> Examples:
    """The placed dataset, kept for the process's next run."""
    return Examples(data, recipe, device)
