"""Whether a GPU computes what others compute: the first epoch of a group's control, held against theirs.

Within one fingerprint a control has the same bits on every device. So a device that computes it otherwise is not to be
trusted with anything else. Which of two is wrong nobody knows; of three it is the one that is alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator import catalog, devices, provenance
from orchestrator.context import Listener, Settings
from orchestrator.store import Store
from protocols.contract import Checkpoint, Dataset, Epoch, Interrupted
from protocols.digest import digest
from protocols.run import Run

NAMED = 3
"""How many other devices a sentence names."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What the first epoch of a group's control came to on one device."""

    group: str
    fingerprint: str
    host: str
    device: str
    """The GPU's UUID, or ``GPU N`` where the driver names none."""
    digest: str
    """Of everything that the epoch left: weights, momentum, losses."""

    @property
    def place(self) -> str:
        """Names the device among all; fit for a file's name."""
        unique = self.device.startswith(("GPU-", "MIG-"))
        return re.sub(r"[^A-Za-z0-9-]", "-", self.device if unique else f"{self.host}-{self.device}")

    def __str__(self) -> str:
        return f"{self.device} of {self.host}"


@dataclass(frozen=True)
class Doubt:
    """Why a device is not to be trusted."""

    text: str
    """What it does, as the rest of a sentence about it."""
    proven: bool
    """Whether more devices agree against it than with it."""


def doubt(own: Sighting, sightings: Sequence[Sighting]) -> Doubt | None:
    """Hold a device against all that computed the same under the same fingerprint.

    Args:
        own: what it computed just now.
        sightings: what each device computed first, its own included; the oldest first.
    """
    before = next((each for each in sightings if each.place == own.place), own)
    if before.digest != own.digest:
        return Doubt("computes it differently from what it computed before", proven=False)
    votes = Counter(each.digest for each in sightings)
    most = max(votes.values(), default=1)
    # Counters keep the order of first sight, which decides between equals.
    first = next((each for each, count in votes.items() if count == most), own.digest)
    if own.digest == first:
        return None
    others = [each for each in sightings if each.digest == first]
    names = ", ".join(map(str, others[:NAMED])) + (f" and {len(others) - NAMED} more" * (len(others) > NAMED))
    if votes[own.digest] == most:
        alone = "the only other device" if len(sightings) == 2 else "as many others"
        return Doubt(
            f"computes it differently from {names}, {alone} so far, which came first; nobody knows yet which is right",
            proven=False,
        )
    return Doubt(f"computes it differently from {names}", proven=True)


class Sightings:
    """What all devices left in a store; each is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[str, str, str], Sighting] = {}

    def leave(self, sighting: Sighting) -> None:
        """Keep what a device computed, unless it has left something already."""
        text = json.dumps(asdict(sighting))
        self._store.put_canary(sighting.group, sighting.fingerprint, sighting.place, text)

    def beside(self, own: Sighting) -> list[Sighting]:
        """All of the same group and fingerprint, the oldest first; unreadable ones are left out."""
        found = []
        for place in self._store.canaries(own.group, own.fingerprint):
            key = (own.group, own.fingerprint, place)
            if key not in self._known:
                try:
                    self._known[key] = Sighting(**json.loads(self._store.canary(*key) or ""))
                except (ValueError, TypeError):
                    continue
            found.append(self._known[key])
        return found


def records_of(store: Store, sighting: Sighting) -> list[str]:
    """The ids of all records that a device left under a fingerprint, sorted."""
    rows = store.table(["id", "host", "fingerprint", "provenance"]).to_pylist()
    mine = [row for row in rows if (row["host"], row["fingerprint"]) == (sighting.host, sighting.fingerprint)]
    return [row["id"] for row in mine if json.loads(row["provenance"]).get("slot", {}).get("device") == sighting.device]


def sentence(store: Store, sighting: Sighting, doubt: Doubt) -> str:
    """Say what is wrong with a device, and deal with the records that it left.

    Where it is proven wrong they are moved to ``corrupt/``, so that their runs are trained again; where it is only
    doubted they are counted.
    """
    left = records_of(store, sighting)
    withdrawn = [id for id in left if store.withdraw(id) is not None] if doubt.proven else []
    count = len(withdrawn) if doubt.proven else len(left)
    records = f"{count:,} record{'s' * (count != 1)}"
    fate = "moved to corrupt/, and the same command trains their runs again" if doubt.proven else "to be doubted"
    return (
        f"{sighting} {doubt.text} (the first epoch of the control of group {sighting.group}, fingerprint "
        f"{sighting.fingerprint}): nothing more is trained on it"
        + (f"; {records} that it left {'is' if count == 1 else 'are'} {fate}" * (count > 0))
        + f"; once it is repaired, delete canaries/{sighting.group}.{sighting.fingerprint}.{sighting.place}.json"
    )


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
