"""Whether a GPU computes what others compute: the first epoch of a group's control, held against theirs.

Within one fingerprint a control has the same bits on every device. So a device that computes it otherwise is not to be
trusted with anything else. Which of two is wrong nobody knows; of three it is the one that is alone.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator import devices
from orchestrator.slot.retrying import patiently
from orchestrator.store import Store, StoreError
from orchestrator.store.files import Entry

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
        return devices.place(self.host, self.device)

    def __str__(self) -> str:
        return f"{self.device} of {self.host}"


@dataclass(frozen=True)
class Doubt:
    """Why a device is not to be trusted."""

    text: str
    """What it does, as the rest of a sentence about it."""
    proven: bool
    """Whether more devices agree against it than with it."""


@dataclass(frozen=True)
class Sentence:
    """What is done about a device that is not to be trusted."""

    text: str
    withdrawn: tuple[str, ...]
    """The ids of the records that were moved to ``corrupt/``."""


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
        return self._read(self._store.canaries(f"{own.group}.{own.fingerprint}."))

    def doubts(self) -> list[tuple[Sighting, Doubt]]:
        """Every device that others contradict, with what it computed differently."""
        votes: dict[tuple[str, str], list[Sighting]] = {}
        for each in self._read(self._store.canaries()):
            votes.setdefault((each.group, each.fingerprint), []).append(each)
        held = [(own, doubt(own, seen)) for seen in votes.values() for own in seen]
        return [(own, found) for own, found in held if found is not None]

    def _read(self, keys: Iterable[tuple[str, str, str]]) -> list[Sighting]:
        found = []
        for key in keys:
            if key not in self._known:
                try:
                    self._known[key] = Sighting(**json.loads(self._store.canary(*key) or ""))
                except (ValueError, TypeError):
                    continue
            found.append(self._known[key])
        return found


def left_by(store: Store, place: str) -> list[Entry]:
    """The files of all records in which a device had a part: those of the runs that were trained on it, or went on from
    its checkpoint, or were held against a reference from it."""
    entries, table = store.rows(store.listed(), ["host", "provenance"])
    return [entry for entry, row in zip(entries, table.to_pylist(), strict=True) if place in _places(row)]


def _places(row: Mapping[str, Any]) -> set[str]:
    slot = json.loads(row["provenance"]).get("slot", {})
    return {devices.place(row["host"], slot.get("device", "cpu")), *slot.get("devices", ())}


def sentence(store: Store, sighting: Sighting, doubt: Doubt) -> Sentence:
    """Say what is wrong with a device, and deal with what it left, under whatever fingerprint.

    Its checkpoints and references are deleted. Where it is proven wrong its records are moved to ``corrupt/``, so that
    their runs are trained again; where it is only doubted they are counted.
    """
    withdrawn: list[str] = []
    count, trouble = 0, ""
    try:
        patiently(lambda: store.forget(sighting.place))
        left = patiently(lambda: left_by(store, sighting.place))
        for entry in left if doubt.proven else ():
            if patiently(functools.partial(store.withdraw, entry)) is not None:
                withdrawn.append(entry.name.removesuffix(".parquet"))
        count = len(withdrawn) if doubt.proven else len(left)
    except StoreError as error:
        count, trouble = len(withdrawn), f"; what else it left is still there: {error}"
    records = f"{count:,} record{'s' * (count != 1)}"
    fate = "moved to corrupt/, and the same command trains their runs again" if doubt.proven else "to be doubted"
    text = (
        f"{sighting} {doubt.text} (the first epoch of the control of group {sighting.group}, fingerprint "
        f"{sighting.fingerprint}): nothing more is trained on it"
        + f"; {records} in which it had a part {'is' if count == 1 else 'are'} {fate}" * (count > 0)
        + trouble
        + f"; once it is repaired, delete canaries/*.{sighting.place}.json"
    )
    return Sentence(text, tuple(withdrawn))


def settle(store: Store) -> list[tuple[str, str, list[str]]]:
    """Vote once more, and deal with every device that is proven wrong by now, whether or not it trains any more.

    Call it when a sweep has trained its last run, since no device looks again after its last block.

    Returns:
        (host and device, a sentence about it, the ids of the records that were moved to ``corrupt/``) of each device of
        which any were.

    Raises:
        StoreError: what the devices computed cannot be read.
    """
    wrong: dict[str, tuple[Sighting, Doubt]] = {}
    for sighting, doubt in patiently(Sightings(store).doubts):
        if doubt.proven:
            wrong.setdefault(sighting.place, (sighting, doubt))
    sentences = [(sighting, sentence(store, sighting, doubt)) for sighting, doubt in wrong.values()]
    return [(f"{own.host} {own.device}", said.text, list(said.withdrawn)) for own, said in sentences if said.withdrawn]
