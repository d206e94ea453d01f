"""Fields set and cells selected on the command line."""

from __future__ import annotations

import dataclasses
import re

import pytest

from protocols import (
    DatasetSpec,
    Perturbation,
    Protocol,
    Recipe,
    UserError,
    apply_settings,
    grid,
    load_protocol,
    select_cells,
)


@pytest.fixture
def protocol() -> Protocol:
    """Two trainers, three sources."""
    cells = grid(
        sources=("init", "shuffle", "shuffle+library"),
        architectures=("dropnet",),
        datasets=("digits",),
        trainers=("torch", "tensorflow"),
    )
    return Protocol(name="mine", summary="", cells=cells, replicates=4)


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("replicates=10", "replicates", 10),
        ("control_replicates=3", "control_replicates", 3),
        ("control_replicates=none", "control_replicates", None),
        ("base_seeds=0,1,7", "base_seeds", (0, 1, 7)),
        ("base_seeds=5", "base_seeds", (5,)),
        ("library=kernel", "library", "kernel"),
        ("measures=accuracy_sd,disagreement", "measures", ("accuracy_sd", "disagreement")),
        ("margin=1.5", "margin", 1.5),
        (" margin = 2 ", "margin", 2.0),
        ("keep=weights,layers", "keep", ("weights", "layers")),
        ("keep=none", "keep", ()),
        ("ensemble=5", "ensemble", 5),
        ("isolation=process", "isolation", "process"),
        ("between_runs=nvidia-smi -rac, please", "between_runs", "nvidia-smi -rac, please"),
        ("between_runs=none", "between_runs", None),
    ],
)
def test_a_field_of_the_protocol_is_set(protocol: Protocol, setting: str, field: str, value: object) -> None:
    changed = apply_settings(protocol, [setting])
    assert getattr(changed, field) == value
    assert type(getattr(changed, field)) is type(value)
    assert changed.cells == protocol.cells


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("recipe.epochs=20", "epochs", 20),
        ("recipe.learning_rate=1e-2", "learning_rate", 0.01),
        ("recipe.flip=true", "flip", True),
        ("recipe.flip=False", "flip", False),
        ("recipe.flip=none", "flip", None),
        ("recipe.crop=2", "crop", 2),
        ("recipe.schedule=constant", "schedule", "constant"),
        ("recipe.dtype=float64", "dtype", "float64"),
        ("recipe.zero_gamma=false", "zero_gamma", False),
        ("recipe.views=flip+crop81", "views", ("flip", "crop81")),
        ("recipe.views=none", "views", ()),
        ("recipe.cycles=5", "cycles", 5),
        ("recipe.async_workers=4", "async_workers", 4),
    ],
)
def test_a_field_of_the_recipe_is_set_in_every_cell(
    protocol: Protocol, setting: str, field: str, value: object
) -> None:
    changed = apply_settings(protocol, [setting])
    assert [cell.recipe for cell in changed.cells] == [dataclasses.replace(Recipe(), **{field: value})] * 6
    assert [cell.source for cell in changed.cells] == [cell.source for cell in protocol.cells]


def test_every_field_of_the_recipe_can_be_set() -> None:
    protocol = load_protocol("quickstart")
    for field in dataclasses.fields(Recipe):
        text = str(field.default).lower() if field.default != () else "none"
        assert getattr(apply_settings(protocol, [f"recipe.{field.name}={text}"]).cells[0].recipe, field.name) == (
            field.default
        )


def test_the_dataset_and_its_sizes_are_set_in_either_order(protocol: Protocol) -> None:
    settings = ["dataset=mnist", "dataset.train_size=1000"]
    for order in (settings, settings[::-1]):
        assert {cell.dataset for cell in apply_settings(protocol, order).cells} == {
            DatasetSpec(name="mnist", train_size=1000)
        }


def test_several_values_multiply_the_cells_and_equal_cells_are_kept_once(protocol: Protocol) -> None:
    changed = apply_settings(protocol, ["architecture=resnet6,resnet14", "trainer=torch", "recipe.epochs=1,2"])
    keys = [(cell.architecture, cell.recipe.epochs, cell.source) for cell in changed.cells]
    assert len(keys) == len(set(keys)) == 2 * 2 * 3
    assert {cell.trainer for cell in changed.cells} == {"torch"}


def test_a_list_in_a_cell_is_joined_by_plus_signs_and_multiplied_by_commas(protocol: Protocol) -> None:
    changed = apply_settings(protocol, ["recipe.views=flip+crop25,crop9,none", "trainer=torch", "source=init"])
    assert [cell.recipe.views for cell in changed.cells] == [("flip", "crop25"), ("crop9",), ()]


