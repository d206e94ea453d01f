"""A sweep: train what a plan misses, on every slot of a cluster, until all is done or someone stops it.

The store is the only state. Ray Tune's own is scratch that is deleted afterwards, and the same call again resumes.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ray import tune
from rich.console import Console

from orchestrator import catalog
from orchestrator.adaptive import Looking
from orchestrator.launch import cluster as clusters
from orchestrator.launch.blocks import Blocks, Durations
from orchestrator.launch.budgets import Budgets
from orchestrator.launch.cluster import cluster
from orchestrator.launch.gate import Keeper
from orchestrator.launch.progress import Display
from orchestrator.launch.scheduler import Scheduler
from orchestrator.launch.searcher import BlockSearcher
from orchestrator.launch.tally import Tally
from orchestrator.launch.trainable import Slot
from orchestrator.launch.watcher import TRIALS_PER_FIT, Stopper, Watcher
from orchestrator.plan import Plan, Planned
from orchestrator.slot import canary
from orchestrator.slot.context import Settings
from orchestrator.slot.retrying import patiently
from orchestrator.store import Store, StoreError
from orchestrator.store.leases import sweeping
from protocols.run import Run

LEASE_SECONDS = 60.0
"""After so long without a sign of life another sweep may take over what one was training."""

SECONDS_PER_IMAGE = 2e-4
"""A guess for runs of which no similar one is done: a small network on one CPU core."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a sweep ended."""

    planned: int
    done: int
    """Planned runs that have a record now."""
    failed: Mapping[str, str]
    """Runs that failed in this sweep, each after its retries: id -> message."""
    interrupted: bool
    """Whether a signal stopped it; the same command again resumes."""
    stopped: str = ""
    """Why it was given up, in words: every run failed alike, no device is to be trusted, the store has not answered.
    Empty if it was not."""
    out_of_time: bool = False
    """Whether the time budget ended it; the same command again resumes."""
    left: float = 0.0
    """Expected seconds of what is left, on the slots that there were; of those without a similar one that is done it
    is a guess."""
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether every planned run has a record."""
        return self.done == self.planned


def sweep(
    plan: Plan,
    store: Store,
    *,
    data_root: Path | None = None,
    max_concurrent: int | None = None,
    gpus_per_run: float = 0.0,
    memory_per_run: int = 0,
    checkpoint_every: float = 60.0,
    decode_threads: int | None = None,
    retries: int = 1,
    patience: float = 3600.0,
    time_budget: float = math.inf,
    lease_seconds: float = LEASE_SECONDS,
    address: str | None = None,
    console: Console | None = None,
) -> Result:
    """Train every missing run of a plan.

    Args:
        plan: what is planned, and what of it is missing.
        store: where the records go.
        data_root: where datasets are read from; None: NOISEGRID_DATA, else they are fetched.
        max_concurrent: runs side by side; None: as many as the cluster has CPU cores, or shares of its GPUs.
        gpus_per_run: GPUs of a run; 0: it has one CPU core.
        memory_per_run: bytes that a node must have for each run, and that it may take; 0: what the machine can spare.
        checkpoint_every: seconds between two checkpoints of a run; 0: one at the end of each epoch.
        decode_threads: threads that decode photographs for each run; None: its share of the machine's cores.
        retries: how often a run that raised, crashed or hung is tried again, see :mod:`.budgets` for the rest.
        patience: seconds without a finished epoch after which a run counts as hung, and as failed.
        time_budget: seconds after which the sweep ends; no run begins that is known to take longer than what is left.
        lease_seconds: see ``LEASE_SECONDS``.
        address: of a Ray cluster; None: RAY_ADDRESS, else one is started on this machine for the sweep.
        console: where progress is shown; None: the standard error.

    Returns:
        How it ended; SIGINT, SIGTERM and SIGHUP end it early.

    Raises:
        UserError: an extra is missing, or there is no such cluster or no room on it.
    """
    console = console or Console(stderr=True)
    began = time.monotonic()
    tally = Tally(plan)
    looking = Looking(plan, store)
    granted = looking.after(())
    tally.added(granted)
    missing = [*plan.missing, *granted]
    stopped, out_of_time, left = "", False, 0.0
    interrupted = threading.Event()
    with _signals(interrupted):
        if missing:
            trainers = sorted({planned.run.trainer for planned in missing})
            for trainer in trainers:
                catalog.require(trainer)
            # One canary for all devices of this sweep and, as a rule, of later ones.
            control = next(planned.run.control for planned in plan.planned if planned.run.trainer in trainers)
            _set_aside(plan, store, console)
            # Once more inside, because Ray sets a handler of its own when it connects.
            with (
                sweeping(store, seconds=lease_seconds) as lease,
                cluster(address, max_concurrent) as joined,
                _signals(interrupted),
            ):
                settings = Settings(
                    store=store.url,
                    data_root=None if data_root is None else str(Path(data_root).absolute()),
                    gpus=gpus_per_run,
                    checkpoint_every=checkpoint_every,
                    decode_threads=decode_threads,
                    isolation=plan.protocol.isolation,
                    between_runs=plan.protocol.between_runs,
                    sweep=lease.id,
                    lease_seconds=lease_seconds,
                    memory_limit=memory_per_run or None,
                    canary=control.specification,
                )
                largest = clusters.most(gpus_per_run) if joined else None

                def room() -> tuple[int, int]:
                    fitting = clusters.room(gpus_per_run, memory_per_run)
                    limit = clusters.at_a_time(fitting, largest, max_concurrent, joined=joined)
                    return min(fitting, limit), limit

                fitting = clusters.slots(gpus_per_run, memory_per_run, grows=joined)
                count = fitting if max_concurrent is None else min(fitting, max_concurrent)
                durations = _durations(plan, store)
                keeper = Keeper()
                with Display(tally, None, console, store=store, gpus=gpus_per_run) as display:
                    display.say(f"training {len(missing):,} runs, {count:,} side by side")
                    if not store.exclusive:
                        display.say(
                            f"{store.url} cannot tell two sweeps apart: another one at the same time may train a run "
                            "twice, which is still recorded once"
                        )
                    scheduler = Scheduler(
                        missing,
                        Blocks(missing, max(1, count), durations),
                        durations,
                        Budgets(retries),
                        tally,
                        say=display.say,
                        bar=keeper.bar,
                        grown=lambda ids: patiently(lambda: looking.after(ids)),
                        planned=plan.planned,
                    )
                    watcher = Watcher(
                        scheduler,
                        display,
                        room=room,
                        gate=keeper.set,
                        has=lambda id: patiently(lambda: store.has(id)),
                        interrupted=interrupted,
                        deadline=began + time_budget,
                    )
                    parameters = {
                        "settings": settings,
                        "patience": patience,
                        # The driver handles some tens of reports a second, however many slots there are.
                        "report_every": max(1.0, count / 16),
                        "gate": keeper.gate,
                    }
                    while not scheduler.over and not watcher.stopping:
                        _fit(parameters, watcher, _share(gpus_per_run, memory_per_run))
                        if gpus_per_run and scheduler.over:
                            _settle(store, scheduler)
                stopped, out_of_time = scheduler.stopped, watcher.out_of_time
                left = scheduler.remaining() / max(1, watcher.slots)
    return Result(
        planned=tally.planned,
        done=tally.done_count,
        failed=dict(tally.failures),
        interrupted=interrupted.is_set(),
        stopped=stopped,
        out_of_time=out_of_time,
        left=left,
        seconds=time.monotonic() - began,
    )


def _settle(store: Store, scheduler: Scheduler) -> None:
    """Find out devices that were wrong though nothing was known against them when they trained their last run."""
    try:
        for device, sentence, withdrawn in canary.settle(store):
            scheduler.distrust(device, sentence)
            scheduler.reopen(withdrawn)
    except StoreError as error:
        scheduler.stopped = f"it cannot be told whether every device is to be trusted: {error}"


def _share(gpus_per_run: float, memory_per_run: int) -> dict[str, float]:
    """What a slot holds of its node, in Ray's terms."""
    share = {"CPU": 1.0, "GPU": gpus_per_run, "memory": float(memory_per_run)}
    return {name: amount for name, amount in share.items() if amount}


