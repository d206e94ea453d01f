"""What a reader of one cell's row must know, in words."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.cell import Measured
from protocols.sources import CONTROL, label_sources


def notes(source: str, library: str, runs: pd.DataFrame, measured: Measured, held: bool) -> list[str]:
    """What was left out of a cell's measures, why values are missing, and when its zeros mean nothing.

    Args:
        source: what the cell varies.
        library: its library kind, or ``held``.
        runs: its runs, with ``outcome, final_digest, device, fingerprint, logits_precision``.
        measured: its measures.
        held: False where the group's control shows that the held sources were not held.
    """
    ok, texts = runs[runs["outcome"] == "ok"], []
    n, digests = len(ok), ok["final_digest"].nunique()
    if not held:
        texts.append("invalid: what this group holds was not held, see its control")
    if diverged := int((runs["outcome"] == "diverged").sum()):
        texts.append(f"{diverged} diverged {'run is' if diverged == 1 else 'runs are'} left out of every measure")
    identical = n > 1 and digests == 1
    if identical and source == CONTROL:
        texts.append(f"all {n} replicates bit-identical")
    elif identical:
        texts.append(f"all {n} replicates bit-identical: what varies here changed no bit, so its zeros are no finding")
    elif digests < n and source != CONTROL:
        texts.append(f"{n} replicates ended in only {digests} different sets of weights")
    if library == "native" and (ok["device"] == "cpu").any():
        texts.append("library (native) ran on a CPU, where released kernels repeat: its zeros are no finding")
    if library == "native" and "onebit" in label_sources(source):
        texts.append(
            "library (native) varies with onebit: no run is the unchanged one, so no distance from it is the bit's"
        )
    # Kernels and hardware that vary have a fingerprint each: that is what the cell asks for.
    if (
        library != "kernel"
        and "hardware" not in label_sources(source)
        and (fingerprints := ok["fingerprint"].nunique()) > 1
    ):
        texts.append(
            f"replicates ran under {fingerprints} fingerprints (hardware or software): part of the spread may be theirs"
        )
    if (ok["logits_precision"] == "float16").any():
        texts.append("logits were stored as float16: correlations and gain are of rounded logits")
    return [*texts, *measured.notes, *([] if identical else measured.reasons)]
