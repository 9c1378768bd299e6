"""Several processes, one private run.

Each rank draws its own share of every batch and clips it; the shares and one draw of noise are
added up once per logical batch.

    rank 0:   Σ own clipped + noise ─┐
    rank r:   Σ own clipped ─────────┴─ all-reduce ─▶ one noisy sum ─▶ one update, everywhere

Rank 0 owns the noise, the controller and the files. No collective runs in forward or backward, so
ranks may have any number of physical batches. Where ``fully_shard`` has spread the parameters,
forward and backward gather weights, and each rank owns the sum and the noise of its own part. gloo
is what is tested; nccl takes the same code and is untested.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RankError
from ...randomness import poisson_indices, subkey
from . import _presence as presence
from ._base import ToldClip

# Elements per all-reduce: large enough for the wire, small enough that buckets overlap.
BUCKET = 1 << 24


def deal(records: int, ranks: int, rank: int, seed: int) -> Tensor:
    """The records of one rank, in order. All ranks' shares together are all records, each once.

    The seed is public: which rank draws for a record has no influence on whether it is drawn.

    Args:
        records: How many there are.
        ranks: How many ranks.
        rank: Whose share.
        seed: A public seed, the same on all ranks.
    """
    order = torch.randperm(records, generator=torch.Generator().manual_seed(seed))
    return order[rank::ranks].sort().values


def deal_seed() -> int:
    """From torch's public stream, without moving it."""
    drawn = hashlib.blake2b(
        f"zetaclip deal {torch.initial_seed()}".encode(), digest_size=8
    ).digest()
    return int.from_bytes(drawn, "little") >> 1


