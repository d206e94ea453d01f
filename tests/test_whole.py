"""From a protocol to its report with nothing in between made up: what trainers leave is what the analysis looks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orchestrator import catalog
from orchestrator.analysis import load
from orchestrator.analysis.sweep import Sweep
from orchestrator.plan import expand
from orchestrator.report import write_html
from orchestrator.slot.context import Settings
from orchestrator.slot.worker import execute
from orchestrator.store import open_store
from protocols.perturbation import Perturbation
from protocols.protocol import Cell, DatasetSpec, Protocol
from protocols.recipe import Recipe

DIGITS = DatasetSpec(name="digits", train_size=200, test_size=100)
BASE = Recipe(
    epochs=4, batch_size=50, learning_rate=0.1, warmup_epochs=1.0, views=("flip",), ema_decay=0.9, swa_epochs=2
)
CYCLES = Recipe(epochs=4, batch_size=50, learning_rate=0.1, warmup_epochs=1.0, cycles=2, views=("flip",))
STEPS = (0, 4, 12)


def study() -> Protocol:
    def cell(source: str, recipe: Recipe = BASE, **fields: object) -> Cell:
        return Cell(
            source=source,
            architecture="resnet6",
            dataset=DIGITS,
            trainer="torch",
            recipe=recipe,
            **fields,  # type: ignore[arg-type]
        )

    return Protocol(
        name="whole",
        summary="a little of everything",
        cells=(
            cell("init"),
            cell("all"),
            *(cell("onebit", perturb=Perturbation(step=step)) for step in STEPS),
            cell("all", CYCLES),
            cell("async", Recipe(epochs=2, batch_size=50, learning_rate=0.1, warmup_epochs=1.0, async_workers=3)),
        ),
        replicates=4,
        control_replicates=2,
        library="order",
        keep=("barrier", "layers", "weights"),
        ensemble=2,
    )


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    folder = str(tmp_path_factory.mktemp("whole") / "store")
    store, planned = open_store(folder, create=True), expand(study())
    for entry in planned:
        data = catalog.prepare(entry.run.dataset, None)
        assert execute(entry.run, entry.source, store, data, Settings(store=folder)) is not None
    return load(store, study(), planned)


def test_the_table_has_a_row_a_cell_and_names_what_varies(sweep: Sweep) -> None:
    table = sweep.table()
    assert table["n"].sum() == 4 * 7 + 2 * 3 and not table["missing"].any()
    assert set(table["source"]) == {"none", "init", "all", "onebit", "onebit[step=4]", "onebit[step=12]", "async"}
    assert set(table.loc[table["source"] == "async", "asynchrony"]) == {"simulated"}


def test_layers_are_compared(sweep: Sweep) -> None:
    table = sweep.cka()
    one = table[table["label"] == "init"]
    assert one["layer"].tolist() == list(dict.fromkeys(one["layer"])) and len(one) >= 3
    assert (table["n"] == 4).all() and table["cka"].between(-0.5, 1).all()
    assert table.loc[table["label"] == "onebit[step=12]", "cka"].min() > one["cka"].min(), "one late bit moves less"


def test_weights_are_compared(sweep: Sweep) -> None:
    table = sweep.equality()
    control, init = table[table["source"] == "none"], table[table["label"] == "init"]
    assert (control["equal_pairs"] == control["pairs"]).all() and (control["largest_ulp"] == 0).all()
    assert (init["compared"] == 3).all() and init["largest_ulp"].max() > 1000 and (init["distance"] > 0).any()


def test_a_late_change_moves_less(sweep: Sweep) -> None:
    table = sweep.divergence()
    assert table["step"].tolist() == list(STEPS)
    assert table["distance"].notna().all() and table["barrier_error"].notna().all()
    assert table["distance"].iloc[-1] < table["distance"].iloc[0]


def test_mitigations_are_held_against_the_base(sweep: Sweep) -> None:
    table = sweep.mitigations()
    own = table[table["label"].str.startswith("all")]
    expected = ["none", "flip", "ema", "ema+flip", "swa", "swa+flip"]
    assert own["mitigation"].tolist()[: len(expected)] == expected
    paired = dict(zip(own["mitigation"], own["paired"], strict=True))
    assert all(paired[name] for name in expected) and not paired["accelerated ensembling, 2 cycles"]
    costs = dict(zip(own["mitigation"], own["inference_cost"], strict=True))
    assert costs["flip"] == costs["accelerated ensembling, 2 cycles"] == costs["deep ensemble of 2"] == 2
    assert costs["accelerated ensembling, 2 cycles + flip"] == 4
    assert dict(zip(own["mitigation"], own["training_cost"], strict=True))["deep ensemble of 2"] == 2


@pytest.mark.parametrize("name", ["shares", "classes", "floors", "variances"])
def test_every_table_has_rows(sweep: Sweep, name: str) -> None:
    table = getattr(sweep, name)()
    assert len(table)
    assert np.isfinite(table.select_dtypes("number").to_numpy(np.float64)).any(axis=0).sum() > 3


def test_the_page_shows_it_all(sweep: Sweep, tmp_path: Path) -> None:
    write_html(sweep, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for words in ("accelerated ensembling", "onebit[step=12]", "async (simulated)", "CKA", "barrier"):
        assert words in page