def _fit(parameters: Mapping[str, Any], watcher: Watcher, share: dict[str, float]) -> None:
    """Have Tune work off the next ``TRIALS_PER_FIT`` blocks."""
    scratch = tempfile.mkdtemp(prefix="noisegrid-tune-")
    watcher.begin()
    try:
        tune.Tuner(
            tune.with_resources(tune.with_parameters(Slot, **parameters), tune.PlacementGroupFactory([share])),
            tune_config=tune.TuneConfig(
                search_alg=BlockSearcher(watcher),
                num_samples=TRIALS_PER_FIT,
                reuse_actors=True,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
            ),
            run_config=tune.RunConfig(
                storage_path=scratch,
                callbacks=[watcher],
                stop=Stopper(watcher),
                # A block whose slot died is cut anew, from what is left of it.
                failure_config=tune.FailureConfig(max_failures=0),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                verbose=0,
            ),
        ).fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _durations(plan: Plan, store: Store) -> Durations:
    """What is known beforehand of how long runs take: a few done ones of each kind."""
    durations = Durations(_guess)
    sample: dict[object, list[Planned]] = {}
    for planned in plan.planned:
        if planned.id in plan.done:
            sample.setdefault((planned.group, planned.run.varies), []).append(planned)
    chosen = {planned.id: planned.run for cell in sample.values() for planned in cell[:4]}
    for row in store.table(["id", "seconds"], set(chosen)).to_pylist():
        durations.learn(chosen[row["id"]], row["seconds"])
    return durations


def _guess(run: Run) -> float:
    examples = run.dataset.train_size or catalog.dataset(run.dataset.name).train_size
    return float(run.recipe.epochs * examples * SECONDS_PER_IMAGE)


def _set_aside(plan: Plan, store: Store, console: Console) -> None:
    """Make room for new records where there are unreadable ones."""
    for planned in plan.missing:
        if planned.id in plan.corrupt and (place := store.set_aside(planned.id)):
            reason = plan.corrupt[planned.id]
            console.print(
                f"record {planned.id[:12]} is unreadable ({reason}): moved to {place}, its run is trained again",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


@contextlib.contextmanager
def _signals(event: threading.Event) -> Iterator[None]:
    """Have SIGINT, SIGTERM and SIGHUP set an event, instead of what they do otherwise; a second SIGINT interrupts."""

    def handle(number: int, frame: FrameType | None) -> None:
        if event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        event.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
