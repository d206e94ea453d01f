"""Rows to the bytes of one-row Parquet files and back, and how a record that was changed or cut short is found.

Parquet checksums its pages, but neither their headers nor the footer. So a record also carries a seal: the SHA-256 of
its schema version, its id and all its other bytes, in 32 bytes between the last page and the footer, where no reader of
Parquet looks. A record whose seal holds is what was committed, under the name it was committed by; that is known
without decoding it, in a twentieth of the time.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from orchestrator.store.files import StoreError
from orchestrator.store.schema import (
    FAILURE_OUTCOMES,
    FAILURE_SCHEMA,
    OUTCOMES,
    RECORD_SCHEMA,
    SHORT_COLUMNS,
    VARIANT,
    VERSION,
    VERSION_KEY,
)
from protocols.contract import Epoch, Variant, epoch_values

UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError)
"""What pyarrow raises for bytes that are not what they should be."""

_SEAL = hashlib.sha256().digest_size
_TAIL = 8  # the footer's length and the magic number
_ID = re.compile("[0-9a-f]{64}")


def is_id(text: str) -> bool:
    """Whether a text has the form of a run's id."""
    return bool(_ID.fullmatch(text))


def encode_record(row: Mapping[str, Any]) -> bytes:
    """The file of one record.

    Raises:
        ValueError: the row does not fit the schema, or its id is not the hash of its specification.
    """
    _require(row, "outcome", OUTCOMES)
    if _hash(row["specification"]) != row["id"]:
        raise ValueError("a record's id must be the SHA-256 of its specification")
    data = encode(
        row,
        RECORD_SCHEMA,
        use_dictionary=["predictions.list.element"],
        use_byte_stream_split=[
            "logits.list.element.list.element",
            "variants.list.element.logits.list.element.list.element",
            "losses.list.element",
        ],
    )
    return sealed(data, f"record {VERSION} {row['id']}")


def encode_failure(row: Mapping[str, Any]) -> bytes:
    """The file of one failed attempt.

    Raises:
        ValueError: the row does not fit the schema.
    """
    _require(row, "outcome", FAILURE_OUTCOMES)
    return encode(row, FAILURE_SCHEMA)


def encode(row: Mapping[str, Any], schema: pa.Schema, **options: Any) -> bytes:
    """A Parquet file of one row, with checksums on its pages.

    A missing value is null. Maps are given as mappings, lists as lists, tuples or arrays, epochs as mappings or
    as they are.

    Raises:
        ValueError: a column is unknown or of another type, or null where it must not be.
    """
    if surplus := set(row) - set(schema.names):
        raise ValueError(f"no such columns: {', '.join(sorted(surplus))}")
    columns = [_column(row.get(field.name), field) for field in schema]
    return encode_table(pa.Table.from_arrays(columns, schema=schema), **options)


