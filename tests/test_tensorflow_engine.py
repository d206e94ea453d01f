"""What only the TensorFlow trainer has: two ways to take a step, XLA, and processes with threads for a race."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from protocols.contract import Dataset
from protocols.digest import digest
from tests.harness import Harness
from tests.small_data import text
from trainers.asynchrony import simulate
from trainers.batches import plan_epoch
from trainers.tensorflow.profiles import KERNELS, Kernel, kernel_of, racing
from trainers.tensorflow.train import hold


def idle(net: Any, x: Any, classes: int) -> Any:
    """A linear network with a layer that leads nowhere."""
    x = net.flatten(x)
    net.linear(x, "idle", 3)
    return net.linear(x, "head", classes)


class TestTensorFlowEngine(Harness):
    name = "tensorflow"

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("architecture", ["hidden", "mnistnet", "resnet10", "lstm", "qrnn"])
    def test_a_stretch_of_steps_has_the_bits_of_steps_led_by_the_host(
        self, few_digits: Dataset, architecture: str, dtype: str
    ) -> None:
        """TensorFlow must not regroup the sums of one graph and not of the other."""
        data = text() if architecture in ("lstm", "qrnn") else few_digits
        fields = {"dtype": dtype, "ema_decay": 0.9, "label_smoothing": 0.1, "batch_size": 16, "warmup_epochs": 0.0}
        run = self.run(architecture=architecture, **fields)
        plan = plan_epoch(run, data, self.network(run, data), 0)
        led = dataclasses.replace(plan, commits=simulate(np.ones(plan.steps), 1))
        states = []
        for bounds, each in (((0, plan.steps), plan), ((0, plan.steps), led), ((1, plan.steps), plan)):
            engine = self.engine(run, data)
            losses = [
                engine.losses(engine.train(each, start, stop)) for start, stop in ((0, bounds[0]), bounds) if stop
            ]
            tensors = (engine.weights(), engine.momentum(), engine.averages())
            states.append((*map(digest, tensors), np.concatenate(losses).tobytes()))
        assert states[0] == states[1] == states[2]

    def test_a_tensor_that_the_loss_does_not_depend_on_stays_as_it_is(self, few_digits: Dataset) -> None:
        run = self.run(architecture=f"{__name__}:idle", warmup_epochs=0.0)
        engine = self.engine(run, few_digits)
        before = engine.weights()
        engine.train(plan_epoch(run, few_digits, self.network(run, few_digits), 0), 0, 2)
        changed = {name for name, tensor in engine.weights().items() if tensor.tobytes() != before[name].tobytes()}
        assert changed == {"head.weight", "head.bias"}

    def test_xla_is_a_kernel_environment_whose_bits_repeat(self, few_digits: Dataset) -> None:
        # Batches of one size, since XLA compiles each size by itself.
        run = self.run(varies=("library",), library="kernel", replicate=KERNELS.index(Kernel(xla=True)), batch_size=50)
        held = self.train(self.run(batch_size=50), few_digits)
        one, two = (self.in_fresh_process(run) for _ in range(2))
        assert one["final"] == two["final"] != digest(held.weights)
        assert one["initial_digest"] == held.initial_digest
        np.testing.assert_allclose(one["losses"], held.losses, rtol=1e-4)

    def test_no_kernel_environment_comes_twice(self) -> None:
        assert len({*KERNELS, Kernel()}) == len(KERNELS) + 1 == self.trainer.kernels + 1

    def test_a_race_has_a_profile_with_threads_of_its_own(self) -> None:
        fields = {"varies": ("async", "library"), "asynchrony": "real", "async_workers": 3, "replicate": 2}
        profiles = [self.run(library=library, **fields).profile for library in ("order", "kernel", "native")]
        assert profiles == ["held+3", "kernel-2+3", "native+3"]
        assert [racing(profile) for profile in (*profiles, "held", "kernel-2")] == [3, 3, 3, 1, 1]
        assert kernel_of(profiles[1]) == KERNELS[2] and kernel_of("held+3") == kernel_of("native+3") == Kernel()
        hold("held", 1, "cpu")
        tf.constant(0)  # From the first operation on the threads are what they are.
        with pytest.raises(RuntimeError, match="cannot be modified"):
            hold("held+3", 1, "cpu")
