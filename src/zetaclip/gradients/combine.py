"""What a parameter gets that was used several times, as one contribution."""

from __future__ import annotations

from itertools import pairwise

import torch

from .contributions import Contribution, Dense, Lookup, Outer, Single
from .grams import LONGEST_GRAM
from .tied import Tied


def combine(parts: list[Contribution]) -> list[Contribution]:
    """One contribution per block of a parameter that was used several times (or is tied).

    The contributions of one parameter are added per example before norms are computed: adding norms
    instead would be wrong. Matrix uses are concatenated along their positions, which adds them at
    no cost; other mixtures are made dense.

    Returns:
        Contributions with disjoint blocks, so that their squared norms can be added.

    Raises:
        RuntimeError: Blocks overlap.
    """
    if len(parts) == 1:
        return parts
    if all(part.block is not None for part in parts):
        blocks: dict[tuple[int, int], list[Contribution]] = {}
        for part in parts:
            assert part.block is not None
            blocks.setdefault((part.block.start, part.block.stop), []).append(part)
        spans = sorted(blocks)
        if all(first[1] <= second[0] for first, second in pairwise(spans)):
            return [_join(group) for group in blocks.values()]
        raise RuntimeError(
            "overlapping blocks of one parameter; a layer rule must use the same blocks every time"
        )
    whole = [part for part in parts if part.block is None]
    if len(whole) < len(parts):
        # One use was of the whole parameter, another of a block, for example an attention layer
        # that is used for self- and for cross-attention.
        total = _join(whole).dense().clone()
        for part in parts:
            if part.block is not None:
                total[:, part.block] += part.dense()
        return [Dense(total, total.shape[1:])]
    return [_join(parts)]


def _join(parts: list[Contribution]) -> Contribution:
    if len(parts) == 1:
        return parts[0]
    matrices = [part.as_sequence() for part in parts if isinstance(part, (Single, Outer))]
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if len(matrices) + len(lookups) == len(parts):
        if not lookups:
            return _one_matrix(matrices)
        if not matrices:
            return _one_lookup(lookups)
        outer = _one_matrix(matrices)
        if outer.x.shape[1] <= LONGEST_GRAM:
            return Tied(_one_lookup(lookups), outer)
    total = parts[0].dense()
    for part in parts[1:]:
        total = total + part.dense()
    return Dense(total, total.shape[1:], None, parts[0].block)


def _one_matrix(parts: list[Outer]) -> Outer:
    if len(parts) == 1:
        return parts[0]
    x = torch.cat([part.x for part in parts], dim=1)
    return Outer(x, torch.cat([part.g for part in parts], dim=1), parts[0].block)


def _one_lookup(parts: list[Lookup]) -> Lookup:
    if len(parts) == 1:
        return parts[0]
    ids = torch.cat([part.ids for part in parts], dim=1)
    return Lookup(ids, torch.cat([part.g for part in parts], dim=1), parts[0].shape, parts[0].block)
