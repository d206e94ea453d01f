"""``list`` and ``show``: what there is. ``doctor``: whether this machine can run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from orchestrator import catalog
from orchestrator.cli import output
from orchestrator.cli.options import data_option, examples, json_option, protocol_options, store_option
from orchestrator.plan import expand
from protocols.errors import UserError, unknown
from protocols.load import PROTOCOLS, load_protocol
from protocols.protocol import Protocol
from protocols.recipe import Recipe
from protocols.sources import ALL, CONTROL, LIBRARY_KINDS, SOURCES

PUBLISHED_INPUT = (32, 32, 3)
"""(height, width, channels) for which parameters are counted, with 10 classes."""

Rows = list[dict[str, Any]]


def _protocols() -> Rows:
    rows = []
    for name in PROTOCOLS:
        protocol = load_protocol(name)
        rows.append({"name": name, "summary": protocol.summary, "cells": len(protocol.cells)})
    return rows


def _sources() -> Rows:
    rows: Rows = [{"name": source.name, "summary": source.summary} for source in SOURCES.values()]
    next(row for row in rows if row["name"] == "library")["kinds"] = LIBRARY_KINDS
    alone = ", ".join(name for name, source in SOURCES.items() if not source.in_all)
    rows.append({"name": CONTROL, "summary": "the control: nothing varies; every group gets it"})
    rows.append({"name": ALL, "summary": f"every source that the network and the recipe use, except {alone}"})
    return rows


def _architectures() -> Rows:
    trainers = {name: catalog.trainer(name) for name in catalog.names("trainer")}
    rows = []
    for name in catalog.names("architecture"):
        function = catalog.architecture(name)
        counts = {
            key: trainer.network(function, PUBLISHED_INPUT, 10, Recipe()).count for key, trainer in trainers.items()
        }
        rows.append({"name": name, "parameters": counts})
    return rows


def _datasets() -> Rows:
    rows = []
    for name in catalog.names("dataset"):
        definition = catalog.dataset(name)
        rows.append(
            {
                "name": name,
                "summary": definition.summary,
                "classes": definition.classes,
                "image_shape": list(definition.image_shape),
                "train_size": definition.train_size,
                "test_size": definition.test_size,
                "crop": definition.crop,
                "flip": definition.flip,
            }
        )
    return rows


def _trainers() -> Rows:
    rows = []
    for name in catalog.names("trainer"):
        trainer = catalog.trainer(name)
        try:
            catalog.require(name)
            missing = None
        except UserError as error:
            missing = str(error)
        rows.append(
            {
                "name": name,
                "installed": missing is None,
                "sources": sorted(trainer.sources),
                "library_kinds": list(trainer.library_kinds),
                "kernels": trainer.kernels,
                "missing": missing,
            }
        )
    return rows


KINDS: dict[str, Callable[[], Rows]] = {
    "protocols": _protocols,
    "sources": _sources,
    "architectures": _architectures,
    "datasets": _datasets,
    "trainers": _trainers,
}


@click.command("list", epilog=examples("sweep.py list", "sweep.py list sources", "sweep.py list architectures --json"))
@click.argument("kind", required=False, metavar="[" + "|".join(KINDS) + "]")
@json_option
def list_(kind: str | None, as_json: bool) -> int:
    """List what a study can be made of.

    Without a kind, everything.

    Parameters of architectures are counted for 3x32x32 images and 10 classes.
    """
    if kind is not None and kind not in KINDS:
        raise unknown("kind of thing to list", kind, KINDS)
    found = {name: KINDS[name]() for name in ([kind] if kind else KINDS)}
    if as_json:
        output.print_json(found[kind] if kind else found)
        return 0
    for number, (name, rows) in enumerate(found.items()):
        if number:
            click.echo()
        output.print_table([name, ""], [line for row in rows for line in _lines(row)])
    return 0


def _lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of one entry: its name and what is said of it."""
    if "parameters" in row:
        counts = sorted(set(row["parameters"].values()))
        return [(row["name"], " or ".join(f"{count:,}" for count in counts) + " parameters")]
    if "library_kinds" in row:
        sources, kinds = ", ".join(row["sources"]), ", ".join(row["library_kinds"])
        state = "can run here" if row["installed"] else row["missing"]
        return [(row["name"], f"sources {sources}; library kinds {kinds}; {state}")]
    nested = [(f"  {row['name']}={kind}", summary) for kind, summary in row.get("kinds", {}).items()]
    return [(row["name"], row["summary"]), *nested]


@click.command(
    epilog=examples(
        "sweep.py show quickstart",
        "sweep.py show summers2021-table1 --set dataset=mnist --set library=order",
        "sweep.py show ./study.py:make",
    )
)
@protocol_options
def show(protocol: Protocol) -> int:
    """Describe a protocol.

    What it compares, how it trains, which publication it follows and what differs from that.
    """
    click.echo(f"{protocol.name}: {protocol.summary}\n")
    facts = [
        ("follows", protocol.reference or "no publication"),
        *(("differs", deviation) for deviation in protocol.deviations),
        ("replicates", f"{protocol.replicates}, and {protocol.controls} of every group's control"),
        ("base seeds", ", ".join(map(str, protocol.base_seeds))),
        ("library", f"{protocol.library}: {LIBRARY_KINDS[protocol.library]}"),
        ("measures", ", ".join(protocol.measures)),
        ("margin", f"SDs within a factor {protocol.margin:g} count as alike"),
        *(("recipe", _recipe(recipe)) for recipe in dict.fromkeys(cell.recipe for cell in protocol.cells)),
        ("runs", _runs(protocol)),
    ]
    output.print_table(["", ""], facts)
    cells = [(cell.trainer, cell.architecture, cell.dataset, cell.source) for cell in protocol.cells]
    click.echo()
    output.print_table(["trainer", "architecture", "dataset", "varies"], dict.fromkeys(cells))
    return 0


def _recipe(recipe: Recipe) -> str:
    values = dataclasses.asdict(recipe)
    for name in ("crop", "flip"):
        if values[name] is None:
            values[name] = "the dataset's standard"
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _runs(protocol: Protocol) -> str:
    try:
        runs = expand(protocol)
    except UserError as error:
        return f"cannot be planned as it stands: {error}"
    groups = len({entry.group for entry in runs})
    return f"{len(runs):,} in {output.count(groups, 'group')}"


@click.command(epilog=examples("sweep.py doctor", "sweep.py doctor --store results/ --data-root ~/data"))
@store_option
@data_option
def doctor(store: str, data_root: Path | None) -> int:
    """Examine this machine, line by line: ok, warn or fail.

    It looks at versions, devices, environment, data and the store, which it creates if need be. Exits 1 if something
    cannot work.
    """
    from orchestrator.doctor import examine

    findings = list(examine(store, data_root))
    output.print_table(["", "", ""], [(finding.level, finding.subject, finding.text) for finding in findings])
    return int(any(finding.level == "fail" for finding in findings))
