"""What a run is trained with: the settings of its process, and a trainer's window on the world."""

from __future__ import annotations

import functools
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator import devices, provenance
from orchestrator.slot import canary, memory
from orchestrator.slot.retrying import patiently
from orchestrator.store import Spool, Store, StoreError
from protocols.contract import Checkpoint, Epoch
from protocols.run import Run

Listener = Callable[[dict[str, Any]], None]
"""Receives what happens while a run trains: a dictionary with ``kind`` and ``id``."""


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
    sweep: str = ""
    """The sweep in whose name runs are leased; empty: nobody else is at work, and nothing is leased."""
    lease_seconds: float = 60.0
    """How old a sweep's last sign of life may be before others take over what it leased."""
    memory_limit: int | None = None
    """Bytes of memory that a run may take; None: as many as the machine can spare."""
    memory_share: float | None = None
    """The share of the machine's memory that a run may take even when little is left; None: that of the cores or GPUs
    that it is given."""

    memory_margin: int = memory.MARGIN
    """Bytes by which a process may grow after its first runs before another takes its place."""
    canary: str = ""
    """The specification of the run whose first epoch is trained first on every GPU; empty: the control of the group of
    the slot's first run."""

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
        self.place = devices.place(socket.gethostname(), devices.device(settings.gpus))
        """Names this device among all."""
        self.devices: tuple[str, ...] = (self.place,)
        """All that had a part in the run so far."""
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
            try:
                self._store.publish(self._id, self._attempt, self._rows)
            except StoreError as error:
                print(
                    f"epoch {epoch.epoch} is not shown in the store: {error}", file=sys.stderr
                )  # No run fails for it.
            self._published = time.monotonic()

    def fingerprint(self, part: Mapping[str, Any]) -> str:
        """Names what this process's bits depend on beside the specification; ``part`` is the framework's.

        Raises:
            OtherHardware: the run may not be trained here.
        """
        origin = provenance.provenance(part)
        check_hardware(self._run, origin, self._store.hardware(self._run.group))
        return provenance.fingerprint(origin)

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of this run, or None; also if a device that is not to be trusted had a part in it."""
        checkpoint = None
        if self._log is None:
            before = patiently(lambda: self._store.checkpoint_devices(self._id))
            if self.trusts(before):
                checkpoint = patiently(lambda: self._store.load_checkpoint(self._id))
            if checkpoint is not None:
                self.devices = tuple(sorted({*self.devices, *before}))
        self._rows = [] if checkpoint is None else list(checkpoint.history)
        return checkpoint

    def checkpoint_due(self) -> bool:
        """Whether ``checkpoint_every`` seconds have passed since the last checkpoint."""
        return self._log is None and time.monotonic() - self._saved >= self._settings.checkpoint_every

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint, in place of any earlier one."""
        if self._log is None:
            patiently(lambda: self._store.save_checkpoint(self._id, checkpoint, self.devices))
            self._saved = time.monotonic()

    def trusts(self, devices: Iterable[str]) -> bool:
        """Whether no canary speaks against any of some other devices. CPUs have none."""
        others = set(devices) - {self.place}
        if not others or not self._settings.gpus:
            return True
        doubts = patiently(_sightings(self._store).doubts)
        return others.isdisjoint(sighting.place for sighting, _ in doubts)

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


@functools.lru_cache(maxsize=1)
def _sightings(store: Store) -> canary.Sightings:
    """Those of this process, which reads each once."""
    return canary.Sightings(store)


def check_hardware(run: Run, origin: Mapping[str, Any], claimed: str | None) -> None:
    """See to it that the runs of a group train on hardware of one class, ``claimed``, unless it is what varies."""
    here = provenance.hardware(origin)
    if "hardware" in run.varies or claimed in (None, here):
        return
    raise OtherHardware(
        f"the runs of group {run.group} are trained on {claimed!r}, but this is {here!r}; use the same kind of machine "
        "and software, where the same command trains this run, another store, or cells that list hardware as varying "
        "(--set source=init+hardware)"
    )
