"""The life of one run, the same for every framework: start or resume, epochs, evaluation, digests, outcome."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocols.contract import Checkpoint, Context, Dataset, Epoch, Interrupted, Network, Outcome
from protocols.digest import digest
from protocols.run import Run
from trainers.batches import EpochPlan, plan_epoch, steps_per_epoch
from trainers.initial import initial_weights, perturb


class Engine(Protocol):
    """One network on one device, as a framework runs it."""

    def load(self, weights: dict[str, NDArray[Any]], momentum: dict[str, NDArray[Any]] | None) -> None:
        """Take these tensors (canonical names and layouts) as the state; momentum None: zeros."""

    def weights(self) -> dict[str, NDArray[Any]]:
        """A copy of weights and batch-norm statistics, canonical names and layouts."""

    def momentum(self) -> dict[str, NDArray[Any]]:
        """A copy of the momentum of every trainable tensor."""

    def train(self, plan: EpochPlan, start: int, stop: int) -> Any:
        """Take the steps [start, stop) of a plan; returns a handle on their losses without waiting for the device."""

    def losses(self, handle: Any) -> NDArray[np.float64]:
        """Wait for the steps of that handle and return their losses, (steps,)."""

    def logits(self) -> NDArray[np.floating]:
        """Logits of the whole test set in evaluation mode, (test examples, classes)."""

    def provenance(self) -> dict[str, Any]:
        """Framework versions, device, determinism flags and threads, as they are in force."""


def fit(run: Run, data: Dataset, network: Network, context: Context, engine: Engine, started: float) -> Outcome:
    """Train one run to its end.

    Args:
        run: the specification.
        data: its examples.
        network: what the architecture consists of.
        context: where epochs and checkpoints go.
        engine: the network on its device; any earlier state is replaced.
        started: ``time.perf_counter()`` when set-up began.

    Raises:
        Interrupted: the context asked to stop; a checkpoint was saved.
    """
    weights, perturbation = perturb(run, network, initial_weights(run, network))
    checkpoint, fingerprint = context.load_checkpoint(), context.fingerprint(engine.provenance())
    if checkpoint is not None and checkpoint.fingerprint != fingerprint:
        # Going on would mix the bits of two kinds of machine in one run; starting again never does.
        checkpoint = None
    if checkpoint is None:
        engine.load(weights, None)
        # Taken from the device, so that it proves what the training starts from.
        initial_digest, first_step_digest = digest(engine.weights()), ""
        losses, history, resumed = np.zeros(0), [], 0
    else:
        engine.load(_part(checkpoint, "weights/"), _part(checkpoint, "momentum/"))
        initial_digest, first_step_digest = checkpoint.initial_digest, checkpoint.first_step_digest
        losses, history, resumed = checkpoint.losses, list(checkpoint.history), checkpoint.epochs
    timings = {"setup": time.perf_counter() - started, "train": 0.0, "evaluate": 0.0}

    steps = steps_per_epoch(run, data)
    status, logits = "ok", np.zeros((0, data.classes))
    for epoch in range(resumed, run.recipe.epochs):
        began = time.perf_counter()
        plan = plan_epoch(run, data, network, epoch)
        done, handles = 0, []
        if not first_step_digest and plan.rates.any():
            done = int(np.flatnonzero(plan.rates)[0]) + 1
            handles.append(engine.train(plan, 0, done))
            first_step_digest = digest(engine.weights())
        if done < steps:
            handles.append(engine.train(plan, done, steps))
        losses = np.concatenate([losses, *(engine.losses(handle) for handle in handles)])
        trained = time.perf_counter()
        logits = engine.logits()
        loss, accuracy = _evaluate(logits, data.test_labels)
        ended = time.perf_counter()
        timings["train"] += trained - began
        timings["evaluate"] += ended - trained
        row = Epoch(
            epoch=epoch + 1,
            learning_rate=float(plan.rates[-1]),
            train_loss=float(np.average(losses[-steps:], weights=_batch_sizes(run, data))),
            test_loss=loss,
            test_accuracy=accuracy,
            seconds=ended - began,
        )
        history.append(row)
        context.report(row)
        if not (np.isfinite(losses[-steps:]).all() and np.isfinite(logits).all()):
            status = "diverged"
            break
        last = epoch + 1 == run.recipe.epochs
        stop = context.should_stop() and not last
        if stop or (not last and context.checkpoint_due()):
            context.save_checkpoint(
                Checkpoint(
                    epochs=epoch + 1,
                    tensors={f"weights/{name}": tensor for name, tensor in engine.weights().items()}
                    | {f"momentum/{name}": tensor for name, tensor in engine.momentum().items()},
                    losses=losses,
                    history=tuple(history),
                    initial_digest=initial_digest,
                    first_step_digest=first_step_digest,
                    fingerprint=fingerprint,
                )
            )
        if stop:
            raise Interrupted(f"stopped after epoch {epoch + 1} of {run.recipe.epochs}")

    images = (len(history) - resumed) * len(data.train_labels)
    return Outcome(
        status=status,
        logits=logits,
        weights=engine.weights(),
        losses=losses,
        history=tuple(history),
        initial_digest=initial_digest,
        first_step_digest=first_step_digest,
        resumed_epochs=resumed,
        images_per_second=images / timings["train"],
        timings=timings,
        perturbation=perturbation,
        provenance=engine.provenance(),
    )


def _part(checkpoint: Checkpoint, prefix: str) -> dict[str, NDArray[Any]]:
    return {name[len(prefix) :]: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)}


def _batch_sizes(run: Run, data: Dataset) -> NDArray[np.int64]:
    starts = np.arange(0, len(data.train_labels), run.recipe.batch_size)
    return np.minimum(run.recipe.batch_size, len(data.train_labels) - starts)


def _evaluate(logits: NDArray[np.floating], labels: NDArray[np.int64]) -> tuple[float, float]:
    """Mean cross-entropy and accuracy, in float64."""
    values = logits.astype(np.float64)
    shifted = values - values.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        log_sums = np.log(np.exp(shifted).sum(axis=1))
        loss = float(np.mean(log_sums - shifted[np.arange(len(labels)), labels]))
    return loss, float(np.mean(values.argmax(axis=1) == labels))
