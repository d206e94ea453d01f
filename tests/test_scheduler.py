"""What becomes of every run, and what the driver makes of what Tune tells it."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.tune.experiment import Trial

from orchestrator.launch import scheduler as schedulers
from orchestrator.launch import watcher as watchers
from orchestrator.launch.blocks import Blocks, Durations
from orchestrator.launch.budgets import HARDWARE_RETRIES, Budgets
from orchestrator.launch.scheduler import ALIKE, IN_A_ROW, LOSSES, Scheduler
from orchestrator.launch.searcher import BlockSearcher, Over
from orchestrator.launch.tally import Tally
from orchestrator.launch.watcher import Watcher, cause
from orchestrator.plan import Plan, Planned
from orchestrator.store import Store, StoreError, open_store
from tests.fakes import planned

ONE, OTHER = "host one", "host other"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


class Sweep:
    """A scheduler of runs of 100 s each, a clock, and everything it said and barred."""

    def __init__(self, plan: Plan, *, retries: int = 1, slots: int = 2, grown: Any = lambda ids: ()) -> None:
        self.clock = 0.0
        self.said: list[str] = []
        self.barred: dict[str, str] = {}
        self.tally = Tally(plan)
        self.durations = Durations(lambda run: 100.0)
        self.blocks = Blocks(plan.missing, slots, self.durations, clock=lambda: self.clock)
        self.scheduler = Scheduler(
            plan.missing,
            self.blocks,
            self.durations,
            Budgets(retries),
            self.tally,
            say=self.said.append,
            bar=self.barred.__setitem__,
            grown=grown,
            planned=plan.planned,
        )
        self._trials = 0

    def take(self, **options: Any) -> tuple[str, dict[str, Any]]:
        """The next block, which a slot takes on."""
        self._trials += 1
        trial = f"trial {self._trials}"
        config = self.scheduler.block(trial, **options)
        assert config is not None
        self.scheduler.started(trial)
        return trial, config

    def report(self, trial: str, device: str = ONE, **happened: Any) -> None:
        nothing = {
            "finished": {},
            "failed": {},
            "busy": [],
            "unstored": {},
            "withdrawn": [],
            "returned": [],
            "images": 0,
            "parked": "",
        }
        self.scheduler.report(trial, nothing | {"device": device} | happened)

    def fail(self, device: str = ONE, outcome: str = "error", message: str = "a mistake", refused: bool = False) -> str:
        """The next run is taken and fails."""
        trial, config = self.take()
        (id,) = config["runs"]
        self.report(trial, device, failed={id: [outcome, message, refused]})
        self.scheduler.ended(trial)
        return str(id)

    def succeed(self, device: str = ONE, seconds: float | None = 100.0) -> str:
        trial, config = self.take()
        (id,) = config["runs"]
        self.report(trial, device, finished={id: seconds})
        self.scheduler.ended(trial)
        return str(id)


@pytest.fixture
def plan(store: Store) -> Plan:
    return planned(store, "init", "shuffle", replicates=4)


def test_every_run_is_trained_once(plan: Plan) -> None:
    sweep = Sweep(plan)
    done = [sweep.succeed() for _ in plan.missing]
    assert sorted(done) == sorted(entry.id for entry in plan.missing)
    assert sweep.scheduler.over and sweep.scheduler.block("none") is None
    assert sweep.tally.done_count == len(plan.planned) and sweep.scheduler.remaining() == 0


def test_a_failed_run_rests_and_is_tried_again_in_a_fresh_process(plan: Plan) -> None:
    sweep = Sweep(plan)
    sweep.succeed()
    failed = sweep.fail()
    assert sweep.tally.retried == 1 and sweep.tally.failures == {}
    assert sweep.succeed() != failed
    sweep.clock = 100.0
    trial, config = sweep.take()
    assert config["runs"] == [failed] and config["failed"] == {failed: 1}
    sweep.report(trial, failed={failed: ["error", "again", False]})
    assert sweep.tally.failures == {failed: "again"} and sweep.said == [f"failed: {failed[:12]}: again"]
    sweep.clock = 1e6
    left = [sweep.succeed() for _ in range(len(plan.missing) - 3)]
    assert failed not in left and sweep.scheduler.over


def test_a_run_that_its_hardware_failed_goes_elsewhere(plan: Plan) -> None:
    sweep = Sweep(plan, retries=0)
    sweep.succeed(ONE), sweep.succeed(OTHER)
    moved = sweep.fail(ONE, "hardware")
    sweep.clock = 100.0
    trial, config = sweep.take()
    assert config["avoid"] == {moved: [ONE]}
    sweep.report(trial, ONE, returned=[moved])
    sweep.scheduler.ended(trial)
    assert sweep.tally.failures == {}
    sweep.clock = 200.0
    assert sweep.take()[1]["avoid"] == {moved: [ONE]}, "it is never given back to the device that failed it"


def test_a_run_that_raised_may_in_the_end_go_back_to_its_device(plan: Plan) -> None:
    sweep = Sweep(plan)
    sweep.succeed(ONE), sweep.succeed(OTHER)
    failed = sweep.fail(ONE)
    sweep.succeed(ONE)
    for number in range(schedulers.SHUNNED):
        sweep.clock += 100.0
        trial, config = sweep.take()
        assert config["avoid"] == {failed: [ONE]}, number
        sweep.report(trial, ONE, returned=[failed])
        sweep.scheduler.ended(trial)
    sweep.clock += 100.0
    _, config = sweep.take()
    assert config["runs"] == [failed] and config["avoid"] == {}


def test_a_run_that_every_device_refuses_is_given_up(plan: Plan) -> None:
    sweep = Sweep(plan)
    sweep.succeed(ONE), sweep.succeed(OTHER)
    refused = sweep.fail(ONE, "hardware", "other hardware", refused=True)
    sweep.clock = 100.0
    assert sweep.tally.failures == {}
    assert sweep.fail(OTHER, "hardware", "other hardware", refused=True) == refused
    assert sweep.tally.failures == {refused: "other hardware"}


def test_a_refused_run_waits_for_the_right_device_however_long_that_is_busy(plan: Plan) -> None:
    sweep = Sweep(plan, retries=0)
    sweep.succeed(ONE), sweep.succeed(OTHER)
    refused = sweep.fail(ONE, "hardware", "other hardware", refused=True)
    for number in range(4 * HARDWARE_RETRIES):
        sweep.clock += 100.0
        trial, config = sweep.take()
        assert config["runs"] == [refused] and config["avoid"] == {refused: [ONE]}, number
        sweep.report(trial, ONE, returned=[refused])
        sweep.scheduler.ended(trial)
    sweep.clock += 100.0
    assert sweep.succeed(OTHER) == refused and sweep.tally.failures == {}


def test_what_a_device_refused_it_is_not_given_another_run_of(plan: Plan) -> None:
    sweep = Sweep(plan)
    sweep.succeed(OTHER)
    sweep.fail(ONE, "hardware", "other hardware", refused=True)
    cells: dict[tuple[str, str], list[bool]] = {}
    of = {entry.id: entry for entry in plan.missing}
    for _ in range(5):
        _, config = sweep.take()
        entry = of[config["runs"][0]]
        cells.setdefault((entry.group, entry.source), []).append(bool(config["avoid"]))
    refusals = [any(avoided) for avoided in cells.values()]
    assert refusals.count(True) == 1 and all(all(avoided) or not any(avoided) for avoided in cells.values())


def test_with_one_device_a_refused_run_is_given_up_at_once(plan: Plan) -> None:
    sweep = Sweep(plan, slots=1)
    refused = [sweep.fail(ONE, "hardware", "other hardware", refused=True) for _ in range(4)]
    assert set(sweep.tally.failures) == set(refused)
    assert not sweep.scheduler.stopped, "other machines may train the rest"


def test_a_device_that_has_not_been_heard_of_may_yet_train_a_refused_run(plan: Plan) -> None:
    sweep = Sweep(plan, slots=2)
    refused = sweep.fail(ONE, "hardware", "other hardware", refused=True)
    for _ in range(schedulers.SHUNNED):
        assert sweep.tally.failures == {}
        sweep.clock += 100.0
        trial, config = sweep.take()
        assert config["avoid"] == {refused: [ONE]}
        sweep.report(trial, ONE, returned=[refused])
        sweep.scheduler.ended(trial)
    sweep.clock += 100.0
    assert sweep.fail(ONE, "hardware", "other hardware", refused=True) == refused
    assert sweep.tally.failures == {refused: "other hardware"}, "but not for ever"


def test_hardware_is_blamed_so_often_only(plan: Plan) -> None:
    sweep = Sweep(plan, retries=0)
    for _ in plan.missing[1:]:
        sweep.succeed(ONE)
    for number in range(HARDWARE_RETRIES + 1):
        assert sweep.tally.failures == {}, number
        failed = sweep.fail(f"host {number}", "hardware", "it overheats")
        sweep.clock += 100.0
    assert sweep.tally.failures == {failed: "it overheats"} and sweep.scheduler.over


def test_the_first_runs_that_fail_alike_end_a_sweep(plan: Plan) -> None:
    sweep = Sweep(plan)
    for number in range(ALIKE):
        assert not sweep.scheduler.stopped
        sweep.fail(message=f"cannot write {'0123456789abcdef' * 4}: {number} bytes")
    assert sweep.scheduler.stopped.startswith("every run failed alike: cannot write")


def test_runs_that_had_advanced_do_not_end_a_sweep_when_they_are_killed(plan: Plan) -> None:
    sweep = Sweep(plan, slots=2 * ALIKE)
    blocks = [sweep.take() for _ in range(2 * ALIKE)]
    for number, (trial, config) in enumerate(blocks):
        (id,) = config["runs"]
        if number < ALIKE:
            sweep.report(trial, images=100)
        else:
            assert not sweep.scheduler.stopped, "what trained an epoch was killed from outside"
        sweep.report(trial, failed={id: ["error", "killed by SIGKILL", False]})
        sweep.scheduler.ended(trial)
    assert sweep.scheduler.stopped, "what never trained an epoch tells"


def test_one_run_that_fails_again_and_again_does_not_end_a_sweep(plan: Plan) -> None:
    sweep = Sweep(plan, retries=5)
    for _ in range(5):
        sweep.fail()
        sweep.clock += 100.0
    assert not sweep.scheduler.stopped and sweep.tally.retried == 5


@pytest.mark.parametrize("first", ["another mistake", ""])
def test_failures_of_two_kinds_or_after_a_success_do_not_end_a_sweep(plan: Plan, first: str) -> None:
    sweep = Sweep(plan)
    sweep.fail(message=first) if first else sweep.succeed()
    for _ in range(5):
        sweep.fail()
    assert not sweep.scheduler.stopped


def test_a_record_that_was_there_is_no_success(plan: Plan) -> None:
    """It says nothing of whether runs can be trained now."""
    sweep = Sweep(plan)
    sweep.succeed(seconds=None)
    for _ in range(ALIKE):
        sweep.fail()
    assert sweep.scheduler.stopped


def work(sweep: Sweep, attempt: Any, *devices: str, rounds: int = 200) -> None:
    """Devices take turns at blocks; those that are barred give them back. ``attempt`` says whether it succeeds."""
    for number in range(rounds):
        sweep.clock += 20.0
        device = devices[number % len(devices)]
        if sweep.scheduler.over or sweep.scheduler.stopped:
            return
        config = sweep.scheduler.block(trial := f"{device} {number}")
        if config is None or device in sweep.barred:
            sweep.scheduler.ended(trial)
            continue
        sweep.scheduler.started(trial)
        for id in config["runs"]:
            if device in config["avoid"].get(id, ()):
                sweep.report(trial, device, returned=[id])
            elif attempt(device, id):
                sweep.report(trial, device, finished={id: 100.0})
            else:
                sweep.report(trial, device, failed={id: ["error", "a mistake", False]})
        sweep.scheduler.ended(trial)


def test_one_device_that_fails_everything_is_barred_and_the_sweep_goes_on(store: Store) -> None:
    sweep = Sweep(planned(store, "init", "shuffle", replicates=10))
    work(sweep, lambda device, id: device == OTHER, ONE, OTHER)
    assert sweep.barred == {ONE: f"{IN_A_ROW} runs in a row failed on it that other devices then trained"}
    assert sweep.scheduler.over and not sweep.scheduler.stopped
    assert sweep.tally.failures == {}


@pytest.mark.parametrize("broken", [{"init"}, {"init", "shuffle", "augment", "none"}])
def test_cells_that_nobody_can_train_bar_no_device(store: Store, broken: set[str]) -> None:
    """Not even if one device fails a whole block of them, or cell after cell, while others train for hours."""
    plan = planned(store, "init", "shuffle", "augment", "dropout", replicates=10)
    of = {entry.id: entry.source for entry in plan.missing}
    sweep = Sweep(plan, slots=3)
    sweep.durations._guess = lambda run: 1.0  # so that blocks have several runs
    hours, config = sweep.take()
    sweep.report(hours, "host busy", finished=dict.fromkeys(config["runs"][:1], 1.0))
    work(sweep, lambda device, id: of[id] not in broken, ONE, OTHER, "host third", rounds=2000)
    sweep.scheduler.ended(hours)
    work(sweep, lambda device, id: of[id] not in broken, ONE, OTHER, "host third", rounds=2000)
    assert sweep.barred == {} and sweep.scheduler.over and not sweep.scheduler.stopped
    assert {of[id] for id in sweep.tally.failures} == broken


def test_a_device_on_which_nothing_has_succeeded_since_gets_no_failed_run_back(plan: Plan) -> None:
    """However often the run comes back, as long as another device may train it."""
    sweep = Sweep(plan)
    sweep.succeed(OTHER)
    failed = sweep.fail(ONE)
    for number in range(2 * schedulers.SHUNNED):
        sweep.clock += 100.0
        trial, config = sweep.take()
        assert config["avoid"] == {failed: [ONE]}, number
        sweep.report(trial, ONE, returned=[failed])
        sweep.scheduler.ended(trial)


def test_devices_that_all_fail_are_not_to_blame(store: Store) -> None:
    sweep = Sweep(planned(store, "init", "shuffle", replicates=10))
    sweep.succeed(ONE), sweep.succeed(OTHER)
    for _ in range(IN_A_ROW):
        sweep.fail(ONE), sweep.fail(OTHER)
    assert sweep.barred == {}


def test_a_success_ends_a_row_of_failures(store: Store) -> None:
    sweep = Sweep(planned(store, "init", "shuffle", replicates=10))
    sweep.succeed(OTHER)
    for _ in range(3):
        for _ in range(IN_A_ROW - 1):
            sweep.fail(ONE)
        sweep.succeed(ONE)
    assert sweep.barred == {}


def test_a_parked_slot_gives_its_runs_back_and_is_said_once(plan: Plan) -> None:
    sweep = Sweep(plan)
    trial, config = sweep.take()
    for returned in (config["runs"], [], []):
        sweep.report(trial, ONE, returned=returned, parked="the canary sings another tune")
    assert sweep.said == [f"{ONE} trains no more: the canary sings another tune"]
    assert list(sweep.barred) == [ONE]
    assert sweep.scheduler.parked == {trial: "the canary sings another tune"} and not sweep.scheduler.training
    sweep.clock = 100.0
    assert [sweep.succeed(OTHER) for _ in plan.missing][0] == config["runs"][0]


def test_a_slot_that_dies_costs_its_runs_nothing(plan: Plan) -> None:
    sweep = Sweep(plan, retries=0)
    trial, config = sweep.take()
    sweep.scheduler.lost(trial, blame=True, message="it died")
    assert sweep.tally.running == 0 and sweep.tally.failures == {}
    assert sweep.take()[1] == config, "it is handed out again at once, as if nothing had happened"


def test_a_run_that_takes_its_slot_down_again_and_again_is_given_up(plan: Plan) -> None:
    sweep = Sweep(plan, retries=0)
    for number in range(LOSSES + 1):
        assert sweep.tally.failures == {}, number
        trial, config = sweep.take()
        sweep.scheduler.lost(trial, blame=True, message="its slot died while it was trained")
    assert sweep.tally.failures == {config["runs"][0]: "its slot died while it was trained"}


@pytest.mark.parametrize("excuse", ["node", "progress"])
def test_nodes_may_go_as_often_as_they_like_and_so_may_slots_of_runs_that_advance(plan: Plan, excuse: str) -> None:
    sweep = Sweep(plan, retries=0)
    for _ in range(3 * LOSSES):
        trial, _ = sweep.take()
        if excuse == "progress":
            sweep.report(trial, images=60)
        sweep.scheduler.lost(trial, blame=excuse != "node", message="gone")
    assert sweep.tally.failures == {}


def test_slots_that_cannot_be_set_up_end_a_sweep(plan: Plan) -> None:
    sweep = Sweep(plan, slots=2)
    for number in range(4):
        assert not sweep.scheduler.stopped, number
        sweep.clock += 100.0
        sweep.scheduler.broken(sweep.take()[0], "ValueError: no such thing")
    assert sweep.scheduler.stopped == "no slot can be set up: ValueError: no such thing"
    assert sweep.tally.failures == {}


def test_one_machine_without_working_slots_does_not_end_a_sweep(store: Store) -> None:
    sweep = Sweep(planned(store, "init", "shuffle", replicates=10))
    for _ in range(10):
        sweep.clock += 100.0
        sweep.scheduler.broken(sweep.take()[0], "ValueError: no such thing")
        sweep.succeed()
    assert not sweep.scheduler.stopped


def test_a_run_that_another_sweep_trains_is_done_when_its_record_is_there(plan: Plan) -> None:
    sweep = Sweep(plan)
    trial, config = sweep.take()
    (id,) = config["runs"]
    sweep.report(trial, busy=[id])
    sweep.scheduler.ended(trial)
    sweep.scheduler.elsewhere(lambda id: False)
    assert sweep.tally.done_count == 0 and sweep.tally.failures == {}
    sweep.scheduler.elsewhere(lambda asked: asked == id)
    assert sweep.tally.done_count == 1
    sweep.clock = 100.0
    assert id not in [sweep.succeed() for _ in range(len(plan.missing) - 1)] and sweep.scheduler.over


def test_a_run_that_another_sweep_gave_up_is_trained_here(plan: Plan) -> None:
    sweep = Sweep(plan)
    trial, config = sweep.take()
    sweep.report(trial, busy=config["runs"])
    sweep.scheduler.ended(trial)
    sweep.clock = 100.0
    assert sweep.succeed() == config["runs"][0]


def test_a_store_that_does_not_answer_costs_a_run_nothing(plan: Plan) -> None:
    sweep = Sweep(plan, retries=0)
    for _ in range(3):
        trial, config = sweep.take()
        sweep.report(trial, unstored=dict.fromkeys(config["runs"], "cannot write leases/x"))
        sweep.scheduler.ended(trial)
    assert sweep.tally.failures == {} and sweep.tally.retried == 0 and sweep.tally.running == 0
    sweep.clock = 100.0
    assert [sweep.succeed() for _ in plan.missing] and sweep.scheduler.over


@pytest.mark.parametrize("proof", ["", "another run is stored", "the run is trained"])
def test_a_store_that_stays_away_ends_a_sweep(plan: Plan, proof: str) -> None:
    sweep = Sweep(plan)
    rests = []
    for number in range(schedulers.UNANSWERED):
        assert not sweep.scheduler.stopped, number
        if number == 1:
            before = sweep.clock
        trial, config = sweep.take()
        (id,) = config["runs"]
        if number and proof == "the run is trained":
            sweep.report(trial, images=60)
        sweep.report(trial, unstored={id: "cannot write leases/x"})
        sweep.scheduler.ended(trial)
        if number and proof == "another run is stored":
            sweep.succeed(OTHER)
        for _ in range(100):
            if sweep.blocks._held and sweep.blocks._held[0][0] <= sweep.clock:
                break
            sweep.clock += 0.5
        rests.append(sweep.clock)
    sentence = "the store has not answered for about a minute: cannot write leases/x"
    assert sweep.scheduler.stopped == ("" if proof else sentence)
    assert [b - a for a, b in zip([0.0, *rests], rests, strict=False)] == [2.0, 4.0, 8.0, 15.0, 15.0]
    assert before == 2.0 and sweep.tally.failures == {}


def test_records_of_a_wrong_device_are_made_anew(plan: Plan) -> None:
    sweep = Sweep(plan)
    wrong = [sweep.succeed(ONE) for _ in range(3)]
    trial, config = sweep.take()
    sweep.report(trial, ONE, returned=config["runs"], withdrawn=[*wrong, "f" * 64], parked="it miscounts")
    assert sweep.tally.done_count == 0 and not sweep.scheduler.over
    sweep.clock = 100.0
    again = [sweep.succeed(OTHER) for _ in plan.missing]
    assert sorted(again) == sorted(entry.id for entry in plan.missing)
    assert sweep.scheduler.over and sweep.tally.done_count == len(plan.planned)


def test_records_of_an_earlier_launch_are_made_anew_and_a_sweep_that_was_over_goes_on(store: Store, plan: Plan) -> None:
    earlier = plan.missing[0].id
    later = dataclasses.replace(plan, missing=plan.missing[1:], done=frozenset({earlier}))
    sweep = Sweep(later)
    while not sweep.scheduler.over:
        sweep.succeed()
    sweep.scheduler.reopen([earlier])
    assert not sweep.scheduler.over and sweep.tally.done_count == len(plan.planned) - 1
    assert sweep.succeed() == earlier and sweep.scheduler.over


def test_what_follows_from_runs_is_asked_again_when_the_store_did_not_say(store: Store) -> None:
    few, many = planned(store, "init", replicates=2), planned(store, "init", replicates=4)
    more = [entry for entry in many.missing if entry.run.replicate >= 2]
    refuses, told = [True], []

    def grown(ids: Collection[str]) -> Sequence[Planned]:
        if refuses[0]:
            raise StoreError("cannot write looks/x")
        told.extend(ids)
        return more

    sweep = Sweep(few, grown=grown)
    done = [sweep.succeed() for _ in few.missing]
    assert not sweep.scheduler.over and sweep.scheduler.resting(1.0)
    sweep.scheduler.elsewhere(lambda id: False)
    refuses[0] = False
    sweep.scheduler.elsewhere(lambda id: False)
    assert told == done
    assert sorted(sweep.succeed() for _ in more) == sorted(entry.id for entry in more)
    assert sweep.scheduler.over and not sweep.scheduler.stopped


def test_a_store_that_does_not_answer_the_driver_ends_a_sweep(plan: Plan) -> None:
    def grown(ids: Collection[str]) -> Sequence[Planned]:
        raise StoreError("cannot write looks/x")

    sweep = Sweep(plan, grown=grown)
    for number in range(schedulers.UNANSWERED):
        assert not sweep.scheduler.stopped, number
        if number:
            sweep.scheduler.elsewhere(lambda id: False)
        else:
            sweep.succeed()
    assert sweep.scheduler.stopped == "the store has not answered for about a minute: cannot write looks/x"


def test_runs_that_follow_from_others_are_added(store: Store) -> None:
    few, many = planned(store, "init", replicates=2), planned(store, "init", replicates=4)
    more = [entry for entry in many.missing if entry.run.replicate >= 2]
    last = few.missing[-1].id
    told: list[str] = []

    def grown(ids: Collection[str]) -> Sequence[Planned]:
        told.extend(ids)
        return more if last in ids else ()

    sweep = Sweep(few, grown=grown)
    done = []
    while not sweep.scheduler.over:
        done.append(sweep.succeed())
    assert sorted(done) == sorted(entry.id for entry in many.missing) and told == done
    assert sweep.tally.planned == len(many.planned)


def test_what_is_left_counts_what_is_under_way(plan: Plan) -> None:
    sweep = Sweep(plan)
    total = 100.0 * len(plan.missing)
    assert sweep.scheduler.remaining() == total
    trial, config = sweep.take()
    assert sweep.scheduler.remaining() == total
    sweep.report(trial, finished={config["runs"][0]: 50.0})
    assert sweep.scheduler.remaining() == 50.0 * (len(plan.missing) - 1)


# The watcher


class Scene:
    """A watcher of a sweep, in a cluster that can be changed."""

    def __init__(self, plan: Plan, monkeypatch: pytest.MonkeyPatch, *, deadline: float = float("inf")) -> None:
        self.sweep = Sweep(plan)
        self.now = 0.0
        monkeypatch.setattr("orchestrator.launch.watcher.time.monotonic", lambda: self.now)
        self.room = (2, 2)
        self.gate: list[bool] = []
        self.interrupted = threading.Event()
        self.records: set[str] = set()
        self.said: list[str] = []
        display = SimpleNamespace(refresh=lambda: None, say=self.said.append)
        self.watcher = Watcher(
            self.sweep.scheduler,
            display,
            room=lambda: self.room,
            gate=self.gate.append,
            has=self.records.__contains__,
            interrupted=self.interrupted,
            deadline=deadline,
        )
        self.watcher.begin()
        self.searcher = BlockSearcher(self.watcher)
        self.trials: list[Any] = []

    def suggest(self) -> Any:
        """A trial that waits for an actor; or None, or FINISHED."""
        name = f"trial {len(self.trials)}"
        config = self.searcher.suggest(name)
        if not isinstance(config, dict):
            return config
        actor = SimpleNamespace(ray_actor=None)
        trial = SimpleNamespace(trial_id=name, config=config, status=Trial.PENDING, temporary_state=actor)
        self.trials.append(trial)
        return trial

    def start(self, trial: Any) -> None:
        trial.status, trial.temporary_state.ray_actor = Trial.RUNNING, object()
        self.watcher.on_trial_start(0, [], trial)

    def end(self, trial: Any, **happened: Any) -> None:
        finished = dict.fromkeys(trial.config["runs"], 100.0)
        nothing = {
            "finished": finished,
            "failed": {},
            "busy": [],
            "unstored": {},
            "withdrawn": [],
            "returned": [],
            "images": 0,
            "parked": "",
        }
        self.watcher.on_trial_result(0, [], trial, nothing | {"device": ONE} | happened)
        trial.status = Trial.TERMINATED
        self.watcher.on_trial_complete(0, [], trial)

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.watcher.on_step_end(0, self.trials)


@pytest.fixture
def scene(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(plan, monkeypatch)


def test_as_many_blocks_are_suggested_as_there_is_room_for(scene: Scene) -> None:
    first, second = scene.suggest(), scene.suggest()
    assert scene.suggest() is None
    scene.start(first), scene.start(second)
    scene.end(first)
    assert scene.suggest() is not None and scene.suggest() is None
    scene.room = (3, 5)
    scene.step()
    assert [scene.suggest() is not None for _ in range(4)] == [True, True, True, False]
    assert scene.said == ["3 side by side now"]


def test_nodes_that_leave_lower_the_number_of_blocks(scene: Scene) -> None:
    first, second = scene.suggest(), scene.suggest()
    scene.start(first), scene.start(second)
    scene.room = (1, 1)
    scene.step()
    scene.end(first)
    assert scene.suggest() is None
    scene.end(second)
    assert scene.suggest() is not None


def test_the_gate_is_closed_until_all_slots_have_started(scene: Scene) -> None:
    first, second = scene.suggest(), scene.suggest()
    scene.start(first)
    scene.step()
    assert scene.gate == []
    scene.start(second)
    scene.step()
    assert scene.gate == [True]


def test_the_gate_is_closed_before_the_blocks_of_a_new_node_are_suggested(scene: Scene) -> None:
    for trial in (scene.suggest(), scene.suggest()):
        scene.start(trial)
    scene.step()
    scene.room = (3, 3)
    scene.now += 1
    third = scene.suggest()
    assert scene.gate == [True, False] and third is not None
    scene.step(0.1)
    assert scene.gate[-1] is False
    scene.start(third)
    scene.step(0.1)
    assert scene.gate[-1] is True


def test_a_slot_that_does_not_start_is_not_waited_for_for_ever(scene: Scene) -> None:
    first, second = scene.suggest(), scene.suggest()
    scene.start(first)
    scene.step(watchers.GATE_SECONDS + 1)
    assert scene.gate == [True]
    scene.step()
    assert scene.gate == [True], "it is waited for no more"
    scene.start(second)
    scene.step()
    scene.end(first)
    scene.suggest()
    scene.step()
    assert scene.gate == [True, False], "the next one is waited for again"


def test_a_trial_that_is_handed_to_a_free_actor_is_not_waited_for(scene: Scene) -> None:
    first, second = scene.suggest(), scene.suggest()
    scene.start(first), scene.start(second)
    scene.step()
    scene.end(first)
    third = scene.suggest()
    third.temporary_state.ray_actor = object()  # Tune resets it, and the trial is still pending.
    scene.step()
    assert scene.gate == [True]


def test_blocks_that_wait_for_a_larger_cluster_keep_nobody_waiting(scene: Scene) -> None:
    scene.room = (2, 6)
    scene.step()
    trials = [scene.suggest() for _ in range(6)]
    scene.start(trials[0]), scene.start(trials[1])
    scene.step()
    assert scene.gate[-1] is True


def test_a_signal_ends_the_suggestions(scene: Scene) -> None:
    scene.interrupted.set()
    assert scene.watcher.ending
    with pytest.raises(Over):
        scene.watcher.suggest("trial")


def test_suggestions_end_when_every_run_has(scene: Scene) -> None:
    while isinstance(trial := scene.suggest(), SimpleNamespace):
        scene.start(trial)
        scene.end(trial)
    assert trial == "FINISHED" and scene.watcher.ending and not scene.watcher.stopping


def test_a_searcher_that_has_nothing_for_the_moment_notices_what_others_have_done(scene: Scene, plan: Plan) -> None:
    """Tune asks it, and calls nothing else, when nothing runs."""
    done = {entry.id for entry in plan.missing}
    while isinstance(trial := scene.suggest(), SimpleNamespace):
        scene.start(trial)
        scene.end(trial, finished={}, busy=list(trial.config["runs"]))
    assert trial is None
    scene.records |= done
    scene.now += watchers.ELSEWHERE_SECONDS
    assert scene.suggest() == "FINISHED"
    assert scene.sweep.tally.done_count == len(plan.planned)


def test_a_time_budget_begins_nothing_that_would_not_end(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(plan, monkeypatch, deadline=250.0)
    first, second = scene.suggest(), scene.suggest()
    scene.start(first), scene.start(second)
    scene.step(100.0)
    scene.end(first)
    third = scene.suggest()
    assert isinstance(third, SimpleNamespace), "it ends after 200 s"
    scene.start(third)
    scene.step(100.0)
    scene.end(second)
    assert scene.suggest() is None and not scene.watcher.stopping, "one is still under way"
    scene.end(third)
    assert scene.suggest() == "FINISHED" and scene.watcher.out_of_time


def test_a_time_budget_ends_what_is_under_way(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(plan, monkeypatch, deadline=50.0)
    scene.start(scene.suggest())
    scene.step(49.0)
    assert not scene.watcher.ending
    scene.step(1.0)
    assert scene.watcher.ending and scene.watcher.out_of_time


def test_a_sweep_without_a_device_to_trust_ends(scene: Scene) -> None:
    first, second = scene.suggest(), scene.suggest()
    scene.start(first), scene.start(second)
    for trial, device in ((first, ONE), (second, OTHER)):
        assert not scene.watcher.stopping
        report = {"finished": {}, "failed": {}, "busy": [], "unstored": {}, "withdrawn": [], "images": 0}
        report["returned"] = trial.config["runs"]
        scene.watcher.on_trial_result(0, [], trial, report | {"device": device, "parked": "it miscounts"})
        scene.step()
    assert scene.sweep.scheduler.stopped == "no device is left that can be trusted: it miscounts"


def test_parked_slots_are_counted_once_when_tune_is_started_afresh(scene: Scene) -> None:
    for number in range(3):
        first, second = scene.suggest(), scene.suggest()
        scene.start(first), scene.start(second)
        report = {"finished": {}, "failed": {}, "busy": [], "unstored": {}, "withdrawn": [], "images": 0}
        report["returned"] = first.config["runs"]
        scene.watcher.on_trial_result(0, [], first, report | {"device": OTHER, "parked": "it miscounts"})
        scene.end(second)
        scene.step(100.0)
        scene.sweep.clock += 100.0
        assert not scene.watcher.stopping and len(scene.sweep.scheduler.parked) == 1, number
        scene.watcher.begin()
        assert scene.sweep.scheduler.trials == 0 and scene.sweep.scheduler.parked == {}


def test_what_rests_but_would_not_end_in_time_keeps_nobody_waiting(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(plan, monkeypatch, deadline=150.0)
    first = scene.suggest()
    scene.start(first)
    scene.step(100.0)
    scene.end(first)
    second = scene.sweep.scheduler.block("lost")
    assert second is not None
    scene.sweep.scheduler.lost("lost", blame=False, message="its node went")
    assert scene.suggest() == "FINISHED" and scene.watcher.out_of_time


def test_a_parked_slot_does_not_keep_tune_from_being_started_afresh(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "TRIALS_PER_FIT", 2)
    first, second = scene.suggest(), scene.suggest()
    scene.start(first), scene.start(second)
    report = {"finished": {}, "failed": {}, "busy": [], "unstored": {}, "withdrawn": [], "images": 0}
    report["returned"] = first.config["runs"]
    scene.watcher.on_trial_result(0, [], first, report | {"device": OTHER, "parked": "it miscounts"})
    assert not scene.watcher.ending
    scene.end(second)
    assert scene.watcher.ending and not scene.watcher.stopping


# What became of a slot


def trial_of(error: Exception | None, tmp_path: Path) -> Any:
    path = tmp_path / "error.pkl"
    path.write_bytes(pickle.dumps(error))
    return SimpleNamespace(pickled_error_file=None if error is None else str(path))


def test_a_slot_without_a_word_has_died(tmp_path: Path) -> None:
    assert cause(trial_of(None, tmp_path))[0] == "actor"
    assert cause(trial_of(ActorDiedError(), tmp_path))[0] == "actor"


def test_an_exception_of_a_slot_is_told_from_its_death(tmp_path: Path) -> None:
    error = RayTaskError("step", "Traceback\nValueError: a mistake", ValueError("a mistake\nand more"))
    assert cause(trial_of(error, tmp_path)) == ("", "ValueError: a mistake")
