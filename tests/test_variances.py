"""Variances taken apart: unbiased and covered where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special

from orchestrator.analysis import independence, measures
from orchestrator.analysis.bases import across, components
from orchestrator.analysis.classes import class_spreads
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.variances import variances


def covered(estimates: list[Estimate], truth: float) -> float:
    return float(np.mean([estimate.low <= truth <= estimate.high for estimate in estimates]))


def draw(rng: np.random.Generator, models: int, examples: int, skill: float) -> np.ndarray:
    """Whether examples of random difficulty are classified correctly by models of random skill; a new test set."""
    difficulty = rng.normal(1.5, 1.5, examples)
    return rng.random((models, examples)) < scipy.special.expit(difficulty + skill * rng.standard_normal((models, 1)))


def distribution_variance(skill: float) -> float:
    """The variance over models of the accuracy on every example there is."""
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    accuracies = scipy.special.expit(1.5 + 1.5 * points + skill * points[:, None]) @ weights
    return float(weights @ (accuracies - weights @ accuracies) ** 2)


@pytest.mark.parametrize("skill", [0.0, 0.15, 0.5])
def test_the_variance_beyond_the_test_set_is_unbiased_and_covered(skill: float) -> None:
    rng = np.random.default_rng([8, int(100 * skill)])
    truth = distribution_variance(skill)
    found = [variances(draw(rng, 15, 200, skill)) for _ in range(500)]
    estimates = np.array([one.distribution_variance.value for one in found])
    assert abs(estimates.mean() - truth) <= 3.5 * estimates.std() / np.sqrt(len(estimates))
    on_test_set = np.mean([one.test_set.value**2 for one in found])
    assert on_test_set > truth + 3e-4, "the test set adds to it, or there is nothing to show here"
    assert covered([one.distribution_variance for one in found], truth) >= 0.92
    assert covered([one.distribution for one in found], np.sqrt(truth)) >= 0.92


def test_the_parts_written_out() -> None:
    correct = draw(np.random.default_rng(9), 6, 40, 0.5)
    found = variances(correct)
    covariance = np.cov(correct.T.astype(float))
    apart = covariance[~np.eye(40, dtype=bool)]
    assert found.distribution_variance.value == pytest.approx(apart.mean())
    assert found.floor.value == pytest.approx(np.sqrt(np.trace(covariance)) / 40)
    assert found.test_set.value == pytest.approx(correct.mean(axis=1).std(ddof=1))
    floor = np.trace(covariance) / 40 / 39
    whole = [floor + end for end in (found.distribution_variance.low, apart.mean(), found.distribution_variance.high)]
    by_model = [np.cov(np.delete(correct, i, 0).T.astype(float)) for i in range(6)]
    by_model = [values[~np.eye(40, dtype=bool)].mean() for values in by_model]
    by_example = [np.delete(np.delete(covariance, i, 0), i, 1) for i in range(40)]
    by_example = [values[~np.eye(39, dtype=bool)].mean() for values in by_example]
    squares = [(len(part) - 1) * np.var(np.log(floor + np.array(part))) for part in (by_model, by_example)]
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / 5 + squares[1] ** 2 / 39)
    reach = scipy.special.stdtrit(freedom, 0.975) * np.sqrt(sum(squares))
    assert np.diff(np.log(whole)) == pytest.approx([reach, reach])


def test_independent_errors_reach_the_floor() -> None:
    found = [variances(draw(np.random.default_rng(seed), 30, 300, 0.0)) for seed in range(100)]
    ratio = np.mean([one.test_set.value**2 for one in found]) / np.mean([one.floor.value**2 for one in found])
    assert ratio == pytest.approx(1, abs=0.06)


def test_too_few_models_say_so() -> None:
    for models, value in ((0, np.nan), (1, np.nan), (3, 1.0)):
        found = variances(draw(np.random.default_rng(0), models, 50, 0.5))
        assert np.isnan(found.distribution.low) and found.distribution.reason
        assert np.isnan(found.distribution.value) == np.isnan(value)
    still = variances(np.ones((5, 20), bool))
    assert still.test_set.value == 0 and still.floor.value == 0 and still.distribution.value == 0


def test_disagreement_of_independent_errors() -> None:
    rng = np.random.default_rng(10)
    models, examples, classes = 4, 40_000, 5
    labels = rng.integers(0, classes, examples)
    accuracies = np.array([0.9, 0.8, 0.8, 0.6])
    shifts = rng.integers(1, classes, (models, examples)) * (rng.random((models, examples)) >= accuracies[:, None])
    predictions = (labels + shifts) % classes
    measured = measures.pair_values(measures.disagreement(predictions))
    own = (predictions == labels).mean(axis=1)
    for expected in (independence.uniform(own, classes), independence.confused(predictions, labels)):
        np.testing.assert_allclose(measures.pair_values(expected), measured, atol=0.01)
    assert (measures.pair_values(independence.least(own)) < measured).all()


def test_confusions_beat_uniform_errors() -> None:
    """Where every error goes to the neighbouring class, independent errors agree more often."""
    rng = np.random.default_rng(11)
    labels = rng.integers(0, 5, 20_000)
    predictions = (labels + (rng.random((2, 20_000)) < 0.3)) % 5
    measured = measures.disagreement(predictions)[0, 1]
    assert independence.confused(predictions, labels)[0, 1] == pytest.approx(measured, abs=0.01)
    assert independence.uniform((predictions == labels).mean(axis=1), 5)[0, 1] > measured + 0.05


def test_nested_errors_disagree_least() -> None:
    labels = np.zeros(10, int)
    predictions = np.stack([np.arange(10) < 3, np.arange(10) < 5]).astype(int)
    least = independence.least((predictions == labels).mean(axis=1))
    assert least[0, 1] == pytest.approx(measures.disagreement(predictions)[0, 1]) == pytest.approx(0.2)


def test_the_spread_of_each_class() -> None:
    rng = np.random.default_rng(12)
    labels = rng.permutation(np.repeat([0, 1, 4], [20, 30, 50]))
    predictions = np.where(rng.random((6, 100)) < 0.8, labels, 9)
    found = class_spreads(predictions, labels)
    assert found.labels.tolist() == [0, 1, 4] and found.examples.tolist() == [20, 30, 50]
    expected = [(predictions[:, labels == label] == label).mean(axis=1) for label in (0, 1, 4)]
    assert [one.value for one in found.accuracies] == pytest.approx([np.mean(one) for one in expected])
    sds = [np.std(one, ddof=1) for one in expected]
    assert [one.value for one in found.spreads] == pytest.approx(sds)
    assert found.mean.value == pytest.approx(np.mean(sds)) and found.largest.value == pytest.approx(max(sds))


def test_the_largest_and_the_mean_spread_cover() -> None:
    """Classes of different difficulty; the largest is chosen after looking, and still covered."""
    rng = np.random.default_rng(13)
    shares, each, models = np.array([0.95, 0.9, 0.6, 0.7]), 25, 12
    truth = np.sqrt(shares * (1 - shares) / each)
    labels = np.repeat(np.arange(4), each)
    found = []
    for _ in range(400):
        correct = rng.random((models, 4 * each)) < shares[labels]
        found.append(class_spreads(np.where(correct, labels, 9), labels))
    assert covered([one.largest for one in found], truth.max()) >= 0.94
    assert 0.91 <= covered([one.mean for one in found], truth.mean()) <= 0.98


def test_classes_in_which_nothing_moves() -> None:
    labels = np.repeat([0, 1], 5)
    predictions = np.tile(labels, (5, 1))
    assert class_spreads(predictions, labels).largest.value == 0
    predictions[:3, 0] = [1, 1, 0]
    found = class_spreads(predictions[:5], labels)
    assert found.largest.value > 0 and found.spreads[1].value == 0


@pytest.mark.parametrize(("bases", "each"), [(3, 5), (6, 10)])
def test_the_spread_between_base_seeds_covers(bases: int, each: int) -> None:
    rng = np.random.default_rng([bases, each])
    found = []
    for _ in range(300):
        samples = rng.normal(0, 0.5, (bases, 1)) + rng.normal(0, 1, (bases, each))
        found.append(components(list(samples), np.random.default_rng(0)))
    assert covered([one.between for one in found], 0.5) >= 0.93
    assert 0.92 <= covered([one.within for one in found], 1.0) <= 0.98


def test_components_are_unbiased_where_base_seeds_differ_in_size() -> None:
    rng = np.random.default_rng(14)
    squares = []
    for _ in range(3000):
        samples = [rng.normal(rng.normal(0, 2), 1, n) for n in (3, 8, 4, 5)]
        size = 4 / sum(1 / len(sample) for sample in samples)
        within = components(samples, np.random.default_rng(0)).within.value ** 2 if len(squares) < 3 else None
        means = np.var([sample.mean() for sample in samples], ddof=1)
        pooled = sum(((sample - sample.mean()) ** 2).sum() for sample in samples) / (20 - 4)
        assert within is None or within == pytest.approx(pooled)
        squares.append(means - pooled / size)
        if len(squares) <= 3:
            between = components(samples, np.random.default_rng(0)).between.value
            assert between == pytest.approx(np.sqrt(max(squares[-1], 0)))
    assert np.mean(squares) == pytest.approx(4, abs=0.2)


def test_few_base_seeds_say_so() -> None:
    two = [np.array([1.0, 2.0, 4.0]), np.array([5.0, 6.0, 8.0])]
    found = components(two, np.random.default_rng(0))
    assert found.between.value > 0 and np.isnan(found.between.high) and "at least 3" in found.between.reason
    assert np.isnan(components([*two, np.array([1.0])], np.random.default_rng(0)).within.value)
    assert np.isnan(components(two[:1], np.random.default_rng(0)).between.value)
    mean, sd = across(np.array([1.0, 3.0]))
    assert mean.value == 2 and np.isnan(mean.low) and sd == pytest.approx(np.sqrt(2))
