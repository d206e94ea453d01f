"""How a plan, its cells and their recipes are named, in texts and in JSON."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from orchestrator import naming
from orchestrator.cli import output
from orchestrator.cli.options import Study
from orchestrator.plan import Plan, Planned
from protocols.protocol import Protocol
from protocols.recipe import Recipe


def headline(study: Study, plan: Plan) -> str:
    """The study's counts, in a sentence or two."""
    text = (
        f"{plan.protocol.name}: {output.count(len(plan.planned), 'run')} planned, {len(plan.done):,} done, "
        f"{len(plan.missing):,} missing in {study.store_url}"
    )
    if plan.further:
        text += f"\nUp to {output.count(plan.further, 'more run')} may be added, as looks decide."
    if plan.unplanned:
        text += f"\nThe store also holds {output.count(plan.unplanned, 'record')} that this plan does not ask for."
    return text


def until_values(protocol: Protocol) -> dict[str, Any] | None:
    """What is declared of looks in JSON; None where replicates are fixed."""
    until = protocol.until
    if until is None:
        return None
    return {**dataclasses.asdict(until), "looks": list(until.schedule), "level": until.level}


def cell_values(key: Sequence[str], entries: Sequence[Planned]) -> dict[str, Any]:
    """What names a cell in JSON."""
    trainer, architecture, dataset, group, source = key
    run = entries[0].run
    return {
        "source": source,
        "varies": list(run.varies),
        "library": run.library,
        "asynchrony": run.asynchrony,
        "perturb": None if run.perturb is None else dataclasses.asdict(run.perturb),
        "architecture": architecture,
        "dataset": dataset,
        "trainer": trainer,
        "recipe": dataclasses.asdict(run.recipe),
        "base_seed": run.base_seed,
        "group": group,
    }


def cell_names(plan: Plan) -> dict[naming.CellKey, tuple[str, str, str, str]]:
    """Trainer, architecture, dataset and varying sources of each cell, see :func:`orchestrator.naming.cell_names`."""
    return naming.cell_names({key: entries[0] for key, entries in plan.cells().items()})


def legend(plan: Plan) -> Iterator[str]:
    """What the numbers of :func:`cell_names` stand for, line by line."""
    alike: dict[tuple[str, ...], list[tuple[str, str]]] = defaultdict(list)
    for (_, architecture, dataset), groups in _families(plan).items():
        if len(groups) > 1:
            runs = [entry.run for entry in groups.values()]
            seeds = [f"base seed {run.base_seed}" if len({run.base_seed for run in runs}) > 1 else "" for run in runs]
            recipes = differences([run.recipe for run in runs])
            texts = (", ".join(filter(None, parts)) or "defaults" for parts in zip(recipes, seeds, strict=True))
            alike[tuple(texts)].append((architecture, dataset))
    for numbered, places in alike.items():
        yield f"{listed(name for name, _ in places)} on {listed(name for _, name in places)}:"
        yield from (f"  #{number} {text}" for number, text in enumerate(numbered, start=1))


def differences(recipes: Sequence[Recipe]) -> list[str]:
    """What tells recipes apart: of the fields in which they differ, those that do not have their default value."""
    names = [field.name for field in dataclasses.fields(Recipe)]
    differing = [name for name in names if len({getattr(recipe, name) for recipe in recipes}) > 1]
    default = Recipe()
    return [
        ", ".join(
            f"{name} {written(getattr(recipe, name))}"
            for name in differing
            if getattr(recipe, name) != getattr(default, name)
        )
        for recipe in recipes
    ]


def written(value: object) -> str:
    """A recipe's value as ``--set`` takes it."""
    if isinstance(value, tuple):
        return "+".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def listed(names: Iterable[str]) -> str:
    """Each name once, joined by commas."""
    return ", ".join(dict.fromkeys(names))


def _families(plan: Plan) -> dict[tuple[str, str, str], dict[str, Planned]]:
    return naming.families({key: entries[0] for key, entries in plan.cells().items()})
