"""A store: the records of finished runs, and beside them what an unfinished sweep needs to go on.

``docs/store.md`` describes the folders, the columns and what holds at every moment.
"""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchestrator.store import encoding
from orchestrator.store.checkpoints import (
    Reference,
    decode_checkpoint,
    decode_devices,
    decode_kept,
    decode_reference,
    encode_checkpoint,
    encode_kept,
    encode_reference,
)
from orchestrator.store.files import TEMPORARY, StoreError, leftovers
from orchestrator.store.records import THREADS, Records, record_path
from orchestrator.store.schema import EPOCH, FAILURE_SCHEMA, LABELS_SCHEMA, LIVE_SCHEMA
from protocols.contract import Checkpoint, Epoch
from protocols.digest import labels_fingerprint, tensor_digest

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

    @property
    def exists(self) -> bool:
        """Whether there was a store when it was opened; where not, it reads as empty and cannot be written."""
        return self._files.writable

    @property
    def exclusive(self) -> bool:
        """Whether of two writers of one new file within the same instant one is refused, as :meth:`probe` found.

        Where not, two sweeps at a time may train a run twice; it is recorded once all the same.
        """
        return self._files.exclusive

    def probe(self) -> None:
        """Write, read and delete a file in every folder, and find out whether the store is :attr:`exclusive`.

        Raises:
            StoreError: that is not possible.
        """
        token = uuid.uuid4().hex

        def write_read_delete(folder: str) -> None:
            path = f"{folder}/.probe-{token}"  # readers of Parquet folders overlook such a name
            self._files.put(path, token.encode())
            kept = self._files.get(path)
            self._files.delete(path)
            if kept != token.encode():
                raise StoreError(f"store {self.url} did not give back what was written to {folder}/")

        write_read_delete("records")
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(write_read_delete, FOLDERS))
        self._files.probe()

    def tidy(self) -> None:
        """Delete what killed processes left.

        These are temporary files and heartbeats over a day old, kept tensors that are as old and still have no record,
        and leases, live rows and checkpoints of done runs.
        """
        recorded = {entry.name.partition(".")[0] for entry in self._files.entries("records")}
        for folder in (TEMPORARY, "sweeps", "kept"):
            for entry in leftovers(self._files, self._files.entries(folder)):
                if folder != "kept" or entry.name.partition(".")[0] not in recorded:
                    self._files.delete(f"{folder}/{entry.name}")
        for folder in ("live", "checkpoints", "leases"):
            for entry in self._files.entries(folder):
                if self.has(entry.name.partition(".")[0]):
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

    def live(self, prefix: str = "") -> pa.Table:
        """The newest attempt of every run that was begun and has neither a record nor, of that attempt, a failure.

        Columns: ``id, attempt, epochs`` (done), the values of the last epoch as in a record's history (null before
        the first), and ``updated``.

        Args:
            prefix: how the ids begin that are wanted.
        """
        return pa.Table.from_pylist(self.live_rows(prefix), _LIVE_TABLE)

    def live_rows(self, prefix: str = "") -> list[dict[str, Any]]:
        """The rows of :meth:`live`; Arrow would import pandas to make a table of them."""
        rows = []
        for entry in self._files.entries("live", prefix):
            row = self._live_row(entry.name.removesuffix(".parquet"))
            if row is not None and not self.has(row["id"]):
                last = row["history"][-1] if row["history"] else dict.fromkeys(EPOCH.names) | {"epoch": 0}
                rows.append({**row, **last, "epochs": last["epoch"]})
        return rows

    def fail(self, row: Mapping[str, Any]) -> None:
        """Keep what is known of an attempt that left no record, and delete its live rows. The checkpoint stays.

        Args:
            row: a value for every column of ``FAILURE_SCHEMA``.

        Raises:
            ValueError: the row does not fit the schema.
        """
        self._files.put(f"failures/{row['id']}.{row['attempt']}.parquet", encoding.encode_failure(row))
        self._files.delete(_live(row["id"]))

    def failures(self, prefix: str = "", *, known: Collection[tuple[str, int]] = ()) -> pa.Table:
        """Failed attempts, sorted by id and attempt; unreadable files are left out.

        Args:
            prefix: how the ids begin that are wanted.
            known: attempts (id, number) that are not wanted.
        """
        left_out = {f"{id}.{attempt}.parquet" for id, attempt in known}
        entries = [entry for entry in self._files.entries("failures", prefix) if entry.name not in left_out]
        paths = [f"failures/{entry.name}" for entry in entries]
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(lambda path: self._small(path, FAILURE_SCHEMA), paths))
        whole = [table for table in found if table is not None]
        table = pa.concat_tables([pa.Table.from_batches([], FAILURE_SCHEMA), *whole])
        return table.sort_by([("id", "ascending"), ("attempt", "ascending")])

    def save_checkpoint(self, id: str, checkpoint: Checkpoint, devices: Sequence[str] = ()) -> None:
        """Keep a checkpoint, in place of any earlier one of that run.

        Args:
            id: the run's.
            checkpoint: its state.
            devices: the devices that had a part in it, as :func:`orchestrator.devices.place` names them.
        """
        self._files.put(_checkpoint(id), encode_checkpoint(checkpoint, devices))

    def load_checkpoint(self, id: str) -> Checkpoint | None:
        """The newest checkpoint of a run, bit for bit; None if there is none or it is not whole."""
        data = self._files.get(_checkpoint(id))
        return None if data is None else decode_checkpoint(data)

    def checkpoint_devices(self, id: str) -> tuple[str, ...]:
        """The devices that had a part in the checkpoint of a run; empty if there is none or it does not say."""
        return self._devices(_checkpoint(id))

    def forget(self, device: str, prefix: str = "") -> None:
        """Delete the checkpoints and references in which a device had a part.

        Args:
            device: as :func:`orchestrator.devices.place` names it.
            prefix: how the ids of their runs begin.
        """
        paths = [
            f"{folder}/{entry.name}"
            for folder in ("checkpoints", "references")
            for entry in self._files.entries(folder, prefix)
        ]
        with ThreadPoolExecutor(THREADS) as pool:
            for path, devices in zip(paths, pool.map(self._devices, paths), strict=True):
                if device in devices:
                    self._files.delete(path)

    def _devices(self, path: str) -> tuple[str, ...]:
        source = self._files.open(path)
        if source is None:
            return ()
        with source:
            return decode_devices(source)

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
        if labels_fingerprint(labels) != fingerprint:
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
        return labels if labels_fingerprint(labels) == fingerprint else None

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
        if (claimed := self.hardware(group)) is not None:
            return claimed
        claim = json.dumps({"hardware": hardware}, ensure_ascii=False).encode() + b"\n"
        while not self._files.put_if_absent(_hardware(group), claim):
            if (claimed := self.hardware(group)) is not None:
                return claimed
            self._files.move(_hardware(group), f"corrupt/{group}.json")
        return hardware

    # What attempts printed

    def put_log(self, id: str, attempt: int, text: str) -> None:
        """Keep what an attempt printed, in place of what was kept of it before."""
        self._files.put(_log(id, attempt), text.encode(errors="replace"))

    def log(self, id: str, attempt: int | None = None) -> str | None:
        """What an attempt at a run printed, as far as it was kept; None if it printed nothing.

        Args:
            id: the run's.
            attempt: from 1; None: the newest that printed anything.
        """
        attempts = self.logs(id).get(id, [])
        number = max(attempts, default=None) if attempt is None else attempt
        data = None if number is None else self._files.get(_log(id, number))
        return None if data is None else data.decode(errors="replace")

    def logs(self, prefix: str = "") -> dict[str, list[int]]:
        """The attempts that printed anything, by the ids of their runs, as far as these start with ``prefix``."""
        found: dict[str, list[int]] = {}
        for entry in self._files.entries("logs", prefix):
            id, _, number = entry.name.removesuffix(".txt").partition(".")
            if number.isdecimal():
                found.setdefault(id, []).append(int(number))
        return {id: sorted(numbers) for id, numbers in sorted(found.items())}

    # Canaries

    def put_canary(self, group: str, fingerprint: str, place: str, text: str) -> bool:
        """Keep what the first epoch of a group's control came to on a device; returns False if it has left any."""
        return self._files.put_if_absent(f"canaries/{group}.{fingerprint}.{place}.json", text.encode() + b"\n")

    def canaries(self, prefix: str = "") -> list[tuple[str, str, str]]:
        """(group, fingerprint, device) of all that was left, the first first.

        Args:
            prefix: ``GROUP.FINGERPRINT.``, where only those are wanted.
        """
        entries = sorted(self._files.entries("canaries", prefix), key=lambda each: each.modified)
        parts = [entry.name.split(".") for entry in entries]
        return [(each[0], each[1], each[2]) for each in parts if len(each) == 4]

    def canary(self, group: str, fingerprint: str, place: str) -> str | None:
        """What :meth:`put_canary` kept; None if it is not there."""
        data = self._files.get(f"canaries/{group}.{fingerprint}.{place}.json")
        return None if data is None else data.decode(errors="replace")

    # Looks of adaptive protocols

    def record_look(self, declaration: str, cell: str, number: int, values: Mapping[str, Any]) -> bool:
        """Record a look, unless that look of that cell was taken already, whoever takes it at a time.

        Args:
            declaration: names what was declared of the looks.
            cell: the id of the cell's first replicate.
            number: of the look, from 1.
            values: what was found, for JSON.

        Returns:
            False if there was one. It stays as it is.
        """
        path = f"looks/{declaration}.{cell}.{number}.json"
        data = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        while not (recorded := self._files.put_if_absent(path, data)):
            if self._look(path) is not None:
                break
            self._files.move(path, f"corrupt/{path.rpartition('/')[2]}")
        return recorded

    def looks(self, declaration: str, known: Collection[tuple[str, int]] = ()) -> list[dict[str, Any]]:
        """The recorded looks of one declaration, by cell and number; unreadable ones are left out.

        Args:
            declaration: names what was declared of the looks.
            known: looks (cell, number) that are not wanted.
        """
        names = [entry.name for entry in self._files.entries("looks", f"{declaration}.")]
        wanted = [f"looks/{name}" for name in names if _look_key(name) not in known]
        with ThreadPoolExecutor(THREADS) as pool:
            return [look for look in pool.map(self._look, wanted) if look is not None]

    def _look(self, path: str) -> dict[str, Any] | None:
        try:
            values = json.loads(self._files.get(path) or b"")
        except ValueError:
            return None
        return values if isinstance(values, dict) and _look_key(path.rpartition("/")[2]) == _key_of(values) else None

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


def _log(id: str, attempt: int) -> str:
    return f"logs/{id}.{attempt}.txt"


def _hardware(group: str) -> str:
    return f"hardware/{group}.json"


def _look_key(name: str) -> tuple[str, int] | None:
    """The cell and the number of a look, from its file's name."""
    parts = name.split(".")
    return (parts[1], int(parts[2])) if len(parts) == 4 and parts[2].isdecimal() else None


def _key_of(look: Mapping[str, Any]) -> tuple[Any, Any]:
    return look.get("cell"), look.get("look")


def _tensor_digests(source: pa.NativeFile) -> dict[str, str]:
    """The column of that name of one record."""
    return dict(encoding.read(source, ["tensor_digests"])["tensor_digests"][0].as_py())
