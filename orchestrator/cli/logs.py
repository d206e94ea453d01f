"""``logs``: what a run printed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click

from orchestrator.cli import output
from orchestrator.cli.options import examples, store_option
from orchestrator.store import Store, open_store
from orchestrator.watch.sweeps import INTERRUPTED as INTERRUPTED_RUN
from orchestrator.watch.sweeps import Sweeps
from protocols.errors import UserError

FOLDERS = ("records", "failures", "live", "logs")
"""Where a run that was ever begun has left a file of its name."""

SECONDS = 2.0
"""Between two looks at a log that is being written."""

SHOWN = 5
"""How many ids are named where several begin alike."""

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What is known of one attempt at a run."""

    number: int
    state: str
    """Its outcome, or what it is if it has none."""
    where: str
    """Host and device, empty where that is not known yet."""
    when: datetime | None
    """When it ended, or when it last showed how far it was; None: that is not known."""
    seconds: float | None = None
    """What it took."""
    message: str = ""
    traceback: str = ""
    tail: str = ""
    """The end of what it printed, as its failure kept it."""

    @property
    def over(self) -> bool:
        """Whether it has an outcome."""
        return self.seconds is not None


@click.command(
    epilog=examples(
        "sweep.py logs 3251173a",
        "sweep.py logs 3251173a --attempt 1 --store results/",
        "sweep.py logs 3251173a --follow",
    )
)
@click.argument("id")
@store_option
@click.option("--attempt", type=click.IntRange(min=1), help="Which attempt; default: the newest.")
@click.option("--follow", "-f", "following", is_flag=True, help="Go on printing until the attempt has ended.")
def logs(id: str, store: str, attempt: int | None, following: bool) -> int:
    """Print what a run printed; ID is how its id begins, as status shows it.

    What the run is, where it ran and how its attempts ended goes to the standard error, what it printed to the standard
    output, and after that the traceback of an attempt that failed. Exits 1 if there is nothing to show.
    """
    opened = open_store(store)
    full = find(opened, id, store)
    attempts = _attempts(opened, full)
    if not attempts:
        raise UserError(f"run {full[:12]} has files in store {store} that cannot be read; status names damaged records")
    number = max(attempts) if attempt is None else attempt
    if number not in attempts:
        raise UserError(f"run {full[:12]} has no attempt {number}; it has {_listed(list(attempts))}")
    for line in _header(opened, full, attempts, number):
        click.echo(line, err=True)
    text = _text(opened, full, attempts[number])
    click.echo(text, nl=False)
    followed = following and not attempts[number].over
    if followed:
        try:
            attempts, text = _follow(opened, full, number, text)
        except KeyboardInterrupt:
            return INTERRUPTED
    click.echo("" if not text or text.endswith("\n") else "\n", nl=False)
    if followed:
        click.echo(_state(attempts[number]), err=True)
    if not text:
        click.echo(_why(attempts[number]), err=True)
    return int(not text)


def find(store: Store, prefix: str, url: str) -> str:
    """The only run of a store whose id begins so.

    Raises:
        UserError: there is none, or several.
    """
    ids: set[str] = set()
    if prefix:
        for folder in FOLDERS:
            ids |= {entry.name.partition(".")[0] for entry in store.files.entries(folder, prefix.lower())}
    if not ids:
        raise UserError(f"no run whose id begins with {prefix!r} has been begun in store {url}")
    if len(ids) > 1:
        some = ", ".join(id[: len(prefix) + 6] for id in sorted(ids)[:SHOWN])
        more = " and others" if len(ids) > SHOWN else ""
        raise UserError(f"{len(ids):,} runs have ids that begin with {prefix!r}: {some}{more}; give more digits")
    return ids.pop()


