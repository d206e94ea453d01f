"""The verbs: what they print, what they write, how they end."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import orchestrator.launch
from orchestrator import devices, doctor
from orchestrator.cli import app, main
from orchestrator.launch import Result
from orchestrator.plan import Plan, expand
from orchestrator.store import Store, open_store
from protocols import apply_settings, load_protocol
from protocols.contract import Epoch
from tests import factory

ROOT = Path(__file__).parents[1]
VERBS = (
    *("plan", "run", "status", "logs", "report", "check", "replay"),
    *("compact", "verify", "export", "import", "doctor", "list", "show"),
)
SMALL = ("--set", "recipe.epochs=2", "--set", "dataset.train_size=200", "--set", "dataset.test_size=50")


@dataclass
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
    monkeypatch.delenv("NOISEGRID_DATA", raising=False)

    def call(*arguments: str) -> Answer:
        code = main(arguments)
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err
        assert "Traceback" not in captured.err
        return Answer(code, captured.out, captured.err)

    return call


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store where the verbs look for one."""
    return open_store(tmp_path / "results", create=True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, dict[str, Any]]]:
    """Plans and options given to the launcher, which commits a record for each missing run instead of training it."""
    calls: list[tuple[Plan, dict[str, Any]]] = []

    def sweep(plan: Plan, store: Store, **options: Any) -> Result:
        calls.append((plan, options))
        factory.fill(store, plan.missing)
        return result(planned=len(plan.planned), done=len(plan.planned))

    monkeypatch.setattr(orchestrator.launch, "sweep", sweep)
    return calls


def result(**values: Any) -> Result:
    sound = {"planned": 6, "done": 6, "failed": {}, "interrupted": False, "seconds": 61.0}
    return Result(**{**sound, **values})


# Help and defaults


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_ends_with_examples_of_it(call: Call, verb: str) -> None:
    answer = call(verb, "--help")
    assert answer.code == 0
    examples = answer.out.partition("Examples:\n")[2].strip().splitlines()
    assert examples
    for example in examples:
        words = shlex.split(example)
        assert words[:2] == ["sweep.py", verb]
        command = app.app.commands[verb]
        # Parsed as they stand, without running them.
        command.make_context(verb, words[2:])


def test_the_help_names_every_verb(call: Call) -> None:
    answer = call("--help")
    assert answer.code == 0
    assert "Examples:" in answer.out
    assert set(app.app.commands) == set(VERBS)
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", answer.out, re.MULTILINE)


