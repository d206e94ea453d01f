"""Both trainers against the contract, and what is promised between them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from protocols.contract import Dataset, Interrupted
from protocols.digest import digest
from protocols.errors import UserError
from protocols.run import Run
from tests.engine_contract import EngineContract
from tests.runs import MemoryContext, make_run
from tests.trainer_contract import TrainerContract
from trainers.torch.profiles import KERNELS, Kernel
from trainers.torch.provenance import compiler


class TestTorch(TrainerContract):
    name = "torch"


class TestTorchEngine(EngineContract):
    name = "torch"

    def kernel(self, **choice: bool) -> Run:
        replicate = KERNELS.index(Kernel(**choice))
        return self.run(varies=("library",), library="kernel", replicate=replicate, epochs=1, architecture="resnet6")

    def test_the_memory_format_is_a_kernel_environment(self, few_digits: Dataset) -> None:
        held = self.train(self.run(epochs=1, architecture="resnet6"), few_digits)
        one, two = (self.train(self.kernel(channels_last=False), few_digits) for _ in range(2))
        assert digest(one.weights) == digest(two.weights) != digest(held.weights)
        assert one.initial_digest == held.initial_digest
        assert (one.provenance["memory_format"], held.provenance["memory_format"]) == ("contiguous", "channels_last")

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
    @pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
    def test_the_compiler_is_a_kernel_environment(self, few_digits: Dataset, tmp_path: Path) -> None:
        run = dataclasses.replace(self.kernel(compiled=True), recipe=self.run(epochs=2).recipe)
        held = self.train(dataclasses.replace(run, varies=(), library="held", replicate=0), few_digits)
        one = self.in_fresh_process(run)
        assert one["final"] != digest(held.weights)
        np.testing.assert_allclose(one["losses"], held.losses, rtol=1e-3)
        context = MemoryContext(stop_after=1)
        with pytest.raises(Interrupted):
            self.train(run, few_digits, context)
        assert context.checkpoint is not None
        checkpoint = dataclasses.replace(context.checkpoint, fingerprint=one["fingerprint"])
        resumed = self.in_fresh_process(run, checkpoint, tmp_path)
        assert resumed["resumed_epochs"] == 1 and resumed["final"] == one["final"]

    def test_a_missing_compiler_is_one_clear_line(self, few_digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        run = self.kernel(compiled=True)
        with pytest.raises(UserError, match="install g\\+\\+") as raised:
            self.train(run, few_digits)
        assert f"at most {run.replicate} replicates" in str(raised.value) and "\n" not in str(raised.value)

    def test_no_kernel_environment_comes_twice(self) -> None:
        assert len({*KERNELS, Kernel()}) == len(KERNELS) + 1 == self.trainer.kernels + 1


class TestTensorFlowEngine(EngineContract):
    name = "tensorflow"


class TestTensorFlow(TrainerContract):
    name = "tensorflow"

    def test_one_trace_serves_all_runs_of_a_network(self, few_digits: Dataset) -> None:
        from trainers.tensorflow import train as module

        module._engine.cache_clear()
        for replicate, rate in enumerate((0.1, 0.2, 0.3)):
            run = self.run(varies=("init",), replicate=replicate, learning_rate=rate, epochs=2)
            self.train(run, few_digits)
            _, engine = module.build(run, few_digits, "cpu", 1)
            assert engine.steps.experimental_get_tracing_count() == 1
            assert engine.evaluate.experimental_get_tracing_count() == 1
        assert module._engine.cache_info().misses == 1


def test_initial_digests_are_equal_across_trainers(few_digits: Dataset) -> None:
    for varies, replicate in (((), 0), (("init",), 1), (("onebit",), 2), (("init", "onebit"), 0)):
        digests = {
            contract()
            .train(make_run(contract.name, varies=varies, replicate=replicate, epochs=1), few_digits, MemoryContext())
            .initial_digest
            for contract in (TestTorch, TestTensorFlow)
        }
        assert len(digests) == 1
