"""Folders of images, one folder per class: ImageNet-100, and the user's own images."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from ..errors import InputError, OwnerWarning
from .dataset import Dataset, Split
from .files import cached
from .holdout import held_out
from .images import looked_at
from .inputs import ImageInput
from .pictures import ENDINGS, decode_pictures, modest, picture_files, told
from .pixels import scaled
from .places import Place

_TEST_FOLDERS = ("test", "val", "valid", "validation")
_SIZE, _CHANNELS = 64, 3


def imagenet100(place: Place, *, size: int = 64, scaling: str = "symmetric") -> Dataset:
    """A hundred classes of ImageNet in train/ and val/, decoded and resized once.

    At 64 pixels the published 126,689 images take 6.2 GB as float32.

    Args:
        place: The folders that were found.
        size: Side of the images in pixels.
        scaling: See ``pixels.scaled``.

    Returns:
        A classification.

    Raises:
        InputError: There are not 100 classes, or an image cannot be read.
    """
    dataset = _public("imagenet100", place, size, scaling, ())
    if dataset.outputs != 100:
        raise InputError(f"{place.folder} has {dataset.outputs} classes; ImageNet-100 has 100")
    return dataset


def imagenet_sample(place: Place, *, size: int = 64, scaling: str = "symmetric") -> Dataset:
    """A few photographs in broad classes, to test the loader of large images.

    Args:
        place: The folders that were found.
        size: Side of the images in pixels.
        scaling: See ``pixels.scaled``.

    Returns:
        A classification.

    Raises:
        InputError: An image cannot be read.
    """
    return _public(
        "imagenet-sample",
        place,
        size,
        scaling,
        ("a handful of images: not for any claim of accuracy",),
    )


def own_folder(
    path: Path,
    *,
    size: int | None = None,
    channels: int | None = None,
    scaling: str = "symmetric",
    test_share: float = 0.2,
    seed: int = 0,
    task: str = "classification",
    cache: bool = False,
) -> Dataset:
    """The user's own images: ``path/CLASS/image``, or ``path/train/CLASS/...`` and ``path/test``.

    The names of the folders are the classes: they are treated as public, and a class may be an
    empty folder.

    Args:
        path: The folder.
        size: Side of the images in pixels: they are scaled, and cut to a square. None for 64. It is
            not read off the images, because that would not be covered by ε; a warning tells their
            owner if all are smaller.
        channels: 1 for grey, 3 for colour. None for 3, with a warning if all images are grey.
        scaling: See ``pixels.scaled``; "statistics" are those of ImageNet.
        test_share: Expected share of the images that is held out for testing, if there is no
            folder for it (test, val, valid or validation). Each image is chosen by its content and
            the public seed.
        seed: Public seed of the split.
        task: "classification" or "binary"; two classes are always a binary task.
        cache: Keep a decoded copy of the images, readable by its owner only, so that the next run
            starts faster.

    Returns:
        The data.

    Raises:
        InputError: The folders do not fit, no image can be read, or an argument has a value that
            is not allowed.

    **Guarantee.** Whether an image is left out because it can't be read depends on that image
    alone. So ε holds as for images that can be read; the count is told to the owner by a warning.
    """
    given = {"size": size, "channels": channels}
    size = _SIZE if size is None else size
    channels = _CHANNELS if channels is None else channels
    _check(size, scaling, test_share)
    if task not in ("classification", "binary"):
        raise InputError(f"a folder of images by class is a classification, not {task!r}")
    if channels not in (1, 3):
        raise InputError(f"channels must be 1 (grey) or 3 (colour), not {channels!r}")
    train_folder = path / "train"
    test_folder = next((path / name for name in _TEST_FOLDERS if (path / name).is_dir()), None)
    kept = "own" if cache else None
    _tell_what_is_larger_than_needed(picture_files(path), given)
    notes = [
        f"images are scaled and cut to {size}x{size} pixels",
        "the classes are the names of the folders, treated as public",
        "pictures that can't be read are left out, each by itself",
    ]
    if train_folder.is_dir() and test_folder is not None:
        classes = _classes(train_folder)
        strange = set(_classes(test_folder)) - set(classes)
        if strange:
            raise InputError(
                f"{test_folder} has classes that {train_folder} lacks: {', '.join(sorted(strange))}"
            )
        x, y = _read(train_folder, classes, size, channels, kept, True)
        x_test, y_test = _read(test_folder, classes, size, channels, kept, True)
    else:
        classes = _classes(path)
        pixels, labels = _read(path, classes, size, channels, kept, True)
        testing = held_out(pixels, labels, test_share, seed, "test")
        if testing.all() or not testing.any():
            raise InputError(
                f"{path} has too few images to hold out a share of {test_share:g}, "
                "or take another seed"
            )
        x, y, x_test, y_test = pixels[~testing], labels[~testing], pixels[testing], labels[testing]
        notes.append(
            f"about a share of {test_share:g} is held out, "
            f"each image by its content and the public seed {seed}"
        )
    if len(np.unique(y)) < 2:
        # Not an error: the classes are public, but which of them have images is private.
        warnings.warn(
            f"the training images of {path} are all of one class", OwnerWarning, stacklevel=2
        )
    return _dataset(
        path.name, classes, (x, y), (x_test, y_test), scaling, notes=tuple(notes), public=False
    )


def _tell_what_is_larger_than_needed(files: list[Path], given: dict[str, int | None]) -> None:
    """Warns the owner if images are enlarged or get colours, and nobody asked for that."""
    if None not in given.values():
        return
    size = given["size"] or _SIZE
    side, grey = modest(files, size)
    found, made, flags, arguments = [], [], [], []
    if side is not None and given["size"] is None:
        found.append(f"at most {side} pixels wide and high")
        made.append(f"enlarged to {size}x{size}")
        flags.append(f"--image-size {max(side, 8)}")
        arguments.append(f"size={max(side, 8)}")
    if grey and given["channels"] is None:
        found.append("grey")
        made.append(f"given {_CHANNELS} equal colours")
        flags.append("--set data_options.channels=1")
        arguments.append("channels=1")
    if found:
        warnings.warn(
            f"all pictures are {' and '.join(found)}; they are {' and '.join(made)}. Training on"
            f" them as they are takes less time: {' '.join(flags)} (in Python"
            f" {', '.join(arguments)}). It is not done unasked, because ε does not cover what is"
            " read off the pictures",
            OwnerWarning,
            stacklevel=4,
        )


def _public(name: str, place: Place, size: int, scaling: str, notes: tuple[str, ...]) -> Dataset:
    _check(size, scaling, 0.5)
    train_folder, test_folder = place.files
    classes = _classes(train_folder)
    if _classes(test_folder) != classes:
        raise InputError(f"{train_folder} and {test_folder} have different classes")
    pairs = [_read(folder, classes, size, 3, name) for folder in (train_folder, test_folder)]
    stated = (f"images are scaled and cut to {size}x{size} pixels", *notes)
    return _dataset(name, classes, pairs[0], pairs[1], scaling, notes=stated, public=True)


def _dataset(
    name: str,
    classes: tuple[str, ...],
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    scaling: str,
    *,
    notes: tuple[str, ...],
    public: bool,
) -> Dataset:
    import torch

    binary = len(classes) == 2
    splits = []
    for x, y in (train, test):
        labels = torch.from_numpy(y.astype(np.float32 if binary else np.int64))
        splits.append(Split(scaled(x, scaling, "imagenet"), labels))
    return Dataset(
        name=name,
        task="binary" if binary else "classification",
        train=splits[0],
        test=splits[1],
        outputs=1 if binary else len(classes),
        unit="one image",
        classes=classes,
        public=public,
        notes=notes,
        # ImageNet's statistics are private statistics only if the records are ImageNet's.
        private_statistics=looked_at(scaling) if public else (),
        nominal_size=len(train[1]) if public else None,
        inputs=ImageInput(train[0].shape[1:], scaling, "imagenet"),
    )


def _check(size: int, scaling: str, test_share: float) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 4 <= size <= 1024:
        raise InputError(f"size must be a whole number of pixels from 4 to 1024, not {size!r}")
    if not 0 < test_share < 1:
        raise InputError(f"test_share must lie between 0 and 1, not {test_share!r}")
    # Raises for an unknown scaling, before the images are decoded for an hour.
    scaled(np.zeros((1, 3, 1, 1), np.uint8), scaling, "imagenet")


def _classes(folder: Path) -> tuple[str, ...]:
    classes = tuple(
        sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    )
    if not classes:
        raise InputError(f"{folder} has no folders; one folder of images per class is needed")
    if len(classes) == 1:
        raise InputError(f"{folder} has one class only, {classes[0]}; at least two are needed")
    return classes


def _read(
    folder: Path,
    classes: tuple[str, ...],
    size: int,
    channels: int,
    cache: str | None,
    skip_broken: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, channels, size, size) and labels, in the order of the classes.

    ``cache`` is the name of the cached copies; None: no cache. With ``skip_broken``, pictures that
    can't be read are left out with a warning for their owner.
    """
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        inside = folder / name
        found = picture_files(inside) if inside.is_dir() else []
        files += found
        labels += [label] * len(found)
    if not files:
        raise InputError(f"{folder} has no images (of {', '.join(ENDINGS)})")
    broken: dict[Path, str] = {}

    def decode() -> np.ndarray:
        pixels = decode_pictures(files, (channels, size, size), broken if skip_broken else None)
        if broken:
            raise _Broken(pixels)  # such a folder is not cached
        return pixels

    try:
        pixels = (
            cached(f"{cache}-{folder.name}-{size}x{channels}", files, decode) if cache else decode()
        )
    except _Broken as found:
        kept = np.array([file not in broken for file in files])
        if not kept.any():
            raise InputError(f"none of the {len(files)} images in {folder} can be read") from None
        warnings.warn(
            f"{told(broken, len(files))}. How many they are is private: it is told here, and not"
            " written into the run's folder",
            OwnerWarning,
            stacklevel=3,
        )
        return found.pixels[kept], np.array(labels, np.int64)[kept]
    return pixels, np.array(labels, np.int64)


class _Broken(Exception):
    """Some pictures could not be read.

    Args:
        pixels: The pixels, 0 where a picture could not be read.
    """

    def __init__(self, pixels: np.ndarray) -> None:
        super().__init__()
        self.pixels = pixels
