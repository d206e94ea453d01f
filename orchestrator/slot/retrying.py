"""A little patience with a store: a disk that is full for a moment, a network that is gone for a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from orchestrator.store import StoreError

WAITS = (0.5, 2.0, 5.0)
"""Seconds before each further try."""

Value = TypeVar("Value")


def patiently(action: Callable[[], Value]) -> Value:
    """What an action on a store gives, tried again a few times if the store refuses; it must bear repetition.

    Raises:
        StoreError: it refused every time.
    """
    for wait in WAITS:
        try:
            return action()
        except StoreError:
            time.sleep(wait)
    return action()
