"""Options that several verbs share, and the study that they name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from orchestrator.plan import Plan, plan
from orchestrator.store import Store, open_store
from protocols.load import load_protocol
from protocols.overrides import apply_settings, select_cells
from protocols.protocol import Protocol

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

store_option: Decorator = click.option(
    "--store",
    default="results/",
    envvar="NOISEGRID_STORE",
    show_default=True,
    show_envvar=True,
    help="Where the records are: a folder, or s3://BUCKET/FOLDER.",
)

data_option: Decorator = click.option(
    "--data-root",
    type=click.Path(path_type=Path),
    envvar="NOISEGRID_DATA",
    show_envvar=True,
    help="Folder of the datasets; without it they are fetched into a cache.",
)

json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A protocol, as changed on the command line, and the store that its records are in."""

    protocol: Protocol
    store_url: str
    command: str
    """The command that runs it."""

    def store(self, *, create: bool = False) -> Store:
        """The store; an empty one that cannot be written where there is none and ``create`` is False."""
        return open_store(self.store_url, create=create)

    def plan(self, store: Store, *, gpus_per_run: float | None = None) -> Plan:
        """What is done and what is missing."""
        return plan(self.protocol, store, gpus_per_run=gpus_per_run)


def protocol_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """PROTOCOL, ``--set`` and ``--only``, given to the command as ``protocol``."""

    @_protocol_parameters
    @functools.wraps(command)
    def wrapped(protocol: str, settings: tuple[str, ...], only: tuple[str, ...], **options: Any) -> Any:
        return command(protocol=_changed(protocol, settings, only), **options)

    return wrapped


def study_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The protocol's options and ``--store``, given to the command as ``study``."""

    @_protocol_parameters
    @store_option
    @functools.wraps(command)
    def wrapped(protocol: str, settings: tuple[str, ...], only: tuple[str, ...], store: str, **options: Any) -> Any:
        changes = [*(f"--set {text}" for text in settings), *(f"--only {text}" for text in only)]
        study = Study(
            protocol=_changed(protocol, settings, only),
            store_url=store,
            command=" ".join(["sweep.py run", protocol, *changes, "--store", store]),
        )
        return command(study=study, **options)

    return wrapped


def _protocol_parameters(command: Callable[..., Any]) -> Callable[..., Any]:
    for parameter in (
        click.option(
            "--only",
            multiple=True,
            metavar="KEY=VALUE,...",
            help="Keep some cells: source=init,shuffle, or recipe.cycles=5.",
        ),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="FIELD=VALUE,...",
            help="Change a field: recipe.epochs=20. Several values multiply the cells: perturb.step=10,100. Sources "
            "also by design: source=factorial:init+shuffle, source=all-but-one:init+shuffle.",
        ),
        click.argument("protocol", required=False, default="quickstart", envvar="NOISEGRID_PROTOCOL"),
    ):
        command = parameter(command)
    return command


def _changed(name: str, settings: tuple[str, ...], only: tuple[str, ...]) -> Protocol:
    return select_cells(apply_settings(load_protocol(name), settings), only)


def gpus_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--gpus-per-run``, by default 1 where this machine has an NVIDIA device."""

    @click.option(
        "--gpus-per-run",
        type=click.FloatRange(min=0),
        envvar="NOISEGRID_GPUS_PER_RUN",
        callback=finite,
        show_envvar=True,
        help="GPUs of each run; default 1 if this machine has one, else 0 (a CPU core).",
    )
    @functools.wraps(command)
    def wrapped(gpus_per_run: float | None, **options: Any) -> Any:
        if gpus_per_run is None:
            from orchestrator.devices import has_gpu

            gpus_per_run = float(has_gpu())
        return command(gpus_per_run=gpus_per_run, **options)

    return wrapped


def finite(ctx: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Refuse nan and infinity, which a range lets pass."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", ctx=ctx, param=option)
    return value


def examples(*lines: str) -> str:
    """The end of a verb's help."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
