"""One slot of the cluster: a long-lived actor that holds a share of the resources and supervises training processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.tune import Trainable

from orchestrator.supervisor import Event, Job, Supervisor
from orchestrator.worker import Settings

GATE_SECONDS = 60.0
"""How long a slot waits for the others to start."""


class Gate:
    """Opens when all slots have arrived; an actor of its own.

    Without it, an actor that is done with a short first trial takes over the trial that another actor is still being
    started for, Tune gives up on that other actor, and most slots are never used.
    """

    def __init__(self, slots: int) -> None:
        self._missing = slots
        self._open = asyncio.Event()

    async def arrive(self) -> None:
        """Wait until everyone is here."""
        self._missing -= 1
        if self._missing <= 0:
            self._open.set()
        await self._open.wait()


class Slot(Trainable):
    """Trains one block after another: a Tune trial is a block, its configuration ``{"runs": [ids]}``.

    Each step reports what happened since the last one, about every ``report_every`` seconds: ``finished`` (id ->
    seconds, None for a record that was there already), ``failed`` (id -> message), ``refused`` (those of them that
    other hardware may train), ``retried`` and ``images``. ``done`` is Tune's word for the end of the trial.
    """

    def setup(  # type: ignore[override]  # Tune passes the keywords that it was given beforehand.
        self,
        config: dict[str, Any],
        *,
        jobs: Mapping[str, Job],
        settings: Settings,
        retries: int,
        patience: float,
        report_every: float,
        gate: ActorHandle[Gate] | None,
    ) -> None:
        """Called once an actor; the keywords are the same for all of a sweep's."""
        self._jobs = jobs
        self._report_every = report_every
        # Among Ray's own files: what a killed actor leaves goes where those go.
        folder = Path(self.logdir)
        self._supervisor = Supervisor(settings, folder=folder, retries=retries, patience=patience)
        self.reset_config(config)
        if gate is not None:
            try:
                ray.get(gate.arrive.remote(), timeout=GATE_SECONDS)
            except ray.exceptions.RayError:
                pass  # Late nodes join later; a slot more is worth less than a sweep that waits.

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take on a block."""
        jobs = [self._jobs[id] for id in new_config["runs"]]
        self._events: Iterator[Event] = self._supervisor.train(jobs, tick=self._report_every)
        return True

    def step(self) -> dict[str, Any]:
        """Train for about ``report_every`` seconds."""
        until = time.monotonic() + self._report_every
        finished: dict[str, float | None] = {}
        failed: dict[str, str] = {}
        refused: list[str] = []
        retried = images = 0
        over = False
        while not over and time.monotonic() < until:
            event = next(self._events, None)
            if event is None:
                over = True
            else:
                images += event.images
                retried += event.kind == "retried"
                if event.kind == "done":
                    finished[event.id] = event.seconds
                elif event.kind == "failed":
                    failed[event.id] = event.message
                    refused += [event.id] if event.refused else []
        counted = {"retried": retried, "images": images}
        return {"done": over, "finished": finished, "failed": failed, "refused": refused, **counted}

    def cleanup(self) -> None:
        """End the training process."""
        self._supervisor.close()
