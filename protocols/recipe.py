"""How a network is trained: every setting that changes the numbers and is not a source of nondeterminism."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocols.errors import UserError, unknown

SCHEDULES = ("cosine", "constant")
DTYPES = ("float32", "float64")
MOST_WORKERS = 256
"""Each asynchronous worker that races is a thread, and each needs a copy of the weights."""

VIEWS = {
    "flip": "each test image and its mirror image: 2 views",
    "crop25": "the image and 25 crops, shifted by up to 4 pixels in steps of 2: 26 views",
    "crop81": "the image and 81 crops, shifted by up to 4 pixels in steps of 1: 82 views",
    "flip-crop25": "crop25's crops and their mirror images: 51 views",
    "flip-crop81": "crop81's crops and their mirror images: 163 views",
    "crop9": "9 crops, shifted by up to 1 pixel (photographs: up to 16, of 256): 9 views",
    "flip-crop9": "crop9 and its mirror images: 18 views",
}
"""Test-time augmentation (Summers & Dinneen 2021, section 5): the mean of the logits of several views of an image."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training recipe. The defaults are those of Summers & Dinneen (ICML 2021) for CIFAR-10.

    Raises:
        UserError: a value lies outside its range.
    """

    epochs: int = 500
    batch_size: int = 512
    """Examples a step; the last batch of an epoch may be smaller and is never dropped."""
    learning_rate: float = 0.4
    """The peak rate."""
    schedule: str = "cosine"
    """``cosine``: rate/2 (1 + cos(pi t / epochs)) after the warm-up, with t in epochs; ``constant``: the peak rate."""
    warmup_epochs: float = 3.0
    """Epochs over which the rate climbs linearly from 0 to the peak."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    """Added to the gradient of every parameter (coupled decay)."""
    bias_lr_factor: float = 0.1
    """Biases and batch-norm scales train at this fraction of the rate."""
    zero_gamma: bool = True
    """Start the last batch-norm scale of each residual block at 0, so that every block starts as the identity."""
    crop: int | None = None
    """Padding in pixels of the random crop; 0: no crop; None: what the dataset's standard recipe uses."""
    flip: bool | None = None
    """Random horizontal flips; None: what the dataset's standard recipe uses."""
    dtype: str = "float32"
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over all classes (Szegedy et al. 2016); the test loss has none."""
    cycles: int = 1
    """Accelerated ensembling (Summers & Dinneen 2021, section 5): so many schedules, warm-up and all, one after the
    other within ``epochs``; the logits at the end of each are averaged."""
    ema_decay: float = 0.0
    """Decay a step of an exponential moving average of weights and statistics, evaluated beside the last weights as
    ``ema``; 0: none."""
    swa_epochs: int = 0
    """Epochs at whose ends weights are collected, the last so many, for their mean (Izmailov et al. 2018), evaluated
    beside the last weights as ``swa`` with batch-norm statistics estimated anew; 0: none."""
    views: tuple[str, ...] = ()
    """Test-time augmentations evaluated beside the plain test images: see ``VIEWS``."""
    async_workers: int = 1
    """Workers that compute gradients side by side from weights that may be stale by the time they are applied."""

    def __post_init__(self) -> None:
        whole = {"epochs": 1, "batch_size": 1, "crop": 0, "cycles": 1, "swa_epochs": 0, "async_workers": 1}
        for name, low in whole.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UserError(f"recipe.{name} must be at least {low}, not {value}")
        if self.async_workers > MOST_WORKERS:
            raise UserError(f"recipe.async_workers must be at most {MOST_WORKERS}, not {self.async_workers}")
        for name in ("learning_rate", "warmup_epochs", "weight_decay", "bias_lr_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"recipe.{name} must be a finite number, at least 0, not {value}")
        for name in ("momentum", "label_smoothing", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"recipe.{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if self.epochs % self.cycles:
            raise UserError(
                f"recipe.epochs must be a multiple of recipe.cycles, but {self.epochs} / {self.cycles} is not whole"
            )
        if self.cycles > 1 and self.warmup_epochs >= self.epochs // self.cycles:
            raise UserError(
                f"recipe.warmup_epochs is {self.warmup_epochs:g}, not shorter than a cycle of "
                f"{self.epochs // self.cycles} epochs (recipe.epochs / recipe.cycles)"
            )
        if self.swa_epochs > self.epochs:
            raise UserError(f"recipe.swa_epochs is {self.swa_epochs}, more than the {self.epochs} epochs trained")
        if self.cycles > 1 and (self.ema_decay or self.swa_epochs):
            raise UserError(
                "recipe.cycles averages logits, recipe.ema_decay and recipe.swa_epochs weights: set one kind"
            )
        for view in self.views:
            if view not in VIEWS:
                raise unknown("recipe.views", view, VIEWS)
        if len(set(self.views)) < len(self.views):
            raise UserError("recipe.views names one view twice")
        if self.schedule not in SCHEDULES:
            raise unknown("recipe.schedule", self.schedule, SCHEDULES)
        if self.dtype not in DTYPES:
            raise unknown("recipe.dtype", self.dtype, DTYPES)

    @property
    def augments(self) -> bool:
        """Whether training images are changed at random (known once the dataset's standard has been filled in)."""
        return bool(self.crop) or bool(self.flip)

    @property
    def cycle_epochs(self) -> int:
        """Epochs of one schedule."""
        return self.epochs // self.cycles
