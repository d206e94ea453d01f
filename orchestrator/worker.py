"""The process that trains: it takes runs from its supervisor one by one and commits a record for each.

``python -m orchestrator.worker`` is started by :class:`orchestrator.supervisor.Supervisor` for one trainer and one
determinism profile, and stays warm from run to run. The two exchange JSON over an inherited connection.
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
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator import catalog, devices, provenance, records
from orchestrator.barrier import barrier
from orchestrator.store import Reference, Spool, Store, open_store
from protocols.contract import Checkpoint, Dataset, Epoch, Interrupted, Outcome
from protocols.protocol import DatasetSpec
from protocols.run import Run, run_from_specification

Listener = Callable[[dict[str, Any]], None]
"""Receives what happens while a run trains: a dictionary with ``kind`` and ``id``."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a training process is given besides its runs. Nothing here changes a bit of any result."""

    store: str
    """Where the records go."""
    data_root: str | None = None
    """Where datasets are read from; None: NOISEGRID_DATA, else they are fetched."""
    spool: str = field(default_factory=tempfile.gettempdir)
    """Folder of this machine for the epoch rows of running runs."""
    threads: int = 1
    decode_threads: int | None = None
    """Threads that decode photographs; None: the run's share of the machine's cores on a GPU, 1 on a CPU core."""
    gpus: float = 0.0
    checkpoint_every: float = 60.0
    """Seconds between two checkpoints of a run; 0: one at the end of each epoch."""
    publish_every: float = 30.0
    """Seconds between two publications of a run's epoch rows in the store."""
    isolation: str = "profile"
    """How runs share processes: see :data:`protocols.protocol.ISOLATIONS`."""
    between_runs: str | None = None
    """A shell command that the supervisor runs before each run."""

    @property
    def device(self) -> str:
        """The device of the process."""
        return "cuda:0" if self.gpus else "cpu"


class OtherHardware(Exception):
    """A run was refused because its group has trained on hardware of another class; one sentence."""


class RunContext:
    """A trainer's window on the world (:class:`protocols.contract.Context`), for one run.

    Args:
        run: the run whose checkpoints are used.
        store: where checkpoints and epoch rows go.
        settings: device, threads and intervals.
        listener: is told of every epoch.
        attempt: number under which epoch rows are kept; None: they are not kept.
        stop: whether the run should end early.
        log: what asynchronous training must follow; such a run neither takes nor leaves a checkpoint, since those in
            the store are of the race itself.
    """

    def __init__(
        self,
        run: Run,
        store: Store,
        settings: Settings,
        listener: Listener,
        attempt: int | None,
        stop: Callable[[], bool],
        log: NDArray[np.int64] | None = None,
    ) -> None:
        self.device = settings.device
        self.threads = settings.threads
        self.decode_threads = settings.decode_threads or devices.cores(settings.gpus)
        self.should_stop = stop
        self._run = run
        self._id = run.id
        self._log = log
        self._store = store
        self._settings = settings
        self._listener = listener
        self._attempt = attempt
        self._rows: list[Epoch] = []
        self._spool = None if attempt is None else Spool(Path(settings.spool), self._id)
        self._saved = self._published = time.monotonic()

    def report(self, epoch: Epoch) -> None:
        """Keep the row on this machine at once, and in the store every ``publish_every`` seconds."""
        self._listener({"kind": "epoch", "id": self._id, "epoch": epoch.epoch})
        if self._spool is None or self._attempt is None:
            return
        # An ignored checkpoint's rows come once more.
        self._rows = [row for row in self._rows if row.epoch < epoch.epoch] + [epoch]
        self._spool.append(epoch)
        if time.monotonic() - self._published >= self._settings.publish_every:
            self._store.publish(self._id, self._attempt, self._rows)
            self._published = time.monotonic()

    def fingerprint(self, part: Mapping[str, Any]) -> str:
        """Names what this process's bits depend on beside the specification; ``part`` is the framework's.

        Raises:
            OtherHardware: the run may not be trained here.
        """
        origin = provenance.provenance(part)
        _check_hardware(self._run, origin, self._store.hardware(self._run.group))
        return provenance.fingerprint(origin)

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of this run, or None."""
        checkpoint = self._store.load_checkpoint(self._id) if self._log is None else None
        self._rows = [] if checkpoint is None else list(checkpoint.history)
        return checkpoint

    def checkpoint_due(self) -> bool:
        """Whether ``checkpoint_every`` seconds have passed since the last checkpoint."""
        return self._log is None and time.monotonic() - self._saved >= self._settings.checkpoint_every

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint, in place of any earlier one."""
        if self._log is None:
            self._store.save_checkpoint(self._id, checkpoint)
            self._saved = time.monotonic()

    def commit_log(self) -> NDArray[np.int64] | None:
        """The log that asynchronous training must follow, or None."""
        return self._log

    def __enter__(self) -> RunContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Forget the epoch rows on this machine if they are in a record now; after an error they stay."""
        if self._spool is not None:
            if error is None:
                self._spool.delete()
            else:
                self._spool.close()


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
    """
    if store.has(run.id):
        return None
    train = catalog.train(run.trainer)  # Imports the framework, which is not the run's time.
    number = store.begin(run.id)
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
        # Again, since not every trainer asks for its fingerprint.
        _check_hardware(run, origin, store.hardware(run.group))
        ending = _ending(outcome, provenance.fingerprint(origin))
        comparison = None
        # Released kernels end elsewhere every time: there is no unchanged run whose difference would be the bit's.
        if "onebit" in run.varies and run.library != "native":
            reference = _reference(run, outcome, ending.fingerprint, store, data, settings, listener, stop)
            comparison = records.compare(outcome, reference, network)
            if "barrier" in run.keep:
                comparison = _with_barrier(comparison, run, data, context, outcome, reference)
        attempt = records.Attempt(
            number=number,
            started=started,
            finished=finished,
            host=socket.gethostname(),
            process=process(),
            device=devices.device(settings.gpus),
        )
        row = records.record(run, source, outcome, data, network, attempt, origin, comparison)
        if not run.varies and run.replicate == 0:
            # What the group's onebit runs are held against: one set of weights a group.
            store.save_reference(run.id, ending)
        if kept := records.kept(run, outcome):
            store.save_kept(run.id, kept)
        store.put_labels(row["labels_fingerprint"], data.test_labels)
        if "hardware" not in run.varies:  # Only now: a run that fails must not bind the others of its group.
            _check_hardware(run, origin, store.claim_hardware(run.group, row["hardware"]))
        store.commit(row)
    return row


