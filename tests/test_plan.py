"""From protocols to runs: what is planned, in which order, what is done, and what is refused before anything runs."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator import catalog
from orchestrator.cli.looking import count_runs
from orchestrator.plan import expand, plan
from protocols import PROTOCOLS, DatasetSpec, Protocol, Recipe, UserError, apply_settings, grid, load_protocol
from protocols.contract import Trainer
from protocols.perturbation import Perturbation
from protocols.run import SPECIFICATION_VERSION, Replicates, canonical
from protocols.streams import onebit_choices

SHORT = Recipe(epochs=2, batch_size=64)


def protocol(*sources: str, replicates: int = 2, **changes: object) -> Protocol:
    """A study of dropnet on digits with the torch trainer; ``changes`` are fields of its cells."""
    cells = grid(sources=sources, architectures=("dropnet",), datasets=("digits",), trainers=("torch",), recipe=SHORT)
    changed = tuple(dataclasses.replace(cell, **changes) for cell in cells)  # type: ignore[arg-type]
    return Protocol(name="mine", summary="", cells=changed, replicates=replicates)


@dataclass
class Records:
    """A store as planning sees it."""

    ids: set[str] = field(default_factory=set)
    unreadable: dict[str, str] = field(default_factory=dict)

    def examined(self) -> tuple[set[str], Mapping[str, str]]:
        return self.ids, self.unreadable


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_shipped_protocol_expands_to_its_cells_and_controls(name: str) -> None:
    shipped = load_protocol(name)
    shipped = dataclasses.replace(shipped, replicates=min(shipped.replicates, 2))
    runs = expand(shipped, gpus_per_run=1)
    assert len({entry.id for entry in runs}) == len(runs)
    controls: dict[str, set[int]] = defaultdict(set)
    cells: Counter[tuple[str, str]] = Counter()
    for entry in runs:
        if entry.run.varies:
            cells[entry.group, entry.source] += 1
        else:
            controls[entry.group].add(entry.run.replicate)
    assert set(controls) == {entry.group for entry in runs}
    assert set(map(len, controls.values())) == {shipped.controls}
    varying = [cell for cell in shipped.cells if cell.source != "none"]
    assert Counter(cells.values()) == Counter(cell.replicates or shipped.replicates for cell in varying)
    assert count_runs(shipped) == len(runs)
    assert all((entry.id, entry.group) == (entry.run.id, entry.run.group) for entry in runs)


def test_runs_are_fully_resolved() -> None:
    (run,) = {entry.run for entry in expand(protocol("all")) if entry.run.varies and entry.run.replicate == 1}
    definition = catalog.dataset("digits")
    assert run.varies == ("augment", "dropout", "init", "library", "shuffle")
    assert run.library == "order"
    assert (run.recipe.crop, run.recipe.flip) == (definition.crop, definition.flip) == (1, False)
    assert run.dataset_fingerprint == catalog.dataset_fingerprint(definition, run.dataset)
    assert run.numerics == catalog.trainer("torch").numerics
    assert (run.code, run.base_seed) == ((), 0)


def test_a_stated_crop_is_kept() -> None:
    (entry,) = {entry.run.recipe.crop for entry in expand(protocol("init", recipe=dataclasses.replace(SHORT, crop=2)))}
    assert entry == 2


def test_all_is_what_network_and_recipe_use() -> None:
    def everything(**changes: object) -> set[str]:
        return {name for entry in expand(protocol("all", **changes)) for name in entry.run.varies}

    assert everything() == {"init", "shuffle", "augment", "dropout", "library"}
    assert everything(architecture="resnet6") == {"init", "shuffle", "augment", "library"}
    bare = dataclasses.replace(SHORT, crop=0, flip=False)
    assert everything(architecture="resnet6", recipe=bare) == {"init", "shuffle", "library"}


def test_cells_that_come_to_the_same_runs_are_one() -> None:
    alike = ("all", "shuffle+library+init+dropout+augment", "init", "none", "library+init", "init+library")
    runs = expand(protocol(*alike))
    assert Counter(entry.source for entry in runs) == {"none": 2, "all": 2, "init": 2, "init+library": 2}
    assert len({entry.id for entry in runs}) == len(runs)


def test_a_cell_may_have_replicates_of_its_own() -> None:
    rows = protocol("init", "shuffle", replicates=3)
    few, many = (dataclasses.replace(rows.cells[0], replicates=count) for count in (2, 5))
    for cells, count in (((few, rows.cells[1]), 2), ((few, many, rows.cells[1]), 5)):
        runs = expand(dataclasses.replace(rows, cells=cells))
        assert Counter(entry.source for entry in runs) == {"none": 3, "init": count, "shuffle": 3}
        assert len({entry.id for entry in runs}) == len(runs)


def test_a_plan_knows_what_a_run_costs() -> None:
    (entry, *_) = expand(protocol("init"))
    assert entry.examples == catalog.dataset("digits").train_size
    assert entry.parameters == entry.network.count > 0
    (entry, *_) = expand(protocol("init", dataset=DatasetSpec(name="digits", train_size=200)))
    assert entry.examples == 200


def test_every_group_gets_at_least_two_controls() -> None:
    runs = expand(dataclasses.replace(protocol("init", replicates=1), base_seeds=(0, 5)))
    assert Counter((entry.source, entry.run.base_seed) for entry in runs) == {
        ("none", 0): 2,
        ("init", 0): 1,
        ("none", 5): 2,
        ("init", 5): 1,
    }
    declared = dataclasses.replace(protocol("init", replicates=2), control_replicates=3)
    assert Counter(entry.source for entry in expand(declared)) == {"none": 3, "init": 2}


def test_replicates_come_in_rounds_by_trainer_with_controls_first() -> None:
    both = apply_settings(protocol("init", "shuffle", replicates=3), ["trainer=torch,tensorflow"])
    order = [(entry.run.replicate, entry.run.trainer, entry.source) for entry in expand(both)]
    assert order == [
        (replicate, trainer, source)
        for replicate in range(3)
        for trainer in ("tensorflow", "torch")
        for source in ("none", "init", "shuffle")
    ]


def test_more_replicates_and_cells_keep_the_ids_of_what_was_planned_before() -> None:
    small = {entry.id for entry in expand(protocol("init", replicates=2))}
    large = {entry.id for entry in expand(protocol("init", "shuffle", "all", replicates=5))}
    renamed = dataclasses.replace(protocol("init", replicates=2), name="other", summary="something else")
    assert small < large
    assert {entry.id for entry in expand(renamed)} == small
    assert not small & {entry.id for entry in expand(protocol("init", recipe=dataclasses.replace(SHORT, epochs=3)))}


def test_the_library_kind_is_part_of_the_runs_that_vary_it_only() -> None:
    order = {entry.id: entry for entry in expand(protocol("init", "library"))}
    kernel = {entry.id: entry for entry in expand(dataclasses.replace(protocol("init", "library"), library="kernel"))}
    assert {order[id].source for id in order.keys() & kernel.keys()} == {"none", "init"}
    assert {entry.run.profile for entry in kernel.values()} == {"held", "kernel-0", "kernel-1"}


def test_twenty_thousand_runs_have_twenty_thousand_ids() -> None:
    settings = ["source=init,shuffle,all", "replicates=1250", "base_seeds=0,1"]
    runs = expand(apply_settings(load_protocol("quickstart"), settings))
    assert len({entry.id for entry in runs}) == len(runs) == 20_000
    assert {entry.group for entry in runs} == {entry.run.group for entry in runs[:64]}


def test_replicates_have_the_specifications_that_runs_have() -> None:
    (entry, *_) = (entry for entry in expand(protocol("all", "onebit")) if entry.run.perturb is not None)
    alike = Replicates(entry.run)
    for replicate in (0, 1, 9, 10, 12345):
        run = dataclasses.replace(entry.run, replicate=replicate)
        values = {"version": SPECIFICATION_VERSION, **dataclasses.asdict(run)}
        assert alike.specification(replicate) == run.specification == canonical(values)
        assert alike.id(replicate) == run.id


def test_what_is_in_the_store_is_not_missing() -> None:
    runs = expand(protocol("init"))
    records = Records({runs[0].id, runs[3].id, "f" * 64}, {runs[1].id: "it is cut short"})
    found = plan(protocol("init"), records)
    assert [entry.id for entry in found.planned] == [entry.id for entry in runs]
    assert found.done == {runs[0].id, runs[3].id}
    assert [entry.id for entry in found.missing] == [runs[1].id, runs[2].id]
    assert found.corrupt == {runs[1].id: "it is cut short"}
    assert found.unplanned == 1
    assert [(key[4], len(entries)) for key, entries in found.cells().items()] == [("none", 2), ("init", 2)]


SHIFTED = """
from trainers.architectures.dropnet import dropnet


