"""The figures of a report. Each is a function from numbers to an SVG element that says what it shows."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.quantities import QUANTITIES
from orchestrator.report import text
from orchestrator.report.svg import GRID, INK, MARK, PAPER, REFERENCE, SOFT, axes, panels, settings, svg

Floats = NDArray[np.float64]

ROW = 0.27
"""Inches a row."""

BOX = 5
"""Replicates from which on their quartiles are drawn."""

SMALLEST_BLOCK = 0.09
"""Share of a heat map's side from which a block's mean is written into it."""

SMALLEST_ERROR = 0.01
"""Percent; stands for 0 on a logarithmic axis."""


def distributions(name: str, labels: Sequence[str], accuracies: Sequence[Floats]) -> str:
    """Each replicate's accuracy as a dot, a row a source, and from ``BOX`` replicates on the quartiles and the median.

    Args:
        name: unique on the page.
        labels: one a source.
        accuracies: for each source (replicates,), in percent.
    """
    with matplotlib.rc_context(settings(name)):
        figure, panel = axes(0.6 + ROW * len(labels))
        everything = np.concatenate([*accuracies, np.empty(0)])
        step = np.ptp(everything) / 60 if len(everything) else 1.0
        for row, values in enumerate(accuracies):
            if len(values) >= BOX:
                low, median, high = np.percentile(values, (25, 50, 75))
                panel.barh(row, high - low, left=low, height=0.66, color=MARK, alpha=0.16, linewidth=0)
                panel.plot([median, median], [row - 0.33, row + 0.33], color=MARK, linewidth=1.4, solid_capstyle="butt")
            panel.plot(
                values,
                row + _stacked(values, step),
                "o",
                color=MARK,
                markersize=4,
                alpha=0.7,
                markeredgewidth=0,
                clip_on=False,
            )
        name_rows(panel, [f"{label}  n={len(values)}" for label, values in zip(labels, accuracies, strict=True)])
        panel.set_xlabel("test accuracy, %")
        return svg(figure, "Test accuracy of every replicate. " + _spoken(labels, accuracies))


def intervals(
    name: str,
    measure: str,
    labels: Sequence[str],
    counts: Sequence[int],
    estimates: Sequence[Estimate],
    reference: int | None,
    limits: tuple[float, float],
) -> str:
    """A measure with its 95 % interval, a row a source; a hollow mark where no interval can be given.

    Args:
        name: unique on the page.
        measure: a name of ``QUANTITIES``.
        labels: one a source.
        counts: the replicates of each.
        estimates: of each.
        reference: the row at whose value a line is drawn for comparison.
        limits: of the axis; intervals that leave it end in an arrow.
    """
    quantity = QUANTITIES[measure]
    with matplotlib.rc_context(settings(name)):
        figure, panel = axes(0.6 + ROW * len(labels))
        panel.set_xlim(*limits)
        if reference is not None and math.isfinite(estimates[reference].value):
            panel.axvline(estimates[reference].value, color=REFERENCE, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        for row, estimate in enumerate(estimates):
            colour = REFERENCE if row == reference else MARK
            draw(panel, row, estimate, colour, limits)
        name_rows(panel, [f"{label}  n={n}" for label, n in zip(labels, counts, strict=True)])
        panel.set_xlabel(f"{quantity.title}{', ' + quantity.unit if quantity.unit else ''}")
        spoken = [
            f"{label} {text.number(estimate.value, measure)} ({text.interval(estimate, measure) or 'no interval'})"
            for label, estimate in zip(labels, estimates, strict=True)
        ]
        return svg(figure, f"{quantity.title} by source with 95 % intervals: {', '.join(spoken)}.")


def heat_map(name: str, labels: Sequence[str], matrix: Floats) -> str:
    """Disagreement of every two models, those of one source side by side, with the mean of each block.

    Args:
        name: unique on the page.
        labels: the source of each model, equal ones adjacent.
        matrix: (models, models), in percent.
    """
    sources = list(dict.fromkeys(labels))
    edges = np.concatenate([[0], np.cumsum([list(labels).count(source) for source in sources])])
    centres = (edges[1:] + edges[:-1]) / 2 - 0.5
    with matplotlib.rc_context(settings(name)):
        figure, panel = axes(2.85)
        panel.spines["bottom"].set_visible(False)
        others = np.ma.masked_where(np.eye(len(matrix), dtype=bool), matrix)
        colours = matplotlib.colormaps["cividis"].with_extremes(bad="#808080")
        image = panel.imshow(others, cmap=colours, vmin=0, interpolation="nearest")
        for edge in edges[1:-1] - 0.5:
            panel.axhline(edge, color=PAPER, linewidth=1.2)
            panel.axvline(edge, color=PAPER, linewidth=1.2)
        means = _block_means(matrix, edges)
        sizes = np.diff(edges) / len(matrix)
        for (row, column), mean in np.ndenumerate(means):
            # A number in a smaller block would cover its neighbours'.
            if min(sizes[row], sizes[column]) >= SMALLEST_BLOCK and math.isfinite(mean):
                colour = "#000000" if mean > 0.45 * matrix.max() else "#fefefe"
                place = centres[column], centres[row]
                panel.text(*place, f"{mean:.1f}", ha="center", va="center", fontsize=7.5, color=colour)
        counts = [list(labels).count(source) for source in sources]
        named = [wrapped(f"{source}  n={count}") for source, count in zip(sources, counts, strict=True)]
        panel.set_yticks(centres, named, color=INK, linespacing=0.95)
        panel.set_xticks([])  # the columns are in the order of the rows; their names would leave no room for the map
        bar = figure.colorbar(image, ax=panel, orientation="horizontal", shrink=0.8, aspect=40, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.set_label("disagreement, %")
        within = [f"{source} {mean:.1f}" for source, mean in zip(sources, np.diag(means), strict=True)]
        return svg(figure, f"Pairwise disagreement in percent; mean within each source: {', '.join(within)}.")


def learning_curves(name: str, labels: Sequence[str], histories: Sequence[pd.DataFrame]) -> str:
    """Test error by epoch, a panel a source: the mean of the replicates and the range between the extremes.

    Errors on a logarithmic axis, since accuracies would leave nothing to see once they are close to 100 %.

    Args:
        name: unique on the page.
        labels: one a source.
        histories: for each source one row an epoch of a replicate, with ``id, epoch, test_accuracy`` (0 to 1).
    """
    columns = 2
    rows = math.ceil(len(labels) / columns)
    with matplotlib.rc_context(settings(name)):
        titles = [
            wrapped(f"{label}  n={history['id'].nunique()}") for label, history in zip(labels, histories, strict=True)
        ]
        lines = max(title.count("\n") for title in titles) + 1
        figure, all_panels = panels(rows, columns, row=0.72, gap=0.08 + 0.13 * lines)
        spoken = []
        for panel, label, title, history in zip(all_panels, labels, titles, histories, strict=False):
            epochs = _errors(history).groupby(history["epoch"]).agg(["mean", "min", "max"])
            shown = epochs.clip(lower=SMALLEST_ERROR)
            panel.fill_between(shown.index, shown["min"], shown["max"], color=MARK, alpha=0.25, linewidth=0)
            panel.plot(shown.index, shown["mean"], color=MARK, linewidth=1.4)
            panel.set_title(title, loc="left", color=INK, pad=2, linespacing=0.95)
            last = epochs.iloc[-1]
            spoken.append(f"{label} {last['mean']:.2f} ({last['min']:.2f} to {last['max']:.2f})")
        low, high = _extremes(histories)
        steps = (1,) if high > 50 * low else (1, 3) if high > 8 * low else (1, 2, 5)
        for panel in all_panels:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=steps, numticks=8))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            panel.yaxis.set_minor_locator(NullLocator())
            panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            panel.grid(axis="y", color=GRID, linewidth=0.6)
        for panel in all_panels[len(labels) :]:
            panel.set_visible(False)
        figure.supxlabel("epoch", color=SOFT, fontsize=9, y=0.0, va="bottom")
        figure.supylabel("test error, % (logarithmic)", color=SOFT, fontsize=9, x=0.0, ha="left")
        return svg(figure, f"Test error in percent by epoch; at the end, mean and range: {', '.join(spoken)}.")


def _errors(history: pd.DataFrame) -> pd.Series:
    """Test errors in percent."""
    return 100 * (1 - history["test_accuracy"])


def _extremes(histories: Sequence[pd.DataFrame]) -> tuple[float, float]:
    """The least and the greatest error that a logarithmic axis shows."""
    errors = pd.concat([_errors(history) for history in histories]).clip(lower=SMALLEST_ERROR)
    return float(errors.min()), float(errors.max())


def draw(panel: Axes, row: int, estimate: Estimate, colour: str, limits: tuple[float, float]) -> None:
    """An estimate in its row; a hollow mark where no interval can be given, an arrow where it leaves the axis."""
    known = math.isfinite(estimate.low + estimate.high)
    if known:
        ends = np.clip((estimate.low, estimate.high), *limits)
        panel.plot(ends, (row, row), color=colour, linewidth=1.8, solid_capstyle="butt")
        for end, value, arrow in zip(ends, (estimate.low, estimate.high), "<>", strict=True):
            if end != value:
                panel.plot(end, row, arrow, color=colour, markersize=4, markeredgewidth=0, clip_on=False)
    face = colour if known else PAPER
    panel.plot(
        estimate.value,
        row,
        "o",
        markersize=5.5,
        color=face,
        markeredgecolor=colour,
        markeredgewidth=1.3,
        clip_on=False,
    )


def name_rows(panel: Axes, labels: Sequence[str]) -> None:
    """Name the rows, from the top."""
    panel.set_yticks(range(len(labels)), [wrapped(label) for label in labels], color=INK, linespacing=0.95)
    panel.tick_params(axis="y", pad=7)
    panel.set_ylim(len(labels) - 0.4, -0.6)
    panel.grid(axis="x", color=GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.locator_params(axis="x", nbins=5)


def wrapped(label: str) -> str:
    """A long combination of sources in several lines, broken after a ``+``."""
    return textwrap.fill(label.replace("+", "+ "), 22).replace("+ ", "+")


def _stacked(values: Floats, step: float) -> Floats:
    """Offsets that lay dots closer than ``step`` beside each other, alternately above and below the line."""
    offsets = np.zeros(len(values))
    bins = np.round(values / step) if step > 0 else np.zeros(len(values))
    for place in np.unique(bins):
        members = np.flatnonzero(bins == place)
        spacing = min(0.16, 0.7 / len(members))
        offsets[members] = spacing * (np.arange(len(members)) - (len(members) - 1) / 2)
    return offsets


def _block_means(matrix: Floats, edges: NDArray[np.int64]) -> Floats:
    """The mean over the distinct pairs of every block, (sources, sources); NaN for one model with itself."""
    apart = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
    size = len(edges) - 1
    means = np.full((size, size), np.nan)
    for row, column in np.ndindex(size, size):
        block = apart[edges[row] : edges[row + 1], edges[column] : edges[column + 1]]
        if np.isfinite(block).any():
            means[row, column] = np.nanmean(block)
    return means


def _spoken(labels: Sequence[str], values: Sequence[Floats]) -> str:
    parts = [
        f"{label}: {len(data)} between {data.min():.2f} and {data.max():.2f} %" if len(data) else f"{label}: none"
        for label, data in zip(labels, values, strict=True)
    ]
    return "; ".join(parts) + "."
