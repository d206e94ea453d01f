"""The tables beside the main one: each value is what the arrays in the store give, and absent where they give none."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from orchestrator.analysis import Sweep, independence, intervals, load, measures, similarity, weights
from orchestrator.analysis.bases import components
from orchestrator.analysis.reductions import variability_reduction
from orchestrator.analysis.variances import variances
from orchestrator.store import Store, open_store
from protocols.digest import tensor_digests
from protocols.errors import UserError
from protocols.perturbation import Perturbation
from protocols.protocol import MEASURES, Cell, DatasetSpec, Protocol
from protocols.recipe import Recipe
from tests import factory

RECIPE = Recipe(epochs=6, batch_size=64, crop=1, flip=False)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def protocol(*recipes: Recipe, **fields: Any) -> Protocol:
    cells = tuple(
        Cell(source="init", architecture="dropnet", dataset=DatasetSpec(name="digits"), trainer="torch", recipe=recipe)
        for recipe in recipes or (RECIPE,)
    )
    return Protocol(name="study", summary="a study", cells=cells, replicates=2, **fields)


def variant(name: str, logits: np.ndarray, passes: int = 2) -> dict[str, Any]:
    return {"name": name, "passes": passes, "accuracy": 0.5, "cross_entropy": 1.0, "logits": logits}


def five(logits: np.ndarray) -> dict[str, float]:
    """The five measures of (models, examples, classes) logits, in the table's unit."""
    labels = factory.labels(*logits.shape[1:])
    return {
        "accuracy_sd": 100 * measures.accuracy(logits, labels).std(ddof=1),
        "cross_entropy_sd": measures.cross_entropy(logits, labels).std(ddof=1),
        "disagreement": 100 * measures.pair_mean(measures.disagreement(measures.predictions(logits))),
        "correlation": measures.pair_mean(measures.spearman(logits)),
        "ensemble_gain": 100 * measures.pair_mean(measures.ensemble_gain(logits, labels)),
    }


def stacked(planned: list[factory.Fake], source: str = "init", **shape: Any) -> np.ndarray:
    return np.stack([factory.logits(fake.run, **shape) for fake in planned if fake.source == source])


def test_ratios_and_shares_of_all(store: Store) -> None:
    planned = factory.plan(sources=("none", "init", "onebit", "all"), replicates=6)
    factory.fill(store, planned)
    sweep = load(store, protocol(margin=1.5))
    table = sweep.shares()
    assert table["source"].unique().tolist() == ["init", "onebit"], "neither the control nor all against itself"
    assert set(table["reference"]) == {"all (library: order)"} and set(table["margin"]) == {1.5}
    init, everything = (five(stacked(planned, source)) for source in ("init", "all"))
    rows = table[table["source"] == "init"].set_index("measure")
    assert rows.index.tolist() == list(MEASURES) and set(rows["n"]) == set(rows["n_reference"]) == {6}
    for name in MEASURES:
        one, two = (1 - cell[name] if name == "correlation" else cell[name] for cell in (init, everything))
        row = rows.loc[name]
        assert row["ratio"] == pytest.approx(one / two) and row["difference"] == pytest.approx(one - two)
        assert row["ratio_low"] < row["ratio"] < row["ratio_high"] and row["notes"] == ""
        assert row["verdict"] in ("same", "different", "cannot say")
        share = row["ratio"] ** 2 if name in ("accuracy_sd", "cross_entropy_sd") else np.nan
        assert row["share"] == pytest.approx(share, nan_ok=True)
        assert row["share_high"] == pytest.approx(row["ratio_high"] ** 2 if np.isfinite(share) else np.nan, nan_ok=True)
    assert rows.loc["disagreement", "verdict"] == "same"
    other = sweep.compare("onebit", "init").set_index("measure")
    assert other.loc["disagreement", "ratio"] < 1 and other.loc["disagreement", "verdict"] == "different"
    assert load(store).shares()["margin"].unique().tolist() == [1.25], "what protocols declare unless they say more"
    with pytest.raises(UserError, match="unknown source of this sweep 'shufle'"):
        sweep.compare("init", "shufle")


def test_mitigations_of_the_same_models_are_paired(store: Store) -> None:
    planned = factory.plan(sources=("none", "init"), replicates=6)
    calm = {fake.run.id: factory.logits(fake.run, noise=0.2) for fake in planned}
    for fake in planned:
        factory.fill(store, [fake], variants=[variant("flip", calm[fake.run.id])])
    table = load(store).mitigations()
    assert table["kind"].tolist() == ["base", "evaluation"] and table["mitigation"].tolist() == ["none", "flip"]
    before, after = five(stacked(planned)), five(stacked(planned, noise=0.2))
    base, flip = (row for _, row in table.iterrows())
    for name in MEASURES:
        assert base[name] == pytest.approx(before[name]) and flip[name] == pytest.approx(after[name])
        low, value, high = (flip[f"{name}_reduction{end}"] for end in ("_low", "", "_high"))
        assert low < value < high
    assert flip["reduction"] == pytest.approx(100 * variability_reduction(after, before))
    assert flip["reduction_low"] < flip["reduction"] < flip["reduction_high"]
    assert flip["paired"] and flip["training_cost"] == 1 and flip["inference_cost"] == 2 and flip["n"] == 6
    assert flip["disagreement_verdict"] == "different"


