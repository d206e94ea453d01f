"""The rows that a run leaves: the record of a finished one, the failure of an attempt that did not finish."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator import catalog
from orchestrator.provenance import fingerprint, hardware
from orchestrator.store import Reference
from orchestrator.store.schema import COMMIT
from protocols import streams
from protocols.contract import Dataset, Network, Outcome, Variant, epoch_values
from protocols.digest import digest, labels_fingerprint, tensor_digests
from protocols.run import Run

FLOAT32_LOGITS_LIMIT = 10_000_000
"""Bytes of float32 logits above which a record keeps them rounded to float16."""

_ONEBIT = ("tensor", "index", "before", "after", "step", "elements", "digest")
"""Of :attr:`protocols.contract.Outcome.perturbation`, the parts that records have columns for."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A perturbed run, held against the same run without the perturbation."""

    weights_changed: int
    """Trainable weights whose bits differ at the end."""
    weights_total: int
    predictions_changed: int
    """Test examples that are classified otherwise."""
    first_differing_step: int | None
    """The first step, from 0, whose loss differs; None: none does."""
    distance: float | None
    """L2 norm of the difference of all trainable weights; None where it is not finite, like the next two."""
    cosine: float | None
    """Of the angle between the two vectors of all trainable weights."""
    largest_ulp: int | None
    """The largest number of floating-point values by which a trainable weight differs."""
    barrier_error: float | None = None
    """See :class:`orchestrator.barrier.Barrier`; None where it was not asked for, or a run diverged."""
    barrier_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The circumstances of one attempt at a run."""

    number: int
    """From 1."""
    started: datetime
    finished: datetime
    host: str
    process: str
    """host:pid:start time of the training process."""
    device: str
    """The device it was trained on: the GPU's UUID, or ``cpu``."""


def now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)


def record(
    run: Run,
    source: str,
    outcome: Outcome,
    data: Dataset,
    network: Network,
    attempt: Attempt,
    provenance: Mapping[str, Any],
    comparison: Comparison | None,
) -> dict[str, Any]:
    """The record of a finished run, one value a column of the store's schema."""
    predicted = predictions(outcome)
    ok = outcome.status == "ok"
    logits, precision = rounded(outcome.logits)
    stale = staleness(outcome.commits, len(outcome.history))
    onebit = outcome.perturbation or {}
    compared = {field.name: getattr(comparison, field.name, None) for field in fields(Comparison)}
    return {
        **_identity(run, source, attempt),
        "library": run.library,
        "asynchrony": run.asynchrony,
        "group": run.group,
        "base_seed": run.base_seed,
        "outcome": outcome.status,
        "accuracy": float(np.mean(predicted == data.test_labels)) if ok else None,
        "cross_entropy": _cross_entropy(outcome, data.test_labels) if ok else None,
        "initial_digest": outcome.initial_digest,
        "first_step_digest": outcome.first_step_digest,
        "final_digest": digest(outcome.weights),
        "tensor_digests": tensor_digests(outcome.weights),
        "resumed_epochs": outcome.resumed_epochs,
        "parameters": network.count,
        "logits": logits,
        "logits_precision": precision,
        "passes": outcome.passes,
        "predictions": predicted,
        "labels_fingerprint": labels_fingerprint(data.test_labels),
        "variants": [_variant(variant, data.test_labels) for variant in outcome.variants],
        "losses": outcome.losses.astype(np.float32),
        "history": [epoch_values(epoch) for epoch in outcome.history],
        "staleness_mean": None if stale is None else float(stale.mean()),
        "staleness_max": None if stale is None else int(stale.max()),
        # Any other schedule follows from the specification.
        "commits": _commits(outcome.commits) if run.asynchrony == "real" else [],
        "seconds": (attempt.finished - attempt.started).total_seconds(),
        **{f"{part}_seconds": outcome.timings.get(part, 0.0) for part in ("train", "evaluate", "setup")},
        "images_per_second": outcome.images_per_second,
        **{f"onebit_{name}": onebit.get(name) for name in _ONEBIT},
        **compared,
        "kept": [name for name in ("layers", "weights") if name in run.keep],
        "seeds": {name: json.dumps(key) for name, key in streams.seeds(run).items()},
        "process": attempt.process,
        "device": provenance["trainer"].get("device", "unknown"),
        "hardware": hardware(provenance),
        "provenance": json.dumps(provenance, sort_keys=True),
        "fingerprint": fingerprint(provenance),
    }


def failure(
    run: Run, source: str, attempt: Attempt, outcome: str, message: str, traceback: str = "", log_tail: str = ""
) -> dict[str, Any]:
    """The row of an attempt that left no record.

    Args:
        run: what was to be trained.
        source: the label of its varying sources.
        attempt: which attempt, when and where.
        outcome: ``out_of_memory``, ``error``, ``hardware`` or ``timeout``.
        message: what happened, in one line.
        traceback: the Python traceback, if there was one.
        log_tail: the end of what the process printed.
    """
    return {
        **_identity(run, source, attempt),
        "device": attempt.device,
        "outcome": outcome,
        "message": message,
        "traceback": traceback,
        "log_tail": log_tail,
    }


def predictions(tested: Outcome | Variant) -> NDArray[np.int32]:
    """The most likely class of each test example, the first of equals; (examples,)."""
    return highest(tested.logits) if tested.predictions is None else tested.predictions


def highest(logits: NDArray[np.floating]) -> NDArray[np.int32]:
    """The class with the highest logit of each example, the first of equals; (examples,)."""
    classes: NDArray[np.int32] = logits.argmax(axis=1).astype(np.int32)
    return classes


