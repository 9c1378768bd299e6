"""Grey images: digits, MNIST, Fashion-MNIST and EMNIST's letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from .dataset import Dataset, Split
from .files import read_bytes, read_idx
from .inputs import ImageInput
from .pixels import scaled
from .places import Place

if TYPE_CHECKING:
    from torch import Tensor

_FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
_DIGITS = tuple("0123456789")


def looked_at(scaling: str) -> tuple[str, ...]:
    """The statistics of the training data that a scaling uses, in words."""
    return (
        ("mean and deviation of the training pixels (published)",)
        if scaling == "statistics"
        else ()
    )


def image_dataset(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    classes: tuple[str, ...],
    scaling: str,
    *,
    white: float = 255.0,
    constants: str | None = None,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """Arrays of a public set of images as a ``Dataset``.

    Args:
        name: Name of the set.
        train: Pixels (n, channels, height, width) and labels for training.
        test: The same for testing.
        classes: Names of the classes.
        scaling: See ``pixels.scaled``.
        white: The largest pixel value.
        constants: Entry of ``STATISTICS``, if it is not ``name``.
        notes: Treatments to be stated in the result.

    Returns:
        A classification.

    Raises:
        InputError: Images and labels do not fit, or the set has no such scaling.
    """
    splits = []
    for x, y in (train, test):
        if len(x) != len(y):
            raise InputError(f"{name}: {len(x)} images but {len(y)} labels")
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(classes):
            raise InputError(f"{name}: a label lies outside 0 to {len(classes) - 1}")
        splits.append(Split(scaled(x, scaling, constants or name, white), _labels(y)))
    return Dataset(
        name=name,
        task="classification",
        train=splits[0],
        test=splits[1],
        outputs=len(classes),
        unit="one image",
        classes=classes,
        notes=notes,
        private_statistics=looked_at(scaling),
        nominal_size=len(train[1]),
        inputs=ImageInput(train[0].shape[1:], scaling, constants or name, white),
    )


def digits(*, scaling: str = "symmetric", seed: int = 0) -> Dataset:
    """scikit-learn's 1,797 digits of 8x8 pixels with values 0 to 16; a public fifth is for testing.

    Args:
        scaling: See ``pixels.scaled``.
        seed: Public seed of the split.

    Returns:
        A classification with ten classes.

    Raises:
        InputError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            "the data set digits comes with scikit-learn: pip install 'zetaclip[sklearn]'"
        ) from error

    bunch = load_digits()
    x = bunch.images.astype(np.float32)[:, None]
    y = bunch.target
    order = np.random.default_rng(seed).permutation(len(y))
    test, train = np.sort(order[:360]), np.sort(order[360:])
    notes = (
        f"the split is a public shuffle with seed {seed}: "
        "1,437 images for training, 360 for testing",
    )
    return image_dataset(
        "digits",
        (x[train], y[train]),
        (x[test], y[test]),
        _DIGITS,
        scaling,
        white=16.0,
        notes=notes,
    )


def mnist(place: Place, *, scaling: str = "symmetric") -> Dataset:
    """Handwritten digits: 60,000 images of 28x28 pixels for training and 10,000 for testing."""
    train, test = _idx_pairs(place)
    return image_dataset("mnist", train, test, _DIGITS, scaling)


def fashion_mnist(place: Place, *, scaling: str = "symmetric") -> Dataset:
    """Clothes: 60,000 images of 28x28 pixels for training and 10,000 for testing."""
    train, test = _idx_pairs(place)
    return image_dataset("fashion-mnist", train, test, _FASHION, scaling)


def emnist(place: Place, *, scaling: str = "symmetric") -> Dataset:
    """The 26 letters, upper and lower case as one class.

    Args:
        place: The files that were found: the published Letters split, or a subset made from the
            test files of two other splits.
        scaling: See ``pixels.scaled``.

    Returns:
        A classification with 26 classes.

    Raises:
        InputError: The files are damaged or do not belong together.
    """
    if place.kind == "letters":
        pairs = _idx_pairs(place)
        # Published labels count from 1; published images are transposed.
        train, test = ((x.swapaxes(2, 3), y.astype(np.int64) - 1) for x, y in pairs)
        return image_dataset("emnist-letters", train, test, _LETTERS, scaling, constants="emnist")
    (x, y), (x_test, y_test) = _idx_pairs(place)
    fold, fold_test = (
        _case_folded(read_bytes(path).decode("ascii"), path.name) for path in place.files[4:6]
    )
    notes = (
        "a subset of EMNIST made of letters of two published test splits: "
        "not the published Letters split, so not to be compared with published figures",
    )
    return image_dataset(
        "emnist-letters-subset",
        (x.swapaxes(2, 3), fold[y]),
        (x_test.swapaxes(2, 3), fold_test[y_test]),
        _LETTERS,
        scaling,
        constants="emnist",
        notes=notes,
    )


def _labels(y: np.ndarray) -> Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(y).astype(np.int64))


def _idx_pairs(place: Place) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images with a channel dimension, and labels, of the first and of the second pair of files."""
    pairs = []
    for images, labels in (place.files[0:2], place.files[2:4]):
        x, y = read_idx(images), read_idx(labels)
        if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
            raise InputError(
                f"{images.name} and {labels.name} in {place.folder} do not belong together"
            )
        pairs.append((x[:, None], y))
    return pairs


def _case_folded(mapping: str, name: str) -> np.ndarray:
    """A table from a split's label to 0-25 for a-z, and to -1 for a digit."""
    pairs = [line.split() for line in mapping.splitlines() if line.strip()]
    if any(len(pair) != 2 for pair in pairs):
        raise InputError(f"{name} must have a label and a character code in each line")
    fold = np.full(256, -1, np.int64)
    for label, code in pairs:
        fold[int(label)] = max(ord(chr(int(code)).lower()) - ord("a"), -1)
    return fold
