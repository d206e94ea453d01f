"""The canary itself: the first epoch of a run, trained in this process, of which nothing is left but a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator import catalog, devices, provenance
from orchestrator.slot.context import Listener, Settings
from protocols.contract import Checkpoint, Dataset, Epoch, Interrupted
from protocols.digest import digest
from protocols.run import Run


def first_epoch(run: Run, data: Dataset, settings: Settings, listener: Listener) -> dict[str, str]:
    """Train the first epoch of a run in this process and leave nothing of it; its digest and the fingerprint.

    Args:
        run: a control.
        data: its examples.
        settings: device and threads.
        listener: is told of the epoch.
    """
    glimpse = _Glimpse(run, settings, listener)
    try:
        outcome = catalog.train(run.trainer)(run, data, glimpse)
    except Interrupted:
        assert glimpse.checkpoint is not None
        tensors, losses = glimpse.checkpoint.tensors, glimpse.checkpoint.losses
    else:  # It has one epoch, or a trainer that does not stop.
        tensors, losses = outcome.weights, outcome.losses
        glimpse.fingerprint(outcome.provenance)
    # A trainer need not ask for its fingerprint; then the GPU's model has to do.
    mark = glimpse.mark or provenance.fingerprint(provenance.provenance({"device": devices.model()}))
    together = f"{digest(tensors)} {digest({'losses': np.asarray(losses)})}"
    return {"digest": hashlib.sha256(together.encode()).hexdigest(), "fingerprint": mark}


class _Glimpse:
    """A trainer's window on the world (:class:`protocols.contract.Context`) for one epoch of a run."""

    def __init__(self, run: Run, settings: Settings, listener: Listener) -> None:
        self.device = settings.device
        self.threads = settings.threads
        self.decode_threads = settings.decode_threads or devices.cores(settings.gpus)
        self.mark = ""
        self.checkpoint: Checkpoint | None = None
        self._id = run.id
        self._listener = listener

    def report(self, epoch: Epoch) -> None:
        self._listener({"kind": "epoch", "id": self._id, "epoch": epoch.epoch})

    def fingerprint(self, part: Mapping[str, Any]) -> str:
        self.mark = provenance.fingerprint(provenance.provenance(part))
        return self.mark

    def load_checkpoint(self) -> Checkpoint | None:
        return None

    def checkpoint_due(self) -> bool:
        return False

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def commit_log(self) -> NDArray[np.int64] | None:
        return None

    def should_stop(self) -> bool:
        return True
