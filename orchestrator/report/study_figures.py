"""The figures of a report's further sections, each from the rows of one group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import matplotlib
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.quantities import QUANTITIES
from orchestrator.analysis.sweep import Sweep
from orchestrator.report import text
from orchestrator.report.figures import ROW, draw, name_rows, wrapped
from orchestrator.report.studies import estimate, groups
from orchestrator.report.svg import GRID, INK, MARK, REFERENCE, SOFT, axes, panels, settings, svg

Figure = dict[str, str]
"""``title``, ``svg`` and ``caption``."""


def figures(sweep: Sweep, section: str) -> list[Figure]:
    """The figures of a section; none where its table says it all."""
    return _FIGURES[section](sweep) if section in _FIGURES else []


def ratios(name: str, labels: Sequence[str], estimates: Sequence[Estimate], margin: float, measure: str) -> str:
    """Ratios with their 95 % intervals on a logarithmic axis, over the band within which they count as alike.

    Args:
        name: unique on the page.
        labels: one a row.
        estimates: of each.
        margin: the band reaches from 1/margin to margin.
        measure: what the ratio is of.
    """
    values = [abs(math.log(one.value)) for one in estimates if one.value > 0 and math.isfinite(one.value)]
    ends = [abs(math.log(end)) for one in estimates for end in (one.low, one.high) if end > 0 and math.isfinite(end)]
    # An interval much longer than what it surrounds is cut off, or it would squeeze all the others.
    reach = math.exp(1.1 * max(math.log(margin), *values, min(max(ends, default=0.0), 1.0 + max(values, default=0.0))))
    with matplotlib.rc_context(settings(name)):
        figure, panel = axes(0.6 + ROW * len(labels))
        name_rows(panel, labels)
        panel.set_xscale("log")
        panel.set_xlim(1 / reach, reach)
        panel.axvspan(1 / margin, margin, color=MARK, alpha=0.12, linewidth=0, zorder=0)
        panel.axvline(1, color=REFERENCE, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        for row, one in enumerate(estimates):
            if one.value > 0:  # a logarithmic axis has no 0
                draw(panel, row, one, MARK, (1 / reach, reach))
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if reach > 3 else (0.5, 0.7, 1, 1.5, 2, 3)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xlabel("ratio (logarithmic)")
        spoken = [
            f"{label} {text.number(one.value, 'ratio')} ({text.interval(one, 'ratio') or 'no interval'})"
            for label, one in zip(labels, estimates, strict=True)
        ]
        return svg(figure, f"{measure}, ratio with 95 % interval, margin {margin:g}: {', '.join(spoken)}.")


def reductions(name: str, labels: Sequence[str], estimates: Sequence[Estimate]) -> str:
    """Mean reductions in percent with their 95 % intervals; 0 changes nothing, 100 leaves no noise.

    Args:
        name: unique on the page.
        labels: one a mitigation.
        estimates: of each.
    """
    low = min([0.0, *(end for one in estimates for end in (one.value, one.low) if math.isfinite(end))])
    limits = max(1.1 * low, -100.0), 100.0
    lines = max(wrapped(label).count("\n") for label in labels) + 1
    with matplotlib.rc_context(settings(name)):
        figure, panel = axes(0.6 + (ROW + 0.14 * (lines - 1)) * len(labels))
        panel.set_xlim(*limits)
        panel.axvline(0, color=REFERENCE, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        for row, one in enumerate(estimates):
            draw(panel, row, one, MARK, limits)
        name_rows(panel, labels)
        panel.set_xlabel("mean reduction, %")
        spoken = [
            f"{label} {text.number(one.value, 'reduction')} ({text.interval(one, 'reduction') or 'no interval'})"
            for label, one in zip(labels, estimates, strict=True)
        ]
        return svg(figure, f"Mean reduction of variability in percent with 95 % interval: {', '.join(spoken)}.")


def layers(name: str, labels: Sequence[str], tables: Sequence[pd.DataFrame]) -> str:
    """Alignment by layer, a panel a source: the mean over pairs and its 95 % interval.

    Args:
        name: unique on the page.
        labels: one a source.
        tables: for each its rows of :meth:`orchestrator.analysis.Sweep.cka`.
    """
    columns = 2
    with matplotlib.rc_context(settings(name)):
        titles = [wrapped(f"{label}  n={table['n'].max()}") for label, table in zip(labels, tables, strict=True)]
        lines = max(title.count("\n") for title in titles) + 1
        figure, shown = panels(math.ceil(len(labels) / columns), columns, row=0.72, gap=0.08 + 0.13 * lines)
        spoken = []
        for panel, label, title, table in zip(shown, labels, titles, tables, strict=False):
            depth = table["depth"] + 1
            panel.fill_between(depth, table["cka_low"], table["cka_high"], color=MARK, alpha=0.25, linewidth=0)
            panel.plot(depth, table["cka"], "o-", color=MARK, linewidth=1.4, markersize=3)
            panel.set_title(title, loc="left", color=INK, pad=2, linespacing=0.95)
            spoken.append(f"{label} from {table['cka'].iloc[0]:.2f} to {table['cka'].iloc[-1]:.2f}")
        for panel in shown:
            panel.set_ylim(min(0.0, *(table["cka"].min() for table in tables)) - 0.03, 1.03)
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            panel.grid(axis="y", color=GRID, linewidth=0.6)
        for panel in shown[len(labels) :]:
            panel.set_visible(False)
        figure.supxlabel("layer, from the input", color=SOFT, fontsize=9, y=0.0, va="bottom")
        figure.supylabel("alignment (CKA)", color=SOFT, fontsize=9, x=0.0, ha="left")
        return svg(figure, f"Alignment of two replicates, first to last layer: {', '.join(spoken)}.")


def by_step(name: str, steps: Sequence[int], estimates: Sequence[Estimate], quantity: str) -> str:
    """A consequence of a change against the step at which it was made, with 95 % intervals.

    Args:
        name: unique on the page.
        steps: of training before the change, on an axis that is linear to 1 and logarithmic beyond.
        estimates: one a step.
        quantity: what they are of.
    """
    with matplotlib.rc_context(settings(name)):
        figure, panel = axes(1.9)
        panel.set_xscale("symlog", linthresh=1)
        panel.plot(steps, [one.value for one in estimates], "o-", color=MARK, linewidth=1.2, markersize=4.5)
        for step, one in zip(steps, estimates, strict=True):
            if math.isfinite(one.low + one.high):
                panel.plot((step, step), (one.low, one.high), color=MARK, linewidth=1.8, solid_capstyle="butt")
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
        panel.set_xlim(-0.3, max([1, *steps]) * 1.6)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panel.grid(axis="y", color=GRID, linewidth=0.6)
        panel.set_xlabel("steps of training before the change")
        panel.set_ylabel(quantity)
        spoken = [f"step {step} {one.value:.3g}" for step, one in zip(steps, estimates, strict=True)]
        return svg(figure, f"{quantity} by the step of the change: {', '.join(spoken)}.")


def _shares(sweep: Sweep) -> list[Figure]:
    found = []
    for number, (caption, table) in enumerate(groups(sweep, "shares")):
        for measure in text.columns(sweep)[1:]:
            own = table[table["measure"] == measure]
            title = "1 − correlation" if measure == "correlation" else QUANTITIES[measure].title
            drawn = ratios(
                f"shares-{number}-{measure}",
                [f"{row['label']}  n={row['n']}" for _, row in own.iterrows()],
                [estimate(row, "ratio") for _, row in own.iterrows()],
                sweep.margin,
                title,
            )
            found.append(_figure(f"{title} against {own['reference'].iloc[0]}", drawn, _among(caption, sweep)))
    return found


def _mitigations(sweep: Sweep) -> list[Figure]:
    found = []
    for number, (caption, table) in enumerate(groups(sweep, "mitigations", "group", "label")):
        own = table[table["kind"] != "base"]
        labels = [f"{row['mitigation']}  n={row['n']}" for _, row in own.iterrows()]
        drawn = reductions(f"mitigations-{number}", labels, [estimate(row, "reduction") for _, row in own.iterrows()])
        found.append(_figure("Mean reduction of variability", drawn, f"{caption}. 100 % would leave no noise at all."))
    return found


def _cka(sweep: Sweep) -> list[Figure]:
    found = []
    for number, (caption, table) in enumerate(groups(sweep, "cka")):
        parts = [(str(label), own) for label, own in table.groupby("label", sort=False)]
        drawn = layers(f"cka-{number}", [label for label, _ in parts], [own for _, own in parts])
        found.append(
            _figure("Alignment by layer", drawn, "Line: mean over pairs. Band: 95 %. " + _among(caption, sweep))
        )
    return found


def _divergence(sweep: Sweep) -> list[Figure]:
    shown = {
        "distance": "L2 distance",
        "predictions_changed": "predictions changed, %",
        "barrier_error": "error barrier, %",
    }
    found = []
    for number, (caption, table) in enumerate(groups(sweep, "divergence")):
        own = table.sort_values("step")
        for name, title in shown.items():
            if own["step"].nunique() > 1 and own[name].notna().any():
                values = [estimate(row, name) for _, row in own.iterrows()]
                drawn = by_step(f"divergence-{number}-{name}", own["step"].tolist(), values, title)
                found.append(_figure(f"{title[:1].upper()}{title[1:]}", drawn, _among(caption, sweep)))
    return found


def _figure(title: str, drawn: str, caption: str) -> Figure:
    return {"title": title, "svg": drawn, "caption": caption}


def _among(caption: str, sweep: Sweep) -> str:
    """Which group a figure is of, where there are several."""
    return f"{caption}." if len(sweep.groups) > 1 else ""


_FIGURES: dict[str, Callable[[Sweep], list[Figure]]] = {
    "shares": _shares,
    "mitigations": _mitigations,
    "cka": _cka,
    "divergence": _divergence,
}