@pytest.mark.parametrize(("environment", "runs"), [(None, 64), ("quickstart-tiny", 6)])
def test_without_arguments_the_protocol_of_the_environment_or_quickstart_is_run(
    call: Call,
    launched: list[tuple[Plan, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    environment: str | None,
    runs: int,
) -> None:
    if environment:
        monkeypatch.setenv("NOISEGRID_PROTOCOL", environment)
    assert call().code == 0
    ((plan, _),) = launched
    assert plan.protocol.name == (environment or "quickstart")
    assert len(plan.missing) == runs


def test_the_environment_names_store_and_gpus(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[Plan, dict[str, Any]]]
) -> None:
    monkeypatch.setenv("NOISEGRID_STORE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("NOISEGRID_GPUS_PER_RUN", "0.5")
    assert call("run", "quickstart-tiny").code == 0
    assert len(open_store(tmp_path / "elsewhere").finished()) == 6
    assert launched[0][1]["gpus_per_run"] == 0.5
    assert call("run", "quickstart-tiny", "--store", "third", "--gpus-per-run", "0").code == 0
    assert launched[1][1]["gpus_per_run"] == 0
    assert len(open_store(tmp_path / "third").finished()) == 6


@pytest.mark.parametrize("there", [True, False])
def test_a_machine_with_a_gpu_gives_each_run_one(call: Call, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: there)
    answer = call("plan", "summers2021-table1")
    assert answer.code == (0 if there else 2)
    assert ("no GPU" in answer.err) is not there


# plan


def test_plan_counts_what_is_planned_done_and_missing(call: Call, store: Store) -> None:
    runs = expand(load_protocol("quickstart-tiny"))
    other = apply_settings(load_protocol("quickstart-tiny"), ["recipe.epochs=3"])
    factory.fill(store, [*runs[:2], expand(other)[0]])
    answer = call("plan", "quickstart-tiny", "--json")
    assert answer.code == 0
    counts = {name: answer.json[name] for name in ("planned", "done", "missing", "unplanned")}
    assert counts == {"planned": 6, "done": 2, "missing": 4, "unplanned": 1}
    assert {cell["source"]: (cell["done"], cell["missing"]) for cell in answer.json["cells"]} == {
        "none": (1, 1),
        "init": (1, 1),
        "onebit": (0, 2),
    }
    assert [run["id"] for run in answer.json["runs"]] == [run.id for run in runs]
    text = call("plan", "quickstart-tiny")
    assert "6 runs planned, 2 done, 4 missing in results/" in text.out
    assert "1 record that this plan does not ask for" in text.out


def test_plan_estimates_the_time_from_runs_of_the_same_group(call: Call, store: Store) -> None:
    runs = expand(load_protocol("quickstart-tiny"))
    assert call("plan", "quickstart-tiny", "--json").json["device_seconds"] is None
    assert "not known" in call("plan", "quickstart-tiny").out
    factory.fill(store, runs[:1], seconds=100.0)
    factory.fill(store, runs[1:2], seconds=200.0)
    assert call("plan", "quickstart-tiny", "--json").json["device_seconds"] == 4 * 150
    assert "about 10 min of one device" in call("plan", "quickstart-tiny").out


def test_plan_and_status_write_nothing_and_fit_a_hundred_columns(call: Call, tmp_path: Path) -> None:
    for verb in ("plan", "status", "report"):
        answer = call(verb, "quickstart", "--set", "recipe.epochs=10,20", "--set", "base_seeds=0,1")
        assert answer.code == 0
        assert max(map(len, answer.out.splitlines())) <= 100
    assert not list(tmp_path.iterdir())


def test_plan_names_the_library_kind_and_tells_groups_apart(call: Call) -> None:
    out = call("plan", "quickstart", "--set", "recipe.epochs=1,2", "--only", "trainer=torch").out
    assert "library (order)" in out
    assert "all (library: order)" in out
    assert "dropnet #1" in out
    assert "dropnet #2" in out
    assert "dropnet on digits:\n  #1 epochs 1\n  #2 epochs 2\n" in out


@pytest.mark.parametrize("verb", ["plan", "status"])
def test_cells_that_differ_in_recipe_base_seed_or_perturbation_are_told_apart(call: Call, verb: str) -> None:
    settings = ("--set", "recipe.label_smoothing=0,0.1", "--set", "base_seeds=0,3", "--set", "perturb.step=0,10")
    out = call(verb, "quickstart-tiny", *settings).out
    assert [line.strip() for line in out.splitlines() if line.startswith("  #")] == [
        "#1 base seed 0",
        "#2 base seed 3",
        "#3 label_smoothing 0.1, base seed 0",
        "#4 label_smoothing 0.1, base seed 3",
    ]
    rows = [line.split() for line in out.splitlines() if line.startswith("torch")]
    names = [tuple(row[1:5]) for row in rows]
    assert len(set(names)) == len(names) == 4 * 4
    assert sum(row[4].startswith("onebit[step") for row in rows) == 4


def test_a_plan_of_many_cells_has_a_line_a_group(call: Call) -> None:
    answer = call("plan", "summers2021-grid", "--gpus-per-run", "1")
    assert answer.code == 0
    rows = [line for line in answer.out.splitlines() if line.startswith("torch")]
    assert len(rows) == len(load_protocol("summers2021-grid").cells) / 6
    assert all(re.search(r"none, init,.* 602 +0 +602$", row) for row in rows)
    assert max(map(len, answer.out.splitlines())) <= 100


def test_plan_says_how_large_the_kept_files_are(call: Call, store: Store) -> None:
    kept = ("quickstart-tiny", "--set", "keep=weights")
    (first, *_) = expand(load_protocol("quickstart-tiny"))
    least = 6 * 4 * first.parameters
    size = call("plan", *kept, "--json").json["kept_bytes"]
    assert least <= size < 1.1 * least
    assert "They will keep weights: at most" in call("plan", *kept).out
    assert call("plan", "quickstart-tiny", "--json").json["kept_bytes"] == 0
    assert "keep" not in call("plan", "quickstart-tiny").out


def test_plan_says_how_much_of_the_records_is_logits(call: Call) -> None:
    answer = call("plan", "summers2021-language", "--gpus-per-run", "1", "--json").json
    # Of Penn Treebank's test set a thousand tokens with ten thousand words each, in float16.
    assert answer["logits_bytes"] == answer["missing"] * 2 * 10_000_000
    assert "records will hold logits: about 20.1 GB" in call("plan", "summers2021-language", "--gpus-per-run", "1").out
    assert call("plan", "quickstart-tiny", "--json").json["logits_bytes"] == 6 * 4 * 297 * 10
    assert "logits" not in call("plan", "quickstart-tiny").out


def test_set_and_only_change_and_select(call: Call) -> None:
    settings = ("--set", "recipe.epochs=1", "--set", "replicates=3", "--only", "source=init", "--only", "trainer=torch")
    answer = call("plan", "quickstart", *settings, "--json")
    assert [(cell["source"], cell["trainer"], cell["planned"]) for cell in answer.json["cells"]] == [
        ("none", "torch", 3),
        ("init", "torch", 3),
    ]


def test_table1_on_mnist_has_the_papers_rows(call: Call) -> None:
    settings = ("--set", "dataset=mnist", "--set", "library=order", "--gpus-per-run", "0")
    answer = call("plan", "summers2021-table1", *settings, "--json")
    assert answer.code == 0
    assert {cell["source"]: cell["planned"] for cell in answer.json["cells"]} == {
        "none": 2,
        "init": 100,
        "shuffle": 100,
        "augment": 100,
        "library": 100,
        "library+shuffle": 100,
        "augment+library+shuffle": 100,
        "all": 100,
    }


def test_a_study_in_the_working_directory_is_planned(call: Call, tmp_path: Path) -> None:
    (tmp_path / "my_study_of_one.py").write_text(
        "from protocols import Protocol, grid\n"
        "def net(net, x, classes):\n"
        "    return net.linear(net.global_average_pool(net.conv(x, 'c', 4, 3)), 'head', classes)\n"
        "def make():\n"
        "    cells = grid(sources=('init',), architectures=('./my_study_of_one.py:net',), datasets=('digits',),\n"
        "                 trainers=('torch',))\n"
        "    return Protocol(name='mine', summary='', cells=cells, replicates=2)\n"
    )
    for name in ("./my_study_of_one.py:make", "my_study_of_one:make"):
        answer = call("plan", name, "--json")
        assert answer.code == 0
        assert (answer.json["protocol"], answer.json["planned"]) == ("mine", 4)


# status


def test_status_counts_outcomes_cell_by_cell(call: Call, store: Store) -> None:
    runs = expand(load_protocol("quickstart-tiny"))
    by_name = {(run.source, run.run.replicate): run for run in runs}
    store.fail(factory.failure(by_name["none", 0]))  # of a run that was done in the end
    factory.fill(store, [by_name["none", 0], by_name["none", 1], by_name["init", 0]])
    store.commit(factory.diverged(by_name["init", 1]))
    failed, running = by_name["onebit", 0], by_name["onebit", 1]
    store.fail(factory.failure(failed, 1, "out_of_memory"))
    store.fail(factory.failure(failed, 2, "error"))
    store.begin(running.id)
    row = Epoch(epoch=3, learning_rate=0.1, train_loss=1.0, test_loss=1.0, test_accuracy=0.5, seconds=1.0)
    store.publish(running.id, 1, [row])

    answer = call("status", "quickstart-tiny", "--json")
    assert answer.code == 0
    values = answer.json
    assert (values["planned"], values["done"], values["missing"], values["running"]) == (6, 4, 2, 1)
    assert values["outcomes"] == {"ok": 3, "diverged": 1, "error": 1}
    cells = {cell["source"]: cell for cell in values["cells"]}
    assert cells["none"]["outcomes"] == {"ok": 2}
    assert cells["init"]["outcomes"] == {"ok": 1, "diverged": 1}
    assert cells["onebit"]["outcomes"] == {"error": 1}
    assert (cells["onebit"]["missing"], cells["onebit"]["running"]) == (2, 1)
    assert [(run["id"], run["epochs_done"], run["epochs"]) for run in values["live"]] == [(running.id, 3, 20)]
    assert [(run["id"], run["attempt"]) for run in values["failures"]] == [(failed.id, 2)]

    text = call("status", "quickstart-tiny")
    assert "6 runs planned, 4 done, 2 missing" in text.out
    assert "torch dropnet digits onebit #1: epoch 3 of 20, attempt 1" in text.out
    assert "torch dropnet digits onebit #0: attempt 2: error: CUDA out of memory" in text.out


# report


def test_report_prints_and_writes_a_finished_study(call: Call, store: Store, tmp_path: Path) -> None:
    factory.fill(store, expand(load_protocol("quickstart-tiny")))
    answer = call("report", "quickstart-tiny")
    assert answer.code == 0
    assert "6 runs planned, 6 done, 0 missing" in answer.out
    assert "held" in answer.out
    for word in ("none", "init", "onebit"):
        assert re.search(rf"^ {word}\b", answer.out, re.MULTILINE)
    folder = tmp_path / "results" / "report"
    further = ["classes.csv", "equality.csv", "floors.csv", "variances.csv"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*further, "report.html", "table.csv", "table.tex"])
    for path in folder.iterdir():
        assert (path.name if path.name in further else str(path)) in answer.out.replace("\n", "")
    assert "<html" in (folder / "report.html").read_text()


def test_report_puts_the_page_where_it_is_told(call: Call, store: Store, tmp_path: Path) -> None:
    factory.fill(store, expand(load_protocol("quickstart-tiny")))
    assert call("report", "quickstart-tiny", "--html", "pages/mine.html").code == 0
    assert "<html" in (tmp_path / "pages" / "mine.html").read_text()
    assert not (tmp_path / "results" / "report" / "report.html").exists()


def test_report_counts_missing_runs_of_an_unfinished_study(call: Call, store: Store, tmp_path: Path) -> None:
    runs = expand(load_protocol("quickstart-tiny"))
    factory.fill(store, runs[:4])
    answer = call("report", "quickstart-tiny")
    assert answer.code == 0
    assert "4 done, 2 missing" in answer.out
    table = (tmp_path / "results" / "report" / "table.csv").read_text()
    assert "onebit" in table


# run


def test_run_trains_what_is_missing_and_leaves_the_report(
    call: Call, store: Store, tmp_path: Path, launched: list[tuple[Plan, dict[str, Any]]]
) -> None:
    runs = expand(load_protocol("quickstart-tiny"))
    factory.fill(store, runs[:2])
    options = ("--max-concurrent", "3", "--checkpoint-every", "0", "--retries", "4", "--gpus-per-run", "0")
    answer = call("run", "quickstart-tiny", *options)
    assert answer.code == 0
    ((plan, given),) = launched
    assert [run.id for run in plan.missing] == [run.id for run in runs[2:]]
    assert given == {
        "data_root": None,
        "gpus_per_run": 0,
        "max_concurrent": 3,
        "checkpoint_every": 0,
        "retries": 4,
        "patience": 3600,
        "lease_seconds": 60,
        "time_budget": math.inf,
    }
    assert "6 runs planned, 6 done, 0 missing" in answer.out
    assert answer.out.rstrip().endswith("All 6 planned runs are done (this took 61 s).")
    assert (tmp_path / "results" / "report" / "report.html").exists()

    again = call("run", "quickstart-tiny")
    assert again.code == 0
    assert len(launched) == 1
    assert "Nothing to train: all 6 runs are done." in again.out


@pytest.mark.parametrize(
    ("values", "code", "words"),
    [
        ({"done": 5, "failed": {"a": "x"}}, 1, "5 of 6 planned runs done, 1 failed"),
        ({"done": 0, "failed": {"a": "x"}, "stopped": "there is no such layer"}, 1, "since there is no such layer"),
        ({"done": 5, "interrupted": True}, 130, "Interrupted with 5 of 6 planned runs done; the same command again"),
    ],
)
def test_run_ends_with_a_sentence_and_a_code(
    call: Call, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], code: int, words: str
) -> None:
    def sweep(plan: Plan, store: Store, **options: Any) -> Result:
        factory.fill(store, plan.missing[: values["done"]])
        return result(**values)

    monkeypatch.setattr(orchestrator.launch, "sweep", sweep)
    answer = call("run", "quickstart-tiny")
    assert answer.code == code
    assert words in answer.out + answer.err


