"""The life of one run, the same for every framework: start or resume, epochs, evaluation, digests, outcome."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocols.contract import (
    PLAIN,
    Checkpoint,
    Context,
    Dataset,
    Epoch,
    Interrupted,
    Network,
    Outcome,
    Variant,
    View,
)
from protocols.digest import digest
from protocols.run import Run
from trainers.asynchrony import Commits, Schedule
from trainers.batches import EpochPlan, plan_epoch, steps_per_epoch
from trainers.evaluation import evaluate
from trainers.initial import initial_weights, perturb
from trainers.views import averaged, views

Tensors = dict[str, NDArray[Any]]
"""Canonical names and layouts."""

PROBES = 256
"""Test examples whose activations ``keep=layers`` compares, at most."""


class Engine(Protocol):
    """One network on one device, as a framework runs it."""

    def load(self, weights: Tensors, momentum: Tensors | None, averages: Tensors | None) -> None:
        """Take these tensors as the state, and forget any gradient under way.

        Args:
            weights: weights and batch-norm statistics.
            momentum: of every trainable tensor; None: zeros.
            averages: the exponential moving averages; None: they start at the weights. Unused without
                ``recipe.ema_decay``.
        """

    def weights(self) -> Tensors:
        """A copy of weights and batch-norm statistics."""

    def momentum(self) -> Tensors:
        """A copy of the momentum of every trainable tensor."""

    def averages(self) -> Tensors:
        """A copy of the moving averages of weights and statistics; empty without ``recipe.ema_decay``."""

    def assign(self, name: str, value: NDArray[Any]) -> None:
        """Replace one tensor; everything else, gradients under way included, stays."""

    def train(self, plan: EpochPlan, start: int, stop: int) -> Any:
        """Take the steps [start, stop) of a plan; returns a handle on their losses without waiting for the device.

        Where the plan has ``commits``, step s applies the gradient of batch ``commits.batches[s]`` at the weights as
        they were after ``commits.reads[s]`` steps of the epoch.
        """

    def race(self, plan: EpochPlan, workers: int) -> tuple[NDArray[np.float64], Commits]:
        """Train an epoch by so many threads on shared weights; the losses by step, and what the race came to."""

    def losses(self, handle: Any) -> NDArray[np.float64]:
        """Wait for the steps of that handle and return their losses, (steps,)."""

    def logits(self, view: View = PLAIN, weights: Mapping[str, NDArray[Any]] | None = None) -> NDArray[np.floating]:
        """Logits of the whole test set in evaluation mode, (test examples, classes); text: (windows length, classes).

        Args:
            view: how the images are looked at.
            weights: other weights and statistics than the engine's own, which stay as they are.
        """

    def logits_by_batch(self, weights: Mapping[str, NDArray[Any]] | None = None) -> Iterator[NDArray[np.floating]]:
        """The plain logits batch by batch, where they are too many to have at once."""

    def reestimated(self, weights: Mapping[str, NDArray[Any]]) -> Tensors:
        """These weights with batch-norm statistics estimated anew: over the plain training examples in their stored
        order, in batches of the recipe's size, the means of the batches' means and unbiased variances, each batch
        weighted by its size."""

    def activations(self, examples: int) -> Iterator[tuple[str, NDArray[np.floating]]]:
        """Layer by layer, the name and the activations on the first test examples, (examples, features)."""

    def device_seconds(self) -> float:
        """Seconds of computing so far, the difference of two calls being what counts: on a GPU by its own clock where
        the framework tells, on a CPU the processor time of all threads."""

    def provenance(self) -> dict[str, Any]:
        """Framework versions, device, determinism flags and threads, as they are in force."""


@dataclass(kw_only=True)
class _State:
    """What a run has gathered so far beside the engine's tensors; all of it goes into checkpoints."""

    epochs: int = 0
    losses: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    history: list[Epoch] = field(default_factory=list)
    initial_digest: str = ""
    first_step_digest: str = ""
    perturbation: dict[str, Any] | None = None
    swa: Tensors = field(default_factory=dict)
    """Sum of the weights at the ends of the epochs that are averaged, float64."""
    logits: Tensors = field(default_factory=dict)
    """Sum over the cycles so far, by variant; ``plain`` is the one without a name."""
    commits: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))


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
    recipe, steps = run.recipe, steps_per_epoch(run, data)
    schedule = Schedule(run, context.commit_log()) if recipe.async_workers > 1 else None
    fingerprint = context.fingerprint(engine.provenance())
    state = _start_or_resume(run, network, context.load_checkpoint(), fingerprint, engine)
    resumed = state.epochs
    timings = {"setup": time.perf_counter() - started, "train": 0.0, "evaluate": 0.0, "device": 0.0}

    status = "ok"
    for epoch in range(resumed, recipe.epochs):
        began, computed = time.perf_counter(), engine.device_seconds()
        commits = None if schedule is None else schedule.epoch(epoch, steps)
        plan = plan_epoch(run, data, network, epoch, commits)
        if schedule is not None and commits is None:
            plan, losses = _race(run, network, plan, epoch, engine, state)
        else:
            losses = _train(run, network, plan, epoch, engine, state)
        state.losses = np.concatenate([state.losses, losses])
        if plan.commits is not None:
            state.commits = np.concatenate([state.commits, plan.commits.log()])
        trained, training = time.perf_counter(), engine.device_seconds() - computed
        tested = evaluate(data, engine)
        diverged = not (np.isfinite(losses).all() and tested.finite)
        if not diverged:
            _collect(run, data, epoch, tested.logits, engine, state)
        ended = time.perf_counter()
        timings["train"] += trained - began
        timings["device"] += training
        timings["evaluate"] += ended - trained
        row = Epoch(
            epoch=epoch + 1,
            learning_rate=float(plan.rates[-1]),
            train_loss=float(np.average(losses, weights=plan.sizes)),
            test_loss=tested.cross_entropy,
            test_accuracy=tested.accuracy,
            seconds=ended - began,
        )
        state.history.append(row)
        state.epochs = epoch + 1
        context.report(row)
        if diverged:
            status = "diverged"
            break
        last = state.epochs == recipe.epochs
        stop = context.should_stop() and not last
        if stop or (not last and context.checkpoint_due()):
            context.save_checkpoint(_checkpoint(state, engine, fingerprint))
        if stop:
            raise Interrupted(f"stopped after epoch {state.epochs} of {recipe.epochs}")

    began = time.perf_counter()
    logits, variants = tested.logits, tuple[Variant, ...]()
    if status == "ok":
        logits, variants = _variants(run, data, logits, engine, state)
    grams = _grams(data, engine) if "layers" in run.keep else {}
    timings["evaluate"] += time.perf_counter() - began
    return Outcome(
        status=status,
        logits=logits,
        weights=engine.weights(),
        losses=state.losses,
        history=tuple(state.history),
        initial_digest=state.initial_digest,
        first_step_digest=state.first_step_digest,
        resumed_epochs=resumed,
        images_per_second=(state.epochs - resumed) * len(data.train_labels) / timings["train"],
        timings=timings,
        perturbation=state.perturbation,
        passes=recipe.cycles if status == "ok" else 1,
        variants=variants,
        commits=None if schedule is None else state.commits,
        grams=grams,
        provenance=engine.provenance(),
        **tested.beyond,
    )


