"""Folders of images by class."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from zetaclip.data import load
from zetaclip.errors import InputError, OwnerWarning


def picture(path, color, size=(20, 12)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


@pytest.fixture
def folder(tmp_path):
    for i in range(10):
        picture(tmp_path / "pets" / "cat" / f"{i}.png", (255, 0, 0))
        picture(tmp_path / "pets" / "dog" / f"{i}.jpg", (0, 0, 255))
        picture(tmp_path / "pets" / "owl" / "deep" / f"{i}.webp", (0, 255, 0))
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path / "pets"


def test_classes_are_folders_and_a_share_is_held_out(folder):
    pets = load(folder, size=8)
    assert (pets.name, pets.task, pets.classes, pets.outputs) == (
        "pets",
        "classification",
        ("cat", "dog", "owl"),
        3,
    )
    assert (
        pets.train.x.shape[1:] == (3, 8, 8)
        and len(pets.train) + len(pets.test) == 30
        and len(pets.test) > 0
    )
    assert not pets.public and pets.nominal_size is None and pets.private_statistics == ()
    for split in (pets.train, pets.test):
        for image, label in zip(split.x, split.y, strict=True):
            channel = {0: 0, 1: 2, 2: 1}[int(label)]  # red, blue, green
            assert image[channel].mean() > 0.9 and image.mean() < 0


def test_given_splits_are_kept_and_grey_is_possible(folder, tmp_path):
    (tmp_path / "set").mkdir()
    folder.rename(tmp_path / "set" / "train")
    for name in ("cat", "dog"):
        picture(tmp_path / "set" / "val" / name / "1.png", (9, 9, 9))
    pets = load(tmp_path / "set", size=8, channels=1)
    assert pets.train.x.shape == (30, 1, 8, 8) and pets.test.x.shape == (2, 1, 8, 8)
    picture(tmp_path / "set" / "val" / "eel" / "1.png", (9, 9, 9))
    with pytest.raises(InputError, match=r"classes that .* lacks: eel"):
        load(tmp_path / "set", size=8)


def test_the_middle_square_is_taken(tmp_path):
    wide = np.zeros((16, 32, 3), np.uint8)
    wide[:, 8:24] = 255
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.fromarray(wide).save(tmp_path / name / f"{i}.png")
    pets = load(tmp_path, size=16)
    assert (
        pets.task == "binary"
        and pets.outputs == 1
        and (pets.train.x == 1).all()
        and (pets.test.x == 1).all()
    )


def test_private_images_are_copied_to_the_cache_only_when_asked(folder, tmp_path, monkeypatch):
    cache = tmp_path / "c"
    monkeypatch.setenv("ZETACLIP_CACHE", str(cache))
    load(folder, size=8)
    assert not cache.exists()
    load(folder, size=8, cache=True)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, "from 4 to 1024"),
        ({"channels": 4}, "1 .grey. or 3"),
        ({"scaling": "no"}, "no scaling 'no'"),
        ({"task": "regression"}, "is a classification"),
        ({"test_share": 0}, "between 0 and 1"),
        ({"target": "x"}, "no option target"),
    ],
)
def test_options_that_do_not_fit(folder, options, message):
    with pytest.raises(InputError, match=message):
        load(folder, **options)


def test_folders_that_do_not_fit(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no folders"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "a").mkdir()
    with pytest.raises(InputError, match="one class only, a"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "b").mkdir()
    with pytest.raises(InputError, match="has no images"):
        load(tmp_path / "empty")
    picture(tmp_path / "empty" / "b" / "1.png", (0, 0, 0))
    picture(tmp_path / "empty" / "b" / "2.png", (0, 0, 0))
    with pytest.warns(
        OwnerWarning, match="all of one class"
    ):  # an error would tell of one record whether it is there
        load(tmp_path / "empty", size=64, test_share=0.5)


def test_a_broken_picture_is_named_and_left_out(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ZETACLIP_CACHE", str(tmp_path / "c"))
    whole = load(folder, size=8)
    (folder / "cat" / "5x.jpg").write_bytes(b"not a jpeg")
    (folder / "owl" / "cut.png").write_bytes((folder / "cat" / "1.png").read_bytes()[:45])
    for cache in (False, True):
        with pytest.warns(OwnerWarning, match=r"2 of 32 pictures .*5x\.jpg.*cut\.png.*private"):
            pets = load(folder, size=8, cache=cache)
        # The others are what they were, on the side where they were.
        assert torch.equal(pets.train.x, whole.train.x) and torch.equal(pets.test.y, whole.test.y)
        assert pets.notes == whole.notes  # the count is nowhere
    assert not list((tmp_path / "c").glob("*"))
    for path in folder.rglob("*.*"):
        path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="none of the 32 images"):
        load(folder)


def warned(folder, **options):
    """What the owner is told when a folder is read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(folder, **options)
    return [str(one.message) for one in caught if one.category is OwnerWarning]


def test_pictures_that_are_small_or_grey_are_told(folder, tmp_path):
    (told,) = warned(folder)
    assert "at most 20 pixels wide and high; they are enlarged to 64x64." in told
    assert "--image-size 20 (in Python size=20)" in told and "grey" not in told
    assert warned(folder, size=64) == warned(folder, size=12) == []
    for name in ("a", "b"):
        for i in range(4):
            (tmp_path / "grey" / name).mkdir(parents=True, exist_ok=True)
            Image.new("L", (6, 5), 9 * i).save(tmp_path / "grey" / name / f"{i}.png")
    (told,) = warned(tmp_path / "grey")
    assert "at most 6 pixels wide and high and grey;" in told
    assert "--image-size 8 --set data_options.channels=1" in told
    (told,) = warned(tmp_path / "grey", size=16)
    assert told.startswith("all pictures are grey; they are given 3 equal colours.")
    assert warned(tmp_path / "grey", size=16, channels=1) == []
    # One large picture in colour is enough, and what can't be read doesn't count.
    (tmp_path / "grey" / "b" / "broken.png").write_text("no picture")
    assert len(warned(tmp_path / "grey")) == 2
    picture(tmp_path / "grey" / "b" / "large.png", (1, 2, 3), (80, 10))
    assert len(warned(tmp_path / "grey")) == 1


def test_what_the_owner_is_told_is_in_no_note(folder):
    with pytest.warns(OwnerWarning, match="at most 20 pixels"):
        pets = load(folder)
    assert pets.train.x.shape[1:] == (3, 64, 64) and "20" not in " ".join(pets.notes)
