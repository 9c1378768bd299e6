"""The real files, against digests and counts that others published."""

import csv
import gzip
import hashlib
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from zetaclip.data import load
from zetaclip.data.places import find
from zetaclip.data.ved import FEATURES, petrol_cars

DATA = Path(os.environ.get("ZETACLIP_DATA") or "/nonexistent")


def needs(name, kind=None):
    there = DATA.is_dir() and find(name, DATA, kind) is not None
    return pytest.mark.skipif(not there, reason=f"the files of {name} are not under ZETACLIP_DATA")


def as_bytes(x):
    """The published pixels back from [-1, 1]."""
    return ((x + 1) * 127.5).round().to(torch.uint8).numpy()


def md5(array):
    return hashlib.md5(np.ascontiguousarray(array).tobytes()).hexdigest()


def test_digits_need_no_files():
    digits = load("digits")
    assert digits.train.x.shape == (1437, 1, 8, 8) and digits.test.x.shape == (360, 1, 8, 8)
    assert digits.nominal_size == 1437 and digits.private_statistics == ()
    assert (digits.train.x.min(), digits.train.x.max()) == (-1, 1)
    from sklearn.datasets import load_digits

    published = np.sort(load_digits().data.sum(1))
    both = torch.cat([digits.train.x, digits.test.x]).flatten(1)
    assert np.array_equal(np.sort(((both + 1) * 8).sum(1).numpy()), published)  # every image once
    again = load("digits")
    assert torch.equal(again.train.x, digits.train.x)
    assert not torch.equal(load("digits", seed=1).test.x, digits.test.x)