def _attempts(store: Store, id: str) -> dict[int, Attempt]:
    """What is known of a run's attempts, by number."""
    found: dict[int, Attempt] = {}
    for number in store.logs(id).get(id, []):
        found[number] = Attempt(number=number, state="ended without an outcome", where="", when=None)
    for row in store.failures(id).to_pylist():
        found[row["attempt"]] = Attempt(
            number=row["attempt"],
            state=row["outcome"],
            where=_where(row),
            when=row["finished"],
            seconds=(row["finished"] - row["started"]).total_seconds(),
            message=row["message"],
            traceback=row["traceback"],
            tail=row["log_tail"],
        )
    for row in store.live_rows(id):
        sweeps = Sweeps(store)
        sweeps.active()
        state = sweeps.states({id})[id]
        found[row["attempt"]] = Attempt(number=row["attempt"], state=state, where="", when=row["updated"])
    for row in store.table([*_RECORD, "attempt", "outcome", "seconds"], {id}).to_pylist():
        found[row["attempt"]] = Attempt(
            number=row["attempt"],
            state=row["outcome"],
            where=_where(row),
            when=row["finished"],
            seconds=row["seconds"],
        )
    return dict(sorted(found.items()))


_RECORD = ("host", "device", "finished")


def _where(row: dict[str, Any]) -> str:
    return f"{row['host']} ({row['device']})"


def _header(store: Store, id: str, attempts: dict[int, Attempt], number: int) -> list[str]:
    """What the run is and what became of its attempts, the one that is shown last."""
    lines = [f"run {id}"]
    named = ("trainer", "architecture", "dataset", "source", "replicate")
    for row in [*store.table(named, {id}).to_pylist(), *store.failures(id).select(named).to_pylist()][:1]:
        lines[0] += "".join(f" {row[name]}" for name in named[:4]) + f" #{row['replicate']}"
    others = [f"{attempt.number}: {_state(attempt)}" for attempt in attempts.values() if attempt.number != number]
    lines += [f"attempt {other}" for other in others]
    lines.append(f"attempt {number}: {_state(attempts[number])}")
    return lines


def _state(attempt: Attempt) -> str:
    if attempt.seconds is not None and attempt.when is not None:
        message = f": {' '.join(attempt.message.split())}" if attempt.message else ""
        ended = f"after {output.duration(attempt.seconds)}, at {_time(attempt.when)}"
        return f"{attempt.state} on {attempt.where} {ended}{message}"
    shown = f", last heard of at {_time(attempt.when)}" if attempt.when else ""
    return attempt.state + shown


def _time(when: datetime) -> str:
    return f"{when.astimezone():%Y-%m-%d %H:%M:%S}"


def _text(store: Store, id: str, attempt: Attempt) -> str:
    """What an attempt printed, or what its failure kept of that, and then the traceback."""
    printed = store.log(id, attempt.number) or attempt.tail
    traceback = "" if attempt.traceback.strip() in printed else attempt.traceback
    return printed + ("\n" if printed and traceback and not printed.endswith("\n") else "") + traceback


def _follow(store: Store, id: str, number: int, shown: str) -> tuple[dict[int, Attempt], str]:
    """Print what is added to a log until its attempt has ended; returns the attempts and all that was printed."""
    while True:
        attempts = _attempts(store, id)
        text = _text(store, id, attempts[number])
        if text != shown:
            # The middle of a very long log is left out, and then what is left out grows.
            click.echo(text[len(shown) :] if text.startswith(shown) else text, nl=False)
            shown = text
        if attempts[number].over or any(later > number for later in attempts):
            return attempts, shown
        time.sleep(SECONDS)


def _why(attempt: Attempt) -> str:
    """Why there is nothing to show."""
    if attempt.over:
        return f"attempt {attempt.number} printed nothing"
    if attempt.state == INTERRUPTED_RUN:
        return f"attempt {attempt.number} was interrupted before anything that it printed was in the store"
    return f"attempt {attempt.number} has printed nothing that is in the store yet; --follow waits for it"


def _listed(attempts: list[int]) -> str:
    return f"attempt {attempts[0]}" if len(attempts) == 1 else f"attempts {', '.join(map(str, attempts))}"
