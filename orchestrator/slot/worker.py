"""The process that trains: it takes runs from its supervisor one by one and commits a record for each.

``python -m orchestrator.slot.worker`` is started by :class:`orchestrator.slot.supervisor.Supervisor` for one trainer
and one determinism profile, and stays warm from run to run. The two exchange JSON over an inherited connection.
:func:`execute` does the same for one run in the caller's process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator import catalog, devices, provenance, records
from orchestrator.barrier import barrier
from orchestrator.slot import glimpse, memory, processes
from orchestrator.slot.context import Listener, OtherHardware, RunContext, Settings, check_hardware
from orchestrator.slot.outcomes import error_outcome
from orchestrator.slot.retrying import patiently
from orchestrator.store import Reference, Store, StoreError, open_store
from protocols.contract import Dataset, Interrupted, Outcome
from protocols.errors import UserError
from protocols.protocol import DatasetSpec
from protocols.run import Run, run_from_specification

_PR_SET_PDEATHSIG = 1


def execute(
    run: Run,
    source: str,
    store: Store,
    data: Dataset,
    settings: Settings,
    *,
    listener: Listener = lambda message: None,
    stop: Callable[[], bool] = lambda: False,
    between_runs: Mapping[str, Any] | None = None,
    log: NDArray[np.int64] | None = None,
) -> dict[str, Any] | None:
    """Train one run in this process and commit its record.

    The process must have been started with the environment of the run's determinism profile.

    Args:
        run: what to train.
        source: the label of its varying sources.
        store: where the record goes.
        data: the run's dataset.
        settings: device, threads and intervals.
        listener: is told of the start and of every epoch.
        stop: whether to end early, asked at the end of each epoch.
        between_runs: what came of the command before the run, for the record's provenance.
        log: what asynchronous training must follow, see :attr:`protocols.contract.Outcome.commits`.

    Returns:
        The record's row; None if the store had a record of this run already, which is never trained again.

    Raises:
        Interrupted: it was stopped; a checkpoint was saved.
        OtherHardware: its group has trained on other hardware.
        StoreError: the store refused, several times over.
    """
    if patiently(lambda: store.has(run.id)):
        return None
    train = catalog.train(run.trainer)  # Imports the framework, which is not the run's time.
    number = patiently(lambda: store.begin(run.id))
    listener({"kind": "started", "id": run.id, "attempt": number, "images": len(data.train_labels)})
    started = records.now()
    with RunContext(run, store, settings, listener, number, stop, log) as context:
        outcome = train(run, data, context)
        finished = records.now()
        network = catalog.trainer(run.trainer).network(
            catalog.architecture(run.architecture), data.image_shape, data.classes, run.recipe
        )
        origin = provenance.provenance(outcome.provenance, between_runs)
        origin["device_seconds"] = outcome.timings.get("device")
        device = devices.device(settings.gpus)
        origin["slot"] = {
            "supervisor": os.getppid(),
            "device": device,
            "devices": list(context.devices),
            "gpus": settings.gpus,
            "memory_limit": settings.memory_limit,
        }
        # Again, since not every trainer asks for its fingerprint.
        check_hardware(run, origin, store.hardware(run.group))
        ending = _ending(outcome, provenance.fingerprint(origin), context)
        comparison = None
        # Released kernels end elsewhere every time: there is no unchanged run whose difference would be the bit's.
        if "onebit" in run.varies and run.library != "native":
            reference = _reference(run, outcome, ending.fingerprint, store, data, settings, listener, stop)
            comparison = records.compare(outcome, reference, network)
            origin["slot"]["devices"] = sorted({*context.devices, *reference.devices})
            if "barrier" in run.keep:
                comparison = _with_barrier(comparison, run, data, context, outcome, reference)
        attempt = records.Attempt(
            number=number,
            started=started,
            finished=finished,
            host=socket.gethostname(),
            process=process(),
            device=device,
        )
        row = records.record(run, source, outcome, data, network, attempt, origin, comparison)
        patiently(lambda: _save(run, outcome, ending, row, data, origin, store))
    return row


def _save(
    run: Run,
    outcome: Outcome,
    ending: Reference,
    row: Mapping[str, Any],
    data: Dataset,
    origin: Mapping[str, Any],
    store: Store,
) -> None:
    """Commit a run's record, after all that it refers to. Bears repetition."""
    if not run.varies and run.replicate == 0:
        # What the group's onebit runs are held against: one set of weights a group.
        store.save_reference(run.id, ending)
    if kept := records.kept(run, outcome):
        store.save_kept(run.id, kept)
    store.put_labels(row["labels_fingerprint"], data.test_labels)
    if "hardware" not in run.varies:  # Only now: a run that fails must not bind the others of its group.
        check_hardware(run, origin, store.claim_hardware(run.group, row["hardware"]))
    store.commit(row)


def _reference(
    run: Run,
    outcome: Outcome,
    mark: str,
    store: Store,
    data: Dataset,
    settings: Settings,
    listener: Listener,
    stop: Callable[[], bool],
) -> Reference:
    """How a perturbed run ends without the perturbation, under the fingerprint ``mark``.

    It is what the store kept of that run, else it is trained here, unrecorded. A run is a pure function of its
    specification, so it does not matter who trains it; while another process is at it, waiting for that one would take
    as long. Threads that raced are no such function: there the unperturbed run follows the log of the race.
    """
    unperturbed, raced = run.without("onebit"), run.asynchrony == "real"
    log = outcome.commits if raced else None
    context = RunContext(unperturbed, store, settings, listener, None, stop, log)
    kept = None if raced else patiently(lambda: store.load_reference(unperturbed.id))
    if kept is not None and kept.fingerprint == mark and context.trusts(kept.devices):
        return kept
    reference = _ending(catalog.train(run.trainer)(unperturbed, data, context), mark, context)
    if not raced:
        patiently(lambda: store.save_reference(unperturbed.id, reference))
        patiently(lambda: store.delete_checkpoint(unperturbed.id))
    return reference


