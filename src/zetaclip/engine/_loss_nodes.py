"""The kinds of nodes in a loss's autograd graph, and what is noted on the way through them."""

from __future__ import annotations

from typing import NamedTuple

SUM, MEAN = 0, -1  # by which power of the rows a reduction scales each record's loss
# With as few rows, another dimension (classes, tokens, quantiles) or factor often equals them.
FEW = 16


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
