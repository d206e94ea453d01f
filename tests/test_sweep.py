"""A sweep's tables: right numbers, every missing value explained, and no verdict that the records do not carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from orchestrator.analysis import load, measures
from orchestrator.analysis.quantities import QUANTITIES
from orchestrator.analysis.sweep import PAIRWISE, TABLE
from orchestrator.store import Store, open_store
from protocols.errors import UserError
from protocols.perturbation import Perturbation
from protocols.recipe import Recipe
from tests import factory


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def row(table: pd.DataFrame, source: str, **where: Any) -> pd.Series:
    found = table[table["source"] == source]
    for name, value in where.items():
        found = found[found[name] == value]
    assert len(found) == 1
    return found.iloc[0]


def test_the_table_has_the_measures_of_every_cell(store: Store) -> None:
    planned = factory.plan(replicates=5)
    factory.fill(store, planned)
    table = load(store).table()
    assert list(table.columns) == list(TABLE)
    assert table["source"].tolist() == ["none", "init", "shuffle", "augment", "dropout", "library", "onebit", "all"]
    assert table["library"].tolist() == ["held"] * 5 + ["order", "held", "order"]

    init = row(table, "init")
    logits = np.stack([factory.logits(fake.run) for fake in planned if fake.source == "init"])
    labels = factory.labels()
    accuracies = measures.accuracy(logits, labels)
    losses = measures.cross_entropy(logits, labels)
    expected = {
        "n": 5,
        "missing": 0,
        "diverged": 0,
        "accuracy_mean": 100 * accuracies.mean(),
        "accuracy_sd": 100 * accuracies.std(ddof=1),
        "cross_entropy_sd": losses.std(ddof=1),
        "disagreement": 100 * measures.pair_mean(measures.disagreement(measures.predictions(logits))),
        "correlation": measures.pair_mean(measures.spearman(logits)),
        "pearson": measures.pair_mean(measures.pearson(logits)),
        "ensemble_gain": 100 * measures.pair_mean(measures.ensemble_gain(logits, labels)),
        "paper_accuracy_sd": 100 * accuracies.std(),
        "paper_cross_entropy_sd": losses.std(),
    }
    for name, value in expected.items():
        assert init[name] == pytest.approx(value, rel=1e-9), name
    for name in QUANTITIES:
        assert init[f"{name}_low"] <= init[name] <= init[f"{name}_high"], name
        assert np.isfinite([init[f"{name}_low"], init[f"{name}_high"]]).all(), name
    assert 0 < init["paper_accuracy_sd_se"] < init["paper_accuracy_sd"]
    assert init["notes"] == "" and init["control"] == "held" and init["valid"]


def test_a_control_that_held_is_zero_and_says_so(store: Store) -> None:
    factory.fill(store, factory.plan(replicates=3))
    control = row(load(store).table(), "none")
    assert control[["accuracy_sd", "cross_entropy_sd", "disagreement", "ensemble_gain"]].tolist() == [0, 0, 0, 0]
    assert control["correlation"] == 1 and control["pearson"] == pytest.approx(1, abs=1e-14)
    assert control["notes"] == "all 3 replicates bit-identical"


def test_only_planned_runs_enter_and_the_others_are_missing(store: Store) -> None:
    planned = factory.plan(replicates=4)
    factory.fill(store, planned[:20])
    factory.fill(store, factory.plan(trainer="tensorflow", replicates=2))
    sweep = load(store, planned=planned)
    table = sweep.table()
    assert set(table["trainer"]) == {"torch"}
    assert table["n"].sum() == 20 and table["missing"].sum() == 12
    assert row(table, "init")[["n", "missing"]].tolist() == [3, 1]
    assert row(table, "all")[["n", "missing"]].tolist() == [2, 2]
    everything = load(store).table()
    assert set(everything["trainer"]) == {"torch", "tensorflow"} and everything["missing"].sum() == 0


def test_an_empty_store_has_empty_tables(tmp_path: Path, store: Store) -> None:
    sweep = load(store)
    assert list(sweep.table().columns) == list(TABLE) and len(sweep.table()) == 0
    assert len(sweep.controls()) == 0 and len(sweep.pairwise("correlation")) == 0
    planned = load(tmp_path / "nowhere", planned=factory.plan(replicates=2)).table()
    assert planned["missing"].tolist() == [2] * 8 and set(planned["notes"]) == {"no replicate yet"}
    assert set(planned["control"]) == {"not shown"}


@pytest.mark.parametrize(
    ("replicates", "notes"),
    [
        (1, "one replicate shows no spread"),
        (2, "an interval of an SD needs at least 4 replicates"),
        (3, "an interval of an SD needs at least 4 replicates"),
    ],
)
def test_few_replicates_show_what_they_can(store: Store, replicates: int, notes: str) -> None:
    factory.fill(store, factory.plan(replicates=replicates))
    init = row(load(store).table(), "init")
    assert notes in init["notes"]
    assert np.isfinite(init["accuracy_mean"])
    assert np.isfinite(init["accuracy_sd"]) == (replicates > 1) and np.isnan(init["accuracy_sd_low"])
    assert np.isfinite(init["disagreement"]) == (replicates > 1)
    assert np.isfinite(init["disagreement_low"]) == (replicates > 2)


def test_diverged_runs_are_counted_and_left_out(store: Store) -> None:
    planned = factory.plan(sources=("none", "init"), replicates=6)
    factory.fill(store, [fake for fake in planned if fake.run.replicate < 5])
    for fake in planned[-2:]:
        store.commit(factory.diverged(fake))
    init = row(load(store, planned=planned).table(), "init")
    assert init[["n", "missing", "diverged"]].tolist() == [5, 0, 1]
    assert init["notes"] == "1 diverged run is left out of every measure"
    assert np.isfinite(init["disagreement_high"]) and np.isfinite(init["accuracy_sd_low"])


def test_logits_that_are_not_numbers_leave_the_pairs_only(store: Store) -> None:
    planned = factory.plan(sources=("init",), replicates=5)
    factory.fill(store, planned[:4])
    row_ = factory.record(planned[4])
    logits = np.array(row_["logits"])
    logits[3, 2] = np.nan
    store.commit(row_ | {"logits": logits})
    init = row(load(store).table(), "init")
    assert init["n"] == 5 and np.isfinite(init["accuracy_sd_low"])
    assert "1 of 5 replicates have no finite logits: in no pair" in init["notes"]
    others = np.stack([factory.logits(fake.run) for fake in planned[:4]])
    assert init["correlation"] == pytest.approx(measures.pair_mean(measures.spearman(others)))


def test_what_cannot_be_computed_says_why(store: Store) -> None:
    """No labels: no gain. Test sets of two sizes: no pairs. Both leave the rest alone."""
    planned = factory.plan(sources=("init", "shuffle"), replicates=4)
    for fake in planned:
        small = fake.source == "shuffle" and fake.run.replicate == 0
        store.commit(factory.record(fake, examples=200 if small else 300))
    table = load(store).table()
    init, shuffle = row(table, "init"), row(table, "shuffle")
    assert np.isnan(init["ensemble_gain"]) and np.isfinite(init["correlation_low"])
    assert "Ensemble gain: the labels of the test set are not in the store" in init["notes"]
    assert np.isnan(shuffle["disagreement"]) and np.isfinite(shuffle["accuracy_sd"])
    assert "differ in shape ((200, 10), (300, 10)): no pairs" in shuffle["notes"]


def test_zero_variance_is_never_a_finding(store: Store) -> None:
    planned = factory.plan(sources=("none", "init", "library"), replicates=4, library="native")
    factory.fill(store, [fake for fake in planned if fake.source != "library"])
    for fake in (fake for fake in planned if fake.source == "library"):
        factory.fill(store, [fake], noise=0.0, final_digest="0" * 64)
    library = row(load(store).table(), "library")
    assert library["accuracy_sd"] == 0 and library["disagreement"] == 0 and library["correlation"] == 1
    assert (
        "all 4 replicates bit-identical: what varies here changed no bit, so its zeros are no finding"
        in (library["notes"])
    )
    assert "library (native) ran on a CPU" in library["notes"]


def test_equal_accuracies_of_different_weights_are_told_from_equal_bits(store: Store) -> None:
    factory.fill(store, factory.plan(sources=("init",), replicates=4), noise=0.0)
    init = row(load(store).table(), "init")
    assert "bit-identical" not in init["notes"] and "all 4 values are equal" in init["notes"]
    assert init["accuracy_sd"] == 0 and np.isnan(init["accuracy_sd_high"])


def test_replicates_that_share_their_weights_are_named(store: Store) -> None:
    planned = factory.plan(sources=("init",), replicates=4)
    for fake in planned:
        factory.fill(store, [fake], **({"final_digest": "0" * 64} if fake.run.replicate < 2 else {}))
    assert "4 replicates ended in only 3 different sets of weights" in row(load(store).table(), "init")["notes"]


def test_two_classes(store: Store) -> None:
    factory.fill(store, factory.plan(replicates=4), classes=2)
    table = load(store).table()
    assert np.isfinite(table[["disagreement", "correlation", "ensemble_gain"]].to_numpy(np.float64)).all()


def control(store: Store, *rows: dict[str, Any]) -> pd.Series:
    """The verdict where the control's replicates have these columns."""
    planned = factory.plan(sources=("none", "init"), replicates=max(len(rows), 2))
    controls = [fake for fake in planned if fake.source == "none"]
    factory.fill(store, [fake for fake in planned if fake.source == "init"])
    for fake, changes in zip(controls, rows, strict=False):
        factory.fill(store, [fake], **changes)
    return load(store, planned=planned).controls().iloc[0]


