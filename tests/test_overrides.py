"""Fields set and cells selected on the command line."""

from __future__ import annotations

import dataclasses

import pytest

from protocols import DatasetSpec, Protocol, Recipe, UserError, apply_settings, grid, load_protocol, select_cells


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
        text = str(field.default).lower()
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
