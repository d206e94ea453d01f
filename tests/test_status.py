"""``status`` and ``logs``: what they say of a store, once and for as long as it changes."""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main, output
from orchestrator.plan import Plan, Planned, expand, plan
from orchestrator.store import Store, open_store
from orchestrator.store.leases import Leases, sweeping
from orchestrator.watch.reading import Follower
from orchestrator.watch.sweeps import Sweeps
from protocols import apply_settings, load_protocol
from protocols.contract import Epoch
from tests import factory

ROOT = Path(__file__).parents[1]
PROVENANCE = '{"slot": {"gpus": 0.5}}'


@dataclasses.dataclass
class Answer:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Answer]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command in a working directory of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Answer:
        code = main(arguments)
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err
        return Answer(code, captured.out, captured.err)

    return call


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store where the verbs look for one."""
    return open_store(tmp_path / "results", create=True)


def runs(*settings: str) -> dict[tuple[str, int], Planned]:
    """The runs of a small protocol, by source and replicate."""
    planned = expand(apply_settings(load_protocol("quickstart-tiny"), settings))
    return {(entry.source, entry.run.replicate): entry for entry in planned}


def begin(store: Store, entry: Planned, epochs: int = 0, seconds: float = 2.0) -> None:
    """Have a run be under way, so many epochs of which are done."""
    attempt = store.begin(entry.id)
    row = Epoch(epoch=0, learning_rate=0.1, train_loss=1.0, test_loss=1.0, test_accuracy=0.5, seconds=seconds)
    store.publish(entry.id, attempt, [dataclasses.replace(row, epoch=epoch + 1) for epoch in range(epochs)])


# Once


def test_status_tells_when_it_will_be_done_and_what_it_costs(call: Call, store: Store) -> None:
    by = runs("replicates=5")
    gpu = {"device": "A100", "provenance": PROVENANCE}
    for replicate in range(3):
        store.commit(factory.record(by["init", replicate], seconds=1000.0, process="a", **gpu))
    store.commit(factory.record(by["onebit", 0], seconds=400.0, process="a", **gpu))
    for replicate in range(5):
        store.commit(factory.record(by["none", replicate], seconds=100.0, process="b", **gpu))
    store.fail({**factory.failure(by["onebit", 1]), "device": "GPU-0"})  # took 2 seconds
    begin(store, by["init", 3], 10, 50.0)  # half of its 20 epochs
    begin(store, by["onebit", 2], 15, 20.0)  # three quarters of its time

    values = call("status", "quickstart-tiny", "--set", "replicates=5", "--json").json
    assert values["device_seconds_spent"] == {"GPU": pytest.approx((3 * 1000 + 400 + 5 * 100 + 2) / 2)}
    # Of init a run of 1000 s and half of one are left, of onebit three of 400 s and a quarter of one.
    assert values["device_seconds_left"] == {"GPU": pytest.approx((1500 + 1300) / 2)}
    assert values["seconds_left"] == pytest.approx((1500 + 1300) / 2)
    left = {cell["source"]: cell["seconds_left"] for cell in values["cells"]}
    assert left["none"] == 0
    assert left["init"] == pytest.approx(1.5 * (1000 + 400) / 2)
    assert left["onebit"] == values["seconds_left"]
    examples = by["init", 3].examples
    assert values["images_per_second"] == pytest.approx(examples / 50 + examples / 20)
    assert (values["planned"], values["done"], values["missing"], values["running"]) == (15, 9, 6, 2)
    assert [(run["id"], run["state"], run["epoch_seconds"]) for run in values["live"]] == sorted(
        [
            (by["init", 3].id, "running or interrupted", 50.0),
            (by["onebit", 2].id, "running or interrupted", 20.0),
        ]
    )
    text = call("status", "quickstart-tiny", "--set", "replicates=5").out
    assert "about 23 min left, 33 GPU minutes spent, about 23 GPU minutes left." in text
    assert re.search(r"^torch +dropnet +digits +init +5 +3 +2 +1 +0 +18 min$", text, re.MULTILINE)
    assert re.search(r"^torch +dropnet +digits +none +5 +5 +0 +0 +0 +done$", text, re.MULTILINE)


def test_status_has_the_measures_of_the_report(call: Call, store: Store) -> None:
    by = runs("replicates=5")
    factory.fill(store, [entry for (source, _), entry in by.items() if source == "init"])
    cells = {
        cell["source"]: cell
        for cell in call("status", "quickstart-tiny", "--json", "--set", "replicates=5").json["cells"]
    }
    from orchestrator.analysis import load

    table = load(store, None, list(by.values())).table().set_index("source")
    for name in ("accuracy_mean", "accuracy_sd"):
        for end in ("", "_low", "_high"):
            assert cells["init"][name + end] == pytest.approx(table.loc["init", name + end], rel=1e-9)
            assert cells["none"][name + end] is None
    assert (cells["init"]["n"], cells["none"]["n"]) == (5, 0)


def test_every_field_is_explained(call: Call, store: Store) -> None:
    by = runs()
    store.fail(factory.failure(by["init", 0]))
    begin(store, by["init", 1])
    with sweeping(store):
        values = call("status", "quickstart-tiny", "--json").json
    text = (ROOT / "docs" / "watching.md").read_text()
    for fields in (values, values["cells"][0], values["live"][0], values["failures"][0], values["sweeps"][0]):
        for name in fields:
            assert f"`{name.removesuffix('_low').removesuffix('_high')}`" in text, name


def test_status_says_nothing_of_the_time_before_anything_is_known(call: Call, store: Store) -> None:
    values = call("status", "quickstart-tiny", "--json").json
    assert (values["seconds_left"], values["device_seconds_left"], values["images_per_second"]) == (None, None, None)
    assert (values["device_seconds_spent"], values["sweeps"]) == ({}, [])
    assert all(cell["seconds_left"] is None for cell in values["cells"])
    text = call("status", "quickstart-tiny").out
    for word in ("left", "0:00", "nan", "None", "spent", "diverged"):
        assert word not in text, word
    begin(store, runs()["init", 0])
    assert call("status", "quickstart-tiny", "--json").json["seconds_left"] is None
    begin(store, runs()["init", 0], 2, 3.0)  # 20 epochs of 3 seconds each
    values = call("status", "quickstart-tiny", "--json").json
    assert values["seconds_left"] == pytest.approx(6 * 60 - 6)


def test_status_counts_failures_by_outcome_and_names_the_newest_first(call: Call, store: Store) -> None:
    by = runs("replicates=8")
    for number in range(8):
        row = factory.failure(by["init", number], 1, "error" if number else "timeout")
        later = row["finished"] + datetime.timedelta(minutes=number)
        store.fail({**row, "message": f"what happened to {number}", "finished": later})
    for number in range(4):
        store.fail(factory.failure(by["onebit", number], 3))
    begin(store, by["onebit", 0])  # is tried again
    factory.fill(store, [by["onebit", 1]])  # is done in the end
    text = call("status", "quickstart-tiny", "--set", "replicates=8").out
    section = text.partition("\nFailed (")[2].splitlines()
    assert section[0] == "7 error, 2 out_of_memory, 1 timeout), the newest first:"
    assert section[1] == f"  {by['init', 7].id[:8]} torch dropnet digits init #7: attempt 1: error: what happened to 7"
    assert len(section) == 11
    assert "running" in text and by["onebit", 0].id[:8] in text.partition("Running or interrupted:")[2]
    values = call("status", "quickstart-tiny", "--set", "replicates=8", "--json").json
    assert values["outcomes"] == {"ok": 1, "error": 7, "timeout": 1, "out_of_memory": 2}


def test_a_run_is_running_while_its_sweep_lives_and_interrupted_afterwards(call: Call, store: Store) -> None:
    by = runs()
    for replicate in range(2):
        begin(store, by["init", replicate], 3)
    with sweeping(store) as sweep:
        assert Leases(store, sweep.id, 60.0).claim(by["init", 0].id, "here")
        values = call("status", "quickstart-tiny", "--json").json
        assert {run["id"]: run["state"] for run in values["live"]} == {
            by["init", 0].id: "running",
            by["init", 1].id: "running or interrupted",
        }
        (found,) = values["sweeps"]
        assert (found["host"], found["pid"]) == (os.uname().nodename, os.getpid())
        assert set(found) == {"host", "pid", "command", "since", "heartbeat_age"}
        assert 0 <= found["heartbeat_age"] < 60
        text = " ".join(call("status", "quickstart-tiny").out.split())
        assert f"Running on {os.uname().nodename} (process {os.getpid()}) since 20" in text
        assert re.search(r"last heard of \d+ s ago\.", text)
    values = call("status", "quickstart-tiny", "--json").json
    assert (values["sweeps"], values["running"], values["interrupted"]) == ([], 1, 1)
    assert {run["id"]: run["state"] for run in values["live"]}[by["init", 0].id] == "interrupted"
    text = call("status", "quickstart-tiny").out
    assert f"\nInterrupted:\n  {by['init', 0].id[:8]} " in text
    assert f"\nRunning or interrupted:\n  {by['init', 1].id[:8]} " in text


def test_a_released_run_and_one_whose_sweep_was_killed_are_interrupted(store: Store) -> None:
    by = runs()
    one, other = by["init", 0].id, by["init", 1].id
    with sweeping(store) as sweep:
        leases = Leases(store, sweep.id, 60.0)
        leases.claim(one, "here")
        leases.claim(other, "here")
        leases.release(one)
        sweeps = Sweeps(store)
        assert [found.id for found in sweeps.active()] == [sweep.id]
        assert sweeps.states({one, other}) == {one: "interrupted", other: "running"}
        (path,) = (Path(store.url) / "sweeps").iterdir()
        # The same process id, but another process.
        path.write_text(json.dumps({**json.loads(path.read_text()), "started": "1"}))
        assert sweeps.active() == [] and sweeps.states({other}) == {other: "interrupted"}


def test_a_heartbeat_is_counted_from_when_it_was_seen_whatever_the_clocks_say(store: Store) -> None:
    now = time.time()
    content = {
        "id": "a",
        "host": "far",
        "pid": 1,
        "command": "run",
        "since": "2026-01-01T00:00:00+00:00",
        "seconds": 60.0,
    }
    store.files.put("sweeps/a.json", json.dumps(content).encode())
    clock = [now + 3600.0]  # an hour ahead of the store's
    sweeps = Sweeps(store, clock=lambda: clock[0])
    assert sweeps.active() == []
    store.files.put("sweeps/a.json", json.dumps({**content, "heartbeat": 1}).encode())
    assert [(found.host, found.heard) for found in sweeps.active()] == [("far", 0.0)]
    clock[0] += 59
    assert [found.heard for found in sweeps.active()] == [59.0]
    clock[0] += 2
    assert sweeps.active() == []
    store.files.put("sweeps/b.json", b'{"id": "b"}')
    store.files.put("sweeps/c.json", b"half of")
    assert sweeps.active() == []


def test_long_labels_are_wrapped_between_words_and_numbers_never_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    label = "onebit[step=1000, tensor=conv1.weight, elements=12345, direction=alternating]"
    columns: list[output.Column] = ["trainer", "architecture", "varies", ("planned", "right"), ("missing", "right")]
    output.print_table(columns, [("tensorflow", "my_study:network", f"augment+{label}", "123,456", "1,234")])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(lines)
    for word in ("tensorflow", "123,456", "1,234", "planned", "tensor=conv1.weight,", "direction=alternating]"):
        assert word in text.split(), word


# Again and again


def happening(monkeypatch: pytest.MonkeyPatch, stages: Iterator[object]) -> None:
    """Have something happen instead of the time that passes between two looks at the store."""
    monkeypatch.setattr(time, "sleep", lambda seconds: next(stages))


def test_following_prints_lines_until_all_is_done(call: Call, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = list(runs().values())

    def stages() -> Iterator[None]:
        begin(store, planned[0], 10, 3.0)
        yield None
        factory.fill(store, planned[:3], seconds=60.0)
        store.fail(factory.failure(planned[3]))
        yield None
        factory.fill(store, planned[3:])
        yield None

    happening(monkeypatch, stages())
    answer = call("status", "quickstart-tiny", "--follow")
    assert answer.code == 0
    examples = planned[0].examples
    assert answer.out.splitlines() == [
        "0/6 done, 0 running, 0 failed, ETA not known yet",
        f"0/6 done, 1 running, 0 failed, {examples / 3:,.0f} images/s, about 6 min left, about 6 core minutes left",
        "3/6 done, 0 running, 1 failed, ETA not known yet, 3 core minutes spent, about 3 core minutes left",
        "6/6 done, 0 running, 0 failed, 4 core minutes spent",
    ]


def test_following_as_json_is_an_object_a_line(call: Call, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = list(runs().values())
    factory.fill(store, planned[:5])
    happening(monkeypatch, (factory.fill(store, planned[5:]) for _ in range(1)))
    answer = call("status", "quickstart-tiny", "--follow", "--json")
    first, second = map(json.loads, answer.out.splitlines())
    assert answer.code == 0
    assert (first["done"], second["done"]) == (5, 6)
    once = call("status", "quickstart-tiny", "--json").json
    assert {**second, "time": ""} == {**once, "time": ""}


def test_following_ends_with_130_on_an_interrupt(call: Call, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def stages() -> Iterator[None]:
        yield None
        raise KeyboardInterrupt

    happening(monkeypatch, stages())
    answer = call("status", "quickstart-tiny", "--follow")
    assert answer.code == 130
    assert len(answer.out.splitlines()) == 2


def test_only_new_records_and_failures_are_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    by = list(runs("replicates=4").values())
    factory.fill(store, by[:5])
    store.fail(factory.failure(by[6]))
    protocol = apply_settings(load_protocol("quickstart-tiny"), ["replicates=4"])

    def planning() -> Plan:
        return plan(protocol, store)

    asked: list[set[str]] = []
    table, small = Store.table, Store._small
    opened: list[str] = []
    monkeypatch.setattr(Store, "table", lambda self, columns, ids: asked.append(set(ids)) or table(self, columns, ids))
    monkeypatch.setattr(Store, "_small", lambda self, path, schema: opened.append(path) or small(self, path, schema))
    follower = Follower(planning(), store, planning)
    assert follower.read().done == 5
    assert follower.read().done == 5
    factory.fill(store, by[5:6])
    store.fail(factory.failure(by[7]))
    opened.clear()
    found = follower.read()
    assert (found.done, len(found.failures)) == (6, 2)
    assert asked == [{entry.id for entry in by[:5]}, {by[5].id}]
    assert opened == [f"failures/{by[7].id}.1.parquet"]


def test_a_record_that_was_lost_is_not_done_any_more(store: Store) -> None:
    by = list(runs().values())
    factory.fill(store, by)
    protocol = load_protocol("quickstart-tiny")
    follower = Follower(plan(protocol, store), store, lambda: plan(protocol, store))
    assert follower.read().complete
    path = Path(store.url) / "records" / f"{by[0].id}.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    found = follower.read()
    assert found.done == 5 and set(found.corrupt) == {by[0].id}


def on_terminal(command: list[str], cwd: Path, *, until: str, then: Callable[[int], object]) -> tuple[int, str]:
    """Run a command on a terminal of its own; once it has written some text, do something about it. Its exit code."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    variables |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=cwd, stdin=follower, stdout=follower, stderr=follower, env=variables)
    os.close(follower)
    written, waiting, end = b"", True, time.monotonic() + 300
    try:
        while time.monotonic() < end:
            if select.select([leader], [], [], 1)[0]:
                written += os.read(leader, 65536)
            if waiting and until in written.decode(errors="replace"):
                waiting = False
                then(process.pid)
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(leader)
    if process.poll() is None and time.monotonic() >= end:
        process.kill()
    return process.wait(60), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def follow_command(tmp_path: Path) -> list[str]:
    code = "import sys; from orchestrator.cli import following, main; following.SECONDS = 0.1; sys.exit(main())"
    return [sys.executable, "-c", code, "status", "quickstart-tiny", "--follow", "--store", str(tmp_path / "results")]


