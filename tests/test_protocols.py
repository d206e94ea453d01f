"""Protocols by name, and what those that ship with the project say."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocols import PROTOCOLS, Cell, DatasetSpec, Protocol, Recipe, UserError, load_protocol
from protocols.sources import SOURCES

STUDY = """
from protocols import Protocol, Recipe, grid

NOT_A_FUNCTION = 3


def make():
    cells = grid(sources=("init",), architectures=("dropnet",), datasets=("digits",), trainers=("torch",))
    return Protocol(name="mine", summary="a study", cells=cells, replicates=2)


def returns_nothing():
    pass


def raises():
    return 1 / 0


def leaves():
    raise SystemExit(3)


def misspells():
    return grid(sources=("innit",), architectures=("dropnet",), datasets=("digits",), trainers=("torch",))


def needs_more(epochs):
    return make()
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a study of the user's own."""
    (tmp_path / "study.py").write_text(STUDY)
    (tmp_path / "broken.py").write_text("import no_such_library_here\n")
    (tmp_path / "lopsided.py").write_text("def make(:\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", PROTOCOLS)
def test_shipped_protocols_load_under_their_own_name(name: str) -> None:
    assert load_protocol(name).name == name


def test_a_protocol_is_found_by_file_and_by_module(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = study / "studies_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "first.py").write_text(STUDY)
    monkeypatch.syspath_prepend(str(study))
    by_file = load_protocol("./study.py:make")
    assert by_file.name == "mine"
    assert load_protocol("study.py:make") == by_file
    assert load_protocol(f"{study}/study.py:make") == by_file
    assert load_protocol("studies_of_mine.first:make") == by_file


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quickstrat", ["unknown protocol", "'quickstrat'", "did you mean 'quickstart'?"]),
        ("./missing.py:make", ["missing.py"]),
        ("no_such_package.study:make", ["no_such_package"]),
        ("./study.py:maek", ["'maek'", "did you mean 'make'?"]),
        ("./study.py", ["./study.py:NAME"]),
        ("./study.py:", ["./study.py:"]),
        ("./study.py:NOT_A_FUNCTION", ["a int", "not a function"]),
        ("./study.py:returns_nothing", ["returned None"]),
        ("./study.py:raises", ["ZeroDivisionError"]),
        ("./study.py:leaves", ["SystemExit"]),
        ("./study.py:misspells", ["'innit'", "did you mean 'init'?", "./study.py:misspells"]),
        ("./study.py:needs_more", ["TypeError", "epochs"]),
        ("./broken.py:make", ["no_such_library_here"]),
        ("./lopsided.py:make", ["SyntaxError"]),
        ("protocols.protocol:MEASURES", ["a tuple", "not a function"]),
    ],
)
def test_every_mistake_is_one_clear_error(study: Path, name: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_protocol(name)
    for word in words:
        assert word in str(caught.value)


def test_quickstart_varies_every_source_in_both_trainers_on_the_dropout_network() -> None:
    protocol = load_protocol("quickstart")
    everything = {"none", "all", *SOURCES}
    for trainer in ("torch", "tensorflow"):
        assert {cell.source for cell in protocol.cells if cell.trainer == trainer} == everything
    assert {cell.architecture for cell in protocol.cells} == {"dropnet"}
    assert {cell.dataset.name for cell in protocol.cells} == {"digits"}
    assert protocol.replicates >= 4
    assert protocol.library == "order"


def test_table1_is_the_papers_grid() -> None:
    protocol = load_protocol("summers2021-table1")
    assert [cell.source for cell in protocol.cells] == [
        "init",
        "shuffle",
        "augment",
        "library",
        "shuffle+library",
        "shuffle+augment+library",
        "all",
    ]
    assert (protocol.replicates, protocol.controls, protocol.library) == (100, 2, "native")
    assert {(cell.architecture, cell.dataset, cell.trainer) for cell in protocol.cells} == {
        ("resnet14", DatasetSpec(name="cifar10"), "torch")
    }
    (recipe,) = {cell.recipe for cell in protocol.cells}
    values = (recipe.epochs, recipe.batch_size, recipe.learning_rate, recipe.warmup_epochs, recipe.schedule)
    assert values == (500, 512, 0.4, 3.0, "cosine")
    assert (recipe.momentum, recipe.weight_decay, recipe.bias_lr_factor) == (0.9, 5e-4, 0.1)
    assert recipe.zero_gamma
    assert recipe.dtype == "float32"
    assert "2103.04514" in protocol.reference
    assert any("control" in text for text in protocol.deviations)
    assert any("MNIST" in text and "padding of 1" in text for text in protocol.deviations)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicates": 0}, "replicates must be at least 1, not 0"),
        ({"control_replicates": 1}, "control_replicates must be at least 2, not 1"),
        ({"cells": ()}, "no cells"),
        ({"base_seeds": ()}, "base_seeds"),
        ({"base_seeds": (3, 3)}, "twice"),
        ({"base_seeds": (-1,)}, "-1"),
        ({"library": "cudnn"}, "unknown library kind 'cudnn'"),
        ({"measures": ("accuracy",)}, "unknown measure 'accuracy'"),
        ({"margin": 1.0}, "margin must be a finite number above 1"),
    ],
)
def test_a_protocol_refuses_values_out_of_range(values: dict[str, object], words: str) -> None:
    cell = Cell(source="init", architecture="dropnet", dataset=DatasetSpec(name="digits"), trainer="torch")
    sound = {"name": "mine", "summary": "", "cells": (cell,), "replicates": 2}
    Protocol(**sound)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=words):
        Protocol(**{**sound, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"epochs": 0}, "recipe.epochs must be at least 1, not 0"),
        ({"batch_size": -5}, "recipe.batch_size must be at least 1"),
        ({"crop": -1}, "recipe.crop must be at least 0"),
        ({"learning_rate": float("nan")}, "recipe.learning_rate must be a finite number"),
        ({"weight_decay": -1e-4}, "recipe.weight_decay must be a finite number, at least 0"),
        ({"momentum": 1.0}, "recipe.momentum must be below 1"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"dtype": "float16"}, "unknown recipe.dtype 'float16'"),
    ],
)
def test_a_recipe_refuses_values_out_of_range(values: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Recipe(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["", "inti", "init+init", "init+all", "none+init", "init,shuffle"])
def test_a_cell_refuses_sources_that_do_not_exist_or_do_not_join(source: str) -> None:
    with pytest.raises(UserError, match="source"):
        Cell(source=source, architecture="dropnet", dataset=DatasetSpec(name="digits"), trainer="torch")