SAME, OTHER = "a" * 64, "b" * 64


def test_control_held(store: Store) -> None:
    verdict = control(store, {"process": "h:1:1"}, {"process": "h:2:1"})
    assert verdict["verdict"] == "held"
    assert verdict["reason"] == "2 control replicates in 2 processes ended in the same bits"
    assert verdict[["replicates", "processes", "digests", "fingerprints"]].tolist() == [2, 2, 1, 1]


def test_control_not_held_makes_the_whole_group_invalid(store: Store) -> None:
    verdict = control(store, {"final_digest": SAME}, {"final_digest": OTHER})
    assert verdict["verdict"] == "not held" and "2 different sets of weights" in verdict["reason"]
    table = load(store).table()
    assert not table["valid"].any()
    assert all(notes.startswith("invalid: what this group holds was not held") for notes in table["notes"])


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "no control replicate is finished"),
        ([{}], "one control replicate is finished; it takes two"),
        ([{"process": "h:1:1"}, {"process": "h:1:1"}], "ran in one process; it takes two"),
        (
            [
                {"process": "h:1:1", "fingerprint": "one", "final_digest": SAME},
                {"process": "h:2:1", "fingerprint": "two", "final_digest": OTHER},
            ],
            "ran under 2 fingerprints (hardware or software) and differ between them",
        ),
    ],
)
def test_control_not_shown(store: Store, rows: list[dict[str, Any]], reason: str) -> None:
    verdict = control(store, *rows)
    assert verdict["verdict"] == "not shown" and reason in verdict["reason"]
    assert load(store).table()["valid"].all()


