"""Picture files: which ones a folder has, and their pixels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..errors import InputError

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_NAMED = 5  # broken files that a message names
_GREY = ("1", "L", "LA", "I", "I;16", "F")  # Pillow's names of modes without colour


def picture_files(folder: Path) -> list[Path]:
    """The picture files in a folder and in the folders inside it, in order of their names."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in ENDINGS)


def decode_pictures(
    files: Sequence[Path], shape: tuple[int, int, int], broken: dict[Path, str] | None = None
) -> np.ndarray:
    """Picture files as pixels.

    Args:
        files: The files.
        shape: Channels, height and width: pictures are scaled, and cut to their middle.
        broken: Gets the files that can't be read, with the reason; their pixels are 0. None makes
            such a file an error.

    Returns:
        An array (n, channels, height, width) of values from 0 to 255.

    Raises:
        InputError: A file can't be read; the message names it.
    """
    pixels = np.zeros((len(files), *shape), np.uint8)

    def one(i: int) -> str:
        try:
            pixels[i] = _image(files[i], shape)
        except InputError as error:
            if broken is None:
                raise
            return str(error)
        return ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow releases the GIL while it decodes
        reasons = list(pool.map(one, range(len(files))))
    if broken is not None:
        broken.update((path, why) for path, why in zip(files, reasons, strict=True) if why)
    return pixels


def modest(files: Sequence[Path], side: int) -> tuple[int | None, bool]:
    """Whether all pictures are smaller than they will be made, and whether all are grey.

    Args:
        files: The files. Only their headers are read, and of those that can't be read, nothing.
        side: The side in pixels that they will have.

    Returns:
        The largest width or height, or None if one is ``side`` or more; and whether all are stored
        without colour.
    """
    from PIL import Image

    largest, grey = 0, True
    for path in files:
        try:
            with Image.open(path) as image:
                largest, grey = max(largest, *image.size), grey and image.mode in _GREY
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            continue
        if largest >= side and not grey:
            break
    return largest if 0 < largest < side else None, grey and largest > 0


def told(broken: dict[Path, str], total: int) -> str:
    """That files were skipped: how many, and the names of some."""
    named = ", ".join(str(path) for path in list(broken)[:_NAMED])
    more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    verb = "is" if len(broken) == 1 else "are"
    return f"{len(broken)} of {total} pictures can't be read and {verb} left out: {named}{more}"


def _image(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    """The middle of an image, channels first."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    try:
        with Image.open(path) as image:
            image.draft("RGB", (2 * width, 2 * height))  # a JPEG decoder can skip unneeded detail
            upright = ImageOps.exif_transpose(image).convert("RGB" if channels == 3 else "L")
            square = np.asarray(ImageOps.fit(upright, (width, height), Image.Resampling.BICUBIC))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read the image {path}: {error}") from error
    return square[None] if channels == 1 else square.transpose(2, 0, 1)
