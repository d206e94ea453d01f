"""What a report says beyond its main table: one section for each question that the records can answer.

A section is text and tables of text, the same for the terminal and for the page; the page adds figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from orchestrator.analysis.comparisons import CANNOT_SAY, DIFFERENT, SAME
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.quantities import QUANTITIES
from orchestrator.analysis.sweep import Sweep
from orchestrator.report import text
from protocols.protocol import MEASURES

Entry = tuple[str, str]
"""A value, and what stands small under it."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of one group."""

    caption: str
    heads: list[str]
    rows: list[list[Entry]]
    """The first entry names the row."""
    notes: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One question and its answer."""

    name: str
    """The method of :class:`orchestrator.analysis.Sweep` that holds the numbers, and the name of their file."""
    title: str
    text: str
    tables: list[Table]


SIGNS = {SAME: "≈", DIFFERENT: "≠", CANNOT_SAY: "?"}
"""How tables write a verdict."""


def sections(sweep: Sweep) -> list[Section]:
    """Those that have something to say, in the order of a reader's questions."""
    found = [
        Section(name=name, title=title, text=words, tables=list(tables(sweep)))
        for name, (title, words, tables) in _SECTIONS.items()
    ]
    return [section for section in found if section.tables]


def frame(sweep: Sweep, name: str) -> pd.DataFrame:
    """The numbers of a section."""
    table: pd.DataFrame = getattr(sweep, name)()
    return table


def estimate(row: pd.Series, name: str) -> Estimate:
    """An estimate from its three columns."""
    return Estimate(value=row[name], low=row[f"{name}_low"], high=row[f"{name}_high"])


