"""The contract that every trainer fulfils: subclass, name the trainer, and inherit the tests.

A run is a pure function of its specification; what is held is held bit for bit; what varies is only what the run names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protocols.contract import Dataset, Interrupted
from protocols.digest import digest
from tests.harness import Harness
from tests.runs import MemoryContext
from trainers.initial import initial_weights


class TrainerContract(Harness):
    """Tests of whole runs."""

    def test_the_same_run_twice_gives_the_same_bytes(self, few_digits: Dataset) -> None:
        one, two = (self.train(self.run(), few_digits) for _ in range(2))
        assert digest(one.weights) == digest(two.weights)
        assert one.logits.tobytes() == two.logits.tobytes()
        assert one.losses.tobytes() == two.losses.tobytes()
        assert one.first_step_digest == two.first_step_digest

    def test_a_run_leaves_nothing_behind_for_the_next(self, few_digits: Dataset) -> None:
        before = digest(self.train(self.run(), few_digits).weights)
        self.train(self.run(varies=("init", "shuffle"), architecture="resnet6"), few_digits)
        self.train(self.run(varies=("dropout",), replicate=3, learning_rate=0.3), few_digits)
        assert digest(self.train(self.run(), few_digits).weights) == before

    def test_a_fresh_process_gives_the_same_bytes(self, few_digits: Dataset) -> None:
        assert self.in_fresh_process(self.run())["final"] == digest(self.train(self.run(), few_digits).weights)

    def test_initial_weights_are_the_shared_ones(self, few_digits: Dataset) -> None:
        run = self.run(varies=("init",), replicate=2)
        network = self.network(run, few_digits)
        assert self.train(run, few_digits).initial_digest == digest(initial_weights(run, network))

    @pytest.mark.parametrize("source", ["init", "shuffle", "augment", "dropout", "library", "onebit"])
    def test_each_source_varies_what_it_names(self, few_digits: Dataset, source: str) -> None:
        control = self.train(self.run(), few_digits)
        outcomes = [self.train(self.run(varies=(source,), replicate=r), few_digits) for r in range(2)]
        finals = {digest(outcome.weights) for outcome in (control, *outcomes)}
        assert len(finals) == 3, "no two runs end alike"
        initials = {outcome.initial_digest for outcome in (control, *outcomes)}
        assert len(initials) == (3 if source in ("init", "onebit") else 1)

    def test_onebit_changes_one_element_by_one_ulp(self, few_digits: Dataset) -> None:
        control = self.run()
        run = self.run(varies=("onebit",), replicate=5, epochs=1)
        before = initial_weights(control, self.network(control, few_digits))
        outcome = self.train(run, few_digits, context := MemoryContext())
        assert outcome.perturbation is not None and context.epochs
        name, index = outcome.perturbation["tensor"], outcome.perturbation["index"]
        old = before[name].flat[index]
        assert outcome.perturbation["before"] == float(old) != 0
        assert np.float32(outcome.perturbation["after"]) in (
            np.nextafter(old, np.float32(np.inf)),
            np.nextafter(old, np.float32(-np.inf)),
        )
        changed = {key: tensor.copy() for key, tensor in before.items()}
        changed[name].flat[index] = outcome.perturbation["after"]
        assert outcome.initial_digest == digest(changed), "exactly that one element, as the device holds it"

    @pytest.mark.parametrize("stop_after", [1, 2])
    def test_interrupted_and_resumed_is_uninterrupted(
        self, few_digits: Dataset, tmp_path: Path, stop_after: int
    ) -> None:
        run = self.run(varies=("dropout", "library", "shuffle"), epochs=4, warmup_epochs=1.5)
        whole = self.train(run, few_digits)
        context = MemoryContext(stop_after=stop_after)
        with pytest.raises(Interrupted):
            self.train(run, few_digits, context)
        assert context.checkpoint is not None
        resumed = self.in_fresh_process(run, context.checkpoint, tmp_path)
        assert resumed["resumed_epochs"] == stop_after == context.checkpoint.epochs
        assert resumed["final"] == digest(whole.weights)
        assert resumed["logits"] == digest({"logits": whole.logits})
        assert resumed["losses"] == whole.losses.tolist()
        assert resumed["first_step_digest"] == whole.first_step_digest
        assert resumed["epochs"] == [1, 2, 3, 4]

    def test_a_checkpoint_from_another_kind_of_machine_is_not_gone_on_from(self, few_digits: Dataset) -> None:
        context = MemoryContext(stop_after=1)
        with pytest.raises(Interrupted):
            self.train(self.run(), few_digits, context)
        elsewhere = MemoryContext(checkpoint=context.checkpoint)
        elsewhere.machine = "another machine"
        outcome = self.train(self.run(), few_digits, elsewhere)
        assert outcome.resumed_epochs == 0 and [row.epoch for row in outcome.history] == [1, 2, 3]
        assert digest(outcome.weights) == digest(self.train(self.run(), few_digits).weights)

    def test_checkpoints_change_nothing(self, few_digits: Dataset) -> None:
        plain = self.train(self.run(), few_digits)
        watched = self.train(self.run(), few_digits, context := MemoryContext(every_epoch=True))
        assert context.checkpoint is not None and context.checkpoint.epochs == 2, "none after the last epoch"
        assert digest(plain.weights) == digest(watched.weights)

    def test_losses_history_and_the_last_small_batch(self, few_digits: Dataset) -> None:
        context = MemoryContext()
        outcome = self.train(self.run(epochs=2, batch_size=64), few_digits, context)
        assert len(outcome.losses) == 2 * 4, "200 examples are 3 batches of 64 and one of 8"
        sizes = np.array([64, 64, 64, 8])
        for epoch, row in enumerate(outcome.history):
            losses = outcome.losses[4 * epoch : 4 * epoch + 4]
            assert row.train_loss == pytest.approx(float(np.average(losses, weights=sizes)))
        assert list(outcome.history) == context.epochs
        accuracy = float(np.mean(outcome.logits.argmax(1) == few_digits.test_labels))
        assert outcome.history[-1].test_accuracy == accuracy

    def test_first_step_digest_skips_steps_of_rate_zero(self, few_digits: Dataset) -> None:
        """With a warm-up the first step has rate 0, so it moves statistics only; the digest is of the second."""
        outcome = self.train(self.run(warmup_epochs=1.0), few_digits)
        assert outcome.first_step_digest not in ("", outcome.initial_digest)
        same = self.train(self.run(warmup_epochs=1.0, varies=("onebit",)), few_digits)
        assert same.first_step_digest != outcome.first_step_digest

    def test_divergence_is_an_outcome(self, few_digits: Dataset) -> None:
        outcome = self.train(self.run(architecture="resnet6", learning_rate=1e30, warmup_epochs=0.0), few_digits)
        assert outcome.status == "diverged"
        assert len(outcome.history) < 3 or not np.isfinite(outcome.losses).all()

    def test_other_kernels_give_other_bits_that_repeat(self, few_digits: Dataset) -> None:
        run = self.run(varies=("library",), library="kernel", replicate=1, epochs=1, architecture="resnet6")
        one, two = (self.in_fresh_process(run) for _ in range(2))
        held = self.in_fresh_process(self.run(epochs=1, architecture="resnet6"))
        assert one["final"] == two["final"] != held["final"]
        assert one["initial_digest"] == held["initial_digest"]
        assert self.trainer.kernels > 1
