"""Whether this machine can run studies, and run them reproducibly: versions, devices, environment, store, data."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from orchestrator import catalog, devices
from orchestrator.provenance import NUMERIC_VARIABLES
from orchestrator.store import open_store
from protocols.errors import UserError
from protocols.protocol import DatasetSpec

PACKAGES = {
    "numpy": True,
    "scipy": True,
    "pandas": True,
    "pyarrow": True,
    "click": True,
    "rich": True,
    "ray": False,
    "scikit-learn": False,
    "pillow": False,
    "torch": False,
    "tensorflow": False,
    "jinja2": False,
    "matplotlib": False,
}
"""What the examination names, and whether the base install needs it."""

CONFLICTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
        "both write the same libcudnn files and the last one installed wins; use one environment per framework",
    ),
    (
        ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
        "both write the same libnccl file and the last one installed wins; use one environment per framework",
    ),
    (
        ("tensorflow", "tensorflow-cpu"),
        "both write the same files and the last one installed wins; uninstall both, then install one",
    ),
)
"""Distributions that pip installs side by side although they overwrite each other's files."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the examination."""

    level: str
    """``ok``; ``warn``: something may go wrong; ``fail``: something cannot work."""
    subject: str
    text: str


def examine(store: str, data_root: Path | None) -> Iterator[Finding]:
    """Look at this machine, one finding after another.

    Args:
        store: where the records are to go; it is created if need be, and written to.
        data_root: the folder that datasets are read from; None: there is none to examine.
    """
    installed = _installed()
    yield _python()
    yield from _packages(installed)
    yield from conflicts(installed)
    yield from _devices()
    yield from _switches(os.environ)
    yield from (_trainer(name) for name in catalog.names("trainer"))
    yield _store(store)
    yield from _datasets(data_root)


def conflicts(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Installed distributions that overwrite each other's files.

    Args:
        installed: distribution name, in lower case with hyphens -> version.
    """
    for names, reason in CONFLICTS:
        present = [f"{name} {installed[name]}" for name in names if name in installed]
        if len(present) > 1:
            yield Finding(level="warn", subject="conflict", text=f"{' and '.join(present)} are installed: {reason}")


def _python() -> Finding:
    enough = sys.version_info >= (3, 11)
    text = f"{platform.python_version()} on {platform.platform()}" + ("" if enough else ", but 3.11 is needed")
    return Finding(level="ok" if enough else "fail", subject="python", text=text)


def _installed() -> dict[str, str]:
    return {
        name.lower().replace("_", "-"): distribution.version
        for distribution in metadata.distributions()
        if (name := distribution.metadata["Name"])
    }


def _packages(installed: Mapping[str, str]) -> Iterator[Finding]:
    for name, needed in PACKAGES.items():
        version = installed.get(name) or installed.get(f"{name}-cpu")
        level = "ok" if version or not needed else "fail"
        yield Finding(level=level, subject=name, text=version or "not installed")


def _devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(level="ok", subject="cpu", text=f"{cores} cores")
    try:
        found = devices.gpus()
    except OSError as error:
        yield Finding(level="warn", subject="gpu", text=f"there is an NVIDIA device, but {error}")
        return
    if not found:
        yield Finding(level="ok", subject="gpu", text="none; library=native needs one")
    for gpu in found:
        yield Finding(level="ok", subject="gpu", text=gpu)


def _switches(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that the user's shell sets: they change bits, so runs of another shell may differ."""
    for name in NUMERIC_VARIABLES:
        if name in environment:
            text = f"{name}={environment[name]} is set and can change results; records name it"
            yield Finding(level="warn", subject="environment", text=text)


def _trainer(name: str) -> Finding:
    try:
        catalog.require(name)
    except UserError as error:
        return Finding(level="warn", subject="trainer", text=str(error))
    return Finding(level="ok", subject="trainer", text=f"{name} can run here")


def _store(url: str) -> Finding:
    try:
        store = open_store(url, create=True)
        store.probe()
    except UserError as error:
        return Finding(level="fail", subject="store", text=str(error))
    if not store.exclusive:
        text = f"{url} lets two writers create one file; two sweeps at a time may train a run twice"
        return Finding(level="warn", subject="store", text=text)
    return Finding(level="ok", subject="store", text=f"{url} can be written to, read from and deleted in")


def _datasets(data_root: Path | None) -> Iterator[Finding]:
    if data_root is None:
        text = "no folder is given (--data-root, NOISEGRID_DATA): looked for on this machine, else fetched when needed"
        yield Finding(level="ok", subject="data", text=text)
        return
    if not data_root.is_dir():
        yield Finding(level="fail", subject="data", text=f"there is no folder {data_root}")
        return
    for name in catalog.names("dataset"):
        try:
            catalog.check_data(DatasetSpec(name=name), data_root)
        except UserError as error:
            yield Finding(level="warn", subject="data", text=str(error))
        else:
            yield Finding(level="ok", subject="data", text=f"{name} is complete")
