"""Representations and weights of two networks, held against definitions written out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from orchestrator.analysis import intervals, similarity, weights


def gram(features: np.ndarray) -> np.ndarray:
    return features @ features.T


def hsic(first: np.ndarray, second: np.ndarray) -> float:
    """HSIC_1 of Song et al. (2012), term by term."""
    m = len(first)
    k, l = (np.where(np.eye(m, dtype=bool), 0, values) for values in (first, second))  # noqa: E741
    one = np.ones(m)
    return float(
        np.trace(k @ l) + (one @ k @ one) * (one @ l @ one) / ((m - 1) * (m - 2)) - 2 / (m - 2) * one @ k @ l @ one
    ) / (m * (m - 3))


@pytest.mark.parametrize("examples", [4, 5, 30])
def test_alignment_is_its_definition(examples: int) -> None:
    rng = np.random.default_rng(examples)
    grams = np.stack([gram(rng.standard_normal((examples, 7))) for _ in range(4)])
    found = similarity.alignments(grams)
    for i, j in itertools.combinations(range(4), 2):
        one, other = hsic(grams[i], grams[i]), hsic(grams[j], grams[j])
        assert found[i, j] == pytest.approx(hsic(grams[i], grams[j]) / np.sqrt(one * other))
        assert similarity.cka(grams[i], grams[j]) == pytest.approx(found[i, j])


def test_independent_features_align_by_nothing_on_average() -> None:
    """Where the plug-in estimator finds a fifth."""
    rng = np.random.default_rng(0)
    pairs = rng.standard_normal((300, 2, 32, 8))
    unbiased = np.mean([similarity.cka(gram(a), gram(b)) for a, b in pairs])
    assert abs(unbiased) < 0.01

    def centred(values: np.ndarray) -> np.ndarray:
        values = gram(values - values.mean(axis=0))
        return values / np.linalg.norm(values)

    assert np.mean([(centred(a) * centred(b)).sum() for a, b in pairs]) > 0.15


def test_rotated_scaled_and_shifted_features_are_the_same() -> None:
    rng = np.random.default_rng(1)
    features = rng.standard_normal((20, 6))
    rotation = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    assert similarity.cka(gram(features), gram(3 * features @ rotation)) == pytest.approx(1)
    assert similarity.cka(gram(features), gram(features + 5)) == pytest.approx(1)
    assert similarity.cka(gram(features).astype(np.float32), gram(features)) == pytest.approx(1, abs=1e-5)


def test_layers_that_tell_nothing_apart_have_no_alignment() -> None:
    rng = np.random.default_rng(2)
    other = gram(rng.standard_normal((9, 3)))
    for still in (np.zeros((9, 9)), np.full((9, 9), 0.3)):
        assert np.isnan(similarity.cka(still, other))
    with pytest.raises(ValueError, match="at least 4 examples, not 3"):
        similarity.cka(other[:3, :3], other[:3, :3])
    assert similarity.alignments(np.empty((0, 9, 9))).shape == (0, 0)


def test_the_interval_of_a_mean_alignment_covers() -> None:
    """Networks that share a signal of varying strength, over the same probe examples."""
    rng = np.random.default_rng(3)
    signal = rng.standard_normal((16, 4))

    def matrix(models: int) -> np.ndarray:
        strength = rng.uniform(0.5, 2, (models, 1, 1))
        features = strength * signal + rng.standard_normal((models, 16, 4))
        return similarity.alignments(np.stack([gram(values) for values in features]))

    truth = np.mean([intervals.pairwise_mean(matrix(300)).value for _ in range(5)])
    found = [intervals.pairwise_mean(matrix(12)) for _ in range(500)]
    assert 0.91 <= np.mean([one.low <= truth <= one.high for one in found]) <= 0.99


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_neighbours_are_one_apart(kind: type) -> None:
    values = np.array([1.0, -1.0, 0.0, 6e-8, -3.5, 1024.0], kind)
    for direction in (np.inf, -np.inf):
        moved = np.nextafter(values, kind(direction))
        difference = weights.ordered(moved).astype(object) - weights.ordered(values).astype(object)
        assert difference.tolist() == [1 if direction > 0 else -1] * len(values)
    assert weights.largest_ulp(values, values) == 0
    assert weights.largest_ulp(np.array([0.0], kind), np.array([-0.0], kind)) == 0
    ranked = np.sort(np.random.default_rng(0).standard_normal(50).astype(kind))
    assert (np.diff(weights.ordered(ranked).astype(object)) >= 0).all()


def test_the_farthest_apart_do_not_overflow() -> None:
    ends = np.array([np.finfo(np.float64).max]), np.array([-np.finfo(np.float64).max])
    assert weights.largest_ulp(*ends) == 2 * (0x7FEFFFFFFFFFFFFF)
    assert weights.largest_ulp(np.array([np.nan]), np.array([1.0])) == -1
    assert weights.largest_ulp(np.empty(0), np.empty(0)) == 0


def test_tensors_of_two_runs() -> None:
    first = {"a": np.array([3.0, 4.0], np.float32), "b": np.zeros((2, 2), np.float32), "c": np.ones(1, np.float32)}
    second = {"a": np.array([3.0, -4.0], np.float32), "b": np.zeros((2, 2), np.float32)}
    found = weights.tensors_apart(first, second)
    assert list(found) == ["a", "b"]
    assert not found["a"].equal and found["a"].changed == 1 and found["a"].size == 2
    assert found["a"].distance == 8 and found["a"].cosine == pytest.approx(-7 / 25)
    assert found["b"].equal and found["b"].largest_ulp == 0 and np.isnan(found["b"].cosine)
    with pytest.raises(ValueError, match="cannot be compared"):
        weights.apart(first["a"], first["b"])
    signed = weights.apart(np.array([0.0]), np.array([-0.0]))
    assert not signed.equal and signed.largest_ulp == 0, "other bits, the same number"
