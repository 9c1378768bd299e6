"""What is printed during a run: a bar on a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

METRICS = {"accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE"}


def shown(metric: str, value: float | None) -> str:
    """A metric with its name: "accuracy 96.1 %"."""
    if value is None:
        return f"{METRICS[metric]} n/a"
    return (
        f"{METRICS[metric]} {100 * value:.1f} %"
        if metric == "accuracy"
        else f"{METRICS[metric]} {value:.4f}"
    )


class _Bar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def step(self, done: int, postfix: Callable[[], dict[str, Any]]) -> None:
        """Moves the bar. The texts are made only when it is about to be drawn."""
        if self._bar is None:
            return
        bar = self._bar
        if (
            done - bar.last_print_n >= bar.miniters
            and bar._time() - bar.last_print_t >= bar.mininterval
        ):
            bar.set_postfix(postfix(), refresh=False)
        bar.update(done - bar.n)


class Display:
    """Prints progress.

    Args:
        quiet: Print nothing.
        stream: Where to; default: stderr.
    """

    def __init__(self, quiet: bool = False, stream: IO[str] | None = None) -> None:
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._bar: Any = None

    def say(self, text: str) -> None:
        """Prints a line."""
        if not self._quiet:
            self._write(text)

    @contextmanager
    def bar(self, done: int, total: int, unit: str = "step") -> Iterator[_Bar]:
        """Shows a bar inside the block, if the stream is a terminal.

        Args:
            done: How far the work is.
            total: How much there is.
            unit: What is counted.
        """
        if self._quiet or not self._stream.isatty():
            yield _Bar(None)
            return
        from tqdm import tqdm

        self._bar = tqdm(
            total=total,
            initial=done,
            unit=unit,
            file=self._stream,
            dynamic_ncols=True,
            leave=False,
        )
        try:
            yield _Bar(self._bar)
        finally:
            self._bar.close()
            self._bar = None

    def epoch(self, line: dict[str, Any], metric: str, epochs: int) -> None:
        """Prints the line of an epoch.

        Args:
            line: The line of metrics.jsonl.
            metric: The name of the main metric.
            epochs: The planned number of epochs.
        """
        if self._quiet:
            return
        parts = [f"epoch {line['epoch']}/{epochs}"]
        if line.get("metric") is not None or "loss" in line:
            parts.append(shown(metric, line.get("metric")))
        if line.get("epsilon") is not None:
            parts.append(f"ε {line['epsilon']:.3g}")
        if line.get("clip") is not None:
            parts.append(f"C {line['clip']:.3g}")
        if line.get("zeta") is not None:
            parts.append(f"ζ̂ {line['zeta']:.3g}")
        parts.append(f"{line['seconds']['train']:.1f} s")
        self._write("  ".join(parts))

    def _write(self, text: str) -> None:
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)
