"""One process that trains alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...randomness import poisson_indices
from ._base import ToldClip


class SingleProcess:
    """A ``Group`` of one: every collective is the value itself."""

    rank, count, first = 0, 1, True
    deal_seed: int | None = None
    suffix = ""

    def __init__(self, records: int) -> None:
        self.records = records

    def take_share(self, records: int, seed: int | None) -> None:
        """All records are its own, however they were dealt out before."""

    def own_rows(self, key: bytes, sample_rate: float) -> Tensor:
        return poisson_indices(key, self.records, sample_rate)

    def once(self, make: Callable[[], Any], what: str) -> Any:
        return make()

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value]

    def total(self, number: int, what: str) -> int:
        return number

    def add_up(self, flat: Tensor, extras: Tensor, what: str, refusal: str | None = None) -> Tensor:
        return extras

    def scatter(self, rows: Tensor, what: str) -> Tensor:
        return rows[0]

    def conclude(
        self,
        use: Callable[[], None],
        said: Callable[[], tuple[float, float]],
        what: str,
        together: bool = False,
    ) -> ToldClip | None:
        use()
        return None

    def check_equal(self, tensors: Callable[[], dict[str, Tensor]], when: str) -> None:
        """Nobody to differ from."""
