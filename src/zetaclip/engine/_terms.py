"""What was asked of ``make_private``, checked and put into words."""

from __future__ import annotations

import math
import warnings
from typing import Any

from ..errors import OwnerWarning
from ..ledger import Header
from ..methods import Method, NoiseSchedule, at, get
from ._configuration import described
from ._settings import Settings


def composition(method: Method | None, clipping: Any, max_grad_norm: float | None) -> Method:
    """The method that was asked for, with its clipping."""
    if max_grad_norm is not None:
        if clipping is not None:
            raise TypeError("clipping= and max_grad_norm= are the same thing; give one of them")
        clipping = max_grad_norm
    if isinstance(clipping, str) and clipping == "auto":
        if method is not None and method.name != "auto":
            raise TypeError(f'clipping="auto" is a method of its own; leave {method.name!r} out')
        method, clipping = method or get("auto"), None
    if method is None:
        if clipping is None:
            raise TypeError(
                'give clipping= (a norm, a controller, a clip rule or "auto") or method='
            )
        method = Method()
    elif not isinstance(method, Method):
        raise TypeError(f"method must be a zetaclip Method, not {type(method).__name__}")
    if not method.private:
        raise ValueError(
            f"method {method.name!r} is not private: train with an ordinary loop, without "
            "make_private"
        )
    return method.with_clipping(clipping)


def check_multiplier(noise_multiplier: NoiseSchedule) -> None:
    """Refuses a σ that is no finite number, or below 0."""
    value = at(noise_multiplier, 0)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            "noise_multiplier must be a finite number >= 0, or a function of the step that gives "
            f"one, not {value}"
        )


# Noted, and warned of, when the first such gradient comes back.
HALF_MEAN_NOTE = (
    "not covered: means over a batch in half precision, whose rounding depends on the number of "
    "records"
)
HALF_MEAN = (
    "gradients come back in half precision, of a loss that is a mean over the batch: how each one "
    "is rounded depends on the number of records, which the ledger does not cover. Use "
    'reduction="sum" in the loss, and loss_reduction="sum" in make_private'
)


def header(
    settings: Settings, declared: bool, method: Method, accountant: str, seeded: bool
) -> Header:
    """The terms that stand at the head of the ledger; what is not private says so there."""
    literal = []
    if settings.normalize == "realized":
        literal.append('normalize="realized" divides by the private size of the batch')
    if settings.empty == "skip":
        literal.append('empty="skip" shows which batches were empty')
    if method.unsound:
        literal.append(f"method {method.name}: {method.unsound}")
    chosen = ", ".join(
        f"{name}={value!r}"
        for name, value in method.chosen.items()
        if value != method.options[name][0]
    )
    adjacency = {}
    if settings.rows_per_unit is not None:
        adjacency = {
            "adjacency": f"add/remove one unit (at most {settings.rows_per_unit} rows per batch)"
        }
    return Header(
        num_examples=settings.num_examples,
        num_examples_source="declared" if declared else "taken from the data",
        expected_batch_size=settings.expected_batch_size,
        accountant=accountant,
        method=method.name,
        claim="none: " + "; ".join(literal) if literal else "differential privacy",
        noise_seed_known=seeded,
        notes=(
            f"clip rule {method.rule.name}; C by {described(method.controller)}",
            "noise by chacha12, on a public grid",
            *([f"method options {chosen}"] if chosen else []),
            *([f"{settings.views} views of each row"] if settings.views > 1 else []),
        ),
        **adjacency,
    )


class DeltaCheck:
    """The run's δ, if one was given; warns once of a δ of 1/N or more.

    With such a δ, a mechanism may publish one record as it is.
    """

    def __init__(self) -> None:
        self._said = False
        self.target: float | None = None

    def chosen(self, delta: float | None) -> float:
        """This δ, or else the run's."""
        found = self.target if delta is None else delta
        if found is None:
            raise TypeError(
                "get_epsilon needs a delta: make_private was given no target_delta to take instead"
            )
        return found

    def look(self, delta: float | None, size: int) -> None:
        """The warning points at the call of the engine's method that got the δ."""
        if delta is not None and delta * size >= 1 and not self._said:
            self._said = True
            warnings.warn(
                f"delta = {delta:g} is at least 1/N: with such a δ, publishing whole records at "
                f"random would pass for private. Take one well below {1 / size:.2g}",
                OwnerWarning,
                stacklevel=3,
            )
