"""Asynchronous SGD: in which order workers' gradients are applied, and how stale the weights were that they read.

A worker reads the weights and takes the next batch of the epoch; once it has the gradient, the server applies it with
its own momentum, weight decay and rate, and the worker goes on. All that such training adds to a run is a *schedule*:
which batch each step of the server applies, and how many steps had been taken when its worker read the weights. It
comes from a simulation, from a race, or from the log of a race, and the same schedule gives the same bits.

Epochs are drained: no gradient crosses from one epoch into the next.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocols import streams
from protocols.run import Run

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Commits:
    """One epoch of a schedule, a row a server step."""

    workers: Int64
    """(steps,)"""
    batches: Int64
    """(steps,) The batch of the epoch whose gradient is applied."""
    reads: Int64
    """(steps,) Steps of the epoch that had been taken when the worker read the weights; row s has at most s."""

    @property
    def staleness(self) -> Int64:
        """(steps,) Steps taken between reading the weights and applying the gradient."""
        return np.arange(len(self.reads)) - self.reads

    def log(self) -> Int64:
        """(steps, 3), see :attr:`protocols.contract.Outcome.commits`."""
        return np.stack([self.workers, self.batches, self.reads], axis=1)


class Schedule:
    """The schedule of a run in one of three modes: ``simulated``, ``real`` or ``replay``.

    Args:
        run: the specification.
        log: what a replay follows; None: ``real`` where the run's asynchrony is, else ``simulated``.
    """

    def __init__(self, run: Run, log: Int64 | None = None) -> None:
        self._run = run
        self._log = log
        self.mode = "replay" if log is not None else "real" if run.asynchrony == "real" else "simulated"

    def epoch(self, epoch: int, steps: int) -> Commits | None:
        """The schedule of an epoch; None in mode ``real``, where a race decides.

        Raises:
            ValueError: the log that is to be followed is none of this run.
        """
        if self.mode == "real":
            return None
        if self._log is None:
            return simulate(streams.service_times(self._run, epoch, steps), self._run.recipe.async_workers)
        return from_log(self._log[epoch * steps : (epoch + 1) * steps], steps)


def simulate(service_times: NDArray[np.float64], workers: int) -> Commits:
    """The schedule of an epoch in which batch b keeps its worker busy for ``service_times[b]``.

    All workers start at once; of two that end at the same time the lower-numbered one comes first. One worker alone
    reads fresh weights for every batch, which is synchronous training.

    Args:
        service_times: (steps,)
        workers: how many there are.
    """
    steps = len(service_times)
    rows = np.empty((steps, 3), np.int64)
    busy: list[tuple[float, int, int, int]] = []
    following = 0
    for worker in range(min(workers, steps)):
        heapq.heappush(busy, (float(service_times[following]), worker, following, 0))
        following += 1
    for step in range(steps):
        time, worker, batch, read = heapq.heappop(busy)
        rows[step] = worker, batch, read
        if following < steps:
            heapq.heappush(busy, (time + float(service_times[following]), worker, following, step + 1))
            following += 1
    return Commits(workers=rows[:, 0], batches=rows[:, 1], reads=rows[:, 2])


def from_log(log: Int64, steps: int) -> Commits:
    """One epoch of a log as a schedule.

    Raises:
        ValueError: it is not a possible log of so many steps.
    """
    if log.shape != (steps, 3):
        raise ValueError(f"the log has {len(log)} rows for an epoch of {steps} steps")
    workers, batches, reads = log.T
    if sorted(batches) != list(range(steps)) or (reads < 0).any() or (reads > np.arange(steps)).any():
        raise ValueError("the log does not apply every batch once, each after its weights were read")
    return Commits(workers=workers, batches=batches, reads=reads)
