"""How a loss comes from its records to one number, read off its autograd graph.

Somewhere between the private layers and the loss the dimension of the records goes away, by a sum
or by a mean. Only shapes, names of operations and the few numbers that the loss is multiplied or
divided by are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ..gradients import CaptureBuffer
from . import _loss_nodes as nodes
from ._loss_nodes import MEAN, SUM, Trail
from ._loss_numbers import Numbers

_MOST_NODES = 20_000  # of a graph; what lies beyond is taken for a private layer
_OF_ALL = "a number that all records have a part in"
_EACH = -1  # each output of the node holds one record
_IGNORED = -100  # torch's default of ignore_index, which most labels never are


def classified(
    roots: Iterable[tuple[Any, Tensor | None]],
    rows: int,
    constants: frozenset[float],
    ours: Callable[[Any], bool],
    factors: dict[float, int] | None = None,
) -> set[Trail]:
    """All paths from the roots of a backward to nodes that are ``ours``, with their reductions.

    Args:
        roots: tensors that are run backward, each with the gradient that it starts with.
        rows: records of the chunk, at least two.
        constants: public numbers that a loss may well be divided by.
        ours: tells the nodes at which a way ends.
        factors: plain numbers that earlier losses were scaled by, with the rows they had. Those of
            this one are added.

    Returns:
        The distinct ways; empty if no root leads to a node of ours.
    """
    graph = _Graph(rows, constants, ours, {} if factors is None else factors)
    found: set[Trail] = set()
    for root, gradient in roots:
        node, number = (root.grad_fn if isinstance(root, Tensor) else root.node), root.output_nr
        if node is not None:
            found |= {
                graph.started(trail, shape_of(node, number), gradient)
                for trail in graph.trails(node)
            }
    return found


def ways(
    recorder: CaptureBuffer,
    newest: bool,
    roots: Iterable[tuple[Any, Tensor | None]],
    constants: frozenset[float],
    factors: dict[float, int],
) -> set[Trail]:
    """``classified`` for the layers that a private run records."""
    ours = layers_of(recorder, newest)
    return classified(roots, recorder.rows, constants, ours, factors)


def layers_of(recorder: CaptureBuffer, newest: bool) -> Callable[[Any], bool]:
    """Tells the nodes of layers that a private run records.

    Args:
        recorder: of the run.
        newest: whether its chunk was handed out last. The layers inside a reentrant checkpoint are
            not in the graph yet. They are taken for those of that run if its layers ran without
            gradients in this chunk.
    """
    unseen = newest and recorder.unrecorded

    def ours(node: Any) -> bool:
        shadow = getattr(node, "shadow", None)
        if shadow is not None:
            return shadow.recorder is recorder
        return unseen and node.name() == "CheckpointFunctionBackward"

    return ours


class _Graph:
    def __init__(
        self,
        rows: int,
        constants: frozenset[float],
        ours: Callable[[Any], bool],
        factors: dict[float, int],
    ) -> None:
        self.rows, self.ours = rows, ours
        self.numbers = Numbers(rows, constants, factors)
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
            (
                shape_of(below, number),
                frozenset(
                    trail._replace(single=number) if trail.single == _EACH else trail
                    for trail in self.known.get(below, frozenset())
                ),
            )
            for below, number in node.next_functions
            if below is not None
        ]
        leading = [(shape, trails) for shape, trails in leading if trails]
        if not leading:
            return frozenset()
        kind, out = re.sub(r"Backward.*$", "", node.name()), shape_of(node, 0)
        # Two factors that records have a part in.
        mixed = len(leading) > 1 and kind in ("Mul", "Div")
        singles = {trail.single for _, trails in leading for trail in trails}
        return frozenset(
            self._step(
                node,
                kind,
                mixed,
                shape,
                out,
                trail._replace(
                    wide=max(trail.wide, shape.count(self.rows)),
                    single=trail.single if len(singles) == 1 or kind in nodes.JOINS else None,
                ),
            )
            for shape, trails in leading
            for trail in trails
        )

    def _step(
        self,
        node: Any,
        kind: str,
        mixed: bool,
        given: tuple[int, ...],
        out: tuple[int, ...],
        trail: Trail,
    ) -> Trail:
        if trail.rooted and kind == "Pow" and node._saved_exponent == 2:
            return trail._replace(wrong="", rooted=False, powers=frozenset({SUM}))
        trail = trail._replace(rooted=False)
        if trail.wrong:
            return trail
        before, after = self.records(given), self.records(out)
        if trail.single is not None:
            return self._of_one(node, kind, mixed, after, trail)
        reduction = getattr(node, "_saved_reduction", None)
        linear = kind in nodes.LINEAR and not mixed
        spreads = before is None and after is not None and trail.powers and not trail.picked
        if not linear and (trail.spread or (mixed and spreads)):
            return trail._replace(wrong=f"it compares each record with {_OF_ALL} ({node.name()})")
        if reduction is not None:
            return _through_loss(node, reduction, given, trail)
        if kind in ("Sum", "Nansum", "Mean"):
            return self._reduced(
                node, kind, tuple(getattr(node, "_saved_self_sym_sizes", given)), trail
            )
        if kind == "Trace" and before is not None:  # each record with itself
            return _of_records(trail)._replace(powers=frozenset({SUM}), paired="")
        if kind == "Diagonal" and trail.paired:
            return trail._replace(paired="")
        if not trail.paired and self._pairs(kind, given, out, trail):
            trail = trail._replace(
                paired=f"{node.name()} makes shape {tuple(out)} of shape {tuple(given)}"
            )
        if kind in nodes.ALONG and (said := self._along(node, kind, given, trail)):
            return said
        if kind in nodes.PRODUCTS and before is not None and after is None:
            return _of_records(trail)._replace(powers=frozenset({SUM}))
        if linear:
            if (
                kind in nodes.PICKS
                and before is not None
                and (after is None or (before == 0 and given[0] != out[0]))
            ):
                if after and before == 0:  # the records, or as many classes
                    return trail._replace(unclear=True)
                return trail._replace(
                    picked=True, powers=trail.powers | {SUM}, single=self._one(node, kind, out)
                )
            if kind in ("Select", "Unbind") and dims_of(node, given) == {before}:
                return trail._replace(unclear=True)
            if before is not None and after is None:
                return trail._replace(
                    doubt=trail.doubt or f"{node.name()} puts records into another shape"
                )
            if kind in nodes.BROADCASTS and spreads:
                trail = trail._replace(spread=True)
            return self.numbers.through(node, kind, trail)
        if after is not None:
            return _of_records(trail)
        if before is not None:
            words = f"{node.name()} makes one number of all records"
            if kind in nodes.MIXES:
                return trail._replace(wrong=f"{words}, in which each counts by the others")
            return trail._replace(powers=frozenset({SUM, MEAN}), doubt=words)
        if mixed or kind in nodes.BENT:
            why = "multiplies or divides by" if mixed else "takes a function of"
            return trail._replace(wrong=f"it {why} {_OF_ALL} ({node.name()})")
        return trail._replace(doubt=trail.doubt or f"what {node.name()} does is not known")

    def _one(self, node: Any, kind: str, out: Sequence[int]) -> int | None:
        """The index of the one record that is picked, or None if there may be several."""
        if kind == "Unbind":
            return _EACH
        if kind == "Select":
            return _signed(node._saved_index) % self.rows
        if kind == "Slice" and out[_signed(node._saved_dim)] == 1:
            return _signed(node._saved_start) % self.rows
        return None

    def _of_one(self, node: Any, kind: str, mixed: bool, after: int | None, trail: Trail) -> Trail:
        """One record alone, as in a loop over records: any function of it is its own."""
        if kind in nodes.JOINS and after is not None:  # the loop has ended
            return Trail(wide=trail.wide)
        if kind in nodes.LINEAR and not mixed:
            return self.numbers.through(node, kind, trail)
        return _of_records(trail)._replace(powers=frozenset({SUM}), single=trail.single)

    def _pairs(self, kind: str, given: tuple[int, ...], out: tuple[int, ...], trail: Trail) -> bool:
        """Whether a second dimension as long as the records' one comes up here."""
        held = self.records(given)
        if held is None or kind not in nodes.BROADCASTS | nodes.PRODUCTS | {
            "Cdist",
            "EuclideanDist",
        }:
            return False
        had = trail.wide if given[held] == self.rows else given.count(given[held])
        return out.count(given[held]) > max(had, 1)

    def _along(self, node: Any, kind: str, given: tuple[int, ...], trail: Trail) -> Trail | None:
        """What an operation along a dimension does, if that dimension holds the records."""
        over = dims_of(node, given)
        sizes = [size for size in given if size and size % self.rows == 0]
        if not any(given[dim] in sizes for dim in over):
            return None
        beside = any(size in sizes for dim, size in enumerate(given) if dim not in over)
        if trail.picked or trail.unclear or beside:
            return None if beside and self.records(given) not in over else (
                _of_records(trail)._replace(unclear=True)
            )  # fmt: skip
        rooted = kind in ("LinalgVectorNorm", "Norm")
        power = getattr(node, "_saved_ord", getattr(node, "_saved_p", 2))
        return trail._replace(
            wrong=f"{node.name()} runs over the records, so that each counts by the others",
            rooted=rooted and float(2 if power is None else power) == 2,
        )

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
        trail = trail._replace(counts=trail.counts | {math.prod(sizes)})
        over = dims_of(node, sizes)
        if self.records(sizes) in over or any(sizes[dim] == self.rows for dim in over):
            power = MEAN if kind == "Mean" else SUM
            if trail.spread:  # each of the rows got the number once more
                powers = frozenset(below + power + 1 for below in trail.powers)
                return trail._replace(powers=powers, spread=False)
            return trail._replace(powers=trail.powers | {power})
        if trail.picked and kind == "Mean" and over:
            return trail._replace(
                wrong="it takes the mean over some records, whose number depends on the others"
            )
        return trail

    def started(self, trail: Trail, shape: tuple[int, ...], gradient: Tensor | None) -> Trail:
        """The path together with the gradient that ``backward(gradient=...)`` starts with.

        If a root has several values, such a gradient sums them.
        """
        if self.records(shape) is not None:
            trail = trail._replace(powers=trail.powers | {SUM})
        if gradient is None or not gradient.numel():
            return trail
        first = gradient.detach().flatten()[0]
        if not bool((gradient == first).all()):
            return trail._replace(doubt=trail.doubt or "backward() is given a gradient of its own")
        return self.numbers.times(trail, float(first), False, True)


def _of_records(trail: Trail) -> Trail:
    """A function of each record: what was reduced below it is the model's own affair."""
    return Trail(picked=trail.picked, paired=trail.paired, wide=trail.wide, unclear=trail.unclear)


def dims_of(node: Any, given: Sequence[int]) -> set[int]:
    """The dimensions that an operation runs over: the saved ones, or all."""
    dims = getattr(node, "_saved_dim", None)
    if not given or dims is None or dims == ():
        return set(range(len(given)))
    return {_signed(dim) % len(given) for dim in ((dims,) if isinstance(dims, int) else dims)}


def _through_loss(node: Any, reduction: int, given: Sequence[int], trail: Trail) -> Trail:
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
        ignored = _signed(node._saved_ignore_index)
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


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