def test_a_followed_study_is_drawn_on_a_terminal_until_it_is_done(store: Store, tmp_path: Path) -> None:
    planned = list(runs().values())
    factory.fill(store, planned[:3])
    code, text = on_terminal(
        follow_command(tmp_path), tmp_path, until="3/6", then=lambda pid: factory.fill(store, planned[3:])
    )
    assert code == 0
    assert re.search(r"none +[12]/2", text) and re.search(r"onebit +2/2 +done", text)
    assert text.splitlines()[-1].startswith("6/6 done, 0 running, 0 failed, 60 core seconds spent")


def test_a_followed_study_is_left_with_ctrl_c(store: Store, tmp_path: Path) -> None:
    factory.fill(store, list(runs().values())[:3])
    code, text = on_terminal(
        follow_command(tmp_path), tmp_path, until="3/6", then=lambda pid: os.kill(pid, signal.SIGINT)
    )
    assert code == 130
    assert "Traceback" not in text
    assert text.splitlines()[-1].startswith("3/6 done")


# logs


def test_logs_prints_what_the_newest_attempt_printed(call: Call, store: Store) -> None:
    done, failed = runs()["init", 0], runs()["init", 1]
    store.fail(factory.failure(done, 1))
    store.put_log(done.id, 1, "first\n")
    store.put_log(done.id, 2, "second\nlast")
    store.commit(factory.record(done, attempt=2, seconds=61.0, host="node7"))
    answer = call("logs", done.id[:8])
    assert (answer.code, answer.out) == (0, "second\nlast\n")
    lines = answer.err.splitlines()
    assert lines[0] == f"run {done.id} torch dropnet digits init #0"
    assert re.fullmatch(
        r"attempt 1: out_of_memory on node \(cpu\) after 2 s, at 2024-.*: CUDA out of memory.*", lines[1]
    )
    assert re.fullmatch(r"attempt 2: ok on node7 \(cpu\) after 61 s, at 2024-05-0\d \d\d:\d\d:10", lines[2])
    assert call("logs", done.id[:8].upper(), "--attempt", "1").out.startswith("first\nTraceback (most recent")

    store.fail(factory.failure(failed, 1))
    answer = call("logs", failed.id)
    assert answer.out.startswith("epoch 3 of 6\nTraceback (most recent call last):")
    assert answer.out.endswith("tried to allocate 2.00 GiB\n")