def encode_table(table: pa.Table, **options: Any) -> bytes:
    """A Parquet file of a table, with checksums on its pages."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True, write_statistics=False, **options)
    return sink.getvalue()


def read(source: pa.NativeFile | bytes, columns: list[str] | None = None) -> pa.Table:
    """Columns of a Parquet file (None: all), their pages' checksums verified.

    Raises:
        UNREADABLE: the bytes are not what was written.
    """
    with _open(source) as file:
        return file.read(columns, use_threads=False)


def read_logits(source: pa.NativeFile) -> NDArray[np.float32]:
    """The logits of one record, (examples, classes), read-only; (0, 0) where it has none.

    Raises:
        UNREADABLE: the bytes are not what was written.
    """
    return matrix(read(source, ["logits"])["logits"][0])


def read_variants(source: pa.NativeFile) -> tuple[Variant, ...]:
    """The other evaluations of one record, their logits read-only.

    Raises:
        UNREADABLE: the bytes are not what was written.
    """
    return tuple(
        Variant(name=item["name"].as_py(), passes=item["passes"].as_py(), logits=matrix(item["logits"]))
        for item in read(source, ["variants"])["variants"][0]
    )


def seal_holds(data: bytes, id: str) -> bool:
    """Whether the bytes are exactly those that were committed as the record of that id."""
    return is_sealed(data, f"record {VERSION} {id}")


def sealed(data: bytes, what: str) -> bytes:
    """A Parquet file with a seal: what it is, and the digest of all its bytes."""
    cut = _footer(data)
    return data[:cut] + _seal(what, data[:cut], data[cut:]) + data[cut:]


def is_sealed(data: bytes, what: str) -> bool:
    """Whether the bytes are exactly those that :func:`sealed` gave."""
    cut = _footer(data)
    return cut > _SEAL and data[cut - _SEAL : cut] == _seal(what, data[: cut - _SEAL], data[cut:])


def record_fault(source: pa.NativeFile | bytes, id: str, where: str) -> str | None:
    """Why a file is not the record of that id, or None. Its long columns are not read.

    Raises:
        StoreError: it is a record of a newer schema, which is nothing to set aside.
    """
    try:
        with _open(source) as file:
            version = (file.metadata.metadata or {}).get(VERSION_KEY, b"").decode()
            if version.isdecimal() and int(version) > VERSION:
                raise StoreError(
                    f"{where} is of schema {version}, newer than the {VERSION} that this version of noisegrid reads; "
                    "upgrade noisegrid"
                )
            if version != str(VERSION):
                return f"it is not of schema {VERSION}"
            if not file.schema_arrow.equals(RECORD_SCHEMA):
                return f"its columns are not those of schema {VERSION}"
            if file.metadata.num_rows != 1:
                return f"it has {file.metadata.num_rows} rows, not 1"
            row = file.read(list(SHORT_COLUMNS), use_threads=False).to_pylist()[0]
    except UNREADABLE as error:
        return decoding_fault(error, where)
    if row["id"] != id:
        return f"it is the record of {row['id']}"
    if _hash(row["specification"]) != id:
        return "its id is not the SHA-256 of its specification"
    return None


def decoding_fault(error: BaseException, where: str) -> str:
    """What one of ``UNREADABLE`` says of a file, in one line.

    Raises:
        StoreError: it was not the bytes but the file system that failed.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise StoreError(f"cannot read {where}: {os.strerror(error.errno)}") from error
    return f"it cannot be read as Parquet: {' '.join(str(error).split())}"


def _open(source: pa.NativeFile | bytes) -> pq.ParquetFile:
    if isinstance(source, bytes):
        source = pa.BufferReader(source)
    return pq.ParquetFile(source, page_checksum_verification=True)


def _column(value: Any, field: pa.Field) -> pa.Array:
    if value is None and not field.nullable:
        raise ValueError(f"column {field.name} must have a value")
    try:
        return _array(value, field.type)
    except (pa.ArrowException, KeyError, OverflowError) as error:
        raise ValueError(f"column {field.name}: {error}") from error


def _array(value: Any, kind: pa.DataType) -> pa.Array:
    """One value as an array of length 1; a matrix does not become a Python object for each of its numbers."""
    if isinstance(value, np.ndarray) and value.ndim == 2:
        examples, classes = value.shape
        starts = pa.array(np.arange(examples + 1, dtype=np.int32) * classes)
        rows = pa.ListArray.from_arrays(starts, pa.array(value.ravel(), kind.value_type.value_type))
        return pa.ListArray.from_arrays(pa.array([0, examples], pa.int32()), rows)
    if kind.equals(pa.list_(VARIANT)) and value:
        fields = [pa.concat_arrays([_array(item[field.name], field.type) for item in value]) for field in VARIANT]
        return pa.ListArray.from_arrays(
            pa.array([0, len(value)], pa.int32()), pa.StructArray.from_arrays(fields, fields=list(VARIANT))
        )
    if isinstance(value, Mapping):
        value = list(value.items())
    elif isinstance(value, list | tuple):
        value = [epoch_values(item) if isinstance(item, Epoch) else item for item in value]
    return pa.array([value], kind)


def matrix(rows: pa.ListScalar) -> NDArray[np.float32]:
    """A list of equally long lists, read-only; (0, 0) where it is empty."""
    examples = rows.values
    values: NDArray[np.float32] = examples.flatten().to_numpy()
    return values.reshape(len(examples), -1) if len(examples) else values.reshape(0, 0)


def _require(row: Mapping[str, Any], column: str, values: tuple[str, ...]) -> None:
    if row.get(column) not in values:
        raise ValueError(f"{column} must be one of {', '.join(values)}, not {row.get(column)!r}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _footer(data: bytes) -> int:
    """Where the footer of a Parquet file starts."""
    return len(data) - _TAIL - int.from_bytes(data[-_TAIL:-4], "little")


def _seal(what: str, pages: bytes, footer: bytes) -> bytes:
    sha = hashlib.sha256(f"noisegrid {what}".encode())
    sha.update(pages)
    sha.update(footer)
    return sha.digest()