def test_a_failing_control_on_one_machine_is_not_excused_by_another(store: Store) -> None:
    rows = [{"fingerprint": "one", "final_digest": SAME}] * 2 + [{"fingerprint": "two", "final_digest": SAME}]
    verdict = control(store, *rows, {"fingerprint": "two", "final_digest": OTHER})
    assert verdict["verdict"] == "not held" and "on the same kind of machine" in verdict["reason"]


def test_a_control_that_diverged_everywhere_alike_was_held(store: Store) -> None:
    planned = factory.plan(sources=("none",), replicates=2)
    for number, fake in enumerate(planned):
        store.commit(factory.diverged(fake) | {"process": f"h:{number}:1", "final_digest": SAME})
    assert load(store).controls().iloc[0]["verdict"] == "held"


def test_kernels_that_vary_need_no_control_of_their_own(store: Store) -> None:
    factory.fill(store, factory.plan(sources=("none",), replicates=2))
    for number, fake in enumerate(factory.plan(sources=("library",), library="kernel", replicates=4)):
        factory.fill(store, [fake], fingerprint=f"kernel {number}")
    sweep = load(store)
    assert "fingerprint" not in sweep.controls().iloc[0]["reason"]
    assert "fingerprint" not in row(sweep.table(), "library")["notes"]


