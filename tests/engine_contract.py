"""The contract of a trainer's engine beyond plain training: asynchrony, averages, views, perturbations, other data.

Every number that an engine makes is held against NumPy, or bit for bit against another way to the same number.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from orchestrator import records
from orchestrator.analysis import load, measures
from orchestrator.slot.context import Settings
from orchestrator.slot.worker import execute
from orchestrator.store import open_store
from protocols import streams
from protocols.contract import PLAIN, Dataset, Interrupted, View
from protocols.digest import digest
from protocols.perturbation import Perturbation
from protocols.run import Run
from tests.harness import Harness
from tests.runs import MemoryContext
from tests.small_data import as_photographs, text, viewed
from trainers import evaluation
from trainers.asynchrony import Commits, simulate
from trainers.batches import EpochPlan, plan_epoch
from trainers.initial import initial_weights
from trainers.operations import BN_MOMENTUM
from trainers.views import views

Tensors = dict[str, NDArray[Any]]


def normed(net: Any, x: Any, classes: int) -> Any:
    """Logistic regression on normalised pixels: its batch statistics are those of the data."""
    return net.linear(net.flatten(net.batch_norm(x, "bn")), "head", classes)


NORMED = f"{__name__}:normed"


def commits(*rows: tuple[int, int]) -> Commits:
    """A schedule of (batch, steps taken when its weights were read)."""
    batches, reads = np.array(rows, np.int64).T
    return Commits(workers=np.zeros_like(batches), batches=batches, reads=reads)


class EngineContract(Harness):
    """Tests of an engine, and of runs that need what is tested here."""

    def plan(self, run: Run, data: Dataset, epoch: int = 0, schedule: Commits | None = None) -> EpochPlan:
        return plan_epoch(run, data, self.network(run, data), epoch, schedule)

    def state(self, engine: Any) -> tuple[str, str, str]:
        return digest(engine.weights()), digest(engine.momentum()), digest(engine.averages())

    # Asynchronous training

    def test_one_asynchronous_worker_is_synchronous_bit_for_bit(self, few_digits: Dataset) -> None:
        run = self.run(ema_decay=0.9)
        states = []
        for schedule in (None, simulate(np.ones(4), 1)):
            engine = self.engine(run, few_digits)
            losses = [
                engine.losses(engine.train(self.plan(run, few_digits, epoch, schedule), 0, 4)) for epoch in range(2)
            ]
            states.append((*self.state(engine), np.concatenate(losses).tobytes()))
        assert states[0] == states[1]

    def test_the_server_applies_stale_gradients_with_its_own_momentum_and_decay(self, few_digits: Dataset) -> None:
        run = self.run(dtype="float64", warmup_epochs=0.0, weight_decay=0.01)
        network, start = self.network(run, few_digits), initial_weights(run, self.network(run, few_digits))

        def after(steps: int, schedule: Commits) -> tuple[Tensors, Tensors, NDArray[np.float64]]:
            engine = self.engine(run, few_digits)
            losses = engine.losses(engine.train(self.plan(run, few_digits, 0, schedule), 0, steps))
            return engine.weights(), engine.momentum(), losses

        rates = self.plan(run, few_digits).rates
        one, first, loss = after(1, commits((0, 0), (1, 0), (2, 0), (3, 0)))
        other, second, other_loss = after(1, commits((1, 0), (0, 0), (2, 0), (3, 0)))
        both, momentum, losses = after(2, commits((0, 0), (1, 0), (2, 0), (3, 0)))
        assert losses.tolist() == [*loss, *other_loss], "both losses are those at the initial weights"
        for parameter in network.parameters:
            name = parameter.name
            if not parameter.trainable:
                batch = start[name] + (other[name] - start[name]) / BN_MOMENTUM
                expected = (1 - BN_MOMENTUM) * one[name] + BN_MOMENTUM * batch
                np.testing.assert_allclose(both[name], expected, rtol=1e-12, err_msg=name)
                continue
            gradient = second[name] - 0.01 * start[name]
            velocity = 0.9 * first[name] + gradient + 0.01 * one[name]
            np.testing.assert_allclose(momentum[name], velocity, rtol=0, atol=1e-13, err_msg=name)
            rate = rates[1] * (run.recipe.bias_lr_factor if parameter.slow else 1.0)
            np.testing.assert_allclose(both[name], one[name] - rate * velocity, rtol=0, atol=1e-13, err_msg=name)

    def test_gradients_under_way_outlast_a_pause_and_end_with_a_load(self, few_digits: Dataset) -> None:
        run = self.run(async_workers=3)
        schedule = commits((1, 0), (0, 0), (2, 0), (3, 1))
        plan, network = self.plan(run, few_digits, 0, schedule), self.network(run, few_digits)
        engine = self.engine(run, few_digits)
        losses = engine.losses(engine.train(plan, 0, 4))
        expected = self.state(engine)
        paused = self.engine(run, few_digits)
        handles = [paused.train(plan, *bounds) for bounds in ((0, 1), (1, 2), (2, 4))]
        assert np.concatenate([paused.losses(handle) for handle in handles]).tobytes() == losses.tobytes()
        assert self.state(paused) == expected
        paused.train(plan, 0, 1)
        paused.load(initial_weights(run, network), None, None)
        paused.train(plan, 0, 4)
        assert self.state(paused) == expected

    def test_simulated_asynchrony_is_held_or_varied_by_its_seed(self, few_digits: Dataset) -> None:
        def outcome(**fields: Any) -> Any:
            return self.train(self.run(batch_size=16, epochs=2, **fields), few_digits)

        synchronous = outcome()
        held = outcome(async_workers=3)
        again = outcome(async_workers=3)
        varied = [outcome(async_workers=3, varies=("async",), replicate=replicate) for replicate in (0, 1, 1)]
        digests = [digest(found.weights) for found in (synchronous, held, *varied)]
        assert digest(again.weights) == digests[1] and digests[3] == digests[4]
        assert len(set(digests)) == 4
        assert synchronous.commits is None
        for found in (held, *varied):
            assert found.commits.shape == (2 * 13, 3)
            assert found.initial_digest == synchronous.initial_digest
            staleness = np.arange(26) % 13 - found.commits[:, 2]
            assert staleness.min() >= 0 and 1 < staleness.mean() < 3

    def test_a_race_is_logged_and_its_log_gives_the_same_bits(self) -> None:
        run = self.run(
            varies=("async",), asynchrony="real", async_workers=3, batch_size=8, epochs=2, ema_decay=0.5, crop=0
        )
        for data, pairs in self.in_fresh_process(run, module="tests.race_once").items():
            assert len({pair["race"]["final"] for pair in pairs}) > 1, f"all races over {data} went the same way"
            for pair in pairs:
                assert pair["replay"] == pair["race"]
                log = np.array(pair["race"]["log"])
                assert log.shape == (2 * 25, 3) and set(log[:, 0]) <= {0, 1, 2}
            assert (np.arange(50) % 25 - log[:, 2]).max() > 0

    # Interruption

    @pytest.mark.parametrize(
        "fields",
        [
            {"async_workers": 3, "varies": ("async", "dropout")},
            {"ema_decay": 0.9, "swa_epochs": 3, "views": ("flip",)},
            {"cycles": 2, "warmup_epochs": 0.5, "views": ("crop9",)},
            {"varies": ("onebit",), "perturb": Perturbation(epoch=1, step=2)},
        ],
        ids=["async", "averages", "cycles", "onebit"],
    )
    @pytest.mark.parametrize("stop_after", [1, 3])
    def test_interrupted_and_resumed_is_uninterrupted(
        self, few_digits: Dataset, fields: dict[str, Any], stop_after: int
    ) -> None:
        run = self.run(epochs=4, **fields)
        whole = self.train(run, few_digits)
        context = MemoryContext(stop_after=stop_after)
        with pytest.raises(Interrupted):
            self.train(run, few_digits, context)
        resumed = self.train(run, few_digits, MemoryContext(checkpoint=context.checkpoint))
        assert resumed.resumed_epochs == stop_after
        assert digest(resumed.weights) == digest(whole.weights)
        assert resumed.losses.tobytes() == whole.losses.tobytes()
        assert resumed.logits.tobytes() == whole.logits.tobytes()
        assert resumed.perturbation == whole.perturbation
        assert [found.name for found in resumed.variants] == [found.name for found in whole.variants]
        for one, other in zip(resumed.variants, whole.variants, strict=True):
            assert one.logits.tobytes() == other.logits.tobytes() and one.passes == other.passes
        assert (resumed.commits is None) == (whole.commits is None)
        if whole.commits is not None:
            assert (resumed.commits == whole.commits).all()

    # Perturbation

    @pytest.mark.parametrize(
        "how",
        [
            {},
            {"element": 7},
            {"direction": "up", "tensor": "conv2.weight"},
            {"tensor": "last", "step": 3},
            {"tensor": "last", "kind": "gaussian", "fraction": 1.0, "epoch": 1},
            {"kind": "gaussian", "epoch": 1, "step": 2},
            {"fraction": 0.1, "direction": "down", "step": 9},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("workers", [1, 3])
    def test_a_perturbation_changes_at_its_step_what_it_names_and_nothing_else(
        self, few_digits: Dataset, how: dict[str, Any], workers: int
    ) -> None:
        perturb = Perturbation(**how)
        run = self.run(varies=("onebit",), replicate=1, perturb=perturb, async_workers=workers)
        control = self.train(run.without("onebit"), few_digits)
        outcome = self.train(run, few_digits)
        assert outcome.perturbation is not None
        at, name = 4 * perturb.epoch + perturb.step, outcome.perturbation["tensor"]
        assert outcome.perturbation["step"] == at

        engine = self.engine(run, few_digits)
        for epoch, stop in enumerate([4] * (at // 4) + [at % 4] * (at % 4 > 0)):
            schedule = simulate(streams.service_times(run, epoch, 4), workers)
            engine.train(self.plan(run, few_digits, epoch, schedule), 0, stop)
        before = engine.weights()
        changed, change = streams.perturbed(run, before[name])
        assert outcome.perturbation["digest"] == digest({**before, name: changed})
        assert outcome.perturbation["elements"] == np.count_nonzero(changed != before[name]) == change["elements"]
        assert outcome.losses[:at].tobytes() == control.losses[:at].tobytes()
        assert digest(outcome.weights) != digest(control.weights)
        assert (outcome.initial_digest == control.initial_digest) == (at > 0)

    # Averages

    def test_moving_averages(self, few_digits: Dataset) -> None:
        run = self.run(dtype="float64", ema_decay=0.8, warmup_epochs=0.5)
        engine = self.engine(run, few_digits)
        expected = engine.weights()
        for epoch in range(3):
            plan = self.plan(run, few_digits, epoch)
            for step in range(4):
                engine.train(plan, step, step + 1)
                expected = {name: 0.8 * expected[name] + 0.2 * tensor for name, tensor in engine.weights().items()}
        averages, end = engine.averages(), digest(engine.weights())
        assert set(averages) == set(expected), "statistics are averaged too"
        for name, tensor in averages.items():
            np.testing.assert_allclose(tensor, expected[name], rtol=1e-10, atol=1e-14, err_msg=name)
        logits = engine.logits(weights=averages)
        assert digest(engine.weights()) == end, "the engine's own state stays as it is"
        outcome = self.train(run, few_digits)
        (ema,) = outcome.variants
        assert ema.name == "ema" and ema.passes == 1 and ema.logits.tobytes() == logits.tobytes()
        plain = self.train(self.run(dtype="float64", warmup_epochs=0.5), few_digits)
        assert digest(plain.weights) == digest(outcome.weights) == end, "averaging changes no training"
        assert self.engine(self.run(), few_digits).averages() == {}

    def test_stochastic_weight_averaging(self, few_digits: Dataset) -> None:
        run = self.run(dtype="float64", swa_epochs=2, epochs=3, architecture=NORMED)
        engine, ends = self.engine(run, few_digits), []
        for epoch in range(3):
            engine.train(self.plan(run, few_digits, epoch), 0, 4)
            ends.append(engine.weights())
        mean = {name: (ends[1][name] + ends[2][name]) / 2 for name in ends[0]}
        before = self.state(engine)
        found = engine.reestimated(mean)
        logits = engine.logits(weights=found)
        assert self.state(engine) == before, "the engine's own state stays as it is"
        (swa,) = self.train(run, few_digits).variants
        assert swa.name == "swa"
        np.testing.assert_allclose(swa.logits, logits, rtol=1e-12)

        pixels = (few_digits.train_images - few_digits.shift) * few_digits.scale
        batches = [pixels[start : start + 64] for start in range(0, 200, 64)]
        sizes = [len(batch) for batch in batches]
        averages = np.average([batch.mean(axis=(0, 1, 2)) for batch in batches], axis=0, weights=sizes)
        variances = np.average([batch.var(axis=(0, 1, 2), ddof=1) for batch in batches], axis=0, weights=sizes)
        np.testing.assert_allclose(found["bn.mean"], averages, rtol=1e-12)
        np.testing.assert_allclose(found["bn.var"], variances, rtol=1e-12)
        for name in ("bn.weight", "bn.bias", "head.weight", "head.bias"):
            assert found[name].tobytes() == mean[name].tobytes()

    def test_accelerated_ensembling_averages_the_ends_of_cycles(self, few_digits: Dataset) -> None:
        run = self.run(cycles=2, epochs=4, warmup_epochs=0.5, views=("flip",))
        engine, plain, flipped = self.engine(run, few_digits), [], []
        for epoch in range(4):
            engine.train(self.plan(run, few_digits, epoch), 0, 4)
            if epoch in (1, 3):
                plain.append(engine.logits())
                flipped.append(engine.logits(View(0, 0, True)))
        outcome = self.train(run, few_digits)
        mean = np.mean(np.array(plain, np.float64), axis=0)
        assert outcome.logits.tobytes() == mean.astype(np.float32).tobytes() and outcome.passes == 2
        (flip,) = outcome.variants
        both = (np.array(plain, np.float64) + np.array(flipped)) / 2
        np.testing.assert_allclose(flip.logits, both.mean(axis=0), rtol=1e-6, atol=1e-6)
        assert flip.name == "flip" and flip.passes == 4

    # Views and evaluation

    def test_a_view_is_a_look_at_shifted_images(self, few_digits: Dataset) -> None:
        run = self.run(architecture="resnet6", zero_gamma=False)
        engine = self.engine(run, few_digits)
        wanted = {PLAIN, View(0, 0, True), View(2, -1, True), View(-4, 4, False), *views("crop9")}
        for view in sorted(wanted):
            images = np.ascontiguousarray(viewed(few_digits.test_images, view))
            moved = self.engine(run, dataclasses.replace(few_digits, test_images=images))
            assert engine.logits(view).tobytes() == moved.logits().tobytes(), view
        assert len({engine.logits(view).tobytes() for view in wanted}) == len(wanted)

    def test_evaluation_of_given_weights(self, few_digits: Dataset) -> None:
        assert self.trainer.evaluate
        run = self.run(epochs=1)
        outcome = self.train(run, few_digits)
        evaluate = self.function(self.trainer.evaluate)
        plain = evaluate(run, few_digits, MemoryContext(), outcome.weights, False)
        assert plain.tobytes() == outcome.logits.tobytes()
        engine = self.engine(run, few_digits)
        again = evaluate(run, few_digits, MemoryContext(), outcome.weights, True)
        assert again.tobytes() == engine.logits(weights=engine.reestimated(outcome.weights)).tobytes()
        assert again.tobytes() != plain.tobytes()

    def test_label_smoothing(self, few_digits: Dataset) -> None:
        run = self.run(architecture="linear", dtype="float64", crop=0, label_smoothing=0.3)
        data = dataclasses.replace(few_digits, test_images=few_digits.train_images, test_labels=few_digits.train_labels)
        engine, plan = self.engine(run, data), self.plan(run, data)
        batch = plan.examples[plan.rows(0)]
        values = engine.logits()[batch]
        logs = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
        right = logs[np.arange(64), data.train_labels[batch]]
        (loss,) = engine.losses(engine.train(plan, 0, 1))
        assert loss == pytest.approx(float(np.mean(-0.7 * right - 0.3 * logs.mean(axis=1))), rel=1e-12)

    def test_activations(self, few_digits: Dataset) -> None:
        run = self.run(keep=("layers",))
        engine, network = self.engine(run, few_digits), self.network(run, few_digits)
        found, logits = dict(engine.activations(30)), engine.logits()
        assert tuple(found) == network.layers
        assert {values.shape[0] for values in found.values()} == {30} and found["conv1"].shape == (30, 16 * 64)
        np.testing.assert_allclose(found["head"], logits[:30], rtol=1e-4, atol=1e-5)
        outcome = self.train(run, few_digits)
        assert {name: gram.shape for name, gram in outcome.grams.items()} == dict.fromkeys(network.layers, (100, 100))
        np.testing.assert_allclose(outcome.grams["head"], outcome.logits @ outcome.logits.T, rtol=1e-3, atol=1e-4)
        assert self.train(self.run(), few_digits).grams == {}

    # Other data

    @pytest.mark.parametrize("workers", [1, 3])
    def test_photographs_are_images_that_come_later(self, few_digits: Dataset, workers: int) -> None:
        run = self.run(crop=0, epochs=2, async_workers=workers, views=("flip",), swa_epochs=1)
        resident, decoded = self.train(run, few_digits), self.train(run, as_photographs(few_digits))
        assert digest(decoded.weights) == digest(resident.weights)
        assert decoded.losses.tobytes() == resident.losses.tobytes()
        assert decoded.logits.tobytes() == resident.logits.tobytes()
        for one, other in zip(decoded.variants, resident.variants, strict=True):
            assert one.logits.tobytes() == other.logits.tobytes()
        assert decoded.provenance["decoder"] == "none" and "decoder" not in resident.provenance
        assert (decoded.provenance["photographs"], decoded.provenance["photographs_left_out"]) == ("pixels", 0)

    def test_photographs_are_mirrored_as_planned(self, few_digits: Dataset) -> None:
        run, data = self.run(crop=0, epochs=1, flip=True), as_photographs(few_digits)
        one, two = (self.train(run, data) for _ in range(2))
        still = self.train(self.run(crop=0, epochs=1), data)
        assert digest(one.weights) == digest(two.weights) != digest(still.weights)

    @pytest.mark.parametrize("architecture", ["lstm", "qrnn"])
    def test_text(self, architecture: str) -> None:
        data = text()
        run = self.run(architecture=architecture, batch_size=16, epochs=2, crop=0, warmup_epochs=0.0)
        one, two = (self.train(run, data) for _ in range(2))
        assert digest(one.weights) == digest(two.weights)
        assert one.logits.tobytes() == two.logits.tobytes()
        assert one.logits.shape == (70, 11), "a row a token"
        assert len(one.losses) == 6
        assert one.losses[0] == pytest.approx(np.log(11), abs=0.3), "the mean over all positions"
        assert one.losses[-1] < one.losses[0]
        varied = self.train(dataclasses.replace(run, varies=("dropout",), replicate=0), data)
        assert digest(varied.weights) != digest(one.weights)

    def test_of_too_many_logits_the_first_are_kept_and_all_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = text(test=600)  # 4,200 tokens, of which the first batch holds 3,500
        run = self.run(
            architecture="lstm", batch_size=16, epochs=2, crop=0, warmup_epochs=0.0, ema_decay=0.5, swa_epochs=1
        )
        whole = self.train(run, data)
        assert whole.predictions is None and whole.cross_entropy is None
        monkeypatch.setattr(evaluation, "LOGITS_LIMIT", 3600 * data.classes + 1)
        monkeypatch.setattr(evaluation, "BLOCK", 100 * data.classes)
        part = self.train(run, data)
        assert digest(part.weights) == digest(whole.weights)
        for one, other in zip(part.history, whole.history, strict=True):
            assert one.test_accuracy == other.test_accuracy
            assert one.test_loss == pytest.approx(other.test_loss, rel=1e-12)
        assert [variant.name for variant in part.variants] == ["ema", "swa"]
        for one, other in zip((part, *part.variants), (whole, *whole.variants), strict=True):
            assert one.logits.tobytes() == other.logits[:3600].tobytes()
            assert (one.predictions == other.logits.argmax(axis=1)).all()
            assert one.cross_entropy == pytest.approx(records.cross_entropy(other.logits, data.test_labels), rel=1e-12)
        assert self.trainer.evaluate
        evaluated = self.function(self.trainer.evaluate)(run, data, MemoryContext(), whole.weights, False)
        assert evaluated.tobytes() == part.logits.tobytes()

    def test_a_study_of_too_many_logits(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(evaluation, "LOGITS_LIMIT", 30 * 11)
        data, store = text(), open_store(tmp_path / "store", create=True)
        settings = Settings(store=store.url, spool=str(tmp_path))
        runs = [
            self.run(
                varies=("init",), replicate=number, architecture="lstm", batch_size=16, epochs=2, crop=0, ema_decay=0.5
            )
            for number in range(4)
        ]
        for run in runs:
            row = execute(run, "init", store, data, settings)
            assert row is not None and row["outcome"] == "ok"
            ((_, logits),) = store.logits([run.id])
            ((_, (ema,)),) = store.variants([run.id])
            assert logits.tobytes() == row["logits"].tobytes() and logits.shape == ema.logits.shape == (30, 11)
            assert row["accuracy"] == np.mean(row["predictions"] == data.test_labels) and len(row["predictions"]) == 70
            assert row["cross_entropy"] == pytest.approx(row["history"][-1]["test_loss"], rel=1e-12)
            assert 0 < row["variants"][0]["accuracy"] < 1 and row["variants"][0]["cross_entropy"] > 0

        sweep = load(store)
        (table,) = sweep.table().to_dict("records")
        assert table["n"] == 4 and "over the first 30 of 70 test examples" in table["notes"]
        ids = [run.id for run in runs]
        logits, predictions = dict(store.logits(ids)), sweep.arrays(ids, "predictions")
        kept = np.stack([logits[id] for id in ids])
        labels = data.test_labels[:30]
        for name, matrix in {
            "disagreement": 100 * measures.disagreement(np.stack(predictions)),
            "correlation": measures.spearman(kept),
            "ensemble_gain": 100 * measures.ensemble_gain(kept, labels),
        }.items():
            assert table[name] == pytest.approx(measures.pair_mean(matrix)), name
        base, ema = sweep.mitigations().to_dict("records")
        assert base["disagreement"] == table["disagreement"] and ema["n"] == ema["n_base"] == 4
        assert "over the first 30 of 70" in ema["notes"]
        variants = np.stack([variant.logits for _, (variant,) in store.variants(ids)])
        before, after = (measures.pair_mean(measures.disagreement(measures.predictions(x))) for x in (kept, variants))
        assert ema["disagreement"] == pytest.approx(100 * after)
        assert ema["disagreement_reduction"] == pytest.approx(100 * (1 - after / before)), "of the same tokens"
        assert len(sweep.floors()) == len(sweep.variances()) == 1