def _start_or_resume(
    run: Run, network: Network, checkpoint: Checkpoint | None, fingerprint: str, engine: Engine
) -> _State:
    # Going on from another kind of machine would mix the bits of two in one run; starting again never does.
    if checkpoint is not None and checkpoint.fingerprint == fingerprint:
        tensors = checkpoint.tensors
        engine.load(_part(tensors, "weights/"), _part(tensors, "momentum/"), _part(tensors, "ema/") or None)
        described = tensors.get("perturbation")
        return _State(
            epochs=checkpoint.epochs,
            losses=checkpoint.losses,
            history=list(checkpoint.history),
            initial_digest=checkpoint.initial_digest,
            first_step_digest=checkpoint.first_step_digest,
            perturbation=None if described is None else json.loads(described.tobytes()),
            swa=_part(tensors, "swa/"),
            logits=_part(tensors, "logits/"),
            commits=tensors["commits"],
        )
    state, weights = _State(), initial_weights(run, network)
    first = run.perturb is not None and run.perturb.epoch == run.perturb.step == 0
    if first:
        weights, state.perturbation = perturb(run, network, weights, 0)
    engine.load(weights, None, None)
    # Taken from the device, so that it proves what the training starts from.
    state.initial_digest = digest(engine.weights())
    if state.perturbation is not None:
        _prove(state.perturbation, weights, engine)
    return state


def _train(
    run: Run, network: Network, plan: EpochPlan, epoch: int, engine: Engine, state: _State
) -> NDArray[np.float64]:
    """One epoch that follows its plan; the losses by step."""
    change = _perturbed_step(run, plan.steps, epoch, state)
    first = int(np.flatnonzero(plan.rates)[0]) + 1 if not state.first_step_digest and plan.rates.any() else None
    done, handles = 0, []
    for stop in sorted({step for step in (change, first, plan.steps) if step is not None}):
        if stop > done:
            handles.append(engine.train(plan, done, stop))
            done = stop
        if stop == first:
            state.first_step_digest = digest(engine.weights())
        if stop == change:
            _perturb(run, network, epoch * plan.steps + stop, engine, state)
    return np.concatenate([engine.losses(handle) for handle in handles])


