"""What a trainer is, what it is given and what it gives back.

The orchestrator knows trainers, architectures and datasets by these types alone and finds them by name at run time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocols.run import Run


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """The examples of one dataset, in memory or memory-mapped; one object a dataset and process, compared by identity.

    A pixel enters the network as ``(pixel - shift) * scale``, both per channel; crops pad with zeros before that.
    """

    name: str
    fingerprint: str
    classes: int
    train_images: NDArray[Any]
    """(N, height, width, channels), uint8 or float32, as stored."""
    train_labels: NDArray[np.int64]
    """(N,)"""
    test_images: NDArray[Any]
    test_labels: NDArray[np.int64]
    shift: NDArray[np.float64]
    """(channels,)"""
    scale: NDArray[np.float64]
    """(channels,)"""
    train_samples: NDArray[np.int64]
    """(N,) Each training example's index in the full dataset: what its augmentation is keyed by."""
    full_train_size: int
    """Number of training examples of the full dataset."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)"""
        height, width, channels = self.train_images.shape[1:]
        return height, width, channels


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One tensor of a network, trainable or a batch-norm statistic."""

    name: str
    shape: tuple[int, ...]
    """In the canonical layout: convolutions (out, in, height, width), dense (out, in), its inputs after a flatten in
    (channel, height, width) order."""
    law: str
    """How it starts: ``normal`` (mean 0, SD ``scale``), ``uniform`` (-scale to scale) or ``constant`` (``scale``)."""
    scale: float
    slow: bool = False
    """Whether it trains at ``recipe.bias_lr_factor`` of the rate."""
    trainable: bool = True
    """False for a batch-norm mean or variance."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """What is known of an architecture without any framework."""

    parameters: tuple[Parameter, ...]
    dropout: Mapping[str, tuple[tuple[int, ...], float]]
    """Dropout layers: name -> (shape of one example's mask, rate)."""
    perturbed: str
    """The tensor that ``onebit`` changes: the first layer's weight."""

    @property
    def count(self) -> int:
        """Number of trainable parameters."""
        return sum(int(np.prod(parameter.shape)) for parameter in self.parameters if parameter.trainable)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer as seen before any framework is imported."""

    name: str
    numerics: int
    """Raised whenever a change of the trainer changes the bits of any run."""
    framework: str
    """The module that must be importable, e.g. ``torch``."""
    extra: str
    """The extra of this distribution that installs it."""
    train: str
    """Import path of the training function, ``module:name``; its signature is :class:`Train`."""
    network: Callable[..., Network]
    """``network(architecture, image_shape, classes, recipe)`` for an architecture resolved from its name."""
    environment: Callable[[str, int, float], dict[str, str]]
    """``environment(profile, threads, gpus)``: variables a process of that profile must be started with."""
    sources: frozenset[str]
    """The sources it can vary, given a network and a recipe that use them."""
    library_kinds: tuple[str, ...]
    kernels: int = 0
    """How many kernel environments it has beside the held one."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One row of a run's history, at the end of an epoch."""

    epoch: int
    """From 1."""
    learning_rate: float
    """Of the epoch's last step."""
    train_loss: float
    """Mean over the epoch's examples, each under the weights of its own step."""
    test_loss: float
    test_accuracy: float
    """0 to 1."""
    seconds: float
    """Wall time of the epoch, evaluation included."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run between two epochs; with the specification, all that is needed to go on bit for bit."""

    epochs: int
    """Epochs done."""
    tensors: dict[str, NDArray[Any]]
    """Canonical names and layouts: ``weights/NAME`` and ``momentum/NAME``."""
    losses: NDArray[np.float64]
    """(steps so far,)"""
    history: tuple[Epoch, ...]
    first_step_digest: str
    initial_digest: str
    fingerprint: str = ""
    """Of the machine and libraries it was made with: bits go on from it under the same one only."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one finished run gives back."""

    status: str
    """``ok``, or ``diverged`` where a loss or logit was not finite."""
    logits: NDArray[np.floating]
    """(test examples, classes)"""
    weights: dict[str, NDArray[np.floating]]
    """Final weights and batch-norm statistics, canonical names and layouts."""
    losses: NDArray[np.float64]
    """(steps,) mean loss of each step's batch."""
    history: tuple[Epoch, ...]
    initial_digest: str
    first_step_digest: str
    """After the first step whose learning rate is not 0."""
    resumed_epochs: int
    """Epochs that came from a checkpoint; 0 for an uninterrupted run."""
    images_per_second: float
    """Training images over training seconds, evaluation and set-up apart."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds: ``setup``, ``train``, ``evaluate``."""
    perturbation: dict[str, Any] | None = None
    """For onebit: ``tensor``, ``index``, ``before``, ``after``."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """The framework's part: versions, device, determinism flags, threads."""


class Context(Protocol):
    """A trainer's only window on the world."""

    device: str
    """``cpu``, or ``cuda:0``: the device this process was given."""
    threads: int

    def report(self, epoch: Epoch) -> None:
        """Publish the row of a finished epoch."""

    def fingerprint(self, provenance: Mapping[str, Any]) -> str:
        """Names what this process's bits depend on beside the specification.

        Args:
            provenance: the framework's part, as in :attr:`Outcome.provenance`.
        """

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of this run, or None."""

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint should be saved now. Asked at the end of each epoch but the last."""

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint, in place of any earlier one."""

    def should_stop(self) -> bool:
        """Whether to save a checkpoint and raise :class:`Interrupted`. Asked at the end of each epoch."""


class Interrupted(Exception):
    """Raised by a trainer that was asked to stop, after it saved a checkpoint."""


class Train(Protocol):
    """The signature of a trainer's training function."""

    def __call__(self, run: Run, data: Dataset, context: Context) -> Outcome: ...


def epoch_values(epoch: Epoch) -> dict[str, float]:
    """An epoch's row as a plain dictionary, in the order of its fields."""
    return dataclasses.asdict(epoch)
