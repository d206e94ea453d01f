"""Ray Tune's view of the plan: a search algorithm that suggests the next block, as ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from ray.tune.search import Searcher

from orchestrator.launch.blocks import Blocks


class BlockSearcher(Searcher):
    """Suggests blocks one by one until none is left.

    Tune keeps whatever a trial's configuration holds for as long as it runs, so it is given ids and nothing else.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self._blocks = blocks

    def __getstate__(self) -> dict[str, Any]:
        """Nothing to keep: what is left to do is what the store does not have."""
        return {}

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next block's ids."""
        block = self._blocks.next()
        # Tune's mark for the end is a string that its own annotation does not allow.
        return {"runs": [planned.id for planned in block]} if block else cast(None, Searcher.FINISHED)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing is learned from a trial: results are in the store."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing to keep, but Tune expects a file."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Never called: a sweep is resumed from the store, not from Tune's state."""