def _race(
    run: Run, network: Network, plan: EpochPlan, epoch: int, engine: Engine, state: _State
) -> tuple[EpochPlan, NDArray[np.float64]]:
    """One epoch in which threads race; what it came to, as a plan, and the losses by step."""
    if _perturbed_step(run, plan.steps, epoch, state) is not None:
        _perturb(run, network, epoch * plan.steps, engine, state)
    losses, commits = engine.race(plan, run.recipe.async_workers)
    return dataclasses.replace(plan, commits=commits), losses


def _perturbed_step(run: Run, steps: int, epoch: int, state: _State) -> int | None:
    """The step of this epoch before which weights are changed, or None."""
    if run.perturb is None or state.perturbation is not None:
        return None
    at, step = divmod(run.perturb.epoch * steps + run.perturb.step, steps)
    return step if at == epoch else None


def _perturb(run: Run, network: Network, step: int, engine: Engine, state: _State) -> None:
    weights, state.perturbation = perturb(run, network, engine.weights(), step)
    name = state.perturbation["tensor"]
    engine.assign(name, weights[name])
    _prove(state.perturbation, weights, engine)


def _prove(perturbation: dict[str, Any], weights: Tensors, engine: Engine) -> None:
    """Read the weights back from the device: the change is there, and nothing but the change."""
    perturbation["digest"] = digest(engine.weights())
    if perturbation["digest"] != digest(weights):
        raise RuntimeError("the device does not hold the perturbed weights bit for bit")


def _collect(run: Run, data: Dataset, epoch: int, logits: NDArray[np.floating], engine: Engine, state: _State) -> None:
    """At the end of an epoch, gather what averages over epochs need."""
    recipe = run.recipe
    if epoch >= recipe.epochs - recipe.swa_epochs:
        for name, tensor in engine.weights().items():
            state.swa[name] = state.swa.get(name, 0.0) + tensor.astype(np.float64)
    if (recipe.cycles > 1 or recipe.views) and (epoch + 1) % recipe.cycle_epochs == 0:
        found = averaged(engine.logits, recipe.views, photographs=data.photographs is not None)
        for name, values in [("plain", logits), *((name, mean) for name, (mean, _) in found.items())]:
            state.logits[name] = state.logits.get(name, 0.0) + values.astype(np.float64)


def _variants(
    run: Run, data: Dataset, logits: NDArray[np.floating], engine: Engine, state: _State
) -> tuple[NDArray[np.floating], tuple[Variant, ...]]:
    """The logits of the finished run, and of everything else that was asked for."""
    recipe, photographs = run.recipe, data.photographs is not None
    counts = {name: len(views(name, photographs=photographs)) for name in recipe.views}
    means = {name: (total / recipe.cycles).astype(logits.dtype) for name, total in state.logits.items()}
    found = [Variant(name=name, passes=counts[name] * recipe.cycles, logits=means[name]) for name in recipe.views]
    others = {}
    if recipe.ema_decay:
        others["ema"] = engine.averages()
    if recipe.swa_epochs:
        mean = {name: (total / recipe.swa_epochs).astype(recipe.dtype) for name, total in state.swa.items()}
        others["swa"] = engine.reestimated(mean)
    for name, weights in others.items():

        def look(view: View, weights: Tensors = weights) -> NDArray[np.floating]:
            return engine.logits(view, weights)

        tested = evaluate(data, engine, weights)
        found.append(Variant(name=name, passes=1, logits=tested.logits, **tested.beyond))
        for view, (values, passes) in averaged(look, recipe.views, photographs=photographs).items():
            found.append(Variant(name=f"{name}+{view}", passes=passes, logits=values.astype(logits.dtype)))
    return (means["plain"] if recipe.cycles > 1 else logits), tuple(found)


def _grams(data: Dataset, engine: Engine) -> dict[str, NDArray[np.floating]]:
    grams = {}
    for name, values in engine.activations(min(PROBES, data.test_examples)):
        features = values.astype(np.float64)
        with np.errstate(over="ignore"):  # of a network about to diverge
            grams[name] = (features @ features.T).astype(np.float32)
    return grams


def _checkpoint(state: _State, engine: Engine, fingerprint: str) -> Checkpoint:
    parts = {
        "weights": engine.weights(),
        "momentum": engine.momentum(),
        "ema": engine.averages(),
        "swa": state.swa,
        "logits": state.logits,
    }
    tensors = {f"{part}/{name}": tensor for part, values in parts.items() for name, tensor in values.items()}
    tensors["commits"] = state.commits
    if state.perturbation is not None:
        tensors["perturbation"] = np.frombuffer(json.dumps(state.perturbation).encode(), np.uint8)
    return Checkpoint(
        epochs=state.epochs,
        tensors=tensors,
        losses=state.losses,
        history=tuple(state.history),
        initial_digest=state.initial_digest,
        first_step_digest=state.first_step_digest,
        fingerprint=fingerprint,
    )


def _part(tensors: Mapping[str, NDArray[Any]], prefix: str) -> Tensors:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
