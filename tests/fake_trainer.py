"""A trainer, a dataset and misbehaviour for tests of everything around training: NumPy only, milliseconds an epoch.

A "network" is one matrix; an epoch adds noise that depends on every source. Workers are asynchronous in that the noise
depends on how stale each step is, and they race in that chance decides it.

A file in the folder NOISEGRID_FAKE makes a run misbehave: ``WHAT-REPLICATE``, taken away by the run that obeys it, or
``WHAT-REPLICATE-always``. One named ``wrong.DEVICE`` makes a device compute something else, ``flaky.DEVICE`` something
else each time, and ``broken.DEVICE`` nothing at all; a device is known by CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols import streams
from protocols.contract import (
    Checkpoint,
    Context,
    Dataset,
    Epoch,
    Interrupted,
    Network,
    Outcome,
    Parameter,
    Trainer,
    Variant,
)
from protocols.digest import digest
from protocols.recipe import Recipe
from protocols.run import Run
from trainers.asynchrony import Schedule
from trainers.datasets import from_arrays

STEPS = 4
"""Steps of an epoch."""


def architecture(net: Any, x: Any, classes: int) -> Any:
    """Stands in for an architecture; the network is the same whatever is asked for."""
    return x


def network(architecture: Any, image_shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Network:
    pixels = int(np.prod(image_shape))
    return Network(
        parameters=(
            Parameter(name="head.weight", shape=(classes, pixels), law="normal", scale=0.1),
            Parameter(name="norm.mean", shape=(classes,), law="constant", scale=0.0, trainable=False),
        ),
        dropout={"head": ((pixels,), 0.1)},
        perturbed="head.weight",
        head="head.weight",
        layers=("head",),
    )


def environment(profile: str, threads: int, gpus: float) -> dict[str, str]:
    return {"FAKE_PROFILE": profile, "OMP_NUM_THREADS": str(threads)}


def train(run: Run, data: Dataset, context: Context) -> Outcome:
    assert os.environ.get("FAKE_PROFILE", "held") == run.profile, "the process has another profile than the run"
    provenance = {
        "device": context.device,
        "threads": context.threads,
        "torch": os.environ.get("FAKE_VERSION", "1.0"),
    }
    if "FAKE_SILENT" not in os.environ:
        context.fingerprint(provenance)
    schedule = Schedule(run, context.commit_log()) if run.recipe.async_workers > 1 else None
    shape = (data.classes, int(np.prod(data.image_shape)))
    weights = streams.initial_normal(run, "head.weight", shape, 0.1).astype(np.float32)
    perturbation, commits = None, np.zeros((0, 3), np.int64)
    initial, history, losses, resumed = digest({"head.weight": weights}), [], np.zeros(0), 0
    if (checkpoint := context.load_checkpoint()) is not None:
        weights, losses, resumed = checkpoint.tensors["weights/head.weight"], checkpoint.losses, checkpoint.epochs
        initial, history = checkpoint.initial_digest, list(checkpoint.history)
        commits, perturbation = checkpoint.tensors["commits"], json.loads(checkpoint.tensors["perturbation"].tobytes())
    if "FAKE_QUIET" not in os.environ:
        print(f"training replicate {run.replicate} from epoch {resumed}", flush=True)
    for epoch in range(resumed + 1, run.recipe.epochs + 1):
        started = time.perf_counter()
        time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
        if run.perturb is not None and run.perturb.epoch == epoch - 1:
            weights, changed = streams.perturbed(run, weights)
            perturbation = {"tensor": "head.weight", "step": STEPS * (epoch - 1), **changed}
            perturbation["digest"] = digest({"head.weight": weights})
            initial = perturbation["digest"] if epoch == 1 else initial
        if schedule is not None:
            planned = schedule.epoch(epoch - 1, STEPS)
            commits = np.concatenate([commits, _race() if planned is None else planned.log()])
        for step in range(STEPS):
            for source in ("shuffle", "augment", "dropout", "library"):
                noise = streams.generator(run, source, epoch, step).standard_normal(shape).astype(np.float32)
                # Not linear, so that a change of one bit grows.
                weights = np.sin(np.float32(3) * weights) + np.float32(0.1) * noise
            if schedule is not None:
                weights = weights + np.float32(0.1) * commits[STEPS * (epoch - 1) + step, 2]
            losses = np.append(losses, float(np.abs(weights).mean()))
        weights = weights + _fault()
        if run.recipe.learning_rate > 100:
            losses[-1] = np.nan
        row = Epoch(
            epoch=epoch,
            learning_rate=run.recipe.learning_rate,
            train_loss=float(losses[-1]),
            test_loss=float(losses[-1]),
            test_accuracy=0.5,
            seconds=time.perf_counter() - started,
        )
        history.append(row)
        context.report(row)
        last = epoch == run.recipe.epochs
        stop = context.should_stop() and not last
        if stop or (not last and context.checkpoint_due()):
            context.save_checkpoint(
                Checkpoint(
                    epochs=epoch,
                    tensors={
                        "weights/head.weight": weights,
                        "commits": commits,
                        "perturbation": np.frombuffer(json.dumps(perturbation).encode(), np.uint8),
                    },
                    losses=losses,
                    history=tuple(history),
                    initial_digest=initial,
                    first_step_digest="first",
                )
            )
        if stop:
            raise Interrupted
        if epoch == resumed + 1:
            _misbehave(run)
    trained = {"head.weight": weights, "norm.mean": weights.mean(axis=1)}
    logits = evaluate(run, data, context, trained, reestimate=False)
    return Outcome(
        status="diverged" if np.isnan(losses[-1]) else "ok",
        logits=logits,
        weights=trained,
        losses=losses,
        history=tuple(history),
        initial_digest=initial,
        first_step_digest="first",
        resumed_epochs=resumed,
        images_per_second=1000.0,
        timings={"train": 0.1},
        perturbation=perturbation,
        variants=tuple(Variant(name=name, passes=2, logits=2 * logits) for name in run.recipe.views),
        commits=None if schedule is None else commits,
        grams={"head": (logits @ logits.T)[:4, :4]} if "layers" in run.keep else {},
        provenance=provenance,
    )


def evaluate(
    run: Run, data: Dataset, context: Context, weights: Mapping[str, NDArray[Any]], reestimate: bool
) -> NDArray[np.floating]:
    images = data.test_images.reshape(len(data.test_images), -1).astype(np.float32) / np.float32(255)
    return images @ weights["head.weight"].T


def _race() -> NDArray[np.int64]:
    """An epoch's log as chance will have it."""
    rng = np.random.default_rng()
    reads = [rng.integers(0, step + 1) for step in range(STEPS)]
    return np.stack([rng.integers(0, 2, STEPS), rng.permutation(STEPS), reads], axis=1)


