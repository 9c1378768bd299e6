"""How often spectral control was better than DP-SGD, over all tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .files import read_json
from .spec import names, tables_of

_BASELINE = "DP-SGD"
_FORMS = ("WW-DP-SGD", "WW-DP-SGD, practical form")
_MEASURES = ("accuracy", "auc", "rmse", "metric")


def tally(out: Path) -> list[str]:
    """A paragraph of the page of claims; empty if nothing can be counted yet."""
    found: dict[str, dict[Any, bool | None]] = {form: {} for form in _FORMS}
    used = []
    for name in names():
        for folder in tables_of(out, name)[:1]:
            table = read_json(folder / "table.json")
            cells = list(_comparisons(table))
            used += [f"`{name}`"] if cells else []
            for form, cell in cells:
                # The same runs may be in several tables.
                found[form].setdefault(tuple(sorted(cell["values"].items())), cell["better"])
    if not used:
        return []
    counts = {form: Counter(verdicts.values()) for form, verdicts in found.items()}
    told = [
        f"{form} {n[True]} better, {n[False]} worse, {n[None]} can't be told"
        for form, n in counts.items()
    ]
    return [
        (
            f"**Each form against {_BASELINE}**, over all tables in which both stand with two seeds"
            f" or more ({', '.join(used)}), each comparison of accuracy, AUC or RMSE once:"
            f" {'; '.join(told)}. By 95 % intervals, which are not widened for the number of"
            " comparisons."
        ),
        "",
    ]


def _comparisons(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if table["baseline"] != _BASELINE:
        return
    for line in table["rows"]:
        for detail, cell in zip(table["column_details"], line["cells"], strict=True):
            if (
                line["label"] in _FORMS
                and detail["measure"] in _MEASURES
                and cell
                and (cell["difference"] or {}).get("n", 0) > 1
            ):
                yield line["label"], cell
