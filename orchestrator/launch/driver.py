"""A sweep: train what a plan misses, on every slot of a cluster, until all is done or someone stops it.

The store is the only state. Ray Tune's own is scratch that is deleted afterwards, and the same call again resumes.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.tune.experiment import Trial
from rich.console import Console

from orchestrator import catalog
from orchestrator.launch.blocks import Blocks, Durations
from orchestrator.launch.cluster import cluster, slots
from orchestrator.launch.progress import Display, Tally, failures
from orchestrator.launch.searcher import BlockSearcher
from orchestrator.launch.trainable import Gate, Slot
from orchestrator.plan import Plan, Planned
from orchestrator.store import Store
from orchestrator.supervisor import Job
from orchestrator.worker import Settings
from protocols.run import Run

TRIALS_PER_FIT = 2000
"""Tune never forgets a trial, and slows down with their number; so it is started afresh after so many."""

ACTOR_FAILURES = 10
"""How often a block is started again after its actor or node died. Its finished runs are not trained again."""

HOPELESS = 3
"""If so many runs have failed with one and the same message, and none is done, the sweep stops. Refused runs do not
count: other machines of the cluster may train the rest."""

SECONDS_PER_IMAGE = 2e-4
"""A guess for runs of which no similar one is done: a small network on one CPU core."""

_RUN_ID = re.compile(r"\b[0-9a-f]{64}\b")


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
    hopeless: str
    """The message that every run failed with, if the sweep was given up for that."""
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
    checkpoint_every: float = 60.0,
    decode_threads: int | None = None,
    retries: int = 1,
    patience: float = 3600.0,
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
        checkpoint_every: seconds between two checkpoints of a run; 0: one at the end of each epoch.
        decode_threads: threads that decode photographs for each run; None: its share of the machine's cores.
        retries: how often a run that failed is tried again.
        patience: seconds without a finished epoch after which a run counts as hung, and as failed.
        address: of a Ray cluster; None: RAY_ADDRESS, else one is started on this machine for the sweep.
        console: where progress is shown; None: the standard error.

    Returns:
        How it ended; SIGINT, SIGTERM and SIGHUP end it early.

    Raises:
        UserError: an extra is missing, or there is no such cluster or no room on it.
    """
    console = console or Console(stderr=True)
    began = time.monotonic()
    tally = Tally(planned=len(plan.planned), done=len(plan.done))
    hopeless = ""
    interrupted = threading.Event()
    with _signals(interrupted):
        if plan.missing:
            for trainer in sorted({planned.run.trainer for planned in plan.missing}):
                catalog.require(trainer)
            _set_aside(plan, store, console)
            settings = Settings(
                store=store.url,
                data_root=None if data_root is None else str(Path(data_root).absolute()),
                gpus=gpus_per_run,
                checkpoint_every=checkpoint_every,
                decode_threads=decode_threads,
                isolation=plan.protocol.isolation,
                between_runs=plan.protocol.between_runs,
            )
            # Once more inside, because Ray sets a handler of its own when it connects.
            with cluster(address, max_concurrent), _signals(interrupted):
                fitting = slots(gpus_per_run)
                count = max_concurrent or fitting
                durations = _durations(plan, store)
                watcher = Watcher(plan.missing, durations, tally, count, interrupted)
                parameters = {
                    "jobs": {planned.id: Job(run=planned.run, source=planned.source) for planned in plan.missing},
                    "settings": settings,
                    "retries": retries,
                    "patience": patience,
                    # The driver handles some tens of reports a second, however many slots there are.
                    "report_every": max(1.0, count / 16),
                }
                blocks = Blocks(plan.missing, count, durations)
                with Display(tally, watcher.remaining, console) as watcher.display:
                    watcher.display.say(f"training {len(plan.missing):,} runs, {count:,} side by side")
                    while blocks.left and not watcher.stopping:
                        _fit(blocks, parameters, watcher, count, min(count, fitting))
                hopeless = watcher.hopeless
    return Result(
        planned=tally.planned,
        done=tally.done,
        failed=dict(tally.failed),
        interrupted=interrupted.is_set(),
        hopeless=hopeless,
        seconds=time.monotonic() - began,
    )


