"""Compaction: the short columns of loose records are repeated in a few large files, ``records/`` staying as it is.

Any number of processes may compact one store while others train into it and read it. None waits for another: what a
part says is believed of the file it was read from and of no other (see :mod:`orchestrator.store.parts`), so parts that
overlap are merely larger than need be, until the next compaction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.store import parts
from orchestrator.store.files import Entry, leftovers
from orchestrator.store.parts import Part
from orchestrator.store.records import Records
from orchestrator.store.schema import SHORT_COLUMNS

ROWS = 10_000
"""Records of a full part: as many as fit into memory with the digests of all tensors of a large network."""

Report = Callable[[int, int], None]
"""Is told how many of how many have been gone through."""


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """What a compaction did."""

    added: int
    """Records that were read from their own files."""
    records: int
    """Records that are repeated under ``compacted/`` now."""
    parts: int
    """Parts they are in."""
    unreadable: int
    """Files of ``records/`` that are no readable records, and so were left out."""


def compact(store: Records, *, at_least: int = 0, report: Report = lambda done, total: None) -> Compaction | None:
    """Repeat the short columns of all readable records under ``compacted/``.

    Full parts that are still right stay; all others are merged with what is new. An old part is deleted once its
    records are in a new one. Killed at any moment it leaves a store that reads the same, and work for the next one.

    Args:
        store: whose records.
        at_least: how many loose records it takes; with fewer nothing is done.
        report: is told how many of how many records have been gone through.

    Returns:
        None where there were fewer loose records than that.

    Raises:
        StoreError: the store cannot be read or written.
    """
    listed = store.listed()
    loose = sum(entry not in store.parts for entry in listed)
    if loose < at_least:
        return None
    keys = set(map(parts.key, listed))
    settled, others, covered = [], [], set[parts.Key]()
    for part in store.parts.all.values():
        if part is not None and len(part.keys) == ROWS and keys.issuperset(part.keys) and store.parts.is_whole(part):
            if covered.isdisjoint(part.keys):
                settled.append(part)
                covered.update(part.keys)
                continue
        others.append(part)

    superseded = set(store.parts.all) - {part.name for part in settled}
    pool = [entry for entry in listed if parts.key(entry) not in covered]
    for start in range(0, len(pool), ROWS):
        told = functools.partial(_tell, report, len(covered) + start, len(listed))
        found, table = store.rows(pool[start : start + ROWS], SHORT_COLUMNS, told)
        if (same := _same(store, others, [parts.key(entry) for entry in found])) is not None:
            superseded.remove(same.name)
            settled.append(same)
        elif found:
            settled.append(parts.write(store.files, table, found))
    for name in superseded:
        parts.delete(store.files, name)
    _tidy(store, {part.name for part in settled})
    records = sum(len(part.keys) for part in settled)
    unreadable = len(listed) - records
    return Compaction(added=loose - unreadable, records=records, parts=len(settled), unreadable=unreadable)


def _tell(report: Report, before: int, total: int, count: int) -> None:
    report(before + count, total)


def _same(store: Records, candidates: list[Part | None], keys: list[parts.Key]) -> Part | None:
    """The whole part that repeats exactly these records."""
    for part in candidates:
        if part is not None and part.keys == keys and store.parts.is_whole(part):
            return part
    return None


def _tidy(store: Records, known: set[str]) -> None:
    """Delete what compactions left that were killed before their part was there."""

    def is_orphan(entry: Entry) -> bool:
        name = parts.part_of(entry.name)
        return name is not None and name not in known and not parts.is_part(entry.name)

    for entry in leftovers(store.files, filter(is_orphan, store.files.entries(parts.FOLDER))):
        store.files.delete(f"{parts.FOLDER}/{entry.name}")
