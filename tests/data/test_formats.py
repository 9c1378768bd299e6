"""Canonical files, made small: every form of a set reads the same, and damaged files are told."""

import gzip
import os
import pickle
import stat
import struct

import numpy as np
import pytest
import torch

from zetaclip.data import files, load
from zetaclip.data.cifar import _binary, _python
from zetaclip.data.places import default_root, find, roots
from zetaclip.errors import CommandError, InputError


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    raw = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.fixture
def images():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (20, 28, 28)), rng.integers(0, 10, 20)


def write_mnist(folder, images, ending=".gz"):
    x, y = images
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte{ending}", x)
        write_idx(folder / f"{part}-labels-idx1-ubyte{ending}", y)


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_packed_or_not(tmp_path, images, folder, ending):
    write_mnist(tmp_path / folder, images, ending)
    mnist = load("mnist", tmp_path, scaling="unit")
    assert np.array_equal((mnist.train.x[:, 0] * 255).round().numpy(), images[0])
    assert mnist.train.y.tolist() == images[1].tolist()


def test_scalings_are_public_or_say_what_they_saw(tmp_path, images):
    write_mnist(tmp_path / "mnist", images)
    unit, symmetric, statistics = (
        load("mnist", tmp_path, scaling=s) for s in ("unit", "symmetric", "statistics")
    )
    assert torch.allclose(symmetric.train.x, 2 * unit.train.x - 1, atol=1e-6)
    assert torch.allclose(statistics.train.x, (unit.train.x - 0.1307) / 0.3081, atol=1e-5)
    assert unit.private_statistics == symmetric.private_statistics == ()
    assert "mean and deviation" in statistics.private_statistics[0]
    with pytest.raises(
        InputError, match="no scaling 'zscore'; choose one of symmetric, unit, statistics"
    ):
        load("mnist", tmp_path, scaling="zscore")


def test_canonical_letters_of_emnist(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (30, 28, 28)), rng.integers(1, 27, 30)
    for split in ("train", "test"):
        write_idx(tmp_path / "emnist" / f"emnist-letters-{split}-images-idx3-ubyte.gz", x)
        write_idx(tmp_path / "emnist" / f"emnist-letters-{split}-labels-idx1-ubyte.gz", y)
    letters = load("emnist", tmp_path, scaling="unit")
    assert letters.name == "emnist-letters" and letters.notes == () and letters.outputs == 26
    assert np.array_equal((letters.train.x[:, 0] * 255).round().numpy(), x.transpose(0, 2, 1))
    assert letters.train.y.tolist() == (y - 1).tolist()
    assert letters.train.x.is_contiguous()
    with pytest.raises(InputError, match="emnist-letters-subset were not found"):
        load("emnist-letters-subset", tmp_path)


def cifar_arrays(count, label_columns, classes):
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (count, 3072)).astype(np.uint8), rng.integers(
        0, classes, (count, label_columns)
    )


def test_both_published_versions_of_cifar10_read_the_same(tmp_path):
    parts = [cifar_arrays(7, 1, 10) for _ in range(6)]
    for name, (x, y) in zip(
        [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"], parts, strict=True
    ):
        (tmp_path / "a" / "cifar-10-batches-bin").mkdir(parents=True, exist_ok=True)
        rows = np.concatenate([y.astype(np.uint8), x], axis=1)
        (tmp_path / "a" / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(rows.tobytes())
        (tmp_path / "b" / "cifar-10-batches-py").mkdir(parents=True, exist_ok=True)
        batch = {
            b"batch_label": b"x",
            b"labels": y[:, 0].tolist(),
            b"data": x,
            b"filenames": [b"a.png"] * 7,
        }
        (tmp_path / "b" / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch, protocol=2))
    binary, python = load("cifar10", tmp_path / "a"), load("cifar-10", tmp_path / "b")
    assert torch.equal(binary.train.x, python.train.x) and torch.equal(binary.test.y, python.test.y)
    assert binary.train.x.shape == (35, 3, 32, 32)
    first = parts[0][0][0].reshape(3, 32, 32)  # red, then green, then blue, row by row
    assert np.allclose(binary.train.x[0].numpy(), first / 127.5 - 1, atol=1e-6)


def test_both_published_versions_of_cifar100_and_both_labels(tmp_path):
    x, y = cifar_arrays(9, 2, 20)
    (tmp_path / "a" / "cifar-100-binary").mkdir(parents=True)
    (tmp_path / "b" / "cifar-100-python").mkdir(parents=True)
    for name in ("train", "test"):
        rows = np.concatenate([y.astype(np.uint8), x], axis=1)  # coarse, fine, pixels
        (tmp_path / "a" / "cifar-100-binary" / f"{name}.bin").write_bytes(rows.tobytes())
        batch = {b"coarse_labels": y[:, 0].tolist(), b"fine_labels": y[:, 1].tolist(), b"data": x}
        (tmp_path / "b" / "cifar-100-python" / name).write_bytes(pickle.dumps(batch, protocol=2))
    for root in (tmp_path / "a", tmp_path / "b"):
        assert load("cifar100", root).train.y.tolist() == y[:, 1].tolist()
        coarse = load("cifar100", root, labels="coarse")
        assert coarse.train.y.tolist() == y[:, 0].tolist()
        assert (coarse.outputs, coarse.name) == (20, "cifar100-coarse")
    with pytest.raises(InputError, match="'fine' or 'coarse'"):
        load("cifar100", tmp_path / "a", labels="rough")


def test_a_pickle_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Evil(), b"labels": []}))
    with pytest.raises(InputError, match="which no CIFAR file does"):
        _python([path], (b"labels",))
    assert not (tmp_path / "owned").exists()


