"""A block's way to its slot: what the configuration of a Ray Tune trial holds, and the jobs that are made of it.

Tune keeps several copies of a trial's configuration for as long as it runs, and slots must not hold a whole plan. A
block's runs differ in their replicate alone, so it takes one specification, the ids and the replicates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.plan import Planned
from orchestrator.slot.supervisor import Job
from protocols.run import run_from_specification


def configuration(
    block: Sequence[Planned], *, failed: Mapping[str, int], avoid: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """A trial's configuration.

    Args:
        block: runs of one cell.
        failed: how many attempts at a run have failed, where any have.
        avoid: devices that are to give a run back untried, where there are any.
    """
    return {
        "runs": [planned.id for planned in block],
        "replicates": [planned.run.replicate for planned in block],
        "specification": block[0].run.specification,
        "source": block[0].source,
        "failed": dict(failed),
        "avoid": {id: list(devices) for id, devices in avoid.items()},
    }


def jobs(config: Mapping[str, Any]) -> list[Job]:
    """What a configuration asks for, in its order.

    Raises:
        RuntimeError: a job's run is not the one that was meant, because this machine has other code than the driver.
    """
    template = run_from_specification(config["specification"])
    found = []
    for id, replicate in zip(config["runs"], config["replicates"], strict=True):
        run = dataclasses.replace(template, replicate=replicate)
        if run.id != id:
            raise RuntimeError(f"run {id[:12]} has id {run.id[:12]} here: this machine has another version of the code")
        found.append(Job(run=run, source=config["source"], failed=config["failed"].get(id, 0)))
    return found
