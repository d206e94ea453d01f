"""Ray Tune's view of the plan: a search algorithm that suggests the next block."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

from ray.tune.search import Searcher


class Over(Exception):
    """Nothing more is to be suggested."""


class Source(Protocol):
    """Where suggestions come from."""

    def suggest(self, trial: str) -> dict[str, Any] | None:
        """The configuration of a trial; None if there is none now. Raises Over."""


class BlockSearcher(Searcher):
    """Suggests blocks one by one, as many at a time as its source sees fit.

    Tune itself limits the number of pending trials for a searcher that it has not wrapped, by
    ``TUNE_MAX_PENDING_TRIALS_PG``, and asks again, for ever, one that has nothing now.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    def __getstate__(self) -> dict[str, Any]:
        """Nothing to keep: what is left to do is what the store does not have."""
        return {}

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next block's configuration."""
        try:
            return self._source.suggest(trial_id)
        except Over:
            # Tune's mark for the end is a string that its own annotation does not allow.
            return cast(None, Searcher.FINISHED)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing is learned from a trial: results are in the store."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing to keep, but Tune expects a file."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Never called: a sweep is resumed from the store, not from Tune's state."""