@pytest.mark.parametrize(
    ("source", "how"),
    [("library", {"library": "native"}), ("library", {"library": "kernel"}), ("async", {"asynchrony": "real"})],
)
def test_another_profile_is_no_other_machine_but_another_machine_is(store: Store, source: str, how: Any) -> None:
    """Released kernels, and threads that race, have another fingerprint wherever they run."""
    factory.fill(store, factory.plan(sources=("none",), replicates=2))
    init, moved = factory.plan(sources=("init",), replicates=2)
    factory.fill(store, [init])
    released = factory.plan(sources=(source,), replicates=3, **how)
    factory.fill(store, released[:2], fingerprint="released")
    assert "fingerprint" not in load(store).controls().iloc[0]["reason"]
    elsewhere = json.dumps(factory.PROVENANCE | {"cpu": "another"})
    factory.fill(store, [moved], fingerprint="elsewhere", provenance=elsewhere)
    factory.fill(store, released[2:], fingerprint="released elsewhere", provenance=elsewhere)
    reason = load(store).controls().iloc[0]["reason"]
    assert reason.endswith("2 of 5 other records ran under a fingerprint without a control")


def test_one_bit_under_released_kernels_is_held_against_nothing(store: Store) -> None:
    nothing = dict.fromkeys(
        ("weights_changed", "weights_total", "predictions_changed", "first_differing_step", "distance", "cosine")
    )
    for library in ("native", "order"):
        for fake in factory.plan(sources=("library+onebit",), library=library, replicates=3):
            factory.fill(store, [fake], **(nothing | {"largest_ulp": None} if library == "native" else {}))
    table, changes = load(store).table().set_index("library"), load(store).divergence().set_index("library")
    assert "no run is the unchanged one" in table.loc["native", "notes"]
    assert "unchanged" not in table.loc["order", "notes"]
    assert changes.loc["order", "distance"] == 1.5 and np.isnan(changes.loc["native", "distance"])
    assert changes.loc["order", "weights_changed"] > 0 and np.isnan(changes.loc["native", "weights_changed"])


def test_hardware_that_varies_is_no_accident(store: Store) -> None:
    factory.fill(store, factory.plan(sources=("none",), replicates=2))
    for number, fake in enumerate(factory.plan(sources=("hardware",), replicates=4)):
        factory.fill(store, [fake], fingerprint=f"machine {number}")
    sweep = load(store)
    assert "fingerprint" not in sweep.controls().iloc[0]["reason"]
    assert "fingerprint" not in row(sweep.table(), "hardware")["notes"]


def test_cells_are_sorted_by_their_sources_and_choices(store: Store) -> None:
    for step in (100, 0, 20):
        label = f"onebit[step={step}]" if step else "onebit"
        factory.fill(store, factory.plan(sources=(label,), replicates=1, perturb=Perturbation(step=step)))
    factory.fill(store, factory.plan(sources=("all", "package.module:source", "init", "none"), replicates=1))
    factory.fill(store, factory.plan(sources=("async",), replicates=1, asynchrony="real"))
    assert [cell.label for cell in load(store).cells] == [
        *("none", "init", "onebit", "onebit[step=20]", "onebit[step=100]", "async (real)"),
        *("package.module:source", "all (library: order)"),
    ]


def test_intervals_stay_within_the_possible(store: Store) -> None:
    for number, fake in enumerate(factory.plan(sources=("init",), replicates=2)):
        factory.fill(store, [fake], accuracy=(0.02, 0.99)[number])
    init = row(load(store).table(), "init")
    assert init[["accuracy_mean_low", "accuracy_mean_high"]].tolist() == [0, 100]


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no store at .*nope"):
        load(tmp_path / "nope")


def test_mixed_fingerprints_are_said(store: Store) -> None:
    planned = factory.plan(sources=("none", "init"), replicates=4)
    for fake in planned:
        moved = fake.source == "init" and fake.run.replicate == 3
        factory.fill(store, [fake], **({"fingerprint": "elsewhere"} if moved else {}))
    sweep = load(store)
    assert "replicates ran under 2 fingerprints" in row(sweep.table(), "init")["notes"]
    reason = sweep.controls().iloc[0]["reason"]
    assert reason.endswith("1 of 4 other records ran under a fingerprint without a control")


