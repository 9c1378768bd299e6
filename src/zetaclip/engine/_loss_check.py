"""Checks, before backward, that a loss reduces over its records as ``loss_reduction`` says.

With a wrong declaration every gradient is scaled by the size of its batch before it is clipped, and
one record moves the sum by more than C. ``_loss_graph.py`` reads the graph; here is who asks for
it, when, and what is said.

The numbers that a graph has saved are gone once backward has passed them. So
``torch.autograd.backward`` is wrapped when the first run is made; the wrapper does nothing unless
some run asks for a look at the chunk that is out.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..errors import LossError, OwnerWarning
from ..gradients import CaptureBuffer
from ..gradients.capture import HALF
from ._loss_graph import layers_of, ways
from ._loss_nodes import FEW, MEAN, SUM, Trail
from ._loss_root import start
from ._settings import Settings

_HOW = "See engine.validate, criterion= of make_private and zetaclip.losses"
_CURE = {
    "mean": 'Give make_private loss_reduction="sum", or the loss the mean over records '
    '(reduction="mean")',
    "sum": 'Give make_private loss_reduction="mean", or the loss the sum over records '
    '(reduction="sum")',
}
WEIGHTED = (
    "Use zetaclip.losses, which weighs each record's own loss and divides by the rows, or "
    'reduction="sum" in the loss with loss_reduction="sum" in make_private'
)


PAIRS = (
    "it compares every record with every other one: {}. If outputs and targets are meant record by "
    "record, give both the same shape, as with y.unsqueeze(1) or out.squeeze(1)"
)

_RARE = 1e-3


def verdict(trail: Trail, declared: str, strict: bool, cure: str = "") -> tuple[str, str, bool]:
    """What is wrong on one way, what can't be told, and whether other rows could tell more."""
    target, other = (MEAN, SUM) if declared == "mean" else (SUM, MEAN)
    if trail.unclear:
        return "", "", True
    if trail.wrong:
        return f"the loss mixes records: {trail.wrong}. {WEIGHTED}", "", False
    if trail.paired:
        words = PAIRS.format(trail.paired)
        return (f"the loss mixes records: {words}", "", False) if strict else ("", words, True)
    if not trail.powers or trail.doubt:
        return (
            "",
            trail.doubt or "how it comes from single records to one number is not known",
            False,
        )
    read = {power + trail.shift for power in trail.powers}
    if target in read:
        doubt = (
            "it divides by a tensor that may come from the records (their weights, a mask)"
            if trail.divided
            else ""
        )
        doubt = (
            "it divides by a multiple of the rows of this batch, by chance or not"
            if trail.far
            else doubt
        )
        return "", doubt, bool(trail.shift) or len(read) > 1
    if trail.shift and target in trail.powers:
        if trail.far or (other not in read and not strict):
            return "", "", True  # mean / 4 on 4 rows: nobody divides twice
        if trail.loose and not strict:
            return "", "it divides by a number that is that of this batch, by chance or not", True
    if trail.common and not strict:
        return "", "", True
    if other in read:
        does = "takes the mean" if other == MEAN else "adds up"
        if other == SUM and trail.divided:
            does = (
                "adds up, and divides by something else than their number (weights, counts "
                "of labels),"
            )
        why = (
            f"the loss {does} over the records of a batch, but loss_reduction={declared!r} "
            "was declared"
        )
    else:
        why = (
            f"the loss is neither mean nor sum over the records; loss_reduction={declared!r} "
            "was declared"
        )
    return (
        f"{why}: each gradient would be scaled by the size of its batch before it is clipped, so "
        "that one record moves the sum by more than C, and ε would not hold. "
        f"{cure or _CURE[declared]}",
        "",
        False,
    )