class Ranks:
    """One run's side of the process group.

    **Guarantee.** What ``add_up`` returns is the same on every rank and holds rank 0's noise once.
    A rank that can't go on makes all of them raise, with its number in the message; none goes on
    alone.
    **Edge cases.** All methods but ``own_rows`` are collective: every rank calls them, in the same
    order.
    """

    def __init__(self, here: presence.Presence) -> None:
        self._here = here
        self.rank, self.count = here.rank, here.count
        self.suffix = f" of rank {self.rank} of {self.count}"
        here.runs += 1
        self._name = f"run {here.runs}"
        self._serial = 0
        self.deal_seed: int | None = None
        self.rows = torch.zeros(0, dtype=torch.int64)  # the records of this rank
        self.word = 0  # a small number that the next release takes along
        self.words: list[int] = [0] * self.count  # what each rank's last one was
        self.payload = 0  # bytes that this rank has put into collectives of releases

    @property
    def first(self) -> bool:
        """Rank 0, which owns noise, controller and files."""
        return self.rank == 0

    # -- records

    def take_share(self, records: int, seed: int | None) -> None:
        """Deals the records out by a public seed; None leaves them as they are."""
        if seed is not None:
            self.deal_seed = seed
            self.rows = deal(records, self.count, self.rank, seed)

    def own_rows(self, key: bytes, sample_rate: float) -> Tensor:
        """This rank's part of a Poisson batch.

        The rank tosses its own coins for its own records, with the declared rate.
        """
        own = subkey(key, f"records{self.suffix}")
        return self.rows[poisson_indices(own, len(self.rows), sample_rate)]

    # -- messages

    def _wait(self, works: list[Any], what: str, on_card: bool = False) -> None:
        self._serial += 1
        self._here.wait(works, what, self._serial, on_card)

    def _broadcast(self, tensor: Tensor, what: str) -> None:
        self._wait([dist.broadcast(tensor, 0, group=self._here.messages, async_op=True)], what)

    def send(self, value: Any, what: str) -> Any:
        """Rank 0's value, on every rank. It may be secret: no copy of it is kept on the way."""
        data = pickle.dumps(value) if self.first else b""
        size = torch.tensor([len(data)])
        self._broadcast(size, what)
        if not self.first:
            data = bytes(int(size))
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._broadcast(buffer, what)
        return value if self.first else pickle.loads(buffer.numpy().tobytes())

    def once(self, make: Callable[[], Any], what: str) -> Any:
        """``make()`` of rank 0, on every rank; its error is an error on every rank."""
        failure: Exception | None = None
        made: Any = None
        if self.first:
            try:
                made = make()
            except Exception as error:
                failure = error
        text, value = self.send((None if failure is None else f"{failure}", made), what)
        if failure is not None:
            raise failure
        if text is not None:
            raise RankError(f"rank 0: {text}", told=True)
        return value

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, on every rank."""
        data = torch.frombuffer(bytearray(pickle.dumps((what, value))), dtype=torch.uint8)
        sizes = [int(size) for size in self._all(torch.tensor([len(data)]), what)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = self._all(padded, what)
        found = [
            pickle.loads(part[:size].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]
        self._check_place([place for place, _ in found], what)
        return [value for _, value in found]

    def _check_place(self, places: list[Any], what: str) -> None:
        """Raises, on every rank, if ranks that have met were not at the same place."""
        if len(set(places)) > 1:
            raise RankError(
                f"rank {self.rank} came to {what}, and another rank to something else, so nothing "
                "is released: one of them was interrupted where others went on, or they run "
                "different loops. Call engine.load on every rank, or start again"
            )

    def _all(self, tensor: Tensor, what: str) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        self._wait([dist.all_gather(parts, tensor, group=self._here.messages, async_op=True)], what)
        return parts

    def settle(self, problem: str | None, what: str) -> None:
        """Raises on every rank if one of them has a problem."""
        found = {
            rank: text for rank, text in enumerate(self.gather(problem, what)) if text is not None
        }
        if found:
            lines = "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
            raise RankError(lines, told=problem is None)

    # -- a release

    def add_up(self, flat: Tensor, extras: Tensor, what: str, refusal: str | None = None) -> Tensor:
        """Adds ``flat`` up over the ranks, in place, and returns the sum of ``extras``.

        The extras are few, and travel as float64. A rank that has to refuse the batch takes part
        with zeros and its ``refusal``, so that no rank waits in vain.

        Args:
            flat: The sum of this process, which becomes the sum of all.
            extras: A few more numbers of this process.
            what: What the sum is for, for messages.
            refusal: Why this process refuses the batch; None if it does not.

        Raises:
            RankError: A rank has refused, or comes with another ``what``.
        """
        own = torch.zeros(3, self.count, dtype=torch.float64)
        place = zlib.crc32(what.encode())
        own[:, self.rank] = torch.tensor([refusal is not None, self.word, place])
        tail = torch.cat((extras, own.flatten())).to(flat.device)
        if refusal is not None:
            self._here.store.set(f"{self._name}/refusal/{self._serial + 1}", refusal)
        parts = [*(flat.split(BUCKET) if len(flat) else ()), tail]
        self._wait([dist.all_reduce(part, async_op=True) for part in parts], what, flat.is_cuda)
        self.payload += sum(part.numel() * part.element_size() for part in parts)
        size = len(extras)
        back = tail.cpu()
        refused, words, places = back[size:].view(3, self.count)
        self.words = [round(word) for word in words.tolist()]
        if refusal is None and bool(refused.any()):
            rank = int(refused.nonzero()[0])
            text = self._here.read(f"{self._name}/refusal/{self._serial}")
            raise RankError(
                f"rank {rank} stopped at {what}, so nothing was released: {text}", told=True
            )
        if refusal is None:
            self._check_place(places.tolist(), what)
        return back[:size]

    def scatter(self, rows: Tensor, what: str) -> Tensor:
        """This rank's row, summed over the ranks."""
        own = torch.empty_like(rows[0])
        # torch has renamed it.
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._wait([reduce(own, rows.flatten(), async_op=True)], what, rows.is_cuda)
        self.payload += rows.numel() * rows.element_size()
        return own

    def gather_weights(self, whole: Tensor, own: Tensor, group: Any) -> None:
        """Gathers every rank's part of some weights on every rank.

        A rank that is lost becomes a ``RankError`` here, too.

        Args:
            whole: Gets the parts of all ranks.
            own: This rank's part.
            group: Its ranks are all ranks.
        """
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(whole, own, group=group, async_op=True)
        self._wait([work], "gathering the weights of a layer", whole.is_cuda)

    def total(self, number: int, what: str) -> int:
        """The sum of the ranks' numbers."""
        value = torch.tensor([number])
        self._wait([dist.all_reduce(value, group=self._here.messages, async_op=True)], what)
        return int(value)

    def conclude(
        self,
        use: Callable[[], None],
        said: Callable[[], tuple[float, float]],
        what: str,
        together: bool = False,
    ) -> ToldClip | None:
        """Rank 0 uses the release first. The others wait for its message, and then use it too.

        Only rank 0 has journals, so only rank 0 can refuse a release. If the others did not wait, a
        release that it refuses would have moved their weights. The message also holds the next C,
        so it costs nothing extra.

        Args:
            use: Moves the weights by the release.
            said: What rank 0 tells the others: the next C and rate.
            what: What it is for, for messages.
            together: Whether the release stands already, and all ranks use it at once.

        Returns:
            What rank 0 told; None on rank 0.
        """
        if not self.first:
            if together:
                use()
            told = self._close(None, what)
            if not together:
                use()  # by the rate of this update; what was told is for the next
            return told
        try:
            use()
        except Exception:
            self._close(None, what)
            raise
        self._close(said(), what)
        return None

    def _close(self, said: tuple[float, float] | None, what: str) -> ToldClip:
        """Sends or gets the message that ends a release: the next C and learning rate factor.

        Rank 0 sends it; None means that the release was refused.
        """
        clip, rate = said or (0.0, 0.0)
        message = torch.tensor([float(said is not None), clip, rate], dtype=torch.float64)
        self._broadcast(message, what)
        self.payload += message.numel() * message.element_size()
        stands, clip, rate = message.tolist()
        if not stands and not self.first:
            raise RankError(f"rank 0 stopped at {what}; its own message says why", told=True)
        return ToldClip(clip, rate)

    def check_equal(self, tensors: Callable[[], dict[str, Tensor]], when: str) -> None:
        """Compares one checksum first; names are sent only where something differs."""
        sums = {name: _checksum(tensor) for name, tensor in tensors().items()}
        what = f"the comparison of weights {when}"
        if len(set(self.gather(zlib.crc32(repr(sums).encode()), what))) == 1:
            return
        for rank, other in enumerate(found := self.gather(sums, what)):
            drifted = [name for name in other if other[name] != found[0].get(name)]
            if drifted:
                more = f" and {len(drifted) - 1} more" if len(drifted) > 1 else ""
                raise RankError(
                    f"{drifted[0]}{more} of rank {rank} is not what rank 0 has {when}: something "
                    "other than the private optimizer's step() has moved it, or the ranks compute "
                    "differently (hardware, versions, threads)",
                    told=not self.first,
                )

    @torch.no_grad()
    def send_tensors(self, tensors: list[Tensor]) -> None:
        """Rank 0's values into everybody's tensors, as one message a kind of number."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype and tensor.numel()]
            if not same:
                continue
            flat = torch.cat([tensor.detach().flatten().cpu() for tensor in same]).view(torch.uint8)
            self._broadcast(flat, "make_private")
            if self.first:
                continue
            flat = flat.view(dtype)
            for tensor, part in zip(
                same, flat.split([tensor.numel() for tensor in same]), strict=True
            ):
                tensor.copy_(part.view(tensor.shape))


def _checksum(tensor: Tensor) -> int:
    value = tensor.detach().cpu().contiguous()
    return zlib.crc32(value.flatten().view(torch.uint8).numpy().data) if value.numel() else 0


def ranks() -> Ranks | None:
    """For a new run: its side of the default process group, or None where there is one process."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return Ranks(presence.current())


def on_first_rank(make: Callable[[], Any], what: str) -> Any:
    """``make()``, by rank 0 for all where there are several."""
    others = ranks()
    return make() if others is None else others.once(make, what)
