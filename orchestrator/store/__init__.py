"""The store: one immutable Parquet file a run, and what is needed to resume a sweep."""

from orchestrator.store.checkpoints import Reference
from orchestrator.store.files import StoreError
from orchestrator.store.opening import open_store
from orchestrator.store.schema import FAILURE_SCHEMA, RECORD_SCHEMA
from orchestrator.store.spool import Spool
from orchestrator.store.store import Store

__all__ = ["FAILURE_SCHEMA", "RECORD_SCHEMA", "Reference", "Spool", "Store", "StoreError", "open_store"]
