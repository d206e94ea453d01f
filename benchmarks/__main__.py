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
from rich.table import Table

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


if __name__ == "__main__":
    benchmarks()
