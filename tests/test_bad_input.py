"""A user's mistakes: each ends in one line on the standard error and exit code 2, and harms no store."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.plan import expand
from orchestrator.store import open_store
from protocols import load_protocol
from tests import factory

ROOT = Path(__file__).parents[1]
TINY = "quickstart-tiny"

NET = "def net(net, x, classes):\n    return net.linear(x, 'head', classes)\n\n\nnumber = 3\n"
HEADER = struct.pack(">4B3I", 0, 0, 8, 3, 60_000, 28, 28)
STUDY = "def raises():\n    raise ValueError('first line\\nsecond line')\n\n\ndef nothing():\n    pass\n"


@functools.cache
def blank_images() -> bytes:
    """A whole file of MNIST's training images, all black."""
    return gzip.compress(HEADER + bytes(60_000 * 28 * 28), 1)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a store of finished runs, data and code, some of it wrong."""
    monkeypatch.chdir(tmp_path)
    factory.fill(open_store("results", create=True), expand(load_protocol(TINY))[:4])
    (tmp_path / "study.py").write_text(STUDY)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "a_file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "store.json").write_text(json.dumps({"schema": 99}))
    (tmp_path / "garbled").mkdir()
    (tmp_path / "garbled" / "store.json").write_text("{")
    for name, content in (
        ("truncated", HEADER + bytes(1000)),
        ("altered", blank_images()),
        ("cut", gzip.compress(HEADER + os.urandom(100_000))[:50_000]),
    ):
        folder = tmp_path / name / "mnist"
        folder.mkdir(parents=True)
        file = "train-images-idx3-ubyte" + ("" if name == "truncated" else ".gz")
        (folder / file).write_bytes(content)
    return tmp_path


def snapshot(folder: Path) -> dict[str, str]:
    """Every file under a folder, and the SHA-256 of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def settings(*texts: str) -> list[str]:
    return [part for text in texts for part in ("--set", text)]


MNIST = settings("dataset=mnist")

MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    # What is named
    "unknown verb": (["statsu"], ["unknown verb 'statsu'", "did you mean 'status'"]),
    "protocol for a verb": (["quickstart"], ["is a protocol, not a verb", "run quickstart"]),
    "unknown protocol": (["plan", "quickstrat"], ["unknown protocol 'quickstrat'", "did you mean 'quickstart'"]),
    "no such file": (["run", "./none.py:make"], ["none.py", "there is no file"]),
    "no such module": (["status", "no_such_module:make"], ["no_such_module"]),
    "no such function": (["plan", "./study.py:raise"], ["'raise'", "did you mean 'raises'"]),
    "no function named": (["plan", "study.py"], ["study.py:NAME"]),
    "protocol that raises": (["plan", "./study.py:raises"], ["ValueError: first line second line"]),
    "protocol that returns nothing": (["plan", "./study.py:nothing"], ["returned None, not a Protocol"]),
    "unknown option": (["plan", TINY, "--sotre", "x"], ["--sotre"]),
    "option without value": (["plan", TINY, "--set"], ["--set"]),
    "superfluous argument": (["plan", TINY, "extra"], ["extra"]),
    "unknown source": (["plan", TINY, *settings("source=shufle")], ["unknown source 'shufle'", "'shuffle'"]),
    "sources that do not join": (["plan", TINY, *settings("source=all+init")], ["'all' and 'all-...' stand alone"]),
    "source of no cell": (["plan", TINY, "--only", "source=dropout"], ["no cell", "'dropout'", "init, none, onebit"]),
    "unknown key": (["plan", TINY, "--only", "sources=init"], ["--only", "did you mean 'source'"]),
    "unknown architecture": (["plan", TINY, *settings("architecture=resnet")], ["unknown architecture", "'resnet6'"]),
    "architecture that does not fit": (["plan", TINY, *settings("architecture=./net.py:net")], ["net.py:net", "8x8"]),
    "architecture that is none": (["plan", TINY, *settings("architecture=./net.py:number")], ["not a function"]),
    "unknown dataset": (["plan", TINY, *settings("dataset=minst")], ["unknown dataset 'minst'", "'mnist'"]),
    "unknown trainer": (["plan", TINY, *settings("trainer=pytorch")], ["unknown trainer 'pytorch'", "'torch'"]),
    "unknown kind of list": (["list", "source"], ["'source'", "did you mean 'sources'"]),
    "unknown field": (["plan", TINY, *settings("recipe.epoch=1")], ["unknown field", "'recipe.epochs'"]),
    # What is set
    "negative epochs": (["run", TINY, *settings("recipe.epochs=-3")], ["recipe.epochs must be at least 1, not -3"]),
    "wrong type": (["plan", TINY, *settings("recipe.batch_size=many")], ["must be a whole number, not 'many'"]),
    "wrong truth": (["plan", TINY, *settings("recipe.flip=yes")], ["must be true or false or none, not 'yes'"]),
    "no number": (["plan", TINY, *settings("recipe.learning_rate=nan")], ["recipe.learning_rate", "finite"]),
    "malformed setting": (["plan", TINY, *settings("replicates")], ["'replicates' is not of the form name=value"]),
    "set twice": (["plan", TINY, *settings("replicates=2", "replicates=3")], ["'replicates' twice"]),
    "no replicates": (["plan", TINY, *settings("replicates=0")], ["replicates must be at least 1"]),
    "unknown library kind": (["plan", TINY, *settings("library=cudnn")], ["library kind 'cudnn'", "native"]),
    "unknown element type": (["plan", TINY, *settings("recipe.dtype=float16")], ["recipe.dtype", "float32"]),
    "more workers than threads": (
        ["plan", TINY, *settings("recipe.async_workers=100000")],
        ["recipe.async_workers must be at most 256, not 100000"],
    ),
    "a change that no cell makes": (
        ["plan", TINY, *settings("source=init", "perturb.step=3")],
        ["perturb.step=3 has no effect", "source=onebit"],
    ),
    "a race that no cell runs": (["plan", TINY, *settings("asynchrony=real")], ["asynchrony=real", "source=async"]),
    "a barrier to nothing": (["plan", TINY, *settings("source=init", "keep=barrier")], ["keep=barrier", "onebit"]),
    "noise of one ulp": (["plan", TINY, *settings("perturb.scale=0.1")], ["perturb.scale", "kind=gaussian"]),
    "a design of nothing": (["plan", TINY, *settings("source=factorial:")], ["source=factorial:", "is missing"]),
    # What cannot be honoured
    **{
        f"zeros changed by {kind}": (
            ["plan", TINY, *settings("perturb.tensor=bn1.bias", *how)],
            ["onebit cannot vary at the start", "bn1.bias", "perturb.step"],
        )
        for kind, how in {
            "an ulp": (),
            "a share of ulps": ("perturb.fraction=0.5",),
            "noise": ("perturb.kind=gaussian", "perturb.fraction=1"),
        }.items()
    },
    "dropout without dropout": (
        ["plan", TINY, *settings("source=dropout", "architecture=resnet6")],
        ["source 'dropout' cannot vary", "resnet6"],
    ),
    "augment without crops": (
        ["plan", TINY, *settings("source=augment", "recipe.crop=0")],
        ["source 'augment' cannot vary"],
    ),
    "kernels of a CPU on a GPU": (
        ["plan", "quickstart", *settings("library=kernel"), "--gpus-per-run", "1"],
        ["library=kernel", "given a GPU", "SD is exactly 0"],
    ),
    "order inside a batch of one": (
        ["plan", "quickstart", *settings("recipe.batch_size=1")],
        ["library=order", "recipe.batch_size is 1"],
    ),
    "margin without end": (["plan", TINY, *settings("margin=inf")], ["margin must be a finite number above 1"]),
    "native without a GPU": (
        ["plan", "quickstart", *settings("library=native"), "--gpus-per-run", "0"],
        ["library=native", "no GPU", "SD is exactly 0"],
    ),
    "too many onebit replicates": (["plan", TINY, *settings("replicates=300")], ["300 replicates of onebit", "288"]),
    "too many kernels": (
        ["plan", TINY, *settings("source=library", "library=kernel", "replicates=9999")],
        ["9999 replicates of library=kernel", "kernel environments"],
    ),
    "more examples than there are": (["plan", TINY, *settings("dataset.train_size=5000")], ["train_size", "5000"]),
    "batch larger than the data": (
        ["plan", TINY, *settings("dataset.train_size=50")],
        ["recipe.batch_size is 64", "50 training examples"],
    ),
    # Data
    "data root without the dataset": (["run", TINY, *MNIST, "--data-root", "empty"], ["'mnist'", "empty"]),
    "no data root": (["run", TINY, *MNIST, "--data-root", "nowhere"], ["'mnist'", "nowhere"]),
    "truncated idx file": (["run", TINY, *MNIST, "--data-root", "truncated"], ["train-images-idx3-ubyte"]),
    "truncated gzip file": (["run", TINY, *MNIST, "--data-root", "cut"], ["train-images-idx3-ubyte.gz", "truncated"]),
    "wrong checksum": (["run", TINY, *MNIST, "--data-root", "altered"], ["train-images-idx3-ubyte.gz"]),
    "planned without the data": (["plan", TINY, *MNIST, "--data-root", "empty"], ["'mnist'", "empty"]),
    # Where and how
    "store that is a file": (["run", TINY, "--store", "a_file"], ["a_file", "not a folder"]),
    "store in a file": (["status", TINY, "--store", "a_file/results"], ["a_file", "not a folder"]),
    "store of a newer schema": (["run", TINY, "--store", "newer"], ["'newer'", "schema 99", "upgrade"]),
    "garbled store": (["report", TINY, "--store", "garbled"], ["'garbled'", "store.json"]),
    "folder that is no store": (["run", TINY, "--store", "photos"], ["'photos'", "holiday.jpg"]),
    "unwritable store": (["run", TINY, "--store", "/proc/results"], ["/proc/results"]),
    "unknown kind of store": (["status", TINY, "--store", "ftp://host/results"], ["ftp://"]),
    "page in a file": (["report", TINY, "--html", "a_file/page.html"], ["a_file/page.html"]),
    "negative GPUs": (["plan", TINY, "--gpus-per-run", "-1"], ["--gpus-per-run", "-1"]),
    "GPUs that are no number": (["plan", TINY, "--gpus-per-run", "nan"], ["--gpus-per-run", "finite"]),
    "no slots": (["run", TINY, "--max-concurrent", "0"], ["--max-concurrent", "0"]),
    "negative time": (["run", TINY, "--checkpoint-every", "-5"], ["--checkpoint-every", "-5"]),
    "half a retry": (["run", TINY, "--retries", "1.5"], ["--retries", "1.5"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_harms_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def no_launch(*arguments: object, **options: object) -> None:
        raise AssertionError("something was launched")

    monkeypatch.setattr("orchestrator.launch.sweep", no_launch)
    arguments, words = MISTAKES[name]
    before = snapshot(place)
    code = main(arguments)
    captured = capsys.readouterr()
    assert code == 2, captured
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    after = snapshot(place)
    if arguments[0] == "report":
        # A report's own files are not the store's.
        after = {path: digest for path, digest in after.items() if not path.startswith("results/report/")}
    assert after == before


def test_a_wrong_environment_variable_is_named(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("NOISEGRID_PROTOCOL", "quikstart"), ("NOISEGRID_GPUS_PER_RUN", "some")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert main(["plan"]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert value in line


def test_a_missing_framework_is_named_with_its_extra(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    before = snapshot(place)
    for verb in ("run", "check"):
        assert main([verb, TINY]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "needs torch" in line
        assert "noisegrid[torch]" in line
    assert snapshot(place) == before


def damage_by_cutting(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def damage_by_emptying(path: Path) -> None:
    path.write_bytes(b"")


def damage_by_changing_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_by_overwriting_with_another_record(path: Path) -> None:
    other = next(file for file in path.parent.iterdir() if file != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("verb", ["plan", "status", "report"])
@pytest.mark.parametrize(
    "damage",
    [
        damage_by_cutting,
        damage_by_emptying,
        damage_by_changing_a_byte,
        damage_by_overwriting_with_another_record,
    ],
)
def test_a_corrupt_record_is_named_and_its_run_counts_as_missing(
    place: Path, capsys: pytest.CaptureFixture[str], verb: str, damage: Callable[[Path], None]
) -> None:
    (id, *_) = sorted(open_store("results").finished())
    damage(place / "results" / "records" / f"{id}.parquet")
    before = snapshot(place / "results" / "records")
    code = main([verb, TINY])
    captured = capsys.readouterr()
    assert code == 2
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert id in line
    assert "6 runs planned, 3 done, 3 missing" in captured.out
    assert "onebit" in captured.out
    assert snapshot(place / "results" / "records") == before
    if verb != "report":
        assert main([verb, TINY, "--json"]) == 2
        values = json.loads(capsys.readouterr().out)
        assert (values["missing"], list(values["corrupt"])) == (3, [id])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "quickstrat"], "did you mean 'quickstart'"),
        (["run", TINY, "--set", "recipe.epochs=-1"], "recipe.epochs"),
        (["run", TINY, "--store", "newer"], "schema 99"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_the_program_itself_exits_with_2(place: Path, arguments: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "sweep.py"), *arguments], cwd=place, capture_output=True, text=True
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert done.stdout == ""


def test_a_deleted_working_directory_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd "{gone}" && rmdir "{gone}" && exec "{sys.executable}" "{ROOT / "sweep.py"}" plan {TINY}'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the working directory has been deleted; change to one that exists\n"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RAY_TMPDIR": "long"}, "Ray cannot start on this machine"),
        ({"RAY_ADDRESS": "127.0.0.1:1"}, "no Ray cluster answers at '127.0.0.1:1'"),
    ],
)
def test_a_ray_that_cannot_be_had_is_one_line(tmp_path: Path, variables: dict[str, str], words: str) -> None:
    if "RAY_TMPDIR" in variables:
        variables = {"RAY_TMPDIR": str(tmp_path / ("x" * 110))}
    done = subprocess.run(
        [sys.executable, str(ROOT / "sweep.py"), "run", TINY, "--store", str(tmp_path / "store")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **variables},
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {words}")
