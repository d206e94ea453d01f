"""A GPU counts once it computes the control's first epoch as others do; slots are supervisors on pretended devices."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.launch.trainable import Slot
from orchestrator.slot.canary import Sighting, Sightings, doubt, settle
from orchestrator.slot.supervisor import Event, Job, Supervisor
from orchestrator.store import Store, StoreError
from tests import clusters
from tests.fakes import planned
from tests.test_supervisor import Supervise, jobs, kinds

HOST = socket.gethostname()


class Device:
    """A slot on a device of its own, known by CUDA_VISIBLE_DEVICES as Ray sets it."""

    def __init__(self, name: str, supervise: Supervise, patch: pytest.MonkeyPatch) -> None:
        self._name, self._patch = name, patch
        patch.setenv("CUDA_VISIBLE_DEVICES", name)
        self.supervisor: Supervisor = supervise(gpus=1.0)

    def train(self, todo: list[Job]) -> list[Event]:
        self._patch.setenv("CUDA_VISIBLE_DEVICES", self._name)
        return list(self.supervisor.train(todo))


Slots = Callable[[str], Device]


@pytest.fixture
def slot(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> Slots:
    """Makes slots."""
    return lambda name: Device(name, supervise, monkeypatch)


def runs(store: Store) -> list[Job]:
    return jobs(planned(store, "init", replicates=8), "init")


def parked(events: list[Event]) -> str:
    """Why a slot was parked, which is the last thing that it said."""
    assert events[-1].kind == "parked" and [event.kind for event in events].count("parked") == 1
    return events[-1].message


def left(store: Store) -> list[str]:
    """Which devices have left what their canary came to."""
    return sorted(path.name.split(".")[2] for path in Path(store.url, "canaries").glob("*"))


def test_a_device_that_agrees_counts(store: Store, slot: Slots) -> None:
    """Its canary leaves neither a record nor a checkpoint, and is trained once."""
    todo = runs(store)
    one, other = slot("0"), slot("1")
    assert kinds(one.train(todo[:1])) == kinds(other.train(todo[1:2])) == ["done"]
    assert left(store) == [f"{HOST}-GPU-0", f"{HOST}-GPU-1"]
    one_file, other_file = sorted(Path(store.url, "canaries").glob("*"))
    one_seen, other_seen = json.loads(one_file.read_text()), json.loads(other_file.read_text())
    assert one_seen["digest"] == other_seen["digest"] and one_seen["device"] == "GPU 0"
    assert one_file.name.startswith(f"{todo[0].run.group}.{one_seen['fingerprint']}.")
    rows = store.table(["fingerprint", "provenance"]).to_pylist()
    assert {row["fingerprint"] for row in rows} == {one_seen["fingerprint"]}
    assert {json.loads(row["provenance"])["slot"]["device"] for row in rows} == {"GPU 0", "GPU 1"}
    assert store.finished() == {job.run.id for job in todo[:2]} and len(store.live()) == 0
    assert not list(Path(store.url, "checkpoints").glob("*"))

    before = one.supervisor._child.pid
    assert kinds(one.train(todo[2:4])) == ["done", "done"] and one.supervisor._child.pid == before


def test_slots_without_a_gpu_have_no_canary(store: Store, supervise: Supervise) -> None:
    assert kinds(list(supervise().train(runs(store)[:1]))) == ["done"]
    assert left(store) == []


def test_of_two_that_differ_the_later_is_parked(store: Store, slot: Slots, mischief: Path) -> None:
    todo = runs(store)
    (mischief / "wrong.1").touch()
    assert kinds(slot("0").train(todo[:1])) == ["done"]
    bad = slot("1")
    message = parked(bad.train(todo[1:3]))
    assert message.startswith(f"GPU 1 of {HOST} computes it differently from GPU 0 of {HOST}, the only other device so")
    assert "nobody knows yet which is right" in message and "\n" not in message
    assert store.finished() == {todo[0].run.id} and len(store.failures()) == 0
    assert parked(bad.train(todo[3:5])) == message, "it stays parked"
    assert bad.supervisor._child is None


def test_a_device_that_many_contradict_is_parked(store: Store, slot: Slots, mischief: Path) -> None:
    todo = runs(store)
    (mischief / "wrong.2").touch()
    for name in "01":
        slot(name).train(todo[int(name) : int(name) + 1])
    message = parked(slot("2").train(todo[2:]))
    assert f"GPU 2 of {HOST} computes it differently from GPU 0 of {HOST}, GPU 1 of {HOST} (" in message
    assert message.endswith(f"delete canaries/*.{HOST}-GPU-2.json") and "record" not in message


def test_a_first_device_that_was_wrong_is_found_out(store: Store, slot: Slots, mischief: Path) -> None:
    """What it has left is not believed any more, and nothing but that."""
    todo = runs(store)
    (mischief / "wrong.0").touch()
    bad = slot("0")
    assert kinds(bad.train(todo[:2])) == ["done", "done"]
    parked(slot("1").train(todo[2:3]))
    assert kinds(slot("2").train(todo[2:3])) == ["done"], "two agree against one"
    events = bad.train(todo[3:4])
    message = parked(events)
    assert f"GPU 0 of {HOST} computes it differently from GPU 1 of {HOST}, GPU 2 of {HOST}" in message
    assert "2 records in which it had a part are moved to corrupt/, and the same command trains their" in message
    assert set(events[-1].withdrawn) == {job.run.id for job in todo[:2]}
    assert bad.train(todo[4:5])[-1].withdrawn == (), "they are told of once"
    assert store.finished() == {todo[2].run.id}
    moved = {path.stem for path in Path(store.url, "corrupt").glob("*")}
    assert moved == {job.run.id for job in todo[:2]}
    assert kinds(slot("2").train(todo[:2])) == ["done", "done"]


def test_a_device_that_contradicts_itself_is_parked(store: Store, slot: Slots, mischief: Path) -> None:
    todo = runs(store)
    slot("0").train(todo[:1])
    (mischief / "flaky.1").touch()
    message = parked(slot("1").train(todo[1:2]))
    assert f"GPU 1 of {HOST} does not compute it twice to the same bits" in message


def test_a_device_that_has_changed_is_parked(store: Store, slot: Slots, mischief: Path) -> None:
    todo = runs(store)
    assert kinds(slot("0").train(todo[:1])) == ["done"]
    (mischief / "wrong.0").touch()
    message = parked(slot("0").train(todo[1:2]))
    assert "computes it differently from what it computed before" in message
    assert "1 record in which it had a part is to be doubted" in message and store.finished() == {todo[0].run.id}


def test_after_an_error_of_the_hardware_the_canary_comes_first(store: Store, slot: Slots, mischief: Path) -> None:
    todo = runs(store)
    device = slot("0")
    (mischief / "illegal-0").touch()
    events = device.train(todo[:1])
    assert kinds(events) == ["failed"] and events[-1].outcome == "hardware"
    (mischief / "wrong.0").touch()
    assert "computes it differently from what it computed before" in parked(device.train(todo[1:2]))


def test_a_canary_that_fails_fails_the_run(store: Store, slot: Slots, mischief: Path) -> None:
    """For nothing counts before it is through."""
    todo = runs(store)
    (mischief / "broken.0").touch()
    device = slot("0")
    events = device.train(todo[:1])
    assert kinds(events) == ["failed"] and events[-1].outcome == "hardware"
    (row,) = store.failures().to_pylist()
    assert (row["id"], row["attempt"], row["device"]) == (todo[0].run.id, 1, "GPU 0")
    assert row["message"].startswith(
        "the canary, the first epoch of its group's control, ended with: RuntimeError: CUDA"
    )
    assert left(store) == [] and "uncorrectable ECC" in row["traceback"]
    assert kinds(device.train(todo[1:])) == ["failed", "failed", "parked"]
    (mischief / "broken.0").unlink()
    assert kinds(slot("0").train(todo[:1])) == ["done"]


def test_all_slots_can_be_given_one_canary(store: Store, supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that begin with other groups have nothing to compare."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    control = jobs(planned(store, "init", epochs=1), "none")[0].run
    todo = runs(store)
    assert control.group != todo[0].run.group
    supervisor = supervise(gpus=1.0, canary=control.specification)
    assert kinds(list(supervisor.train(todo[:1]))) == ["done"]
    (kept,) = Path(store.url, "canaries").glob("*")
    assert kept.name.startswith(f"{control.group}.")


# What a wrong device left


def bits(store: Store, job: Job) -> tuple[str, int | None]:
    """What a run came to, and what its comparison found."""
    (row,) = store.table(["final_digest", "weights_changed"], {job.run.id}).to_pylist()
    return row["final_digest"], row["weights_changed"]


def trained_right(store: Store, device: Device, job: Job) -> bool:
    """Whether a run came to what it comes to when nothing is left of anyone else."""
    found = bits(store, job)
    for folder in ("references", "checkpoints", "records"):
        for path in Path(store.url, folder).glob("*"):
            path.unlink()
    assert kinds(device.train([job])) == ["done"]
    return found == bits(store, job)


@pytest.mark.parametrize(("what", "left"), [("illegal", False), ("die", True)])
def test_nobody_goes_on_from_the_checkpoint_of_a_wrong_device(
    store: Store, slot: Slots, mischief: Path, what: str, left: bool
) -> None:
    todo = runs(store)
    (mischief / "wrong.0").touch()
    (mischief / f"{what}-1").touch()
    assert kinds(slot("0").train(todo[1:2])) == ["failed"]
    assert (store.load_checkpoint(todo[1].run.id) is not None) == left
    parked(slot("1").train(todo[2:3]))
    good = slot("2")
    assert kinds(good.train(todo[1:2])) == ["done"]
    assert trained_right(store, good, todo[1])


def test_an_error_of_the_hardware_leaves_the_checkpoints_of_others(store: Store, slot: Slots, mischief: Path) -> None:
    todo = runs(store)
    (mischief / "die-1").touch()
    assert kinds(slot("0").train(todo[1:2])) == ["failed"]
    (mischief / "broken.1").touch()
    assert slot("1").train(todo[1:2])[-1].outcome == "hardware"
    assert store.checkpoint_devices(todo[1].run.id) == (f"{HOST}-GPU-0",)
    assert kinds(slot("2").train(todo[1:2])) == ["done"]
    assert store.table(["resumed_epochs"])["resumed_epochs"].to_pylist() == [1]


@pytest.mark.parametrize("sentenced", [False, True])
def test_nothing_is_held_against_the_reference_of_a_wrong_device(
    store: Store, slot: Slots, mischief: Path, sentenced: bool
) -> None:
    """Neither before it has learnt what is thought of it nor afterwards."""
    plan = planned(store, "init+onebit", "init", replicates=3)
    todo, others = jobs(plan, "init+onebit"), jobs(plan, "init")
    (mischief / "wrong.0").touch()
    bad = slot("0")
    assert kinds(bad.train(todo[:1])) == ["done"]
    (reference,) = Path(store.url, "references").iterdir()
    parked(slot("1").train(others[:1]))
    good = slot("2")
    assert kinds(good.train(others[:1])) == ["done"]
    if sentenced:
        parked(bad.train(others[1:2]))
        assert not reference.exists() and not store.has(todo[0].run.id)
    else:
        Path(store.url, "records", f"{todo[0].run.id}.parquet").unlink()
    assert kinds(good.train(todo[:1])) == ["done"]
    assert store.load_reference(reference.stem).devices == (f"{HOST}-GPU-2",)
    assert trained_right(store, good, todo[0])


def test_records_of_other_fingerprints_are_withdrawn_too(store: Store, slot: Slots, mischief: Path) -> None:
    plan = planned(store, "init", "library", library="kernel", replicates=3)
    held, varied = jobs(plan, "init"), jobs(plan, "library")
    (mischief / "wrong.0").touch()
    bad = slot("0")
    assert kinds(bad.train(held[:1])) == ["done"]
    bad._patch.setenv("FAKE_VERSION", "2.0")  # Another fingerprint, as another library has.
    Path(store.url, "hardware", f"{held[0].run.group}.json").unlink()
    assert kinds(bad.train(varied[:1])) == ["done"]
    bad._patch.delenv("FAKE_VERSION")
    Path(store.url, "hardware", f"{held[0].run.group}.json").unlink()
    assert len(set(store.table(["fingerprint"])["fingerprint"].to_pylist())) == 2
    parked(slot("1").train(held[1:2]))
    assert kinds(slot("2").train(held[1:2])) == ["done"]
    assert set(bad.train(held[2:])[-1].withdrawn) == {held[0].run.id, varied[0].run.id}


def test_a_wrong_device_that_never_looks_again_is_found_out_at_the_end(
    store: Store, slot: Slots, mischief: Path
) -> None:
    todo = runs(store)
    (mischief / "wrong.0").touch()
    assert kinds(slot("0").train(todo[:2])) == ["done", "done"]
    parked(slot("1").train(todo[2:3]))
    assert settle(store) == [], "it is one against one"
    assert kinds(slot("2").train(todo[2:])) == 6 * ["done"]
    ((device, text, withdrawn),) = settle(store)
    assert device == f"{HOST} GPU 0" and set(withdrawn) == {job.run.id for job in todo[:2]}
    assert text.startswith(f"GPU 0 of {HOST} computes it differently from GPU 1 of {HOST}, GPU 2 of {HOST} (")
    assert store.finished() == {job.run.id for job in todo[2:]}
    assert settle(store) == [], "it has left nothing more"


def test_what_others_made_of_a_wrong_devices_checkpoint_is_withdrawn(store: Store, slot: Slots, mischief: Path) -> None:
    """Even under a fingerprint in which nobody contradicted it."""
    todo = runs(store)
    (mischief / "die-0").touch()
    assert kinds(slot("0").train(todo[:1])) == ["failed"]
    assert kinds(slot("1").train(todo[:2])) == ["done", "done"]
    seen = Sightings(store)
    for device, digest in (("GPU 0", "b"), ("GPU 1", "a"), ("GPU 2", "a")):
        seen.leave(Sighting(group="g", fingerprint="f", host=HOST, device=device, digest=digest))
    ((device, _, withdrawn),) = settle(store)
    assert device == f"{HOST} GPU 0" and withdrawn == [todo[0].run.id]


def test_a_record_that_came_meanwhile_is_not_withdrawn(store: Store, slot: Slots) -> None:
    todo = runs(store)
    assert kinds(slot("0").train(todo[:2])) == ["done", "done"]
    one, other = store.listed()
    path = Path(store.url, "records", one.name)
    path.unlink()
    assert kinds(slot("1").train(todo[:2])) == ["done", "done"]
    assert store.withdraw(one) is None and path.exists()
    assert store.withdraw(other) == f"{store.url}/corrupt/{other.name}"


def test_a_device_is_parked_even_if_the_store_refuses(
    store: Store, slot: Slots, mischief: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.slot.retrying.WAITS", (0.0,))
    todo = runs(store)
    (mischief / "wrong.0").touch()
    bad = slot("0")
    assert kinds(bad.train(todo[:2])) == ["done", "done"]
    parked(slot("1").train(todo[2:3]))
    assert kinds(slot("2").train(todo[2:3])) == ["done"]
    left = bad.supervisor._store
    withdraw, tries = left.withdraw, iter([True, False, False])
    monkeypatch.setattr(left, "withdraw", lambda entry: withdraw(entry) if next(tries) else refuse())
    events = bad.train(todo[3:4])
    assert "1 record in which it had a part is moved to corrupt/" in parked(events)
    assert "; what else it left is still there: no network; once" in events[-1].message
    assert len(events[-1].withdrawn) == 1
    ((_, _, withdrawn),) = settle(store)
    assert {*events[-1].withdrawn, *withdrawn} == {job.run.id for job in todo[:2]}


def test_a_device_in_doubt_trains_nothing_until_that_is_settled(
    store: Store, slot: Slots, mischief: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.slot.retrying.WAITS", ())
    todo = runs(store)
    (mischief / "wrong.1").touch()
    slot("0").train(todo[:1])
    bad = slot("1")
    canaries, answers = bad.supervisor._store.canaries, iter([True, False, True, True])
    monkeypatch.setattr(
        bad.supervisor._store, "canaries", lambda prefix: canaries(prefix) if next(answers) else refuse()
    )
    events = bad.train(todo[1:4])
    assert kinds(events) == ["unstored", "parked"] and "the only other device so far" in parked(events)
    assert store.finished() == {todo[0].run.id}


def refuse() -> None:
    raise StoreError("no network")


# What a slot reports


def test_a_slot_reports_what_was_withdrawn_and_what_could_not_be_kept() -> None:
    slot = Slot.__new__(Slot)
    vars(slot).update(_report_every=0.01, _device="node GPU 0", _parked="", _returned=[], _left={"a": None, "b": None})
    told = [
        Event(kind="unstored", id="a", message="no network"),
        Event(kind="parked", id="b", message="it is wrong", withdrawn=("x", "y")),
    ]
    vars(slot).update(_events=iter(told), _supervisor=_Closed())
    one = slot.step()
    while not one["parked"]:
        one, before = slot.step(), one
        assert before["unstored"] in ({"a": "no network"}, {})
    assert (one["withdrawn"], one["returned"], one["done"]) == (["x", "y"], ["b"], False)
    assert slot.step()["withdrawn"] == []


class _Closed:
    def close(self) -> None:
        """Nothing to end."""


def test_a_slot_that_could_not_be_set_up_can_be_cleaned_up() -> None:
    Slot.__new__(Slot).cleanup()


# Three errors of the hardware


def test_a_device_that_fails_three_times_in_a_row_is_parked(store: Store, supervise: Supervise, mischief: Path) -> None:
    """Whatever the runs; one that is done in between breaks the row."""
    todo = jobs(planned(store, "init", replicates=6), "init")
    for replicate in (0, 1, 3, 4, 5):
        (mischief / f"illegal-{replicate}-always").touch()
    events = list(supervise().train(todo))
    assert kinds(events) == ["failed", "failed", "done", "failed", "failed", "failed", "parked"]
    assert f"cpu of {HOST} failed 3 times in a row, the last time with: RuntimeError: CUDA error" in parked(events)
    assert store.failures()["outcome"].to_pylist() == 5 * ["hardware"]


# The vote


def sighting(device: int, digest: str) -> Sighting:
    return Sighting(group="g", fingerprint="f", host=f"node-{device}", device=f"GPU-{device}", digest=digest)


@pytest.mark.parametrize(
    ("digests", "doubted", "proven"),
    [
        ("a", "", ""),
        ("aa", "", ""),
        ("ab", "1", ""),
        ("aba", "1", "1"),
        ("abb", "0", "0"),
        ("abc", "12", ""),
        ("abcc", "01", "01"),
        ("abab", "13", ""),
        ("baaab", "04", "04"),
    ],
)
def test_who_is_doubted(digests: str, doubted: str, proven: str) -> None:
    """Devices in the order of their first canary, each with what it came to."""
    seen = [sighting(device, digest) for device, digest in enumerate(digests)]
    found = {str(device): doubt(own, seen) for device, own in enumerate(seen)}
    assert "".join(device for device, each in found.items() if each is not None) == doubted
    assert "".join(device for device, each in found.items() if each is not None and each.proven) == proven


def test_few_of_many_are_named() -> None:
    seen = [sighting(device, "a") for device in range(6)] + [sighting(6, "b")]
    found = doubt(seen[-1], seen)
    assert found is not None
    assert found.text == ("computes it differently from GPU-0 of node-0, GPU-1 of node-1, GPU-2 of node-2 and 3 more")


def test_a_place_names_a_device_among_all() -> None:
    assert sighting(3, "a").place == "GPU-3"
    assert Sighting(group="g", fingerprint="f", host="a/b", device="GPU 3", digest="a").place == "a-b-GPU-3"


# A sweep


SWEEP = """
import sys
from rich.console import Console
from orchestrator.launch import sweep
from orchestrator.store import open_store
from tests.fakes import planned

store = open_store(sys.argv[1])
console = Console(file=sys.stdout, width=1000)
result = sweep(planned(store, "init", replicates=6), store, gpus_per_run=1, address=sys.argv[2], console=console)
assert result.complete and result.failed == {}, result
"""
"""A program of its own: Ray takes a driver for dead that connects to one cluster after another."""


def test_a_sweep_does_without_a_gpu_that_computes_something_else(
    store: Store, cache: Path, mischief: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that differ the later one, whichever that is."""
    (mischief / "wrong.1").touch()
    monkeypatch.setenv("FAKE_SECONDS", "0.2")
    with clusters.environment(cache):
        nodes = clusters.Nodes(1)
        try:
            done = subprocess.run(
                [sys.executable, "-c", SWEEP, store.url, nodes.address],
                cwd=clusters.ROOT,
                capture_output=True,
                text=True,
            )
        finally:
            nodes.shutdown()
    assert done.returncode == 0, done.stderr
    texts = store.table(["provenance"])["provenance"].to_pylist()
    used = {json.loads(text)["slot"]["device"] for text in texts}
    assert len(used) == 1, "a run of the other device counted"
    said = done.stdout
    assert f"of {HOST} computes it differently from GPU" in said and "nothing more is trained on it" in said
