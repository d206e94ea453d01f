"""Test-time augmentation and cosine cycles: which views, how many, and where a cycle ends."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from protocols.contract import PLAIN, View
from protocols.errors import UserError
from protocols.recipe import VIEWS, Recipe
from trainers.schedule import learning_rates
from trainers.views import averaged, views

COUNTS = {"flip": 2, "crop25": 26, "crop81": 82, "flip-crop25": 51, "flip-crop81": 163, "crop9": 9, "flip-crop9": 18}


def test_every_name_has_as_many_views_as_published() -> None:
    assert {name: len(views(name)) for name in VIEWS} == COUNTS
    assert {name: f" {count} views" in VIEWS[name] for name, count in COUNTS.items()} == dict.fromkeys(COUNTS, True)


@pytest.mark.parametrize(("name", "step"), [("crop25", 2), ("crop81", 1), ("flip-crop25", 2), ("flip-crop81", 1)])
def test_crops_are_a_grid_within_4_pixels_and_the_image_itself_counts_twice(name: str, step: int) -> None:
    found = Counter(views(name))
    flips = {False, True} if name.startswith("flip") else {False}
    shifts = range(-4, 5, step)
    assert set(found) == {View(row, column, flip) for row in shifts for column in shifts for flip in flips}
    assert found.pop(PLAIN) == 2 and set(found.values()) == {1}


@pytest.mark.parametrize(("photographs", "shifts"), [(False, (-1, 0, 1)), (True, (-16, 0, 16))])
def test_nine_crops_hold_the_image_itself_once(photographs: bool, shifts: tuple[int, ...]) -> None:
    expected = Counter(View(row, column, False) for row in shifts for column in shifts)
    assert Counter(views("crop9", photographs=photographs)) == expected
    mirrored = Counter({view._replace(flip=True): 1 for view in expected})
    assert Counter(views("flip-crop9", photographs=photographs)) == expected + mirrored


def test_flip_is_the_image_and_its_mirror_image() -> None:
    assert views("flip") == [PLAIN, View(0, 0, True)]


def test_means_are_over_all_views_and_a_shared_view_is_computed_once() -> None:
    looked: list[View] = []

    def logits(view: View) -> np.ndarray:
        looked.append(view)
        plain = 51 * (view == PLAIN)
        return np.full((2, 3), view.row + 10 * view.column + 100 * view.flip + plain, np.float32)

    found = averaged(logits, ["flip", "crop25", "flip-crop25"])
    assert len(looked) == len(set(looked)) == 50
    assert {name: passes for name, (_, passes) in found.items()} == {"flip": 2, "crop25": 26, "flip-crop25": 51}
    assert found["flip"][0].tolist() == [[(51 + 100) / 2] * 3] * 2
    assert np.allclose(found["crop25"][0], 2 * 51 / 26), "shifts cancel, and the image itself counts twice"
    assert np.allclose(found["flip-crop25"][0], (100 * 25 + 2 * 51) / 51)


@pytest.mark.parametrize(("epochs", "cycles", "steps"), [(500, 5, 98), (10, 2, 7), (6, 3, 50)])
def test_each_cycle_ends_at_a_rate_of_nearly_nothing(epochs: int, cycles: int, steps: int) -> None:
    recipe = Recipe(epochs=epochs, cycles=cycles, warmup_epochs=1.0)
    rates = np.array([learning_rates(recipe, epoch, steps) for epoch in range(epochs)])
    length = epochs // cycles
    assert (rates.reshape(cycles, -1) == rates[:length].reshape(-1)).all(), "every cycle is the same"
    assert (rates[::length, 0] == 0).all(), "each begins with a warm-up of its own"
    last = rates[length - 1 :: length, -1]
    bound = recipe.learning_rate * (np.pi / (length * steps)) ** 2 / 4
    assert (last <= bound).all() and (last > 0.9 * bound).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"epochs": 10, "cycles": 3}, "multiple of recipe.cycles"),
        ({"epochs": 15, "cycles": 5}, "not shorter than a cycle of 3 epochs"),
        ({"cycles": 5, "ema_decay": 0.9}, "set one kind"),
        ({"views": ("flips",)}, "did you mean 'flip'"),
        ({"views": ("flip", "flip")}, "twice"),
        ({"epochs": 5, "swa_epochs": 6}, "more than the 5 epochs"),
        ({"label_smoothing": 1.0}, "below 1"),
        ({"async_workers": 0}, "at least 1"),
    ],
)
def test_a_senseless_recipe_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Recipe(**fields)  # type: ignore[arg-type]
