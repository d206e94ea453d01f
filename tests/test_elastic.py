"""Nodes that come and go in mid-sweep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.plan import plan
from orchestrator.store import Store, open_store
from tests import chaos_study
from tests.chaos_study import trainings
from tests.clusters import Nodes, environment, outcome, parent, start, wait_for, workers


@pytest.fixture(scope="module")
def nodes(cache: Path) -> Iterator[Nodes]:
    with environment(cache, FAKE_SECONDS="0.3"):
        nodes = Nodes(1)
        yield nodes
        nodes.shutdown()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def test_a_node_that_joins_is_used_and_one_that_leaves_costs_nothing(nodes: Nodes, store: Store) -> None:
    planned = plan(chaos_study.fakes_study(), store).planned
    program = start("fakes_study", Path(store.url), nodes.address)
    wait_for(lambda: len(store.finished()) >= 4, program)
    before = {parent(pid) for pid in workers()}
    assert len(before) == 2
    nodes.add()
    # Two more slots, with blocks so short that free slots would take them all without the gate.
    wait_for(lambda: len({parent(pid) for pid in workers()} - before) == 2, program)
    assert len(store.finished()) < len(planned) / 2, "the node was used when it was nearly over"
    seen = len(trainings())
    wait_for(lambda: len(trainings()) >= seen + 6, program)
    nodes.kill(0)
    assert outcome(program) == {"done": len(planned), "planned": len(planned), "stopped": ""}
    assert store.finished() == {entry.id for entry in planned}
    assert len(store.failures()) == 0
