"""Verification: every byte of every record, and whatever else a store holds, against what it should be.

Ordinary reading believes a record that was examined before, and of a large one the columns that nobody asked for. Here
nothing is believed. Nothing is changed either.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchestrator.store import checkpoints, encoding, parts
from orchestrator.store.files import Entry
from orchestrator.store.parts import Key
from orchestrator.store.records import BATCH, THREADS, record_path
from orchestrator.store.schema import FAILURE_SCHEMA, LIVE_SCHEMA, SHORT_COLUMNS
from orchestrator.store.store import Store

TEXT_LOGITS = 10_000_000
"""Logits that a record of text keeps at most: those of the first tokens."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something in a store that is not what it should be."""

    kind: str
    """The folder."""
    file: str
    """Its path in the store."""
    fault: str
    """What is wrong with it."""
    remedy: str
    """What mends it."""


@dataclass(kw_only=True)
class Verification:
    """What a store was found to hold."""

    checked: dict[str, int] = field(default_factory=dict)
    """Files by folder; a part of ``compacted/`` counts as one."""
    problems: list[Problem] = field(default_factory=list)
    unreadable: dict[Entry, str] = field(default_factory=dict)
    """The files of ``records/`` that have problems, with the reason."""


def verify(store: Store, report: Callable[[int, int], None] = lambda done, total: None) -> Verification:
    """Check everything in a store that has a right and a wrong form. Other processes may go on with it meanwhile.

    Args:
        store: where.
        report: is told how many of how many files have been gone through.

    Raises:
        StoreError: a file cannot be delivered.
    """
    return _Verifier(store, report).verify()


def strict_fault(data: bytes, id: str, where: str, labels: Callable[[str], NDArray[np.int64] | None]) -> str | None:
    """Why bytes are not a whole record of that id whose values agree with each other, or None.

    Args:
        data: the file.
        id: whose record it should be.
        where: its path, for errors.
        labels: gives the labels of a test set by their fingerprint.

    Raises:
        StoreError: it is a record of a newer schema.
    """
    if not encoding.seal_holds(data, id):
        fault = encoding.record_fault(data, id, where)
        return fault or "its checksum does not match: it was changed after its commit"
    return _row_fault(encoding.read(data), labels)


