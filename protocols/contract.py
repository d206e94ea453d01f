"""What a trainer is, what it is given and what it gives back.

The orchestrator knows trainers, architectures and datasets by these types alone and finds them by name at run time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from protocols.run import Run


class Photographs(Protocol):
    """Images of many sizes, too large to hold decoded: kept as compressed bytes and decoded batch by batch.

    What it returns is a function of its arguments alone; the number of threads never changes a bit.
    """

    train_sizes: NDArray[np.int64]
    """(N, 2) height and width of each training image."""

    @property
    def decoder(self) -> str:
        """What decodes them, with its version: another may give other pixels."""

    @property
    def content(self) -> str:
        """Names the images that are there, by a digest of their files."""

    @property
    def left_out(self) -> int:
        """How many images were left out because they cannot be decoded."""

    def train(self, examples: NDArray[np.int64], boxes: NDArray[np.int64], threads: int) -> NDArray[np.uint8]:
        """Parts of training images, resized to the network's input.

        Args:
            examples: (n,) which images.
            boxes: (n, 5) top, left, height and width of the part, and 1 where it is mirrored afterwards.
            threads: how many decode side by side.

        Returns:
            (n, height, width, channels)
        """

    def test(self, start: int, stop: int, view: View, threads: int) -> NDArray[np.uint8]:
        """The test images [start, stop) in one view, (n, height, width, channels)."""


class View(NamedTuple):
    """One way to look at a test image."""

    row: int
    """Rows by which the crop lies below (above, if negative) the usual one."""
    column: int
    """Columns by which the crop lies right (left, if negative) of the usual one."""
    flip: bool
    """Whether it is mirrored after that."""


PLAIN = View(0, 0, False)
"""The test image as it is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """The examples of one dataset, in memory or memory-mapped; one object a dataset and process, compared by identity.

    Images: a pixel enters the network as ``(pixel - shift) * scale``, both per channel; crops pad with zeros before
    that. Text: an example is a window of tokens and its labels are the tokens that follow each of them.
    """

    name: str
    fingerprint: str
    classes: int
    train_images: NDArray[Any]
    """(N, height, width, channels), uint8 or float32, as stored; text: (N, length) int32. Photographs: empty, (0,
    height, width, channels) of the network's input."""
    train_labels: NDArray[np.int64]
    """(N,); text: (N, length)"""
    test_images: NDArray[Any]
    test_labels: NDArray[np.int64]
    """Like the training set's, but flat for text too: (N length,)."""
    shift: NDArray[np.float64]
    """(channels,); text: (0,)"""
    scale: NDArray[np.float64]
    """(channels,); text: (0,)"""
    train_samples: NDArray[np.int64]
    """(N,) Each training example's index in the full dataset: what its augmentation is keyed by."""
    full_train_size: int
    """Number of training examples of the full dataset."""
    photographs: Photographs | None = None
    """Where the images are decoded as they are needed."""

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(height, width, channels) of the network's input; text: (length,)"""
        return self.train_images.shape[1:]

    @property
    def is_text(self) -> bool:
        """Whether the examples are windows of tokens."""
        return len(self.image_shape) == 1

    @property
    def test_examples(self) -> int:
        """Number of test images or windows; a window has as many test labels as it has tokens."""
        return len(self.test_labels) // (self.image_shape[0] if self.is_text else 1)


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
    head: str
    """The last layer's weight."""
    layers: tuple[str, ...] = ()
    """Names of the activations by which trained networks are compared, in order."""

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
    evaluate: str = ""
    """Import path of the function that tests given weights, with the signature :class:`Evaluate`; empty: there is none,
    and no barrier can be computed."""
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
    """Canonical names and layouts: ``weights/NAME`` and ``momentum/NAME``; where there are any, ``ema/NAME``,
    ``swa/NAME`` (a sum, float64), ``logits/VARIANT`` (a sum over the cycles so far, float64), ``commits`` (see
    :attr:`Outcome.commits`) and ``perturbation`` (its description as JSON, in bytes)."""
    losses: NDArray[np.float64]
    """(steps so far,)"""
    history: tuple[Epoch, ...]
    first_step_digest: str
    initial_digest: str
    fingerprint: str = ""
    """Of the machine and libraries it was made with: bits go on from it under the same one only."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Another way to get test logits out of the same trained run, e.g. by test-time augmentation."""

    name: str
    """A view (``flip``), averaged weights (``ema``, ``swa``), or both (``ema+flip``)."""
    passes: int
    """Forward passes for each example."""
    logits: NDArray[np.floating]
    """Like those of :class:`Outcome`, which also says what the next two are."""
    predictions: NDArray[np.int32] | None = None
    cross_entropy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one finished run gives back."""

    status: str
    """``ok``, or ``diverged`` where a loss or logit was not finite."""
    logits: NDArray[np.floating]
    """(test examples, classes); the mean over the cycles where the recipe has several. Of text they may be too many to
    keep: then those of the first test examples."""
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
    """Seconds: ``setup``, ``train``, ``evaluate``; and of ``train`` what the ``device`` spent computing."""
    perturbation: dict[str, Any] | None = None
    """For onebit: ``tensor``, ``step`` (steps taken before it), ``elements`` (how many changed), of the first of them
    ``index``, ``before`` and ``after``, and ``digest``: of all weights, read back from the device right after it."""
    passes: int = 1
    """Forward passes for each example behind ``logits``."""
    variants: tuple[Variant, ...] = ()
    commits: NDArray[np.int64] | None = None
    """(steps, 3) for asynchronous training: the worker, the batch of the epoch, and how many steps of the epoch had
    been taken when the worker read the weights. None for synchronous training."""
    grams: dict[str, NDArray[np.floating]] = field(default_factory=dict)
    """For ``keep=layers``: layer -> (m, m) inner products of its activations on the first m test examples."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """The framework's part: versions, device, determinism flags, threads."""
    predictions: NDArray[np.int32] | None = None
    """(test examples,) the class with the highest logit, the first of equals; None: it follows from ``logits``."""
    cross_entropy: float | None = None
    """Mean over all test examples, in nats; None: it follows from ``logits``."""


