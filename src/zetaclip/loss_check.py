"""Whether a loss reduces over its records as ``loss_reduction=`` says, read off its graph before backward runs.

With a wrong declaration every gradient is scaled by the size of its batch before it is clipped, and one record
moves the sum by more than C. The graph between the loss and the private layers tells: somewhere the dimension
of the records goes away, by a sum or by a mean. Only shapes, names of operations and the few numbers that the
loss is multiplied or divided by are read.

The numbers that a graph has saved are gone once backward has passed them. So ``torch.autograd.backward`` is wrapped
when the first run is made; the wrapper does nothing unless some run asks for a look at the chunk that is out.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .errors import LossError, OwnerWarning
from .gradients import Recorder
from .settings import Settings

_SUM, _MEAN = 0, -1  # by which power of the rows a reduction scales each record's loss
_MOST_NODES = 20_000  # of a graph; what lies beyond is taken for a private layer
_IGNORED = -100  # torch's default of ignore_index, which most labels never are


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that keep a loss linear in what they are given, if their other operand is a constant.
_LINEAR = _names(
    "Add Sub Rsub Neg Mul Div Sum Nansum Mean View UnsafeView Reshape ReshapeAlias ViewAs AsStrided Unsqueeze Squeeze Expand "
    "Clone Copy CopyBackwards CopySlices ToCopy Alias Where MaskedFill Index IndexSelect Gather Select Slice Narrow Split "
    "SplitWithSizes Unbind MaskedSelect Take Stack Cat Permute Transpose T Flip Repeat Cumsum"
)
_PICKS = _names("Index IndexSelect Gather Select Slice Narrow Split SplitWithSizes MaskedSelect Take")
# Of a number that all records have a part in: the slope of these hangs on all of them.
_BENT = _names(
    "Exp Expm1 Log Log1p Log2 Log10 Sqrt Rsqrt Pow Sigmoid Tanh Softplus LogSigmoidForward Reciprocal Abs Relu Clamp ClampMax "
    "ClampMin Maximum Minimum Sin Cos Logaddexp"
)
# Reductions over records in which one record decides what another one counts.
_MIXES = _names(
    "LinalgVectorNorm Norm Std StdMean Var VarMean Max Min Amax Amin Median Nanmedian Logsumexp Prod Kthvalue Topk Aminmax"
)

_HOW = "See engine.validate, criterion= of make_private and zetaclip.losses"
_CURE = {
    "mean": 'Give make_private loss_reduction="sum", or let the loss take the mean over the records (reduction="mean")',
    "sum": 'Give make_private loss_reduction="mean", or let the loss add up over the records (reduction="sum")',
}
WEIGHTED = (
    'Use zetaclip.losses, which weighs each record\'s own loss and divides by the rows, or reduction="sum" in the loss with '
    'loss_reduction="sum" in make_private'
)


class _Trail(NamedTuple):
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
    roots: Iterable[tuple[Any, Tensor | None]], rows: int, constants: frozenset[float], ours: Callable[[Any], bool]
) -> set[_Trail]:
    """All ways from the roots of a backward to nodes that are ``ours``, each with what reduces there.

    Args:
        roots: tensors that are run backward, each with the gradient that it starts with.
        rows: records of the chunk, at least two.
        constants: public numbers that a loss may well be divided by.
        ours: tells the nodes at which a way ends.

    Returns:
        The distinct ways; empty if no root leads to a node of ours.
    """
    graph = _Graph(rows, constants, ours)
    found: set[_Trail] = set()
    for root, gradient in roots:
        node, number = (root.grad_fn if isinstance(root, Tensor) else root.node), root.output_nr
        if node is not None:
            found |= {graph.started(trail, _shape(node, number), gradient) for trail in graph.trails(node)}
    return found


class _Graph:
    def __init__(self, rows: int, constants: frozenset[float], ours: Callable[[Any], bool]) -> None:
        self.rows, self.constants, self.ours = rows, constants, ours
        self.known: dict[Any, frozenset[_Trail]] = {}

    def trails(self, root: Any) -> frozenset[_Trail]:
        """Depth first, without recursion: graphs are deeper than Python's stack."""
        todo = [(root, False)]
        begun: set[Any] = set()
        while todo:
            node, below_done = todo.pop()
            if node in self.known:
                continue
            if len(self.known) > _MOST_NODES or self.ours(node):
                self.known[node] = frozenset({_Trail()})
            elif below_done:
                self.known[node] = self._through(node)
            elif node not in begun:
                begun.add(node)
                todo.append((node, True))
                todo += [(below, False) for below, _ in node.next_functions if below is not None]
        return self.known[root]

    def _through(self, node: Any) -> frozenset[_Trail]:
        leading = [
            (_shape(below, number), self.known.get(below, frozenset()))
            for below, number in node.next_functions
            if below is not None
        ]
        leading = [(shape, trails) for shape, trails in leading if trails]
        if not leading:
            return frozenset()
        kind, out = re.sub(r"Backward\d*$", "", node.name()), _shape(node, 0)
        mixed = len(leading) > 1 and kind in ("Mul", "Div")  # two factors that records have a part in
        return frozenset(
            self._step(node, kind, mixed, shape, out, trail, leading) for shape, trails in leading for trail in trails
        )

    def _step(
        self, node: Any, kind: str, mixed: bool, given: Sequence[int], out: Sequence[int], trail: _Trail, leading: list
    ) -> _Trail:
        reduction = getattr(node, "_saved_reduction", None)
        before, after = self.records(given), self.records(out)
        if reduction is not None:
            return self._loss(node, reduction, given, trail)
        if kind in ("Sum", "Nansum", "Mean"):
            return self._reduced(node, kind, tuple(getattr(node, "_saved_self_sym_sizes", given)), trail)
        if kind in ("Mm", "Cdist") and len(leading) > 1 and tuple(out) == (self.rows, self.rows):
            return _Trail(paired=True)
        if kind in _LINEAR and not mixed:
            if (
                kind in _PICKS
                and before is not None
                and (after is None or (before == 0 == after and given[0] != out[0]))
            ):
                return trail._replace(picked=True, powers=trail.powers | {_SUM})
            if before is not None and after is None:
                return trail._replace(doubt=trail.doubt or f"{node.name()} puts records into another shape")
            return self._scaled(node, kind, trail)
        if after is not None:  # a function of the records; what was reduced below it is the model's own affair
            return _Trail(picked=trail.picked, paired=trail.paired)
        if before is not None:
            words = f"{node.name()} makes one number of all records"
            return trail._replace(wrong=f"{words}, in which each counts by the others") if kind in _MIXES else (
                trail._replace(powers=frozenset({_SUM, _MEAN}), doubt=words)
            )  # fmt: skip
        if mixed or kind in _BENT:
            why = "multiplies or divides by" if mixed else "takes a function of"
            return trail._replace(wrong=f"it {why} a number that all records have a part in ({node.name()})")
        return trail._replace(doubt=trail.doubt or f"what {node.name()} does is not known")

    def records(self, shape: Sequence[int]) -> int | None:
        """Which dimension holds the records, or those of all positions; None if none does."""
        for divides in (lambda size: size == self.rows, lambda size: size > 0 and size % self.rows == 0):
            for dim, size in enumerate(shape):
                if divides(size):
                    return dim
        return None

    def _reduced(self, node: Any, kind: str, sizes: Sequence[int], trail: _Trail) -> _Trail:
        dims = getattr(node, "_saved_dim", None)
        trail = trail._replace(counts=trail.counts | {math.prod(sizes)})
        over = {_signed(dim) % len(sizes) for dim in dims} if dims and sizes else set(range(len(sizes)))
        if self.records(sizes) in over:
            return trail._replace(powers=trail.powers | {_MEAN if kind == "Mean" else _SUM})
        if trail.picked and kind == "Mean" and over:
            return trail._replace(wrong="it takes the mean over some of the records, whose number hangs on the others")
        return trail

    def _loss(self, node: Any, reduction: int, given: Sequence[int], trail: _Trail) -> _Trail:
        """One of torch's own losses: 0 none, 1 mean, 2 sum."""
        positions = math.prod(size for dim, size in enumerate(given) if dim != 1)  # dimension 1 is the classes'
        below = _Trail(
            frozenset({_SUM}) if trail.picked else frozenset(),
            picked=trail.picked,
            paired=trail.paired,
            counts=frozenset({math.prod(given), positions}),
        )
        if reduction == 2:
            return below._replace(powers=frozenset({_SUM}))
        if reduction == 0:
            return below
        if trail.picked:
            return below._replace(wrong="it takes the mean over some of the records, whose number hangs on the others")
        wrong = ""
        if node.name().startswith("NllLoss"):
            ignored = _signed(node._saved_ignore_index)
            if node._saved_weight is not None:
                wrong = "it divides by the class weights of the whole batch (weight=)"
            elif ignored != _IGNORED:
                wrong = f"it divides by the labels of the whole batch that are not ignore_index={ignored}"
            elif float(node._saved_total_weight) != positions:
                wrong = f"it divides by the labels of the whole batch that are not {_IGNORED} (ignore_index)"
        return below._replace(powers=frozenset({_MEAN}), wrong=wrong)

    def _scaled(self, node: Any, kind: str, trail: _Trail) -> _Trail:
        """A product or a quotient with one number."""
        if kind not in ("Mul", "Div"):
            return trail
        operands = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
        for value in operands:
            if isinstance(value, Tensor) and value.numel() == 1:
                if not float(value):
                    return _Trail(frozenset({_SUM, _MEAN}))  # no gradient comes through
                return self._with_number(trail, float(value), kind == "Div", not _is_number(value))
        if kind == "Div" and isinstance(operands[0], (int, float)):
            return self._with_number(
                trail, float(operands[0]), True, True
            )  # in torch's own losses: no constant of the user's
        return trail

    def _with_number(self, trail: _Trail, value: float, divides: bool, is_tensor: bool) -> _Trail:
        for number, sign in ((value, -1 if divides else 1), (1 / value if value else 0.0, 1 if divides else -1)):
            whole = round(number)
            if whole < self.rows or whole % self.rows or abs(number - whole) > 1e-6 * whole:
                continue
            counted = whole == self.rows or (sign < 0 and whole in trail.counts)
            if not counted and sign > 0:
                continue
            loose = whole != self.rows or (not is_tensor and whole in self.constants)
            return trail._replace(shift=trail.shift + sign, loose=trail.loose or loose, far=trail.far or not counted)
        return trail._replace(divided=trail.divided or (is_tensor and divides))

    def started(self, trail: _Trail, shape: tuple[int, ...], gradient: Tensor | None) -> _Trail:
        """With the gradient that ``backward(gradient=...)`` starts with, which adds up where a root has several values."""
        if self.records(shape) is not None:
            trail = trail._replace(powers=trail.powers | {_SUM})
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
    """Whether this was a plain number of Python's. Torch remembers, and lets it not decide on a result's type."""
    small = torch.float16 if value.is_floating_point() else torch.int8
    zero = torch.zeros((), dtype=small, device=value.device)
    return value.dtype != small and torch.result_type(zero, value) == small


