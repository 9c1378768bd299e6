"""How a loss comes from its records to one number, read off its autograd graph.

Somewhere between the private layers and the loss the dimension of the records goes away, by a sum
or by a mean. Only shapes, names of operations and the few numbers that the loss is multiplied or
divided by are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gradients import CaptureBuffer

SUM, MEAN = 0, -1  # by which power of the rows a reduction scales each record's loss
_MOST_NODES = 20_000  # of a graph; what lies beyond is taken for a private layer
_IGNORED = -100  # torch's default of ignore_index, which most labels never are


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that keep a loss linear in what they are given, if their other operand is a constant.
_LINEAR = _names(
    "Add Sub Rsub Neg Mul Div Sum Nansum Mean View UnsafeView Reshape ReshapeAlias ViewAs "
    "AsStrided Unsqueeze Squeeze Expand "
    "Clone Copy CopyBackwards CopySlices ToCopy Alias Where MaskedFill Index IndexSelect Gather "
    "Select Slice Narrow Split "
    "SplitWithSizes Unbind MaskedSelect Take Stack Cat Permute Transpose T Flip Repeat Cumsum"
)
_PICKS = _names(
    "Index IndexSelect Gather Select Slice Narrow Split SplitWithSizes MaskedSelect Take"
)
# Of a number that all records have a part in: the slope of these hangs on all of them.
_BENT = _names(
    "Exp Expm1 Log Log1p Log2 Log10 Sqrt Rsqrt Pow Sigmoid Tanh Softplus LogSigmoidForward "
    "Reciprocal Abs Relu Clamp ClampMax "
    "ClampMin Maximum Minimum Sin Cos Logaddexp"
)
# Reductions over records in which one record decides what another one counts.
_MIXES = _names(
    "LinalgVectorNorm Norm Std StdMean Var VarMean Max Min Amax Amin Median Nanmedian Logsumexp "
    "Prod Kthvalue Topk Aminmax"
)


class Trail(NamedTuple):
    """What lies on the way from a node of the graph down to a private layer."""

    powers: frozenset[int] = frozenset()  # of the reductions that may be the one over the records
    shift: int = 0  # by numbers that equal the rows
    loose: bool = False  # whether such a number may well be a public constant
    far: bool = False  # whether it is but some multiple of the rows
    counts: frozenset[int] = frozenset()  # how many values were added up, wherever some were
    paired: bool = False  # every record was compared with every other one
    divided: bool = False  # by a tensor with one value that is not the rows
    picked: bool = False  # only some of the records come through
    wrong: str = ""
    doubt: str = ""


def classified(
    roots: Iterable[tuple[Any, Tensor | None]],
    rows: int,
    constants: frozenset[float],
    ours: Callable[[Any], bool],
) -> set[Trail]:
    """All ways from the roots of a backward to nodes that are ``ours``, each with what reduces
    there.

    Args:
        roots: tensors that are run backward, each with the gradient that it starts with.
        rows: records of the chunk, at least two.
        constants: public numbers that a loss may well be divided by.
        ours: tells the nodes at which a way ends.

    Returns:
        The distinct ways; empty if no root leads to a node of ours.
    """
    graph = _Graph(rows, constants, ours)
    found: set[Trail] = set()
    for root, gradient in roots:
        node, number = (root.grad_fn if isinstance(root, Tensor) else root.node), root.output_nr
        if node is not None:
            found |= {
                graph.started(trail, _shape(node, number), gradient) for trail in graph.trails(node)
            }
    return found


def layers_of(recorder: CaptureBuffer, newest: bool) -> Callable[[Any], bool]:
    """Tells the nodes of layers that a private run records.

    Args:
        recorder: of the run.
        newest: whether its chunk was handed out last. The layers inside a checkpoint are not in the
            graph yet, and are taken for those of that run.
    """

    def ours(node: Any) -> bool:
        shadow = getattr(node, "shadow", None)
        if shadow is not None:
            return shadow.recorder is recorder
        return newest and node.name() == "CheckpointFunctionBackward"

    return ours


class _Graph:
    def __init__(self, rows: int, constants: frozenset[float], ours: Callable[[Any], bool]) -> None:
        self.rows, self.constants, self.ours = rows, constants, ours
        self.known: dict[Any, frozenset[Trail]] = {}

    def trails(self, root: Any) -> frozenset[Trail]:
        """Depth first, without recursion: graphs are deeper than Python's stack."""
        todo = [(root, False)]
        begun: set[Any] = set()
        while todo:
            node, below_done = todo.pop()
            if node in self.known:
                continue
            if len(self.known) > _MOST_NODES or self.ours(node):
                self.known[node] = frozenset({Trail()})
            elif below_done:
                self.known[node] = self._through(node)
            elif node not in begun:
                begun.add(node)
                todo.append((node, True))
                todo += [(below, False) for below, _ in node.next_functions if below is not None]
        return self.known[root]

    def _through(self, node: Any) -> frozenset[Trail]:
        leading = [
            (_shape(below, number), self.known.get(below, frozenset()))
            for below, number in node.next_functions
            if below is not None
        ]
        leading = [(shape, trails) for shape, trails in leading if trails]
        if not leading:
            return frozenset()
        kind, out = re.sub(r"Backward\d*$", "", node.name()), _shape(node, 0)
        mixed = len(leading) > 1 and kind in (
            "Mul",
            "Div",
        )  # two factors that records have a part in
        return frozenset(
            self._step(node, kind, mixed, shape, out, trail, leading)
            for shape, trails in leading
            for trail in trails
        )

    def _step(
        self,
        node: Any,
        kind: str,
        mixed: bool,
        given: Sequence[int],
        out: Sequence[int],
        trail: Trail,
        leading: list,
    ) -> Trail:
        reduction = getattr(node, "_saved_reduction", None)
        before, after = self.records(given), self.records(out)
        if reduction is not None:
            return self._loss(node, reduction, given, trail)
        if kind in ("Sum", "Nansum", "Mean"):
            return self._reduced(
                node, kind, tuple(getattr(node, "_saved_self_sym_sizes", given)), trail
            )
        if kind in ("Mm", "Cdist") and len(leading) > 1 and tuple(out) == (self.rows, self.rows):
            return Trail(paired=True)
        if kind in _LINEAR and not mixed:
            if (
                kind in _PICKS
                and before is not None
                and (after is None or (before == 0 == after and given[0] != out[0]))
            ):
                return trail._replace(picked=True, powers=trail.powers | {SUM})
            if before is not None and after is None:
                return trail._replace(
                    doubt=trail.doubt or f"{node.name()} puts records into another shape"
                )
            return self._scaled(node, kind, trail)
        if (
            after is not None
        ):  # a function of the records; what was reduced below it is the model's own affair
            return Trail(picked=trail.picked, paired=trail.paired)
        if before is not None:
            words = f"{node.name()} makes one number of all records"
            return trail._replace(wrong=f"{words}, in which each counts by the others") if kind in _MIXES else (
                trail._replace(powers=frozenset({SUM, MEAN}), doubt=words)
            )  # fmt: skip
        if mixed or kind in _BENT:
            why = "multiplies or divides by" if mixed else "takes a function of"
            return trail._replace(
                wrong=f"it {why} a number that all records have a part in ({node.name()})"
            )
        return trail._replace(doubt=trail.doubt or f"what {node.name()} does is not known")

    def records(self, shape: Sequence[int]) -> int | None:
        """Which dimension holds the records, or those of all positions; None if none does."""
        for divides in (
            lambda size: size == self.rows,
            lambda size: size > 0 and size % self.rows == 0,
        ):
            for dim, size in enumerate(shape):
                if divides(size):
                    return dim
        return None

    def _reduced(self, node: Any, kind: str, sizes: Sequence[int], trail: Trail) -> Trail:
        dims = getattr(node, "_saved_dim", None)
        trail = trail._replace(counts=trail.counts | {math.prod(sizes)})
        over = (
            {_signed(dim) % len(sizes) for dim in dims}
            if dims and sizes
            else set(range(len(sizes)))
        )
        if self.records(sizes) in over or any(sizes[dim] == self.rows for dim in over):
            return trail._replace(powers=trail.powers | {MEAN if kind == "Mean" else SUM})
        if trail.picked and kind == "Mean" and over:
            return trail._replace(
                wrong="it takes the mean over some of the records, whose number hangs on the others"
            )
        return trail

    def _loss(self, node: Any, reduction: int, given: Sequence[int], trail: Trail) -> Trail:
        """One of torch's own losses: 0 none, 1 mean, 2 sum."""
        positions = math.prod(
            size for dim, size in enumerate(given) if dim != 1
        )  # dimension 1 is the classes'
        below = Trail(
            frozenset({SUM}) if trail.picked else frozenset(),
            picked=trail.picked,
            paired=trail.paired,
            counts=frozenset({math.prod(given), positions}),
        )
        if reduction == 2:
            return below._replace(powers=frozenset({SUM}))
        if reduction == 0:
            return below
        if trail.picked:
            return below._replace(
                wrong="it takes the mean over some of the records, whose number hangs on the others"
            )
        wrong = ""
        if node.name().startswith("NllLoss"):
            ignored = _signed(node._saved_ignore_index)
            if node._saved_weight is not None:
                wrong = "it divides by the class weights of the whole batch (weight=)"
            elif ignored != _IGNORED:
                wrong = f"it divides by the labels of the whole batch that are not ignore_index={ignored}"
            elif float(node._saved_total_weight) != positions:
                wrong = f"it divides by the labels of the whole batch that are not {_IGNORED} (ignore_index)"
        return below._replace(powers=frozenset({MEAN}), wrong=wrong)

    def _scaled(self, node: Any, kind: str, trail: Trail) -> Trail:
        """A product or a quotient with one number."""
        if kind not in ("Mul", "Div"):
            return trail
        operands = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
        for value in operands:
            if isinstance(value, Tensor) and value.numel() == 1:
                if not float(value):
                    return Trail(frozenset({SUM, MEAN}))  # no gradient comes through
                return self._with_number(trail, float(value), kind == "Div", not _is_number(value))
        if kind == "Div" and isinstance(operands[0], (int, float)):
            return self._with_number(
                trail, float(operands[0]), True, True
            )  # in torch's own losses: no constant of the user's
        return trail

    def _with_number(self, trail: Trail, value: float, divides: bool, is_tensor: bool) -> Trail:
        for number, sign in (
            (value, -1 if divides else 1),
            (1 / value if value else 0.0, 1 if divides else -1),
        ):
            whole = round(number)
            if whole < self.rows or whole % self.rows or abs(number - whole) > 1e-6 * whole:
                continue
            counted = whole == self.rows or (sign < 0 and whole in trail.counts)
            if not counted and sign > 0:
                continue
            loose = whole != self.rows or (not is_tensor and whole in self.constants)
            return trail._replace(
                shift=trail.shift + sign, loose=trail.loose or loose, far=trail.far or not counted
            )
        return trail._replace(divided=trail.divided or (is_tensor and divides))

    def started(self, trail: Trail, shape: tuple[int, ...], gradient: Tensor | None) -> Trail:
        """With the gradient that ``backward(gradient=...)`` starts with, which adds up where a root
        has several values.
        """
        if self.records(shape) is not None:
            trail = trail._replace(powers=trail.powers | {SUM})
        if gradient is None or not gradient.numel():
            return trail
        first = gradient.detach().flatten()[0]
        if not bool((gradient == first).all()):
            return trail._replace(doubt=trail.doubt or "backward() is given a gradient of its own")
        return self._with_number(trail, float(first), False, True)


def _shape(node: Any, number: int) -> tuple[int, ...]:
    """The shape of what a node has made."""
    return tuple(node._input_metadata[number].shape)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _is_number(value: Tensor) -> bool:
    """Whether this was a plain number of Python's. Torch remembers, and lets it not decide on a
    result's type.
    """
    small = torch.float16 if value.is_floating_point() else torch.int8
    zero = torch.zeros((), dtype=small, device=value.device)
    return value.dtype != small and torch.result_type(zero, value) == small
