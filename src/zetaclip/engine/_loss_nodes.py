"""What single nodes of a loss's autograd graph do to the dimension of the records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SUM, MEAN = 0, -1  # by which power of the rows a reduction scales each record's loss
# With as few rows, another dimension (classes, tokens, quantiles) or factor often equals them.
FEW = 16
_IGNORED = -100  # torch's default of ignore_index, which most labels never are


def names(text: str) -> frozenset[str]:
    """Names of operations, separated by spaces."""
    return frozenset(text.split())


# Operations that keep a loss linear in what they are given, if their other operand is a constant.
LINEAR = names(
    "Add Sub Rsub Neg Mul Div Sum Nansum Mean View UnsafeView Reshape ReshapeAlias ViewAs "
    "AsStrided Unsqueeze Squeeze Expand "
    "Clone Copy CopyBackwards CopySlices ToCopy Alias Where MaskedFill Index IndexSelect Gather "
    "Select Slice Narrow Split "
    "SplitWithSizes Unbind MaskedSelect Take Stack Cat Permute Transpose T Flip Repeat Cumsum"
)
PICKS = names(
    "Index IndexSelect Gather Select Slice Narrow Split SplitWithSizes MaskedSelect Take Unbind"
)
JOINS = names("Stack Cat")
# Operations that repeat an operand along dimensions of another one.
BROADCASTS = names(
    "Add Sub Rsub Mul Div Expand Repeat Where Maximum Minimum Pow Lerp Addcmul Addcdiv Logaddexp "
    "Hypot Atan2 Xlogy"
)
PRODUCTS = names("Mm Bmm Addmm Baddbmm Addbmm Mv Addmv Dot Vdot")
# Applied to a number that depends on all records, the slope of these depends on all, too.
BENT = names(
    "Exp Expm1 Log Log1p Log2 Log10 Sqrt Rsqrt Pow Sigmoid Tanh Softplus LogSigmoidForward "
    "Reciprocal Abs Relu Clamp ClampMax "
    "ClampMin Maximum Minimum Sin Cos Logaddexp"
)
# Reductions over records in which one record decides what another one counts.
MIXES = names(
    "LinalgVectorNorm Norm Std StdMean Var VarMean Max Min Amax Amin Median Nanmedian Logsumexp "
    "Prod Kthvalue Topk Aminmax Mode Cov Pdist"
)
# What each value comes to depends on all others along the saved dimension.
ALONG = MIXES | names(
    "Softmax LogSoftmax SafeSoftmax Sort Cumsum Cumprod Cummax Cummin Logcumsumexp Renorm"
)


class Trail(NamedTuple):
    """What lies on the way from a node of the graph down to a private layer."""

    powers: frozenset[int] = frozenset()  # of the reductions that may be the one over the records
    shift: int = 0  # by numbers that equal the rows
    loose: bool = False  # whether such a number may well be a public constant
    common: bool = False  # whether such a number is an everyday factor, as 0.1 or 4
    far: bool = False  # whether it is but some multiple of the rows
    counts: frozenset[int] = frozenset()  # how many values were added up, wherever some were
    wide: int = 0  # the most dimensions that equal the rows in one value on the way
    paired: str = ""  # every record was compared with every other one: what makes the pairs
    spread: bool = False  # a number that all records have a part in was given to each record
    rooted: bool = False  # the last step took the root of a sum of squares over the records
    divided: bool = False  # by a tensor with one value that is not the rows
    weighed: float | None = None  # how likely weights of records are their own, if there are any
    numbers: frozenset[float] = frozenset()  # divisors that are no multiple of the rows
    picked: bool = False  # only some of the records come through
    single: int | None = None  # exactly one record comes through: its index
    unclear: bool = False  # which dimension holds the records could not be told
    wrong: str = ""
    doubt: str = ""


def of_records(trail: Trail) -> Trail:
    """A function of each record: what was reduced below it is the model's own affair."""
    return Trail(picked=trail.picked, paired=trail.paired, wide=trail.wide, unclear=trail.unclear)


def dims_of(node: Any, given: Sequence[int]) -> set[int]:
    """The dimensions that an operation runs over: the saved ones, or all."""
    dims = getattr(node, "_saved_dim", None)
    if not given or dims is None or dims == ():
        return set(range(len(given)))
    return {signed(dim) % len(given) for dim in ((dims,) if isinstance(dims, int) else dims)}


def through_loss(node: Any, reduction: int, given: Sequence[int], trail: Trail) -> Trail:
    """One of torch's own losses: 0 none, 1 mean, 2 sum."""
    positions = math.prod(
        size for dim, size in enumerate(given) if dim != 1
    )  # dimension 1 is the classes'
    below = Trail(
        frozenset({SUM}) if trail.picked else frozenset(),
        picked=trail.picked,
        paired=trail.paired,
        wide=trail.wide,
        unclear=trail.unclear,
        counts=frozenset({math.prod(given), positions}),
    )
    if reduction == 2:
        return below._replace(powers=frozenset({SUM}))
    if reduction == 0:
        return below
    if trail.picked:
        return below._replace(
            wrong="it takes the mean over some records, whose number depends on the others"
        )
    wrong = ""
    if node.name().startswith("NllLoss"):
        ignored = signed(node._saved_ignore_index)
        if node._saved_weight is not None:
            wrong = "it divides by the class weights of the whole batch (weight=)"
        elif ignored != _IGNORED:
            wrong = (
                f"it divides by the labels of the whole batch that are not ignore_index={ignored}"
            )
        elif float(node._saved_total_weight) != positions:
            wrong = (
                f"it divides by the labels of the whole batch that are not {_IGNORED} "
                "(ignore_index)"
            )
    return below._replace(powers=frozenset({MEAN}), wrong=wrong)


def shape_of(node: Any, number: int) -> tuple[int, ...]:
    """The shape of what a node has made."""
    return tuple(node._input_metadata[number].shape)


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def is_common(value: float) -> bool:
    """Whether losses are often scaled by this number: 0.5, 0.01, a small whole number, 100."""
    if value < 1:
        return float(f"{value:.1e}") == value
    return value <= FEW or value in (25.0, 100.0, 1000.0)


def is_number(value: Tensor) -> bool:
    """Whether this was a plain number of Python's.

    Torch remembers it: such a number does not decide on the type of a result.
    """
    small = torch.float16 if value.is_floating_point() else torch.int8
    zero = torch.zeros((), dtype=small, device=value.device)
    return value.dtype != small and torch.result_type(zero, value) == small
