"""From records to numbers: measures, intervals and tables. Reads records only."""

from orchestrator.analysis.sweep import Sweep, load

__all__ = ["Sweep", "load"]
