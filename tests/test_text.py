"""Text: which windows and labels a file becomes, and Penn Treebank's files held against what was published."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from protocols.contract import Dataset
from protocols.errors import UserError
from protocols.protocol import DatasetSpec
from trainers.datasets import Definition, check, fingerprint, from_text, image_shape, prepare, text, text_file

POEM = "the cat sat\non the mat\nthe dog sat\non the cat\n"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """No test sees the user's data or cache."""
    monkeypatch.delenv("NOISEGRID_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def one_line(error: pytest.ExceptionInfo[UserError], *parts: object) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def file(tmp_path: Path, content: str | bytes, name: str = "poem.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def prepared(definition: Definition, **sizes: int) -> Dataset:
    return prepare(definition, DatasetSpec(name=definition.name, **sizes))


def test_bytes_are_cut_into_windows_and_labelled_with_what_follows(tmp_path):
    content = bytes(range(200))
    definition = from_text(name="numbers", path=file(tmp_path, content), length=7, test_share=0.25)
    data = prepared(definition)
    # 150 tokens to train on: 21 windows of 7 and what follows, 2 left over; 50 to test on: 7 windows.
    assert data.train_images.shape == data.train_labels.shape == (21, 7) and data.test_images.shape == (7, 7)
    assert data.train_images.dtype == np.int32 and data.train_labels.dtype == data.test_labels.dtype == np.int64
    assert np.array_equal(data.train_images.reshape(-1), np.arange(147))
    assert np.array_equal(data.train_labels, data.train_images + 1)
    assert np.array_equal(data.test_images.reshape(-1), np.arange(150, 199))
    assert data.test_labels.shape == (49,) and np.array_equal(data.test_labels, np.arange(151, 200))
    assert data.is_text and data.image_shape == (7,) and data.classes == 256 and data.test_examples == 7
    assert data.shift.shape == data.scale.shape == (0,) and data.full_train_size == 21


def test_words_are_numbered_by_how_often_they_are_trained_on(tmp_path):
    test = file(tmp_path, "the owl sat\n", "test.txt")
    definition = from_text(name="poem", path=file(tmp_path, POEM), test_path=test, level="word", length=3)
    data = prepared(definition)
    words = ["<eos>", "the", "cat", "on", "sat", "dog", "mat", "<unk>"]  # 4, 4, 2, 2, 2, 1, 1 times; and the owl
    assert data.classes == len(words)
    said = [words[number] for number in data.train_images.reshape(-1)]
    assert said == [word for line in POEM.splitlines() for word in (*line.split(), "<eos>")][:15]
    assert [words[number] for number in data.test_images[0]] == ["the", "<unk>", "sat"]
    assert [words[number] for number in data.test_labels] == ["<unk>", "sat", "<eos>"]


def test_characters_of_any_alphabet(tmp_path):
    definition = from_text(name="greek", path=file(tmp_path, "αβ" * 50), level="char", length=4)
    assert definition.classes == 2  # as often: in their own order
    assert prepared(definition).train_images[0].tolist() == [0, 1, 0, 1]


def test_a_part_of_a_text_is_its_first_windows(tmp_path):
    definition = from_text(name="poem", path=file(tmp_path, POEM * 20), length=10)
    whole, part = prepared(definition), prepared(definition, train_size=3, test_size=2)
    assert np.array_equal(part.train_images, whole.train_images[:3]) and part.train_samples.tolist() == [0, 1, 2]
    assert np.array_equal(part.train_labels, whole.train_labels[:3])
    assert np.array_equal(part.test_labels, whole.test_labels[:20]) and part.test_examples == 2
    with pytest.raises(UserError) as error:
        prepared(definition, train_size=10_000)
    one_line(error, "poem", "train_size", "between 1 (one window)", str(definition.train_size))


def test_a_text_file_is_its_bytes_with_the_last_tenth_to_test_on(tmp_path):
    path = file(tmp_path, POEM * 100, "book.txt")
    definition = text_file(str(path))
    size = len(POEM) * 100
    assert (definition.name, definition.classes, definition.image_shape) == ("book.txt", 256, (35,))
    assert definition.train_size == (size - size // 10 - 1) // 35 and definition.test_size == (size // 10 - 1) // 35
    data = prepared(definition)
    assert bytes(data.train_images[0].astype(np.uint8)) == (POEM * 100).encode()[:35]
    file(tmp_path, POEM * 99 + POEM.replace("dog", "fox"), "book.txt")
    assert text_file(str(path)).fingerprint != definition.fingerprint
    assert fingerprint(definition, DatasetSpec(name=str(path))) == data.fingerprint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "missing.txt"}, "missing.txt"),
        ({"level": "letter"}, "letter"),
        ({"length": 0}, "length"),
        ({"test_share": 1.0}, "test_share"),
        ({"length": 1000}, "1000"),
        ({"test_share": 0.01}, "test part"),
        ({"level": "word", "path": b"\xff\xfe no text"}, "UTF-8"),
    ],
)
def test_a_text_that_does_not_do(tmp_path, changes, said):
    content = changes.get("path", POEM * 10)
    path = content if content == "missing.txt" else file(tmp_path, content)
    with pytest.raises(UserError) as error:
        from_text(**{"name": "poem", "length": 10, **changes, "path": path})
    one_line(error, "poem", said)


