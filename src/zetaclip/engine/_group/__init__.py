"""The processes that train together: one alone, or the ranks of a process group."""

from ._base import Group, ToldClip
from ._ranks import Ranks, deal, deal_seed, on_first_rank, ranks
from ._single import SingleProcess
from ._start import group_from_environment

__all__ = [
    "Group",
    "Ranks",
    "SingleProcess",
    "ToldClip",
    "deal",
    "deal_seed",
    "group_from_environment",
    "on_first_rank",
    "ranks",
]
