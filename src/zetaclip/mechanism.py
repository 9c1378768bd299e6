"""The only code that sums, adds noise and divides; whatever it lets out is in the ledger first.

    private gradient = (round(Σ_i factor_i * gradient_i) + round(noise)) / L

The sum is over one logical batch, however many chunks it came in, and is taken in float64. Both are
rounded to one public grid (``grid.py``), so what leaves is a function of whole numbers. The noise
is drawn once, also when the batch is empty; L = qN is declared, never counted.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .clipping import Affine, ClipRule, Extra
from .clipping._base import check_columns, checked_factors
from .control import Released
from .gradients import Chunk, Layout
from .grid import widened, widened_and_spacing
from .ledger import Row
from .randomness import FARTHEST, LARGEST, add_noise, subkey, to_whole, uniforms

# Sums and private gradients of so many numbers are not kept in memory between batches. Larger ones
# are: asking the system for gigabytes would take longer than a step (GPT-2 small with two texts:
# 2.9 times the time of an ordinary step instead of 0.8).
GIVEN_BACK = range(1 << 22, 1 << 26)


class ReleaseGroup(Protocol):
    """What a release asks of the processes that make it together; ``engine/_group`` has them."""

    count: int

    @property
    def first(self) -> bool:
        """Whether this process owns the noise."""

    def add_up(self, flat: Tensor, extras: Tensor, what: str, refusal: str | None = None) -> Tensor:
        """Adds ``flat`` up over all processes, in place, and returns the sum of ``extras``.

        Args:
            flat: The sum of this process, which becomes the sum of all.
            extras: A few more numbers of this process.
            what: What the sum is for, for messages.
            refusal: Why this process refuses the batch; None if it does not.
        """

    def scatter(self, rows: Tensor, what: str) -> Tensor:
        """The sum over all processes of this one's row."""


@dataclass(frozen=True)
class Receipt:
    """Says that these rows stand in the ledger. ``Mechanism.release`` draws no noise without it."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Draw:
    """The numbers of one logical batch, each read once.

    The same C scales the clip and the noise.

    Args:
        step: Updates before this one.
        phase: Which pass of the update.
        query: The name of the sum, for the ledger.
        batch: The number of the batch.
        clip: C.
        noise_multiplier: σ.
        sample_rate: q.
        divisor: The declared L.
        noise_key: The secret key of the noise.
        stream: The public name of the keys that the noise comes from.
    """

    step: int
    phase: int
    query: str
    batch: int
    clip: float
    noise_multiplier: float
    sample_rate: float
    divisor: float
    noise_key: bytes = field(repr=False)
    stream: str = ""  # the public name of the keys that the noise comes from
    owner: str = ""  # the rank that owns this part of the vector; empty if it is not spread

    @property
    def coin_key(self) -> bytes:
        """Of the clip rule's coins."""
        return subkey(self.noise_key, f"coins{self.owner}")

    @property
    def sum_key(self) -> bytes:
        """Of the noise on the sum, or on the part of it that this rank owns."""
        return subkey(self.noise_key, f"sum{self.owner}")

    def extra_key(self, name: str) -> bytes:
        """Of the noise on one of the rule's own queries."""
        return subkey(self.noise_key, f"extra {name}")