class LossCheck:
    """Looks at the losses of one run.

    At the first chunk of two or more records, and again after 2, 4, 8, ... chunks.

    **Guarantee.** A loss whose graph shows another reduction than the declared one raises
    ``LossError`` before any gradient of that chunk is computed. Nothing is written anywhere; what
    can't be told is an ``OwnerWarning``, once. **Edge cases.** With one record a mean is a sum, so
    chunks of one record are not looked at. Where the number that a loss is divided by could be a
    constant that equals the rows by chance, the next chunk of other rows decides. The same goes for
    pairs of records, which are told by a shape: a warning first (silent up to 16 rows), then an
    error. What labels or inputs mix before the loss has no graph and is not seen.
    """

    def __init__(self, recorder: CaptureBuffer, settings: Settings) -> None:
        self.recorder, self.declared = recorder, settings.loss_reduction
        public = (settings.num_examples, settings.expected_batch_size, settings.physical_batch_size)
        self.constants = frozenset(float(round(number)) for number in public if number)
        self.automatic, self._cure = True, _CURE[self.declared]
        self.lent = recorder.turn  # of the chunk that was handed out last
        self._turn = recorder.turn  # of the chunk that the next two are about
        self._rows = 0  # of the chunk if it is to be looked at; 0: it is not
        self._looked = True  # whether a backward of that chunk came by
        self._seen = 0
        self._paired_at = 0  # rows of the last look, if it showed pairs
        self._unsure_at = 0  # rows of a first look that left something open
        self._decides = False  # whether a number that equals other rows as well is taken for them
        self._numbers: tuple[int, frozenset[float]] = (0, frozenset())  # divisors by rows
        self._half = False  # whether a look found half precision, in private layers or outside
        self._odds = 1.0  # that the weights of records seen so far are their own
        self._factors: dict[float, int] = {}
        self._capped = settings.physical_batch_size
        self._warned = False
        _watch(self)

    def due(self) -> int:
        """The rows of the chunk that is out if its loss is to be looked at, otherwise 0."""
        with _LOCK:  # a backward in another thread asks, too
            # Records can also be out to be looked at, as in engine.validate.
            if not self.recorder.rows or self.recorder.turn != self.lent:
                return 0
            if self.recorder.turn != self._turn:
                self._turn, self._rows, rows = self.recorder.turn, 0, self.recorder.rows
                self._seen += rows >= 2
                again = self._unsure_at and rows != self._unsure_at
                if rows >= 2 and (self._seen & (self._seen - 1) == 0 or again):
                    self._rows, self._looked = rows, False
            return self._rows

    def close(self) -> None:
        """The chunk's gradients are about to be used."""
        if self.due() and not self._looked:
            self._tell("its backward did not run through torch.autograd.backward")

    @property
    def divides(self) -> bool:
        """Whether the next backward would round gradients by the number of records."""
        mean = self.automatic and self.declared == "mean"
        return mean and (self.recorder.half or self._half) and self.recorder.rows > 1

    def undivided(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], newest: bool
    ) -> Sequence[Tensor | None]:
        """The gradients to start backward with, so that nothing is rounded by the rows.

        Raises:
            LossError: The division by the rows may not be undone exactly.
        """
        recorder = self.recorder
        ours = layers_of(recorder, newest)
        found = start(roots, gradients, recorder.rows, ours, recorder.anchor_node)
        if any(new is not old for new, old in zip(found, gradients, strict=True)):
            if recorder.received and not recorder.undivided:
                raise LossError(
                    "two backwards of one batch, of which only the second has gradients in half "
                    "precision. Add the losses up and call backward once"
                )
            recorder.undivided = True
        return found

    def by_hand(self, declared: str, cure: str) -> None:
        """For callers that scale the loss themselves before backward.

        They call ``look`` with the loss as it was before.
        """
        self.automatic, self.declared, self._cure = False, declared, cure

    def look(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], newest: bool = True
    ) -> None:
        """Checks the graph of these roots before their backward; it may not lead to this run."""
        rows = self.due()
        if not rows:
            return
        if self._in_half(newest, roots):
            self._half = self.recorder.short = True
        strict = self._decides and rows != self._unsure_at
        pairs = zip(roots, gradients, strict=True)
        try:
            trails = ways(self.recorder, newest, pairs, self.constants, self._factors)
        except (
            Exception
        ) as problem:  # a node of a kind that was never seen: no reason to stop a run
            if newest:  # of other runs this graph is none
                self._looked = True
                self._tell(f"reading it failed ({type(problem).__name__})")
            return
        doubts, unsure, decides = [self._changed(rows, trails), self._made(trails)], False, True
        # Pairs at two numbers of rows are no chance. A full batch always has the same rows.
        last, paired = self._paired_at, any(trail.paired for trail in trails)
        again = bool(last) and (rows != last or (rows > FEW and rows != self._capped))
        for trail in trails:
            self._looked = True
            sure = again if trail.paired else strict
            wrong, doubt, open_still = verdict(trail, self.declared, sure, self._cure)
            if wrong:
                raise LossError(wrong)
            if not trail.paired or rows > FEW or (rows == last and self._seen > 2):
                doubts.append(doubt)
            unsure |= open_still
            decides &= not trail.far
        self._unsure_at = rows if paired or (unsure and not strict) else 0
        self._decides = decides and bool(self._unsure_at)
        self._paired_at = rows if paired else 0
        if any(doubts):
            self._tell(min(doubt for doubt in doubts if doubt))

    def _in_half(self, newest: bool, roots: Sequence[Any]) -> bool:
        """Whether a backward from here to private layers has gradients in half precision.

        Also outside of those layers: a cast of their outputs, or a frozen part of the model.
        """
        todo = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
        met: set[Any] = set()
        half = False
        while todo:
            node = todo.pop()
            if node is None or node in met:
                continue
            met.add(node)
            half |= any(result.dtype in HALF for result in getattr(node, "_input_metadata", ()))
            todo += [below for below, _ in node.next_functions]
        return half and any(map(layers_of(self.recorder, newest), met))

    def _changed(self, rows: int, trails: set[Trail]) -> str:
        """A doubt if the loss is divided by other numbers than at a look with other rows."""
        numbers = frozenset(number for trail in trails for number in trail.numbers)
        last, before = self._numbers
        if not trails or rows == last:
            return ""
        self._numbers = rows, numbers
        # A number on one side only is a term that was left out, or one that equals the rows.
        if not last or not (numbers - before and before - numbers):
            return ""
        return "it divides by a number that is another one for each batch"

    def _made(self, trails: set[Trail]) -> str:
        """A doubt if weights of records looked made from their batch at every look so far."""
        odds = [trail.weighed for trail in trails if trail.weighed is not None]
        if odds:
            self._odds = self._odds * min(odds) if min(odds) < 1 else 1.0
        if self._odds > _RARE:
            return ""
        return "it weighs records by what seems to come from the whole batch (counts, a sum)"

    def _tell(self, doubt: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"whether the loss is the {self.declared} over the records of a batch can't be "
                f"told from its graph: {doubt}. If it "
                f"mixes records, or divides by anything but the rows, ε does not hold. {_HOW}",
                OwnerWarning,
                stacklevel=4,
            )


