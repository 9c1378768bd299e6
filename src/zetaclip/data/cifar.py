"""CIFAR-10 and CIFAR-100: the binary version, the python version, or lossless WebP tiles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .dataset import Dataset
from .files import cached, read_bytes, words
from .images import image_dataset
from .places import Place

_PIXELS = 3 * 32 * 32
_CIFAR10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_FINE = words(
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse "
    "mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy "
    "porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television "
    "tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_COARSE = (
    "aquatic_mammals",
    "fish",
    "flowers",
    "food_containers",
    "fruit_and_vegetables",
    "household_electrical_devices",
    "household_furniture",
    "insects",
    "large_carnivores",
    "large_man-made_outdoor_things",
    "large_natural_outdoor_scenes",
    "large_omnivores_and_herbivores",
    "medium_mammals",
    "non-insect_invertebrates",
    "people",
    "reptiles",
    "small_mammals",
    "trees",
    "vehicles_1",
    "vehicles_2",
)


def cifar10(place: Place, *, scaling: str = "symmetric") -> Dataset:
    """50,000 and 10,000 images of 32x32 pixels in ten classes, in published order.

    Args:
        place: The files that were found.
        scaling: See ``pixels.scaled``.

    Returns:
        A classification.

    Raises:
        InputError: A file is damaged.
    """
    train, test = place.files[:5], place.files[5:6]
    if place.kind == "binary":
        pairs = [_binary(files, 1) for files in (train, test)]
    elif place.kind == "python":
        pairs = [_python(files, (b"labels",)) for files in (train, test)]
    else:
        labels = _tile_labels(place, (60_000,))[:, None]
        pairs = _tiles("cifar10", place.files[:20], place.files[20:24], labels)
    (x, y), (x_test, y_test) = pairs
    return image_dataset("cifar10", (x, y[:, 0]), (x_test, y_test[:, 0]), _CIFAR10, scaling)


def cifar100(place: Place, *, scaling: str = "symmetric", labels: str = "fine") -> Dataset:
    """50,000 and 10,000 images of 32x32 pixels in a hundred or twenty classes, in published order.

    Args:
        place: The files that were found.
        scaling: See ``pixels.scaled``.
        labels: "fine" for a hundred classes, "coarse" for twenty.

    Returns:
        A classification.

    Raises:
        InputError: A file is damaged, or an argument has a value that is not allowed.
    """
    if labels not in ("fine", "coarse"):
        raise InputError(f"cifar100 has labels 'fine' or 'coarse', not {labels!r}")
    train, test = place.files[:1], place.files[1:2]
    if place.kind == "binary":
        # The coarse label comes first in these files.
        pairs = [(x, y[:, ::-1]) for x, y in (_binary(files, 2) for files in (train, test))]
    elif place.kind == "python":
        pairs = [_python(files, (b"fine_labels", b"coarse_labels")) for files in (train, test)]
    else:
        pairs = _tiles(
            "cifar100", place.files[:20], place.files[20:24], _tile_labels(place, (60_000, 2))
        )
    column = 0 if labels == "fine" else 1
    (x, y), (x_test, y_test) = pairs
    name = "cifar100" if labels == "fine" else "cifar100-coarse"
    classes = _FINE if labels == "fine" else _COARSE
    return image_dataset(
        name, (x, y[:, column]), (x_test, y_test[:, column]), classes, scaling, constants="cifar100"
    )


def _binary(files: Sequence[Path], label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of label bytes and planar pixels."""
    rows = []
    for path in files:
        raw = np.frombuffer(read_bytes(path), np.uint8)
        if not len(raw) or len(raw) % (label_bytes + _PIXELS):
            raise InputError(f"{path} is truncated or is not CIFAR's binary version")
        rows.append(raw.reshape(-1, label_bytes + _PIXELS))
    joined = np.concatenate(rows)
    return joined[:, label_bytes:].reshape(-1, 3, 32, 32), joined[:, :label_bytes]


class _ArrayUnpickler(pickle.Unpickler):
    """Loads only lists, strings and numpy arrays: an unrestricted pickle can run any code."""

    allowed = (
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it needs {module}.{name}, which no CIFAR file does")
        if module.startswith("numpy.core"):
            module = np.ndarray.__reduce__(np.empty(0))[0].__module__  # its name in this numpy
        return super().find_class(module, name)


def _python(files: Sequence[Path], keys: tuple[bytes, ...]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = [], []
    for path in files:
        try:
            batch = _ArrayUnpickler(io.BytesIO(read_bytes(path)), encoding="bytes").load()
            images.append(np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32))
            labels.append(np.stack([np.asarray(batch[key]) for key in keys], axis=1))
        except (
            pickle.UnpicklingError,
            KeyError,
            TypeError,
            ValueError,
            EOFError,
            IndexError,
        ) as error:
            raise InputError(f"{path} is not CIFAR's python version: {error}") from error
    return np.concatenate(images), np.concatenate(labels)


def _tile_labels(place: Place, shape: tuple[int, ...]) -> np.ndarray:
    path = place.files[24]
    try:
        labels = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if labels.shape != shape:
        raise InputError(f"{path} has shape {labels.shape}, not {shape}")
    return np.asarray(labels)


def _tiles(
    name: str, train: Sequence[Path], test: Sequence[Path], labels: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    x = cached(f"{name}-train", train, _decoder(train))
    x_test = cached(f"{name}-test", test, _decoder(test))
    return [(x, labels[:50_000]), (x_test, labels[50_000:])]


def _decoder(files: Sequence[Path]) -> Callable[[], np.ndarray]:
    def decode() -> np.ndarray:
        with ThreadPoolExecutor(2) as pool:  # Pillow releases the GIL while it decodes
            return np.concatenate(list(pool.map(_tile, files)))

    return decode


def _tile(path: Path) -> np.ndarray:
    """2,500 images, channels first, from a grid of 50 by 50."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            grid = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if grid.shape != (1600, 1600, 3):
        raise InputError(f"{path} is {grid.shape[1]}x{grid.shape[0]} pixels, not 1600x1600")
    tiles = grid.reshape(50, 32, 50, 32, 3).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(-1, 3, 32, 32)
