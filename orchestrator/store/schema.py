"""What a store's files hold: the columns of version 3, one fixed schema for each kind of file.

``docs/store.md`` gives the unit and meaning of every column. A change of a name, a type or a meaning is a new version.
"""

from __future__ import annotations

import pyarrow as pa

VERSION = 3
"""Version of the layout and of every schema here; stands in ``store.json`` and in the metadata of every file."""

VERSION_KEY = b"noisegrid_schema"

_METADATA = {VERSION_KEY: str(VERSION).encode()}

_TEXT, _TEXTS = pa.string(), pa.map_(pa.string(), pa.string())
_INT32, _INT64, _FLOAT32, _FLOAT64 = pa.int32(), pa.int64(), pa.float32(), pa.float64()
_TIME = pa.timestamp("us", tz="UTC")

EPOCH = pa.struct(
    [
        ("epoch", _INT32),
        ("learning_rate", _FLOAT64),
        ("train_loss", _FLOAT64),
        ("test_loss", _FLOAT64),
        ("test_accuracy", _FLOAT64),
        ("seconds", _FLOAT64),
    ]
)
"""One row of a history: the fields of :class:`protocols.contract.Epoch`."""

VARIANT = pa.struct(
    [
        ("name", _TEXT),
        ("passes", _INT32),
        ("accuracy", _FLOAT64),
        ("cross_entropy", _FLOAT64),
        ("logits", pa.list_(pa.list_(_FLOAT32))),
    ]
)
"""Another evaluation of the same trained run: :class:`protocols.contract.Variant`, and what it scored."""

COMMIT = pa.struct([("worker", _INT32), ("batch", _INT32), ("read", _INT32)])
"""One step of asynchronous training: a row of :attr:`protocols.contract.Outcome.commits`."""


def _schema(columns: dict[str, pa.DataType], optional: set[str]) -> pa.Schema:
    fields = [pa.field(name, kind, nullable=name in optional) for name, kind in columns.items()]
    return pa.schema(fields, metadata=_METADATA)


RECORD_SCHEMA = _schema(
    {
        "id": _TEXT,
        "source": _TEXT,
        "architecture": _TEXT,
        "dataset": _TEXT,
        "trainer": _TEXT,
        "library": _TEXT,
        "asynchrony": _TEXT,
        "group": _TEXT,
        "base_seed": _INT64,
        "replicate": _INT32,
        "outcome": _TEXT,
        "accuracy": _FLOAT64,
        "cross_entropy": _FLOAT64,
        "initial_digest": _TEXT,
        "first_step_digest": _TEXT,
        "final_digest": _TEXT,
        "tensor_digests": _TEXTS,
        "attempt": _INT32,
        "resumed_epochs": _INT32,
        "specification": _TEXT,
        "parameters": _INT64,
        "logits": pa.list_(pa.list_(_FLOAT32)),
        "logits_precision": _TEXT,
        "passes": _INT32,
        "predictions": pa.list_(_INT32),
        "labels_fingerprint": _TEXT,
        "variants": pa.list_(VARIANT),
        "losses": pa.list_(_FLOAT32),
        "history": pa.list_(EPOCH),
        "staleness_mean": _FLOAT64,
        "staleness_max": _INT64,
        "commits": pa.list_(COMMIT),
        "seconds": _FLOAT64,
        "train_seconds": _FLOAT64,
        "evaluate_seconds": _FLOAT64,
        "setup_seconds": _FLOAT64,
        "images_per_second": _FLOAT64,
        "started": _TIME,
        "finished": _TIME,
        "onebit_tensor": _TEXT,
        "onebit_index": _INT64,
        "onebit_before": _FLOAT64,
        "onebit_after": _FLOAT64,
        "onebit_step": _INT64,
        "onebit_elements": _INT64,
        "onebit_digest": _TEXT,
        "weights_changed": _INT64,
        "weights_total": _INT64,
        "predictions_changed": _INT64,
        "first_differing_step": _INT64,
        "distance": _FLOAT64,
        "cosine": _FLOAT64,
        "largest_ulp": _INT64,
        "barrier_error": _FLOAT64,
        "barrier_loss": _FLOAT64,
        "kept": pa.list_(_TEXT),
        "seeds": _TEXTS,
        "process": _TEXT,
        "host": _TEXT,
        "device": _TEXT,
        "hardware": _TEXT,
        "provenance": _TEXT,
        "fingerprint": _TEXT,
    },
    optional={
        "accuracy",
        "cross_entropy",
        "onebit_tensor",
        "onebit_index",
        "onebit_before",
        "onebit_after",
        "onebit_step",
        "onebit_elements",
        "onebit_digest",
        "weights_changed",
        "weights_total",
        "predictions_changed",
        "first_differing_step",
        "staleness_mean",
        "staleness_max",
        "distance",
        "cosine",
        "largest_ulp",
        "barrier_error",
        "barrier_loss",
    },
)
"""``records/ID.parquet``: one row, one finished run."""

LONG_COLUMNS = ("logits", "predictions", "variants", "losses", "history", "commits")
"""Columns with a value per example, step or epoch: read only where they are asked for."""

SHORT_COLUMNS = tuple(name for name in RECORD_SCHEMA.names if name not in LONG_COLUMNS)

OUTCOMES = ("ok", "diverged")
"""How a run can end that has a record."""

FAILURE_SCHEMA = _schema(
    {
        "id": _TEXT,
        "source": _TEXT,
        "architecture": _TEXT,
        "dataset": _TEXT,
        "trainer": _TEXT,
        "replicate": _INT32,
        "attempt": _INT32,
        "outcome": _TEXT,
        "message": _TEXT,
        "traceback": _TEXT,
        "log_tail": _TEXT,
        "started": _TIME,
        "finished": _TIME,
        "host": _TEXT,
        "device": _TEXT,
        "specification": _TEXT,
    },
    optional=set(),
)
"""``failures/ID.ATTEMPT.parquet``: one row, one attempt that ended without a record."""

FAILURE_OUTCOMES = ("out_of_memory", "error", "hardware", "timeout")

LIVE_SCHEMA = _schema(
    {"id": _TEXT, "attempt": _INT32, "updated": _TIME, "history": pa.list_(EPOCH)},
    optional=set(),
)
"""``live/ID.parquet``: one row, the newest attempt of a run without a record."""

LABELS_SCHEMA = _schema({"label": _INT64}, optional=set())
"""``labels/FINGERPRINT.parquet``: one row a test example, in the order of the test set."""