def verdict(trail: _Trail, declared: str, strict: bool, cure: str = "") -> tuple[str, str, bool]:
    """What is wrong on one way, what can't be told, and whether other rows could tell more."""
    target, other = (_MEAN, _SUM) if declared == "mean" else (_SUM, _MEAN)
    if trail.wrong:
        return f"the loss mixes records: {trail.wrong}. {WEIGHTED}", "", False
    if trail.paired:
        return "", "it compares every record with every other one", False
    if not trail.powers or trail.doubt:
        return "", trail.doubt or "how it comes from single records to one number is not known", False
    read = {power + trail.shift for power in trail.powers}
    if target in read:
        doubt = "it divides by a tensor that may hang on the records" if trail.divided and declared == "sum" else ""
        doubt = "it divides by a multiple of the rows of this batch, by chance or not" if trail.far else doubt
        return "", doubt, bool(trail.shift) or len(read) > 1
    if trail.shift and target in trail.powers:
        if trail.far or (other not in read and not strict):
            return "", "", True  # mean / 4 on 4 rows: nobody divides twice
        if trail.loose and not strict:
            return "", "it divides by a number that is that of this batch, by chance or not", True
    if other in read:
        does = "takes the mean" if other == _MEAN else "adds up"
        if other == _SUM and trail.divided:
            does = "adds up, and divides by something else than their number (weights, counts of labels),"
        why = f"the loss {does} over the records of a batch, but loss_reduction={declared!r} was declared"
    else:
        why = f"the loss is neither the mean nor the sum over the records of a batch; loss_reduction={declared!r} was declared"
    return (
        f"{why}: each gradient would be scaled by the size of its batch before it is clipped, so that one record moves the sum by "
        f"more than C, and ε would not hold. {cure or _CURE[declared]}",
        "",
        False,
    )