def test_a_python_2_pickle_of_the_published_kind(tmp_path):
    """As published: protocol 2, byte strings, an array by numpy.core.multiarray._reconstruct."""
    array = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    text = (
        b"\x80\x02}q\x00(U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02"
        b"cnumpy\nndarray\nq\x03K\x00\x85q\x04U\x01bq\x05"
        b"\x87q\x06Rq\x07(K\x01K\x02M\x00\x0c\x86q\x08cnumpy\ndtype\nq\tU\x02u1q\n"
        b"K\x00K\x01\x87q\x0bRq\x0c(K\x03U\x01|q\rNNNJ\xff\xff"
        b"\xff\xffJ\xff\xff\xff\xffK\x00tq\x0eb\x89T"
        + struct.pack("<i", array.size)
        + array.tobytes()
        + b"q\x0ftq\x10bU\x06labels"
        b"q\x11]q\x12(K\x03K\x07eu."
    )
    path = tmp_path / "data_batch_1"
    path.write_bytes(text)
    x, y = _python([path], (b"labels",))
    assert np.array_equal(x.reshape(2, -1), array) and y[:, 0].tolist() == [3, 7]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:-8] + b"\0" * 8,
        lambda raw: b"",
        lambda raw: b"hello" * 100,
    ],
    ids=["cut", "bad checksum", "empty", "other"],
)
def test_damaged_idx_files_are_told(tmp_path, images, damage):
    write_mnist(tmp_path / "mnist", images)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match="train-images-idx3-ubyte"):
        load("mnist", tmp_path)


def test_wrong_contents_are_told(tmp_path, images):
    y = images[1]
    write_mnist(tmp_path / "mnist", images)
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", y[:-1])
    with pytest.raises(InputError, match="do not belong together"):
        load("mnist", tmp_path)
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", y + 200)
    with pytest.raises(InputError, match="a label lies outside 0 to 9"):
        load("mnist", tmp_path)
    (tmp_path / "half.bin").write_bytes(b"\1" * 3000)
    with pytest.raises(InputError, match="truncated"):
        _binary([tmp_path / "half.bin"], 1)


def test_names_that_are_not_known(tmp_path, monkeypatch):
    monkeypatch.delenv("ZETACLIP_DATA", raising=False)
    with pytest.raises(
        InputError, match=r"neither a known data set nor an existing file.*Did you mean mnist\?"
    ):
        load("mnits")
    with pytest.raises(
        InputError, match=r"files of mnist were not found under .*`zetaclip data fetch mnist`"
    ):
        load("mnist", tmp_path)
    with pytest.raises(InputError, match="is ZETACLIP_DATA set"):
        load("adult")
    with pytest.raises(InputError, match="unpack VED_DynamicData_Part1"):
        load("ved", tmp_path)
    with pytest.raises(CommandError, match="mnist has no option size; it has scaling"):
        load("mnist", tmp_path, size=3)


def test_where_sets_are_looked_for(tmp_path, monkeypatch, images):
    monkeypatch.delenv("ZETACLIP_DATA", raising=False)
    assert roots() == [default_root()] and roots(tmp_path) == [tmp_path]
    write_mnist(default_root() / "mnist", images)
    assert len(load("mnist").train) == 20
    monkeypatch.setenv("ZETACLIP_DATA", str(tmp_path / "elsewhere"))
    assert roots() == [tmp_path / "elsewhere", default_root()]
    assert find("mnist").folder == default_root() / "mnist"  # the first root lacks it
    with pytest.raises(InputError):
        load("mnist", tmp_path / "elsewhere")  # a given root is the only one


def test_the_cache_is_keyed_by_its_sources_and_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("ZETACLIP_CACHE", str(tmp_path / "c"))
    source = tmp_path / "source"
    source.write_text("one")
    calls = []

    def decode():
        calls.append(1)
        return np.arange(3) + len(calls)

    assert files.cached("a", [source], decode).tolist() == [1, 2, 3]
    assert files.cached("a", [source], decode).tolist() == [1, 2, 3]
    (cached,) = (tmp_path / "c").iterdir()
    assert stat.S_IMODE(cached.stat().st_mode) == 0o600
    cached.write_bytes(b"damaged")
    assert files.cached("a", [source], decode).tolist() == [2, 3, 4]
    source.write_text("another")
    assert files.cached("a", [source], decode).tolist() == [3, 4, 5]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZETACLIP_CACHE", str(tmp_path / "file"))  # can't be a folder
    assert files.cached("a", [source], decode).tolist() == [4, 5, 6]
