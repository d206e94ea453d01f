"""How far the models of one cell differ: pure functions over arrays.

One shape convention holds throughout: logits are (models, examples, classes), also as a sequence of the models' arrays
where pairs are compared; predictions are (models, examples), labels (examples,), and a measure of pairs is a symmetric
(models, models) matrix. Sums are taken in float64, shares are between 0 and 1, and values are expected to be finite.
Definitions follow Summers & Dinneen (ICML 2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Logits = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]

BLOCK = 1 << 20
"""Numbers held at once by the measures that work through the test set in blocks (8 MiB in float64)."""

LONG_BLOCK = 1 << 24
"""Numbers held at once by correlations, which long products serve better (128 MiB in float64)."""


def predictions(logits: Logits) -> Integers:
    """The class of the largest logit, the first of them where several tie.

    Args:
        logits: (models, examples, classes)

    Returns:
        (models, examples)
    """
    chosen: Integers = logits.argmax(axis=2)
    return chosen


def accuracy(logits: Logits, labels: Integers) -> Floats:
    """The share of test examples that each model classifies correctly.

    Args:
        logits: (models, examples, classes)
        labels: (examples,)

    Returns:
        (models,), 0 to 1
    """
    correct: Floats = (predictions(logits) == labels).mean(axis=1, dtype=np.float64)
    return correct


def cross_entropy(logits: Logits, labels: Integers) -> Floats:
    """Each model's mean over the test examples of ``log(sum(exp(logits))) - logits[label]``, in nats.

    Args:
        logits: (models, examples, classes)
        labels: (examples,)

    Returns:
        (models,)
    """
    models, examples, classes = logits.shape
    total = np.zeros(models)
    for part in _blocks(examples, models * classes):
        values = logits[:, part].astype(np.float64)
        values -= values.max(axis=2, keepdims=True)
        chosen = np.take_along_axis(values, labels[None, part, None].astype(np.intp), axis=2)[:, :, 0]
        total += (np.log(np.exp(values).sum(axis=2)) - chosen).sum(axis=1)
    mean: Floats = total / examples
    return mean


def standard_deviation(values: Floats, ddof: int = 1) -> float:
    """The standard deviation over models.

    Args:
        values: (models,)
        ddof: 1 for the unbiased variance; 0 as the papers compute it, which is too small by sqrt((n - 1) / n).

    Returns:
        NaN where there are not more than ``ddof`` models; exactly 0 where all values are equal.
    """
    if len(values) <= ddof:
        return float("nan")
    # Centred on one of the values first: the mean of equal values may round away from them.
    return float(np.std(np.asarray(values, np.float64) - values[0], ddof=ddof))


def disagreement(choices: Integers) -> Floats:
    """The share of test examples on which two models predict different classes.

    Args:
        choices: predictions, (models, examples)

    Returns:
        (models, models), 0 to 1, 0 on the diagonal
    """
    models, examples = choices.shape
    count = np.zeros((models, models), np.int64)
    for part in _blocks(examples, models):
        values = choices[:, part]
        for model in range(models):
            count[model, model:] += (values[model] != values[model:]).sum(axis=1)
    return _symmetric(count / examples)


def pearson(logits: Logits | Sequence[Logits]) -> Floats:
    """Pearson's correlation of two models' flattened logits.

    Args:
        logits: (models, examples, classes)

    Returns:
        (models, models), -1 to 1; NaN for a model whose logits are all equal
    """
    return _correlation([one.reshape(-1) for one in logits])


def spearman(logits: Logits | Sequence[Logits]) -> Floats:
    """Spearman's rank correlation of two models' flattened logits; tied logits share the mean of their ranks.

    Each model is ranked once. Memory: an int32 for each logit.

    Args:
        logits: (models, examples, classes)

    Returns:
        (models, models), -1 to 1; NaN for a model whose logits are all equal
    """
    # Twice the rank minus its mean is a whole number, so the sums of _correlation are exact for up to about 10^5 logits
    # and two identical models correlate by exactly 1.
    return _correlation([(2 * rank(one.reshape(-1)) - (one.size + 1)).astype(np.int32) for one in logits])


def rank(values: Logits) -> Floats:
    """The ranks of (n,) values, from 1; tied values share the mean of their ranks."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if (halves == values).all():
        # Large logits are stored as float16, and of so few different values are counted far sooner than sorted.
        bits = halves.view(np.uint16).astype(np.int32)
        places = 0x8000 + np.where(bits < 0x8000, bits, 0x8000 - bits)
        counts = np.bincount(places, minlength=0x10000)
        ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[places]
        return ranks
    # Not scipy.stats.rankdata: its result is the same, its import takes as long as all else that a report imports.
    import pandas as pd  # which takes long, and an interval alone does not need it

    return np.asarray(pd.Series(values).rank(), dtype=np.float64)


