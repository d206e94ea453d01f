"""What a report says in words and small tables: what was run, on what, how it ended and how to repeat it."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from typing import Any

import pandas as pd

from orchestrator.analysis.sweep import Cell, Sweep
from protocols.sources import ALL, ASYNCHRONIES, CONTROL, HELD, LIBRARY_KINDS, SOURCES, label_sources


def progress(sweep: Sweep) -> dict[str, Any]:
    """How much of the sweep is there, and when it was trained."""
    runs = sweep.runs
    done = runs[runs["outcome"].notna()]
    return {
        "planned": len(runs),
        "ok": int((runs["outcome"] == "ok").sum()),
        "diverged": int((runs["outcome"] == "diverged").sum()),
        "missing": int(runs["outcome"].isna().sum()),
        "started": f"{done['started'].min():%Y-%m-%d %H:%M} UTC" if len(done) else "",
        "finished": f"{done['finished'].max():%Y-%m-%d %H:%M} UTC" if len(done) else "",
        "training": _duration(float(done["seconds"].sum())),
    }


def controls(sweep: Sweep) -> list[dict[str, str]]:
    """The verdict on every group."""
    return [
        {
            "title": sweep.group_title(group),
            "verdict": sweep.verdicts[group].verdict,
            "reason": sweep.verdicts[group].reason,
        }
        for group in sweep.groups["group"]
    ]


def setting(sweep: Sweep) -> list[tuple[str, str]]:
    """What all groups share or differ in: networks, data, replicates, seeds, recipe."""
    runs = sweep.runs
    if not len(runs):
        return []
    replicates = sorted({len(cell.runs) for cell in sweep.cells})
    values = [(name.capitalize(), _listed(runs[name])) for name in ("trainer", "architecture", "dataset")]
    values.append(("Replicates a cell", " to ".join(map(str, dict.fromkeys((replicates[0], replicates[-1]))))))
    values.append(("Base seed", _listed(runs["base_seed"])))
    recipes = [json.loads(text)["recipe"] for text in runs.drop_duplicates("group")["specification"]]
    for name in recipes[0]:
        values.append((f"recipe.{name}", _listed(pd.Series([_plain(recipe[name]) for recipe in recipes]))))
    return values


def sources(sweep: Sweep) -> list[tuple[str, str]]:
    """What each source of the sweep is."""
    found = []
    kinds = dict.fromkeys((cell.label, cell.source, cell.library, cell.asynchrony) for cell in sweep.cells)
    for label, source, library, asynchrony in kinds:
        if source == CONTROL:
            summary = "nothing varies: the control"
        elif source == ALL:
            texts = [cell.runs.iloc[0]["specification"] for cell in sweep.cells if cell.label == label]
            # Networks without dropout, say, have less to vary.
            sets = dict.fromkeys(", ".join(json.loads(text)["varies"]) for text in texts)
            summary = f"everything at once: {'; or '.join(sets)}"
        else:
            summary = "; ".join(_summary(part) for part in source.split("+"))
        if library != HELD:
            summary += f" ({library}: {LIBRARY_KINDS[library]})"
        if asynchrony != HELD:
            summary += f" ({asynchrony}: {ASYNCHRONIES[asynchrony]})"
        found.append((label, summary))
    return found


def _summary(part: str) -> str:
    """What one source of a label is, with its choices: ``onebit[step=10]``."""
    (name,), choices = label_sources(part), part.partition("[")[2].removesuffix("]")
    summary = SOURCES[name].summary if name in SOURCES else f"a source of the user's own, {name}"
    return f"{summary} ({choices.replace(' ', ', ')})" if choices else summary


def onebit(cell: Cell) -> str:
    """What a change of one bit, or of a few, came to in the cell's replicates; empty where no bit was changed."""
    changed = cell.ok.dropna(subset=["weights_changed"])
    if not len(changed):
        return ""
    names = ["weights_changed", "weights_total", "predictions_changed", "first_differing_step"]
    weights, total, predictions, step = (f"{value:,.10g}" for value in changed[names].astype(float).median())
    distance = f"{changed['distance'].astype(float).median():.3g}".replace("nan", "unknown")
    change = "one bit of one initial weight" if cell.source == "onebit" else "this change"
    return (
        f"{cell.label}: by the end of training, {change} had changed {weights} of {total} "
        f"weights; test examples classified otherwise: {predictions}; first step whose loss differs, counted from 0: "
        f"{step.replace('nan', 'none')}; L2 distance of the weights: {distance} (medians of {len(changed)} replicates)."
    )


def outcomes(sweep: Sweep) -> list[dict[str, Any]]:
    """The cells that are not complete."""
    return [
        {
            "group": sweep.group_title(cell.group),
            "label": cell.label,
            "planned": len(cell.runs),
            "ok": len(cell.ok),
            "diverged": cell.count("diverged"),
            "missing": cell.missing,
        }
        for cell in sweep.cells
        if len(cell.ok) < len(cell.runs)
    ]


def failures(sweep: Sweep) -> list[dict[str, Any]]:
    """Attempts that left no record, with whether the run has one by now."""
    done = set(sweep.runs.loc[sweep.runs["outcome"].notna(), "id"])
    ids = set(sweep.runs["id"])
    return [{**row, "later": row["id"] in done} for row in sweep.store.failures().to_pylist() if row["id"] in ids]


def machines(sweep: Sweep) -> list[dict[str, Any]]:
    """How many runs each fingerprint, device and host has."""
    done = sweep.runs[sweep.runs["outcome"].notna()]
    counts = done.groupby(["fingerprint", "device", "host"], as_index=False).agg(
        runs=("id", "size"), processes=("process", "nunique"), speed=("images_per_second", "median")
    )
    return [{str(name): value for name, value in row.items()} for row in counts.to_dict("records")]


def provenance(sweep: Sweep) -> list[tuple[str, list[tuple[str, int]]]]:
    """Every recorded fact of where the runs were trained: its name, and its values with how many runs have each.

    Facts in which runs differ come first.
    """
    known: dict[str, Counter[str]] = {}
    for source, runs in sweep.runs["provenance"].dropna().value_counts().items():
        for name, value in _flat(json.loads(str(source))).items():
            known.setdefault(name, Counter())[value] += int(runs)
    return sorted(((name, values.most_common()) for name, values in known.items()), key=lambda fact: -len(fact[1]))


def command(sweep: Sweep) -> str:
    """What runs the sweep again, or what is missing of it."""
    name = sweep.protocol.name if sweep.protocol else "PROTOCOL"
    return f"noisegrid run {shlex.quote(name)} --store {shlex.quote(sweep.store.url)}"


def runs(sweep: Sweep) -> list[dict[str, Any]]:
    """Every run with its id and final digest."""
    return [
        {
            "group": sweep.group_title(cell.group),
            "label": cell.label,
            "replicate": int(run["replicate"]),
            "id": run["id"],
            "outcome": run["outcome"] if isinstance(run["outcome"], str) else "missing",
            "digest": run["final_digest"][:16] if isinstance(run["final_digest"], str) else "",
        }
        for cell in sweep.cells
        for _, run in cell.runs.iterrows()
    ]


def _duration(seconds: float) -> str:
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _listed(values: pd.Series) -> str:
    return ", ".join(map(str, dict.fromkeys(values)))


def _plain(value: object) -> str:
    """A setting as a user would write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "(empty)"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested dictionary as dotted names and text; lists are joined."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            flat[f"{prefix}{name}"] = " ".join(map(str, value)) or "none"
        else:
            flat[f"{prefix}{name}"] = _plain(value)
    return flat
