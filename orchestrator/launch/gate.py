"""Where slots wait at the end of a block while others are being started, and learn that they are to stop training.

With reused actors Ray Tune hands the next trial to whichever actor is free, even if another one is being started for
it, and gives up on that other one. Where blocks are short, most slots would never come to be: at the start of a sweep,
and again whenever a node joins. So an actor that is through with its block does not say so until the others are there.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

GATE_SECONDS = 30.0
"""How long slots wait for others to start. A slot more is worth less than a sweep that waits."""


class Gate:
    """An actor of its own, one for each sweep. The driver opens and closes it."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._barred: dict[str, str] = {}

    async def set(self, open: bool) -> None:
        """Open or close it."""
        (self._open.set if open else self._open.clear)()

    async def bar(self, device: str, reason: str) -> None:
        """Have a device train no more blocks."""
        self._barred[device] = reason

    async def passed(self) -> None:
        """Wait until it is open."""
        await self._open.wait()

    async def barred(self, device: str) -> str:
        """Why a device is not to train any more blocks; empty if it may."""
        return self._barred.get(device, "")


class Keeper:
    """The driver's side of the gate, which is closed at first."""

    def __init__(self) -> None:
        # Beside the driver, so that it goes with no other node.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        self.gate: Any = ray.remote(num_cpus=0)(Gate).options(scheduling_strategy=here).remote()

    def set(self, open: bool) -> None:
        """Open or close it, which has been done when this returns."""
        self._do(self.gate.set.remote(open))

    def bar(self, device: str, reason: str) -> None:
        """Have a device train no more blocks."""
        self._do(self.gate.bar.remote(device, reason))

    def _do(self, asked: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # Without a gate the sweep goes on, on fewer slots perhaps.
            ray.get(asked, timeout=GATE_SECONDS)


class Passage:
    """A slot's way through the gate.

    Args:
        gate: None: always open.
        device: the slot's.
    """

    def __init__(self, gate: ActorHandle[Gate] | None, device: str) -> None:
        self._gate = gate
        self._device = device
        self._waiting: Any = None

    def barred(self) -> str:
        """Why this slot is not to begin another block; empty if it may."""
        if self._gate is None:
            return ""
        try:
            return str(ray.get(self._gate.barred.remote(self._device), timeout=GATE_SECONDS))
        except ray.exceptions.RayError:
            return ""  # The gate's node is gone: nothing is known against this device.

    def passed(self, seconds: float) -> bool:
        """Whether the slot may end its block, waiting so many seconds for it."""
        if self._gate is None:
            return True
        if self._waiting is None:
            self._waiting = self._gate.passed.remote()
        if not ray.wait([self._waiting], timeout=seconds)[0]:
            return False
        self._waiting = None  # Open, or gone with its node.
        return True