class Context(Protocol):
    """A trainer's only window on the world."""

    device: str
    """``cpu``, or ``cuda:0``: the device this process was given."""
    threads: int
    """Of the mathematics; another number may give other bits."""
    decode_threads: int
    """How many decode photographs side by side; changes no bit."""

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

    def commit_log(self) -> NDArray[np.int64] | None:
        """The log that asynchronous training must follow (see :attr:`Outcome.commits`), or None."""

    def should_stop(self) -> bool:
        """Whether to save a checkpoint and raise :class:`Interrupted`. Asked at the end of each epoch."""


class Interrupted(Exception):
    """Raised by a trainer that was asked to stop, after it saved a checkpoint."""


class Train(Protocol):
    """The signature of a trainer's training function."""

    def __call__(self, run: Run, data: Dataset, context: Context) -> Outcome: ...


class Evaluate(Protocol):
    """The signature of a trainer's function that tests weights without training any."""

    def __call__(
        self, run: Run, data: Dataset, context: Context, weights: Mapping[str, NDArray[Any]], reestimate: bool
    ) -> NDArray[np.floating]:
        """Logits of the test set, (test examples, classes); of text, where they are too many, those of the first ones.

        Args:
            run: says which network, in what element type and determinism profile.
            data: its examples.
            context: says on which device.
            weights: weights and batch-norm statistics, canonical names and layouts.
            reestimate: estimate the batch-norm statistics anew on the training examples, plain and in their order.
        """


def epoch_values(epoch: Epoch) -> dict[str, float]:
    """An epoch's row as a plain dictionary, in the order of its fields."""
    return dataclasses.asdict(epoch)
