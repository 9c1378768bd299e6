"""``load``: from the name of a known set, or the path of the user's own data, to a ``Dataset``."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError
from .dataset import Dataset
from .places import ENVIRONMENT, FORMS, Place, find, roots
from .sources import BY_HAND, SOURCES

# name: (module, function). The function gets the ``Place`` of the files, and the options.
LOADERS: dict[str, tuple[str, str]] = {
    "digits": ("images", "digits"),
    "mnist": ("images", "mnist"),
    "fashion-mnist": ("images", "fashion_mnist"),
    "emnist": ("images", "emnist"),
    "cifar10": ("cifar", "cifar10"),
    "cifar100": ("cifar", "cifar100"),
    "imagenet100": ("folder", "imagenet100"),
    "imagenet-sample": ("folder", "imagenet_sample"),
    "adult": ("uci", "adult"),
    "heart": ("uci", "heart"),
    "ved": ("ved", "ved"),
}
ALIASES = {
    "emnist-letters": ("emnist", "letters"),
    "emnist-letters-subset": ("emnist", "subset"),
    "fashion": ("fashion-mnist", None),
    "fashion_mnist": ("fashion-mnist", None),
    "cifar-10": ("cifar10", None),
    "cifar-100": ("cifar100", None),
    "imagenet-100": ("imagenet100", None),
}


def names() -> tuple[str, ...]:
    """The names of known sets that ``load`` accepts."""
    return tuple(LOADERS)


def load(name: Any, root: str | os.PathLike[str] | None = None, **options: Any) -> Dataset:
    """Train and test tensors of a known set, of a table, or of a folder of images.

    Args:
        name: A known set (see ``names()``), or a path: a .csv, .csv.gz or .parquet file, or a
            folder with one folder of images per class. Or a table in memory: a pandas or polars
            DataFrame, a mapping of columns, or a list of rows as mappings.
        root: The folder with the files of known sets; default $ZETACLIP_DATA, then the user's data
            folder.
        **options: Options of that set's loader; docs/data.md lists them. None counts as not given.

    Returns:
        The data.

    Raises:
        InputError: The name is unknown, files are missing, or the set does not have an option. The
            message explains what to do.

    Examples:
        >>> data = load("digits")
        >>> len(data.train), data.input_shape
        (1437, (1, 8, 8))
    """
    given = {key: value for key, value in options.items() if value is not None}
    if not isinstance(name, (str, os.PathLike)):
        loader = _function("own", "own_table")
        _check_options("a table in memory", loader, given)
        return loader(name, **given)
    loader, place = _chosen(name, root, given)
    return loader(**given) if place is None else loader(place, **given)


def check(
    name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None, **options: Any
) -> None:
    """Raises what ``load`` would before it reads the data; needs neither the data nor torch.

    Args:
        name: As for ``load``.
        root: As for ``load``.
        **options: As for ``load``.

    Raises:
        InputError: The name is unknown, files are missing, or the set does not have an option.
    """
    _chosen(name, root, {key: value for key, value in options.items() if value is not None})


def _chosen(
    name: str | os.PathLike[str], root: str | os.PathLike[str] | None, options: dict[str, Any]
) -> tuple[Callable[..., Dataset], Place | Path | None]:
    """The loader, and what it reads."""
    text = os.fspath(name)
    known, kind = ALIASES.get(text, (text, None))
    if known in LOADERS and isinstance(name, str):
        loader = _function(*LOADERS[known])
        _check_options(text, loader, options)
        place = None
        if FORMS[known]:
            place = find(known, root, kind)
            if place is None:
                raise InputError(_missing(text, known, kind, root))
        return loader, place
    path = Path(text).expanduser()
    if path.is_dir():
        loader = _function("folder", "own_folder")
    elif path.is_file():
        loader = _function("own", "own_table")
    else:
        raise InputError(_unknown(text))
    _check_options(text, loader, options)
    return loader, path


def _function(module: str, function: str) -> Callable[..., Dataset]:
    found: Callable[..., Dataset] = getattr(
        importlib.import_module(f".{module}", __package__), function
    )
    return found


def _check_options(name: str, loader: Callable[..., Dataset], options: dict[str, Any]) -> None:
    taken = [
        p.name for p in inspect.signature(loader).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    strange = [key for key in options if key not in taken]
    if strange:
        has = f"it has {', '.join(taken)}" if taken else "it has none"
        raise InputError(f"{name} has no option {', '.join(strange)}; {has}")


def _missing(name: str, known: str, kind: str | None, root: str | os.PathLike[str] | None) -> str:
    looked = ", ".join(str(base) for base in roots(root))
    forms = [form for form in FORMS[known] if kind in (None, form.kind)]
    folders = ", ".join(dict.fromkeys(folder for form in forms for folder in form.folders))
    hint = (
        f"is {ENVIRONMENT} set, or a data root given"
        if root is None
        else "is this the right data root"
    )
    if known in SOURCES and kind != "subset":
        way = f"run `zetaclip data fetch {known}`"
    else:
        way = BY_HAND.get(known, "copy them there")
    return (
        f"the files of {name} were not found under {looked} (in {folders}): {hint}? "
        f"Otherwise: {way}"
    )


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, [*LOADERS, *ALIASES], n=1, cutoff=0.6)
    guess = f" Did you mean {near[0]}?" if near else ""
    return (
        f"{name} is neither a known data set nor an existing file or folder.{guess} "
        f"Known: {', '.join(LOADERS)}"
    )