def test_mitigations_of_another_recipe_are_not_paired(store: Store) -> None:
    long = dataclasses.replace(RECIPE, epochs=12, cycles=3)
    base = factory.plan(sources=("none", "init"), replicates=5, recipe=RECIPE)
    other = factory.plan(sources=("none", "init"), replicates=6, recipe=long)
    factory.fill(store, base)
    for fake in other:
        calm = factory.logits(fake.run, noise=0.1)
        factory.fill(store, [fake], noise=0.25, passes=3, variants=[variant("crop25", calm, passes=78)])
    sweep = load(store, protocol(RECIPE, long))
    table = sweep.mitigations().set_index("mitigation")
    title = "accelerated ensembling, 3 cycles, epochs=12"
    assert table.index.tolist() == ["none", title, f"{title} + crop25"]
    assert not table.loc[title, "paired"] and table.loc[title, ["n", "n_base"]].tolist() == [6, 5]
    assert table["training_cost"].tolist() == [1, 2, 2] and table["inference_cost"].tolist() == [1, 3, 78]
    expected = variability_reduction(five(stacked(other, noise=0.25)), five(stacked(base)))
    assert table.loc[title, "reduction"] == pytest.approx(100 * expected)
    assert table.loc[f"{title} + crop25", "reduction"] > table.loc[title, "reduction"]
    assert load(store, protocol(long, RECIPE)).mitigations()["mitigation"].tolist() == [
        *("none", "crop25"),
        "accelerated ensembling, 1 cycles, epochs=6",
    ]
    assert load(store).mitigations()["kind"].tolist() == ["base", "evaluation"], "which is the base is not known"


def test_a_recipe_that_only_evaluates_more_is_no_mitigation_by_itself(store: Store) -> None:
    more = dataclasses.replace(RECIPE, views=("flip",), ema_decay=0.9)
    factory.fill(store, factory.plan(sources=("none", "init"), replicates=4, recipe=RECIPE))
    for fake in factory.plan(sources=("none", "init"), replicates=4, recipe=more):
        factory.fill(store, [fake], variants=[variant("flip", factory.logits(fake.run, noise=0.2))])
    table = load(store, protocol(RECIPE, more)).mitigations()
    assert table["mitigation"].tolist() == ["none", "flip"] and table["paired"].all(), "held against its own models"


def test_deep_ensembles_are_the_costly_reference(store: Store) -> None:
    planned = factory.plan(sources=("none", "init"), replicates=13)
    factory.fill(store, planned)
    table = load(store, protocol(ensemble=3)).mitigations()
    assert table["mitigation"].tolist() == ["none", "deep ensemble of 3"]
    row = table.iloc[1]
    logits = stacked(planned).astype(np.float64)
    means = logits[:12].reshape(4, 3, *logits.shape[1:]).mean(axis=1)
    after = five(means)
    for name in MEASURES:
        assert row[name] == pytest.approx(after[name])
    assert row["reduction"] == pytest.approx(100 * variability_reduction(after, five(logits[:12])))
    assert row["paired"] and row["n"] == 4 and row["training_cost"] == row["inference_cost"] == 3
    assert row["reduction_low"] < row["reduction"] < row["reduction_high"]
    assert len(load(store, protocol(ensemble=7)).mitigations()) == 0, "two ensembles of 7 need 14 replicates"


def test_a_variant_that_some_runs_lack_leaves_them_out_of_both(store: Store) -> None:
    planned = factory.plan(sources=("init",), replicates=6)
    for fake in planned:
        calm = [variant("ema", factory.logits(fake.run, noise=0.2), passes=1)]
        factory.fill(store, [fake], variants=calm if fake.run.replicate else [])
    row = load(store).mitigations().iloc[1]
    after, before = five(stacked(planned, noise=0.2)[1:]), five(stacked(planned)[1:])
    assert row["n"] == 5 and row["reduction"] == pytest.approx(100 * variability_reduction(after, before))
    assert "1 of 6 replicates have no finite logits" in row["notes"]