_CHECKS: weakref.WeakSet[LossCheck] = weakref.WeakSet()  # every run's
_LOCK = threading.RLock()


def _watch(check: LossCheck) -> None:
    with _LOCK:
        _CHECKS.add(check)
        if not hasattr(torch.autograd.backward, "_zetaclip"):
            torch.autograd.backward = _looking(torch.autograd.backward)


def _looking(backward: Callable[..., None]) -> Callable[..., None]:
    """torch's backward, in which every run that asked for it looks at the graph first.

    Backwards inside another backward (checkpointing) are not looked at.
    """

    @functools.wraps(backward)
    def looked_at(tensors: Any, grad_tensors: Any = None, *rest: Any, **named: Any) -> None:
        if (
            torch._C._current_graph_task_id() == -1
            and named.get("inputs") is None
            and len(rest) < 4
        ):
            with _LOCK:
                checks = [check for check in _CHECKS if check.automatic]
                wanted = [check for check in checks if check.due()]
            if wanted or any(check.divides for check in checks):
                tensors = (
                    (tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tuple(tensors)
                )
                given = (
                    (grad_tensors,)
                    if isinstance(grad_tensors, Tensor)
                    else tuple(grad_tensors or ())
                )
                gradients: Sequence[Tensor | None] = given or (None,) * len(tensors)
                newest = max(
                    check.recorder.turn for check in checks if check in wanted or check.divides
                )
                for check in wanted:
                    check.look(tensors, gradients, check.recorder.turn == newest)
                for check in checks:
                    if check.divides:  # a look may have found it
                        grad_tensors = gradients = check.undivided(
                            tensors, gradients, check.recorder.turn == newest
                        )
        backward(tensors, grad_tensors, *rest, **named)

    looked_at._zetaclip = True  # type: ignore[attr-defined]
    return looked_at
