"""``replay``: train a recorded run once more; the same bits?"""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.options import data_option, examples, store_option
from orchestrator.store import open_store
from protocols.errors import UserError


@click.command(epilog=examples("sweep.py replay 3f9a", "sweep.py replay 3f9a --store results/ --data-root ~/data"))
@click.argument("id")
@store_option
@data_option
def replay(id: str, store: str, data_root: Path | None) -> int:
    """Train a recorded run once more: the same bits?

    ID is the run's, or enough of its first digits. Threads that raced are followed by their log.

    Writes nothing to the store. Exits 1 if anything differs.
    """
    from orchestrator.devices import has_gpu
    from orchestrator.replay import replay, resolve
    from orchestrator.slot.context import Settings

    records = open_store(store)
    found = resolve(records, id.lower())
    device = records.table(["device"], {found})["device"][0].as_py()
    if device != "cpu" and not has_gpu():
        raise UserError(f"run {found[:12]} was trained on a GPU ({device}), and this machine has none")
    settings = Settings(
        store=records.url,
        data_root=None if data_root is None else str(data_root.absolute()),
        gpus=0.0 if device == "cpu" else 1.0,
    )
    result = replay(records, found, settings)
    click.echo(f"{found[:12]} {result.text}")
    return 0 if result.same else 1
