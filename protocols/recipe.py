"""How a network is trained: every setting that changes the numbers and is not a source of nondeterminism."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocols.errors import UserError, unknown

SCHEDULES = ("cosine", "constant")
DTYPES = ("float32", "float64")


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

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch_size", 1), ("crop", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UserError(f"recipe.{name} must be at least {low}, not {value}")
        for name in ("learning_rate", "warmup_epochs", "momentum", "weight_decay", "bias_lr_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"recipe.{name} must be a finite number, at least 0, not {value}")
        if self.momentum >= 1:
            raise UserError(f"recipe.momentum must be below 1, not {self.momentum}")
        if self.schedule not in SCHEDULES:
            raise unknown("recipe.schedule", self.schedule, SCHEDULES)
        if self.dtype not in DTYPES:
            raise unknown("recipe.dtype", self.dtype, DTYPES)

    @property
    def augments(self) -> bool:
        """Whether training images are changed at random (known once the dataset's standard has been filled in)."""
        return bool(self.crop) or bool(self.flip)
