"""What a run asks of the processes that train together; one process is a group, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class ToldClip:
    """What ranks other than 0 know of the controller: the C and the rate that it said last."""

    clip: float
    rate: float = 1.0


class Group(Protocol):
    """The processes of one run.

    **Guarantee.** Every record is drawn by one process, noise is drawn by the first one alone (or
    by each for its part of the parameters), and a release is used by all processes or by none.
    **Edge cases.** All methods but ``own_rows`` and ``take_share`` are collective:
    every process calls them, in the same order. ``what`` names the call in an error.
    """

    rank: int
    count: int
    deal_seed: int | None  # how records are dealt out; None with one process
    suffix: str  # of the label of a key that each process derives for itself; empty with one

    @property
    def first(self) -> bool:
        """Whether this process owns the noise, the controller and the files."""

    def take_share(self, records: int, seed: int | None) -> None:
        """Deals the records out as a checkpoint says; None leaves them as they are."""

    def own_rows(self, key: bytes, sample_rate: float) -> Tensor:
        """This process's part of a Poisson batch."""

    def once(self, make: Callable[[], Any], what: str) -> Any:
        """``make()`` of the first process, on every process; its error is an error on all."""

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every process's value, on every process."""

    def total(self, number: int, what: str) -> int:
        """The sum of the processes' numbers."""

    def add_up(self, flat: Tensor, extras: Tensor, what: str, refusal: str | None = None) -> Tensor:
        """Adds ``flat`` up over the processes, in place, and returns the sum of ``extras``.

        Args:
            flat: The sum of this process, which becomes the sum of all.
            extras: A few more numbers of this process.
            what: What the sum is for, for messages.
            refusal: Why this process refuses the batch; None if it does not.
        """

    def scatter(self, rows: Tensor, what: str) -> Tensor:
        """This process's row, summed over all processes; there is a row for each of them."""

    def conclude(
        self,
        use: Callable[[], None],
        said: Callable[[], tuple[float, float]],
        what: str,
        together: bool = False,
    ) -> ToldClip | None:
        """Uses a release on every process, or on none if the first one can't.

        Args:
            use: confirms the release and takes the update.
            said: the next C and rate, asked on the first process after ``use``.
            what: the name of the update.
            together: whether the first process has confirmed the release already, and all use it at
                the same time: each has its own part, and they may have to meet.

        Returns:
            On all but the first process, what it said.
        """

    def check_equal(self, tensors: Callable[[], dict[str, Tensor]], when: str) -> None:
        """Raises, with the tensor's name, if the processes' values have drifted apart."""
