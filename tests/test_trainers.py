"""Both trainers against the contract, and what is promised between them."""

from __future__ import annotations

from protocols.contract import Dataset
from tests.runs import MemoryContext, make_run
from tests.trainer_contract import TrainerContract


class TestTorch(TrainerContract):
    name = "torch"


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
