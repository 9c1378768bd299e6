"""Features that several runs on the same records compute once.

Features of 60,000 pictures take minutes, a head on them seconds. While ``shared(folder)`` is open,
``precompute`` of this process and of all that it starts keeps features in that folder, and the next
run with the same records and the same features maps them into memory.

Features are as private as the records. So the folder is for this user alone, and it is deleted when
the block ends; one that a killed process left is deleted when the next block begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from ..files import replace_file

_VARIABLE = "ZETACLIP_SHARED_FEATURES"


@contextmanager
def shared(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Lets runs share features while the block is open.

    Args:
        folder: A folder that nobody else uses. What is in it is deleted, before and after.
    """
    path = Path(folder).absolute()
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700, parents=True)
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(path)
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE)
        if before is not None:
            os.environ[_VARIABLE] = before
        shutil.rmtree(path, ignore_errors=True)


def found_or_made(described: Mapping[str, Any], x: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """The features of ``x``: from the shared folder if there is one, or made.

    Args:
        described: All that the features depend on beside the records.
        x: The records.
        make: Computes them.

    **Edge cases.** If the folder is gone or can't be written, they are made. Writing into the
    returned tensor changes no file.
    """
    folder = os.environ.get(_VARIABLE)
    if folder is None or not Path(folder).is_dir():
        return make()
    target = Path(folder) / f"{_name(described, x)}.npy"
    try:
        with FileLock(f"{target}.lock"):  # another run may be computing them
            if not target.exists():
                with replace_file(target, 0o600) as file:
                    np.save(file, make().numpy())
        return torch.from_numpy(np.load(target, mmap_mode="c"))
    except OSError:  # most often the disk is full
        return make()


def _name(described: Mapping[str, Any], x: Tensor) -> str:
    text = json.dumps(described, sort_keys=True)
    digest = hashlib.blake2b(f"{text} {x.dtype} {tuple(x.shape)}".encode(), digest_size=16)
    digest.update(x.contiguous().numpy().data)
    return digest.hexdigest()
