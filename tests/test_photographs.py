"""Photographs: packed once whatever interrupts it, broken ones named, the same bits for any number of threads."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protocols import Recipe, streams
from protocols.contract import PLAIN, Dataset, View
from protocols.errors import UserError
from protocols.protocol import DatasetSpec
from tests.runs import make_run
from trainers.datasets import Definition, check, fingerprint, image_folder, image_shape, pack, prepare
from trainers.datasets.folder import imagenet, list_files

REPOSITORY = Path(__file__).resolve().parent.parent
REAL = Path(os.environ.get("NOISEGRID_DATA", "/missing")) / "imagenette-mini"
TRAIN, TEST = 9, 4
CLASSES = ("daisy", "rose", "tulip")
ALL = DatasetSpec(name="flowers")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """No test sees the user's data or cache."""
    monkeypatch.delenv("NOISEGRID_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pack, "ROWS", 4)


def one_line(error: pytest.ExceptionInfo[UserError], *parts: object) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def opened(path: Path) -> Image.Image:
    return Image.open(io.BytesIO(path.read_bytes()))


def picture(rng: np.random.Generator, width: int, height: int, mode: str = "RGB") -> bytes:
    """A smooth random image as JPEG."""
    small = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8))
    buffer = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of images of many sizes, among them a grey one and one for print."""
    rng = np.random.default_rng(0)
    for part, count in (("train", TRAIN), ("val", TEST)):
        for name in CLASSES:
            place = tmp_path / "flowers" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                mode = {0: "L", 1: "CMYK"}.get(number, "RGB")
                size = int(rng.integers(40, 90)), int(rng.integers(40, 90))
                (place / f"{name}_{number}.JPEG").write_bytes(picture(rng, *size, mode))
            (place / "notes.txt").write_text("no image")
    return tmp_path / "flowers"


def flowers(folder: Path, **changes: object) -> Definition:
    return image_folder(**{"name": "flowers", "path": folder, "size": 32, "test_resize": 40, **changes})


def packed_files(data: Dataset) -> list[Path]:
    return [data.photographs.pack.train.path, data.photographs.pack.test.path]


# Folders


def test_a_folder_is_listed_by_class_and_name(folder):
    files = list_files(folder)
    assert files.classes == CLASSES
    expected = [f"train/{name}/{name}_{number}.JPEG" for name in CLASSES for number in range(TRAIN)]
    assert list(files.train) == expected
    assert files.train_labels.tolist() == [0] * TRAIN + [1] * TRAIN + [2] * TRAIN
    assert len(files.test) == 3 * TEST and files.test_labels.tolist() == [0] * TEST + [1] * TEST + [2] * TEST


def test_the_fingerprint_is_of_the_content(folder, tmp_path):
    first = flowers(folder)
    assert (first.classes, first.train_size, first.test_size) == (3, 3 * TRAIN, 3 * TEST)
    assert first.image_shape == (32, 32, 3) and first.photographs and (first.crop, first.flip) == (1, True)
    copied = shutil.copytree(folder, tmp_path / "elsewhere")
    assert flowers(copied).fingerprint == first.fingerprint
    victim = copied / "val" / "rose" / "rose_1.JPEG"
    content = victim.read_bytes()
    victim.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    changed = flowers(copied)
    assert changed.fingerprint != first.fingerprint
    victim.write_bytes(content)
    victim.rename(victim.with_name("renamed.JPEG"))
    assert flowers(copied).fingerprint not in (first.fingerprint, changed.fingerprint)


def test_files_that_did_not_change_are_not_read_again(folder, monkeypatch):
    first = flowers(folder)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"it reads {path}"))
    assert flowers(folder).fingerprint == first.fingerprint


def test_what_is_said_of_a_folder_needs_no_look_at_it(tmp_path):
    known = flowers(tmp_path / "missing", classes=3, train_size=27, test_size=12, fingerprint="version 1")
    assert fingerprint(known, ALL) != fingerprint(dataclasses.replace(known, fingerprint="version 2"), ALL)
    with pytest.raises(UserError) as error:
        check(known, ALL)
    one_line(error, "flowers", tmp_path / "missing" / "train", "train/CLASS/")
    with pytest.raises(UserError):
        flowers(tmp_path / "missing")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: shutil.rmtree(folder / "val"), ("val", "val/CLASS/")),
        (lambda folder: shutil.rmtree(folder / "train" / "rose"), ("val/rose", "train/rose")),
        (lambda folder: [path.unlink() for path in (folder / "train" / "tulip").glob("*.JPEG")], ("train/tulip",)),
        (lambda folder: [shutil.rmtree(path) for path in (folder / "train").iterdir()], ("train", "train/CLASS/")),
        (lambda folder: (folder / "train" / "rose" / "rose_3.JPEG").unlink(), ("26 train", "27")),
        (lambda folder: [shutil.rmtree(folder / part / "daisy") for part in ("train", "val")], ("2 classes", "3")),
    ],
)
def test_a_folder_that_is_not_as_it_should_be(folder, spoil, said):
    definition = flowers(folder)
    spoil(folder)
    for function in (check, prepare):
        with pytest.raises(UserError) as error:
            function(definition, ALL)
        one_line(error, folder, *said)


def test_imagenet_is_planned_without_its_files_and_says_where_they_go(folder, tmp_path):
    assert (imagenet.classes, imagenet.train_size, imagenet.test_size) == (1000, 1_281_167, 50_000)
    assert imagenet.image_shape == image_shape(imagenet, DatasetSpec(name="imagenet")) == (224, 224, 3)
    assert image_shape(imagenet, DatasetSpec(name="imagenet", image_size=64)) == (64, 64, 3)
    fingerprint(imagenet, DatasetSpec(name="imagenet", train_size=5000))
    for root in (tmp_path / "empty", None):
        with pytest.raises(UserError) as error:
            check(imagenet, DatasetSpec(name="imagenet"), root)
        one_line(error, "image-net.org", "imagenet/train/CLASS/*.JPEG", "--data-root")
    for place in ("imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", "."):
        root = tmp_path / "root"
        shutil.copytree(folder, root / place)
        with pytest.raises(UserError) as error:  # found, and seen to be something else
            check(imagenet, DatasetSpec(name="imagenet"), root)
        one_line(error, root / place, "3 classes", "1000")
        shutil.rmtree(root)


# Packing


def test_a_pack_holds_the_files_as_they_were(folder, tmp_path):
    definition = flowers(folder)
    data = prepare(definition, ALL)
    found, files = data.photographs.pack, list_files(folder)
    assert found.train.names() == list(files.train) and found.test.names() == list(files.test)
    assert [bytes(found.train.content(index)) for index in range(3 * TRAIN)] == [
        (folder / name).read_bytes() for name in files.train
    ]
    assert found.manifest == definition.fingerprint and found.skipped == ()
    assert np.array_equal(data.train_labels, files.train_labels) and np.array_equal(data.test_labels, files.test_labels)
    assert np.array_equal(data.train_samples, np.arange(3 * TRAIN)) and data.full_train_size == 3 * TRAIN
    assert data.train_images.shape == data.test_images.shape == (0, 32, 32, 3)
    assert data.image_shape == (32, 32, 3) and data.test_examples == 3 * TEST
    assert data.fingerprint == fingerprint(definition, ALL)
    sizes = [opened(folder / name).size[::-1] for name in files.train]
    assert data.photographs.train_sizes.tolist() == [list(size) for size in sizes]
    shutil.rmtree(folder)
    assert prepare(definition, ALL).photographs.train(np.array([3]), np.array([[0, 0, 9, 9, 0]]), 1).any()


def test_a_part_of_a_set_is_stratified(folder):
    data = prepare(flowers(folder), DatasetSpec(name="flowers", train_size=7, test_size=3))
    assert data.train_samples.tolist() == [0, 1, 2, 9, 10, 18, 19]
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 2, 2] and data.test_labels.tolist() == [0, 1, 2]
    assert data.photographs.pack.train.names()[3] == "train/rose/rose_0.JPEG"
    with pytest.raises(UserError) as error:
        prepare(flowers(folder), DatasetSpec(name="flowers", train_size=2))
    one_line(error, "train_size", "between 3", "27")


def test_one_pack_serves_every_size(folder):
    definition, small = flowers(folder), DatasetSpec(name="flowers", image_size=16)
    data, shrunk = prepare(definition, ALL), prepare(definition, small)
    assert packed_files(data) == packed_files(shrunk) and data.fingerprint != shrunk.fingerprint
    assert shrunk.image_shape == image_shape(definition, small) == (16, 16, 3)
    assert shrunk.photographs.test(0, 2, PLAIN, 1).shape == (2, 16, 16, 3)


PACK = """
import sys, time
from pathlib import Path
from protocols.protocol import DatasetSpec
from trainers.datasets import image_folder, pack, prepare
pack.ROWS = 4
examine, seen = pack._examine, []
def stuck(row, skip):
    seen.append(row)
    if len(seen) == 15:
        print("packing", flush=True)
        time.sleep(300)
    return examine(row, skip)
