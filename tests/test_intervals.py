"""The intervals cover what they claim to, and say why where they cannot be given."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import scipy.stats

from orchestrator.analysis import intervals, measures
from orchestrator.analysis.intervals import Estimate


def covers(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


@pytest.mark.parametrize("n", [5, 10, 20, 100])
def test_the_interval_of_an_sd_covers(n: int) -> None:
    draws = 3 + 0.2 * np.random.default_rng(n).standard_normal((2000, n))
    estimates = [intervals.spread(values) for values in draws]
    assert 0.92 <= np.mean([covers(estimate, 0.2) for estimate in estimates]) <= 0.97


@pytest.mark.parametrize("n", [10, 30])
def test_the_interval_of_a_mean_disagreement_covers(n: int) -> None:
    """Models of varying skill, drawn again and again and tested on the same examples of varying difficulty."""
    rng = np.random.default_rng(n)
    draws, examples = 1500, 100
    difficulty, skill = rng.normal(-2, 1.5, examples), rng.normal(0, 0.4, (draws, n, 1))
    wrong = rng.random((draws, n, examples)) < scipy.special.expit(difficulty + skill)
    points, weights = np.polynomial.hermite_e.hermegauss(40)
    share = scipy.special.expit(difficulty + 0.4 * points[:, None]).T @ weights / np.sqrt(2 * np.pi)
    truth = (2 * share * (1 - share)).mean()

    matrices = [measures.disagreement(models) for models in wrong.astype(np.int8)]
    jackknife = np.mean([covers(intervals.pairwise_mean(matrix, bounds=(0, 1)), truth) for matrix in matrices])
    assert 0.92 <= jackknife <= 0.98
    pairs = np.array([measures.pair_values(matrix) for matrix in matrices])
    over_pairs = np.abs(pairs.mean(1) - truth) <= 1.96 * pairs.std(1, ddof=1) / np.sqrt(pairs.shape[1])
    assert over_pairs.mean() < 0.8, "the naive error over pairs should fail here, or this test shows nothing"


def test_spread_is_the_jackknife_written_out() -> None:
    values = np.array([0.91, 0.93, 0.90, 0.95, 0.94, 0.89])
    n = len(values)
    left_out = np.array([np.log(np.delete(values, i).std(ddof=1)) for i in range(n)])
    error = np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())
    reach = scipy.stats.t.ppf(0.975, n - 1) * error
    estimate = intervals.spread(values)
    sd = values.std(ddof=1)
    assert estimate.value == pytest.approx(sd)
    assert (estimate.low, estimate.high) == pytest.approx((sd * np.exp(-reach), sd * np.exp(reach)))
    scaled = intervals.spread(100 * values + 7)
    assert (scaled.low, scaled.high) == pytest.approx((100 * estimate.low, 100 * estimate.high))


def test_pairwise_mean_is_the_jackknife_written_out() -> None:
    rng = np.random.default_rng(0)
    n = 6
    matrix = rng.uniform(0, 0.2, (n, n))
    matrix = (matrix + matrix.T) / 2

    def mean(part: np.ndarray) -> float:
        return part[np.triu_indices(len(part), 1)].mean()

    left_out = np.array([mean(np.delete(np.delete(matrix, i, 0), i, 1)) for i in range(n)])
    reach = scipy.stats.t.ppf(0.975, n - 1) * np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())
    estimate = intervals.pairwise_mean(matrix)
    assert estimate.value == pytest.approx(mean(matrix))
    assert (estimate.low, estimate.high) == pytest.approx((mean(matrix) - reach, mean(matrix) + reach))
    other = intervals.pairwise_mean(matrix + np.diag(rng.uniform(size=n)))
    assert (other.low, other.high) == pytest.approx((estimate.low, estimate.high)), "the diagonal must not count"
    cut = intervals.pairwise_mean(matrix, bounds=(estimate.value - reach / 2, 1.0))
    assert (cut.low, cut.high) == (pytest.approx(estimate.value - reach / 2), estimate.high)


def test_a_wider_level_is_a_wider_interval() -> None:
    values = np.random.default_rng(0).standard_normal(12)
    for function in (intervals.spread, intervals.mean):
        assert function(values, level=0.99).high > function(values).high > function(values, level=0.8).high


def test_mean_is_students_interval() -> None:
    values = np.array([0.91, 0.93, 0.90, 0.95])
    low, high = scipy.stats.t.interval(0.95, 3, values.mean(), scipy.stats.sem(values))
    estimate = intervals.mean(values)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((values.mean(), low, high))


@pytest.mark.parametrize(
    ("values", "value", "reason"),
    [
        ([], np.nan, "no replicate yet"),
        ([0.9], np.nan, "one replicate shows no spread"),
        ([0.9, 0.8], 0.1 / np.sqrt(2), "an interval of an SD needs at least 4 replicates"),
        ([0.9, 0.8, 0.7], 0.1, "an interval of an SD needs at least 4 replicates"),
        ([0.1, 0.1, 0.1], 0.0, "all 3 values are equal"),
        ([0.1, 0.1, 0.1, 0.3], 0.1, "all but one of the 4 values are equal"),
        ([0.1, 0.1, 0.3, 0.3], 0.2 / np.sqrt(3), intervals.UNMOVED),
    ],
)
def test_a_spread_without_an_interval_says_why(values: list[float], value: float, reason: str) -> None:
    estimate = intervals.spread(np.array(values))
    assert estimate.value == pytest.approx(value, nan_ok=True)
    assert np.isnan([estimate.low, estimate.high]).all() and estimate.reason == reason


@pytest.mark.parametrize(
    ("matrix", "value", "reason"),
    [
        (np.empty((0, 0)), np.nan, "no replicate yet"),
        (np.zeros((1, 1)), np.nan, "one replicate shows no spread"),
        (np.full((2, 2), 0.3), 0.3, "an interval over pairs needs at least 3 replicates"),
        (np.full((4, 4), 0.1), 0.1, "all 6 pairs have the same value"),
        (np.full((4, 4), np.nan), np.nan, "some pair has no value"),
        (np.abs(np.subtract.outer([0.0, 0.0, 0.3, 0.3], [0.0, 0.0, 0.3, 0.3])), 0.2, intervals.UNMOVED),
    ],
)
def test_a_mean_over_pairs_without_an_interval_says_why(matrix: np.ndarray, value: float, reason: str) -> None:
    estimate = intervals.pairwise_mean(matrix)
    assert estimate.value == pytest.approx(value, nan_ok=True)
    assert np.isnan([estimate.low, estimate.high]).all() and estimate.reason == reason


def test_a_mean_without_an_interval_says_why() -> None:
    for values, reason in (
        ([], "no replicate yet"),
        ([0.9], "one replicate shows no spread"),
        ([0.1, 0.1, 0.1], "all 3 values are equal"),
    ):
        estimate = intervals.mean(np.array(values))
        assert estimate.reason == reason and np.isnan([estimate.low, estimate.high]).all()
    assert intervals.mean(np.array([0.1, 0.1, 0.1])).value == 0.1


def test_the_papers_bootstrap_error() -> None:
    """For normal data of n = 100 the standard error of an SD is about s / sqrt(2 n)."""
    values = np.random.default_rng(1).standard_normal(100)
    error = intervals.bootstrap_error(values, np.random.default_rng(0))
    assert error == pytest.approx(values.std() / np.sqrt(200), rel=0.15)
    assert error == intervals.bootstrap_error(values, np.random.default_rng(0)), "one generator, one result"
    assert error != intervals.bootstrap_error(values, np.random.default_rng(1))
    assert intervals.bootstrap_error(np.full(4, 0.1), np.random.default_rng(0)) == 0
    assert np.isnan(intervals.bootstrap_error(values[:0], np.random.default_rng(0)))