class _Verifier:
    def __init__(self, store: Store, report: Callable[[int, int], None]) -> None:
        self._store = store
        self._report = report
        self._found = Verification()
        self._labels = functools.cache(store.labels)
        self._marks: dict[Key, str] = {}  # Of the short columns of each whole record, by its file.
        self._needed: dict[str, tuple[str, Sequence[str]]] = {}  # By record: labels' fingerprint, what is kept.
        self._done = self._total = 0

    def verify(self) -> Verification:
        store = self._store
        records = store.listed()
        known = store.parts.all
        others = [(folder, store.files.entries(folder)) for folder in _CHECKS]
        self._total = len(records) + len(known) + sum(len(entries) for _, entries in others)
        self._check("records", records, self._record)
        for folder, entries in others:
            self._check(folder, entries, functools.partial(self._other, folder))
        self._check_parts(known)
        self._check_needs()
        return self._found

    def _check(self, folder: str, entries: Sequence[Entry], check: Callable[[Entry], Problem | None]) -> None:
        self._found.checked[folder] = len(entries)
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(entries), BATCH // 8):
                batch = entries[start : start + BATCH // 8]
                self._found.problems += [problem for problem in pool.map(check, batch) if problem is not None]
                self._advance(len(batch))

    def _advance(self, count: int) -> None:
        self._done += count
        self._report(self._done, self._total)

    def _record(self, entry: Entry) -> Problem | None:
        path, id = f"records/{entry.name}", entry.name.removesuffix(".parquet")
        if not encoding.is_id(id) or record_path(id) != path:
            fault = "its name is not that of a record, ID.parquet"
            self._found.unreadable[entry] = fault
            return Problem(kind="records", file=path, fault=fault, remedy="move it out of records/")
        data = self._store.files.get(path)
        if data is None:  # Set aside since it was listed.
            return None
        fault_or_none = strict_fault(data, id, f"{self._store.url}/{path}", self._labels)
        if fault_or_none is None:
            (row,) = encoding.read(data, list(SHORT_COLUMNS)).to_pylist()
            self._marks[parts.key(entry)] = _mark(row)
            self._needed[id] = row["labels_fingerprint"], row["kept"]
            return None
        self._found.unreadable[entry] = fault_or_none
        remedy = "the same run command sets it aside and trains it again"
        if self._store.has(id):  # It reads as whole as long as nobody looks this closely.
            remedy = "verify --set-aside moves it to corrupt/, and then the same run command trains it again"
        return Problem(kind="records", file=path, fault=fault_or_none, remedy=remedy)

    def _other(self, folder: str, entry: Entry) -> Problem | None:
        path = f"{folder}/{entry.name}"
        check, remedy = _CHECKS[folder]
        data = self._store.files.get(path)
        fault = None if data is None else check(self._store, entry.name, data)
        return None if fault is None else Problem(kind=folder, file=path, fault=fault, remedy=remedy)

    def _check_parts(self, known: dict[str, parts.Part | None]) -> None:
        self._found.checked["compacted"] = len(known)
        for name, part in known.items():
            fault = "it is not what was written" if part is None else self._part_fault(part)
            if fault is not None:
                path = f"{parts.FOLDER}/{name}.parquet"
                remedy = "compact writes it again; until then its records are read one by one"
                if part is not None and fault != _RARE:
                    remedy = "delete it, and compact writes it again"
                self._found.problems.append(Problem(kind="compacted", file=path, fault=fault, remedy=remedy))
            self._advance(1)

    def _part_fault(self, part: parts.Part) -> str | None:
        table = self._store.parts.columns(part, SHORT_COLUMNS)
        if table is None:
            # Another process may have merged it since it was listed.
            return _RARE if self._store.files.stat(f"{parts.FOLDER}/{part.name}.parquet") is not None else None
        for start in range(0, len(part.keys), BATCH):
            rows = table.slice(start, BATCH).to_pylist()
            for key, row in zip(part.keys[start : start + BATCH], rows, strict=True):
                if self._marks.get(key, mark := _mark(row)) != mark:
                    return f"its row of {row['id']} is not that record's"
        return None

    def _check_needs(self) -> None:
        """Whether all that records refer to is there."""
        store, problems = self._store, self._found.problems
        bad = {problem.file for problem in problems}
        for fingerprint in sorted({fingerprint for fingerprint, _ in self._needed.values()}):
            path = f"labels/{fingerprint}.parquet"
            if path not in bad and self._labels(fingerprint) is None:
                problems.append(Problem(kind="labels", file=path, fault="it is missing", remedy=_CHECKS["labels"][1]))
        kept = {entry.name for entry in store.files.entries("kept")}
        for id, (_, wanted) in sorted(self._needed.items()):
            path = f"kept/{id}.safetensors"
            if wanted and f"{id}.safetensors" not in kept and path not in bad:
                problems.append(Problem(kind="kept", file=path, fault="it is missing", remedy=_CHECKS["kept"][1]))


_RARE = "one of its columns is missing or not what was written"


def _mark(row: dict[str, Any]) -> str:
    """A digest of a row, equal for equal values; nan equals itself."""
    return hashlib.sha256(repr(row).encode()).hexdigest()


def _row_fault(table: pa.Table, labels_of: Callable[[str], NDArray[np.int64] | None]) -> str | None:
    """Which of a record's long columns contradict each other or the short ones, if any do."""
    row = {name: table[name][0] for name in table.column_names}
    ok = row["outcome"].as_py() == "ok"
    predictions = row["predictions"].values.to_numpy(zero_copy_only=False)
    logits = encoding.matrix(row["logits"])
    if not ok and len(predictions) == 0 and len(logits) == 0:
        return None
    labels = labels_of(row["labels_fingerprint"].as_py())
    if labels is not None and len(predictions) != len(labels):
        return f"it has {len(predictions)} predictions for {len(labels)} labels"
    examples, classes = logits.shape
    # Of text, only the first logits are kept where they are many.
    if examples != len(predictions) and not (examples < len(predictions) and (examples + 1) * classes > TEXT_LOGITS):
        return f"it has the logits of {examples} examples and {len(predictions)} predictions"
    for variant in row["variants"]:
        if len(variant["logits"]) != examples:
            name = variant["name"].as_py()
            return f"its variant {name} has the logits of {len(variant['logits'])} examples, not {examples}"
    if not ok:
        return None
    if len(predictions) and not 0 <= predictions.min() <= predictions.max() < max(classes, 1):
        return "its predictions are no classes"
    if row["logits_precision"].as_py() == "float32":
        chosen = logits[np.arange(examples), predictions[:examples]]
        if not np.array_equal(chosen, logits.max(axis=1, initial=-np.inf)):
            return "its predictions are not the classes with the highest logits"
    accuracy = row["accuracy"].as_py()
    if labels is not None and not np.isclose(accuracy, np.mean(predictions == labels), rtol=0, atol=1e-9):
        return "its accuracy is not the share of its predictions that are right"
    return None


Check = Callable[[Store, str, bytes], str | None]
"""Of the store, a file's name and its bytes: what is wrong with it."""


def _stem(name: str, suffix: str) -> str:
    return name.removesuffix(suffix) if name.endswith(suffix) else ""


def _kept(store: Store, name: str, data: bytes) -> str | None:
    id = _stem(name, ".safetensors")
    if not encoding.is_id(id):
        return "its name is not that of kept tensors, ID.safetensors"
    if checkpoints.decode_kept(data) is None:
        return "it does not have its digest"
    return None if store.kept(id) is not None or store.files.stat(f"kept/{name}") is None else "it is not the record's"


def _labels(store: Store, name: str, data: bytes) -> str | None:
    return None if store.labels(_stem(name, ".parquet")) is not None else "its labels do not have that fingerprint"


def _reference(store: Store, name: str, data: bytes) -> str | None:
    whole = encoding.is_id(_stem(name, ".safetensors")) and checkpoints.decode_reference(data) is not None
    return None if whole else "it does not have its digest"


def _checkpoint(store: Store, name: str, data: bytes) -> str | None:
    whole = encoding.is_id(_stem(name, ".safetensors")) and checkpoints.decode_checkpoint(data) is not None
    return None if whole else "it does not have its digest"


def _hardware(store: Store, name: str, data: bytes) -> str | None:
    return None if store.hardware(_stem(name, ".json")) is not None else "it names no hardware"


def _json(store: Store, name: str, data: bytes) -> str | None:
    try:
        return None if isinstance(json.loads(data), dict) else "it is no JSON object"
    except ValueError:
        return "it is no JSON object"


def _table(schema: pa.Schema, store: Store, name: str, data: bytes) -> str | None:
    try:
        table = encoding.read(data)
    except encoding.UNREADABLE as error:
        return encoding.decoding_fault(error, name)
    if not table.schema.equals(schema) or table.num_rows != 1:
        return "it does not hold one row of its schema"
    return None if name.partition(".")[0] == table["id"][0].as_py() else f"it is of run {table['id'][0].as_py()}"


_CHECKS: dict[str, tuple[Check, str]] = {
    "kept": (_kept, "its run has to be trained again to have it: delete its record, and the same run command does"),
    "labels": (_labels, "delete it if it is there; the next record of that test set brings it back"),
    "references": (_reference, "none is needed: whoever needs it trains it again"),
    "checkpoints": (_checkpoint, "none is needed: its run starts from the beginning"),
    "hardware": (_hardware, "none is needed: the next run of the group claims its hardware anew"),
    "failures": (functools.partial(_table, FAILURE_SCHEMA), "delete it: it only says why an attempt failed"),
    "live": (functools.partial(_table, LIVE_SCHEMA), "none is needed: the run's next attempt replaces it"),
    "looks": (_json, "none is needed: the same run command looks again"),
    "canaries": (_json, "delete it: the device is tested again"),
}
"""What is checked of a file beside the records, and what mends it."""
