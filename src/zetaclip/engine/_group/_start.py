"""Joins the process group that a launcher has prepared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from . import _presence as presence


@contextmanager
def group_from_environment(device: str) -> Iterator[int]:
    """Joins the group that torchrun has prepared, and leaves it at the end; gives the rank.

    Nothing to join: rank 0.
    """
    if dist.is_available() and dist.is_initialized():
        yield dist.get_rank()
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield 0
        return
    # The others wait while rank 0 evaluates. Whether it is alive is looked after in ``presence``,
    # not by a time limit.
    limit = timedelta(days=1)
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=limit)
    else:
        dist.init_process_group("gloo", timeout=limit)
    yield dist.get_rank()
    # Only where all went well: with a rank gone, taking the group down would wait for it.
    presence.current().leave()
    dist.destroy_process_group()
