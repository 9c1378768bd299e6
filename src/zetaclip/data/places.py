"""Where the files of each set are searched for. No file is opened here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "ZETACLIP_DATA"


@dataclass(frozen=True)
class Form:
    """One form in which a set may be stored.

    Attributes:
        kind: Name of the form, for the loader.
        folders: Folders to search, under the data root.
        files: Files that must all be in one of the folders. A file may have ``.gz`` added; a name
            with ``*`` must match at least one file.
    """

    kind: str
    folders: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """A form that was found.

    Attributes:
        kind: Name of the form.
        folder: The folder with its files.
        files: The files, in the order of the form.
    """

    kind: str
    folder: Path
    files: tuple[Path, ...]

    @property
    def size(self) -> int:
        """Total bytes of the files; a folder counts with everything in it."""
        return sum(_size(path) for path in self.files)


_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_EMNIST = ("images-idx3-ubyte", "labels-idx1-ubyte")
CLINICS = ("cleveland", "hungarian", "switzerland", "va")

# Canonical forms come first: if several forms exist, the canonical files are read.
FORMS: dict[str, tuple[Form, ...]] = {
    "digits": (),  # comes with scikit-learn
    "mnist": (Form("idx", ("mnist", "MNIST/raw"), _IDX),),
    # The last folder is that of Debian's package dataset-fashion-mnist.
    "fashion-mnist": (
        Form(
            "idx", ("fashion-mnist", "FashionMNIST/raw", "/usr/share/datasets/fashion-mnist"), _IDX
        ),
    ),
    "emnist": (
        Form(
            "letters",
            ("emnist", "EMNIST/raw", "emnist/gzip", "gzip"),
            tuple(
                f"emnist-letters-{split}-{part}" for split in ("train", "test") for part in _EMNIST
            ),
        ),
        Form(
            "subset",
            ("emnist",),
            (
                *(f"emnist-byclass-test-letters-{part}" for part in _EMNIST),
                *(f"emnist-bymerge-test-extra-letters-{part}" for part in _EMNIST),
                "emnist-byclass-mapping.txt",
                "emnist-bymerge-mapping.txt",
            ),
        ),
    ),
    "cifar10": (
        Form(
            "binary",
            ("cifar-10-batches-bin", "cifar-10/cifar-10-batches-bin", "cifar-10"),
            (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
        ),
        Form(
            "python",
            ("cifar-10-batches-py", "cifar-10/cifar-10-batches-py"),
            (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
        ),
        Form(
            "tiles",
            ("cifar-10",),
            (
                *(f"data_batch_{i}_{k}.webp" for i in range(1, 6) for k in range(4)),
                *(f"test_batch_{k}.webp" for k in range(4)),
                "labels.npy",
            ),
        ),
    ),
    "cifar100": (
        Form(
            "binary",
            ("cifar-100-binary", "cifar-100/cifar-100-binary", "cifar-100"),
            ("train.bin", "test.bin"),
        ),
        Form("python", ("cifar-100-python", "cifar-100/cifar-100-python"), ("train", "test")),
        Form(
            "tiles",
            ("cifar-100",),
            (
                *(f"train_{k:02d}.webp" for k in range(20)),
                *(f"test_{k}.webp" for k in range(4)),
                "labels.npy",
                "fine_label_names.txt",
                "coarse_label_names.txt",
            ),
        ),
    ),
    "imagenet100": (
        Form("folder", ("imagenet100", "imagenet-100", "ImageNet100"), ("train", "val")),
    ),
    "imagenet-sample": (Form("folder", ("imagenet-sample",), ("train", "val")),),
    "adult": (Form("uci", ("adult",), ("adult.data", "adult.test")),),
    "heart": (
        Form(
            "uci",
            ("heart-disease", "heart"),
            tuple(f"processed.{clinic}.data" for clinic in CLINICS),
        ),
    ),
    "ved": (Form("weeks", ("ved", "VED"), ("VED_Static_Data_ICE&HEV.xlsx", "VED_*_week.csv*")),),
}


def default_root() -> Path:
    """The default folder of `zetaclip data fetch`."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "zetaclip"


def roots(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders to search: only ``root`` if given, otherwise $ZETACLIP_DATA and the default."""
    if root is not None:
        return [Path(root).expanduser()]
    named = os.environ.get(ENVIRONMENT)
    return [*([Path(named).expanduser()] if named else []), default_root()]


def find(
    name: str, root: str | os.PathLike[str] | None = None, kind: str | None = None
) -> Place | None:
    """The first complete form of a set, root by root.

    Args:
        name: A known set.
        root: The only folder to search, if given.
        kind: The only form to accept, if given.

    Returns:
        The form, or None if no form is complete.
    """
    for base in roots(root):
        for form in FORMS[name]:
            if kind is not None and form.kind != kind:
                continue
            for folder in form.folders:
                files = _whole(base / folder, form.files)
                if files:
                    return Place(form.kind, base / folder, files)
    return None


def _whole(folder: Path, files: Sequence[str]) -> tuple[Path, ...]:
    """All the files, or an empty tuple if one is missing."""
    found: list[Path] = []
    for name in files:
        matches = (
            sorted(folder.glob(name)) if "*" in name else [folder / name, folder / f"{name}.gz"]
        )
        present = [path for path in matches if path.exists()]
        if not present:
            return ()
        found += present if "*" in name else present[:1]
    return tuple(found)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(inner.stat().st_size for inner in path.rglob("*") if inner.is_file())
    return path.stat().st_size