class Coins:
    """Secret uniforms of one batch, in the order in which they are asked for, each used once."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._asked = 0

    def __call__(self, count: int) -> Tensor:
        """``count`` more of them, float64 in [0, 1).

        However a batch is split into chunks, the same come out.
        """
        begin, self._asked = self._asked, self._asked + count
        return torch.from_numpy(uniforms(self._key, self._asked)[begin:])


@dataclass
class _Query:
    """One Gaussian: sums that share a sensitivity and a grid."""

    name: str
    bound: float  # of one record's length, by the clip rule
    multiplier: float
    coordinates: int

    def __post_init__(self) -> None:
        if not 0 <= self.multiplier < math.inf:
            raise ValueError(f"a noise multiplier is a number of 0 or more, not {self.multiplier}")
        self.sensitivity, self.grid = widened_and_spacing(
            self.bound, self.multiplier, self.coordinates
        )

    @property
    def std(self) -> float:
        return self.multiplier * self.sensitivity

    def check(self, records: float) -> None:
        """Raises if a sum of so many records could be too large for exact arithmetic in float64.

        The check is for sixteen times the declared number of records, not for the number that was
        drawn: an error must not depend on the data.
        """
        if self.grid and 16 * records * self.bound / self.grid >= LARGEST:
            raise ValueError(
                f"a noise multiplier of {self.multiplier:.3g} is too small for {records:.0f} "
                "records: the sum would have more digits than float64. Use a larger one, or 0 to "
                "train without privacy"
            )
        if self.grid and FARTHEST * self.std / self.grid >= LARGEST:
            raise ValueError(
                f"a noise multiplier of {self.multiplier:.3g} is too large: the noise would "
                "have more digits than float64"
            )

    def noised(self, key: bytes | None, values: np.ndarray) -> np.ndarray:
        """The sums as whole numbers of the grid, with noise where there is a key; in place."""
        if self.grid == 0:
            return values  # no noise, no grid, no claim
        if key is None:
            to_whole(values, 1 / self.grid)
        else:
            add_noise(key, values, 1 / self.grid, self.std / self.grid)
        return values

    def unit(self, divisor: float) -> float:
        """What one step of the grid is worth in the mean."""
        return (self.grid or 1.0) / divisor


class Room:
    """Memory for sums and private gradients.

    They are kept from batch to batch, which saves asking the system in every step, or given back
    (``GIVEN_BACK``), so that the next forward pass can use their memory.

    **Guarantee.** A private gradient never shares memory with a sum, and gets the memory of an
    earlier one only if no object refers to that one any more.
    """

    def __init__(self, layout: Layout) -> None:
        self.size, self._device = layout.own, layout.device
        self._kept = self.size not in GIVEN_BACK
        self._kind = np.float64 if layout.dtype == torch.float64 else np.float32
        self._sum: Tensor | None = None
        self._gradient: np.ndarray | None = None

    def zeros(self) -> Tensor:
        """Memory for the sum over a batch, filled with zeros."""
        if self._sum is not None:
            return self._sum.zero_()
        # numpy asks the system for large pages, of which far fewer have to be cleared, and for
        # zeros that take no memory before they are used.
        made = torch.from_numpy(np.zeros(self.size)).to(self._device)
        if self._kept:
            self._sum = made
        return made

    def gradient(self) -> np.ndarray:
        """Memory for a private gradient."""
        kept = self._gradient
        # Referred to by the attribute, by this function, and by the argument of getrefcount.
        if kept is None or sys.getrefcount(kept) > 3:
            kept = np.empty(self.size, self._kind)
            if self._kept:
                self._gradient = kept
        return kept


class Mechanism:
    """Collects one logical batch and releases it.

    Args:
        layout: Where each parameter is in the flat vector.
        rule: From norms to factors.
        draw: The numbers of the batch.
        affine: A map of each gradient before its norm; None for none.
        room: Memory of the batch before, to use again.
        counts: Whether the rule releases anything beside the sum; None asks the rule.

    **Guarantee.** One record, added or removed, moves the sum on its grid by at most S' = S (1 +
    2^-9), where S is ``rule.sensitivity(clip)``, and every own query of the rule by as much of its
    declared bound; each gets Gaussian noise of its multiplier times that, and a ledger row that
    says so. ``declare`` gives the rows; ``release`` draws noise once, and only with the receipt for
    just these rows.
    **Edge cases.** An empty batch releases noise. A gradient that is not finite counts as zero. A
    rule whose factors don't keep its word stops the run before anything is released. Without noise
    nothing is rounded, and nothing is claimed.
    """

    def __init__(
        self,
        layout: Layout,
        rule: ClipRule,
        draw: Draw,
        affine: Affine | None,
        room: Room | None = None,
        counts: bool | None = None,
    ) -> None:
        self.layout = layout
        self.rule = rule
        self.draw = draw
        self.affine = affine
        self.bound = float(rule.sensitivity(draw.clip))
        self._coins: Coins | None = None  # of this batch, for rules that toss them
        self._beside = rule.counts if counts is None else counts  # most rules: nothing
        self._room = Room(layout) if room is None else room
        self._sum: Tensor | None = None  # clipped gradients, in float64
        self._waiting: list[tuple[Chunk, Tensor]] = []  # until the ranks meet
        # The map as (multiplier, subtracted). It is the same for all records, so it is applied to
        # their weighted sum, once, for which their weights are added up, too.
        self._map = None if affine is None else affine.coefficients(layout.numel, layout.device)
        self._weight = 0.0
        self._extras: dict[str, list[float]] = {}  # sums over the records so far
        self._kinds: dict[str, Extra] = {}
        self._main: _Query | None = None  # once the release is declared
        self._own: dict[str, _Query] = {}
        self._rows: tuple[Row, ...] = ()
        self.records = (
            0  # how many have been added; secret, used only by the literal form that claims nothing
        )

    @property
    def sensitivity(self) -> float:
        """How far one record can move the sum on its grid."""
        return widened(self.bound)

    def absorb(self, chunk: Chunk) -> None:
        """Takes one chunk in: bounds its examples and adds them to the sum."""
        self.records += chunk.rows
        if self._map is None:
            factors = self._factors(chunk.norms())
        else:
            factors = self._factors(chunk.mapped_norms(*self._map))
            self._weight += float(factors.sum())
        if self.layout.shards is None:
            chunk.add_weighted_sum(self._total(), factors, drop=True)
        else:
            self._waiting.append((chunk, factors))

    def deliver(self, group: ReleaseGroup) -> None:
        """Adds what was absorbed to the sums of the ranks that own it, where these are spread.

        Every rank calls it as often as the others, whether it has absorbed anything or not.
        Float64 sums are added up as they are: each owner rounds its part once, in ``release``.
        """
        if self.layout.shards is None:
            return
        self._meet(group)
        total = self._total()
        for bucket in self.layout.shards.buckets:
            flat = total.new_zeros(bucket.layout.numel)
            for chunk, factors in self._waiting:
                chunk.add_weighted_sum(flat, factors, bucket, drop=True)
            size = bucket.own.stop - bucket.own.start
            total[bucket.own] += group.scatter(bucket.by_rank(flat), self._what)[:size]
        self._waiting = []

    def _meet(self, group: ReleaseGroup, refusal: str | None = None) -> None:
        """All ranks are here; none goes on if one of them refuses."""
        nothing = torch.zeros(0, dtype=torch.float64)
        group.add_up(nothing, nothing, self._what, refusal)

    def _total(self) -> Tensor:
        """Where records are added up: in float64, in which no record is lost beside others."""
        if self._sum is None:
            self._sum = self._room.zeros()
        return self._sum

    def _mapped(self, total: Tensor) -> Tensor:
        """The sum of clipped mapped gradients, from that of the gradients; in place."""
        if self._map is None:
            return total
        multiplier, subtracted = self._map
        total.mul_(multiplier).sub_(subtracted, alpha=self._weight)
        if self.layout.dtype == torch.float64:
            # A coordinate that is left out may have overflowed: no bound holds for it.
            total.masked_fill_(multiplier == 0, 0)
        return total

    def _factors(self, norms: Tensor) -> Tensor:
        joint = self._add_extras(norms) if self._beside else None
        return checked_factors(self.rule, norms, self.draw.clip, self._toss, joint, self.bound)

    def _toss(self, count: int) -> Tensor:
        if self._coins is None:
            self._coins = Coins(self.draw.coin_key)
        return self._coins(count)

    def _add_extras(self, norms: Tensor) -> Tensor | None:
        """Adds the rule's extra columns; returns those that share the sum's Gaussian."""
        extras = self.rule.extras(norms, self.draw.clip)
        if not extras:
            return None
        shared = []
        for name, extra in extras.items():
            if extra.sensitivity is None:
                shared.append(extra.columns)
            else:
                if extra.noise_multiplier is None:
                    raise ValueError(
                        f"the clip rule {self.rule.name!r} gives its query {name!r} no "
                        "noise_multiplier"
                    )
                check_columns(extra.columns, extra.sensitivity, f"{self.rule.name}: {name}")
            totals = extra.columns.sum(0, dtype=torch.float64).tolist()
            before = self._extras.get(name)
            self._extras[name] = (
                totals if before is None else [a + b for a, b in zip(before, totals, strict=True)]
            )
            self._kinds[name] = extra
        if len(shared) < 2:
            return shared[0] if shared else None
        return torch.cat(shared, dim=1)

    def _declare_extras(self) -> None:
        """An empty batch has no columns, but releases them all the same."""
        if self._beside and not self._kinds:
            nothing = torch.zeros(0, dtype=torch.float64)
            for name, extra in self.rule.extras(nothing, self.draw.clip).items():
                self._extras[name] = [0.0] * extra.columns.shape[1]
                self._kinds[name] = extra

    def _queries(self) -> tuple[_Query, dict[str, _Query]]:
        """The Gaussians of this batch.

        That of the sum, with the columns that share it, and one for each of the rule's own queries.
        """
        draw, coordinates, own = self.draw, self.layout.numel, {}
        for name, extra in self._kinds.items():
            columns = len(self._extras[name])
            if extra.sensitivity is None:
                coordinates += columns
            else:
                assert extra.noise_multiplier is not None
                own[name] = _Query(
                    f"{draw.query}: {name}", extra.sensitivity, extra.noise_multiplier, columns
                )
        main = _Query(draw.query, self.bound, draw.noise_multiplier, coordinates)
        for query in (main, *own.values()):
            query.check(draw.divisor / draw.sample_rate)
        return main, own

    def declare(self) -> tuple[Row, ...]:
        """The ledger rows of the release, one for each Gaussian. No noise is drawn yet."""
        self._declare_extras()
        self._main, self._own = self._queries()
        self._rows = tuple(self._row(query) for query in (self._main, *self._own.values()))
        return self._rows

    def release(self, receipt: Receipt, group: ReleaseGroup, divisor: float) -> Released:
        """Adds noise and divides.

        With several processes, the first brings the noise of all, before anything is added up. If
        the vector is spread, each brings that of its own part, and releases that part.

        Args:
            receipt: for the rows that ``declare`` gave, which stand in the ledger now.
            group: the processes that release together.
            divisor: the declared batch size L.

        Raises:
            RuntimeError: the receipt is for other rows, or was used before; nothing was drawn.
        """
        draw, main, own = self.draw, self._main, self._own
        if main is None or receipt.rows != self._rows:
            raise RuntimeError(
                "a release needs the receipt for its own rows: they must stand in the ledger "
                "before noise is drawn, and each draw covers one sum"
            )
        self._main = None
        spread = self.layout.shards is not None
        if spread:
            self._meet(group)  # the rows are written everywhere
        total = self._mapped(self._total()).cpu().numpy()
        self._sum = None
        main.noised(draw.sum_key if spread or group.first else None, total)
        beside: dict[str, np.ndarray] = {}
        for name, values in self._extras.items():
            key = draw.extra_key(name) if group.first else None
            beside[name] = own.get(name, main).noised(key, np.array(values, dtype=np.float64))
        beside = self._add_up(group, total, beside)

        room = self._room.gradient()
        with np.errstate(over="ignore"):
            np.multiply(total, main.unit(divisor), out=room, casting="same_kind")
        gradient = torch.from_numpy(room).to(self.layout.device)
        released = {
            name: torch.from_numpy(values * own.get(name, main).unit(divisor))
            for name, values in beside.items()
        }
        if self.affine is not None:
            gradient = self.affine.undo(gradient)
        std = main.std / divisor
        return Released(draw.step, draw.phase, draw.clip, self.bound, std, gradient, released)

    def _add_up(
        self, group: ReleaseGroup, total: np.ndarray, extras: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Adds up ``total`` over all processes, in place.

        Sums of whole numbers are exact in any order.
        """
        if self.layout.shards is not None:
            total = total[:0]  # it is added up already
        if group.count == 1 or not (len(total) or extras):
            return extras
        flat = np.concatenate([*extras.values()]) if extras else np.zeros(0)
        summed = group.add_up(torch.from_numpy(total), torch.from_numpy(flat), self._what).numpy()
        if not extras:
            return {}
        ends = np.cumsum([len(values) for values in extras.values()])
        return dict(zip(extras, np.split(summed, ends[:-1]), strict=True))

    def refuse(self, group: ReleaseGroup, why: str) -> None:
        """Tells the other processes that this one refuses the batch: none releases anything.

        It takes part in their sum with zeros, because they would wait for it otherwise.
        """
        self._main = None
        self._extras, self._kinds = {}, {}
        self._waiting = []
        if self.layout.shards is not None:
            self._meet(group, why)
            return
        self._declare_extras()
        size = sum(len(values) for values in self._extras.values())
        nothing = torch.zeros(self.layout.numel + size, dtype=torch.float64)
        group.add_up(nothing[size:], nothing[:size], self._what, refusal=why)

    @property
    def _what(self) -> str:
        """All ranks must come with the same: one noise covers the sum of one batch, with one C."""
        draw = self.draw
        where = f"update {draw.step + 1} (batch {draw.batch + 1}, C = {draw.clip})"
        return f"the {draw.query} of {where}"

    def _row(self, query: _Query) -> Row:
        return Row(
            step=self.draw.step,
            batch=self.draw.batch,
            query=query.name,
            sensitivity=query.sensitivity,
            noise_multiplier=query.multiplier,
            noise_std=query.std,
            sample_rate=self.draw.sample_rate,
            stream=self.draw.stream,
            clip=query.bound,
            grid=query.grid,
        )
