"""What ``onebit`` changes: which weight, how, and after how many steps of training."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from protocols.errors import UserError, unknown

DIRECTIONS = ("either", "up", "down")
KINDS = ("ulp", "gaussian")


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """A change of a network's weights. The default is that of Summers & Dinneen (ICML 2021, section 4): one element of
    the first layer's weight, drawn by replicate, moves to the neighbouring floating-point number.

    Raises:
        UserError: a value lies outside its range.
    """

    tensor: str = "first"
    """``first``: the first layer's weight; ``last``: the classifier's weight; else a parameter's own name."""
    element: int | None = None
    """Flat index (row-major, canonical layout) of the element; None: drawn among those that are not 0."""
    direction: str = "either"
    """``up`` or ``down``, or drawn: ``either``."""
    kind: str = "ulp"
    """``ulp``: to the neighbouring number; ``gaussian``: normal noise of SD ``scale`` x the tensor's own SD."""
    scale: float = 1e-3
    """Of ``gaussian``."""
    fraction: float = 0.0
    """Share of the tensor's elements (of those that are not 0) that change, drawn by replicate; 0: one element."""
    step: int = 0
    """Steps of the epoch that are taken before the change."""
    epoch: int = 0
    """Whole epochs that are trained before the change."""

    def __post_init__(self) -> None:
        for name in ("step", "epoch", "element"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"perturb.{name} must be at least 0, not {value}")
        if self.direction not in DIRECTIONS:
            raise unknown("perturb.direction", self.direction, DIRECTIONS)
        if self.kind not in KINDS:
            raise unknown("perturb.kind", self.kind, KINDS)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise UserError(f"perturb.scale must be a finite number above 0, not {self.scale}")
        if self.kind == "ulp" and self.scale != Perturbation.scale:
            raise UserError("perturb.scale is of noise (perturb.kind=gaussian); a change by one ulp has none")
        if not 0 <= self.fraction <= 1:
            raise UserError(f"perturb.fraction must lie between 0 and 1, not {self.fraction}")
        if self.element is not None and self.fraction:
            raise UserError(
                "perturb.element names one element and perturb.fraction a share of them: set one of the two"
            )
        if self.kind == "gaussian" and self.direction != "either":
            raise UserError("perturb.direction is of a change by one ulp; noise (perturb.kind=gaussian) has none")
        if not self.tensor:
            raise UserError("perturb.tensor must be 'first', 'last' or a parameter's name")

    @property
    def label(self) -> str:
        """What differs from the default, as ``step=10 tensor=last``; empty for the default."""
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join(changed)