def test_perturbations_multiply_the_cells(protocol: Protocol) -> None:
    settings = ["source=onebit", "trainer=torch", "perturb.step=10,100", "perturb.direction=up", "perturb.element=none"]
    assert [cell.perturb for cell in apply_settings(protocol, settings).cells] == [
        Perturbation(step=10, direction="up"),
        Perturbation(step=100, direction="up"),
    ]


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        (["perturb.step=10"], "onebit"),
        (["perturb.tensor=last", "perturb.kind=gaussian"], "onebit"),
        (["keep=weights,barrier"], "onebit"),
        (["asynchrony=real"], "async"),
    ],
)
def test_a_setting_of_a_source_that_no_cell_varies_is_refused(
    protocol: Protocol, settings: list[str], source: str
) -> None:
    with pytest.raises(UserError, match=f"^{settings[0].replace('weights,', '')} has no effect, .* varies {source} "):
        apply_settings(protocol, settings)
    useful = apply_settings(protocol, [*settings, f"source=init,init+{source}"])
    # What is selected of a study need not use all of it.
    assert {cell.source for cell in select_cells(useful, ["source=none"]).cells} == {"none"}
    (only,) = {cell.source for cell in apply_settings(useful, ["replicates=3"]).cells} - {"init"}
    assert only == f"init+{source}"


@pytest.mark.parametrize("text", ["factorial:", "all-but-one:", "factorial:init++shuffle"])
def test_a_design_names_its_sources(protocol: Protocol, text: str) -> None:
    with pytest.raises(UserError, match=f"source={re.escape(text)}: a source is missing"):
        apply_settings(protocol, [f"source={text}"])


def test_images_are_shrunk_and_texts_are_files(protocol: Protocol) -> None:
    (spec,) = {cell.dataset for cell in apply_settings(protocol, ["dataset=./b.txt", "dataset.train_size=9"]).cells}
    assert spec == DatasetSpec(name="./b.txt", train_size=9)
    (spec,) = {cell.dataset for cell in apply_settings(protocol, ["dataset.image_size=16"]).cells}
    assert spec == DatasetSpec(name="digits", image_size=16)


def test_fields_that_are_checked_together_are_set_together(protocol: Protocol) -> None:
    settings = ["recipe.swa_epochs=600", "recipe.epochs=1000"]
    for order in (settings, settings[::-1]):
        assert {cell.recipe.swa_epochs for cell in apply_settings(protocol, order).cells} == {600}


@pytest.mark.parametrize(
    ("setting", "sources"),
    [
        ("source=all-init", ["all-init"]),
        ("source=factorial:init+shuffle", ["none", "init", "shuffle", "init+shuffle"]),
        ("source=all-but-one:init+shuffle", ["all-init", "all-shuffle", "all"]),
        ("source=factorial:init,onebit", ["none", "init", "onebit"]),
    ],
)
def test_sources_are_set_by_design(protocol: Protocol, setting: str, sources: list[str]) -> None:
    changed = apply_settings(protocol, [setting, "trainer=torch"])
    assert [cell.source for cell in changed.cells] == sources


def test_replicates_hold_for_cells_with_replicates_of_their_own(protocol: Protocol) -> None:
    few = tuple(dataclasses.replace(cell, replicates=2) for cell in protocol.cells)
    assert apply_settings(dataclasses.replace(protocol, cells=few), ["replicates=9"]).cells == protocol.cells


def test_sources_can_be_set(protocol: Protocol) -> None:
    changed = apply_settings(protocol, ["source=onebit,all"])
    assert [(cell.source, cell.trainer) for cell in changed.cells] == [
        ("onebit", "torch"),
        ("all", "torch"),
        ("onebit", "tensorflow"),
        ("all", "tensorflow"),
    ]