def cross_entropy(logits: NDArray[np.floating], labels: NDArray[np.int64]) -> float:
    """Mean cross-entropy in nats, in float64."""
    values = logits.astype(np.float64)
    top = values.max(axis=1)
    with np.errstate(invalid="ignore"):  # Infinite logits have no finite cross-entropy.
        # Written out, because importing scipy takes as long as a short run.
        total = np.exp(values - top[:, None]).sum(axis=1)
        return float(np.mean(top + np.log(total) - values[np.arange(len(labels)), labels]))


def rounded(logits: NDArray[np.floating]) -> tuple[NDArray[np.float32], str]:
    """Logits as a record keeps them, float32, and the precision that their values have."""
    kept = logits.astype(np.float32)
    if kept.nbytes > FLOAT32_LOGITS_LIMIT:
        with np.errstate(over="ignore"):
            return kept.astype(np.float16).astype(np.float32), "float16"
    return kept, "float32"


def compare(outcome: Outcome, reference: Reference, network: Network) -> Comparison:
    """Hold a run against its reference, the same run without the perturbation."""
    from orchestrator.analysis.weights import apart  # Only perturbed runs need it, and it brings pandas along.

    names = [parameter.name for parameter in network.parameters if parameter.trainable]
    one, other = (
        np.concatenate([weights[name].ravel() for name in names]) for weights in (outcome.weights, reference.weights)
    )
    weights = apart(one, other)
    return Comparison(
        weights_changed=weights.changed,
        weights_total=weights.size,
        predictions_changed=int(np.count_nonzero(predictions(outcome) != reference.predictions)),
        first_differing_step=first_difference(outcome.losses, reference.losses),
        distance=_finite(weights.distance),
        cosine=_finite(weights.cosine),
        largest_ulp=None if weights.largest_ulp < 0 else min(weights.largest_ulp, 2**63 - 1),
    )


def kept(run: Run, outcome: Outcome) -> dict[str, NDArray[np.floating]]:
    """The tensors that ``run.keep`` asks for: ``weights/NAME`` and ``gram/LAYER``."""
    weights = outcome.weights if "weights" in run.keep else {}
    grams = outcome.grams if "layers" in run.keep else {}
    return {
        **{f"weights/{name}": tensor for name, tensor in weights.items()},
        **{f"gram/{layer}": gram for layer, gram in grams.items()},
    }


def kept_bytes(run: Run, network: Network) -> int:
    """How many bytes :func:`kept` takes, at most."""
    elements = sum(math.prod(parameter.shape) for parameter in network.parameters)
    probes = catalog.probes() if run.dataset.test_size is None else min(catalog.probes(), run.dataset.test_size)
    return elements * np.dtype(run.recipe.dtype).itemsize * ("weights" in run.keep) + len(
        network.layers
    ) * probes * probes * np.dtype(np.float32).itemsize * ("layers" in run.keep)


def logits_bytes(run: Run, logits: int) -> int:
    """About how much of a record its logits take, those of its variants included.

    Args:
        run: says how often the test set is evaluated.
        logits: how many an evaluation keeps.
    """
    recipe = run.recipe
    evaluations = (1 + bool(recipe.ema_decay) + bool(recipe.swa_epochs)) * (1 + len(recipe.views))
    # Rounded values lie in four bytes each, of which compression leaves two.
    return evaluations * logits * (4 if 4 * logits <= FLOAT32_LOGITS_LIMIT else 2)


def staleness(commits: NDArray[np.int64] | None, epochs: int) -> NDArray[np.int64] | None:
    """(steps,) Steps between reading the weights and applying the gradient.

    Args:
        commits: (steps, 3), see :attr:`protocols.contract.Outcome.commits`; its steps are counted within an epoch.
        epochs: how many epochs it covers.
    """
    if commits is None or not len(commits):
        return None
    steps: NDArray[np.int64] = np.arange(len(commits)) % (len(commits) // epochs)
    return steps - commits[:, 2]


def first_difference(losses: NDArray[np.floating], reference: NDArray[np.floating]) -> int | None:
    """The first step at which two series of losses differ; a series that ends earlier differs where it ends."""
    shared = min(len(losses), len(reference))
    one, other = losses[:shared], reference[:shared]
    steps = np.flatnonzero((one != other) & ~(np.isnan(one) & np.isnan(other)))
    if len(steps):
        return int(steps[0])
    return shared if len(losses) != len(reference) else None


def _identity(run: Run, source: str, attempt: Attempt) -> dict[str, Any]:
    """The columns that records and failures share."""
    return {
        "id": run.id,
        "source": source,
        "architecture": run.architecture,
        "dataset": str(run.dataset),
        "trainer": run.trainer,
        "replicate": run.replicate,
        "attempt": attempt.number,
        "started": attempt.started,
        "finished": attempt.finished,
        "host": attempt.host,
        "specification": run.specification,
    }


def _cross_entropy(tested: Outcome | Variant, labels: NDArray[np.int64]) -> float:
    return cross_entropy(tested.logits, labels) if tested.cross_entropy is None else tested.cross_entropy


def _variant(variant: Variant, labels: NDArray[np.int64]) -> dict[str, Any]:
    finite = bool(np.isfinite(variant.logits).all()) and math.isfinite(variant.cross_entropy or 0.0)
    return {
        "name": variant.name,
        "passes": variant.passes,
        "accuracy": float(np.mean(predictions(variant) == labels)) if finite else None,
        "cross_entropy": _cross_entropy(variant, labels) if finite else None,
        "logits": rounded(variant.logits)[0],
    }


def _commits(commits: NDArray[np.int64] | None) -> list[dict[str, int]]:
    return [] if commits is None else [dict(zip(COMMIT.names, row, strict=True)) for row in commits.tolist()]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
