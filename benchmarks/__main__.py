"""``python -m benchmarks trainer [--quick] [--json FILE]``: a table for people, JSON for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

FRAMEWORKS = ("torch", "tensorflow")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def benchmarks() -> None:
    """Measure speed. Every figure is a ratio of medians measured in turn inside one run."""


@benchmarks.command()
@click.option("--quick", is_flag=True, help="Fewer repetitions.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Also write the figures to a file.")
def trainer(quick: bool, file: Path | None) -> None:
    """Training throughput over the bare forward-backward-update loop on a resident batch, one CPU thread."""
    figures: list[dict[str, Any]] = []
    for framework in FRAMEWORKS:
        command = [sys.executable, "-m", "benchmarks.trainer", framework, *(["--quick"] if quick else [])]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False)
        if done.returncode:
            raise click.ClickException(done.stderr)
        figures += json.loads(done.stdout.splitlines()[-1])
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")
    table = Table("figure", "ratio", "trainer, images/s", "bare loop, images/s", box=None)
    for figure in figures:
        values = (f"{figure[key]:{form}}" for key, form in (("ratio", ".3f"), ("trainer", ",.0f"), ("bare", ",.0f")))
        table.add_row(figure["name"], *values)
    Console().print(table)


@benchmarks.command()
@click.option("--quick", is_flag=True, help="Fewer runs.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Also write the figures to a file.")
def orchestration(quick: bool, file: Path | None) -> None:
    """What a run costs beside its training, on four fake GPUs: against stock Ray Tune, and for thousands of runs.

    Exits 1 if a ratio is beyond its limit.
    """
    figures: list[dict[str, Any]] = []
    for measure in ("overhead", "slots", "ideal", "scale", "resume"):
        command = [sys.executable, "-m", "benchmarks.orchestration", measure, *(["--quick"] if quick else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(done.stderr)
        figures += json.loads(done.stdout.splitlines()[-1])
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")
    table = Table("figure", "ratio", "limit", "what it is", box=None)
    beyond = 0
    for figure in figures:
        low, high, ratio = figure.get("at_least"), figure.get("at_most"), figure["ratio"]
        limit = f"at least {low:g}" if low is not None else f"at most {high:g}" if high is not None else ""
        kept = (low is None or ratio >= low) and (high is None or ratio <= high)
        beyond += not kept
        table.add_row(figure["name"], f"{ratio:.3f}", limit if kept else f"NOT {limit}", figure["meaning"])
    Console().print(table)
    sys.exit(beyond > 0)


@benchmarks.command()
@click.option("--quick", is_flag=True, help="2,000 records instead of 20,000.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Also write the figures to a file.")
def store(quick: bool, file: Path | None) -> None:
    """What 20,000 records cost to compact and to read, loose and compacted. Takes minutes to make them."""
    command = [sys.executable, "-m", "benchmarks.store", *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(done.stderr)
    figures: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")
    table = Table(Column("figure", no_wrap=True), "ratio", "seconds", "processor", "limit", "ratio of", box=None)
    for figure in figures:
        seconds = [
            f"{figure[key]:.2f}" if figure.get(key) else "" for key in ("seconds", "cpu_seconds", "limit_seconds")
        ]
        table.add_row(figure["name"], f"{figure['ratio']:.3f}", *seconds, figure["meaning"])
    Console().print(table)


if __name__ == "__main__":
    benchmarks()
