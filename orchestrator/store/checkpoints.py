"""Checkpoints, references and kept tensors as safetensors files: named tensors, bits unchanged, with the rest as JSON.

A file carries the digest of all it holds. One that was changed or cut short reads as None, as if it were not there:
going on from wrong weights would give a run that nobody specified.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from orchestrator.store.schema import VERSION
from protocols.contract import Checkpoint, Epoch, epoch_values
from protocols.digest import digest

Tensors = Mapping[str, NDArray[Any]]

_WEIGHTS = "tensors/"

_HEADER = 100_000_000
"""Bytes that the header of a safetensors file may have."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """How a run ended, in full: what a run that differs in one bit is held against."""

    weights: dict[str, NDArray[Any]]
    """Final weights and batch-norm statistics, canonical names and layouts."""
    losses: NDArray[np.float64]
    """(steps,)"""
    predictions: NDArray[np.integer]
    """(test examples,)"""
    fingerprint: str
    """Of the machine and libraries: a difference under another one is not the bit's."""
    devices: tuple[str, ...] = ()
    """Those that had a part in it, as :func:`orchestrator.devices.place` names them."""


def encode_checkpoint(checkpoint: Checkpoint, devices: Sequence[str] = ()) -> bytes:
    """The file of a checkpoint, and of what devices had a part in it."""
    state = {
        "epochs": checkpoint.epochs,
        "history": [epoch_values(epoch) for epoch in checkpoint.history],
        "first_step_digest": checkpoint.first_step_digest,
        "initial_digest": checkpoint.initial_digest,
        "fingerprint": checkpoint.fingerprint,
        "devices": list(devices),
    }
    return _encode({"losses": checkpoint.losses, **_prefixed(checkpoint.tensors)}, state)


def decode_checkpoint(data: bytes) -> Checkpoint | None:
    """The checkpoint in a file, or None if the file is not whole."""
    decoded = _decode(data)
    if decoded is None:
        return None
    tensors, state = decoded
    return Checkpoint(
        epochs=state["epochs"],
        tensors=_unprefixed(tensors),
        losses=tensors["losses"],
        history=tuple(Epoch(**row) for row in state["history"]),
        first_step_digest=state["first_step_digest"],
        initial_digest=state["initial_digest"],
        fingerprint=state["fingerprint"],
    )


def encode_reference(reference: Reference) -> bytes:
    """The file of a reference."""
    arrays = {"losses": reference.losses, "predictions": reference.predictions}
    state = {"fingerprint": reference.fingerprint, "devices": list(reference.devices)}
    return _encode({**arrays, **_prefixed(reference.weights)}, state)


def decode_reference(data: bytes) -> Reference | None:
    """The reference in a file, or None if the file is not whole."""
    decoded = _decode(data)
    if decoded is None:
        return None
    tensors, state = decoded
    return Reference(
        weights=_unprefixed(tensors),
        losses=tensors["losses"],
        predictions=tensors["predictions"],
        fingerprint=state["fingerprint"],
        devices=tuple(state.get("devices", ())),
    )


def decode_devices(source: BinaryIO) -> tuple[str, ...]:
    """What devices had a part in a checkpoint or a reference; reads the beginning of its file."""
    try:
        header = json.loads(source.read(min(int.from_bytes(source.read(8), "little"), _HEADER)))
        return tuple(map(str, json.loads(header["__metadata__"]["state"]).get("devices", ())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()


def encode_kept(tensors: Tensors) -> bytes:
    """The file of what is kept of a finished run, under the same names, whose order (that of the layers) is kept."""
    return _encode(tensors, {"names": list(tensors)})


def decode_kept(data: bytes) -> dict[str, NDArray[Any]] | None:
    """The tensors in a file of kept ones, or None if the file is not whole."""
    decoded = _decode(data)
    return None if decoded is None else {name: decoded[0][name] for name in decoded[1]["names"]}


def _encode(tensors: Tensors, state: Mapping[str, Any]) -> bytes:
    # Not ascontiguousarray, which gives a scalar tensor a dimension.
    arrays = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    text = json.dumps({"version": VERSION, **state})
    return save(arrays, {"state": text, "digest": _digest(arrays, text)})


def _decode(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        tensors, metadata = load(data), header["__metadata__"]
        state = json.loads(metadata["state"])
        whole = metadata["digest"] == _digest(tensors, metadata["state"]) and state["version"] == VERSION
    except (SafetensorError, ValueError, KeyError, TypeError):
        return None
    return (tensors, state) if whole else None


def _digest(tensors: Tensors, text: str) -> str:
    return hashlib.sha256(f"{text}\n{digest(tensors)}".encode()).hexdigest()


def _prefixed(tensors: Tensors) -> dict[str, NDArray[Any]]:
    return {_WEIGHTS + name: tensor for name, tensor in tensors.items()}


def _unprefixed(tensors: Tensors) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in tensors.items() if name.startswith(_WEIGHTS)}
