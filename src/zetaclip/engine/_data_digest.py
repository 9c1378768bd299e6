"""Tells data sets apart, so that a replay or another rank notices that it has other records."""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import Subset, TensorDataset

from ..randomness._forward import alone
from ._dataset_checks import index_array

# Records that are looked at where the data set is not in memory.
_SAMPLED = 64


def digest_of(dataset: Any) -> str:
    """A digest of the data: all of a data set in memory, the size and some records of any other.

    It is secret, because with it a guess about the data can be checked.
    """
    digest = hashlib.blake2b(digest_size=32)
    digest.update(str(len(dataset)).encode())
    keys = index_array(dataset.indices) if isinstance(dataset, Subset) else None
    if keys is not None and keys.dtype != object:
        digest.update(keys.tobytes())
        digest.update(digest_of(dataset.dataset).encode())
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            _update(digest, tensor)
    else:
        if keys is not None:  # names, say, by which alone the inner data set can be asked
            _update(digest, keys)
        count = len(dataset)
        with alone():
            for i in sorted(
                {round(k * (count - 1) / max(1, _SAMPLED - 1)) for k in range(_SAMPLED)}
            ):
                # A data set that augments should look the same twice. Not torch.manual_seed, which
                # resets every card's stream, too.
                torch.default_generator.manual_seed(0)
                np.random.seed(0)
                random.seed(0)
                for leaf in tree_flatten(dataset[i])[0]:
                    _update(digest, leaf)
    return digest.hexdigest()


def _update(digest: Any, leaf: Any) -> None:
    # A picture of PIL's, whose text is its address.
    if hasattr(leaf, "__array_interface__") and not isinstance(leaf, np.generic):
        leaf = np.asarray(leaf)
    if isinstance(leaf, Tensor):
        value = leaf.detach().cpu().contiguous()
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data if value.numel() else b"")
    elif isinstance(leaf, np.ndarray):
        digest.update(f"{leaf.dtype} {leaf.shape}".encode())
        digest.update(
            np.ascontiguousarray(leaf).tobytes()
            if leaf.dtype != object
            else repr(leaf.tolist()).encode()
        )
    else:
        # Without the addresses of objects, which are others in every process.
        digest.update(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(leaf)).encode())


def stable_digest(dataset: Any) -> str | None:
    """The digest of the data, for comparison with another process; None if it says nothing.

    A data set that draws its own augmentation gives another digest every time it is read. So it is
    read twice, and the result is None if the digests differ or reading fails.
    """
    try:
        found = digest_of(dataset)
        in_memory = isinstance(_innermost(dataset), TensorDataset)
        return found if in_memory or digest_of(dataset) == found else None
    except Exception:  # an unreadable record is told where it is trained on
        return None


def _innermost(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