class LossCheck:
    """Looks at the losses of one run: at the first chunk of two or more records, and again after 2, 4, 8, ... chunks.

    **Guarantee.** A loss whose graph shows another reduction than the declared one raises ``LossError`` before any
    gradient of that chunk is computed. Nothing is written anywhere; what can't be told is an ``OwnerWarning``, once.
    **Edge cases.** With one record a mean is a sum, so chunks of one record are not looked at. Where the number
    that a loss is divided by could be a constant that equals the rows by chance, the next chunk of other rows decides.
    """

    def __init__(self, recorder: Recorder, settings: Settings) -> None:
        self.recorder, self.declared = recorder, settings.loss_reduction
        public = (settings.num_examples, settings.expected_batch_size, settings.physical_batch_size)
        self.constants = frozenset(float(round(number)) for number in public if number)
        self.automatic, self._cure = True, _CURE[self.declared]
        self._rows = 0  # of the chunk that is to be looked at; 0: none is
        self._looked = True  # whether a backward of that chunk came by
        self._seen = 0
        self._unsure_at = 0  # rows of a first look that left something open
        self._warned = False
        _watch(self)

    def open(self, rows: int) -> None:
        """A chunk goes out."""
        self._rows = 0
        if rows < 2:
            return
        self._seen += 1
        if self._seen & (self._seen - 1) == 0 or (self._unsure_at and rows != self._unsure_at):
            self._rows, self._looked = rows, False
            with _LOCK:
                _CHECKS[self] = next(_NUMBERS)

    def close(self) -> None:
        """The chunk's gradients are about to be used."""
        if self._rows and not self._looked:
            self._tell("its backward did not run through torch.autograd.backward")
        self._rows = 0

    @property
    def wanted(self) -> bool:
        """Whether the next backward is to be looked at."""
        return self.automatic and bool(self._rows) and bool(self.recorder.rows)

    def by_hand(self, declared: str, cure: str) -> None:
        """Whoever runs backward scales the loss itself: it calls ``look`` with the loss as it was before."""
        self.automatic, self.declared, self._cure = False, declared, cure

    def look(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], newest: bool = True) -> None:
        """Before a backward of these roots, which may have nothing to do with this run."""
        rows = self._rows
        if not rows:
            return
        strict = bool(self._unsure_at) and rows != self._unsure_at

        def ours(node: Any) -> bool:
            shadow = getattr(node, "shadow", None)
            if shadow is not None:
                return shadow.recorder is self.recorder
            # The layers inside are not in the graph yet; whoever was handed out last runs them.
            return newest and node.name() == "CheckpointFunctionBackward"

        try:
            trails = classified(zip(roots, gradients, strict=True), rows, self.constants, ours)
        except Exception as problem:  # a node of a kind that was never seen: no reason to stop a run
            if newest:  # of other runs this graph is none
                self._looked = True
                self._tell(f"reading it failed ({type(problem).__name__})")
            return
        doubts, unsure = [], False
        for trail in trails:
            self._looked = True
            wrong, doubt, open_still = verdict(trail, self.declared, strict, self._cure)
            if wrong:
                raise LossError(wrong)
            doubts += [doubt] if doubt else []
            unsure |= open_still
        self._unsure_at = rows if unsure and not strict else 0
        if doubts:
            self._tell(min(doubts))

    def _tell(self, doubt: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"whether the loss is the {self.declared} over the records of a batch can't be told from its graph: {doubt}. If it "
                f"mixes records, or divides by anything but the rows, ε does not hold. {_HOW}",
                OwnerWarning,
                stacklevel=4,
            )