def sweep_py(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "sweep.py"), *arguments]


def finish(folder: Path, *arguments: str) -> Answer:
    """A command in a process of its own."""
    done = subprocess.run(sweep_py(folder, *arguments), cwd=folder, capture_output=True, text=True)
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_a_study_is_run_resumed_after_damage_and_checked(tmp_path: Path) -> None:
    study = ("quickstart-tiny", *SMALL, "--only", "source=init")
    first = finish(tmp_path, "run", *study)
    assert first.code == 0, first.err
    assert "All 4 planned runs are done" in first.out
    assert "held" in first.out
    values = finish(tmp_path, "status", *study, "--json").json
    assert (values["planned"], values["missing"], values["outcomes"]) == (4, 0, {"ok": 4})

    store = open_store(tmp_path / "results")
    before = store.table(["id", "final_digest"]).to_pylist()
    damaged = tmp_path / "results" / "records" / f"{before[0]['id']}.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    second = finish(tmp_path, "run", *study)
    assert second.code == 0, second.err
    assert before[0]["id"][:12] in second.out + second.err
    assert "corrupt" in second.out + second.err
    assert open_store(tmp_path / "results").table(["id", "final_digest"]).to_pylist() == before
    assert len(list((tmp_path / "results" / "corrupt").iterdir())) == 1
    assert len(pq.read_table(tmp_path / "results" / "records", columns=["id"])) == 4

    check = finish(tmp_path, "check", *study)
    assert check.code == 0, check.err
    assert "1 of 1 group held" in check.out
    assert len(list((tmp_path / "results" / "records").iterdir())) == 4


