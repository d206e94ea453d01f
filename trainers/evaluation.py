"""A network on the test set: its logits, and what they come to where a vocabulary makes them too many to hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protocols.contract import Dataset

if TYPE_CHECKING:
    from trainers.loop import Engine

LOGITS_LIMIT = 10_000_000
"""Logits of text that are kept, at most: those of the first tokens. Those of Penn Treebank's test set take 3.3 GB."""

BLOCK = 1 << 20
"""Logits that are worked on at once in float64, where not all are kept."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation of the whole test set came to."""

    logits: NDArray[np.floating]
    """(kept examples, classes): the first ones."""
    cross_entropy: float
    """Mean over all examples, in nats and float64."""
    accuracy: float
    """0 to 1, over all examples."""
    finite: bool
    """Whether every logit was, kept or not."""
    predictions: NDArray[np.int32] | None
    """(examples,) where logits were left out; None: they follow from ``logits``."""

    @property
    def beyond(self) -> dict[str, Any]:
        """What does not follow from ``logits``, as fields of an outcome or a variant."""
        if self.predictions is None:
            return {}
        return {"predictions": self.predictions, "cross_entropy": self.cross_entropy}


def kept_examples(examples: int, classes: int, *, is_text: bool) -> int:
    """Of how many test examples logits are kept: of all images, and of text of the first tokens that fit."""
    return min(examples, max(1, LOGITS_LIMIT // classes)) if is_text else examples


def evaluate(data: Dataset, engine: Engine, weights: Mapping[str, NDArray[Any]] | None = None) -> Evaluation:
    """Test an engine's network, or one with other weights and statistics.

    Memory: all logits, or, where they are too many, those of one batch and those that are kept.
    """
    labels = data.test_labels
    rows = kept_examples(len(labels), data.classes, is_text=data.is_text)
    if rows == len(labels):
        logits = engine.logits(weights=weights)
        return Evaluation(
            logits=logits,
            cross_entropy=float(np.mean(_cross_entropies(logits, labels))),
            accuracy=float(np.mean(logits.argmax(axis=1) == labels)),
            finite=bool(np.isfinite(logits).all()),
            predictions=None,
        )
    step, done, finite = max(1, BLOCK // data.classes), 0, True
    kept, losses, choices = [], [], []
    for batch in engine.logits_by_batch(weights):
        if done < rows:
            kept.append(batch[: rows - done].copy())
        for start in range(0, len(batch), step):
            part = batch[start : start + step]
            losses.append(_cross_entropies(part, labels[done : done + len(part)]))
            choices.append(part.argmax(axis=1).astype(np.int32))
            finite = finite and bool(np.isfinite(part).all())
            done += len(part)
    predictions = np.concatenate(choices)
    return Evaluation(
        logits=np.concatenate(kept),
        cross_entropy=float(np.mean(np.concatenate(losses))),
        accuracy=float(np.mean(predictions == labels)),
        finite=finite,
        predictions=predictions,
    )


def _cross_entropies(logits: NDArray[np.floating], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """(examples,) in float64."""
    values = logits.astype(np.float64)
    shifted = values - values.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        log_sums = np.log(np.exp(shifted).sum(axis=1))
        losses: NDArray[np.float64] = log_sums - shifted[np.arange(len(labels)), labels]
    return losses