# Every run's, with a number that is largest for the chunk that was handed out last.
_CHECKS: weakref.WeakKeyDictionary[LossCheck, int] = weakref.WeakKeyDictionary()
_NUMBERS = itertools.count(1)
_LOCK = threading.Lock()


def _watch(check: LossCheck) -> None:
    with _LOCK:
        _CHECKS[check] = 0
        if not hasattr(torch.autograd.backward, "_zetaclip"):
            torch.autograd.backward = _looking(torch.autograd.backward)


def _looking(backward: Callable[..., None]) -> Callable[..., None]:
    """torch's backward, after a look by whoever wants one. Not inside another backward, where checkpointing runs its parts."""

    @functools.wraps(backward)
    def looked_at(tensors: Any, grad_tensors: Any = None, *rest: Any, **named: Any) -> None:
        if torch._C._current_graph_task_id() == -1 and named.get("inputs") is None and len(rest) < 4:
            with _LOCK:
                wanted = [(number, check) for check, number in _CHECKS.items() if check.wanted]
            if wanted:
                tensors = (tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tuple(tensors)
                given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else tuple(grad_tensors or ())
                for number, check in wanted:
                    check.look(tensors, given or (None,) * len(tensors), number == max(number for number, _ in wanted))
        backward(tensors, grad_tensors, *rest, **named)

    looked_at._zetaclip = True  # type: ignore[attr-defined]
    return looked_at