def ensemble_accuracy(logits: Logits | Sequence[Logits], labels: Integers) -> Floats:
    """The accuracy of the mean of two models' logits (logits are averaged, not probabilities).

    Args:
        logits: (models, examples, classes)
        labels: (examples,)

    Returns:
        (models, models), 0 to 1; each model's own accuracy on the diagonal
    """
    models, (examples, classes) = len(logits), logits[0].shape if len(logits) else (0, 0)
    count = np.zeros((models, models), np.int64)
    for part in _blocks(examples, models * classes):
        values = np.array([one[part] for one in logits], np.float64)
        for model in range(models):
            count[model, model:] += ((values[model] + values[model:]).argmax(axis=2) == labels[part]).sum(axis=1)
    return _symmetric(count / examples)


def ensemble_gain(logits: Logits | Sequence[Logits], labels: Integers) -> Floats:
    """What averaging two models' logits adds to the accuracy of one of them, averaged over the two.

    Args:
        logits: (models, examples, classes)
        labels: (examples,)

    Returns:
        (models, models), 0 on the diagonal
    """
    both = ensemble_accuracy(logits, labels)
    own = np.diag(both)
    return both - (own[:, None] + own[None, :]) / 2


def pair_values(matrix: Floats) -> Floats:
    """The values of a (models, models) matrix over its distinct pairs, shape (models (models - 1) / 2,)."""
    return matrix[np.triu_indices(len(matrix), k=1)]


def pair_mean(matrix: Floats) -> float:
    """The mean of a (models, models) matrix over its distinct pairs; NaN for fewer than two models."""
    values = pair_values(matrix)
    return float(values.mean()) if len(values) else float("nan")


def _blocks(examples: int, width: int, block: int | None = None) -> Iterator[slice]:
    """Slices of the test set such that ``width`` numbers an example stay within ``block`` (None: ``BLOCK``)."""
    step = max(1, (BLOCK if block is None else block) // max(1, width))
    return (slice(start, start + step) for start in range(0, examples, step))


def _symmetric(upper: Floats) -> Floats:
    """The symmetric matrix of which ``upper`` is the upper triangle, diagonal included."""
    return np.where(np.tri(len(upper), k=-1, dtype=bool), upper.T, upper)


def _correlation(rows: Sequence[NDArray[Any]]) -> Floats:
    """Correlation of rows of numbers, taken in float64."""
    if not len(rows) or not len(rows[0]):
        return np.full((len(rows), len(rows)), np.nan)
    products = np.zeros((len(rows), len(rows)))
    means = np.array([[row.astype(np.float64).mean()] for row in rows])
    for part in _blocks(len(rows[0]), len(rows), LONG_BLOCK):
        values = np.array([row[part] for row in rows], np.float64) - means
        products += values @ values.T
    squares = np.diag(products)
    scale = np.sqrt(np.outer(squares, squares))
    result = np.full(products.shape, np.nan)
    np.divide(products, scale, out=result, where=scale > 0)
    return result.clip(-1, 1)