def test_logs_says_why_there_is_nothing(call: Call, store: Store) -> None:
    done, silent, running, stopped = (runs()[key] for key in (("init", 0), ("init", 1), ("none", 0), ("none", 1)))
    factory.fill(store, [done])
    answer = call("logs", done.id[:10])
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.splitlines()[-1] == "attempt 1 printed nothing"
    store.fail({**factory.failure(silent), "log_tail": "", "traceback": ""})
    assert call("logs", silent.id).err.splitlines()[-1] == "attempt 1 printed nothing"
    begin(store, running, 1)
    begin(store, stopped, 1)
    with sweeping(store) as sweep:
        Leases(store, sweep.id, 60.0).claim(running.id, "here")
        Leases(store, sweep.id, 60.0).claim(stopped.id, "here")
        answer = call("logs", running.id)
        assert re.match(r"attempt 1: running, last heard of at 20", answer.err.splitlines()[1])
        assert "has printed nothing that is in the store yet" in answer.err.splitlines()[-1]
    assert "was interrupted before anything" in call("logs", stopped.id).err.splitlines()[-1]
    store.put_log(stopped.id, 1, "as far as it came\n")
    assert call("logs", stopped.id).out == "as far as it came\n"


def test_logs_wants_an_id_that_is_there_once(call: Call, store: Store) -> None:
    by = runs("replicates=9")
    factory.fill(store, by.values())
    common = next(digit for digit in "0123456789abcdef" if sum(run.id.startswith(digit) for run in by.values()) > 1)
    number = sum(run.id.startswith(common) for run in by.values())
    for arguments, words in (
        (("logs", common), f"{number} runs have ids that begin with '{common}': "),
        (("logs", "xyz"), "no run whose id begins with 'xyz' has been begun in store results/"),
        (("logs", ""), "no run whose id begins with ''"),
        (("logs", "../records"), "no run whose id begins with"),
        (("logs", by["init", 0].id, "--attempt", "4"), "has no attempt 4; it has attempt 1"),
        (("logs", "abc", "--store", "nowhere"), "no run whose id begins with 'abc'"),
    ):
        answer = call(*arguments)
        assert answer.code == 2 and answer.out == ""
        assert len(answer.err.splitlines()) == 1 and words in answer.err


def test_logs_follows_an_attempt_to_its_end(call: Call, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs()["init", 0]
    begin(store, run)
    store.put_log(run.id, 1, "one\n")

    def stages() -> Iterator[None]:
        store.put_log(run.id, 1, "one\ntwo\n")
        yield None
        store.put_log(run.id, 1, "one\ntwo\nthree\n")
        store.commit(factory.record(run))
        yield None

    happening(monkeypatch, stages())
    answer = call("logs", run.id[:8], "--follow")
    assert (answer.code, answer.out) == (0, "one\ntwo\nthree\n")
    assert answer.err.splitlines()[-1].startswith("ok on node (cpu)")


def test_logs_stops_following_on_an_interrupt(call: Call, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs()["init", 0]
    begin(store, run)

    def stages() -> Iterator[None]:
        raise KeyboardInterrupt
        yield None

    happening(monkeypatch, stages())
    assert call("logs", run.id, "--follow").code == 130
