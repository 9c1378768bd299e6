"""Weights and optimizer states that are spread over ranks: whole in a file, in parts here.

A checkpoint of sharded parameters looks like any other, so fewer or more ranks, or one process
without ``fully_shard``, can load it with fresh streams.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from .._group import Ranks
from .._loop import PrivateLoop
from .._sharding import gathered, is_spread, own_part_of


def whole_states(loop: PrivateLoop) -> tuple[Any, Any] | None:
    """The states of module and optimizer, whole, on the first rank; None if nothing is spread.

    Every rank calls it. The others hold one whole tensor at a time.
    """
    sharding, ranks = loop.model.sharding, loop.group
    if sharding is None:
        return None
    assert isinstance(ranks, Ranks)
    sharding.rest()

    def whole(value: Any) -> Any:
        if not (isinstance(value, Tensor) and is_spread(value)):
            return value
        found = gathered(value, ranks)
        return found if ranks.first else None

    states = loop.model.module.state_dict(), loop.update.optimizer.state_dict()
    return tree_map(whole, dict(states[0])), tree_map(whole, states[1])


def own_states(loop: PrivateLoop, public: dict[str, Any]) -> tuple[Any, Any]:
    """The states that a checkpoint holds, as this rank loads them."""
    module, optimizer = public["module"], public["optimizer"]
    if loop.model.sharding is None:
        return module, optimizer
    loop.model.sharding.rest()
    here = loop.model.module.state_dict()
    module = {name: own_part_of(value, here[name]) for name, value in module.items()}
    held = [p for group in loop.update.optimizer.param_groups for p in group["params"]]
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    parameters = dict(zip(numbers, held, strict=True))
    state = {
        number: {name: own_part_of(value, parameters[number]) for name, value in one.items()}
        for number, one in optimizer["state"].items()
    }
    return module, {**optimizer, "state": state}