def test_settings_are_declared_as_deviations_and_change_nothing_else(protocol: Protocol) -> None:
    assert apply_settings(protocol, []) == protocol
    assert any("replicates=9" in text for text in apply_settings(protocol, ["replicates=9"]).deviations)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("recipe.epoch=3", "unknown field 'recipe.epoch'; did you mean 'recipe.epochs'"),
        ("epochs=3", "did you mean 'recipe.epochs'"),
        ("replicate=3", "did you mean 'replicates'"),
        ("name=other", "unknown field 'name'"),
        ("cells=1", "unknown field 'cells'"),
        ("recipe=1", "unknown field 'recipe'"),
        ("recipe.epochs=ten", "recipe.epochs must be a whole number, not 'ten'"),
        ("recipe.epochs=2.5", "recipe.epochs must be a whole number, not '2.5'"),
        ("recipe.epochs=-1", "recipe.epochs must be at least 1, not -1"),
        ("recipe.learning_rate=fast", "recipe.learning_rate must be a number, not 'fast'"),
        ("recipe.learning_rate=nan", "recipe.learning_rate must be a finite number"),
        ("recipe.flip=1", "recipe.flip must be true or false or none, not '1'"),
        ("recipe.zero_gamma=none", "recipe.zero_gamma must be true or false, not 'none'"),
        ("recipe.crop=x", "recipe.crop must be a whole number or none, not 'x'"),
        ("replicates=1,2", "replicates must be a whole number, not '1,2'"),
        ("base_seeds=0,x", "base_seeds must be a whole number, not 'x'"),
        ("base_seeds=0,,1", "empty"),
        ("dataset.train_size=0", "dataset.train_size must be at least 1"),
        ("source=inti", "unknown source 'inti'; did you mean 'init'"),
        ("library=cudnn", "unknown library kind 'cudnn'"),
        ("source=factorial:init+inti", "unknown source 'inti'; did you mean 'init'"),
        ("source=all-inti", "unknown source to leave out of all 'inti'; did you mean 'init'"),
        ("recipe.views=flip+", "between the plus signs is empty"),
        ("recipe.views=flop", "unknown recipe.views 'flop'; did you mean 'flip'"),
        ("perturb.steps=3", "did you mean 'perturb.step'"),
        ("perturb.step=-3", "perturb.step must be at least 0, not -3"),
        ("perturb.kind=noise", "unknown perturb.kind 'noise'; valid: gaussian, ulp"),
        ("keep=weight", "unknown thing to keep 'weight'; did you mean 'weights'"),
        ("ensemble=1", "ensemble must be at least 2, not 1"),
        ("asynchrony=reel", "unknown kind of asynchrony 'reel'; did you mean 'real'"),
        ("isolation=none", "unknown isolation 'none'"),
        ("reference=me", "unknown field 'reference'"),
        ("replicates", "not of the form name=value"),
        ("replicates=", "not of the form name=value"),
        ("=3", "not of the form name=value"),
    ],
)
def test_a_wrong_setting_says_what_would_be_right(protocol: Protocol, setting: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        apply_settings(protocol, [setting])
    assert words in str(caught.value)


def test_a_field_cannot_be_set_twice(protocol: Protocol) -> None:
    with pytest.raises(UserError, match="twice"):
        apply_settings(protocol, ["replicates=2", "replicates=3"])


def _cells(protocol: Protocol, *selections: str) -> list[tuple[str, str]]:
    return [(cell.source, cell.trainer) for cell in select_cells(protocol, selections).cells]


def test_cells_are_selected(protocol: Protocol) -> None:
    assert select_cells(protocol, []) == protocol
    assert _cells(protocol, "source=init") == [("init", "torch"), ("init", "tensorflow")]
    assert _cells(protocol, "source=init,shuffle", "trainer=torch") == [("init", "torch"), ("shuffle", "torch")]


def test_sets_of_sources_are_compared_regardless_of_order(protocol: Protocol) -> None:
    assert _cells(protocol, "source=library+shuffle", "trainer=torch") == [("shuffle+library", "torch")]


def test_cells_are_selected_by_any_field(protocol: Protocol) -> None:
    changed = apply_settings(protocol, ["trainer=torch", "recipe.cycles=1,5", "recipe.views=none,flip+crop25"])
    assert len(select_cells(changed, ["recipe.cycles=5"]).cells) == 2 * 3
    (recipe,) = {cell.recipe for cell in select_cells(changed, ["recipe.cycles=5", "recipe.views=flip+crop25"]).cells}
    assert (recipe.cycles, recipe.views) == (5, ("flip", "crop25"))
    assert len(select_cells(changed, ["recipe.learning_rate=4e-1"]).cells) == 4 * 3


def test_the_control_can_be_selected_although_no_cell_names_it(protocol: Protocol) -> None:
    assert _cells(protocol, "source=none") == [("none", "torch"), ("none", "tensorflow")]


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ("source=dropout", "protocol mine has source 'dropout'; it has init, library+shuffle, none, shuffle"),
        ("source=inti", "unknown source 'inti'; did you mean 'init'"),
        ("architecture=resnet6", "no cell of protocol mine has architecture 'resnet6'; it has dropnet"),
        ("dataset=mnist", "no cell of protocol mine has dataset 'mnist'; it has digits"),
        ("trainer=jax", "no cell of protocol mine has trainer 'jax'; it has tensorflow, torch"),
        ("architectures=dropnet", "did you mean 'architecture'"),
        ("source", "not of the form"),
        ("source=init,", "empty"),
        ("recipe.cycles=5", "no cell of protocol mine has recipe.cycles '5'; it has 1"),
        ("recipe.cycles=many", "recipe.cycles must be a whole number"),
    ],
)
def test_a_wrong_selection_says_what_the_protocol_has(protocol: Protocol, selection: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        select_cells(protocol, [selection])
    assert words in str(caught.value)


def test_a_selection_that_leaves_nothing_is_an_error(protocol: Protocol) -> None:
    lopsided = dataclasses.replace(protocol, cells=(protocol.cells[0], protocol.cells[4]))
    with pytest.raises(UserError, match="no cell of protocol mine has all of"):
        select_cells(lopsided, ["source=shuffle", "trainer=torch"])
