"""The measures of pairs equal a naive reference that takes one pair at a time, and hold on the edges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.special
import scipy.stats

from orchestrator.analysis import measures


def random_logits(models: int = 7, examples: int = 60, classes: int = 5, decimals: int | None = None) -> np.ndarray:
    """Models that agree more often than by chance; rounding makes many exact ties."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((models, examples, classes)) + 1.5 * rng.standard_normal((examples, classes))
    return (logits if decimals is None else logits.round(decimals)).astype(np.float32)


@pytest.fixture(params=[None, 0, 1], ids=["distinct", "many ties", "some ties"])
def logits(request: pytest.FixtureRequest) -> np.ndarray:
    return random_logits(decimals=request.param)


LABELS = np.random.default_rng(4).integers(0, 5, 60)


def by_pairs(function, models: int) -> np.ndarray:
    """A (models, models) matrix of ``function(i, j)``, the diagonal left NaN."""
    matrix = np.full((models, models), np.nan)
    for i, j in itertools.permutations(range(models), 2):
        matrix[i, j] = function(i, j)
    return matrix


def check(matrix: np.ndarray, expected: np.ndarray, diagonal: float) -> None:
    np.testing.assert_allclose(np.diag(matrix), diagonal, atol=1e-12)
    off = ~np.eye(len(matrix), dtype=bool)
    np.testing.assert_allclose(matrix[off], expected[off], rtol=0, atol=1e-10)
    assert measures.pair_mean(matrix) == pytest.approx(np.nanmean(expected), abs=1e-10)


@pytest.mark.parametrize("block", [1, 500, 1 << 20])
def test_correlations_equal_scipy(logits: np.ndarray, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "LONG_BLOCK", block)
    flat = logits.astype(np.float64).reshape(len(logits), -1)
    for ours, theirs in (
        (measures.spearman, scipy.stats.spearmanr),
        (measures.pearson, scipy.stats.pearsonr),
    ):
        check(ours(logits), by_pairs(lambda i, j, f=theirs: f(flat[i], flat[j]).statistic, len(flat)), 1)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_ranks_are_scipys(kind: type) -> None:
    values = np.random.default_rng(5).standard_normal(5000).astype(kind).astype(np.float32)
    values[:6] = 0.0, -0.0, 65504.0, -65504.0, 6e-8 if kind is np.float32 else 2.0**-24, 2.0**-24
    assert (measures.rank(values) == scipy.stats.rankdata(values)).all()


@pytest.mark.parametrize("block", [1, 500, 1 << 20])
def test_disagreement_and_gain_equal_a_loop(logits: np.ndarray, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "BLOCK", block)
    models, examples, _ = logits.shape
    exact = logits.astype(np.float64)

    def right(values: np.ndarray) -> float:
        return sum(int(np.argmax(values[k])) == LABELS[k] for k in range(examples)) / examples

    def differ(i: int, j: int) -> float:
        return sum(np.argmax(exact[i, k]) != np.argmax(exact[j, k]) for k in range(examples)) / examples

    def gain(i: int, j: int) -> float:
        together = right((exact[i] + exact[j]) / 2)
        return ((together - right(exact[i])) + (together - right(exact[j]))) / 2

    check(measures.disagreement(measures.predictions(logits)), by_pairs(differ, models), 0)
    check(measures.ensemble_gain(logits, LABELS), by_pairs(gain, models), 0)
    np.testing.assert_allclose(measures.accuracy(logits, LABELS), [right(model) for model in exact], atol=1e-12)


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_cross_entropy_is_the_mean_over_all_examples(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "BLOCK", block)
    logits = 40 * random_logits()
    logs = scipy.special.log_softmax(logits.astype(np.float64), axis=2)
    expected = -logs[:, np.arange(60), LABELS].mean(axis=1)
    np.testing.assert_allclose(measures.cross_entropy(logits, LABELS), expected, rtol=1e-12)


def test_gain_averages_logits_and_not_probabilities() -> None:
    """One very sure model outvotes the other by logits; by probabilities the two would tie the other way."""
    logits = np.array([[[9.0, 0.0]], [[0.0, 3.0]]])
    logits = np.concatenate([logits, [[[0.0, 3.0]]]])
    labels = np.array([0])
    assert measures.ensemble_accuracy(logits, labels)[0, 1] == 1
    probabilities = scipy.special.softmax(logits, axis=2)
    assert probabilities[1:].mean(axis=0).argmax() == 1
    assert measures.ensemble_gain(logits, labels)[0, 1] == pytest.approx(0.5)
    assert measures.ensemble_gain(logits, labels)[1, 2] == 0


def test_identical_models_are_exactly_alike() -> None:
    logits = np.repeat(random_logits(1, 500, 10), 4, axis=0)
    assert (measures.spearman(logits) == 1).all()
    np.testing.assert_allclose(measures.pearson(logits), 1, rtol=1e-14)
    assert (measures.disagreement(measures.predictions(logits)) == 0).all()
    assert (measures.ensemble_gain(logits, np.zeros(500, np.int64)) == 0).all()


def test_each_model_is_ranked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = []
    rank = measures.rank
    monkeypatch.setattr(measures, "rank", lambda values: ranked.append(1) or rank(values))
    measures.spearman(random_logits(6))
    assert len(ranked) == 6


def test_standard_deviation() -> None:
    values = np.array([0.91, 0.93, 0.90, 0.95])
    assert measures.standard_deviation(values) == pytest.approx(np.std(values, ddof=1))
    assert measures.standard_deviation(values, ddof=0) == pytest.approx(np.std(values))
    assert measures.standard_deviation(np.full(3, 0.1)) == 0, "the mean of three times .1 is not .1"
    assert np.isnan(measures.standard_deviation(values[:1]))
    assert measures.standard_deviation(values[:1], ddof=0) == 0
    assert np.isnan(measures.standard_deviation(values[:0], ddof=0))


@pytest.mark.parametrize("models", [0, 1])
def test_too_few_models_have_no_pairs(models: int) -> None:
    logits = random_logits()[:models]
    for matrix in (
        measures.spearman(logits),
        measures.pearson(logits),
        measures.disagreement(measures.predictions(logits)),
        measures.ensemble_gain(logits, LABELS),
    ):
        assert matrix.shape == (models, models)
        assert np.isnan(measures.pair_mean(matrix))


def test_two_classes_and_constant_logits() -> None:
    logits = random_logits(4, 30, 2)
    logits[2] = 1.5
    labels = np.random.default_rng(0).integers(0, 2, 30)
    for matrix in (measures.spearman(logits), measures.pearson(logits)):
        assert np.isnan(matrix[2]).all() and np.isnan(matrix[:, 2]).all()
        assert np.isfinite(np.delete(np.delete(matrix, 2, 0), 2, 1)).all()
    assert np.isfinite(measures.disagreement(measures.predictions(logits))).all()
    assert np.isfinite(measures.ensemble_gain(logits, labels)).all()
