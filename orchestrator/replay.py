"""Train a recorded run once more and hold the result against its record, bit for bit."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.records import first_difference
from orchestrator.slot.context import Settings
from orchestrator.slot.supervisor import Job, Supervisor
from orchestrator.store import Store, open_store
from orchestrator.store.schema import COMMIT
from protocols.errors import UserError
from protocols.run import Run, run_from_specification

_COLUMNS = (
    *("source", "specification", "final_digest", "tensor_digests", "losses", "commits"),
    *("fingerprint", "hardware"),
)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What came of a replay."""

    same: bool
    """Whether weights, logits and losses are those of the record, bit for bit; losses and logits as it holds them:
    losses as float32, large logits as float16."""
    text: str
    """That, and what differs, in one sentence."""


def resolve(store: Store, prefix: str) -> str:
    """The id of the one record whose id starts with ``prefix``.

    Raises:
        UserError: there is none, or there are several.
    """
    found = sorted(id for id in store.finished() if id.startswith(prefix))
    if not found:
        raise UserError(f"no record in {store.url} has an id that starts with {prefix!r}")
    if len(found) > 1:
        raise UserError(
            f"{len(found)} records in {store.url} have ids that start with {prefix!r}, among them {found[0][:16]} and "
            f"{found[1][:16]}; give more digits"
        )
    return found[0]


def replay(store: Store, id: str, settings: Settings, *, patience: float = 3600.0) -> Replay:
    """Train a recorded run again, in a process of its own, and compare.

    Threads that raced are followed by their log; anything else follows from the specification.

    Args:
        store: where the record is; nothing is written there.
        id: of the record.
        settings: data and device; the store named there does not matter.
        patience: seconds without a finished epoch after which the replay counts as hung.

    Raises:
        UserError: the run cannot be replayed.
    """
    (record,) = store.table(_COLUMNS, {id}).to_pylist()
    try:
        run = run_from_specification(record["specification"])
    except ValueError as error:
        raise UserError(f"run {id[:12]} cannot be replayed: {error}") from error
    log = [[commit[name] for name in COMMIT.names] for commit in record["commits"]] or None
    with tempfile.TemporaryDirectory(prefix="noisegrid-replay-") as folder:
        scratch = open_store(folder, create=True)
        if "onebit" in run.varies and (reference := store.load_reference(run.without("onebit").id)) is not None:
            scratch.save_reference(run.without("onebit").id, reference)
        supervisor = Supervisor(dataclasses.replace(settings, store=scratch.url, sweep=""), patience=patience)
        try:
            events = list(supervisor.train([Job(run=run, source=record["source"], log=log)]))
        finally:
            supervisor.close()
        if not scratch.has(id):
            return Replay(same=False, text=f"not replayed: {events[-1].message}")
        (again,) = scratch.table(_COLUMNS, {id}).to_pylist()
        differences = _differences(record, again)
        (one,), (other,) = (dict(place.logits([id])).values() for place in (store, scratch))
        if one.tobytes() != other.tobytes():
            differences.append("logits")
        for (_, ones), (_, others) in zip(store.variants([id]), scratch.variants([id]), strict=True):
            changed = [
                one.name
                for one, other in zip(ones, others, strict=True)
                if one.logits.tobytes() != other.logits.tobytes()
            ]
            differences += [f"logits of {name}" for name in changed]
    if not differences:
        return Replay(same=True, text="replayed bit for bit: weights, and losses and logits as recorded, are the same")
    return Replay(same=False, text=f"differs from the record in {', '.join(differences)}{_excuse(run, record, again)}")


def _differences(record: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """What of two records of one run differs, apart from logits."""
    found = []
    if record["final_digest"] != again["final_digest"]:
        ones, others = dict(record["tensor_digests"]), dict(again["tensor_digests"])
        found.append(f"weights ({sum(ones[name] != others[name] for name in ones)} of {len(ones)} tensors)")
    step = first_difference(np.array(record["losses"]), np.array(again["losses"]))
    if step is not None:
        found.append(f"losses (from step {step} on)")
    return found


def _excuse(run: Run, record: Mapping[str, Any], again: Mapping[str, Any]) -> str:
    """Why a difference may be no defect."""
    if run.library == "native":
        return "; it varies nondeterministic kernels, which nothing can replay"
    if record["fingerprint"] != again["fingerprint"]:
        return (
            f"; it was trained under fingerprint {record['fingerprint']} ({record['hardware']}), and here is "
            f"{again['fingerprint']} ({again['hardware']}): bits are promised within one"
        )
    return ""