def net(net, x, classes):
    return dropnet(net, x, classes)
"""


def test_a_network_of_the_users_own_is_named_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"first.py": SHIFTED, "same.py": SHIFTED, "other.py": SHIFTED + "# changed", "declared.py": SHIFTED}
    texts["declared.py"] += "\n__version__ = '7'\n"
    codes = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (codes[name],) = {entry.run.code for entry in expand(protocol("init", architecture=f"./{name}:net"))}
    assert [codes[name][0][0] for name in texts] == [f"./{name}" for name in texts]
    versions = {name: code[0][1] for name, code in codes.items()}
    assert versions["first.py"] == versions["same.py"] != versions["other.py"]
    assert versions["declared.py"] == "7"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "resnet7"}, "unknown architecture 'resnet7'; did you mean 'resnet6'"),
        ({"trainer": "pytorch"}, "unknown trainer 'pytorch'; did you mean 'torch'"),
        ({"dataset": DatasetSpec(name="digit")}, "unknown dataset 'digit'; did you mean 'digits'"),
        ({"architecture": "trainers.torch:trainer"}, "not a function"),
        ({"trainer": "trainers.architectures.dropnet:dropnet"}, "not a Trainer"),
        ({"dataset": DatasetSpec(name="trainers.torch:trainer")}, "not a Definition"),
        ({"dataset": DatasetSpec(name="digits", train_size=1501)}, "train_size"),
        ({"dataset": DatasetSpec(name="digits", test_size=9999)}, "test_size"),
        ({"dataset": DatasetSpec(name="digits", train_size=3)}, "train_size"),
        ({"recipe": Recipe(epochs=1, batch_size=2000)}, "recipe.batch_size is 2000, but digits has 1500"),
    ],
)
def test_what_a_cell_names_must_exist_and_fit(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        expand(protocol("init", **changes))
    assert words in str(caught.value)


def test_a_network_that_does_not_fit_its_images_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("def net(net, x, classes):\n    return net.linear(x, 'head', classes)\n")
    with pytest.raises(UserError, match=r"net\.py:net.*digits.*8x8"):
        expand(protocol("init", architecture="./net.py:net"))


@pytest.mark.parametrize(
    ("source", "changes", "words"),
    [
        ("dropout", {"architecture": "resnet6"}, "source 'dropout' cannot vary in resnet6 on digits"),
        ("init+dropout", {"architecture": "resnet6"}, "source 'dropout' cannot vary"),
        ("augment", {"recipe": dataclasses.replace(SHORT, crop=0)}, "source 'augment' cannot vary"),
    ],
)
def test_a_source_that_nothing_uses_is_refused(source: str, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        expand(protocol(source, **changes))
    assert words in str(caught.value)


def test_native_needs_a_gpu_wherever_the_library_varies() -> None:
    for source in ("library", "init+library", "all"):
        native = dataclasses.replace(protocol(source), library="native")
        with pytest.raises(UserError, match="library=native .* no GPU, where its SD is exactly 0"):
            expand(native, gpus_per_run=0)
        assert {entry.run.profile for entry in expand(native, gpus_per_run=0.5)} == {"held", "native"}
        assert len(expand(native)) == 4  # where it only matters what is planned, as for a report
    held = dataclasses.replace(protocol("init", "shuffle"), library="native")
    assert len(expand(held, gpus_per_run=0)) == 6


def test_a_library_kind_that_the_trainer_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = dataclasses.replace(catalog.trainer("torch"), library_kinds=("order",))
    monkeypatch.setattr(catalog, "trainer", lambda name: lacking)
    with pytest.raises(UserError, match="trainer 'torch' has no library kind 'kernel'; it has order"):
        expand(dataclasses.replace(protocol("library"), library="kernel"))


def test_more_kernel_replicates_than_kernels_are_refused() -> None:
    kernels = catalog.trainer("torch").kernels
    enough = dataclasses.replace(protocol("library", replicates=kernels), library="kernel")
    assert len(expand(enough)) == 2 * kernels
    with pytest.raises(UserError, match=f"{kernels + 1} replicates of library=kernel .* {kernels} kernel environments"):
        expand(dataclasses.replace(enough, replicates=kernels + 1))


def test_more_onebit_replicates_than_changes_are_refused() -> None:
    first = next(entry for entry in expand(protocol("onebit")) if entry.run.varies)
    trainer: Trainer = catalog.trainer("torch")
    definition = catalog.dataset("digits")
    network = trainer.network(
        catalog.architecture("dropnet"), definition.image_shape, definition.classes, first.run.recipe
    )
    pairs = onebit_choices(Perturbation(), catalog.initial_weights(first.run, network)[network.perturbed])
    assert pairs is not None
    assert len(expand(dataclasses.replace(protocol("onebit", replicates=pairs), control_replicates=2))) == pairs + 2
    with pytest.raises(UserError, match=f"{pairs + 1} replicates of onebit .* {network.perturbed} .* {pairs} one-bit"):
        expand(protocol("onebit", replicates=pairs + 1))
    assert len(expand(protocol("init", replicates=pairs + 1))) == 2 * (pairs + 1)


def test_zeros_can_be_changed_once_they_have_trained() -> None:
    later = protocol("onebit", perturb=Perturbation(tensor="bn1.bias", step=3))
    assert Counter(entry.run.perturb is None for entry in expand(later)) == {True: 2, False: 2}


WHOLE = """
from protocols.sources import Source


def scaled(weights, rng):
    assert len(weights) > 2
    return {name: tensor * (1 + weights["head.bias"].sum()) for name, tensor in weights.items()}


scaling = Source(summary="", weights=scaled)
"""


def test_onebit_beside_a_source_that_looks_at_every_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(WHOLE)
    assert len(expand(protocol("onebit+./own.py:scaling"))) == 4


def test_cycles_need_all_logits_of_the_test_set() -> None:
    recipe = dataclasses.replace(SHORT, cycles=2, warmup_epochs=0.0)
    snapshots = protocol("init", architecture="lstm", dataset=DatasetSpec(name="ptb"), recipe=recipe)
    with pytest.raises(UserError, match=r"recipe\.cycles .* 10,000,000 of 824,250,000 .*test_size to 28 windows"):
        expand(snapshots)
    assert expand(apply_settings(snapshots, ["dataset.test_size=28"]))


def test_a_missing_framework_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog.require("torch")
    absent = dataclasses.replace(catalog.trainer("torch"), framework="no_such_framework", extra="special")
    monkeypatch.setattr(catalog, "trainer", lambda name: absent)
    with pytest.raises(UserError, match=r"needs no_such_framework, .* pip install 'noisegrid\[special\]'"):
        catalog.require("torch")
