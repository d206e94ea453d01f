"""The command line: ``sweep.py VERB [PROTOCOL]``, also installed as ``noisegrid``."""

from orchestrator.cli.app import main

__all__ = ["main"]
