"""Fixed features of the rows of a table: smooth bins of numbers, categories, and crosses.

A number of a declared range becomes weights of k evenly spaced knots, at most two of them above
zero, which add up to 1. So a piecewise-linear function of the number is a linear function of these
weights, and a linear head can learn a curve. This is done with few knots, for what a few records
can tell, and with more. A category stays one-hot. Crosses are products of the weights of two
numbers, so that a linear head can learn how two numbers act together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import InputError

if TYPE_CHECKING:
    from ..data.columns import Column

KINDS = ("number", "category", "block")
# Chosen on held-out training records; `bench/tables.py` compares them with others.
KNOTS = (3, 8)
_REGRESSION = {"knots": (3,), "crosses": 3, "share": 0.8}
_MOST_CROSSED = 20  # numbers; more have thousands of pairs, and most would be noise


class Bins(nn.Module):
    """The features as a frozen module, for encoded rows of a table.

    Args:
        layout: The columns in the order of a row, as (kind, width): "number" has a value in
            [-1, 1] and, with width 2, a flag that is 1 where the value is missing; "category" is
            one-hot; "block" is any other group of values, such as hashed words, and stays as it is.
        knots: How many knots a number gets; several counts give several sets of knots.
        crosses: How many knots a number has in crosses; 0: no crosses.
        share: Share of a row's squared length that belongs to the crosses.

    Raises:
        InputError: An argument is wrong.

    **Guarantee.** All constants come from the arguments. The features of a row depend on no other
    row.

    **Edge cases.** A value outside its range counts as the nearest bound. A missing number with a
    flag has a column of its own and no bins; without a flag it is the middle of its range, as in
    the encoded row. An unknown category is zero everywhere. A row of zeros stays one.

    Example:
        >>> bins = Bins([("number", 1), ("category", 2)], knots=(3,))
        >>> bins(torch.tensor([[0.5, 0.0, 1.0]])) * 1.5**0.5
        tensor([[0.0000, 0.5000, 0.5000, 0.0000, 1.0000]])
    """

    made_from = "made from the declared columns"
    _first: Tensor
    _second: Tensor

    def __init__(
        self,
        layout: Sequence[Sequence[Any]],
        knots: Sequence[int] = KNOTS,
        crosses: int = 0,
        share: float = 0.5,
    ) -> None:
        super().__init__()
        self.layout = tuple((str(kind), int(width)) for kind, width in layout)
        self.knots = tuple(int(count) for count in knots)
        self.crosses, self.share = int(crosses), float(share)
        _check(self)
        starts = list(itertools.accumulate((width for _, width in self.layout), initial=0))
        self.shape = (starts.pop(),)
        self._places = [(*part, start) for part, start in zip(self.layout, starts, strict=True)]
        self._numbers = [place for place in self._places if place[0] == "number"]
        pairs = list(itertools.combinations(range(len(self._numbers)), 2)) if self.crosses else []
        sides = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
        self.register_buffer("_first", sides[:, 0].clone(), persistent=False)
        self.register_buffer("_second", sides[:, 1].clone(), persistent=False)
        own = (sum(self.knots) + width - 1 if k == "number" else width for k, width in self.layout)
        self.columns = sum(own) + len(pairs) * self.crosses**2
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Features (rows, columns) of unit length, for encoded rows."""
        own = _unit(torch.cat([self._own(x, place) for place in self._places], 1))
        if not self.crosses:
            return own
        hats = torch.stack([_hats(x, place, self.crosses) for place in self._numbers], 1)
        products = hats[:, self._first, :, None] * hats[:, self._second, None, :]
        crossed = _unit(products.flatten(1))
        return torch.cat((own * (1 - self.share) ** 0.5, crossed * self.share**0.5), 1)

    def _own(self, x: Tensor, place: tuple[str, int, int]) -> Tensor:
        """The features of one column. Each kind of column has the same weight in a row."""
        kind, width, start = place
        weight = len(self.knots) ** 0.5
        if kind != "number":
            return x[:, start : start + width] * weight
        parts = [_hats(x, place, count) for count in self.knots]
        if width == 2:
            parts.append(x[:, start + 1 : start + 2] * weight)
        return torch.cat(parts, 1)

    def describe(self) -> dict[str, Any]:
        """What was fixed in advance, for the result of a run; ``rebuilt`` makes the same again."""
        return {
            "kind": "bins",
            "columns": self.columns,
            "knots": list(self.knots),
            "crosses": self.crosses,
            "share": self.share,
            "layout": [list(part) for part in self.layout],
        }


