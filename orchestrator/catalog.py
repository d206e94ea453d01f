"""What can be named: trainers, architectures and datasets, reached at run time only.

The package of trainers is never imported statically, so that planning and reporting need none of its frameworks, and
a trainer, architecture or dataset from elsewhere (``module:name`` or ``./file.py:name``) is treated exactly like those
that ship with the project.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.contract import Dataset, Evaluate, Network, Train, Trainer
from protocols.errors import UserError
from protocols.imports import code_version, is_import_path, load_object
from protocols.load import load_named
from protocols.protocol import DatasetSpec
from protocols.run import Run

_TABLES = {"trainer": "TRAINERS", "architecture": "ARCHITECTURES", "dataset": "DATASETS"}


def names(kind: str) -> dict[str, str]:
    """The short names of a kind (``trainer``, ``architecture`` or ``dataset``), each with its import path."""
    table: dict[str, str] = getattr(importlib.import_module("trainers"), _TABLES[kind])
    return table


def trainer(name: str) -> Trainer:
    """The trainer of that name, described without its framework.

    Raises:
        UserError: there is none.
    """
    found = _named("trainer", name)
    if not isinstance(found, Trainer):
        raise UserError(f"trainer {name!r} is a {type(found).__name__}, not a Trainer")
    return found


def architecture(name: str) -> Callable[..., Any]:
    """The architecture of that name: a function ``f(net, x, classes)``.

    Raises:
        UserError: there is none.
    """
    found: Callable[..., Any] = _named("architecture", name)
    if not callable(found):
        raise UserError(f"architecture {name!r} is a {type(found).__name__}, not a function f(net, x, classes)")
    return found


def dataset(name: str) -> Any:
    """The dataset of that name, as its framework-free definition (``trainers.datasets.Definition``).

    A name that ends in ``.txt`` is a file of text.

    Raises:
        UserError: there is none.
    """
    found = _datasets().text_file(name) if name.endswith(".txt") else _named("dataset", name)
    if not isinstance(found, _datasets().Definition):
        raise UserError(f"dataset {name!r} is a {type(found).__name__}, not a Definition")
    return found


def dataset_fingerprint(definition: Any, spec: DatasetSpec) -> str:
    """What identifies the examples of ``spec``, known without reading them."""
    fingerprint: str = _datasets().fingerprint(definition, spec)
    return fingerprint


def image_shape(definition: Any, spec: DatasetSpec) -> tuple[int, ...]:
    """(height, width, channels) of the examples of ``spec``, known without reading them; text: (length,).

    Raises:
        UserError: images cannot be shrunk to ``spec.image_size``.
    """
    shape: tuple[int, ...] = _datasets().image_shape(definition, spec)
    return shape


def check_data(spec: DatasetSpec, data_root: Path | None) -> None:
    """Check that a dataset's files are there and whole.

    Raises:
        UserError: they are missing, truncated or others.
    """
    _datasets().check(dataset(spec.name), spec, data_root)


def prepare(spec: DatasetSpec, data_root: Path | None) -> Dataset:
    """A dataset's memory-mapped arrays, made once a machine.

    Raises:
        UserError: the files are missing, truncated or others.
    """
    data: Dataset = _datasets().prepare(dataset(spec.name), spec, data_root)
    return data


def train(name: str) -> Train:
    """A trainer's training function. Imports its framework."""
    function: Train = load_object(trainer(name).train, "training function")
    return function


def evaluate(name: str) -> Evaluate:
    """A trainer's function that tests given weights. Imports its framework.

    Raises:
        UserError: it has none.
    """
    path = trainer(name).evaluate
    if not path:
        raise UserError(f"trainer {name!r} cannot test given weights")
    function: Evaluate = load_object(path, "evaluation function")
    return function


def probes() -> int:
    """How many test examples the activations of ``keep=layers`` are of, at most."""
    count: int = importlib.import_module("trainers.loop").PROBES
    return count


def kept_logits(definition: Any, spec: DatasetSpec) -> tuple[int, int]:
    """Of one evaluation, how many logits are kept and how many there are."""
    shape, examples = image_shape(definition, spec), spec.test_size or definition.test_size
    is_text = len(shape) == 1
    tested = examples * shape[0] if is_text else examples
    evaluation = importlib.import_module("trainers.evaluation")
    kept: int = evaluation.kept_examples(tested, definition.classes, is_text=is_text)
    return kept * definition.classes, tested * definition.classes


def initial_weights(run: Run, network: Network) -> dict[str, NDArray[np.floating]]:
    """Every tensor of the network before training, in the recipe's element type, without any perturbation."""
    weights: dict[str, NDArray[np.floating]] = importlib.import_module("trainers.initial").initial_weights(run, network)
    return weights


def perturbed_tensor(run: Run, network: Network) -> str:
    """The name of the tensor that the run's perturbation changes.

    Raises:
        UserError: the network has no such tensor or element.
    """
    name: str = importlib.import_module("trainers.initial").perturbed_tensor(run, network)
    return name


def code(*paths: str) -> tuple[tuple[str, str], ...]:
    """(module, version of its code) for every name that is an import path, sorted; short names have none."""
    return tuple(sorted({code_version(path) for path in paths if is_import_path(path)}))


def require(name: str) -> None:
    """Check that what a trainer needs to run is installed, without importing it.

    Raises:
        UserError: its framework or Ray is missing; the message names the extra that installs it.
    """
    found = trainer(name)
    for module, extra in ((found.framework, found.extra), ("ray", found.extra)):
        if not _installed(module):
            raise UserError(
                f"trainer {name!r} needs {module}, which is not installed: pip install 'noisegrid[{extra}]'"
            )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _datasets() -> Any:
    return importlib.import_module("trainers.datasets")


def _named(kind: str, name: str) -> Any:
    return load_named(name, kind, names(kind))
