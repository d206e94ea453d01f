"""Records and what belongs to them, copied from one store into another, be they of the same kind of place or not.

Bytes are copied as they are, those of a record last: where it is, all that it refers to is there as well. So a copy
that was interrupted is gone on with by copying again, and what is there already costs one look.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from orchestrator.store import checkpoints, encoding
from orchestrator.store.files import Files
from orchestrator.store.records import THREADS, record_path
from orchestrator.store.store import Store
from orchestrator.store.verify import strict_fault
from protocols.run import run_from_specification

COPIED, PRESENT, WITHHELD, DAMAGED = "copied", "present", "withheld", "damaged"


@dataclass(kw_only=True)
class Transfer:
    """What was copied, and what was not and why."""

    counts: Counter[str] = field(default_factory=Counter)
    """Records that were ``copied``, were ``present`` in the target already, were ``withheld`` since their group was
    refused, or were found ``damaged``."""
    refused: dict[str, str] = field(default_factory=dict)
    """By group, one sentence: its runs in the two stores were trained on different hardware."""
    damaged: dict[str, str] = field(default_factory=dict)
    """By run: why its record is not whole, or what of it is not."""

    @property
    def complete(self) -> bool:
        """Whether the target has all that was to be copied."""
        return not self.refused and not self.damaged


def transfer(
    source: Store,
    target: Store,
    ids: Collection[str] | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Transfer:
    """Copy records, and the kept tensors, labels, references, hardware claims and looks that belong to them.

    Only whole records are copied, see :mod:`orchestrator.store.verify`. A readable record of the target is never
    replaced, an unreadable one is set aside. A group that has claimed other hardware in the target is left out, but for
    its runs that list hardware as varying.

    Args:
        source: where from.
        target: where to; it must be writable.
        ids: runs; those without a record are passed over. None: all that have one.
        report: is told how many of how many records have been gone through.

    Raises:
        StoreError: a store cannot be read or written.
    """
    return _Copier(source, target).copy(None if ids is None else set(ids), report)


class _Copier:
    def __init__(self, source: Store, target: Store) -> None:
        self._from = source
        self._to = target
        self._found = Transfer()
        self._labels_of = functools.cache(source.labels)
        self._copy_labels = functools.cache(self._labels)
        self._copy_reference = functools.cache(self._reference)

    def copy(self, ids: set[str] | None, report: Callable[[int, int], None]) -> Transfer:
        finished, there = self._from.finished(), self._to.finished()
        wanted = sorted(finished if ids is None else finished & ids)
        missing = [id for id in wanted if id not in there]
        found = self._found
        corrupt = self._from.corrupt().items()
        found.damaged.update((id, fault) for id, fault in corrupt if ids is None or id in ids)
        found.counts[DAMAGED] += len(found.damaged)
        found.counts[PRESENT] += len(wanted) - len(missing)
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(missing), THREADS):
                batch = missing[start : start + THREADS]
                found.counts.update(pool.map(self._record, batch))
                report(len(wanted) - len(missing) + start + len(batch), len(wanted))
        self._looks(set(wanted))
        found.counts = +found.counts  # Only those that there are.
        return found

    def _record(self, id: str) -> str:
        """Copy one record and what belongs to it; returns what became of it."""
        path = record_path(id)
        data = self._from.files.get(path)
        fault = "it was moved away"
        if data is not None:
            fault = strict_fault(data, id, f"{self._from.url}/{path}", self._labels_of) or ""
        if data is None or fault:
            self._found.damaged[id] = fault
            return DAMAGED
        (row,) = encoding.read(data, ["group", "hardware", "labels_fingerprint", "kept", "specification"]).to_pylist()
        run = run_from_specification(row["specification"])
        group, hardware = row["group"], row["hardware"]
        if "hardware" in run.varies:
            group = None
        if group is not None and self._is_refused(group, hardware, self._to.hardware(group)):
            return WITHHELD
        if row["kept"] and not self._kept(id):
            self._found.damaged[id] = f"its kept tensors (kept/{id}.safetensors) are missing, damaged or not its own"
            return DAMAGED
        self._copy_labels(row["labels_fingerprint"])
        for reference in (id, run.without("onebit").id):
            self._copy_reference(reference)
        # Claimed last, as by a run that was trained: a record that is not copied must not bind the others of its group.
        if group is not None and self._is_refused(group, hardware, self._to.claim_hardware(group, hardware)):
            return WITHHELD
        while not self._to.files.put_if_absent(path, data):
            if self._to.has(id):
                return PRESENT
            self._to.set_aside(id)
        return COPIED

    def _is_refused(self, group: str, hardware: str, claimed: str | None) -> bool:
        if claimed in (None, hardware):
            return False
        self._found.refused[group] = (
            f"group {group} was trained on {hardware!r} in {self._from.url} and on {claimed!r} in {self._to.url}, and "
            "its runs are not to be mixed; copy it into another store"
        )
        return True

    def _kept(self, id: str) -> bool:
        path = f"kept/{id}.safetensors"
        data = self._from.files.get(path)
        if data is None or self._from.kept(id) is None:
            return False
        self._to.files.put(path, data)  # There is no record of it yet, so what lies there is a lost attempt's.
        return True

    def _labels(self, fingerprint: str) -> None:
        if self._labels_of(fingerprint) is not None and self._to.labels(fingerprint) is None:
            _copy(self._from.files, self._to.files, f"labels/{fingerprint}.parquet")

    def _reference(self, id: str) -> None:
        path = f"references/{id}.safetensors"
        if self._to.files.stat(path) is None or self._to.load_reference(id) is None:
            data = self._from.files.get(path)
            if data is not None and checkpoints.decode_reference(data) is not None:
                self._to.files.put(path, data)

    def _looks(self, ids: set[str]) -> None:
        """Copy the looks of adaptive protocols at cells whose first replicate is among the records.

        It must be in both stores and of the same hardware: of a group that was refused, the looks are left out as well.
        """
        names = [entry.name for entry in self._from.files.entries("looks")]
        cells = {name: name.partition(".")[2].partition(".")[0] for name in names}
        ours, theirs = (_hardware(store, ids.intersection(cells.values())) for store in (self._from, self._to))
        for name, cell in cells.items():
            path = f"looks/{name}"
            if (cell, ours.get(cell)) in theirs.items() and self._to.files.stat(path) is None:
                _copy(self._from.files, self._to.files, path)


def _hardware(store: Store, ids: Collection[str]) -> dict[str, str]:
    """The hardware of those runs that have a record."""
    if not ids:
        return {}
    table = store.table(["id", "hardware"], ids)
    return dict(zip(table["id"].to_pylist(), table["hardware"].to_pylist(), strict=True))


def _copy(source: Files, target: Files, path: str) -> None:
    if (data := source.get(path)) is not None:
        target.put(path, data)