def test_text_has_no_pixels(tmp_path):
    definition = from_text(name="poem", path=file(tmp_path, POEM * 20))
    for function in (image_shape, fingerprint):
        with pytest.raises(UserError) as error:
            function(definition, DatasetSpec(name="poem", image_size=4))
        one_line(error, "poem", "image_size", "text")


# Penn Treebank


def test_penn_treebank_says_where_its_files_go(tmp_path):
    assert (text.ptb.classes, text.ptb.train_size, text.ptb.test_size) == (10_000, 26_559, 2_355)
    for root in (tmp_path, None):
        with pytest.raises(UserError) as error:
            check(text.ptb, DatasetSpec(name="ptb"), root)
        one_line(error, "ptb.train.txt", "ptb.test.txt", "ptb/", "--data-root")


@pytest.mark.parametrize("place", [".", "ptb", "simple-examples/data"])
def test_penn_treebank_files(monkeypatch, tmp_path, place):
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    # Ten thousand words as if they were the published ones, the rarest last.
    words = [f"w{number:04}" for number in range(9_999)]
    lines = [" ".join(words[start : start + 9]) for start in range(0, 9_999, 9)]
    train = file(folder, "".join(f" {line} \n" for line in [*lines, *lines[:100]]), "ptb.train.txt")
    test = file(folder, "".join(f" {line} \n" for line in lines[:50]), "ptb.test.txt")
    with pytest.raises(UserError) as error:
        check(text.ptb, DatasetSpec(name="ptb"), tmp_path)
    one_line(error, train, "checksum", "from_text")
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (train, test)}
    monkeypatch.setattr(text, "PTB", sums)
    arrays = text.ptb.read(tmp_path)
    assert arrays.train_images.max() == 9_999 and arrays.train_images.shape[1] == 35
    order = ["<eos>", *words]  # those of the first 100 lines occur twice, the line's end most often
    assert [order[number] for number in arrays.train_images[0, :10]] == [*words[:9], "<eos>"]
    assert len(arrays.test_labels) == (50 * 10 - 1) // 35 * 35
    with pytest.raises(UserError) as error:  # other texts than the published ones have other sizes
        check(text.ptb, DatasetSpec(name="ptb"), tmp_path)
    one_line(error, "ptb", "26559")
    test.unlink()
    with pytest.raises(UserError) as error:
        check(text.ptb, DatasetSpec(name="ptb"), tmp_path)
    one_line(error, "missing", test)