pack._examine = stuck
definition = image_folder(name="flowers", path=sys.argv[1], size=32, test_resize=40)
prepare(definition, DatasetSpec(name="flowers"), None, Path(sys.argv[2]))
"""


def test_a_killed_packing_goes_on_and_gives_the_same_file(folder, tmp_path, monkeypatch):
    definition, cache = flowers(folder), tmp_path / "interrupted"
    process = subprocess.Popen(
        [sys.executable, "-c", PACK, str(folder), str(cache)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "packing\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (left,) = cache.glob("*.part/train.arrows")
    assert left.stat().st_size > 0 and not list(cache.glob("*/pack.json"))

    examined = []
    examine = pack._examine
    monkeypatch.setattr(pack, "_examine", lambda row, skip: examined.append(row.file) or examine(row, skip))
    resumed = prepare(definition, ALL, None, cache)
    assert len(examined) == 3 * TRAIN - 12 + 3 * TEST  # three whole batches were there
    whole = prepare(definition, ALL, None, tmp_path / "whole")
    for first, second in zip(packed_files(resumed), packed_files(whole), strict=True):
        assert first.read_bytes() == second.read_bytes()
    assert not list(cache.glob("*.part"))


def test_a_packing_cut_anywhere_gives_the_same_file(folder, tmp_path):
    definition = flowers(folder)
    whole = prepare(definition, ALL, None, tmp_path / "whole")
    train = packed_files(whole)[0]
    content = train.read_bytes()
    cuts = [0, 1, 100, *np.random.default_rng(0).integers(200, len(content), 12).tolist(), len(content) - 3]
    for cut in cuts:
        cache = tmp_path / f"cut{cut}"
        aside = cache / f"{train.parent.name}.part"
        aside.mkdir(parents=True)
        (aside / "train.arrows").write_bytes(content[:cut])
        assert packed_files(prepare(definition, ALL, None, cache))[0].read_bytes() == content
        shutil.rmtree(cache)


@pytest.mark.parametrize("damage", ["half", "end", "empty", "page"])
def test_a_broken_image_is_named_or_skipped_and_counted(folder, capsys, damage):
    victim = folder / "train" / "rose" / "rose_4.JPEG"
    content = victim.read_bytes()
    victim.write_bytes(
        {"half": content[: len(content) // 2], "end": content[:-40], "empty": b"", "page": b"<html>"}[damage]
    )
    definition = flowers(folder)
    with pytest.raises(UserError) as error:
        prepare(definition, ALL)
    one_line(error, victim, "cannot be decoded", "skip_broken")
    skipping = DatasetSpec(name="flowers", skip_broken=True)
    assert fingerprint(definition, skipping) != fingerprint(definition, ALL)
    data = prepare(definition, skipping)
    assert data.photographs.pack.skipped == ("train/rose/rose_4.JPEG",)
    assert "left out 1 " in (said := capsys.readouterr().err) and "rose_4" in said
    gone = TRAIN + 4
    assert data.train_samples.tolist() == [sample for sample in range(3 * TRAIN) if sample != gone]
    assert len(data.train_labels) == 3 * TRAIN - 1 and data.full_train_size == 3 * TRAIN
    assert bytes(data.photographs.pack.train.content(gone)) == (folder / "train/rose/rose_5.JPEG").read_bytes()


def test_images_that_changed_since_they_were_planned_are_not_packed(folder, tmp_path):
    """Neither before packing nor while it is interrupted, and whatever is packed from then on is right."""
    definition, victim = flowers(folder), folder / "train" / "rose" / "rose_4.JPEG"
    content = victim.read_bytes()
    victim.write_bytes((folder / "train" / "rose" / "rose_5.JPEG").read_bytes())
    with pytest.raises(UserError) as error:
        prepare(definition, ALL)
    one_line(error, "flowers", folder, "have changed since the study was planned")
    assert prepare(flowers(folder), ALL).photographs.pack.manifest == flowers(folder).fingerprint
    victim.write_bytes(content)
    assert prepare(definition, ALL).photographs.pack.manifest == definition.fingerprint
    named = flowers(folder, fingerprint="version 1")  # the user's own word for what is there
    assert prepare(named, ALL).photographs.pack.manifest == definition.fingerprint


def test_nothing_is_skipped_where_there_are_no_photographs(digits):
    from trainers.datasets.digits import digits as definition

    with pytest.raises(UserError) as error:
        fingerprint(definition, DatasetSpec(name="digits", skip_broken=True))
    one_line(error, "digits", "skip_broken")


def test_a_damaged_pack_is_seen_when_it_is_used(folder):
    path = packed_files(prepare(flowers(folder), ALL))[1]
    content = path.read_bytes()

    def become(changed: bytes) -> None:  # another file of that name: the one before is still mapped into memory
        path.with_name("new").write_bytes(changed)
        path.with_name("new").replace(path)

    place = content.index((folder / "val/daisy/daisy_2.JPEG").read_bytes()) + 300
    become(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    data = prepare(flowers(folder), ALL)
    data.photographs.test(0, 2, PLAIN, 1)
    for threads in (1, 2):
        with pytest.raises(UserError) as error:
            data.photographs.test(0, 4, PLAIN, threads)
        one_line(error, path, "damaged", "daisy_2", "delete")
    become(content[:-9])  # cut off: packed again
    assert packed_files(prepare(flowers(folder), ALL))[1].read_bytes() == content


def test_packing_without_pillow(folder, monkeypatch):
    definition = flowers(folder)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError) as error:
        prepare(definition, ALL)
    one_line(error, "pip install pillow")


# Decoding


def test_training_parts_are_cut_resized_and_mirrored(folder):
    data = prepare(flowers(folder), ALL)
    examples = np.array([5, 5, 0, 1])
    boxes = np.array([[3, 4, 20, 30, 0], [3, 4, 20, 30, 1], [0, 0, 32, 32, 0], [0, 0, 40, 40, 0]])
    parts = data.photographs.train(examples, boxes, 1)
    assert parts.shape == (4, 32, 32, 3) and parts.dtype == np.uint8
    image = opened(folder / "train/daisy/daisy_5.JPEG")
    cut = Image.fromarray(np.asarray(image)[3:23, 4:34])
    assert np.array_equal(parts[0], np.asarray(cut.resize((32, 32), Image.Resampling.BILINEAR)))
    assert np.array_equal(parts[1], parts[0][:, ::-1])
    grey = np.asarray(opened(folder / "train/daisy/daisy_0.JPEG"))[:32, :32]
    assert np.array_equal(parts[2], np.repeat(grey[..., None], 3, axis=2))
    printed = opened(folder / "train/daisy/daisy_1.JPEG")
    assert printed.mode == "CMYK"
    assert parts[3].mean() == pytest.approx(np.asarray(printed.convert("RGB"))[:40, :40].mean(), abs=2)


def test_test_images_are_resized_and_cropped_at_the_centre(folder):
    data = prepare(flowers(folder), ALL)
    plain = data.photographs.test(0, 3 * TEST, PLAIN, 1)
    for index, name in enumerate(data.photographs.pack.test.names()):
        image = opened(folder / name).convert("RGB")
        width, height = (side * 40 // min(image.size) for side in image.size)
        assert min(width, height) == 40
        pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
        top, left = (height - 32) // 2, (width - 32) // 2
        assert np.array_equal(plain[index], pixels[top : top + 32, left : left + 32])
        if width == 40:  # a view of 4 more columns shows the right edge, one of 16 no more than that
            right = pixels[top : top + 32, 8:]
            for shift in (4, 16):
                assert np.array_equal(data.photographs.test(index, index + 1, View(0, shift, False), 1)[0], right)
            mirrored = data.photographs.test(index, index + 1, View(-1, 2, True), 1)[0]
            assert np.array_equal(mirrored, pixels[top - 1 : top + 31, 6:38][:, ::-1])


def random_boxes(data: Dataset) -> np.ndarray:
    run = dataclasses.replace(make_run(), recipe=Recipe(crop=1, flip=True))
    return streams.resized_crops(run, 3, data.photographs.train_sizes, data.train_samples)


def same_bits_with_any_number_of_threads(data: Dataset) -> None:
    boxes, examples = random_boxes(data), np.arange(len(data.train_labels))
    for threads in (1, 2, 4):
        train = data.photographs.train(examples, boxes, threads)
        test = data.photographs.test(0, data.test_examples, View(1, -1, True), threads)
        if threads == 1:
            expected = train, test
        assert np.array_equal(train, expected[0]) and np.array_equal(test, expected[1])
    reverse = data.photographs.train(examples[::-1], boxes[::-1], 2)  # a batch is no more than its images
    assert np.array_equal(reverse[::-1], expected[0])


def test_threads_change_no_bit(folder):
    same_bits_with_any_number_of_threads(prepare(flowers(folder), ALL))


@pytest.mark.skipif(not REAL.is_dir(), reason="there is no imagenette-mini/ under NOISEGRID_DATA")
def test_real_photographs(monkeypatch, tmp_path):
    monkeypatch.setattr(pack, "ROWS", 256)
    definition = image_folder(name="imagenette-mini", path=REAL)
    spec = DatasetSpec(name="imagenette-mini", train_size=60, test_size=20)
    data = prepare(definition, spec)
    assert (definition.classes, definition.train_size, definition.test_size) == (10, 400, 150)
    assert np.bincount(data.train_labels).tolist() == [6] * 10 and np.bincount(data.test_labels).tolist() == [2] * 10
    same_bits_with_any_number_of_threads(data)
    pixels = (data.photographs.test(0, 20, PLAIN, 2) - data.shift) * data.scale
    assert abs(pixels.mean()) < 0.3 and 0.8 < pixels.std() < 1.4
    monkeypatch.setenv("NOISEGRID_DATA", str(REAL.parent))
    assert image_folder(name="imagenette-mini").fingerprint == definition.fingerprint
    for name in data.photographs.pack.train.names()[:1]:
        truncated = tmp_path / "copy"
        shutil.copytree(REAL, truncated)
        victim = truncated / name
        victim.write_bytes(victim.read_bytes()[:-2000])
        with pytest.raises(UserError) as error:
            prepare(image_folder(name="imagenette-mini", path=truncated), spec)
        one_line(error, victim)


# The law of the random parts


def crops(count: int, size: tuple[int, int], **changes: object) -> np.ndarray:
    run = dataclasses.replace(make_run(), recipe=Recipe(**{"crop": 1, "flip": True, **changes}))
    return streams.resized_crops(run, 0, np.tile([size], (count, 1)), np.arange(count))


def test_parts_follow_the_usual_law():
    height, width, count = 300, 400, 20_000
    boxes = crops(count, (height, width))
    top, left, high, wide, flip = boxes.T
    assert (top >= 0).all() and (left >= 0).all() and (top + high <= height).all() and (left + wide <= width).all()
    share, aspect = high * wide / (height * width), wide / high
    assert share.min() > 0.079 and 0.74 < aspect.min() and aspect.max() < 1.35
    small = share < 0.5  # of which none is refused for want of room: a uniform share and log-uniform aspect
    assert np.percentile(share[small], [25, 50, 75]) == pytest.approx([0.185, 0.29, 0.395], abs=0.01)
    assert np.percentile(np.log(aspect[small]), [25, 50, 75]) == pytest.approx(
        np.log(4 / 3) * np.array([-0.5, 0, 0.5]), abs=0.01
    )
    # Of larger shares s, those with an aspect below 4/3 s are too high for the image.
    large = 7 / 16 - (1 - 7 / 16 / np.log(16 / 9))
    assert small.mean() == pytest.approx(0.42 / (0.42 + 1 / 16 + large), abs=0.015)
    row, column = (top + 0.5) / (height - high + 1), (left + 0.5) / (width - wide + 1)
    assert row.mean() == pytest.approx(0.5, abs=0.01) and column.mean() == pytest.approx(0.5, abs=0.01)
    assert np.percentile(row[small], [25, 75]) == pytest.approx([0.25, 0.75], abs=0.02)
    assert np.percentile(column[small], [25, 75]) == pytest.approx([0.25, 0.75], abs=0.02)
    assert flip.mean() == pytest.approx(0.5, abs=0.015) and set(flip) == {0, 1}
    for one, other in ((share, flip), (row, column), (share, aspect), (aspect, row)):
        assert abs(np.corrcoef(one[small], other[small])[0, 1]) < 0.03


def test_a_part_depends_on_seed_epoch_and_sample_alone():
    run = dataclasses.replace(make_run(varies=("augment",)), recipe=Recipe(crop=1, flip=True))
    sizes = np.random.default_rng(0).integers(100, 500, (50, 2))
    whole = streams.resized_crops(run, 2, sizes, np.arange(50))
    chosen = np.array([31, 4, 4, 17])
    assert np.array_equal(streams.resized_crops(run, 2, sizes[chosen], chosen), whole[chosen])
    assert not np.array_equal(streams.resized_crops(run, 3, sizes, np.arange(50)), whole)
    other = dataclasses.replace(run, replicate=run.replicate + 1)
    assert not np.array_equal(streams.resized_crops(other, 2, sizes, np.arange(50)), whole)


def test_where_no_part_fits_the_centre_is_taken():
    assert np.unique(crops(200, (10, 200))[:, :4], axis=0).tolist() == [[0, 93, 10, 13]]  # 10 * 4/3 columns
    assert np.unique(crops(200, (1000, 30))[:, :4], axis=0).tolist() == [[480, 0, 40, 30]]  # 30 / (3/4) rows


def test_without_crops_the_centre_is_seen():
    boxes = crops(40, (100, 160), crop=0)
    assert np.unique(boxes[:, :4], axis=0).tolist() == [[6, 36, 87, 87]]
    assert set(boxes[:, 4]) == {0, 1}
    assert not crops(40, (100, 160), crop=0, flip=False)[:, 4].any()
