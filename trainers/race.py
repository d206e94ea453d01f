"""Threads that race: asynchronous SGD as it happens, and the log of what it came to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from trainers.asynchrony import Commits

Snapshot = TypeVar("Snapshot")
Gradient = TypeVar("Gradient")


def race(
    steps: int,
    workers: int,
    read: Callable[[int], Snapshot],
    gradient: Callable[[int, Snapshot], Gradient],
    commit: Callable[[int, Gradient], None],
) -> Commits:
    """Let so many threads train one epoch.

    A thread takes the next batch and reads the weights in one turn, and commits in another; only gradients are computed
    side by side. So the log says all there is to know about the outcome.

    Args:
        steps: batches of the epoch.
        workers: threads.
        read: copies, for this batch, what a worker needs of the shared state; called in turns, batch after batch.
        gradient: computes the batch's gradient from that copy; called side by side.
        commit: takes this step of the server with that gradient; called in turns, step after step.

    Raises:
        Exception: whatever a thread raised first, once all have stopped.
    """
    turn, stopped = threading.Lock(), threading.Event()
    waiting = iter(range(steps))
    log: list[tuple[int, int, int]] = []

    def work(worker: int) -> None:
        try:
            while not stopped.is_set():
                with turn:
                    batch = next(waiting, None)
                    if batch is None:
                        return
                    snapshot, version = read(batch), len(log)
                found = gradient(batch, snapshot)
                with turn:
                    if stopped.is_set():
                        return
                    commit(len(log), found)
                    log.append((worker, batch, version))
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(workers, thread_name_prefix="worker") as pool:
        try:
            for future in [pool.submit(work, worker) for worker in range(workers)]:
                future.result()
        finally:
            stopped.set()
    rows = np.array(log, np.int64).reshape(-1, 3)
    return Commits(workers=rows[:, 0], batches=rows[:, 1], reads=rows[:, 2])
