"""Text as windows of tokens, each labelled with the tokens that follow: any file of your own, and Penn Treebank.

A text is cut into windows of equal length one after the other, without overlap; what is left at the end is dropped. A
token is a byte (256 classes), a character, or a word between white space, with ``<eos>`` at the end of each line. Of
characters and words those of the training part are known, numbered by how often they occur (of equal ones, in their own
order); others in the test part count as ``<unk>``.

Penn Treebank is not free to pass on, so it is not downloaded. T. Mikolov's preprocessed files (10,000 words) are what
publications use, from the RNNLM toolkit's ``simple-examples.tgz``.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.digest import digest
from protocols.errors import UserError, unknown
from trainers.datasets.definition import Arrays, Definition

LEVELS = ("byte", "char", "word")
EOS, UNKNOWN = "<eos>", "<unk>"
LENGTH = 35
"""Tokens a window, as is usual for Penn Treebank."""
TEST_SHARE = 0.1

PTB = {"ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420", "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721"}
"""MD5 of each file."""

Tokens = NDArray[np.integer]
"""(N,) The number of each token."""


def from_text(
    *,
    name: str,
    path: str | os.PathLike[str],
    test_path: str | os.PathLike[str] | None = None,
    level: str = "byte",
    length: int = LENGTH,
    test_share: float = TEST_SHARE,
    summary: str = "",
) -> Definition:
    """A dataset of a text file of your own; the fingerprint is the SHA-256 of its tokens.

    Args:
        name: what records and tables call it.
        path: the file, from the working directory; UTF-8, but for ``level="byte"``.
        test_path: the file to test on; None: the last tokens of ``path``.
        level: what a token is: ``byte``, ``char`` or ``word``.
        length: tokens a window.
        test_share: the share of tokens to test on, where ``test_path`` is None.
        summary: one line for lists.

    Raises:
        UserError: a file cannot be read or is too short, or an argument is out of range.
    """
    if level not in LEVELS:
        raise unknown(f"dataset {name!r}: level", level, LEVELS)
    if length < 1 or not 0 < test_share < 1:
        raise UserError(
            f"dataset {name!r}: length must be at least 1 and test_share between 0 and 1, not {length} and {test_share}"
        )
    train = _read(name, Path(path), level)
    if test_path is not None:
        test = _read(name, Path(test_path), level)
    else:
        cut = len(train) - int(len(train) * test_share)
        train, test = train[:cut], train[cut:]
    if level == "byte":
        classes = 256
        arrays = windows(name, np.frombuffer(train, np.uint8), np.frombuffer(test, np.uint8), length)
    else:
        words = vocabulary(train)
        if UNKNOWN not in words and not set(test) <= set(words):
            words.append(UNKNOWN)
        classes = len(words)
        arrays = windows(name, encode(train, words), encode(test, words), length)
    return Definition(
        name=name,
        summary=summary or f"text, {classes:,} kinds of {level}s, windows of {length}",
        classes=classes,
        image_shape=(length,),
        train_size=len(arrays.train_images),
        test_size=len(arrays.test_images),
        fingerprint=digest(vars(arrays)),
        mean=(),
        std=(),
        read=lambda root: arrays,
    )


def text_file(path: str) -> Definition:
    """A text file as a dataset of bytes, the last tenth of it to test on.

    Raises:
        UserError: as :func:`from_text`.
    """
    return from_text(name=Path(path).name, path=path)


def vocabulary(tokens: Sequence[str]) -> list[str]:
    """The different tokens, the most frequent first, of equally frequent ones in their own order."""
    return sorted((counts := Counter(tokens)), key=lambda token: (-counts[token], token))


def encode(tokens: Sequence[str], words: Sequence[str]) -> Tokens:
    """The number of each token; of one that is not among ``words``, that of ``<unk>``."""
    numbers = {word: number for number, word in enumerate(words)}
    other = numbers.get(UNKNOWN, -1)
    return np.array([numbers.get(token, other) for token in tokens], np.int64)


def windows(name: str, train: Tokens, test: Tokens, length: int) -> Arrays:
    """Windows of tokens and the tokens that follow each of theirs.

    Raises:
        UserError: a part is shorter than one window and the token after it.
    """
    parts = {}
    for part, tokens in (("train", train), ("test", test)):
        count = (len(tokens) - 1) // length
        if count < 1:
            raise UserError(
                f"dataset {name!r}: its {part} part has {len(tokens)} tokens, not a window of {length} and one more"
            )
        parts[part] = (
            tokens[: count * length].reshape(count, length).astype(np.int32),
            tokens[1 : count * length + 1].reshape(count, length).astype(np.int64),
        )
    return Arrays(
        train_images=parts["train"][0],
        train_labels=parts["train"][1],
        test_images=parts["test"][0],
        test_labels=parts["test"][1].reshape(-1),
    )


def _read(name: str, path: Path, level: str) -> Any:
    """The tokens of a file, as bytes, a string or a list of words."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"dataset {name!r}: cannot read {path}: {error.strerror or error}") from error
    if level == "byte":
        return content
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"dataset {name!r}: {path} is not UTF-8 ({error.reason}): use level='byte'") from error
    return text if level == "char" else _words(text)


def _words(text: str) -> list[str]:
    return [word for line in text.splitlines() for word in (*line.split(), EOS)]


def _read_ptb(root: Path | None) -> Arrays:
    advice = "put ptb.train.txt and ptb.test.txt (of simple-examples.tgz, T. Mikolov's Penn Treebank) in a folder "
    advice += "ptb/ of a folder given by --data-root or NOISEGRID_DATA"
    if root is None:
        raise UserError(f"dataset 'ptb' needs its files; {advice}")
    places = [root, root / "ptb", root / "simple-examples" / "data"]
    folder = next((place for place in places if any((place / file).is_file() for file in PTB)), None)
    if folder is None:
        raise UserError(f"dataset 'ptb': no files in {root}: looked in {', '.join(map(str, places))}; {advice}")
    texts = {}
    for file, md5 in PTB.items():
        if not (folder / file).is_file():
            raise UserError(f"dataset 'ptb': missing file {folder / file}; {advice}")
        content = (folder / file).read_bytes()
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != md5:
            raise UserError(
                f"dataset 'ptb': {folder / file} has the wrong checksum (MD5 {found}, expected {md5}); another text "
                "needs a dataset of its own: see trainers.datasets.from_text"
            )
        texts[file] = _words(content.decode())
    train, test = texts.values()
    words = vocabulary(train)
    return windows("ptb", encode(train, words), encode(test, words), LENGTH)


ptb = Definition(
    name="ptb",
    summary="Penn Treebank, 10,000 words, windows of 35: 26,559 + 2,355",
    classes=10_000,
    image_shape=(LENGTH,),
    train_size=(929_589 - 1) // LENGTH,
    test_size=(82_430 - 1) // LENGTH,
    fingerprint=hashlib.sha256("".join(PTB.values()).encode()).hexdigest(),
    mean=(),
    std=(),
    read=_read_ptb,
)
