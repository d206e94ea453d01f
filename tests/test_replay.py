"""A recorded run trained once more: the same bits, or what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.app import main
from orchestrator.plan import Plan
from orchestrator.replay import replay, resolve
from orchestrator.slot.context import Settings
from orchestrator.slot.supervisor import Job, Supervisor
from orchestrator.store import Store, open_store
from protocols.errors import UserError
from tests import factory
from tests.fakes import planned


@pytest.fixture
def store(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return open_store(tmp_path / "store", create=True)


@pytest.fixture
def settings(store: Store) -> Settings:
    return Settings(store=store.url, checkpoint_every=0)


def train(plan: Plan, source: str, settings: Settings) -> str:
    """Train the first run of a cell; its id."""
    run = next(entry.run for entry in plan.planned if entry.source == source)
    supervisor = Supervisor(settings)
    events = list(supervisor.train([Job(run=run, source=source)]))
    supervisor.close()
    assert events[-1].kind == "done"
    return run.id


def files(store: Store) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(store.url).rglob("*") if path.is_file()}


def test_a_race_is_replayed_by_its_log(store: Store, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    id = train(planned(store, "async", async_workers=3, asynchrony="real", views=("flip",)), "async", settings)
    before = files(store)
    assert main(["replay", id[:8], "--store", store.url]) == 0
    said = capsys.readouterr().out
    assert said == f"{id[:12]} replayed bit for bit: weights, and losses and logits as recorded, are the same\n"
    assert files(store) == before


def test_anything_else_is_replayed_by_its_specification(store: Store, settings: Settings) -> None:
    id = train(planned(store, "onebit"), "onebit", settings)
    assert replay(store, id, settings).same


def test_a_replay_says_what_differs(
    store: Store, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A race whose log is lost is another race; and another version of the framework is named."""
    plan = planned(store, "async", async_workers=3, asynchrony="real")
    id = train(plan, "async", settings)
    row = store.table(store.table().schema.names + ["logits", "predictions", "variants", "losses", "history"], {id})
    (values,) = row.to_pylist()
    lost = open_store(tmp_path / "lost", create=True)
    lost.commit(values | {"commits": [], "fingerprint": "0" * 16, "hardware": "cpu, torch 0.9"})
    assert main(["replay", id, "--store", lost.url]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{id[:12]} differs from the record in weights (2 of 2 tensors), losses (from step ")
    assert "logits; it was trained under fingerprint 0000000000000000 (cpu, torch 0.9), and here is " in said
    assert said.count("\n") == 1


def test_a_replay_that_fails_says_why(store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(store.url).parent / "mischief"
    id = train(planned(store, "init"), "init", settings)
    folder.mkdir()
    (folder / "raise-0-always").touch()
    monkeypatch.setenv("NOISEGRID_FAKE", str(folder))
    result = replay(store, id, settings)
    assert not result.same and result.text.startswith("not replayed: ValueError: a mistake in the trainer")


def test_an_id_is_known_by_its_first_digits(store: Store) -> None:
    factory.fill(store, factory.plan(sources=("init",), replicates=20))
    first, second = sorted(store.finished())[:2]
    assert resolve(store, first) == first
    shared = next(end for end in range(64) if first[end] != second[end])
    assert resolve(store, first[: shared + 1]) == first or shared == 0
    for prefix, message in ((first + "0", "no record in .* starts with"), ("", "20 records .* give more digits")):
        with pytest.raises(UserError, match=message) as caught:
            resolve(store, prefix)
        assert "\n" not in str(caught.value)


def test_mistakes_are_one_line(store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fake = factory.plan(sources=("init",), replicates=1)[0]
    store.commit(factory.record(fake, device="NVIDIA H200"))
    missing = tmp_path / "missing"
    for arguments, message in (
        (["zzz", "--store", store.url], "no record in"),
        (["zzz", "--store", str(missing)], "no record in"),
        ([fake.run.id, "--store", store.url], "was trained on a GPU (NVIDIA H200), and this machine has none"),
    ):
        assert main(["replay", *arguments]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
    assert not missing.exists()
