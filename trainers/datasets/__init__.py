"""Datasets, without any framework: what they are, where their files come from, and how processes share them.

A dataset is a :class:`Definition`. One of your own is a module with such an object, named by import path
(``my_study.data:blobs`` or ``./data.py:blobs``); nothing is registered::

    import numpy as np
    from trainers.datasets import from_arrays

    rng = np.random.default_rng(0)
    labels = np.arange(600) % 3
    images = (rng.integers(0, 128, (600, 8, 8, 1)) + 50 * labels[:, None, None, None]).astype(np.uint8)

    blobs = from_arrays(
        name="blobs", train_images=images[:500], train_labels=labels[:500],
        test_images=images[500:], test_labels=labels[500:],
    )

Its fingerprint is the SHA-256 of the arrays, so changed data gives new runs. Arrays too large to hash whenever the
module is imported want a :class:`Definition` with a ``read`` function and a fingerprint that you keep up to date.
:func:`image_folder` makes a dataset of photographs in folders, :func:`from_text` one of a text; :func:`text_file` is
what a name that ends in ``.txt`` stands for.
"""

from trainers.datasets.definition import Arrays, Definition, Files, from_arrays
from trainers.datasets.folder import image_folder
from trainers.datasets.prepare import check, default_cache, find_root, prepare
from trainers.datasets.subset import fingerprint, image_shape
from trainers.datasets.text import from_text, text_file

__all__ = [
    "Arrays",
    "Definition",
    "Files",
    "check",
    "default_cache",
    "find_root",
    "fingerprint",
    "from_arrays",
    "from_text",
    "image_folder",
    "image_shape",
    "prepare",
    "text_file",
]
