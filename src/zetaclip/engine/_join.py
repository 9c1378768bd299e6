"""Makes the runs of several processes one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from torch import Tensor

from ._data_digest import stable_digest
from ._group import Ranks, deal_seed
from ._state import RunState
from ._units import Units


def join(
    ranks: Ranks,
    terms: dict[str, Any],
    dataset: Any,
    units: Units,
    tensors: list[Tensor],
    state: RunState,
    name: str,
    spread: bool = False,
) -> tuple[RunState, str, str | None]:
    """Compares what the ranks train, deals the records out, and sends rank 0's keys and weights.

    Records are dealt out by number. If number 7 is somebody else's on another rank, some record is
    drawn on two ranks, and moves the sum twice. So the ranks compare what they can tell of their
    data.

    Args:
        ranks: the process group.
        terms: what must be equal on all ranks.
        dataset: all records, the same on every rank.
        units: whose rows they are.
        tensors: parameters and buffers, which become rank 0's.
        state: this rank's, before the first batch.
        name: this rank's name of the run.
        spread: whether each rank draws noise, for its part of the parameters: then all of them get
            the key that theirs are derived from.

    Returns:
        The state, with rank 0's sampling stream, and noise on rank 0 alone unless it is spread;
        the name of the run; and a digest of the data, if two looks at it give the same.

    Raises:
        RankError: the ranks differ; the message says in what.
    """
    own = {key: _text(value) for key, value in terms.items()} | {"records": str(units.count)}
    data, owners = stable_digest(dataset), units.digest()
    keys = state.sampling, state.noise if spread else None
    there, other, others_owners, stream, name, seed, (root, noise) = ranks.send(
        (own, data, owners, state.stream, name, deal_seed(), keys), "make_private"
    )
    differing = [
        f"{key} ({there.get(key)} there, {own[key]} here)"
        for key in own
        if there.get(key) != own[key]
    ]
    # Digests are not shown: whoever guesses the records could look them up.
    if own["records"] == there["records"] and None not in (data, other) and data != other:
        differing.append(
            "data (as many records, but others, or in another order: split and shuffle with one "
            "seed on every rank)"
        )
    if own["records"] == there["records"] and owners != others_owners:
        differing.append("units (as many, but of other rows: compute the ids alike on every rank)")
    ranks.settle(
        f"not what rank 0 has: {'; '.join(differing)}" if differing else None, "make_private"
    )
    ranks.take_share(units.count, seed)
    ranks.send_tensors(tensors)
    noise = state.noise if ranks.first else noise
    digest = data and data + owners
    return replace(state, sampling=root, noise=noise, stream=stream), name, digest


def _text(value: Any) -> str:
    """Without the addresses of objects, which are others in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
