"""Every combination of source, architecture, dataset and trainer: does it build, and does it take three steps?

``python -m tests.matrix`` tries them all and writes the table that docs/combinations.md shows; it takes about half
an hour.
The tests take the rows and columns of the table and a seeded sample of its inside.

Data are looked for in NOISEGRID_DATA (and fetched nowhere): a dataset that is not there is reported as such.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from orchestrator import catalog
from orchestrator.plan import expand
from protocols.contract import Dataset
from protocols.errors import UserError
from protocols.protocol import Cell, DatasetSpec, Protocol
from protocols.recipe import Recipe
from tests.runs import MemoryContext

ROOT = Path(__file__).parents[1]
STEPS, BATCH = 3, 4

TRAINERS = ("torch", "tensorflow")
SOURCES = ("init", "shuffle", "augment", "dropout", "library", "onebit", "async", "hardware", "all")
PHOTOGRAPHS = "tests.real_data:photographs"
BOOK = "tests.real_data:book"
LOSSY_CIFAR10 = "tests.real_data:cifar10_layout"
DATASETS = (
    "digits",
    "mnist",
    "fashion-mnist",
    "cifar10",
    LOSSY_CIFAR10,
    "cifar100",
    "imagenet",
    PHOTOGRAPHS,
    "ptb",
    BOOK,
)
SMALLEST = ("digits", BOOK, PHOTOGRAPHS)
"""Where an architecture is tried alone: on the first of these that it fits."""


@dataclass(frozen=True, order=True)
class Combination:
    """One cell of the table."""

    architecture: str
    dataset: str
    trainer: str
    source: str = "init"

    def __str__(self) -> str:
        return "-".join((self.source, self.architecture, self.dataset.rpartition(":")[2], self.trainer))


def architectures() -> tuple[str, ...]:
    return tuple(catalog.names("architecture"))


def everything() -> list[Combination]:
    return [
        Combination(architecture, dataset, trainer, source)
        for architecture in architectures()
        for dataset in DATASETS
        for trainer in TRAINERS
        for source in SOURCES
    ]


def sample(of: Iterable[Combination], share: float, seed: int = 0) -> list[Combination]:
    """A seeded share of some combinations."""
    found = sorted(of)
    return random.Random(seed).sample(found, round(share * len(found)))


def protocol(combination: Combination) -> Protocol:
    """Three steps of one run."""
    dataset = combination.dataset
    classes = catalog.dataset(dataset).classes
    text = len(catalog.image_shape(catalog.dataset(dataset), DatasetSpec(name=dataset))) == 1
    size = STEPS * BATCH if text else max(classes, STEPS * BATCH)
    batch = -(-size // STEPS)
    return Protocol(
        name="three-steps",
        summary="three steps",
        cells=(
            Cell(
                source=combination.source,
                architecture=combination.architecture,
                dataset=DatasetSpec(name=dataset, train_size=size, test_size=8 if text else max(classes, 8)),
                trainer=combination.trainer,
                recipe=Recipe(
                    epochs=1,
                    batch_size=batch,
                    warmup_epochs=0.0,
                    async_workers=2 if combination.source == "async" else 1,
                ),
            ),
        ),
        replicates=1,
        library="order",
    )


@functools.cache
def data(spec: DatasetSpec) -> Dataset:
    """The examples, kept for the next combination.

    Raises:
        UserError: they are not on this machine.
    """
    if "NOISEGRID_DATA" not in os.environ and spec.name not in ("digits", "fashion-mnist", BOOK):
        raise UserError(f"NOISEGRID_DATA does not say where {spec.name} is")
    return catalog.prepare(spec, None)


def attempt(combination: Combination) -> str:
    """Try one: ``ok``, or in one line why it makes no sense or has no data here.

    Raises:
        Exception: whatever goes wrong that should not.
    """
    try:
        catalog.dataset(combination.dataset)
    except UserError as error:
        return f"no data: {error}"
    try:
        planned = [entry for entry in expand(protocol(combination)) if entry.run.varies]
    except UserError as error:
        assert "\n" not in str(error)
        return f"senseless: {error}"
    run = planned[0].run
    try:
        examples = data(run.dataset)
    except UserError as error:
        return f"no data: {error}"
    outcome = catalog.train(run.trainer)(run, examples, MemoryContext())
    assert outcome.losses.shape == (STEPS,) and len(outcome.logits) == len(examples.test_labels)
    assert outcome.status == "ok" or not np.isfinite(outcome.losses).all()
    return "ok"


def table(combinations: Iterable[Combination]) -> Iterator[tuple[Combination, str]]:
    """Try many, those with a network and dataset in common one after the other, so that it is built once."""
    for combination in sorted(combinations):
        try:
            yield combination, attempt(combination)
        except Exception as error:  # a table of everything must get to its end
            yield combination, f"FAILED: {type(error).__name__}: {error}".splitlines()[0]


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "docs" / "combinations.md", show_default=True)
@click.option("--share", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="Share that is tried.")
def main(output: Path, share: float) -> None:
    """Try every combination and write the table."""
    from rich.progress import track

    chosen, began = sample(everything(), share), time.monotonic()
    found = dict(track(table(chosen), total=len(chosen), description="combinations"))
    output.write_text(_page(found, time.monotonic() - began, share))
    counts = Counter(result.partition(":")[0] for result in found.values())
    click.echo(", ".join(f"{count} {name}" for name, count in counts.items()))
    raise SystemExit("FAILED" in counts)


def _page(found: dict[Combination, str], seconds: float, share: float) -> str:
    """One row an architecture and trainer, one column a dataset: how many of the sources took three steps."""
    names = {dataset: dataset.rpartition(":")[2] for dataset in DATASETS}
    counts = Counter(result.partition(":")[0] for result in found.values())
    lines = [
        "# Combinations",
        "",
        "What `python -m tests.matrix` found when it was last run: every source, architecture, dataset and trainer, "
        "three steps each.",
        "",
        f"{len(found):,} combinations ({share:.0%} of all, drawn by a seed) in {seconds / 60:.0f} minutes: "
        f"{counts['ok']:,} took their steps, {counts['senseless']:,} make no sense and are refused by `plan` in one "
        f"line, {counts['no data']:,} had no data on that machine, {counts['FAILED']:,} failed.",
        "",
        f"A number says how many of {len(SOURCES)} sources ({', '.join(SOURCES)}) took their steps; `-`: the network "
        "does not fit the data; `?`: no data there. `photographs` are real photographs in ImageFolder layout, `book` "
        "is a file of text, `cifar10_layout` has CIFAR-10's layout and other pixels.",
        "",
        "| architecture | trainer | " + " | ".join(names.values()) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for architecture in architectures():
        for trainer in TRAINERS:
            cells = []
            for dataset in DATASETS:
                results = [
                    result
                    for combination, result in found.items()
                    if (combination.architecture, combination.trainer, combination.dataset)
                    == (architecture, trainer, dataset)
                ]
                kinds = Counter(result.partition(":")[0] for result in results)
                failed = f" ({kinds['FAILED']} failed)" if kinds["FAILED"] else ""
                cells.append(f"{kinds['ok']}{failed}" if kinds["ok"] or failed else "?" if kinds["no data"] else "-")
            lines.append(f"| {architecture} | {trainer} | " + " | ".join(cells) + " |")
    reasons = Counter(result.removeprefix("senseless: ") for result in found.values() if result.startswith("senseless"))
    failures = [f"- {combination}: {result}" for combination, result in found.items() if result.startswith("FAILED")]
    lines += ["", "## Refused", ""] + [f"- {count} x {reason}" for reason, count in reasons.most_common(40)]
    return "\n".join([*lines, *(["", "## Failed", "", *failures] if failures else [])]) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp(prefix="noisegrid-matrix-"))
    main()