@pytest.mark.slow
def test_ctrl_c_says_how_to_resume(tmp_path: Path) -> None:
    command = sweep_py(tmp_path, "run", "quickstart-tiny", "--set", "recipe.epochs=5000")
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    live = tmp_path / "results" / "live"
    while process.poll() is None and not (live.exists() and any(live.iterdir())):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert "the same command again resumes" in err
    assert "Traceback" not in out + err


# list, show, doctor


def test_list_json_counts_parameters_for_each_trainer(call: Call) -> None:
    rows = {row["name"]: row["parameters"] for row in call("list", "architectures", "--json").json}
    assert rows["resnet6"] == {"torch": 9_978, "tensorflow": 9_978}
    assert rows["resnet10"] == {"torch": 42_682, "tensorflow": 42_682}
    assert rows["resnet14"] == {"torch": 172_602, "tensorflow": 172_602}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("protocols", {"quickstart", "summers2021", "summers2021-table1-small", "morin2020", "zhuang2022-small"}),
        ("sources", {"none", "init", "augment", "dropout", "library", "onebit", "async", "hardware", "all"}),
        ("mitigations", {"recipe.views", "recipe.cycles", "recipe.ema_decay", "ensemble"}),
        ("architectures", {"dropnet", "resnet14", "resnet14x1_8", "imagenet_resnet50", "lstm", "qrnn"}),
        ("datasets", {"digits", "mnist", "fashion-mnist", "cifar100", "imagenet", "ptb"}),
        ("trainers", {"torch", "tensorflow"}),
    ],
)
def test_list_names_everything_of_a_kind(call: Call, kind: str, names: set[str]) -> None:
    assert names <= {row["name"] for row in call("list", kind, "--json").json}
    text = call("list", kind).out
    for name in names:
        assert re.search(rf"^{name}\b", text, re.MULTILINE)


