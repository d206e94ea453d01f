"""scikit-learn's 8x8 digits: 1,797 small real images that come with the library, so nothing is downloaded.

They have no published split. Ours is fixed and part of the fingerprint: of every six consecutive images of a class the
fifth is a test image, which makes 1,500 training and 297 test images with all classes in equal shares.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (the
test part of the original).
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

from protocols.digest import digest
from protocols.errors import UserError
from trainers.datasets.definition import Arrays, Definition

FINGERPRINT = "440dba485a9a2f1b08b8cbe74e44f141ee77740a079e0d8e9b7d4d364e48ec21"


def _read(root: Path | None) -> Arrays:
    try:
        source = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise UserError(
            "dataset 'digits' comes with scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    images = source.images.astype(np.uint8)[..., None]
    labels = source.target.astype(np.int64)
    of_class = labels == np.arange(10)[:, None]
    rank = (np.cumsum(of_class, axis=1) - 1)[labels, np.arange(len(labels))]
    test = rank % 6 == 4
    arrays = Arrays(
        train_images=images[~test], train_labels=labels[~test], test_images=images[test], test_labels=labels[test]
    )
    found = digest(vars(arrays))
    if found != FINGERPRINT:
        raise UserError(
            f"dataset 'digits': the installed scikit-learn's digits are not the known ones (digest {found}, expected "
            f"{FINGERPRINT})"
        )
    return arrays


digits = Definition(
    name="digits",
    summary="handwritten digits, 8x8 grey, 1,500 + 297, part of scikit-learn",
    classes=10,
    image_shape=(8, 8, 1),
    train_size=1500,
    test_size=297,
    fingerprint=FINGERPRINT,
    mean=(0.3054,),
    std=(0.3760,),
    maximum=16.0,
    crop=1,
    flip=False,
    read=_read,
)