def groups(sweep: Sweep, name: str, *keys: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of a section by group, or by ``keys``, with a caption."""
    table, by = frame(sweep, name), keys or ("group",)
    for _, rows in table.groupby(list(by), sort=False):
        key = rows.iloc[0][list(by)]
        values = [sweep.group_title(value) if name == "group" else value for name, value in zip(by, key, strict=True)]
        yield " · ".join(str(value) for value in values if str(value)), rows


def _shares(sweep: Sweep) -> Iterator[Table]:
    for caption, rows in groups(sweep, "shares"):
        lines = []
        for label, own in rows.groupby("label", sort=False):
            line: list[Entry] = [(str(label), "")]
            by_measure = {row["measure"]: row for _, row in own.iterrows()}
            for name in _declared(sweep):
                value, interval = _entry(estimate(by_measure[name], "ratio"), "ratio")
                line.append((f"{value} {SIGNS[by_measure[name]['verdict']]}", interval))
            lines.append([*line, _entry(estimate(by_measure["accuracy_sd"], "share") * 100, "share")])
        heads = ["Source", *(_short(name) for name in _declared(sweep)), "share of acc. variance, %"]
        yield Table(caption=caption, heads=heads, rows=lines, notes={})


def _mitigations(sweep: Sweep) -> Iterator[Table]:
    for caption, rows in groups(sweep, "mitigations", "group", "label"):
        lines = []
        marks, notes = text.footnotes([[note] if note else [] for note in rows["notes"]])
        for (_, row), mark in zip(rows.iterrows(), marks, strict=True):
            base = row["kind"] == "base"
            how = "the base" if base else "paired" if row["paired"] else "unpaired"
            line: list[Entry] = [(row["mitigation"] + (f" [{mark}]" if mark else ""), f"{how}, n={row['n']}")]
            line.append((text.number(row["accuracy_mean"], "accuracy_mean"), ""))
            for name in MEASURES:
                value = text.number(row[name], name)
                change = "" if base or pd.isna(row[f"{name}_reduction"]) else _percent(-row[f"{name}_reduction"])
                line.append((value, f"{change} {SIGNS[row[f'{name}_verdict']]}" if change else ""))
            line.append(("", "") if base else _entry(estimate(row, "reduction"), "reduction"))
            lines.append([*line, (f"{row['training_cost']:.3g}×", f"{row['inference_cost']:.3g}×")])
        heads = ["Mitigation", *(_short(name, unit=True) for name in ("accuracy_mean", *MEASURES))]
        heads += ["mean red., %", "cost"]
        yield Table(caption=caption, heads=heads, rows=lines, notes=dict(notes))


def _variances(sweep: Sweep) -> Iterator[Table]:
    names = ("test_set_sd", "floor_sd", "distribution_sd")
    heads = ["Source", "n", "SD on this test set, %", "of independent examples", "beyond this test set"]
    yield from _plain(sweep, "variances", heads, lambda row: [_entry(estimate(row, name), "sd") for name in names])


def _floors(sweep: Sweep) -> Iterator[Table]:
    names = ("disagreement", "least", "independent_by_class", "independent")
    heads = ["Source", "n", "Disagreement, %", "least possible", "errors independent, by class", "errors independent"]
    yield from _plain(
        sweep, "floors", heads, lambda row: [_entry(estimate(row, name), "disagreement") for name in names]
    )


def _classes(sweep: Sweep) -> Iterator[Table]:
    for caption, rows in groups(sweep, "classes"):
        lines = []
        for label, own in rows.groupby("label", sort=False):
            first, worst = own.iloc[0], own.sort_values("sd").iloc[-1]
            line: list[Entry] = [(str(label), ""), (str(first["n"]), "")]
            line += [_entry(estimate(first, "mean_sd"), "sd"), _entry(estimate(first, "largest_sd"), "sd")]
            lines.append([*line, (f"{worst['class']}", f"{worst['examples']} examples")])
        heads = ["Source", "n", "Mean SD over classes, %", "Largest SD over classes, %", "of class"]
        yield Table(caption=caption, heads=heads, rows=lines, notes={})


def _cka(sweep: Sweep) -> Iterator[Table]:
    for caption, rows in groups(sweep, "cka"):
        labels = list(rows["label"].unique())
        lines = []
        for layer, own in rows.groupby("layer", sort=False):
            found = {row["label"]: _entry(estimate(row, "cka"), "cka") for _, row in own.iterrows()}
            lines.append([(str(layer), ""), *(found.get(label, (text.NOTHING, "")) for label in labels)])
        yield Table(caption=caption, heads=["Layer", *labels], rows=lines, notes={})


def _divergence(sweep: Sweep) -> Iterator[Table]:
    changes = {
        "distance": "L2 distance",
        "cosine": "Cosine",
        "predictions_changed": "Pred. changed, %",
        "barrier_error": "Error barrier, %",
        "barrier_loss": "Loss barrier",
    }
    for caption, rows in groups(sweep, "divergence"):
        if rows["step"].nunique() < 2:
            continue
        known = [name for name in changes if rows[name].notna().any()]
        lines = [
            [(row["label"], ""), (str(row["n"]), ""), (f"{row['step']:,}", "")]
            + [_entry(estimate(row, name), name) for name in known]
            for _, row in rows.iterrows()
        ]
        heads = ["Source", "n", "After step", *(changes[name] for name in known)]
        yield Table(caption=caption, heads=heads, rows=lines, notes={})


def _overheads(sweep: Sweep) -> Iterator[Table]:
    for caption, rows in groups(sweep, "overheads", "trainer", "architecture", "dataset", "recipe", "device"):
        lines = [
            [
                (row["time"], ""),
                (f"{row['held']:,.1f}", f"n={row['n_held']}"),
                (f"{row['released']:,.1f}", f"n={row['n_released']}"),
                _entry(estimate(row, "ratio"), "ratio"),
            ]
            for _, row in rows.iterrows()
        ]
        heads = ["Time", "Deterministic, s", "Released, s", "Ratio of medians"]
        yield Table(caption=caption, heads=heads, rows=lines, notes={})


def _bases(sweep: Sweep) -> Iterator[Table]:
    for caption, rows in groups(sweep, "bases", "trainer", "architecture", "dataset", "recipe"):
        lines = []
        for _, row in rows[rows["measure"].isin(["accuracy_mean", *_declared(sweep)])].iterrows():
            name = row["measure"]
            line: list[Entry] = [(f"{row['label']}: {_short(name, unit=True)}", ""), (str(row["bases"]), "")]
            line += [_entry(estimate(row, "mean"), name), (text.number(row["sd_between"], name), "")]
            if name == "accuracy_mean":
                line += [_entry(estimate(row, part), "accuracy_sd") for part in ("within", "between")]
            lines.append(line + [("", "")] * (6 - len(line)))
        heads = ["Source and measure", "base seeds", "mean over them", "SD between them"]
        heads += ["of replicates' SD: within", "and between"]
        yield Table(caption=caption, heads=heads, rows=lines, notes={})


def _equality(sweep: Sweep) -> Iterator[Table]:
    for caption, rows in groups(sweep, "equality"):
        lines = []
        for label, own in rows.groupby("label", sort=False):
            first, pairs = own.iloc[0], own["pairs"]
            equal = int((own["equal_pairs"] == pairs).sum())
            some = int(((own["equal_pairs"] > 0) & (own["equal_pairs"] < pairs)).sum())
            step = first["first_step_min"]
            line: list[Entry] = [(str(label), ""), (str(first["n"]), ""), (f"{equal} of {len(own)}", "")]
            line += [(str(some), ""), ("never" if pd.isna(step) else f"{int(step):,}", "")]
            ulp, distance = own["largest_ulp"].max(), own["distance"].pow(2).sum() ** 0.5
            far = pd.isna(ulp)
            lines.append(
                [
                    *line,
                    (text.NOTHING if far else f"{int(ulp):,}", ""),
                    (text.NOTHING if far else f"{distance:.3g}", ""),
                ]
            )
        heads = [
            "Source",
            "n",
            "Tensors equal in all pairs",
            "in some",
            "First differing step",
            "Largest ulp",
            "L2 distance",
        ]
        yield Table(caption=caption, heads=heads, rows=lines, notes={})


def _looks(sweep: Sweep) -> Iterator[Table]:
    for caption, rows in groups(sweep, "looks"):
        marks, notes = text.footnotes([[note] if note else [] for note in rows["notes"]])
        lines = []
        for (_, row), mark in zip(rows.iterrows(), marks, strict=True):
            out = [f"{row[name]} {name}" for name in ("diverged", "absent") if row[name]]
            line: list[Entry] = [(row["label"] + (f" [{mark}]" if mark else ""), "")]
            line += [(f"{row['look']} of {row['looks']}", ""), (str(row["n"]), ", ".join(out))]
            found = estimate(row, "accuracy_sd")
            line += [_entry(found, "accuracy_sd"), (text.number(found.high - found.low, "accuracy_sd"), "")]
            lines.append([*line, (row["decision"], "")])
        heads = ["Source", "look", "n", "Accuracy SD, %", "width", "decision"]
        yield Table(caption=caption, heads=heads, rows=lines, notes=dict(notes))


def _plain(sweep: Sweep, name: str, heads: list[str], entries: Callable[[pd.Series], list[Entry]]) -> Iterator[Table]:
    """One row a cell: its label, n, and what ``entries`` makes of it."""
    for caption, rows in groups(sweep, name):
        lines = [[(row["label"], ""), (str(row["n"]), ""), *entries(row)] for _, row in rows.iterrows()]
        yield Table(caption=caption, heads=heads, rows=lines, notes={})


def _declared(sweep: Sweep) -> list[str]:
    """The measures that the main table shows, without the accuracy."""
    return text.columns(sweep)[1:]


def _short(name: str, unit: bool = False) -> str:
    quantity = QUANTITIES[name]
    if name == "correlation" and not unit:
        return "1 − corr."  # as a number that is 0 where replicates do not differ, which has a ratio
    return f"{quantity.short}{', ' + quantity.unit if unit and quantity.unit else ''}"


def _entry(found: Estimate, name: str) -> Entry:
    return text.number(found.value, name), text.interval(found, name)


def _percent(value: Any) -> str:
    return f"{value:+.0f} %".replace("-", "−")


_SECTIONS: dict[str, tuple[str, str, Callable[[Sweep], Iterator[Table]]]] = {
    "looks": (
        "When did each cell stop?",
        "Replicates were added until the interval of the accuracy SD, in small print, was narrower than declared, "
        "computed at the declared looks only. narrow: it was. at most: that was the last look. budget: other cells had "
        "wider intervals when the budget came to its end.",
        _looks,
    ),
    "shares": (
        "Is one source like all of them?",
        "Each source's spread over that of all sources together. ≈ same: the 90 % interval of the ratio lies within "
        "the declared margin. ≠ different: its 95 % interval, in small print, excludes 1. ? cannot say: it takes more "
        "replicates.",
        _shares,
    ),
    "mitigations": (
        "What reduces the noise, and what it costs",
        "The mean reduction is over the five measures, correlation as 1 − rho (Summers & Dinneen 2021). Paired rows "
        "evaluate the same trained networks otherwise, unpaired ones trained their own. ≈ same as the base, ≠ "
        "different, ? cannot say. Costs, times the base's: training examples visited, and in small print forward "
        "passes for each test example.",
        _mitigations,
    ),
    "variances": (
        "How much of the spread belongs to this test set?",
        "Had each example its own luck, independent of the others', the accuracy would vary as the second column says. "
        "What is measured beyond that is left for the distribution that the test set was drawn from (Jordan 2024); its "
        "estimate is 0 where there is nothing beyond.",
        _variances,
    ),
    "floors": (
        "Is this disagreement large?",
        "Beside the measured disagreement the least that the networks' accuracies allow, and what it would be if two "
        "networks erred independently of each other, on wrong classes as often as they are really confused, or on all "
        "alike.",
        _floors,
    ),
    "classes": (
        "Which classes move?",
        "The SD over replicates of the accuracy on each class. The interval of the largest allows for its having been "
        "chosen. Every class is in classes.csv.",
        _classes,
    ),
    "cka": (
        "Do replicates represent images alike?",
        "Unbiased centred kernel alignment of the same layer of two replicates, mean over pairs, from input to output: "
        "1 for the same representation up to rotation and scale, about 0 for unrelated ones.",
        _cka,
    ),
    "divergence": (
        "Until when does a small change matter?",
        "Networks whose weights were changed after so many steps of training, against the same network unchanged, at "
        "the end of training.",
        _divergence,
    ),
    "overheads": (
        "What does determinism cost?",
        "Uninterrupted runs with deterministic kernels against runs that release them, on the same kind of device.",
        _overheads,
    ),
    "bases": (
        "What hangs on the base seed?",
        "Each measure's mean over base seeds with its 95 % interval, and its SD between them. For the accuracy the SD "
        "over all replicates, too, divided into what lies within and what lies between base seeds.",
        _bases,
    ),
    "equality": (
        "Are trained weights ever equal?",
        "Final weights compared bit for bit, tensor by tensor, over all pairs of replicates; the first step at which "
        "any pair's losses differ; where weights were kept, how far the others lie from the first replicate. Every "
        "tensor is in equality.csv.",
        _equality,
    ),
}

NAMES = tuple(_SECTIONS)
"""Every section that there can be."""
