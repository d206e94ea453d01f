"""Two sweeps on one store at once: no run is trained twice, and what one leaves behind the other takes over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.plan import plan
from orchestrator.store import Store, open_store
from tests import chaos_study
from tests.chaos_study import trainings
from tests.clusters import Nodes, environment, outcome, start, wait_for


@pytest.fixture(scope="module")
def nodes(cache: Path) -> Iterator[Nodes]:
    with environment(cache, FAKE_SECONDS="0.2"):
        nodes = Nodes(2)
        yield nodes
        nodes.shutdown()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def test_two_drivers_train_no_run_twice(nodes: Nodes, store: Store) -> None:
    """Each has half of the cluster's four slots."""
    before = len(trainings())
    programs = [start("fakes_study", Path(store.url), nodes.address, max_concurrent=2) for _ in range(2)]
    planned = {entry.id for entry in plan(chaos_study.fakes_study(), store).planned}
    for program in programs:
        assert outcome(program) == {"done": len(planned), "planned": len(planned), "stopped": ""}
    assert store.finished() == planned
    counted = Counter(id for id, _, _ in trainings()[before:])
    assert set(counted) == planned and set(counted.values()) == {1}
    assert len({pid for _, _, pid in trainings()[before:]}) >= 4, "only one of them trained"
    assert len(store.failures()) == 0
    for folder in ("leases", "sweeps"):
        assert list(Path(store.url, folder).iterdir()) == []


def test_what_a_killed_driver_was_training_is_taken_over(nodes: Nodes, store: Store) -> None:
    before = len(trainings())
    killed, other = (start("fakes_study", Path(store.url), nodes.address, max_concurrent=2) for _ in range(2))
    planned = {entry.id for entry in plan(chaos_study.fakes_study(), store).planned}
    wait_for(lambda: len(trainings()) >= before + 12 and len(list(Path(store.url, "leases").iterdir())) >= 3, killed)
    killed.kill()
    killed.communicate()
    assert outcome(other) == {"done": len(planned), "planned": len(planned), "stopped": ""}
    assert store.finished() == planned and len(store.failures()) == 0
    again = {id: count for id, count in Counter(id for id, _, _ in trainings()[before:]).items() if count > 1}
    assert len(again) <= 2 and set(again.values()) <= {2}, "more was trained again than was under way"
