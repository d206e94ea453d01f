"""Figures as SVG that takes its colours and type from the page, so that one figure serves light, dark and print."""

from __future__ import annotations

import html
import io
import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#1f2328"
SOFT = "#6a737d"
GRID = "#d8dee4"
PAPER = "#ffffff"
MARK = "#0072b2"
REFERENCE = "#d55e00"
"""Blue for what is measured and vermilion for the reference: told apart by every kind of colour vision."""

VARIABLES = {INK: "ink", SOFT: "soft", GRID: "line", PAPER: "card", MARK: "mark", REFERENCE: "reference"}
"""The style sheet's variable that takes the place of each colour."""

WIDTH = 3.5
"""Inches. A figure is shown at 320 to 420 pixels, on a phone as on a desk, so that its type stays readable."""

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.edgecolor": GRID,
    "axes.labelcolor": SOFT,
    "axes.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
}


def settings(name: str) -> Any:
    """The settings that a figure is made and written with, whatever the user's own are.

    Args:
        name: keeps the identifiers inside the figure unique on the page.
    """
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    return defaults | _SETTINGS | {"svg.hashsalt": name}


def axes(height: float) -> tuple[Figure, Axes]:
    """A figure of the page's width with one panel, as large as its labels leave room for."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panel = figure.subplots()
    _bare(panel)
    return figure, panel


def panels(rows: int, columns: int, row: float, gap: float) -> tuple[Figure, list[Axes]]:
    """A figure of panels that share their axes, row by row, with room for a label at the left and at the bottom.

    Args:
        rows: of panels.
        columns: of panels.
        row: height of a panel in inches.
        gap: between two rows and above the first, in inches.
    """
    left, right, bottom = 0.55, 0.05, 0.42
    height = bottom + rows * (row + gap)
    figure = Figure(figsize=(WIDTH, height))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=left / WIDTH,
        right=1 - right / WIDTH,
        bottom=bottom / height,
        top=1 - gap / height,
        wspace=0.08,
        hspace=gap / row,
    )
    for panel in grid.flat:
        _bare(panel)
    return figure, list(grid.flat)


def _bare(panel: Axes) -> None:
    """Leave the axis of values as the only line of a panel, without ticks."""
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(length=0)


def svg(figure: Figure, description: str) -> str:
    """A figure as an ``<svg>`` element.

    Args:
        figure: drawn in the colours above; it has no background.
        description: what it shows, in words, for readers who do not see it.
    """
    target = io.StringIO()
    figure.patch.set_visible(False)
    for panel in figure.axes:
        panel.patch.set_visible(False)
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)  # none is referred to, and they repeat from figure to figure
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # the page's
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    head, _, body = text.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    label = html.escape(description)
    start = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box and box[0]}'
    return f'{start} role="img" aria-label="{label}">{body}'
