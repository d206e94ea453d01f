"""From records to numbers: measures, intervals and tables. Reads records only."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.analysis.sweep import Sweep, load

__all__ = ["Sweep", "load"]


def __getattr__(name: str) -> Any:
    """``Sweep`` and ``load`` bring pandas along, which who wants an interval alone need not wait for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchestrator.analysis import sweep

    return getattr(sweep, name)