def test_list_without_a_kind_lists_all_kinds(call: Call) -> None:
    kinds = {"protocols", "sources", "mitigations", "architectures", "datasets", "trainers"}
    assert set(call("list", "--json").json) == kinds
    out = call("list").out
    for words in ("resnet14", "library=native", "asynchrony=real", "recipe.views=flip-crop81"):
        assert words in out
    assert "(7 cells, 702 runs; ICML 2021, arXiv 2103.04514)" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100


def test_show_describes_a_protocol_as_it_was_set(call: Call) -> None:
    out = " ".join(call("show", "summers2021-table1", "--set", "dataset=mnist", "--set", "replicates=7").out.split())
    for words in (
        "2103.04514",
        "a control is added",
        "set for this study: dataset=mnist",
        "7, and 2 of every group's control",
        "epochs 500",
        "native: nondeterministic GPU kernels",
        "51 in 1 group",
        "shuffle+augment+library",
        # 51 runs of 500 epochs of 60,000 images
        "about 1.53 billion training examples through 51 networks",
    ):
        assert words in out


@pytest.mark.parametrize("name", ["summers2021", "summers2021-mitigation-small", "butterfly"])
def test_show_stays_readable_for_large_protocols(call: Call, name: str) -> None:
    protocol = load_protocol(name)
    out = call("show", name).out
    lines = out.splitlines()
    assert max(map(len, lines[2:])) <= 100
    assert len(lines) < 180
    text = " ".join(out.split())
    for deviation in protocol.deviations:
        assert deviation in text
    for cell in protocol.cells:
        assert cell.architecture in text
        assert cell.source in text
        assert not cell.perturb.label or f"onebit[{cell.perturb.label}]" in text
    recipes = list(dict.fromkeys(cell.recipe for cell in protocol.cells))
    assert f"recipe #{len(recipes)} " in out
    assert f"recipe #{len(recipes) + 1} " not in out


