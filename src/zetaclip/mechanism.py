"""The only code that sums, adds noise and divides; whatever it lets out is in the ledger first.

    private gradient = (Σ_i factor_i * gradient_i + noise multiplier * sensitivity * ξ) / L

The sum is over one logical batch, however many chunks it came in; the noise is drawn once, also when the
batch is empty; L = qN is declared, never counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .clipping import Affine, ClipRule, Extra, check_columns, check_factors
from .control import Released
from .gradients import Chunk, Layout, rows
from .randomness import few_gaussians, gaussian, generator, subkey

if TYPE_CHECKING:
    from .distributed import Ranks

# Rows that are added up in float32. Rounding grows with their square; see "Sums are rounded" in docs/sharp-edges.md.
BLOCK = 320


@dataclass(frozen=True)
class Draw:
    """The numbers of one logical batch, each read once: the same C scales the clip and the noise."""

    step: int
    phase: int
    query: str
    batch: int
    clip: float
    noise_multiplier: float
    sample_rate: float
    divisor: float
    noise_key: bytes

    @property
    def coin_key(self) -> bytes:
        return subkey(self.noise_key, "coins")


class Mechanism:
    """Collects one logical batch and releases it.

    **Guarantee.** One record, added or removed, moves the sum by at most ``rule.sensitivity(clip)``, and every own
    query of the rule by at most its declared sensitivity; each gets Gaussian noise of its multiplier times that, and
    a ledger row that says so, written before the noise is drawn.
    **Edge cases.** An empty batch releases noise. A gradient that is not finite counts as zero. A rule whose factors
    don't keep its word stops the run before anything is released.
    """

    def __init__(self, layout: Layout, rule: ClipRule, draw: Draw, affine: Affine | None, write: Callable) -> None:
        self.layout = layout
        self.rule = rule
        self.draw = draw
        self.affine = affine
        self.sensitivity = float(rule.sensitivity(draw.clip))
        self._write = write
        # The clipped sum: what has been added up in float64, and the block of rows that is still in the parameters' dtype.
        self._sum: Tensor | None = None
        self._block: Tensor | None = None
        self._held = 0  # rows in it
        self._extras: dict[str, list[float]] = {}  # sums over the records so far
        self._kinds: dict[str, Extra] = {}
        self._coins: torch.Generator | None = None
        self.begun = False  # whether the noise may have been drawn
        self.records = 0  # how many have been added; secret, used only by the literal form that claims nothing

    def coins(self) -> torch.Generator:
        """Secret coins of this batch, for rules that toss them."""
        if self._coins is None:
            self._coins = generator(self.draw.coin_key)
        return self._coins

    def absorb(self, chunk: Chunk) -> None:
        """Takes one chunk in: bounds its examples and adds them to the sum."""
        self.records += chunk.rows
        if self.affine is not None:
            self._absorb_mapped(chunk)
            return
        factors = self._factors(chunk.norms())
        for part, own in chunk.blocks(factors, BLOCK):
            target, fresh = self._room(part.rows)
            part.add_weighted_sum(target, own, fresh)

    def _absorb_mapped(self, chunk: Chunk) -> None:
        """The same where a released map comes before the norm: the gradients themselves are made, a few at a time."""
        assert self.affine is not None
        for gradients in chunk.pieces():
            mapped = self.affine.apply(gradients)
            norms = torch.linalg.vector_norm(mapped, dim=1).double()
            far = ~torch.isfinite(norms)
            if bool(far.any()):
                mapped, norms = mapped.masked_fill(far.unsqueeze(1), 0), norms.masked_fill(far, 0)
            weights = self._factors(norms).to(mapped.dtype)
            for some, own in zip(mapped.split(BLOCK), weights.split(BLOCK), strict=True):
                target, fresh = self._room(len(some))
                torch.addmv(target, some.t(), own, beta=int(not fresh), out=target)

    def _room(self, rows: int) -> tuple[Tensor, bool]:
        """Where these rows are to be added, and whether nothing is there yet.

        Long sums in float32 drop what is small beside them: records made for it could turn one more of them into many. So blocks
        of few rows are added up in float64.
        """
        assert rows <= BLOCK
        layout = self.layout
        if self._block is None:
            self._block = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
        elif self._held + rows > BLOCK:
            if self._sum is None:
                self._sum = self._block.to(torch.float64, copy=True)
            else:
                self._sum.add_(self._block)
            self._held = 0
        fresh, self._held = self._held == 0, self._held + rows
        return self._block, fresh

    def _factors(self, norms: Tensor) -> Tensor:
        factors = self.rule.factors(norms, self.draw.clip, self.coins)
        joint = self._add_extras(norms)
        check_factors(norms, factors, joint, self.sensitivity, self.rule.name)
        return factors

    def _add_extras(self, norms: Tensor) -> Tensor | None:
        """Adds the rule's extra columns; returns those that share the sum's Gaussian."""
        extras = getattr(self.rule, "extras", None)
        if extras is None:
            return None
        shared = []
        for name, extra in extras(norms, self.draw.clip).items():
            if extra.sensitivity is None:
                shared.append(extra.columns)
            else:
                if extra.noise_multiplier is None:
                    raise ValueError(f"the clip rule {self.rule.name!r} gives its query {name!r} no noise_multiplier")
                check_columns(extra.columns, extra.sensitivity, f"{self.rule.name}: {name}")
            totals = rows.sums(extra.columns)
            before = self._extras.get(name)
            self._extras[name] = totals if before is None else [a + b for a, b in zip(before, totals, strict=True)]
            self._kinds[name] = extra
        if len(shared) < 2:
            return shared[0] if shared else None
        return torch.cat(shared, dim=1)

    def _declare_extras(self) -> None:
        """An empty batch has no columns, but releases them all the same."""
        extras = getattr(self.rule, "extras", None)
        if extras is not None and not self._kinds:
            nothing = torch.zeros(0, dtype=torch.float64)
            for name, extra in extras(nothing, self.draw.clip).items():
                self._extras[name] = [0.0] * extra.columns.shape[1]
                self._kinds[name] = extra

    def release(self, ranks: Ranks | None, divisor: float) -> Released:
        """Noise, ledger, division. With several ``ranks``, rank 0 brings the noise of all, before anything is added up."""
        draw = self.draw
        self._declare_extras()
        std = draw.noise_multiplier * self.sensitivity
        lines = [self._row(draw.query, self.sensitivity, draw.noise_multiplier)]
        for name, extra in self._kinds.items():
            if extra.sensitivity is not None:
                assert extra.noise_multiplier is not None
                lines.append(self._row(f"{draw.query}: {name}", extra.sensitivity, extra.noise_multiplier))
        self.begun = True
        try:
            self._write(lines)  # write-ahead: counted even if we die before the noise is drawn
        except Exception as error:
            if ranks is not None:
                self.refuse(ranks, str(error))
            raise

        layout, owner = self.layout, ranks is None or ranks.first
        if owner:
            drawn = gaussian(subkey(draw.noise_key, "sum"), layout.numel, layout.dtype, std / divisor)
            gradient = drawn.to(layout.device)
        else:
            gradient = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        # Sum and noise meet in one addition. Were the records added to the noise one after the other, each addition would round
        # it, and many could push all of its values in some interval onto the same float.
        if self._sum is not None and self._block is not None:
            total = self._sum.add_(self._block)
            gradient = total.mul_(1 / divisor).add_(gradient).to(layout.dtype)
        elif self._block is not None:
            gradient.add_(self._block, alpha=1 / divisor)
        self._sum = self._block = None

        released: dict[str, Tensor] = {}
        for name, values in self._extras.items():
            extra = self._kinds[name]
            scale = std if extra.sensitivity is None else (extra.noise_multiplier or 0.0) * extra.sensitivity
            if owner:
                noise = few_gaussians(subkey(draw.noise_key, f"extra {name}"), len(values))
                values = [value + scale * z for value, z in zip(values, noise, strict=True)]
            released[name] = torch.tensor([value / divisor for value in values], dtype=torch.float64)
        if ranks is not None:
            released = self._add_up(ranks, gradient, released)
        if self.affine is not None:
            gradient = self.affine.undo(gradient)
        return Released(draw.step, draw.phase, draw.clip, self.sensitivity, std / divisor, gradient, released)

    def _add_up(self, ranks: Ranks, gradient: Tensor, extras: dict[str, Tensor]) -> dict[str, Tensor]:
        """One meeting of all ranks; ``gradient`` in place."""
        flat = torch.cat([torch.zeros(0, dtype=torch.float64), *extras.values()])
        total = ranks.add_up(gradient, flat, self._what)
        return dict(zip(extras, total.split([len(values) for values in extras.values()]), strict=True))

    def refuse(self, ranks: Ranks, why: str) -> None:
        """Takes part in the meeting of all ranks with zeros and the reason: then nothing is released on any of them."""
        self.begun = True
        self._extras, self._kinds = {}, {}
        self._declare_extras()
        layout, size = self.layout, sum(len(values) for values in self._extras.values())
        nothing = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        ranks.add_up(nothing, torch.zeros(size, dtype=torch.float64), self._what, refusal=why)

    @property
    def _what(self) -> str:
        return f"the {self.draw.query} of update {self.draw.step + 1}"

    def _row(self, query: str, sensitivity: float, multiplier: float) -> dict[str, Any]:
        return {
            "step": self.draw.step,
            "batch": self.draw.batch,
            "query": query,
            "sensitivity": sensitivity,
            "noise_multiplier": multiplier,
            "noise_std": multiplier * sensitivity,
            "sample_rate": self.draw.sample_rate,
        }
