"""One slot of the cluster: a long-lived actor that holds a share of the resources and supervises training processes."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from ray.tune import Trainable

from orchestrator import devices
from orchestrator.launch.gate import Gate, Passage
from orchestrator.launch.jobs import jobs
from orchestrator.slot.context import Settings
from orchestrator.slot.supervisor import Events, Supervisor

GRACE_SECONDS = 10.0
"""What a run has, when the sweep is stopped, to end its epoch and leave a checkpoint."""


class Slot(Trainable):
    """Trains one block after another: a Tune trial is a block, its configuration :func:`.jobs.configuration`.

    Each step reports what happened since the last one, about every ``report_every`` seconds:

    - ``finished``: id -> seconds, None for a record that was there already
    - ``failed``: id -> [outcome, message, refused] of an attempt that left no record, see :class:`Event`
    - ``busy``: ids that another sweep is training
    - ``unstored``: id -> message of a run that was not tried or not committed, because the store did not answer
    - ``parked``: why the slot's device is not to be trusted; empty while it is
    - ``withdrawn``: ids of runs, of whatever block, whose records were moved away because the device is wrong
    - ``returned``: ids of the block that were not tried, for that reason or because they avoid this device
    - ``images``: training images seen
    - ``device``: the host and its device

    ``done`` is Tune's word for the end of the trial. A parked slot never ends its trial, so that nothing else is
    trained on its device: it goes on reporting ``parked``, and nothing else, until the sweep stops.
    """

    def setup(  # type: ignore[override]  # Tune passes the keywords that it was given beforehand.
        self,
        config: dict[str, Any],
        *,
        settings: Settings,
        patience: float,
        report_every: float,
        gate: ActorHandle[Gate] | None,
    ) -> None:
        """Called once an actor; the keywords are the same for all of a sweep's."""
        self._report_every = report_every
        self._device = f"{socket.gethostname()} {devices.device(settings.gpus)}"
        # Among Ray's own files: what a killed actor leaves goes where those go.
        self._supervisor = Supervisor(settings, folder=Path(self.logdir), patience=patience)
        self._passage = Passage(gate, self._device)
        self._parked = ""
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take on a block."""
        shunned = [id for id, devices in new_config["avoid"].items() if self._device in devices]
        self._parked = self._parked or self._passage.barred()
        self._returned = list(new_config["runs"]) if self._parked else shunned
        block = [job for job in jobs(new_config) if job.run.id not in self._returned]
        self._left = dict.fromkeys(job.run.id for job in block)
        self._events: Events = self._supervisor.train(block, tick=self._report_every)
        return True

    def step(self) -> dict[str, Any]:
        """Train for about ``report_every`` seconds."""
        until = time.monotonic() + self._report_every
        finished: dict[str, float | None] = {}
        failed: dict[str, list[Any]] = {}
        busy: list[str] = []
        unstored: dict[str, str] = {}
        withdrawn: list[str] = []
        returned, self._returned = self._returned, []
        images = 0
        over = False
        while not self._parked and time.monotonic() < until:
            event = next(self._events, None)
            if event is None:
                over = self._passage.passed(max(0.05, until - time.monotonic()))
                break
            images += event.images
            match event.kind:
                case "done":
                    finished[event.id] = event.seconds
                case "failed":
                    failed[event.id] = [event.outcome, event.message, event.refused]
                case "busy":
                    busy.append(event.id)
                case "unstored":
                    unstored[event.id] = event.message
                case "parked":
                    self._parked, returned = event.message, [*returned, *self._left]
                    withdrawn = list(event.withdrawn)
                    self._supervisor.close()
                case _:
                    continue
            self._left.pop(event.id, None)
        if self._parked and not returned:
            time.sleep(max(0.0, until - time.monotonic()))
        return {
            "done": over,
            "finished": finished,
            "failed": failed,
            "busy": busy,
            "unstored": unstored,
            "withdrawn": withdrawn,
            "returned": returned,
            "images": images,
            "device": self._device,
            "parked": self._parked,
        }

    def cleanup(self) -> None:
        """End the training process, and give back the lease of the run under way."""
        # The process first, before another sweep can begin its run. A slot that could not be set up has neither.
        if "_supervisor" in vars(self):
            self._supervisor.close(GRACE_SECONDS)
        if "_events" in vars(self):
            self._events.close()