def test_show_describes_what_cannot_be_planned(call: Call) -> None:
    answer = call("show", "quickstart", "--set", "architecture=resnet6")
    assert answer.code == 0
    assert "source 'dropout' cannot vary" in " ".join(answer.out.split())


def test_doctor_examines_this_machine(call: Call, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    answer = call("doctor", "--store", "here", "--data-root", "data")
    assert answer.code == 0
    lines = answer.out.splitlines()
    for pattern in (r"ok +python +3\.", r"ok +numpy", r"ok +cpu", r"ok +gpu|warn +gpu", r"ok +store +here"):
        assert any(re.match(pattern, line) for line in lines), pattern
    assert any(re.match(r"warn +data +dataset 'mnist'", line) for line in lines)
    assert any(re.match(r"ok +data +digits", line) for line in lines)


def test_doctor_fails_where_nothing_can_work(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = call("doctor", "--store", "file", "--data-root", "nowhere")
    assert answer.code == 1
    assert re.search(r"^fail +store ", answer.out, re.MULTILINE)
    assert re.search(r"^fail +data +there is no folder nowhere", answer.out, re.MULTILINE)


def test_doctor_warns_of_environment_that_changes_bits(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert re.search(r"^warn +environment +MKL_CBWR=AVX2", call("doctor", "--store", "here").out, re.MULTILINE)


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (["nvidia-cudnn-cu12", "nvidia-cudnn-cu13"], "libcudnn"),
        (["nvidia-nccl-cu12", "nvidia-nccl-cu13"], "libnccl"),
        (["tensorflow", "tensorflow-cpu"], "tensorflow 1 and tensorflow-cpu 1 are installed"),
        (["nvidia-cudnn-cu12", "nvidia-nccl-cu13", "tensorflow-cpu"], ""),
    ],
)
def test_doctor_knows_packages_that_overwrite_each_other(installed: list[str], words: str) -> None:
    findings = list(doctor.conflicts(dict.fromkeys(installed, "1")))
    assert [finding.level for finding in findings] == (["warn"] if words else [])
    assert all(words in finding.text for finding in findings)


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{shlex.join(sweep_py(tmp_path, 'list'))} | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("visible", "found"), [(None, True), ("0,1", True), ("", False), ("-1", False)])
def test_hidden_gpus_are_none(monkeypatch: pytest.MonkeyPatch, visible: str | None, found: bool) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.has_gpu() == found