@needs("mnist")
def test_mnist_is_the_published_one():
    mnist = load("mnist", DATA)
    assert mnist.train.x.shape == (60000, 1, 28, 28) and mnist.train.x.dtype == torch.float32
    assert torch.bincount(mnist.train.y).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert mnist.test.y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    raw = gzip.decompress((DATA / "mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    assert as_bytes(mnist.test.x).tobytes() == raw
    # The well-known mean and deviation of the training pixels, as a check from outside.
    unit = (mnist.train.x + 1) / 2
    assert (round(float(unit.mean()), 4), round(float(unit.std()), 4)) == (0.1307, 0.3081)


@needs("cifar10", "tiles")
def test_a_batch_of_cifar10_tiles_is_the_published_binary_file():
    from zetaclip.data.cifar import _decoder

    place = find("cifar10", DATA, "tiles")
    x, y = _decoder(place.files[20:24])(), np.load(place.files[24])[50_000:]
    rows = np.concatenate([y[:, None], x.reshape(10_000, -1)], axis=1)
    assert hashlib.sha1(rows.tobytes()).hexdigest() == "67eb016db431130d61cd03c7ad570b013799c88c"


@pytest.mark.slow
@needs("cifar10", "tiles")
def test_cifar10_tiles_have_the_published_pixels():
    cifar = load("cifar10", DATA)
    assert md5(as_bytes(cifar.train.x).transpose(0, 2, 3, 1)) == "17e2cb5a4119d89a4a13e02b91701bff"
    assert md5(as_bytes(cifar.test.x).transpose(0, 2, 3, 1)) == "6d2714505047e13831cd876923568712"
    assert md5(cifar.train.y.numpy().astype(np.uint8)) == "69c5f3349be54915edfca558b72ad888"
    assert md5(cifar.test.y.numpy().astype(np.uint8)) == "251f18ce75337ae9ca5d0dbd7ea62cf4"
    assert cifar.classes == tuple((DATA / "cifar-10" / "batches.meta.txt").read_text().split())


@pytest.mark.slow
@needs("cifar100", "tiles")
def test_cifar100_tiles_have_the_published_pixels():
    cifar = load("cifar100", DATA)
    assert md5(as_bytes(cifar.train.x).transpose(0, 2, 3, 1)) == "111db26282d380128f3126515677de38"
    assert md5(as_bytes(cifar.test.x).transpose(0, 2, 3, 1)) == "f56c971f508f38ef6f45ff5a2db65ea6"
    assert md5(cifar.train.y.numpy().astype(np.uint8)) == "00c0899b82d482aefa46cdb301dbaf9c"
    assert md5(cifar.test.y.numpy().astype(np.uint8)) == "1ddeb59844e0066662ddddaec17677b9"
    assert cifar.classes == tuple((DATA / "cifar-100" / "fine_label_names.txt").read_text().split())
    coarse = load("cifar100", DATA, labels="coarse")
    assert md5(coarse.train.y.numpy().astype(np.uint8)) == "db84efb5a75327fed86c68680a90fea7"
    assert coarse.classes == tuple(
        (DATA / "cifar-100" / "coarse_label_names.txt").read_text().split()
    )


@needs("emnist", "subset")
def test_the_subset_of_emnist_is_named_as_one():
    letters = load("emnist-letters-subset", DATA)
    assert letters.name == "emnist-letters-subset" and "not to be compared" in " ".join(
        letters.notes
    )
    assert (len(letters.train), len(letters.test), letters.outputs) == (58405, 10000, 26)
    assert torch.bincount(letters.train.y, minlength=26).min() > 0
    # Upright: an I is higher than wide, and the bar of a T is above. Transposed, both would be
    # false.
    eye, tee = ((letters.train.x[letters.train.y == k].mean(0)[0] + 1) / 2 for k in (8, 19))
    place = torch.arange(28.0)
    height, width = (torch.cov(place[None], aweights=eye.sum(axis)) for axis in (1, 0))
    assert height > 1.5 * width
    assert tee[:14].sum() - tee[14:].sum() > tee[:, :14].sum() - tee[:, 14:].sum()


@needs("adult")
def test_adult_has_the_published_counts_and_split():
    adult = load("adult", DATA)
    assert (len(adult.train), len(adult.test)) == (32561, 16281)
    assert (int(adult.train.y.sum()), int(adult.test.y.sum())) == (7841, 3846)
    assert adult.train.x.shape[1] == 105 == len(adult.features) and adult.train.x.abs().max() <= 1
    # The first line of adult.data by hand: 39, State-gov, 77516, Bachelors, 13, Never-married, ...
    row = dict(zip(adult.features, adult.train.x[0].tolist(), strict=True))
    assert row["age"] == pytest.approx(2 * (39 - 17) / 73 - 1) and row[
        "education-num"
    ] == pytest.approx(2 * 12 / 15 - 1)
    assert row["capital-gain"] == pytest.approx(2 * np.log(2175) / np.log(100000) - 1)
    ones = {name for name, value in row.items() if "=" in name and value == 1}
    assert ones == {
        "workclass=State-gov",
        "education=Bachelors",
        "marital-status=Never-married",
        "occupation=Adm-clerical",
        "relationship=Not-in-family",
        "race=White",
        "sex=Male",
        "native-country=United-States",
    }
    # Every value of the files is in the vocabulary or missing.
    groups = {name.split("=")[0] for name in adult.features if "=" in name}
    text = (DATA / "adult" / "adult.data").read_text()
    missing = sum(line.count("?") for line in text.splitlines())
    total = sum(
        float(adult.train.x[:, [n.startswith(g + "=") for n in adult.features]].sum())
        for g in groups
    )
    assert total == len(groups) * 32561 - missing


@needs("heart")
def test_heart_is_split_by_clinic_and_diagnosis():
    heart = load("heart", DATA)
    assert (len(heart.train), len(heart.test)) == (735, 185)
    assert 735 + 185 == 303 + 294 + 123 + 200
    assert int(heart.train.y.sum() + heart.test.y.sum()) == 509  # 139 + 106 + 115 + 149
    assert abs(len(heart.test) / 920 - 0.2) < 0.005
    assert abs(float(heart.test.y.mean()) - 509 / 920) < 0.005
    cleveland = load("heart", DATA, clinics="cleveland")
    assert cleveland.name == "heart-cleveland" and len(cleveland.train) + len(cleveland.test) == 303
    swiss = load("heart", DATA, clinics=["switzerland"])
    flag = swiss.features.index("chol: missing")
    assert (
        float(swiss.train.x[:, flag].min()) == 1.0
    )  # a cholesterol of 0 in every row means missing
    assert float(swiss.train.x[:, flag - 1].abs().max()) == 0.0


@needs("ved")
def test_ved_segments_against_a_count_by_hand():
    ved = load("ved", DATA, segments_per_trip=10**6)
    week = next(DATA.glob("ved/VED_171101_week.csv*"))
    cars = petrol_cars(DATA / "ved" / "VED_Static_Data_ICE&HEV.xlsx")
    assert len(cars) == 263  # 264 ICE, of which one burns diesel
    with gzip.open(week, "rt") as file:
        reader = csv.DictReader(file)
        rows = []
        for row in reader:
            if int(row["VehId"]) in cars:
                rows.append(row)
            if len({r["VehId"] for r in rows[-1:]} | {r["VehId"] for r in rows[:1]}) == 2:
                break
    vehicle = int(rows[0]["VehId"])
    trip = [r for r in rows if r["Trip"] == rows[0]["Trip"] and int(r["VehId"]) == vehicle]
    expected = []
    for minute in range(int(float(trip[-1]["Timestamp(ms)"])) // 60000 + 1):
        fuel = speed = time = 0.0
        for row, after in itertools.pairwise(trip):
            start = float(row["Timestamp(ms)"]) / 1000
            if int(start // 60) != minute or "NaN" in (
                row["MAF[g/sec]"],
                row["Engine RPM[RPM]"],
                row["Vehicle Speed[km/h]"],
            ):
                continue
            held = min(float(after["Timestamp(ms)"]) / 1000 - start, 5.0, 60 * (minute + 1) - start)
            time += held
            fuel += held * float(row["MAF[g/sec]"]) / 14.7
            speed += held * float(row["Vehicle Speed[km/h]"])
        if time >= 45:
            expected.append((fuel / time, 2 * (speed / time) / 160 - 1))
    assert expected
    found = torch.cat(
        [torch.stack([split.y, split.x[:, 0]], dim=1) for split in (ved.train, ved.test)]
    )
    for pair in expected:
        assert float((found - torch.tensor(pair)).abs().sum(1).min()) < 1e-5


@needs("ved")
def test_ved_declares_its_group_and_hides_what_determines_the_target():
    ved = load("ved", DATA)
    assert (ved.task, ved.outputs, ved.group, ved.records_per_group) == (
        "regression",
        1,
        "trip",
        10,
    )
    assert not any(
        "air" in name.lower() or "load" in name.lower() or "trim" in name.lower()
        for name, _, _ in FEATURES
    )
    assert ved.train.x.abs().max() <= 1
    assert float(ved.train.y.min()) >= 0 and float(ved.train.y.max()) <= 5
    assert ved.nominal_size == len(ved.train)
    if len(list(DATA.glob("ved/VED_*_week.csv*"))) == 1:
        assert (len(ved.train), len(ved.test), ved.train.x.shape[1]) == (1921, 791, 16)
    fewer = load("ved", DATA, segments_per_trip=2)
    assert fewer.records_per_group == 2 and len(fewer.train) < len(ved.train)
    encoded = ved.encode_target(ved.train.y)
    assert encoded.abs().max() <= 1 and torch.allclose(
        ved.decode_target(encoded), ved.train.y, atol=1e-6
    )


FASHION = find("fashion-mnist", DATA)


@pytest.mark.skipif(
    FASHION is None, reason="Fashion-MNIST is neither under ZETACLIP_DATA nor installed"
)
def test_fashion_mnist_is_the_published_one():
    fashion = load("fashion-mnist", DATA)
    assert torch.bincount(fashion.train.y).tolist() == [6000] * 10
    assert (
        as_bytes(fashion.test.x).shape == (10000, 1, 28, 28) and fashion.classes[9] == "Ankle boot"
    )


@needs("imagenet-sample")
def test_the_sample_of_imagenet_goes_through_the_cache(monkeypatch):
    sample = load("imagenet-sample", DATA, size=48)
    assert sample.train.x.shape == (45, 3, 48, 48) and sample.test.x.shape == (15, 3, 48, 48)
    assert sample.outputs == 5 and torch.bincount(sample.train.y).tolist() == [9] * 5
    from zetaclip.data import pictures

    monkeypatch.setattr(pictures, "_image", None)  # a second load must not need it
    assert torch.equal(load("imagenet-sample", DATA, size=48).train.x, sample.train.x)


@needs("imagenet-sample")
def test_imagenet100_must_have_a_hundred_classes(tmp_path):
    (tmp_path / "imagenet100").symlink_to(DATA / "imagenet-sample")
    with pytest.raises(ValueError, match="has 5 classes; ImageNet-100 has 100"):
        load("imagenet100", tmp_path)
