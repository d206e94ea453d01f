"""Smaller images: exact means over areas, in the specification's identity and shape."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import UserError
from protocols.protocol import DatasetSpec
from trainers.datasets import check, fingerprint, from_arrays, image_shape, prepare
from trainers.datasets.digits import digits
from trainers.datasets.shrink import CHUNK, shrink


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """No test sees the user's data or cache."""
    monkeypatch.delenv("NOISEGRID_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_blocks_have_their_mean_with_halves_rounded_up():
    images = np.array([[0, 1, 10, 11], [0, 1, 10, 12], [255, 255, 0, 0], [255, 255, 1, 2]], np.uint8)[None, :, :, None]
    assert shrink(images, 2)[0, :, :, 0].tolist() == [[1, 11], [255, 1]]  # of .5, 10.75, 255 and .75
    assert shrink(images.astype(np.float32), 2)[0, :, :, 0].tolist() == [[0.5, 10.75], [255, 0.75]]
    assert shrink(images, 4) is images


def test_a_pixel_between_two_is_shared_by_area():
    images = np.array([[0, 30, 60]] * 3, np.uint8)[None, :, :, None]
    # Each new column covers 1.5 old ones: (0 + 30/2) / 1.5 = 10 and (30/2 + 60) / 1.5 = 50.
    assert shrink(images, 2)[0, :, :, 0].tolist() == [[10, 50], [10, 50]]


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_every_new_pixel_is_the_exact_mean_of_its_area(height, width, data):
    size = data.draw(st.integers(1, min(height, width)))
    images = np.random.default_rng(height * width).integers(0, 256, (2, height, width, 2)).astype(np.uint8)

    def overlaps(new: int, length: int) -> list[Fraction]:
        low, high = Fraction(new * length, size), Fraction((new + 1) * length, size)
        return [max(Fraction(0), min(high, old + 1) - max(low, old)) for old in range(length)]

    small = shrink(images, size)
    real = shrink(images.astype(np.float32), size)
    assert small.shape == (2, size, size, 2) and small.dtype == np.uint8 and real.dtype == np.float32
    for row in range(size):
        for column in range(size):
            weights = np.multiply.outer(overlaps(row, height), overlaps(column, width))
            mean = sum((weights * images[1, :, :, 0]).ravel()) / weights.sum()
            assert small[1, row, column, 0] == (mean + Fraction(1, 2)).__floor__()
            assert real[1, row, column, 0] == pytest.approx(float(mean), rel=1e-6)


def test_large_sets_are_shrunk_a_part_at_a_time():
    images = np.random.default_rng(0).integers(0, 256, (CHUNK + 3, 4, 4, 1)).astype(np.uint8)
    assert np.array_equal(shrink(images, 2)[-3:], shrink(images[-3:], 2))


def test_the_size_is_part_of_the_identity():
    plain, small = DatasetSpec(name="digits"), DatasetSpec(name="digits", image_size=4)
    assert fingerprint(digits, small) != fingerprint(digits, plain)
    assert image_shape(digits, plain) == (8, 8, 1) and image_shape(digits, small) == (4, 4, 1)
    whole, shrunk = prepare(digits, plain), prepare(digits, small)
    assert shrunk.image_shape == (4, 4, 1) and shrunk.fingerprint == fingerprint(digits, small)
    assert np.array_equal(shrunk.test_images, shrink(np.asarray(whole.test_images), 4))
    assert np.array_equal(shrunk.train_labels, whole.train_labels)


def test_fingerprints_of_whole_images_are_those_of_old():
    # Whatever is stored under them would be lost otherwise.
    assert fingerprint(digits, DatasetSpec(name="digits")) == OLD


OLD = "4b88aca6158229b90ffb74db0116808c4aeb1a5583c7e682e58e00e1249903b5"


def test_images_do_not_grow():
    rng = np.random.default_rng(0)
    wide = from_arrays(
        name="wide",
        train_images=rng.integers(0, 256, (6, 4, 10, 3)).astype(np.uint8),
        train_labels=[0, 1] * 3,
        test_images=rng.integers(0, 256, (4, 4, 10, 3)).astype(np.uint8),
        test_labels=[0, 1] * 2,
    )
    assert image_shape(wide, DatasetSpec(name="wide", image_size=4)) == (4, 4, 3)
    assert prepare(wide, DatasetSpec(name="wide", image_size=3)).train_images.shape == (6, 3, 3, 3)
    for function in (fingerprint, image_shape, prepare, check):
        with pytest.raises(UserError) as error:
            function(wide, DatasetSpec(name="wide", image_size=5))
        message = str(error.value)
        assert "\n" not in message and "'wide'" in message and "image_size must be at most 4, not 5" in message
