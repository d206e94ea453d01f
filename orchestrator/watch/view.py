"""What a person sees of a running sweep: a line, or a table that fits the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.naming import CellKey, cell_names
from orchestrator.watch.cells import Cell, Forecast
from orchestrator.watch.measures import Measures
from orchestrator.wording import count, device_time, duration

if TYPE_CHECKING:
    from orchestrator.analysis.intervals import Estimate

UNKNOWN = "ETA not known yet"


@dataclass(frozen=True, kw_only=True)
class View:
    """How far a sweep is, at one moment."""

    name: str
    cells: Mapping[CellKey, Cell]
    forecast: Forecast
    running: int
    retried: int = 0
    images_per_second: float | None = None
    measures: Measures
    notes: Sequence[str] = ()
    """Further lines."""

    @property
    def planned(self) -> int:
        """Runs of the plan."""
        return sum(cell.planned for cell in self.cells.values())

    @property
    def done(self) -> int:
        """Those with a record."""
        return sum(cell.done for cell in self.cells.values())

    @property
    def failed(self) -> int:
        """Those whose last attempt failed."""
        return sum(cell.failed for cell in self.cells.values())

    @property
    def over(self) -> bool:
        """Whether nothing is left to be done."""
        return not any(cell.left for cell in self.cells.values())


def facts(view: View) -> list[str]:
    """The state of a sweep, fact by fact."""
    parts = [f"{view.done:,}/{view.planned:,} done", f"{view.running:,} running", f"{view.failed:,} failed"]
    parts += [f"{view.retried:,} retried"] if view.retried else []
    if view.images_per_second:
        parts.append(f"{view.images_per_second:,.0f} images/s")
    if not view.over:
        remaining = view.forecast.remaining
        parts.append(UNKNOWN if remaining is None else f"about {time_left(remaining)} left")
    return parts + device_times(view.measures, view.forecast)


def device_times(measures: Measures, forecast: Forecast) -> list[str]:
    """Device time spent, and left as far as it can be told."""
    spent = sorted(measures.device_seconds.items())
    parts = [f"{device_time(seconds, unit)} spent" for unit, seconds in spent if seconds]
    if forecast.device_seconds:
        parts.append(f"about {device_time(forecast.device_seconds * measures.share, measures.unit)} left")
    return parts


def line(view: View) -> str:
    """The state of a sweep in one line."""
    return ", ".join(facts(view))


def time_left(seconds: float) -> str:
    """A time until something that has not happened yet, so at least a second."""
    return duration(max(seconds, 1.0))


def screen(view: View, console: Console) -> RenderableType:
    """The state of a sweep, with as many of its cells as the terminal has room for: the most active ones first."""
    width, height = console.size
    head: list[RenderableType] = [_bar(view, width), *map(Text, flow(facts(view), width))]
    notes = [Text(note, overflow="ellipsis", no_wrap=True) for note in view.notes]
    names = cell_names({key: cell.first for key, cell in view.cells.items()})
    varying = [part for part in range(3) if len({name[part] for name in names.values()}) > 1]
    common = [name for part, name in enumerate(next(iter(names.values()), ())[:3]) if part not in varying]
    # The lines above, one that is empty, two headings, and the one that the cursor is in.
    room = height - len(head) - len(notes) - 3 - bool(common)
    if room < 2:
        return Group(*head)
    shown, rest = chosen(list(view.cells.values()), room)
    unbounded = console.options.update(max_width=10_000)
    for detail in range(len(_DETAILS)):
        table = _table(view, shown, names, varying, detail)
        if Measurement.get(console, unbounded, table).maximum <= width:
            break
    parts = [*head, *notes, Text()]
    if common:
        parts.append(Text(" · ".join(common), style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts, table, *([Text(_others(rest), style="dim")] if rest else []))


def chosen(cells: Sequence[Cell], room: int) -> tuple[list[Cell], list[Cell]]:
    """The cells to be shown in so many lines, and the others.

    Those with the most running runs come first, then those with failed ones, then those with the most left; in the
    given order where all fit.
    """
    if len(cells) <= room:
        return list(cells), []
    ordered = sorted(cells, key=lambda cell: (-cell.running, -cell.failed, -cell.left / max(cell.planned, 1)))
    return ordered[: room - 1], ordered[room - 1 :]  # one line says how many there are besides


def flow(parts: Iterable[str], width: int) -> list[str]:
    """Parts joined by commas, in lines of at most ``width`` as far as no part is longer."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f", {part}"
        else:
            lines = [*(f"{line}," if number == len(lines) else line for number, line in enumerate(lines, 1)), part]
    return lines


