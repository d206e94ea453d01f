"""How the cells of a plan are named wherever a person reads of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from orchestrator.plan import Planned
from protocols.sources import source_title

CellKey = tuple[str, str, str, str, str]
"""Trainer, architecture, dataset, group and source, as in :meth:`orchestrator.plan.Plan.cells`."""


def cell_names(cells: Mapping[CellKey, Planned]) -> dict[CellKey, tuple[str, str, str, str]]:
    """Trainer, architecture, dataset and varying sources of each cell, for tables.

    The kinds of library and asynchrony stand with the sources. A number tells groups of one trainer, architecture and
    dataset apart, in the order of :func:`families`.

    Args:
        cells: any run of each.
    """
    among, names = families(cells), {}
    for key, entry in cells.items():
        trainer, architecture, dataset, group, source = key
        groups = list(among[trainer, architecture, dataset])
        number = f" #{groups.index(group) + 1}" if len(groups) > 1 else ""
        shown = source_title(source, entry.run.library, entry.run.asynchrony)
        names[key] = (trainer, architecture + number, dataset, shown)
    return names


def families(cells: Mapping[CellKey, Planned]) -> dict[tuple[str, str, str], dict[str, Planned]]:
    """For each trainer, architecture and dataset its groups, with a run of each."""
    found: dict[tuple[str, str, str], dict[str, Planned]] = defaultdict(dict)
    for (trainer, architecture, dataset, group, _), entry in cells.items():
        found[trainer, architecture, dataset].setdefault(group, entry)
    return found