def _fault() -> np.float32:
    """What this device adds to every weight in an epoch; 0 where it is in order."""
    folder, device = os.environ.get("NOISEGRID_FAKE"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if folder is None or not device:
        return np.float32(0)
    if Path(folder, f"broken.{device}").exists():
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    wrong, flaky = (Path(folder, f"{kind}.{device}").exists() for kind in ("wrong", "flaky"))
    return np.float32(0.5 * wrong + flaky * np.random.default_rng().random())


_kept: list[bytes] = []


def _misbehave(run: Run) -> None:
    """After the first epoch, do what the folder says."""
    if "NOISEGRID_FAKE" not in os.environ:
        return
    for path in sorted(Path(os.environ["NOISEGRID_FAKE"]).iterdir()):
        what, _, rest = path.name.partition("-")
        replicate, *always = rest.split("-")
        if replicate != str(run.replicate):
            continue
        if not always:
            path.unlink()
        print(f"about to {what}", flush=True)
        match what:
            case "raise":
                raise ValueError("a mistake in the trainer")
            case "memory":
                raise MemoryError("no room")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "hang":
                ctypes.PyDLL(None).sleep(600)  # holds the interpreter, so that no other thread runs
            case "parent":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(600)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "illegal":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case "abort":
                os.write(2, b"F cuda_event.cc:28] CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure\n")
                os.abort()
            case "silent":
                os._exit(0)
            case "leave":
                sys.exit(0)
            case "segfault":
                ctypes.string_at(0)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            case "close":
                os.closerange(3, 256)
            case "fork":  # The connection stays open in a process of its own.
                if os.fork() == 0:
                    _linger()
                os._exit(3)
            case "escape":  # Into a session of its own, and without a parent.
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        _linger()
                    os._exit(0)
                os.wait()
                raise ValueError("left somebody behind")
            case "print":
                for _ in range(2**10):
                    os.write(1, b"0123456789abcde\n" * 2**16)
                raise ValueError("said it all")
            case "fill":
                Path(tempfile.gettempdir(), "large").write_bytes(bytes(2**23))
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as if the disk were full
            case "hog":
                _kept.extend(_filled(2**26) for _ in range(2**4))
                time.sleep(600)
            case "leak":
                _kept.append(_filled(2**26))


def _linger() -> None:
    """Leave the number of this process and stay."""
    Path(os.environ["NOISEGRID_FAKE"], "lingering").write_text(str(os.getpid()))
    while True:
        time.sleep(600)


def _filled(size: int) -> bytes:
    """Memory that is really there."""
    return b"x" * size


trainer = Trainer(
    name="fake",
    numerics=1,
    framework="numpy",
    extra="torch",
    train="tests.fake_trainer:train",
    evaluate="tests.fake_trainer:evaluate",
    network=network,
    environment=environment,
    sources=frozenset({"init", "shuffle", "augment", "dropout", "library", "onebit", "async", "hardware"}),
    library_kinds=("order", "kernel", "native"),
    kernels=3,
)

_rng = np.random.default_rng(0)
_labels = np.arange(60) % 3

blobs = from_arrays(
    name="blobs",
    train_images=_rng.integers(0, 256, (60, 4, 4, 1)).astype(np.uint8),
    train_labels=_labels,
    test_images=_rng.integers(0, 256, (60, 4, 4, 1)).astype(np.uint8),
    test_labels=_labels,
    crop=1,
)
