"""Run ids, seeds, streams and digests: pure functions of what they are for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import DatasetSpec, Recipe, Run, UserError, run_from_specification, streams
from protocols.digest import digest, tensor_digest, tensor_digests
from protocols.perturbation import Perturbation
from protocols.sources import SOURCES
from tests.runs import make_run
from trainers.architectures.dropnet import dropnet
from trainers.initial import initial_weights, perturb
from trainers.network import trace

ROOT = Path(__file__).parents[1]
NAMES = sorted(SOURCES)
SETS = [names for size in range(len(NAMES) + 1) for names in itertools.combinations(NAMES, size)]

RUN = Run(
    varies=("init", "library"),
    library="order",
    architecture="net:resnet14",
    dataset=DatasetSpec(name="mnist", train_size=1000),
    dataset_fingerprint="f" * 64,
    trainer="torch",
    numerics=1,
    recipe=Recipe(),
    base_seed=7,
    replicate=3,
)

# If one of these changes, every stored record is orphaned: only a new specification version may do that.
GOLDEN_ID = "e606b8d8971749cbfbefb56464273646445f55fcf451b616c834f851089410c7"
GOLDEN_GROUP = "7a3847c4c3af0596"
GOLDEN_NUMBERS = {
    "order": "50204db5ad3307d2",
    "permutation": "b54f6c72da714908",
    "crops": "1f2550d4cad137d7",
    "dropout": "1a84b9ddd4b9faec",
    "normal": "69ab47c9a514616e",
    "uniform": "091c3a0f41c651fd",
    "onebit": "f36587e54f0aa37f",
    "service times": "ef03f06d0d592987",
}


def numbers(run: Run) -> dict[str, str]:
    """A digest of what each stream gives for one purpose."""
    tensor = streams.initial_normal(run, "conv1.weight", (4, 3, 3, 3), 0.1).astype(np.float32)
    library = dataclasses.replace(run, varies=("library",), library="order")
    augmented = dataclasses.replace(run, recipe=Recipe(crop=4, flip=True))
    permutation = streams.batch_permutation(library, 2, 1000)
    assert permutation is not None
    drawn = {
        "order": streams.epoch_order(run, 2, 1000),
        "permutation": permutation,
        "crops": np.stack(streams.crops_and_flips(augmented, 2, 1000)),
        "dropout": streams.dropout_keep(run, 5, "dropout", (8, 16), 0.25),
        "normal": tensor,
        "uniform": streams.initial_uniform(run, "head.bias", (10,), 0.3),
        "onebit": streams.perturbed(dataclasses.replace(run, perturb=Perturbation()), tensor)[0],
        "service times": streams.service_times(run, 2, 50),
    }
    return {name: tensor_digest(name, np.asarray(value))[:16] for name, value in drawn.items()}


def test_ids_and_groups_are_what_they_always_were() -> None:
    assert RUN.id == GOLDEN_ID
    assert RUN.group == GOLDEN_GROUP


def test_streams_give_what_they_always_gave() -> None:
    assert numbers(RUN) == GOLDEN_NUMBERS


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_ids_and_streams_are_the_same_in_any_process(hash_seed: str) -> None:
    code = "from tests.test_streams import RUN, numbers; import json; print(json.dumps([RUN.id, numbers(RUN)]))"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout) == [RUN.id, numbers(RUN)]


def test_a_run_survives_its_specification() -> None:
    run = dataclasses.replace(RUN, code=(("./net.py", "abc"),))
    again = run_from_specification(run.specification)
    assert again == run
    assert again.id == run.id
    assert json.loads(run.specification)["replicate"] == 3


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 99}', '{"version": 1, "varies": []}', "null"])
def test_what_is_no_specification_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        run_from_specification(text)


def test_every_field_enters_the_id_and_all_but_the_source_and_replicate_the_group() -> None:
    changes: dict[str, object] = {
        "varies": ("init",),
        "library": "kernel",
        "asynchrony": "real",
        "perturb": Perturbation(step=3),
        "keep": ("weights",),
        "architecture": "net:resnet6",
        "dataset": DatasetSpec(name="mnist", train_size=1001),
        "dataset_fingerprint": "e" * 64,
        "trainer": "tensorflow",
        "numerics": 2,
        "recipe": Recipe(epochs=1),
        "base_seed": 8,
        "replicate": 4,
        "code": (("net", "1"),),
    }
    assert set(changes) == {field.name for field in dataclasses.fields(Run)}
    changed = {name: dataclasses.replace(RUN, **{name: value}) for name, value in changes.items()}  # type: ignore[arg-type]
    assert len({RUN.id, *(run.id for run in changed.values())}) == len(changes) + 1
    shared = {name for name, run in changed.items() if run.group == RUN.group}
    assert shared == {"varies", "library", "asynchrony", "perturb", "replicate"}


def test_every_field_of_the_recipe_enters_the_id() -> None:
    changes = {"schedule": "constant", "dtype": "float64", "zero_gamma": False, "flip": True, "momentum": 0.5}
    changes |= {"label_smoothing": 0.5, "ema_decay": 0.5, "views": ("flip",), "cycles": 2}
    for field in dataclasses.fields(Recipe):
        value = changes.get(field.name, 7)
        recipe = dataclasses.replace(Recipe(), **{field.name: value})  # type: ignore[arg-type]
        assert dataclasses.replace(RUN, recipe=recipe).id != RUN.id, field.name


def test_seeds_never_coincide_unless_the_source_is_held() -> None:
    """No varied seed is the control's, another replicate's, another source's or another cell's.

    onebit has one seed, its replicates are entries of one permutation, and it changes no other source's; hardware has
    none.
    """
    keys = [
        streams.seed_key(make_run(varies=names, replicate=replicate), source)
        for names in SETS
        if not {"onebit", "hardware"} & set(names)
        for replicate in range(5)
        for source in names
    ]
    assert len(keys) == len(set(keys))
    held = {streams.seed_key(make_run(), source) for source in NAMES}
    assert len(held) == len(NAMES)
    assert not held & set(keys)
    one = {streams.seed_key(make_run(varies=("onebit",), replicate=replicate), "onebit") for replicate in range(5)}
    assert one == {streams.seed_key(make_run(), "onebit")}


def test_hardware_has_no_seed_and_moves_no_other() -> None:
    for source in NAMES:
        plain, elsewhere = make_run(varies=("init",), replicate=2), make_run(varies=("hardware", "init"), replicate=2)
        assert streams.seed_key(plain, source) == streams.seed_key(elsewhere, source)


@settings(deadline=None)
@given(st.data())
def test_a_held_source_has_the_controls_seed(data: st.DataObject) -> None:
    names = data.draw(st.sampled_from(SETS))
    replicate = data.draw(st.integers(0, 10_000))
    run = make_run(varies=names, replicate=replicate)
    for source in set(NAMES) - set(names):
        assert streams.seed_key(run, source) == streams.seed_key(make_run(), source)


def test_generators_of_different_purposes_differ() -> None:
    """Also where the numbers of one purpose, strung together, are those of another."""
    runs = [make_run(), make_run(varies=("init",)), make_run(varies=("init", "shuffle")), make_run(base_seed=1)]
    purposes: list[tuple[int | str, ...]] = [(), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), ("a",), ("b",), (0, "a")]
    first = [
        int(streams.generator(run, "init", *purpose).bit_generator.random_raw()) for run in runs for purpose in purposes
    ]
    assert len(set(first)) == len(first)


def test_orders_are_permutations_that_only_shuffle_and_epoch_change() -> None:
    control = streams.epoch_order(make_run(), 0, 200)
    assert sorted(control) == list(range(200))
    for name in set(NAMES) - {"shuffle"}:
        assert (streams.epoch_order(make_run(varies=(name,), replicate=2), 0, 200) == control).all()
    assert (streams.epoch_order(make_run(varies=("shuffle",)), 0, 200) != control).any()
    assert (streams.epoch_order(make_run(), 1, 200) != control).any()


def test_library_order_permutes_inside_batches_only() -> None:
    run = make_run(varies=("library",), batch_size=64)
    permutation = streams.batch_permutation(run, 0, 200)
    assert permutation is not None
    assert (permutation != np.arange(200)).any()
    for start in range(0, 200, 64):
        batch = permutation[start : start + 64]
        assert sorted(batch) == list(range(start, min(start + 64, 200)))
    assert streams.batch_permutation(make_run(), 0, 200) is None
    assert streams.batch_permutation(make_run(varies=("library",), library="kernel"), 0, 200) is None


def test_a_crop_depends_on_seed_epoch_and_sample_alone() -> None:
    """Neither how many samples there are, nor batch size, order or any other source changes it."""
    run = make_run(crop=4, flip=True)
    full = np.stack(streams.crops_and_flips(run, 3, 1000))
    for other in (
        make_run(crop=4, flip=True, batch_size=7, epochs=90),
        make_run(crop=4, flip=True, varies=("shuffle", "init", "library", "dropout"), replicate=5),
        make_run("tensorflow", crop=4, flip=True),
    ):
        assert (np.stack(streams.crops_and_flips(other, 3, 400)) == full[:, :400]).all()
    assert (np.stack(streams.crops_and_flips(run, 4, 1000)) != full).any()
    varied = make_run(crop=4, flip=True, varies=("augment",))
    assert (np.stack(streams.crops_and_flips(varied, 3, 1000)) != full).any()


def test_crops_and_flips_are_uniform_and_independent() -> None:
    rows, columns, flips = streams.crops_and_flips(make_run(crop=4, flip=True), 0, 90_000)
    for offsets in (rows, columns):
        counts = np.bincount(offsets, minlength=9)
        assert len(counts) == 9
        assert np.abs(counts - 10_000).max() < 500
    assert abs(flips.mean() - 0.5) < 0.01
    assert np.abs(np.corrcoef([rows, columns, flips]) - np.eye(3)).max() < 0.02
    rows, columns, flips = streams.crops_and_flips(make_run(crop=0, flip=False), 0, 50)
    assert not rows.any() and not columns.any() and not flips.any()


def test_dropout_depends_on_seed_step_and_layer_alone() -> None:
    def keep(run: Run, step: int = 3, layer: str = "dropout") -> bytes:
        return streams.dropout_keep(run, step, layer, (64, 32), 0.25).tobytes()

    control = keep(make_run())
    assert keep(make_run(varies=("init", "shuffle", "augment", "library", "onebit"), replicate=4)) == control
    assert keep(make_run("tensorflow", epochs=9)) == control
    others = [keep(make_run(varies=("dropout",))), keep(make_run(), step=4), keep(make_run(), layer="other")]
    assert len({control, *others}) == 4
    share = streams.dropout_keep(make_run(), 0, "dropout", (1000, 100), 0.25).mean()
    assert abs(share - 0.75) < 0.01


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    def weights(run: Run, name: str = "conv1.weight") -> bytes:
        return streams.initial_normal(run, name, (8, 3), 1.0).tobytes()

    control = weights(make_run())
    assert weights(make_run("tensorflow", varies=("shuffle", "onebit"), replicate=2, architecture="resnet6")) == control
    varied = [weights(make_run(varies=("init",), replicate=replicate)) for replicate in range(3)]
    assert len({control, weights(make_run(), "conv2.weight"), *varied}) == 5


def perturbed(tensor: np.ndarray, replicate: int = 0, **how: Any) -> tuple[np.ndarray, dict[str, Any]]:
    run = make_run(varies=("onebit",), replicate=replicate, perturb=Perturbation(**how))
    return streams.perturbed(run, tensor)


TENSOR = np.array([[0.5, 0.0, -1e-3], [3.0, -0.0, 1e-30]], np.float32)


@pytest.mark.parametrize(("direction", "choices"), [("either", 8), ("up", 4), ("down", 4)])
def test_onebit_changes_one_nonzero_element_by_one_ulp_and_never_the_same_twice(direction: str, choices: int) -> None:
    assert streams.onebit_choices(Perturbation(direction=direction), TENSOR) == choices
    seen = set()
    for replicate in range(choices):
        changed, change = perturbed(TENSOR, replicate, direction=direction)
        (index,) = np.flatnonzero(changed.view(np.int32) != TENSOR.view(np.int32))
        before, after = TENSOR.flat[index], changed.flat[index]
        assert before != 0
        assert abs(int(after.view(np.int32)) - int(before.view(np.int32))) == 1
        assert direction == "either" or (after > before) == (direction == "up")
        assert change == {"elements": 1, "index": index, "before": before, "after": after}
        seen.add((int(index), float(after)))
    assert len(seen) == choices
    with pytest.raises(ValueError, match=f"admits {choices} changes"):
        perturbed(TENSOR, choices, direction=direction)


def test_the_element_can_be_named() -> None:
    assert streams.onebit_choices(Perturbation(element=3), TENSOR) == 2
    changes = [perturbed(TENSOR, replicate, element=3)[1] for replicate in range(2)]
    assert {change["index"] for change in changes} == {3}
    assert {change["after"] for change in changes} == {
        float(np.nextafter(np.float32(3), np.float32(end))) for end in (0, 9)
    }


def test_a_share_of_a_tensor_moves_by_one_ulp_each() -> None:
    tensor = np.random.default_rng(0).standard_normal((20, 50)).astype(np.float32)
    one, change = perturbed(tensor, 0, fraction=0.3)
    moved = np.abs(one.view(np.int32).astype(np.int64) - tensor.view(np.int32)).ravel()
    assert moved.max() == 1 and moved.sum() == change["elements"] == 300
    assert 0.4 < ((one > tensor).sum() / 300) < 0.6, "up and down alike"
    assert (perturbed(tensor, 1, fraction=0.3)[0] != one).any(), "drawn by replicate"
    assert (perturbed(tensor, 0, fraction=0.3)[0] == one).all()
    assert streams.onebit_choices(Perturbation(fraction=0.3), tensor) is None


def test_noise_has_the_spread_it_was_given() -> None:
    tensor = 5 * np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    noisy, change = perturbed(tensor, 0, kind="gaussian", fraction=1.0, scale=0.01)
    assert change["elements"] == 100_000
    assert (noisy - tensor).std() == pytest.approx(0.05, rel=0.02)
    one, change = perturbed(tensor, 3, kind="gaussian", scale=0.01)
    assert change["elements"] == 1 == np.count_nonzero(one != tensor)
    assert np.flatnonzero(one != tensor)[0] == change["index"]


@pytest.mark.parametrize("how", [{}, {"fraction": 0.5}, {"direction": "up"}, {"kind": "gaussian", "fraction": 1.0}])
def test_zeros_cannot_be_changed_and_say_so(how: dict[str, Any]) -> None:
    assert not streams.nothing_to_change(Perturbation(**how), TENSOR)
    with pytest.raises(ValueError, match="no element that is not 0|their SD, which is 0"):
        perturbed(np.zeros(4, np.float32), **how)


def test_equal_elements_move_by_one_ulp_but_have_no_noise() -> None:
    ones = np.ones(4, np.float32)
    assert np.count_nonzero(perturbed(ones)[0] != ones) == 1
    with pytest.raises(ValueError, match="SD, which is 0"):
        perturbed(ones, kind="gaussian")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"step": -1}, "perturb.step must be at least 0"),
        ({"direction": "upp"}, "did you mean 'up'"),
        ({"kind": "bit"}, "perturb.kind"),
        ({"scale": 0.0}, "perturb.scale must be a finite number above 0"),
        ({"fraction": 1.5}, "between 0 and 1"),
        ({"fraction": 0.5, "element": 1}, "set one of the two"),
        ({"kind": "gaussian", "direction": "up"}, "noise .* has none"),
        ({"scale": 0.01}, "perturb.scale is of noise"),
    ],
)
def test_a_senseless_perturbation_is_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Perturbation(**how)


def test_holding_a_source_gives_the_run_to_compare_with() -> None:
    assert make_run(varies=("onebit",), replicate=3).without("onebit") == make_run()
    joint = make_run(varies=("init", "onebit"), replicate=3).without("onebit")
    assert (joint.varies, joint.replicate) == (("init",), 3)
    assert make_run(varies=("library", "onebit"), replicate=2).without("library").library == "held"


def test_a_digest_sees_every_bit_name_shape_and_type_but_not_memory_order() -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32(1).reshape(())}
    reference = digest(tensors)
    assert digest(dict(reversed(tensors.items()))) == reference
    assert digest({**tensors, "a": np.asfortranarray(tensors["a"])}) == reference
    assert digest({**tensors, "a": tensors["a"].astype(">f4")}) == reference
    bit = tensors["a"].copy()
    bit[1, 2] = np.nextafter(bit[1, 2], np.float32(9))
    others = [
        {**tensors, "a": bit},
        {**tensors, "a": tensors["a"].reshape(3, 2)},
        {**tensors, "a": tensors["a"].astype(np.float64)},
        {"c": tensors["a"], "b": tensors["b"]},
        {"a": tensors["a"]},
        {**tensors, "a": np.where(tensors["a"] == 0, -tensors["a"], tensors["a"])},
    ]
    assert len({reference, *(digest(other) for other in others)}) == len(others) + 1
    assert list(tensor_digests({"b": bit, "a": bit})) == ["a", "b"]


@pytest.mark.parametrize("others", [("init",), ("shuffle",), ("init", "shuffle"), ("augment", "dropout", "library")])
def test_a_changed_bit_is_all_that_tells_a_run_from_its_reference(others: tuple[str, ...]) -> None:
    run = make_run(varies=(*others, "onebit"), replicate=3)
    reference = run.without("onebit")
    network = trace(dropnet, (8, 8, 1), 10, run.recipe)
    changed, _ = perturb(run, network, initial_weights(run, network), 0)
    held = initial_weights(reference, network)
    assert sum(int((changed[name] != held[name]).sum()) for name in held) == 1
    for source in NAMES:
        assert streams.seed_key(run, source) == streams.seed_key(reference, source)
