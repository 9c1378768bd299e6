"""A budget that several fits share: a fit that would exceed it is refused before it starts.

The sums are stored in a file under a lock, so that copies of the object and other processes use the
same budget.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor

from ..errors import AccountingError, BudgetExceeded, LedgerError
from ..ledger import Event
from ..words import counted
from ._accounting import epsilon as epsilon_of
from ._accounting import renyi

_FORMAT = 1
_SPEND = b'{"spend": '  # how the line of a charge begins
# The filter's orders, as multiples of the best order for a Gaussian that spends the whole budget.
_AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)
_LARGEST_ORDER = 1020  # above it the binomials of the Rényi analysis overflow


@dataclass(frozen=True)
class Spending:
    """One fit that was granted.

    Attributes:
        what: Description of the fit.
        events: Its releases.
        renyi: Their Rényi divergence at each order of the budget.
    """

    what: str
    events: tuple[Event, ...]
    renyi: tuple[float, ...]


class Budget:
    """A total (ε, δ) for all fits that share it.

    Args:
        epsilon: ε of all fits together.
        delta: δ of all fits together.
        path: File of the budget; the same call opens it again. Without a path the budget ends with
            the process that created it.

    Raises:
        ValueError: ε or δ is not allowed, or the file has a budget of another (ε, δ).
        LedgerError: The file is not the file of a budget.

    **Guarantee.** All granted fits together are (epsilon, delta)-differentially private, add/remove
    one record, even if later fits were chosen after looking at earlier results. The budget is a
    Rényi filter: divergences are added at orders that are fixed when the budget is created, each
    order has its own share of δ, and a fit is granted if at least one order stays within its limit.
    A copy (``copy.deepcopy``, scikit-learn's ``clone``) is the same object, and a pickle in another
    process uses the same file.

    **Edge cases.** The first fit is also granted if it alone is within (ε, δ) by the tighter PLD
    accountant. If it exceeds the filter's limits, no further fit is granted. A fit is charged
    before it starts, and stays charged if it is killed. All fits are assumed to use the same
    records: use one budget per data set.

    Examples:
        >>> budget = Budget(3.0, 1e-5, path="study.budget")
        >>> receipt = budget.spend([Event(0.01, 1.0, 1000)], "first fit")
        >>> budget.spent <= 3.0
        True
    """

    def __init__(
        self, epsilon: float, delta: float, path: str | os.PathLike[str] | None = None
    ) -> None:
        if not 0 < epsilon < math.inf:
            raise ValueError(f"a budget's epsilon must be positive and finite, not {epsilon}")
        if not 0 < delta < 1:
            raise ValueError(f"a budget's delta must be between 0 and 1, not {delta}")
        self.epsilon, self.delta = float(epsilon), float(delta)
        if path is None:
            descriptor, name = tempfile.mkstemp(prefix="zetaclip-", suffix=".budget")
            os.close(descriptor)
            self.path = Path(name)
            weakref.finalize(self, _remove, self.path, os.getpid())
        else:
            self.path = Path(path).absolute()
            self.path.touch()
        with self._locked() as file:
            first, *finished = file.read().decode(errors="replace").split("\n")
            header = {"zetaclip_budget": _FORMAT, "epsilon": self.epsilon, "delta": self.delta}
            cut = not finished and json.dumps(header).startswith(first)
            if not cut:
                self._check_header(first)
            else:
                self._append(file, header)

    # -- copies are the same object

    def __copy__(self) -> Budget:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Budget:
        return self

    def __reduce__(self) -> tuple[Callable[..., Budget], tuple[float, float, str]]:
        return _reopened, (self.epsilon, self.delta, str(self.path))

    def __repr__(self) -> str:
        return f"Budget(epsilon={self.epsilon:g}, delta={self.delta:g})"

    # -- spending

    @property
    def orders(self) -> dict[float, float]:
        """The filter: order -> the largest Rényi divergence at it, if that is above 0."""
        best = max(_candidates(), key=lambda order: self._allowance(order, self.delta / 2) / order)
        found: dict[float, float] = {}
        for factor in _AROUND:
            order = _rounded(best * factor)
            share = 0.5 if factor == 1.0 else 0.5 / (len(_AROUND) - 1)
            allowed = self._allowance(order, share * self.delta)
            if allowed > 0:
                found[order] = max(allowed, found.get(order, 0.0))
        return found

    def _allowance(self, order: float, delta: float) -> float:
        """The largest divergence at ``order`` that is still (ε, delta)-DP.

        Canonne, Kamath and Steinke (2020), proposition 12.
        """
        return (
            self.epsilon
            - math.log1p(-1 / order)
            + (math.log(delta) + math.log(order)) / (order - 1)
        )

    @property
    def spendings(self) -> list[Spending]:
        """The fits that were granted so far, in order."""
        with self._locked() as file:
            return self._read(file)

    @property
    def spent(self) -> float:
        """ε at this budget's δ of all granted fits together; never more than ``epsilon``."""
        return self._spent(self.spendings)

    def _spent(self, spendings: list[Spending]) -> float:
        if not spendings:
            return 0.0
        sums = [sum(column) for column in zip(*(s.renyi for s in spendings), strict=True)]
        # A change of the budget's ε changes the limit of every order by the same amount.
        allowed = self.orders.values()
        bound = min(
            (self.epsilon - a + total for a, total in zip(allowed, sums, strict=True)),
            default=math.inf,
        )
        if len(spendings) == 1:
            bound = min(bound, _alone(spendings[0].events, self.delta))
        return max(0.0, bound)

    def allows(self, *fits: Iterable[Event]) -> bool:
        """Whether ``spend`` would grant these fits one after the other.

        Args:
            fits: What each fit would release.
        """
        known: dict[tuple[Event, ...], Spending] = {}
        earlier = self.spendings
        for events in fits:
            held = tuple(events)
            if held not in known:
                known[held] = self._made(held, "")
            if not self._grants(known[held], earlier):
                return False
            earlier.append(known[held])
        return True

    def spend(self, events: Iterable[Event], what: str = "a fit") -> str:
        """Charges a fit before it releases anything.

        Args:
            events: What the fit will release.
            what: Description of the fit, for messages and ``spendings``.

        Returns:
            A receipt, for ``refund`` and ``number_of``.

        Raises:
            BudgetExceeded: The budget has too little left; nothing was charged.

        **Guarantee.** The sum over fits assumes that their noise is independent. It does not cover
        two releases with the same noise, because their difference has none. If noise comes from a
        fixed seed, mix ``number_of(receipt)`` into the seed.
        """
        made = self._made(events, what)
        with self._locked() as file:
            earlier = self._read(file)
            if not self._grants(made, earlier):
                raise BudgetExceeded(self._refusal(made, earlier))
            file.seek(0)
            content = file.read()
            # An incomplete last line does not count: ``_append`` removes it, and the next charge
            # would get the same number as this one.
            number = content[: content.rfind(b"\n") + 1].count(_SPEND)
            receipt = f"{number}-{secrets.token_hex(8)}"
            rows = [[e.sample_rate, e.noise_multiplier, e.count] for e in made.events]
            self._append(
                file, {"spend": receipt, "what": what, "events": rows, "renyi": made.renyi}
            )
        return receipt

    @staticmethod
    def number_of(receipt: str) -> int:
        """Number of earlier charges, including refunded ones, so that each receipt has its own."""
        return int(receipt.partition("-")[0])

    def refund(self, receipt: str) -> None:
        """Takes a charge back, for a fit that released nothing."""
        with self._locked() as file:
            self._append(file, {"refund": receipt})

    def _made(self, events: Iterable[Event], what: str) -> Spending:
        held = tuple(events)
        return Spending(what, held, tuple(renyi(held, list(self.orders))))

    def _grants(self, made: Spending, earlier: list[Spending]) -> bool:
        together = zip(self.orders.values(), *(s.renyi for s in [*earlier, made]), strict=True)
        if any(sum(spent) <= allowed for allowed, *spent in together):
            return True
        # No result has been seen yet, so the choice of the PLD bound does not depend on data.
        return not earlier and _alone(made.events, self.delta) <= self.epsilon

    def _refusal(self, made: Spending, earlier: list[Spending]) -> str:
        would = self._spent([*earlier, made])
        return (
            f"{made.what} would bring the spent ε to {would:.3g}, but the budget is "
            f"ε = {self.epsilon:g} at δ = {self.delta:g}, of which {self._spent(earlier):.3g} is "
            f"spent in {counted(len(earlier), 'fit')}. Nothing was released; "
            "fit with a smaller epsilon, or use the models fitted so far"
        )

    # -- the file

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """The file at its start, under a lock."""
        try:
            file = open(self.path, "r+b")  # noqa: SIM115
        except FileNotFoundError:
            raise FileNotFoundError(
                f"the budget's file {self.path} is gone: "
                "a budget without path= ends with the process that created it"
            ) from None
        with file:
            lock_descriptor(file.fileno())
            yield file

    def _read(self, file: IO[bytes]) -> list[Spending]:
        file.seek(0)
        # The last line is incomplete if it has no newline; its fit never started.
        first, *lines = file.read().decode().split("\n")[:-1]
        self._check_header(first)
        found: dict[str, Spending] = {}
        for number, line in enumerate(lines, start=2):
            try:
                values = json.loads(line)
                if "refund" in values:
                    found.pop(values["refund"], None)
                    continue
                events = tuple(Event(*row) for row in values["events"])
                found[values["spend"]] = Spending(values["what"], events, tuple(values["renyi"]))
            except (ValueError, KeyError, TypeError) as error:
                raise LedgerError(
                    f"{self.path.name}, line {number}, is not a line of a budget: {error}"
                ) from None
        return list(found.values())

    def _check_header(self, line: str) -> None:
        try:
            values = json.loads(line)
            there = values["epsilon"], values["delta"]
            version = values["zetaclip_budget"]
        except (ValueError, KeyError, TypeError):
            raise LedgerError(f"{self.path.name} is not the file of a budget") from None
        if version != _FORMAT or there != (self.epsilon, self.delta):
            raise ValueError(
                f"{self.path.name} is a budget of ε = {there[0]:g} at δ = {there[1]:g}, "
                f"not of ε = {self.epsilon:g} at δ = {self.delta:g}; "
                "a budget cannot be changed after its creation"
            )

    def _append(self, file: IO[bytes], values: dict[str, Any]) -> None:
        file.seek(0)
        content = file.read()
        end = content.rfind(b"\n") + 1
        file.truncate(end)
        file.seek(end)
        file.write(json.dumps(values).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _alone(events: tuple[Event, ...], delta: float) -> float:
    try:
        return epsilon_of(events, delta, "pld")
    except AccountingError:
        return math.inf


def _candidates() -> list[float]:
    return [1 + 10 ** (k / 20) for k in range(-20, 61)]


def _rounded(order: float) -> float:
    """An integer if the order is at least 3: the analysis is exact there, and much faster."""
    return float(min(round(order), _LARGEST_ORDER)) if order >= 3 else max(1.25, round(order, 2))


def _reopened(epsilon: float, delta: float, path: str) -> Budget:
    """Unpickles a budget: it uses the same file, and does not create a missing one."""
    budget = Budget.__new__(Budget)
    budget.epsilon, budget.delta, budget.path = epsilon, delta, Path(path)
    return budget


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # the exit of a forked worker must not delete its parent's budget
        path.unlink(missing_ok=True)