def _ending(outcome: Outcome, mark: str, context: RunContext) -> Reference:
    return Reference(
        weights=dict(outcome.weights),
        losses=outcome.losses,
        predictions=records.predictions(outcome),
        fingerprint=mark,
        devices=context.devices,
    )


def _with_barrier(
    comparison: records.Comparison, run: Run, data: Dataset, context: RunContext, outcome: Outcome, reference: Reference
) -> records.Comparison:
    evaluate = catalog.evaluate(run.trainer)

    def logits(weights: Mapping[str, NDArray[Any]]) -> NDArray[np.floating]:
        return evaluate(run, data, context, weights, reestimate=True)

    found = barrier(logits, outcome.weights, reference.weights, data.test_labels)
    if found is None:
        return comparison
    return dataclasses.replace(comparison, barrier_error=found.error, barrier_loss=found.loss)


@functools.cache
def process() -> str:
    """Names this process for all time: host:pid:start time."""
    try:
        ticks = int(processes.began(os.getpid()) or "")
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        began = int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, StopIteration):
        began = time.time()
    return f"{socket.gethostname()}:{os.getpid()}:{began:.2f}"


def main() -> None:
    """Serve the supervisor at the other end of an inherited connection until it closes it or dies.

    The arguments are the supervisor's process id, the number of the file descriptor, and the settings as JSON.
    """
    parent, descriptor, settings = int(sys.argv[1]), int(sys.argv[2]), Settings(**json.loads(sys.argv[3]))
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle.
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())

    connection = Connection(descriptor)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()

    def reply(message: Mapping[str, Any]) -> None:
        connection.send_bytes(json.dumps(message).encode())

    audit: memory.Audit | None = None
    while True:
        request = inbox.get()
        answer = _serve(request, settings, reply, stopping.is_set)
        run = run_from_specification(request["specification"])
        audit = audit or memory.Audit(settings.memory_margin, functools.partial(memory.own, _framework(run)))
        answer["grown"] = audit.grown() or ""
        reply(answer)


def _serve(request: Mapping[str, Any], settings: Settings, reply: Listener, stop: Callable[[], bool]) -> dict[str, Any]:
    """Execute one request; the reply that ends it."""
    run = run_from_specification(request["specification"])
    try:
        data = _data(run.dataset, settings)
        _check_unchanged(run, data)
        if request["canary"]:
            return {"kind": "canary", "id": run.id, **glimpse.first_epoch(run, data, settings, reply)}
        log = None if request["log"] is None else np.array(request["log"], np.int64)
        row = execute(
            run,
            request["source"],
            _store(settings.store),
            data,
            settings,
            listener=reply,
            stop=stop,
            between_runs=request["between_runs"],
            log=log,
        )
    except Interrupted:
        return {"kind": "interrupted", "id": run.id}
    except StoreError as error:
        return {"kind": "unstored", "id": run.id, "message": str(error)}
    except OtherHardware as error:
        return {"kind": "failed", "id": run.id, "outcome": "hardware", "message": str(error), "refused": True}
    except Exception as error:
        return {
            "kind": "failed",
            "id": run.id,
            "outcome": error_outcome(error),
            "message": _message(error),
            "traceback": traceback.format_exc(),
        }
    return {"kind": "done", "id": run.id, "seconds": None if row is None else row["seconds"]}


@functools.cache
def _store(url: str) -> Store:
    """The store of this process."""
    return patiently(lambda: open_store(url))


def _framework(run: Run) -> str:
    """The module that trains a run."""
    return catalog.trainer(run.trainer).framework


def _message(error: Exception) -> str:
    """What was raised, and where, in one line; what is said to the user says so itself."""
    if isinstance(error, UserError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{first} ({Path(frame.filename).name}:{frame.lineno})"


def _check_unchanged(run: Run, data: Dataset) -> None:
    """Refuse to train, under the id of what was planned, what has been edited since."""
    now = {
        "code": catalog.code(*run.named),
        "numerics": catalog.trainer(run.trainer).numerics,
        "dataset_fingerprint": data.fingerprint,
    }
    for name, value in now.items():
        if value != getattr(run, name):
            raise RuntimeError(f"{name} has changed since the run was planned: from {getattr(run, name)} to {value}")


@functools.lru_cache(maxsize=2)
def _data(spec: DatasetSpec, settings: Settings) -> Dataset:
    """A dataset's memory-mapped arrays: one object a dataset, so that trainers can keep what they place on a device."""
    return catalog.prepare(spec, None if settings.data_root is None else Path(settings.data_root))


def _receive(connection: Connection, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Queue requests as they come. The end of the connection means that nobody waits for this process any more."""
    try:
        while True:
            inbox.put(json.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)  # Not sys.exit: frameworks and file systems have threads that can hang an orderly end.


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however busy it is then."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the call.
        os._exit(1)


if __name__ == "__main__":
    main()