def test_layers_are_aligned_from_input_to_output(store: Store) -> None:
    rng = np.random.default_rng(0)
    planned = factory.plan(sources=("none", "init"), replicates=4)
    grams = {}
    for fake in planned:
        features = {layer: rng.standard_normal((12, 5)) for layer in ("stem", "block", "head")}
        grams[fake.run.id] = {f"gram/{layer}": (one @ one.T).astype(np.float32) for layer, one in features.items()}
        store.save_kept(fake.run.id, grams[fake.run.id] | {"weights/w": np.ones(2, np.float32)})
        digests = tensor_digests({"w": np.ones(2, np.float32)})
        factory.fill(store, [fake], kept=["layers", "weights"], tensor_digests=digests)
    table = load(store).cka()
    init = table[table["source"] == "init"]
    assert init["layer"].tolist() == ["stem", "block", "head"] and init["depth"].tolist() == [0, 1, 2]
    ids = [fake.run.id for fake in planned if fake.source == "init"]
    for layer, value in zip(init["layer"], init["cka"], strict=True):
        pairs = itertools.combinations(ids, 2)
        expected = [similarity.cka(grams[a][f"gram/{layer}"], grams[b][f"gram/{layer}"]) for a, b in pairs]
        assert value == pytest.approx(np.mean(expected))
    assert (init["cka_low"] < init["cka"]).all() and set(init["n"]) == {4} and set(init["examples"]) == {12}


