"""The control's verdict: were the sources that a group holds really held?

Every group (architecture x dataset x trainer x recipe x base seed) trains its control, in which nothing varies, twice
or more, in different processes. Only if these end in the same bits can a spread in another row of the group be put down
to what varies there. Bits are promised within one fingerprint (versions, threads, instruction set, device).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pandas as pd

from protocols.sources import label_sources

HELD = "held"
NOT_HELD = "not held"
NOT_SHOWN = "not shown"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the finished control replicates of one group show."""

    verdict: str
    """``held``, ``not held`` or ``not shown``."""
    reason: str
    replicates: int
    processes: int
    """Training processes they ran in."""
    digests: int
    """Different final digests."""
    fingerprints: int


def judge(controls: pd.DataFrame, others: pd.DataFrame) -> Verdict:
    """The verdict of one group.

    Args:
        controls: its control records, with columns ``final_digest, process, fingerprint, hardware, provenance``.
        others: its other records, with columns ``source, library, asynchrony, fingerprint, hardware, provenance``.
    """
    replicates, processes = len(controls), int(controls["process"].nunique())
    digests, fingerprints = int(controls["final_digest"].nunique()), int(controls["fingerprint"].nunique())
    within = controls.groupby("fingerprint")["final_digest"].nunique()
    if (within > 1).any():
        verdict = NOT_HELD
        reason = f"{replicates} control replicates ended in {digests} different sets of weights"
        reason += " on the same kind of machine" if fingerprints > 1 else ""
    elif replicates < 2:
        verdict = NOT_SHOWN
        reason = "one control replicate is finished; it takes two" if replicates else "no control replicate is finished"
    elif digests > 1:
        verdict = NOT_SHOWN
        reason = (
            f"the control replicates ran under {fingerprints} fingerprints (hardware or software) and differ between "
            "them; bits are promised within one only"
        )
    elif processes < 2:
        verdict = NOT_SHOWN
        reason = f"all {replicates} control replicates ran in one process; it takes two"
    else:
        verdict = HELD
        reason = f"{replicates} control replicates in {processes} processes ended in the same bits"
        reason += f", under {fingerprints} fingerprints" if fingerprints > 1 else ""
    # Hardware that varies has fingerprints of its own: that is what such a record asks for.
    others = others[others["source"].map(lambda source: "hardware" not in label_sources(source)).astype(bool)]
    # So have kernels that vary and threads that race, whose processes are set up otherwise; but not other machines.
    apart = others["library"].isin(["kernel", "native"]) | (others["asynchrony"] == "real")
    known = others["fingerprint"].isin(set(controls["fingerprint"]))
    strange = int((~known.where(~apart, _machines(others).isin(set(_machines(controls))))).sum())
    if replicates and strange:
        reason += f"; {strange} of {len(others)} other records ran under a fingerprint without a control"
    return Verdict(
        verdict=verdict,
        reason=reason,
        replicates=replicates,
        processes=processes,
        digests=digests,
        fingerprints=fingerprints,
    )


def _machines(records: pd.DataFrame) -> pd.Series:
    """What of each record's fingerprint no determinism profile sets: hardware and versions, processor, instructions."""
    parsed = {text: json.loads(text) for text in records["provenance"].unique()}
    texts = [
        json.dumps([hardware, *(parsed[text].get(part) for part in ("cpu", "isa"))])
        for hardware, text in zip(records["hardware"], records["provenance"], strict=True)
    ]
    return pd.Series(texts, index=records.index, dtype=object)
