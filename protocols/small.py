"""Small forms: a study's cells, cut down to what two CPU cores or one GPU can finish."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from protocols.protocol import Cell, DatasetSpec, Protocol

HONEST = (
    "library varies by order (another order of sums, drawn for each replicate): this is not the nondeterminism of GPU "
    "kernels"
)

CIFAR: Mapping[str, Any] = {"train_size": 2000, "test_size": 1000, "image_size": 16}
MNIST: Mapping[str, Any] = {"train_size": 2000, "test_size": 1000, "image_size": 14}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "cifar10": CIFAR,
    "cifar100": CIFAR,
    "mnist": MNIST,
    "fashion-mnist": MNIST,
    "imagenet": {"train_size": 2000, "test_size": 1000, "image_size": 64},
    "ptb": {"train_size": 2000, "test_size": 400},
}
"""What small forms keep of each dataset."""


def shrunk(dataset: DatasetSpec, **sizes: int) -> DatasetSpec:
    """A small part of a dataset, of smaller images; ``sizes`` replace those of ``SIZES``."""
    return dataclasses.replace(dataset, **{**SIZES[dataset.name], **sizes})


def small(protocol: Protocol, change: Callable[[Cell], Cell | None], *, replicates: int, **changes: Any) -> Protocol:
    """The small form of a protocol: the same sources, with less of everything else.

    Args:
        protocol: the full form.
        change: what becomes of each cell; None: it is left out.
        replicates: in every cell.
        changes: other fields of the protocol.

    Returns:
        The protocol, which says in its deviations how it differs from the full form.
    """
    pairs = [(cell, change(cell)) for cell in protocol.cells]
    cells = tuple(dict.fromkeys(dataclasses.replace(cell, replicates=None) for _, cell in pairs if cell is not None))
    fewer = replicates < protocol.replicates
    kind = () if protocol.library == "order" else (HONEST,)
    return dataclasses.replace(
        protocol,
        **{"library": "order"} | changes,
        name=f"{protocol.name}-small",
        summary=f"{protocol.summary}; cut down",
        cells=cells,
        replicates=replicates,
        deviations=(
            *protocol.deviations,
            *([f"cut down: {replicates} replicates in place of {protocol.replicates}"] if fewer else []),
            *(f"cut down: {text}" for text in _differences(pairs)),
            *kind,
        ),
    )


def _differences(pairs: list[tuple[Cell, Cell | None]]) -> Iterator[str]:
    """What the small form changes, field by field."""
    remaining = {_place(cell) for cell, now in pairs if now is not None}
    left_out = [cell for cell, now in pairs if now is None]
    if gone := dict.fromkeys(_place(cell) for cell in left_out if _place(cell) not in remaining):
        yield f"without {', '.join(gone)}"
    if fewer := dict.fromkeys(_place(cell) for cell in left_out if _place(cell) in remaining):
        yield f"fewer cells of {', '.join(fewer)}"
    kept = [(_values(cell), _values(now)) for cell, now in pairs if now is not None]
    for name in kept[0][0]:
        changed = dict.fromkeys((before[name], now[name]) for before, now in kept if before[name] != now[name])
        if changed:
            yield f"{name} " + ", ".join(f"{now} in place of {before}" for before, now in changed)


def _place(cell: Cell) -> str:
    return f"{cell.architecture} on {cell.dataset}"


def _values(cell: Cell) -> dict[str, str]:
    """What a cell sets, as it is written."""
    parts = {"recipe": cell.recipe, "perturb": cell.perturb}
    nested = {f"{part}.{name}": value for part, values in parts.items() for name, value in vars(values).items()}
    written = {name: _written(value) for name, value in nested.items()}
    return {"architecture": cell.architecture, "dataset": str(cell.dataset)} | written


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