def test_tensors_are_held_against_each_other(store: Store) -> None:
    planned = factory.plan(sources=("init",), replicates=4)
    rng = np.random.default_rng(1)
    drawn = [rng.standard_normal(5).astype(np.float32) for _ in range(2)]
    kept = [{"weights/a": drawn[number // 2], "weights/b": np.ones(3)} for number in range(4)]
    for number, fake in enumerate(planned):
        store.save_kept(fake.run.id, kept[number])
        losses = np.array([2.0, 1.0, 0.5, 0.25], np.float32)
        losses[number:] += 0.1 * number
        digests = tensor_digests({name[8:]: tensor for name, tensor in kept[number].items()})
        factory.fill(store, [fake], kept=["weights"], losses=losses, tensor_digests=digests)
    table = load(store).equality().set_index("tensor")
    assert table["pairs"].tolist() == [6, 6] and table["equal_pairs"].tolist() == [2, 6]
    assert table["first_step_min"].tolist() == [1, 1] and table["compared"].tolist() == [3, 3]
    apart = [weights.apart(kept[0]["weights/a"], one["weights/a"]) for one in kept[1:]]
    assert table.loc["a", "largest_ulp"] == max(one.largest_ulp for one in apart)
    assert table.loc["a", "distance"] == pytest.approx(np.median([one.distance for one in apart]))
    assert table.loc["b", "largest_ulp"] == 0 and table.loc["b", "distance"] == 0


def test_weights_of_another_attempt_are_held_against_nothing(store: Store) -> None:
    planned = factory.plan(sources=("init",), replicates=3)
    for number, fake in enumerate(planned):
        mine = np.full(4, 1.0 + number)
        store.save_kept(fake.run.id, {"weights/a": mine if number else mine - 7})
        factory.fill(store, [fake], kept=["weights"], tensor_digests=tensor_digests({"a": mine}))
    row = load(store).equality().iloc[0]
    assert (row["n"], row["compared"], row["distance"]) == (3, 1, 2.0)


def test_equality_needs_digests_only(store: Store) -> None:
    factory.fill(store, factory.plan(sources=("none",), replicates=3))
    row = load(store).equality().iloc[0]
    assert (row["pairs"], row["equal_pairs"], row["compared"]) == (3, 3, 0)
    assert pd.isna(row["first_step_min"]) and pd.isna(row["largest_ulp"])


def test_classes_floors_and_variances(store: Store) -> None:
    planned = factory.plan(sources=("none", "init"), replicates=6)
    factory.fill(store, planned, noise=2.0)
    sweep = load(store)
    labels, chosen = factory.labels(), measures.predictions(stacked(planned, noise=2.0))
    classes = sweep.classes()
    assert classes["source"].unique().tolist() == ["init"] and classes["class"].tolist() == list(range(10))
    third = (chosen[:, labels == 3] == 3).mean(axis=1)
    assert classes.loc[3, "accuracy"] == pytest.approx(100 * third.mean())
    assert classes.loc[3, "sd"] == pytest.approx(100 * third.std(ddof=1))
    assert classes["largest_sd"].unique().tolist() == [pytest.approx(classes["sd"].max())]
    assert classes["mean_sd"].iloc[0] == pytest.approx(classes["sd"].mean())

    floor = sweep.floors().iloc[0]
    accuracies = (chosen == labels).mean(axis=1)
    assert floor["disagreement"] == pytest.approx(100 * measures.pair_mean(measures.disagreement(chosen)))
    assert floor["independent"] == pytest.approx(100 * measures.pair_mean(independence.uniform(accuracies, 10)))
    assert floor["least"] < floor["disagreement"] < floor["independent"]
    assert floor["independent_by_class"] < floor["independent"] + 0.5

    apart, found = sweep.variances().iloc[0], variances(chosen == labels)
    assert apart["test_set_sd"] == pytest.approx(100 * found.test_set.value)
    assert apart["floor_sd"] == pytest.approx(100 * found.floor.value) == pytest.approx(floor["accuracy_sd_floor"])
    assert apart["distribution_sd_high"] == pytest.approx(100 * found.distribution.high)
    assert apart["examples"] == 300


def test_what_determinism_costs(store: Store) -> None:
    planned = factory.plan(sources=("none", "init", "library"), replicates=6, library="native")
    for fake in planned:
        slow = fake.source != "library"
        base = 30.0 if slow else 10.0
        resumed = fake.source == "init" and fake.run.replicate == 5
        factory.fill(
            store,
            [fake],
            train_seconds=base + 0.1 * fake.run.replicate,
            seconds=base + 5,
            provenance=json.dumps({**factory.PROVENANCE, "device_seconds": base / 2}),
            resumed_epochs=3 if resumed else 0,
        )
    table = load(store).overheads().set_index("time")
    row = table.loc["training"]
    assert (row["n_held"], row["n_released"]) == (11, 6), "a resumed run's time is not its own"
    assert row["ratio"] == pytest.approx(row["held"] / row["released"]) == pytest.approx(2.97, abs=0.05)
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
    assert table.loc["whole run", "ratio"] == pytest.approx(35 / 15)
    assert table.loc["training, on the device", "ratio"] == pytest.approx(3)


def test_base_seeds_that_repeat_a_cell(store: Store) -> None:
    for seed in range(3):
        factory.fill(store, factory.plan(sources=("none", "init"), replicates=4, base_seed=seed))
    sweep = load(store)
    table = sweep.bases().set_index("measure")
    assert set(table["source"]) == {"init"} and set(table["bases"]) == {3} and set(table["n"]) == {12}
    own = sweep.table()
    own = own[own["source"] == "init"]
    for name in MEASURES:
        assert table.loc[name, "mean"] == pytest.approx(own[name].mean())
        assert table.loc[name, "sd_between"] == pytest.approx(own[name].std())
    runs = sweep.runs[sweep.runs["source"] == "init"]
    samples = [100 * group["accuracy"].to_numpy(float) for _, group in runs.groupby("base_seed")]
    expected = components(samples, np.random.default_rng(0))
    assert table.loc["accuracy_mean", "within"] == pytest.approx(expected.within.value)
    assert table.loc["accuracy_mean", "between_high"] == pytest.approx(expected.between.high, rel=0.05)


def test_a_change_diverges_by_the_step_at_which_it_is_made(store: Store) -> None:
    for step in (0, 100, 10):
        label = f"onebit[step={step}]" if step else "onebit"
        for fake in factory.plan(sources=(label,), replicates=4, perturb=Perturbation(step=step)):
            distance = 5.0 - 0.03 * step + 0.1 * fake.run.replicate
            factory.fill(store, [fake], onebit_step=step, distance=distance, barrier_error=0.01 * fake.run.replicate)
    table = load(store).divergence()
    assert table["step"].tolist() == [0, 10, 100] and table["source"].tolist()[1:] == [
        "onebit[step=10]",
        "onebit[step=100]",
    ]
    expected = intervals.mean(np.array([5.0, 5.1, 5.2, 5.3]) - 0.3)
    row = table.iloc[1]
    assert row[["distance", "distance_low", "distance_high"]].tolist() == pytest.approx(
        [expected.value, expected.low, expected.high]
    )
    assert row["predictions_changed"] == pytest.approx(100 * 7 / 300)
    assert row["weights_changed"] == pytest.approx(100 * 4800 / 4810)
    assert row["barrier_error"] == pytest.approx(1.5) and np.isnan(row["barrier_loss"])


def test_empty_studies_have_empty_tables(store: Store) -> None:
    factory.fill(store, factory.plan(sources=("none",), replicates=2))
    planned = factory.plan(sources=("none", "init", "onebit", "all"), replicates=2)
    for sweep in (load(store), load(store, protocol(ensemble=2), planned)):
        for table in absent(sweep):
            assert len(table) == 0 and len(table.columns)


def absent(sweep: Sweep) -> list[pd.DataFrame]:
    tables = [sweep.mitigations(), sweep.cka(), sweep.classes(), sweep.floors(), sweep.variances(), sweep.overheads()]
    return [*tables, sweep.bases(), sweep.divergence()]
