"""Ratios, verdicts and reductions: their arithmetic written out, and what they cover."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from orchestrator.analysis import intervals, jackknife, measures
from orchestrator.analysis.comparisons import CANNOT_SAY, DIFFERENT, SAME, compare, relative
from orchestrator.analysis.jackknife import Jackknife, deviation, pair_average
from orchestrator.analysis.overheads import median_ratio
from orchestrator.analysis.reductions import PAIRS, distance, reduction, variability_reduction
from protocols.protocol import MEASURES


def covered(estimates: list[intervals.Estimate], truth: float) -> float:
    return float(np.mean([estimate.low <= truth <= estimate.high for estimate in estimates]))


@pytest.mark.parametrize("blocks", [None, np.array([0, 0, 1, 1, 1, 2, 3])])
def test_leaving_out_is_computing_without(blocks: np.ndarray | None) -> None:
    rng = np.random.default_rng(0)
    values, matrix = rng.normal(5, 1, 7), rng.random((7, 7))
    matrix = matrix + matrix.T
    own = np.arange(7) if blocks is None else blocks
    left = [np.flatnonzero(own != block) for block in np.unique(own)]
    pairs = [[matrix[i, j] for i, j in itertools.combinations(rows, 2)] for rows in left]
    np.testing.assert_allclose(deviation(values, blocks).without[0], [values[rows].std(ddof=1) for rows in left])
    np.testing.assert_allclose(pair_average(matrix, blocks).without[0], [np.mean(values) for values in pairs])
    assert pair_average(matrix).value == pytest.approx(measures.pair_mean(matrix))


def test_two_sets_of_models_have_welchs_degrees_of_freedom() -> None:
    """For means the jackknife is Student's and Welch's own arithmetic."""

    def average(values: np.ndarray) -> Jackknife:
        return Jackknife(value=values.mean(), without=((values.sum() - values) / (len(values) - 1),))

    rng = np.random.default_rng(1)
    a, b = rng.normal(0, 1, 8), rng.normal(1, 4, 15)
    both = jackknife.separate(np.subtract, [average(a)], [average(b)])
    expected = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    found = intervals.interval(both)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    paired = jackknife.same(np.subtract, average(a), average(b[:8]))
    expected = scipy.stats.ttest_rel(a, b[:8]).confidence_interval()
    found = intervals.interval(paired)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_the_published_ratio_of_two_arms_of_fifty() -> None:
    """Morin & Willetts: SDs of 1.995 and 2.699 over 50 runs each leave .56 to .98 for their ratio."""
    rng = np.random.default_rng(2)
    ends = []
    for _ in range(400):
        arms = [rng.standard_normal(50) for _ in range(2)]
        fixed, varied = (sd * arm / arm.std(ddof=1) for sd, arm in zip((1.995e-2, 2.699e-2), arms, strict=True))
        ratio = compare(deviation(fixed), deviation(varied), 1.25).ratio
        assert ratio.value == pytest.approx(0.739, abs=5e-4)
        ends.append((ratio.low, ratio.high))
    low, high = np.median(ends, axis=0)
    assert (low, high) == (pytest.approx(0.56, abs=0.01), pytest.approx(0.98, abs=0.015))


@pytest.mark.parametrize("sizes", [(8, 8), (10, 40)])
def test_the_interval_of_a_ratio_covers(sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(sizes)
    ratios = []
    for _ in range(1500):
        a, b = (sd * rng.standard_normal(n) for sd, n in zip((0.6, 0.2), sizes, strict=True))
        ratios.append(compare(deviation(a), deviation(b), 1.25).ratio)
    assert 0.92 <= covered(ratios, 3.0) <= 0.98


def test_verdicts_err_as_seldom_as_they_say() -> None:
    """At the margin ``same`` is wrong, at a ratio of 1 ``different`` is: either at most about one time in twenty."""
    rng = np.random.default_rng(3)

    def verdicts(ratio: float, n: int) -> list[str]:
        draws = rng.standard_normal((600, 2, n))
        return [compare(deviation(ratio * a), deviation(b), 1.5).verdict for a, b in draws]

    assert np.mean([verdict == SAME for verdict in verdicts(1.5, 60)]) <= 0.075
    assert np.mean([verdict == DIFFERENT for verdict in verdicts(1.0, 60)]) <= 0.075
    assert np.mean([verdict == SAME for verdict in verdicts(1.0, 60)]) >= 0.8, "about 53 replicates find it at x1.5"
    assert np.mean([verdict == DIFFERENT for verdict in verdicts(2.5, 60)]) >= 0.95
    assert np.mean([verdict == DIFFERENT for verdict in verdicts(1 / 2.5, 60)]) >= 0.95, "in either direction"
    assert np.mean([verdict == CANNOT_SAY for verdict in verdicts(1.0, 6)]) >= 0.8


def test_what_is_known_to_be_close_is_the_same_even_where_it_differs() -> None:
    rng = np.random.default_rng(4)
    values = rng.standard_normal(4000)
    found = compare(deviation(1.1 * values), deviation(rng.standard_normal(4000)), 1.25)
    assert found.ratio.low > 1 and found.verdict == SAME
    assert compare(deviation(1.1 * values), deviation(values), 1.05, paired=True).verdict != SAME


def test_a_cell_that_does_not_vary_is_compared_with_nothing() -> None:
    still, moving = deviation(np.full(6, 0.9)), deviation(np.arange(6.0))
    for found in (compare(still, moving, 1.25), compare(moving, still, 1.25)):
        assert found.verdict == CANNOT_SAY and np.isnan(found.ratio.high) and found.ratio.reason


def random_cell(noise: float, common: np.ndarray, own: np.ndarray) -> dict:
    """The five measures of models that share ``common`` logits and add ``own`` ones, in which they differ."""
    labels = np.arange(common.shape[0]) % common.shape[1]
    logits = common + noise * own
    data = {
        "accuracy_sd": measures.accuracy(logits, labels),
        "cross_entropy_sd": measures.cross_entropy(logits, labels),
        "disagreement": measures.disagreement(measures.predictions(logits)),
        "correlation": measures.pearson(logits),
        "ensemble_gain": measures.ensemble_gain(logits, labels),
    }
    return {name: distance(name, data[name]) for name in MEASURES}


@pytest.mark.parametrize("paired", [True, False])
def test_the_interval_of_a_mean_reduction_covers(paired: bool) -> None:
    rng = np.random.default_rng(5)
    n, examples, classes = 12, 60, 3
    common = rng.standard_normal((examples, classes))
    common[np.arange(examples), np.arange(examples) % classes] += 1.5

    def draw(n: int) -> tuple[dict, dict]:
        def own() -> np.ndarray:
            return rng.standard_normal((n, examples, classes)) + 0.15 * rng.standard_normal((n, 1, 1)) * common

        before = own()
        after = before if paired else own()
        return random_cell(1.0, common, before), random_cell(0.5, common, after)

    def values(cell: dict) -> dict[str, float]:
        return {name: 1 - cell[name].value if name == "correlation" else cell[name].value for name in MEASURES}

    large = [draw(400) for _ in range(4)]
    truth = np.mean([variability_reduction(values(after), values(before)) for before, after in large])
    found = [reduction(before, after, 1.25, paired) for before, after in (draw(n) for _ in range(300))]
    assert 0.9 <= covered([one.mean for one in found], float(truth)) <= 0.995
    for name in MEASURES:
        single = np.mean([1 - after[name].value / before[name].value for before, after in large])
        assert 0.89 <= covered([one.measures[name] for one in found], float(single)), name


def test_the_mean_reduction_is_the_published_figures_arithmetic() -> None:
    rng = np.random.default_rng(6)
    cells = []
    for scale in (1.0, 0.6):
        own = rng.random((5, 5))
        data = {name: scale * ((own + own.T) / 2 if name in PAIRS else rng.random(5)) for name in MEASURES}
        cells.append({name: distance(name, data[name]) for name in MEASURES})
    before, after = cells
    plain = [
        {name: 1 - cell[name].value if name == "correlation" else cell[name].value for name in MEASURES}
        for cell in (before, after)
    ]
    found = reduction(before, after, 1.25, paired=False)
    assert found.mean.value == pytest.approx(variability_reduction(plain[1], plain[0]))
    assert found.mean.value == pytest.approx(np.mean([one.value for one in found.measures.values()]))


def test_the_same_models_twice_tell_more_than_others() -> None:
    rng = np.random.default_rng(7)
    before = rng.standard_normal(30)
    after = 0.8 * before + 0.02 * rng.standard_normal(30)
    paired, unpaired = (relative(deviation(after), deviation(before), paired) for paired in (True, False))
    assert paired.error < unpaired.error / 5


def test_a_gain_that_is_not_above_nothing_has_an_interval_of_its_own() -> None:
    """There is no logarithm of it, but there is a difference."""
    gain = Jackknife(value=-0.1, without=(np.array([-0.3, 0.1, -0.15, -0.1]),))
    other = Jackknife(value=1.0, without=(np.array([1.1, 0.9, 1.0, 1.05]),))
    found = compare(gain, other, 1.25)
    assert found.verdict == CANNOT_SAY and np.isnan(found.ratio.low)
    assert found.difference.low < -1.1 < found.difference.high


def test_a_base_without_a_gain_has_nothing_to_reduce() -> None:
    """Of a negative base a share has the wrong sign: everything noisier would read as a reduction."""
    rng = np.random.default_rng(0)
    before = {name: deviation(rng.standard_normal(6)) for name in MEASURES}
    before["ensemble_gain"] = pair_average(np.full((6, 6), -0.5) + 0.01 * rng.standard_normal((6, 6)))
    after = {**before, "ensemble_gain": pair_average(np.full((6, 6), 3.0))}
    found = reduction(before, after, 1.25, paired=True)
    assert np.isnan(found.measures["ensemble_gain"].value) and np.isnan(found.mean.value)
    assert "nothing to reduce" in found.mean.reason
    assert found.measures["disagreement"].value == 0


@pytest.mark.parametrize("sizes", [(8, 8), (5, 30)])
def test_the_ratio_of_median_times_covers(sizes: tuple[int, int]) -> None:
    """Times with stragglers."""
    rng = np.random.default_rng(sizes)
    ratios = []
    for _ in range(1500):
        held, released = (scale * np.exp(0.1 * rng.standard_t(3, n)) for scale, n in zip((24, 10), sizes, strict=True))
        ratios.append(median_ratio(held, released))
    assert 0.92 <= covered(ratios, 2.4) <= 0.99


def test_few_times_have_a_ratio_and_no_interval() -> None:
    found = median_ratio(np.array([2.0, 2.0, 4.0]), np.array([1.0] * 9))
    assert found.value == 2 and np.isnan(found.low) and "at least 5 runs" in found.reason
    assert np.isnan(median_ratio(np.array([]), np.array([1.0])).value)
