"""How a plan and its cells are named, in texts and in JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from orchestrator.cli import output
from orchestrator.cli.options import Study
from orchestrator.plan import Plan, Planned
from protocols.sources import HELD


def headline(study: Study, plan: Plan) -> str:
    """The study's counts, in a sentence or two."""
    text = (
        f"{plan.protocol.name}: {output.count(len(plan.planned), 'run')} planned, {len(plan.done):,} done, "
        f"{len(plan.missing):,} missing in {study.store_url}"
    )
    if plan.unplanned:
        text += f"\nThe store also holds {output.count(plan.unplanned, 'record')} that this plan does not ask for."
    return text


def cell_values(key: Sequence[str], entries: Sequence[Planned]) -> dict[str, Any]:
    """What names a cell in JSON."""
    trainer, architecture, dataset, group, source = key
    run = entries[0].run
    return {
        "source": source,
        "varies": list(run.varies),
        "library": run.library,
        "architecture": architecture,
        "dataset": dataset,
        "trainer": trainer,
        "base_seed": run.base_seed,
        "group": group,
    }


def cell_names(plan: Plan) -> dict[tuple[str, str, str, str, str], tuple[str, str, str, str]]:
    """Trainer, architecture, dataset and varying sources of each cell, for tables.

    The library's kind stands with it, and what tells groups of one trainer, architecture and dataset apart with the
    architecture.
    """
    cells = plan.cells()
    groups: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for trainer, architecture, dataset, group, _ in cells:
        groups[trainer, architecture, dataset][group] = None
    names = {}
    for key, entries in cells.items():
        trainer, architecture, dataset, group, source = key
        run = entries[0].run
        shown = f"{source} ({run.library})" if run.library != HELD else source
        among = list(groups[trainer, architecture, dataset])
        number = f" #{among.index(group) + 1}" if len(among) > 1 else ""
        names[key] = (trainer, architecture + number, dataset, shown)
    return names
