"""Who imports whom, and what works in an installation that has nothing but the base."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.plan import expand
from orchestrator.store import open_store
from protocols import load_protocol
from tests import factory

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocols", "trainers", "orchestrator")
EXTRAS = ("torch", "tensorflow", "keras", "ray", "sklearn", "matplotlib", "jinja2", "boto3", "botocore")

# Runs before anything else of the process: no extra is found, as if it were not installed.
BLOCKER = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {EXTRAS!r} else find(name, path, target)

PathFinder.find_spec = find_spec
"""


def modules(package: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path, ast.parse(path.read_text(), str(path))


def imported(tree: ast.AST, *, anywhere: bool) -> set[str]:
    """Top-level names of what a module imports: anywhere, or only when it is itself imported."""
    found = set()
    for node in walk(tree, anywhere):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add((node.module or "").partition(".")[0])
    return found


def walk(node: ast.AST, anywhere: bool) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if anywhere or not (inside or typing_only):
            yield from walk(child, anywhere)


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("protocols", {"protocols"}),
        ("trainers", {"trainers", "protocols"}),
        ("orchestrator", {"orchestrator", "protocols"}),
    ],
)
def test_packages_import_one_way(package: str, allowed: set[str]) -> None:
    found = list(modules(package))
    assert found
    for path, tree in found:
        others = imported(tree, anywhere=True) & {*PACKAGES, "tests", "sweep"}
        assert others <= allowed, f"{path.relative_to(ROOT)} imports {others - allowed}"


def test_extras_are_imported_where_they_belong() -> None:
    """At import time; inside functions they may be imported anywhere but in protocols."""
    homes = {
        "torch": ["trainers/torch"],
        "tensorflow": ["trainers/tensorflow"],
        "keras": ["trainers/tensorflow"],
        "ray": ["orchestrator/launch"],
        "matplotlib": ["orchestrator/report"],
        "jinja2": ["orchestrator/report"],
        "boto3": ["orchestrator/store/s3"],
        "botocore": ["orchestrator/store/s3"],
        "sklearn": [],
    }
    for package in PACKAGES:
        for path, tree in modules(package):
            place = path.relative_to(ROOT).as_posix()
            for extra in imported(tree, anywhere=package == "protocols") & set(homes):
                assert place.startswith(tuple(homes[extra])), f"{place} imports {extra}"


def test_frameworks_are_imported_by_their_trainers_only() -> None:
    for package in PACKAGES:
        for path, tree in modules(package):
            place = path.relative_to(ROOT).as_posix()
            for framework in imported(tree, anywhere=True) & {"torch", "tensorflow", "keras"}:
                home = "tensorflow" if framework == "keras" else framework
                assert place.startswith(f"trainers/{home}"), f"{place} imports {framework}"


def test_protocols_need_nothing_but_numpy() -> None:
    for path, tree in modules("protocols"):
        others = imported(tree, anywhere=True) - set(sys.stdlib_module_names)
        assert others <= {"protocols", "numpy"}, path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A working directory with a finished store and a Python that finds no extra."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKER)
    factory.fill(open_store(tmp_path / "results", create=True), expand(load_protocol("quickstart-tiny")))
    return tmp_path


def call(base: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{base / 'site'}:{ROOT}"}
    command = [sys.executable, str(ROOT / "sweep.py"), *arguments]
    return subprocess.run(command, cwd=base, env=environment, capture_output=True, text=True)


def test_the_blocker_blocks(base: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(base / "site")}
    for extra in EXTRAS:
        done = subprocess.run(
            [sys.executable, "-c", f"import {extra}"], env=environment, capture_output=True, text=True
        )
        assert f"No module named '{extra}'" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "quickstart"),
        ("plan", "quickstart", "--json"),
        ("plan", "summers2021-table1", "--gpus-per-run", "1"),
        ("status", "quickstart-tiny"),
        ("status", "quickstart-tiny", "--json"),
        ("report", "quickstart-tiny"),
        ("list",),
        ("list", "--json"),
        ("show", "quickstart"),
        ("--help",),
        ("run", "--help"),
    ],
)
def test_looking_works_in_the_base_install(base: Path, arguments: tuple[str, ...]) -> None:
    done = call(base, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    if "--json" in arguments:
        json.loads(done.stdout)


def test_the_base_report_has_all_but_the_page_and_names_its_extra(base: Path) -> None:
    done = call(base, "report", "quickstart-tiny")
    folder = base / "results" / "report"
    assert {"table.csv", "table.tex"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.glob("*.html"))
    (line,) = [line for line in done.stdout.splitlines() if "noisegrid[report]" in line]
    assert "HTML" in line
    asked = call(base, "report", "quickstart-tiny", "--html", "page.html")
    assert asked.returncode == 2
    (line,) = asked.stderr.splitlines()
    assert line.startswith("error: ")
    assert "noisegrid[report]" in line


def test_a_finished_study_is_run_in_the_base_install(base: Path) -> None:
    done = call(base, "run", "quickstart-tiny")
    assert done.returncode == 0, done.stderr
    assert "Nothing to train" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "quickstart-tiny", "--set", "replicates=3"), ["torch", "noisegrid[torch]"]),
        (("run", "quickstart", "--only", "trainer=tensorflow"), ["tensorflow", "noisegrid[tensorflow-cpu]"]),
        (("check", "quickstart-tiny"), ["torch", "noisegrid[torch]"]),
    ],
)
def test_what_training_needs_is_named(base: Path, arguments: tuple[str, ...], words: list[str]) -> None:
    done = call(base, *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def test_doctor_says_what_is_missing_in_the_base_install(base: Path) -> None:
    done = call(base, "doctor")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "noisegrid[torch]" in text
    assert "noisegrid[tensorflow-cpu]" in text


def test_listing_starts_without_the_libraries_of_analysis(base: Path) -> None:
    code = (
        "import sys; from orchestrator.cli import main; main(['list']); "
        "print(sorted({'pandas', 'scipy', 'ray', 'torch', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
