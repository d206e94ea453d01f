"""``list`` and ``show``: what there is. ``doctor``: whether this machine can run it."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from orchestrator import catalog
from orchestrator.cli import output
from orchestrator.cli.cells import listed, until_values, written
from orchestrator.cli.options import data_option, examples, json_option, protocol_options, store_option
from orchestrator.plan import expand, further_runs
from protocols.errors import UserError, unknown
from protocols.load import PROTOCOLS, load_protocol
from protocols.perturbation import Perturbation
from protocols.protocol import ISOLATIONS, KEEP, Cell, Protocol
from protocols.recipe import VIEWS, Recipe
from protocols.sources import ALL, ALL_BUT, ASYNCHRONIES, CONTROL, LIBRARY_KINDS, SOURCES

_PHOTOGRAPHS, _WORDS = ((224, 224, 3), 1000), ((35,), 10_000)
INPUTS: dict[str, tuple[tuple[int, ...], int]] = {
    "mnistnet": ((28, 28, 1), 10),
    "imagenet_resnet18": _PHOTOGRAPHS,
    "imagenet_resnet34": _PHOTOGRAPHS,
    "imagenet_resnet50": _PHOTOGRAPHS,
    "lstm": _WORDS,
    "qrnn": _WORDS,
}
"""Shape of an example and number of classes for which parameters are counted; else 32x32x3 and 10."""

Rows = list[dict[str, Any]]


def _protocols() -> Rows:
    rows = []
    for name in PROTOCOLS:
        protocol = load_protocol(name)
        row = {"name": name, "summary": protocol.summary, "reference": protocol.reference}
        counts = {"cells": len(protocol.cells), "runs": count_runs(protocol), "until": until_values(protocol)}
        rows.append({**row, **counts})
    return rows


def count_runs(protocol: Protocol) -> int:
    """How many runs a protocol plans if its cells are as many as they look; needs no look at networks and data.

    Of cells whose replicates are looked at, the most that there may be.
    """
    varying = [cell for cell in protocol.cells if cell.source != CONTROL]
    groups = {
        dataclasses.replace(cell, source=CONTROL, perturb=Perturbation(), replicates=None, priority=0)
        for cell in protocol.cells
    }
    runs = sum(cell.replicates or protocol.replicates for cell in varying) + len(groups) * protocol.controls
    runs *= len(protocol.base_seeds)
    if protocol.until is not None and protocol.until.budget is not None:
        most = sum(cell.replicates is None for cell in varying) * protocol.replicates * len(protocol.base_seeds)
        runs -= max(0, most - protocol.until.budget)
    return runs


def _sources() -> Rows:
    rows: Rows = [{"name": source.name, "summary": source.summary} for source in SOURCES.values()]
    for name, field, kinds in (("library", "library", LIBRARY_KINDS), ("async", "asynchrony", ASYNCHRONIES)):
        next(row for row in rows if row["name"] == name).update(field=field, kinds=kinds)
    alone = ", ".join(name for name, source in SOURCES.items() if not source.in_all)
    rows.append({"name": CONTROL, "summary": "the control: nothing varies; every group gets it"})
    rows.append({"name": ALL, "summary": f"every source that the network and the recipe use, except {alone}"})
    rows.append({"name": f"{ALL_BUT}SOURCE", "summary": "every source of all but that one"})
    rows.append({"name": "SOURCE+SOURCE", "summary": "several at once"})
    return rows


def _mitigations() -> Rows:
    return [
        {"name": "recipe.views", "summary": "test-time augmentation: the logits of views are averaged", "kinds": VIEWS},
        {"name": "recipe.cycles", "summary": "accelerated ensembling: so many schedules in the same epochs"},
        {"name": "recipe.ema_decay", "summary": "exponential moving average of weights"},
        {"name": "recipe.swa_epochs", "summary": "stochastic weight averaging over the last so many epochs"},
        {"name": "recipe.label_smoothing", "summary": "share of each target that is spread over all classes"},
        {"name": "recipe.warmup_epochs", "summary": "a longer warm-up"},
        {"name": "recipe.learning_rate", "summary": "a lower rate"},
        {"name": "ensemble", "summary": "deep ensembles of so many replicates: the costly reference"},
    ]


def _architectures() -> Rows:
    trainers = {name: catalog.trainer(name) for name in catalog.names("trainer")}
    rows = []
    for name in catalog.names("architecture"):
        function = catalog.architecture(name)
        shape, classes = INPUTS.get(name, ((32, 32, 3), 10))
        counts = {key: trainer.network(function, shape, classes, Recipe()).count for key, trainer in trainers.items()}
        rows.append({"name": name, "parameters": counts, "input": list(shape), "classes": classes})
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
    "mitigations": _mitigations,
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
        counts = " or ".join(f"{count:,}" for count in sorted(set(row["parameters"].values())))
        kind = "x".join(map(str, row["input"])) if len(row["input"]) > 1 else f"{row['input'][0]} tokens"
        return [(row["name"], f"{counts} parameters for {kind} and {row['classes']:,} classes")]
    if "runs" in row:
        published = f"; {row['reference'].rpartition('. ')[2]}" if row["reference"] else ""
        most = "at most " if row["until"] else ""
        counts = f"{output.count(row['cells'], 'cell')}, {most}{output.count(row['runs'], 'run')}"
        return [(row["name"], f"{row['summary']} ({counts}{published})")]
    if "library_kinds" in row:
        sources, kinds = ", ".join(row["sources"]), ", ".join(row["library_kinds"])
        state = "can run here" if row["installed"] else row["missing"]
        return [(row["name"], f"sources {sources}; library kinds {kinds}; {state}")]
    field = row.get("field", row["name"])
    nested = [(f"  {field}={kind}", summary) for kind, summary in row.get("kinds", {}).items()]
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
    recipes = list(dict.fromkeys(cell.recipe for cell in protocol.cells))
    facts = [
        ("follows", protocol.reference or "no publication"),
        *(("differs", deviation) for deviation in protocol.deviations),
        ("replicates", f"{protocol.until or protocol.replicates}, and {protocol.controls} of every group's control"),
        ("base seeds", ", ".join(map(str, protocol.base_seeds))),
        ("library", f"{protocol.library}: {LIBRARY_KINDS[protocol.library]}"),
        *(("async", f"{kind}: {text}") for kind, text in ASYNCHRONIES.items() if _asynchronous(protocol, kind)),
        *(("keeps", f"{name}: {KEEP[name]}") for name in protocol.keep),
        *([("ensembles", f"of {protocol.ensemble} replicates each")] if protocol.ensemble else []),
        *([("isolation", ISOLATIONS[protocol.isolation])] if protocol.isolation != "profile" else []),
        *([("between runs", protocol.between_runs)] if protocol.between_runs else []),
        ("measures", ", ".join(protocol.measures)),
        ("margin", f"SDs within a factor {protocol.margin:g} count as alike"),
        *((f"recipe #{number}", text) for number, text in enumerate(_recipes(recipes), start=1)),
        *_cost(protocol),
    ]
    output.print_table(["", ""], facts)
    click.echo()
    output.print_table(["trainer", "architectures", "dataset", "recipe", "varies"], _alike(protocol, recipes))
    return 0


def _asynchronous(protocol: Protocol, kind: str) -> bool:
    return kind == protocol.asynchrony and any(cell.recipe.async_workers > 1 for cell in protocol.cells)


def _recipes(recipes: Sequence[Recipe]) -> list[str]:
    """The first recipe whole, of the others what differs from it."""
    first, *others = (dataclasses.asdict(recipe) for recipe in recipes)
    texts = [_settings(first)]
    for other in others:
        texts.append("as #1, but " + _settings({name: value for name, value in other.items() if value != first[name]}))
    return texts


def _settings(values: Mapping[str, object]) -> str:
    standard = {name: "the dataset's standard" for name in ("crop", "flip") if values.get(name, 0) is None}
    return ", ".join(f"{name} {standard.get(name) or written(value)}" for name, value in values.items())


def _alike(protocol: Protocol, recipes: Sequence[Recipe]) -> list[tuple[str, str, str, str, str]]:
    """The cells, with those in one line that differ in nothing but their architectures or their sources."""
    fixed = protocol.replicates if protocol.until is None else None
    varied: dict[Cell, dict[int | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for cell in protocol.cells:
        varies = cell.source + (f"[{cell.perturb.label}]" if cell.perturb.label else "")
        group = dataclasses.replace(cell, source=CONTROL, perturb=Perturbation(), replicates=None, priority=0)
        varied[group][cell.replicates or fixed].append(varies)
    lines: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for cell, sources in varied.items():
        number = f"#{recipes.index(cell.recipe) + 1}"
        often = {count: "" if count in (fixed, None) else f" ({count} replicates)" for count in sources}
        texts = listed(listed(names) + often[count] for count, names in sources.items())
        lines[cell.trainer, str(cell.dataset), number, texts].append(cell.architecture)
    return [
        (trainer, listed(names), dataset, number, sources)
        for (trainer, dataset, number, sources), names in lines.items()
    ]


def _cost(protocol: Protocol) -> list[tuple[str, str]]:
    """What the protocol costs, in all and by architecture, largest first."""
    try:
        planned, further = expand(protocol), further_runs(protocol)
    except UserError as error:
        return [("runs", f"cannot be planned as it stands: {error}")]
    examples: Counter[str] = Counter()
    networks: Counter[str] = Counter()
    for entry in planned:
        examples[entry.run.architecture] += entry.examples * entry.run.recipe.epochs
        networks[entry.run.architecture] += 1
    groups = output.count(len({entry.group for entry in planned}), "group")
    total = f"about {output.amount(examples.total())} training examples through {output.count(len(planned), 'network')}"
    more = f", and up to {further:,} more, as looks decide" if further else ""
    facts = [("runs", f"{len(planned):,} in {groups}{more}"), ("cost", total + (" without these" if further else ""))]
    if len(examples) > 1:
        facts += [
            ("", f"{name}: {output.amount(count)} through {networks[name]:,}") for name, count in examples.most_common()
        ]
    return facts


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
