"""A checkpoint's matrices as a table, as JSON, or as a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from .eigenvalues import as_matrix, eigenvalues
from .fits import Array, TailFit
from .null import Null, random_null
from .tail import fit_tail


@dataclass(frozen=True)
class Row:
    """One matrix: its fit, the null of its shape, and its spectrum."""

    name: str
    shape: tuple[int, int]
    fit: TailFit
    null: Null
    spectrum: Array

    @property
    def verdict(self) -> str:
        """Either "ok", or why the fit is weak or failed."""
        if not self.fit.ok:
            return f"no fit: {self.fit.reason}"
        return f"weak: {self.fit.reason}" if self.fit.weak else "ok"


def examine(matrices: Mapping[str, Tensor], method: str) -> list[Row]:
    """Fits every matrix by ``method`` ("rank", "hill" or "ks"), in the given order."""
    rows = []
    for name, weight in matrices.items():
        matrix = as_matrix(weight)
        shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        spectrum = eigenvalues(matrix).numpy()
        fit = fit_tail(spectrum, method, shape=shape)
        rows.append(Row(name, shape, fit, random_null(shape, method), spectrum))
    return rows


def as_table(rows: Sequence[Row]) -> str:
    """Aligned columns in plain ASCII, which every terminal can show."""
    head = ("layer", "shape", "zeta", "+-", "lambda_min", "tail", "KS", "random reads", "verdict")
    lines = [head]
    for row in rows:
        fit, null = row.fit, row.null
        noise = f"{null.median:.2f} ({null.low:.2f} to {null.high:.2f})" if null.ok else "-"
        numbers = (
            f"{fit.zeta:.3f}",
            f"{fit.stderr:.3f}",
            f"{fit.lambda_min:.4g}",
            f"{fit.n_tail}",
            f"{fit.ks:.3f}",
        )
        shown = numbers if fit.ok else ("-",) * 5
        lines.append((row.name, f"{row.shape[0]}x{row.shape[1]}", *shown, noise, row.verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def as_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain values for JSON; numbers that could not be fitted are None, as JSON has no infinity."""
    records = []
    for row in rows:
        fit = asdict(row.fit)
        for key in ("zeta", "lambda_min", "ks", "stderr"):
            if not (row.fit.ok and math.isfinite(fit[key])):
                fit[key] = None
        null = (
            {"median": row.null.median, "low": row.null.low, "high": row.null.high}
            if row.null.ok
            else None
        )
        records.append(
            {
                "layer": row.name,
                "shape": list(row.shape),
                **fit,
                "random": null,
                "verdict": row.verdict,
            }
        )
    return records


def plot(rows: Sequence[Row], path: str) -> None:
    """Saves a log-log plot of rank against eigenvalue per matrix, with the fitted tail."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(rows))
    height = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(height, columns, squeeze=False)
    for axes, row in zip(grid.flat, rows):
        values = np.sort(row.spectrum[np.isfinite(row.spectrum) & (row.spectrum > 0)])[::-1]
        if len(values):
            axes.loglog(
                values, np.arange(1, len(values) + 1) / len(values), ".", ms=3, color="0.35"
            )
        if row.fit.ok:
            ends = np.array([row.fit.lambda_min, values[0]])
            share = row.fit.n_tail / len(values)
            axes.loglog(ends, share * (ends / ends[0]) ** (1.0 - row.fit.zeta), color="C3", lw=1.5)
            axes.axvline(row.fit.lambda_min, color="C3", lw=0.6, ls=":")
            axes.set_title(f"{row.name}: ζ = {row.fit.zeta:.2f} ± {row.fit.stderr:.2f}", fontsize=9)
        else:
            axes.set_title(f"{row.name}: no fit", fontsize=9)
        axes.set_xlabel("λ", fontsize=8)
        axes.set_ylabel("fraction above λ", fontsize=8)
        axes.tick_params(labelsize=7)
    for axes in list(grid.flat)[len(rows) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=110)
