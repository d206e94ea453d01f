"""Protocols by name, and what those that ship with the project say."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from protocols import PROTOCOLS, Cell, DatasetSpec, Protocol, Recipe, UserError, load_protocol
from protocols.small import HONEST
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
    # Asynchronous training is another training, and hardware is what several machines differ in.
    everything = {"none", "all", *SOURCES} - {"async", "hardware"}
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


FULL = [name for name in PROTOCOLS if f"{name}-small" in PROTOCOLS]


def counts(protocol: Protocol) -> Counter[str]:
    """How many cells vary each set of sources."""
    return Counter(cell.source for cell in protocol.cells)


@pytest.mark.parametrize("name", FULL)
def test_every_study_names_its_publication_and_its_deviations(name: str) -> None:
    for protocol in (load_protocol(name), load_protocol(f"{name}-small")):
        assert "arXiv" in protocol.reference
        assert protocol.deviations
        assert all(protocol.deviations)
        assert len(set(protocol.deviations)) == len(protocol.deviations)


@pytest.mark.parametrize("name", FULL)
def test_a_small_form_varies_the_same_sources_at_the_same_peak_rate_with_less_of_everything(name: str) -> None:
    full, small = load_protocol(name), load_protocol(f"{name}-small")
    assert small.name == f"{name}-small"
    assert set(counts(small)) == set(counts(full))
    assert small.library == "order"
    assert (HONEST in small.deviations) == (full.library == "native")
    assert small.replicates <= full.replicates
    assert any("replicates in place of" in text for text in small.deviations) == (small.replicates < full.replicates)
    rates = {cell.recipe.learning_rate for cell in full.cells}
    assert {cell.recipe.learning_rate for cell in small.cells} <= rates
    assert max(cell.recipe.epochs for cell in small.cells) <= 40
    for cell in small.cells:
        assert cell.replicates is None
        assert cell.dataset.train_size is not None and cell.dataset.train_size <= 2000
        assert cell.dataset.name == "ptb" or (cell.dataset.image_size or 99) <= 64
    assert any(str(small.cells[0].dataset) in text for text in small.deviations)
    assert any(f"recipe.epochs {small.cells[0].recipe.epochs} in place of" in text for text in small.deviations)


def test_a_small_form_says_what_it_leaves_out() -> None:
    instability = load_protocol("summers2021-instability-small")
    assert "cut down: without resnet14x8 on cifar10" in instability.deviations
    gone = {cell.architecture for cell in load_protocol("summers2021-instability").cells}
    assert gone - {cell.architecture for cell in instability.cells} == {"resnet14x8"}


def test_the_papers_studies_share_its_recipe() -> None:
    for name in ("table1", "onebit", "grid"):
        assert {cell.recipe for cell in load_protocol(f"summers2021-{name}").cells} == {Recipe()}
    shallow = {"linear", "hidden", "hiddenconv"}
    for cell in load_protocol("summers2021-instability").cells:
        assert cell.recipe == Recipe(learning_rate=0.04 if cell.architecture in shallow else 0.4)
    mnist = load_protocol("summers2021-mnist")
    assert {(cell.recipe.crop, cell.recipe.flip) for cell in mnist.cells} == {(0, False)}
    assert {cell.architecture for cell in mnist.cells} == {"mnistnet"}
    imagenet = load_protocol("summers2021-imagenet")
    assert {cell.replicates for cell in imagenet.cells} == {20}
    replication = [cell for cell in load_protocol("summers2021-architectures").cells if cell.replicates == 25]
    assert [(cell.source, cell.architecture, cell.dataset.name, cell.recipe.epochs) for cell in replication] == [
        (source, "resnet34", "cifar100", 200) for source in ("init", "shuffle", "onebit")
    ]


def test_one_bit_changes_the_first_layer_the_classifier_or_its_bias() -> None:
    protocol = load_protocol("summers2021-onebit")
    assert [(cell.source, cell.perturb.label, cell.replicates) for cell in protocol.cells] == [
        ("init", "", None),
        ("all", "", None),
        ("onebit", "", None),
        ("onebit", "tensor=last", None),
        ("onebit", "tensor=head.bias", 20),
    ]


def test_instability_goes_from_a_linear_model_over_depths_and_widths() -> None:
    protocol = load_protocol("summers2021-instability")
    assert set(counts(protocol).values()) == {13}
    names = {cell.architecture for cell in protocol.cells if cell.source == "onebit"}
    assert {"linear", "hidden", "hiddenconv", "resnet6", "resnet14x1_8", "resnet14x8", "resnet18"} <= names


def test_mitigations_are_held_against_the_base_recipe_which_comes_first() -> None:
    protocol = load_protocol("summers2021-mitigation")
    assert protocol.ensemble == 5
    assert set(counts(protocol)) == {"all"}
    recipes: dict[tuple[str, str], list[Recipe]] = defaultdict(list)
    for cell in protocol.cells:
        recipes[cell.architecture, cell.dataset.name].append(cell.recipe)
    assert len(recipes) == 9
    assert {dataset for _, dataset in recipes} == {"cifar10", "mnist", "imagenet"}
    for (_, dataset), (base, accelerated, *others) in recipes.items():
        plain = dataclasses.replace(base, views=(), ema_decay=0.0, swa_epochs=0)
        assert base.ema_decay and base.swa_epochs and base.cycles == 1
        assert accelerated == dataclasses.replace(plain, views=base.views, cycles=5)
        assert {field for other in others for field, value in vars(other).items() if value != vars(plain)[field]} == {
            "label_smoothing",
            "warmup_epochs",
            "learning_rate",
        }
        assert (
            base.views
            == {
                "cifar10": ("flip", "crop25", "crop81", "flip-crop25", "flip-crop81"),
                "mnist": ("crop9",),
                "imagenet": ("crop9", "flip-crop9"),
            }[dataset]
        )


def test_language_varies_dropout_on_text() -> None:
    protocol = load_protocol("summers2021-language")
    assert counts(protocol) == Counter(dict.fromkeys(("init", "shuffle", "dropout", "onebit", "all"), 2))
    assert {(cell.architecture, cell.dataset.name) for cell in protocol.cells} == {("lstm", "ptb"), ("qrnn", "ptb")}


def test_the_whole_is_the_union_of_its_studies() -> None:
    whole = load_protocol("summers2021")
    names = [name for name in FULL if name.startswith("summers2021-")]
    cells = {cell for name in names for cell in load_protocol(name).cells}
    assert len(names) == 9
    assert set(whole.cells) == cells
    assert len(whole.cells) == len(cells)
    for name in names:
        study = load_protocol(name)
        assert set(study.deviations) <= set(whole.deviations)
        assert (study.keep, study.library, study.controls) == (whole.keep, whole.library, whole.controls)


def test_morin_and_willetts_compare_two_arms_of_fifty() -> None:
    protocol = load_protocol("morin2020")
    assert [cell.source for cell in protocol.cells] == ["library", "init+shuffle+augment+library"]
    assert {(cell.architecture, cell.dataset.name, cell.trainer) for cell in protocol.cells} == {
        ("resnet50", "cifar10", "tensorflow")
    }
    assert (protocol.replicates, protocol.library, protocol.between_runs) == (50, "native", None)
    small = load_protocol("morin2020-small")
    assert small.keep == ("weights",)
    for cell in small.cells:
        assert (cell.trainer, cell.dataset.image_size) == ("tensorflow", 16)
        assert (cell.dataset.train_size or 0) <= 1000


def test_zhuang_et_al_compare_four_arms() -> None:
    protocol = load_protocol("zhuang2022")
    assert list(counts(protocol)) == ["init+shuffle+augment+library", "init+shuffle+augment", "library", "none"]
    # The control is an arm like the others.
    assert protocol.controls == protocol.replicates == 10


def test_the_butterfly_perturbs_at_several_times_and_keeps_what_they_lead_to() -> None:
    for name in ("butterfly", "butterfly-small"):
        protocol = load_protocol(name)
        assert set(counts(protocol)) == {"onebit"}
        assert set(protocol.keep) == {"weights", "barrier"}
        times = [(cell.perturb.epoch, cell.perturb.step) for cell in protocol.cells if cell.perturb.kind == "ulp"]
        assert len(times) == 7 and times == sorted(times)
        assert times[0] == (0, 0)
        assert times[-1][0] == protocol.cells[0].recipe.epochs // 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicates": 0}, "replicates must be at least 1, not 0"),
        ({"control_replicates": 1}, "control_replicates must be at least 2, not 1"),
        ({"cells": ()}, "no cells"),
        ({"base_seeds": ()}, "base_seeds"),
        ({"base_seeds": (3, 3)}, "twice"),
        ({"base_seeds": (-1,)}, "-1"),
        ({"base_seeds": (2**63,)}, "below 2"),
        ({"library": "cudnn"}, "unknown library kind 'cudnn'"),
        ({"measures": ("accuracy",)}, "unknown measure 'accuracy'"),
        ({"margin": 1.0}, "margin must be a finite number above 1"),
        ({"asynchrony": "wild"}, "unknown kind of asynchrony 'wild'"),
        ({"keep": ("weights", "weights")}, "keep names one thing twice"),
        ({"ensemble": 1}, "ensemble must be at least 2, not 1"),
        ({"isolation": "thread"}, "unknown isolation 'thread'"),
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
        ({"momentum": 1.0}, "recipe.momentum must be at least 0 and below 1, not 1.0"),
        ({"cycles": 5, "warmup_epochs": 100.0}, "recipe.warmup_epochs is 100, not shorter than a cycle of 100 epochs"),
        ({"cycles": 3}, "recipe.epochs must be a multiple of recipe.cycles"),
        ({"cycles": 5, "ema_decay": 0.9}, "set one kind"),
        ({"swa_epochs": 501}, "recipe.swa_epochs is 501, more than the 500 epochs trained"),
        ({"views": ("flip", "flip")}, "recipe.views names one view twice"),
        ({"views": ("flop",)}, "did you mean 'flip'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"dtype": "float16"}, "unknown recipe.dtype 'float16'"),
    ],
)
def test_a_recipe_refuses_values_out_of_range(values: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Recipe(**values)  # type: ignore[arg-type]


def test_a_cell_refuses_no_replicates() -> None:
    with pytest.raises(UserError, match="replicates of a cell must be at least 1, not 0"):
        Cell(source="init", architecture="dropnet", dataset=DatasetSpec(name="digits"), trainer="torch", replicates=0)


@pytest.mark.parametrize("source", ["", "inti", "init+init", "init+all", "none+init", "init,shuffle"])
def test_a_cell_refuses_sources_that_do_not_exist_or_do_not_join(source: str) -> None:
    with pytest.raises(UserError, match="source"):
        Cell(source=source, architecture="dropnet", dataset=DatasetSpec(name="digits"), trainer="torch")
