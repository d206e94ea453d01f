"""Work done ahead: what takes long to fetch is computed in the background, a few results before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")

AHEAD = 3
"""Batches of photographs that are decoded before they are needed, so that the device never waits for one."""


def ahead(
    function: Callable[[Argument], Result], arguments: Iterable[Argument]
) -> Iterator[tuple[Argument, Future[Result]]]:
    """Each argument with the function's result to come, computed by one other thread a few results ahead."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
    window: deque[tuple[Argument, Future[Result]]] = deque()
    try:
        for argument in arguments:
            window.append((argument, pool.submit(function, argument)))
            if len(window) > AHEAD:
                yield window.popleft()
        yield from window
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