def _fit(blocks: Blocks, parameters: Mapping[str, Any], watcher: Watcher, count: int, fitting: int) -> None:
    """Have Tune work off the next ``TRIALS_PER_FIT`` blocks."""
    scratch = tempfile.mkdtemp(prefix="noisegrid-tune-")
    arriving = min(fitting, len(blocks.left))
    gate = ray.remote(num_cpus=0)(Gate).remote(arriving) if arriving > 1 else None
    share = {"CPU": 1.0} | ({"GPU": parameters["settings"].gpus} if parameters["settings"].gpus else {})
    try:
        tune.Tuner(
            tune.with_resources(
                tune.with_parameters(Slot, gate=gate, **parameters), tune.PlacementGroupFactory([share])
            ),
            tune_config=tune.TuneConfig(
                search_alg=BlockSearcher(blocks),
                num_samples=TRIALS_PER_FIT,
                max_concurrent_trials=count,
                reuse_actors=True,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
            ),
            run_config=tune.RunConfig(
                storage_path=scratch,
                callbacks=[watcher],
                stop=_Stopper(watcher),
                failure_config=tune.FailureConfig(max_failures=ACTOR_FAILURES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                verbose=0,
            ),
        ).fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Stopper(tune.Stopper):
    """Has Tune stop all slots, in good order, once the watcher says so."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether to stop one trial: it ends by itself."""
        return False

    def stop_all(self) -> bool:
        """Whether to stop; asked several times a second."""
        return self._watcher.stopping


class Watcher(tune.Callback):
    """Counts what Tune reports, and knows when to stop."""

    def __init__(
        self,
        missing: Sequence[Planned],
        durations: Durations,
        tally: Tally,
        slots: int,
        interrupted: threading.Event,
    ) -> None:
        self.runs = {planned.id: planned.run for planned in missing}
        self.tally = tally
        self._durations = durations
        self._slots = slots
        self._interrupted = interrupted
        self._done: set[str] = set()
        self._refused: set[str] = set()
        self._running: dict[str, list[str]] = {}
        self.display: Display
        self.hopeless = ""

    def __getstate__(self) -> dict[str, Any]:
        """Tune saves its callbacks, for a resumption that is never asked of it."""
        return {}

    @property
    def stopping(self) -> bool:
        """Whether the sweep is to end now."""
        return self._interrupted.is_set() or bool(self.hopeless)

    def remaining(self) -> float:
        """Seconds until all runs are done, as far as is known."""
        waiting = [run for id, run in self.runs.items() if id not in self._done and id not in self.tally.failed]
        return sum(map(self._durations.estimate, waiting)) / self._slots

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A slot took on a block."""
        self._running[trial.trial_id] = trial.config["runs"]

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """A slot reported what it did since its last report."""
        for id, seconds in result["finished"].items():
            # A block that was started again reports its finished runs again.
            if id not in self._done:
                self._done.add(id)
                self.tally.done += 1
                self.tally.failed.pop(id, None)
                if seconds is not None:
                    self._durations.learn(self.runs[id], seconds)
        self._refused |= set(result["refused"])
        self._fail(result["failed"])
        self.tally.retried += result["retried"]
        self.tally.images += result["images"]

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A slot is through with its block."""
        self._running.pop(trial.trial_id, None)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A block was given up: its actor died too often."""
        self._running.pop(trial.trial_id, None)
        left = [id for id in trial.config["runs"] if id not in self._done and id not in self.tally.failed]
        self._fail(dict.fromkeys(left, _error(trial)))

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Several times a second."""
        self.tally.running = len(self._running)
        self.display.refresh()

    def _fail(self, failed: Mapping[str, str]) -> None:
        self.tally.failed |= failed
        for line in failures(failed):
            self.display.say(line)
        counted = {id: message for id, message in self.tally.failed.items() if id not in self._refused}
        messages = Counter(_RUN_ID.sub("ID", message) for message in counted.values())
        if not self._done and len(messages) == 1 and messages.total() >= HOPELESS:
            self.hopeless = next(iter(messages))


def _error(trial: Trial) -> str:
    """What went wrong with a slot, in one line."""
    if not trial.pickled_error_file:
        return "its actor died"
    error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


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