def bins(
    columns: Sequence[Column], regression: bool = False, options: Mapping[str, Any] | None = None
) -> Bins:
    """The features of a table.

    Args:
        columns: The declared columns, as in ``dataset.inputs.columns``.
        regression: Whether the target is a number. A regression gets few knots and crosses, if
            there are at most 20 numbers.
        options: ``knots``, ``crosses`` and ``share`` of ``Bins``, instead of the defaults.

    Raises:
        InputError: There is no such option, or it has a wrong value.
    """
    kinds = {"numeric": "number", "categorical": "category"}
    layout = [(kinds.get(column.kind, "block"), len(column.names())) for column in columns]
    numbers = sum(kind == "number" for kind, _ in layout)
    preset: Mapping[str, Any] = _REGRESSION if regression and 2 <= numbers <= _MOST_CROSSED else {}
    given = {**preset, **(options or {})}
    strange = [name for name in given if name not in ("knots", "crosses", "share")]
    if strange:
        raise InputError(f"bins has no option {strange[0]}; it has knots, crosses and share")
    if isinstance(given.get("knots"), int):
        given["knots"] = (given["knots"],)
    try:
        return Bins(layout, **given)
    except (TypeError, ValueError) as error:
        raise InputError(f"the options of bins can't be used: {error}") from error


def needs_bias(layout: Sequence[Sequence[Any]]) -> bool:
    """Whether a head on bins needs a bias: nothing in a row adds up to a constant.

    The knots of a number add up to 1, and so does a category. A bias beside them would be one more
    copy of that, and take half of each clipped gradient's squared length.
    """
    return all(kind == "block" for kind, _ in layout)


def rebuilt_bins(description: Mapping[str, Any]) -> Bins:
    """The features that ``Bins.describe()`` told of.

    Raises:
        InputError: This version makes other features from these settings.
    """
    settings = ("layout", "knots", "crosses", "share")
    made = Bins(**{name: description[name] for name in settings})
    if made.columns != description["columns"]:
        raise InputError(
            "the bins of this model were made by another version of zetaclip; use that version, or"
            " train the head again"
        )
    return made


def _check(made: Bins) -> None:
    if not made.layout:
        raise InputError("a table needs at least one column")
    for kind, width in made.layout:
        if kind not in KINDS or width < 1 or (kind == "number" and width > 2):
            raise InputError(
                f"a column is of the kind {', '.join(KINDS)} with a width of at least 1 (a number:"
                f" 1 or 2), not ({kind!r}, {width})"
            )
    if not made.knots or min(made.knots) < 2:
        raise InputError(f"knots must be counts of at least 2, not {made.knots}")
    if made.crosses < 0 or made.crosses == 1 or not 0 < made.share < 1:
        raise InputError(
            "crosses must be 0 or a count of knots of at least 2, and share between 0 and 1"
        )
    if made.crosses and sum(kind == "number" for kind, _ in made.layout) < 2:
        raise InputError("crosses need at least two numbers")


def _hats(x: Tensor, place: tuple[str, int, int], count: int) -> Tensor:
    """The weights of a number's knots; zeros where it is missing."""
    _, width, start = place
    at = (x[:, start : start + 1].clamp(-1, 1) + 1) * ((count - 1) / 2)
    hats = (1 - (at - torch.arange(count, dtype=x.dtype, device=x.device)).abs()).clamp(min=0)
    return hats if width == 1 else hats * (1 - x[:, start + 1 : start + 2])


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