def _check_hardware(run: Run, origin: Mapping[str, Any], claimed: str | None) -> None:
    """See to it that the runs of a group train on hardware of one class, ``claimed``, unless it is what varies."""
    here = provenance.hardware(origin)
    if "hardware" in run.varies or claimed in (None, here):
        return
    raise OtherHardware(
        f"the runs of group {run.group} are trained on {claimed!r}, but this is {here!r}; use the same kind of machine "
        "and software, where the same command trains this run, another store, or cells that list hardware as varying "
        "(--set source=init+hardware)"
    )


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
    kept = None if raced else store.load_reference(unperturbed.id)
    if kept is not None and kept.fingerprint == mark:
        return kept
    log = outcome.commits if raced else None
    context = RunContext(unperturbed, store, settings, listener, None, stop, log)
    reference = _ending(catalog.train(run.trainer)(unperturbed, data, context), mark)
    if not raced:
        store.save_reference(unperturbed.id, reference)
        store.delete_checkpoint(unperturbed.id)
    return reference


def _ending(outcome: Outcome, mark: str) -> Reference:
    return Reference(
        weights=dict(outcome.weights),
        losses=outcome.losses,
        predictions=records.predictions(outcome),
        fingerprint=mark,
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
        # Field 22 counts clock ticks since boot; the name in field 2 may hold spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        began = int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration):
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

    store = open_store(settings.store)
    while True:
        reply(_serve(inbox.get(), store, settings, reply, stopping.is_set))


def _serve(
    request: Mapping[str, Any], store: Store, settings: Settings, reply: Listener, stop: Callable[[], bool]
) -> dict[str, Any]:
    """Execute one request; the reply that ends it."""
    run = run_from_specification(request["specification"])
    try:
        data = _data(run.dataset, settings)
        _check_unchanged(run, data)
        log = None if request["log"] is None else np.array(request["log"], np.int64)
        row = execute(
            run,
            request["source"],
            store,
            data,
            settings,
            listener=reply,
            stop=stop,
            between_runs=request["between_runs"],
            log=log,
        )
    except Interrupted:
        return {"kind": "interrupted", "id": run.id}
    except OtherHardware as error:
        return {"kind": "failed", "id": run.id, "outcome": "hardware", "message": str(error)}
    except Exception as error:
        return {
            "kind": "failed",
            "id": run.id,
            "outcome": records.error_outcome(error),
            "message": _message(error),
            "traceback": traceback.format_exc(),
        }
    if row is None:
        return {"kind": "done", "id": run.id, "seconds": None}
    return {"kind": "done", "id": run.id, "seconds": row["seconds"]}


def _message(error: Exception) -> str:
    """What was raised, and where, in one line."""
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
