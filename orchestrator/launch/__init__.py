"""Launching: Ray Tune schedules a plan's missing runs over a machine or a cluster. Only here is Ray imported.

What a slot imports from here is not to import the driver, so that is looked up when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.launch.driver import Result, sweep

__all__ = ["Result", "sweep"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchestrator.launch import driver

    return getattr(driver, name)
