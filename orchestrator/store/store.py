"""A store: the records of finished runs, and beside them what an unfinished sweep needs to go on.

``docs/store.md`` describes the folders, the columns and what holds at every moment.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchestrator.store import encoding
from orchestrator.store.checkpoints import (
    Reference,
    decode_checkpoint,
    decode_kept,
    decode_reference,
    encode_checkpoint,
    encode_kept,
    encode_reference,
)
from orchestrator.store.files import TEMPORARY, StoreError
from orchestrator.store.records import THREADS, Records, record_path
from orchestrator.store.schema import EPOCH, FAILURE_SCHEMA, LABELS_SCHEMA, LIVE_SCHEMA
from protocols.contract import Checkpoint, Epoch
from protocols.digest import tensor_digest

FOLDERS = (
    "records",
    "failures",
    "live",
    "checkpoints",
    "kept",
    "labels",
    "references",
    "hardware",
    "compacted",
    "leases",
    "sweeps",
    "looks",
    "canaries",
    "logs",
    "corrupt",
    TEMPORARY,
)

_DAY = 86_400 * 10**9

_LIVE_TABLE = pa.schema(
    [
        ("id", pa.string()),
        ("attempt", pa.int32()),
        ("epochs", pa.int32()),
        *list(EPOCH)[1:],
        ("updated", LIVE_SCHEMA.field("updated").type),
    ]
)


class Store(Records):
    """A sweep's only state. Made by :func:`orchestrator.store.open_store`.

    Any number of processes, on any number of machines that see the same files, may use one store at a time.
    """

    def probe(self) -> None:
        """Write, read and delete a file in every folder.

        Raises:
            StoreError: that is not possible.
        """
        token = uuid.uuid4().hex
        for folder in FOLDERS:
            path = f"{folder}/.probe-{token}"  # readers of Parquet folders overlook such a name
            self._files.put(path, token.encode())
            kept = self._files.get(path)
            self._files.delete(path)
            if kept != token.encode():
                raise StoreError(f"store {self.url} did not give back what was written to {folder}/")

    def tidy(self) -> None:
        """Delete what killed processes left.

        These are temporary files over a day old, kept tensors that are as old and still have no record, and live rows
        and checkpoints of done runs.
        """
        for folder in (TEMPORARY, "kept"):
            for entry in self._files.entries(folder):
                old = entry.modified < time.time_ns() - _DAY
                if old and not (folder == "kept" and self.has(entry.name.removesuffix(".safetensors"))):
                    self._files.delete(f"{folder}/{entry.name}")
        for folder, suffix in (("live", ".parquet"), ("checkpoints", ".safetensors")):
            for entry in self._files.entries(folder):
                if self.has(entry.name.removesuffix(suffix)):
                    self._files.delete(f"{folder}/{entry.name}")

    def commit(self, row: Mapping[str, Any]) -> bool:
        """Add a record for good, then delete the run's checkpoint and live rows.

        A readable record is never replaced; an unreadable one is set aside.

        Args:
            row: a value for every column of ``RECORD_SCHEMA``; null where it is missing.

        Returns:
            False if the run had a readable record already.

        Raises:
            ValueError: the row does not fit the schema.
            StoreError: it could not be written; nothing of it is in ``records/``.
        """
        id = row["id"]
        data = encoding.encode_record(row)
        while not (committed := self._files.put_if_absent(record_path(id), data)):
            if self.has(id):
                break
            self.set_aside(id)
        self.delete_checkpoint(id)
        self._files.delete(_live(id))
        return committed

    # Attempts

    def begin(self, id: str) -> int:
        """Count an attempt at a run, before anything is trained, and return its number, from 1.

        An attempt that is killed without a trace was counted all the same.
        """
        numbers = [entry.name.split(".")[1] for entry in self._files.entries("failures", f"{id}.")]
        attempts = [int(number) for number in numbers if number.isdecimal()]
        if (row := self._live_row(id)) is not None:
            attempts.append(row["attempt"])
        if self._files.stat(_checkpoint(id)) is not None:
            attempts.append(1)  # the least that left it
        attempt = 1 + max(attempts, default=0)
        self.publish(id, attempt, ())
        return attempt

    def publish(self, id: str, attempt: int, rows: Sequence[Epoch]) -> None:
        """Show how far an attempt is: its history so far, in place of any earlier one."""
        row = {"id": id, "attempt": attempt, "updated": datetime.datetime.now(datetime.UTC), "history": list(rows)}
        self._files.put(_live(id), encoding.encode(row, LIVE_SCHEMA))

    def live(self) -> pa.Table:
        """The newest attempt of every run that was begun and has neither a record nor, of that attempt, a failure.

        Columns: ``id, attempt, epochs`` (done), the values of the last epoch as in a record's history (null before
        the first), and ``updated``.
        """
        rows = []
        for entry in self._files.entries("live"):
            row = self._live_row(entry.name.removesuffix(".parquet"))
            if row is not None and not self.has(row["id"]):
                last = row["history"][-1] if row["history"] else {"epoch": 0}
                rows.append({**row, **last, "epochs": last["epoch"]})
        return pa.Table.from_pylist(rows, _LIVE_TABLE)

    def fail(self, row: Mapping[str, Any]) -> None:
        """Keep what is known of an attempt that left no record, and delete its live rows. The checkpoint stays.

        Args:
            row: a value for every column of ``FAILURE_SCHEMA``.

        Raises:
            ValueError: the row does not fit the schema.
        """
        self._files.put(f"failures/{row['id']}.{row['attempt']}.parquet", encoding.encode_failure(row))
        self._files.delete(_live(row["id"]))

    def failures(self) -> pa.Table:
        """All failed attempts, sorted by id and attempt; unreadable files are left out."""
        paths = [f"failures/{entry.name}" for entry in self._files.entries("failures")]
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(lambda path: self._small(path, FAILURE_SCHEMA), paths))
        table = pa.concat_tables([FAILURE_SCHEMA.empty_table(), *(table for table in found if table is not None)])
        return table.sort_by([("id", "ascending"), ("attempt", "ascending")])

    def save_checkpoint(self, id: str, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint, in place of any earlier one of that run."""
        self._files.put(_checkpoint(id), encode_checkpoint(checkpoint))

    def load_checkpoint(self, id: str) -> Checkpoint | None:
        """The newest checkpoint of a run, bit for bit; None if there is none or it is not whole."""
        data = self._files.get(_checkpoint(id))
        return None if data is None else decode_checkpoint(data)

    def delete_checkpoint(self, id: str) -> None:
        """Delete the checkpoint of a run, if there is one."""
        self._files.delete(_checkpoint(id))

    # What records refer to

    def save_kept(self, id: str, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Keep tensors of a finished run; call it before its record is committed.

        Args:
            id: the run's. Once it has a record, what is kept stays as it is.
            tensors: by name, ``weights/NAME`` and ``gram/LAYER``; they take the place of an earlier attempt's.
        """
        if not self.has(id):
            self._files.put(_kept(id), encode_kept(tensors))

    def kept(self, id: str) -> dict[str, NDArray[Any]] | None:
        """What :meth:`save_kept` kept, bit for bit; None if it is not there, not whole, or not of the record's weights.

        A run that no one can repeat may be trained by two processes at a time; then the tensors can be of the one and
        the record of the other.
        """
        data = self._files.get(_kept(id))
        kept = None if data is None else decode_kept(data)
        for _, digests in self._each([id], _tensor_digests):
            for name, tensor in (kept or {}).items():
                folder, _, own = name.partition("/")
                if folder == "weights" and tensor_digest(own, tensor) != digests.get(own):
                    return None
        return kept

    def put_labels(self, fingerprint: str, labels: NDArray[np.integer]) -> None:
        """Keep the labels of a test set, in its order, (examples,), unless they are there.

        Raises:
            ValueError: the fingerprint is not theirs.
        """
        if _labels_fingerprint(labels) != fingerprint:
            raise ValueError(f"labels {fingerprint} do not have that fingerprint")
        if self.labels(fingerprint) is None:
            table = pa.Table.from_arrays([pa.array(labels, pa.int64())], schema=LABELS_SCHEMA)
            self._files.put(f"labels/{fingerprint}.parquet", encoding.encode_table(table))

    def labels(self, fingerprint: str) -> NDArray[np.int64] | None:
        """The labels of a test set, (examples,); None if they are not there or not whole."""
        table = self._small(f"labels/{fingerprint}.parquet", LABELS_SCHEMA)
        if table is None:
            return None
        labels: NDArray[np.int64] = table["label"].to_numpy()
        return labels if _labels_fingerprint(labels) == fingerprint else None

    def save_reference(self, id: str, reference: Reference) -> None:
        """Keep how a run ended, in place of what was kept of it before."""
        self._files.put(_reference(id), encode_reference(reference))

    def load_reference(self, id: str) -> Reference | None:
        """What :meth:`save_reference` kept, bit for bit; None if it is not there or not whole."""
        data = self._files.get(_reference(id))
        return None if data is None else decode_reference(data)

    def hardware(self, group: str) -> str | None:
        """The hardware that a group's runs belong to, as far as one of them has claimed any."""
        try:
            return str(json.loads(self._files.get(_hardware(group)) or b"")["hardware"])
        except (ValueError, KeyError, TypeError):
            return None

    def claim_hardware(self, group: str, hardware: str) -> str:
        """The hardware that a group's runs belong to: what the first of them claimed, whoever claims at a time.

        Call it when a run is about to be committed: a run that leaves no record binds no other.

        Args:
            group: the runs that share a control.
            hardware: what this run would have it be.
        """
        claim = json.dumps({"hardware": hardware}, ensure_ascii=False).encode() + b"\n"
        while not self._files.put_if_absent(_hardware(group), claim):
            if (claimed := self.hardware(group)) is not None:
                return claimed
            self._files.move(_hardware(group), f"corrupt/{group}.json")
        return hardware

    def _small(self, path: str, schema: pa.Schema) -> pa.Table | None:
        """A small file of a given schema; None if it is not there or not whole."""
        data = self._files.get(path)
        try:
            table = None if data is None else encoding.read(data)
        except encoding.UNREADABLE:
            return None
        return table if table is not None and table.schema.equals(schema) else None

    def _live_row(self, id: str) -> dict[str, Any] | None:
        table = self._small(_live(id), LIVE_SCHEMA)
        rows: list[dict[str, Any]] = [] if table is None else table.to_pylist()
        return rows[0] if rows else None


def _live(id: str) -> str:
    return f"live/{id}.parquet"


def _checkpoint(id: str) -> str:
    return f"checkpoints/{id}.safetensors"


def _reference(id: str) -> str:
    return f"references/{id}.safetensors"


def _kept(id: str) -> str:
    return f"kept/{id}.safetensors"


def _hardware(group: str) -> str:
    return f"hardware/{group}.json"


def _tensor_digests(source: pa.NativeFile) -> dict[str, str]:
    """The column of that name of one record."""
    return dict(encoding.read(source, ["tensor_digests"])["tensor_digests"][0].as_py())


def _labels_fingerprint(labels: NDArray[np.integer]) -> str:
    return hashlib.sha256(np.ascontiguousarray(labels, dtype="<i8").tobytes()).hexdigest()