def interval(estimate: Estimate, digits: int = 2) -> str:
    """A value and its interval, as far as they are known: ``0.41 [0.22, 0.77]``."""
    if math.isnan(estimate.value):
        return ""
    value = f"{estimate.value:.{digits}f}"
    if math.isnan(estimate.low):
        return value
    return f"{value} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def _others(cells: Sequence[Cell]) -> str:
    done, planned = sum(cell.done for cell in cells), sum(cell.planned for cell in cells)
    return f"... and {count(len(cells), 'more cell')}, {done:,}/{planned:,} done"


def _bar(view: View, width: int) -> RenderableType:
    share = view.done / max(view.planned, 1)
    row = Table.grid(padding=(0, 1), expand=False)
    percent = f"{math.floor(100 * share)} %"
    name = view.name if len(view.name) <= width // 2 else view.name[: width // 2 - 3] + "..."
    row.add_row(
        Text(name, style="bold"),
        ProgressBar(total=max(view.planned, 1), completed=view.done, width=max(min(40, width - len(name) - 8), 4)),
        percent,
    )
    return row


_DETAILS = (
    ("left", "mean interval", "sd interval"),
    ("left", "mean", "sd interval"),
    ("left", "sd interval"),
    ("left", "sd"),
    ("left",),
    (),
)
"""What a table shows beside counts, from the widest to the narrowest."""


def _table(
    view: View, cells: Sequence[Cell], names: Mapping[CellKey, Sequence[str]], varying: Sequence[int], detail: int
) -> Table:
    wanted = _DETAILS[detail]
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for part in varying:
        table.add_column(("trainer", "architecture", "dataset")[part], no_wrap=True, overflow="ellipsis")
    table.add_column("varies", no_wrap=True, overflow="ellipsis")
    headings = {"left": "left", "mean": "accuracy %", "sd": "accuracy SD"}
    for heading in ("done", "running", "failed", *(headings[each.split()[0]] for each in wanted)):
        right = heading in ("done", "running", "failed", "left")
        table.add_column(heading, no_wrap=True, justify="right" if right else "left")
    for cell in cells:
        name = names[cell.key]
        measured = view.measures.of(cell.key, adaptive=cell.first.adaptive)
        values = {
            "left": cell_left(cell, view.forecast),
            "mean": "" if measured is None else f"{measured.mean.value:.2f}",
            "mean interval": "" if measured is None else interval(measured.mean),
            "sd": "" if measured is None or math.isnan(measured.sd.value) else f"{measured.sd.value:.2f}",
            "sd interval": "" if measured is None else interval(measured.sd),
        }
        table.add_row(
            *(name[part] for part in varying),
            name[3],
            f"{cell.done:,}/{cell.planned:,}",
            Text(f"{cell.running:,}" if cell.running else "", style="cyan"),
            Text(f"{cell.failed:,}" if cell.failed else "", style="red"),
            *(values[each] for each in wanted),
        )
    return table


def cell_left(cell: Cell, forecast: Forecast) -> str:
    """The time until a cell is done, as a table shows it."""
    if not cell.left:
        return "done" if cell.done == cell.planned else ""
    seconds = forecast.cells.get(cell.key)
    return "?" if seconds is None else time_left(seconds)
