"""Finding, checking and making a store."""

from __future__ import annotations

import json
import os
from pathlib import Path

from orchestrator.store.files import LocalFiles, StoreError
from orchestrator.store.schema import VERSION
from orchestrator.store.store import FOLDERS, Store

MARKER = "store.json"


def open_store(url: str | os.PathLike[str], *, create: bool = False) -> Store:
    """The store in a folder.

    Opening changes nothing unless ``create`` is set and there is no store yet. Without ``create`` a folder that is
    missing or empty reads as an empty store, which cannot be written.

    Raises:
        StoreError: the folder holds something else, or a store of another schema, or it cannot be read or made.
    """
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if separator and scheme != "file":
        raise StoreError(f"store {text!r}: a store is a folder; {scheme}:// is not supported")
    root = Path(os.path.abspath(os.path.expanduser(rest if separator else text)))
    for place in (root, *root.parents):
        if os.path.exists(place) and not os.path.isdir(place):
            raise StoreError(f"store {text!r}: {place} is not a folder")

    files = LocalFiles(root)
    marker = files.get(MARKER)
    if marker is None:
        strangers = [name for name in files.names() if name not in FOLDERS and not name.startswith(".")]
        if strangers:
            raise StoreError(
                f"store {text!r}: the folder has no {MARKER} but other things ({strangers[0]}), so it is not a store; "
                "give a store, or a new or empty folder"
            )
        if create:
            files.create("records")
            files.put_if_absent(MARKER, json.dumps({"schema": VERSION}).encode() + b"\n")
        else:
            files.writable = False
    else:
        _check_version(text, marker)
    return Store(str(root), files)


def _check_version(url: str, marker: bytes) -> None:
    try:
        version = json.loads(marker)["schema"]
    except (ValueError, KeyError, TypeError):
        version = None
    if not isinstance(version, int) or version < 1:
        raise StoreError(f'store {url!r}: its {MARKER} must hold {{"schema": {VERSION}}}, not {marker[:80]!r}')
    if version > VERSION:
        raise StoreError(
            f"store {url!r} is of schema {version}, newer than the {VERSION} that this version of noisegrid reads; "
            "upgrade noisegrid"
        )
    if version < VERSION:
        raise StoreError(
            f"store {url!r} is of schema {version}, and this version of noisegrid reads and writes {VERSION} only; "
            "give another folder, and keep this one for the version that wrote it"
        )
