"""A table that is also the output layer, as in most language models, without its gradients.

The table gives the vectors of a record's tokens, and its rows are multiplied with the last states.
A record's gradient is the sum of both uses. A lookup is a product with one-hot vectors, so the sum
has a norm by Gram matrices like any other sequence; only the table's width in memory is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .contributions import Lookup, Outer
from .grams import gram, gram_share, trusted


@dataclass(frozen=True)
class Tied:
    """Gradients of a table that was indexed and multiplied: the sum of both.

    Attributes:
        lookup: What indexing gives.
        outer: What the matrix product gives.
    """

    lookup: Lookup
    outer: Outer

    @property
    def block(self) -> slice | None:
        """The rows of the parameter that the gradients are for; None for all."""
        return self.outer.block

    def norms(self) -> Tensor:
        """The norm of each example's gradient; NaN if it is unreliable.

        With x and g of the product, ids and e of the lookup, the squared norm is the sum of
        <x[s], x[t]> <g[s], g[t]>, of <e[s], e[t]> where ids[s] = ids[t], and of twice
        <x[t], e[s]> g[t, ids[s]], over all pairs of positions, in float64.
        """
        rows = range(len(self.lookup.ids))
        return torch.cat([self.take(slice(row, row + 1))._norms() for row in rows])

    def _norms(self) -> Tensor:
        x, g = self.outer.x.double(), self.outer.g
        ids, e = self.lookup.ids, self.lookup.g.double()
        gram_x, gram_g, gram_e = gram(x), gram(g), gram(e)
        same = ids.unsqueeze(2) == ids.unsqueeze(1)
        picked = g.gather(2, ids.unsqueeze(1).expand(-1, g.shape[1], -1)).double()
        squares = (
            torch.linalg.vecdot(gram_x.flatten(1), gram_g.flatten(1))
            + (gram_e * same).sum((1, 2))
            + 2 * torch.linalg.vecdot(picked.flatten(1), torch.bmm(x, e.mT).flatten(1))
        )
        lengths_g = gram_g.diagonal(dim1=1, dim2=2).sqrt()
        lengths_x = torch.linalg.vector_norm(x, dim=2)
        lengths_e = torch.linalg.vector_norm(e, dim=2)
        return trusted(
            squares.clamp_min_(0).sqrt_(),
            torch.cat([lengths_x, lengths_e], 1),
            torch.cat([lengths_g, torch.ones_like(lengths_e)], 1),
            x.shape[2],
            g.shape[2],
            gram_share(x.shape[1], g.dtype != torch.float64),
        )

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum of the gradients times ``factors``, in float64."""
        self.outer.add_to(out, factors)
        self.lookup.add_to(out, factors)

    def dense(self) -> Tensor:
        """The gradients, with shape (examples, *parameter or block)."""
        return self.lookup.dense().add_(self.outer.dense())

    def take(self, rows: Tensor | slice) -> Tied:
        """The same for these examples only."""
        return Tied(self.lookup.take(rows), self.outer.take(rows))

    def blank(self, rows: Tensor) -> Tied:
        """The same with zero gradients for these examples."""
        return Tied(self.lookup.blank(rows), self.outer.blank(rows))

    def double(self) -> Tied:
        """The same in float64."""
        return Tied(self.lookup.double(), self.outer.double())
