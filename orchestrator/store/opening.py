"""Finding, checking and making a store."""

from __future__ import annotations

import json
import os
from pathlib import Path

from orchestrator.store.files import MARKER, Files, StoreError
from orchestrator.store.local import LocalFiles
from orchestrator.store.schema import VERSION
from orchestrator.store.store import FOLDERS, Store


def open_store(url: str | os.PathLike[str], *, create: bool = False) -> Store:
    """The store in a folder, or below ``s3://bucket/prefix``.

    Opening changes nothing unless ``create`` is set and there is no store yet. Without ``create`` a place that is
    missing or empty reads as an empty store, which cannot be written.

    Raises:
        StoreError: the place holds something else, or a store of another schema, or it cannot be read or made.
    """
    text = os.fspath(url)
    files = _files(text)
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
    return Store(files.url, files)


def _files(url: str) -> Files:
    """The place that a URL names; nothing is read yet."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "s3":
        try:
            from orchestrator.store.s3 import S3Files
        except ImportError as error:
            raise StoreError(f"store {url!r} needs boto3: pip install 'noisegrid[cloud]'") from error
        return S3Files(url)
    if separator and scheme != "file":
        raise StoreError(f"store {url!r}: a store is a folder or s3://bucket/folder; {scheme}:// is not supported")
    root = Path(os.path.abspath(os.path.expanduser(rest if separator else url)))
    for place in (root, *root.parents):
        if os.path.exists(place) and not os.path.isdir(place):
            raise StoreError(f"store {url!r}: {place} is not a folder")
    return LocalFiles(root)


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