def test_groups_are_told_apart_by_seed_and_by_what_differs_in_the_recipe(store: Store) -> None:
    long = Recipe(epochs=8, batch_size=64, crop=1, flip=False)
    for seed, recipe in ((0, None), (1, None), (1, long)):
        factory.fill(store, factory.plan(sources=("none", "init"), base_seed=seed, recipe=recipe, replicates=2))
    sweep = load(store)
    table = sweep.table()
    assert table["group"].nunique() == 3
    keys = table[table["source"] == "init"][["base_seed", "recipe"]].to_numpy().tolist()
    assert keys == [[0, "epochs=6"], [1, "epochs=6"], [1, "epochs=8"]]
    assert sweep.group_title(table["group"].iloc[-1]) == "torch · dropnet · digits · base seed 1 · epochs=8"


def test_one_group_needs_no_seed_and_recipe_in_its_title(store: Store) -> None:
    factory.fill(store, factory.plan(sources=("none",), replicates=2))
    sweep = load(store)
    assert sweep.group_title(sweep.groups["group"].iloc[0]) == "torch · dropnet · digits"


@pytest.mark.parametrize("kind", ["order", "kernel", "native"])
def test_the_library_kind_is_always_named(store: Store, kind: str) -> None:
    factory.fill(store, factory.plan(sources=("library", "shuffle+library", "all"), library=kind, replicates=1))
    assert [cell.label for cell in load(store).cells] == [
        f"library ({kind})",
        f"shuffle+library (library: {kind})",
        f"all (library: {kind})",
    ]


@pytest.mark.parametrize("measure", PAIRWISE)
def test_pairwise_lists_each_pair_once_and_averages_to_the_table(store: Store, measure: str) -> None:
    planned = factory.plan(sources=("none", "init", "all"), replicates=4)
    factory.fill(store, planned)
    sweep = load(store)
    pairs = sweep.pairwise(measure)
    assert len(pairs) == 3 * 6
    assert (pairs["replicate_a"] < pairs["replicate_b"]).all()
    known = {fake.run.id: fake.run.replicate for fake in planned}
    assert [known[id] for id in pairs["id_b"]] == pairs["replicate_b"].tolist()
    means = pairs.groupby("source")["value"].mean()
    for source, value in means.items():
        assert value == pytest.approx(row(sweep.table(), str(source))[measure])


def test_an_unknown_measure_of_pairs_is_named(store: Store) -> None:
    with pytest.raises(UserError, match="unknown measure of pairs 'disagreemnt'; did you mean 'disagreement'"):
        load(store).pairwise("disagreemnt")


def test_the_map_holds_all_models_of_a_group(store: Store) -> None:
    planned = factory.plan(sources=("none", "init", "shuffle"), replicates=4)
    factory.fill(store, planned)
    sweep = load(store)
    models, matrix = sweep.disagreement_map(sweep.groups["group"].iloc[0], per_cell=3)
    assert models["label"].tolist() == ["none"] * 3 + ["init"] * 3 + ["shuffle"] * 3
    assert matrix.shape == (9, 9) and (matrix[:3, :3] == 0).all()
    runs = {fake.run.id: factory.logits(fake.run).argmax(axis=1) for fake in planned}
    a, b = models["id"].iloc[4], models["id"].iloc[7]
    assert matrix[4, 7] == pytest.approx(100 * np.mean(runs[a] != runs[b]))


def test_histories_follow_the_cells(store: Store) -> None:
    factory.fill(store, factory.plan(sources=("none", "init"), replicates=2))
    planned = factory.plan(sources=("none", "init", "all"), replicates=2)
    none, init, everything = load(store, planned=planned).histories()
    assert len(none) == len(init) == 2 * 6 and len(everything) == 0
    assert init.groupby("id")["epoch"].max().tolist() == [6, 6]


def test_logits_are_read_cell_by_cell(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    factory.fill(store, factory.plan(replicates=3))
    read = []
    original = Store.logits
    monkeypatch.setattr(Store, "logits", lambda self, ids: read.append(len(ids)) or original(self, ids))
    sweep = load(store)
    sweep.table(), sweep.table(), sweep.pairwise("correlation")
    assert read == [3] * 8, "each cell once, never more than one cell"
