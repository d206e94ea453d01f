"""Launching: Ray Tune schedules a plan's missing runs over a machine or a cluster. Only here is Ray imported."""

from orchestrator.launch.driver import Result, sweep

__all__ = ["Result", "sweep"]
