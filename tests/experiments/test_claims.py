"""The rules by which a claim of the paper is judged, on tables made up for them; and the page that
stands in docs."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from zetaclip.experiments import claims, plan, spec

ROOT = Path(__file__).resolve().parents[2]
NOISE = np.random.default_rng(0).normal(0, 1, (20, 20))


def a_cell(mean, row, spread=0.05, seeds=5, published=None, effect=0.2, good=1, diverged=0):
    """A mean with noise of its own; no cell at all for a mean of None."""
    if mean is None:
        return None
    values = {str(seed + 1): mean + spread * NOISE[row, seed] for seed in range(seeds)}
    told = None if published is None else {"mean": published, "std": None}
    rules = {"looks": [5, 10, 20], "effect": effect, "overlap": 0.0, "step": 0.01}
    common = {"values": values, "published": told, "rules": rules, "good": good}
    return {"ours": {"mean": mean, "n": seeds}, "diverged": diverged, **common}


def a_table(columns, baseline="B", measure="accuracy"):
    """Columns of {row: keywords of a_cell}."""
    rows = list(dict.fromkeys(row for column in columns for row in column))
    return {
        "name": "clip-sweep",
        "baseline": baseline,
        "columns": [f"column {n}" for n in range(len(columns))],
        "column_details": [
            {"condition": f"column {n}", "measure": measure} for n in range(len(columns))
        ],
        "rows": [
            {
                "label": row,
                "group": "",
                "method": "m",
                "cells": [
                    a_cell(row=number, **column[row]) if row in column else None
                    for column in columns
                ],
            }
            for number, row in enumerate(rows)
        ],
    }


def words(tmp_path, claim, *columns, **kwargs):
    """The word of every cell of one claim."""
    folder = tmp_path / "clip-sweep"
    folder.mkdir(exist_ok=True)
    (folder / "table.json").write_text(json.dumps(a_table(columns, **kwargs)))
    told = {"id": "c", "experiment": "clip-sweep", "measure": "accuracy", **claim}
    return [cell.word for cell in claims.judge([told], tmp_path)["c"]]


def test_better_in_every_word(tmp_path):
    better = {"rule": "better", "row": "A"}
    base = {"mean": 90.0, "published": 94.0}
    for ours, word in (
        ({"mean": 91.0}, "better"),
        ({"mean": 89.0}, "worse"),
        ({"mean": 90.0, "spread": 0.02}, "equivalent"),
        ({"mean": 90.1, "spread": 0.3, "published": 96.0}, "the published gain is excluded"),
        ({"mean": 90.2, "spread": 0.3}, "can't be told"),
        ({"mean": 91.0, "seeds": 4}, "can't be told"),  # before the first look
        ({"mean": 91.0, "diverged": 1}, "can't be told"),
        ({"mean": 91.0, "seeds": 0}, "not run"),
        ({"mean": 91.0, "good": -1}, "worse"),  # lower is better
    ):
        assert words(tmp_path, better, {"A": ours, "B": base}) == [word], ours
    assert words(tmp_path, better, {"A": {"mean": None}, "B": base}) == []


def test_every_cell_has_its_word(tmp_path):
    base = {"mean": 90.0, "spread": 0.01}
    found = words(
        tmp_path,
        {"rule": "better", "row": "A"},
        {"A": {"mean": 91.0}, "B": base},
        {"A": {"mean": 90.0, "spread": 0.01}, "B": base},
        {"B": base},  # a column that the row is not in
    )
    assert found == ["better", "equivalent"]


def test_many_cells_need_more_proof(tmp_path):
    """A difference that is proved alone is not proved among forty that are open."""
    base, sure = {"mean": 90.0, "spread": 0.1}, {"mean": 90.75, "spread": 0.1}
    vague = {"mean": 90.2, "spread": 1.0}
    claim = {"rule": "better", "row": "A"}
    assert words(tmp_path, claim, {"A": sure, "B": base}) == ["better"]
    many = words(tmp_path, claim, {"A": sure, "B": base}, *[{"A": vague, "B": base}] * 40)
    assert set(many) == {"can't be told"}


def test_the_best_is_better_than_every_rival(tmp_path):
    best = {"rule": "best", "row": "A", "against": ["B", "C"]}
    low, high = {"mean": 90.0}, {"mean": 92.0}
    assert words(tmp_path, best, {"A": {"mean": 91.0}, "B": low, "C": low}) == ["better"]
    assert words(tmp_path, best, {"A": {"mean": 91.0}, "B": low, "C": high}) == ["worse"]
    even = {"mean": 91.0, "spread": 0.02}
    assert words(tmp_path, best, {"A": even, "B": even, "C": even}) == ["equivalent"]
    assert words(tmp_path, best, {"A": even, "B": low, "C": even}) == ["can't be told"]
    # a column with one rival is no contest; a rival that has not run may be the best
    assert words(tmp_path, best, {"A": even, "B": low}) == []
    none = {**low, "seeds": 0}
    assert words(tmp_path, best, {"A": even, "B": low, "C": none}) == ["can't be told"]
    assert words(tmp_path, best, {"A": even, "B": high, "C": none}) == ["worse"]


def test_as_good_as_all_rivals(tmp_path):
    """Better than one rival and like the other is neither better nor equivalent."""
    rule = {"rule": "no_worse", "row": "A", "against": ["B", "C"]}
    even, low, high = ({"mean": mean, "spread": 0.02} for mean in (91.0, 90.0, 92.0))
    assert words(tmp_path, rule, {"A": even, "B": even, "C": low}) == ["holds"]
    assert words(tmp_path, rule, {"A": even, "B": even, "C": high}) == ["does not hold"]
    slightly = {"mean": 91.2, "spread": 0.2}  # the rival may be ahead by more than 0.2, or not
    assert words(tmp_path, rule, {"A": even, "B": slightly, "C": low}) == ["can't be told"]
    none = {**low, "seeds": 0}
    assert words(tmp_path, rule, {"A": even, "B": even, "C": none}) == ["can't be told"]
    assert words(tmp_path, rule, {"A": none, "B": even, "C": none}) == ["not run"]


def test_what_has_not_been_run_counts(tmp_path):
    """A word must not depend on which of the planned cells happen to have been run."""
    base, sure = {"mean": 90.0, "spread": 0.1}, {"mean": 90.75, "spread": 0.1}
    none, claim = {**base, "seeds": 0}, {"rule": "better", "row": "A"}
    assert words(tmp_path, claim, {"A": sure, "B": base}) == ["better"]
    many = words(tmp_path, claim, {"A": sure, "B": base}, *[{"A": none, "B": base}] * 40)
    assert many == ["can't be told", *["not run"] * 40]
    (tmp_path / "clip-sweep" / "table.json").unlink()
    told = {"id": "c", "experiment": "clip-sweep", "measure": "accuracy", **claim}
    told["row"] = "WW-DP-SGD, C_0=1.00"
    planned = claims.judge([told], tmp_path)["c"]
    assert [cell.word for cell in planned] == ["not run"] * 2
    # better, worse, equivalent; the published gain of 0.5 may be excluded
    assert all(set(cell.p.values()) == {1.0} and len(cell.p) == 4 for cell in planned)


def test_a_training_that_diverged_is_no_gap(tmp_path):
    best = {"rule": "best", "row": "A", "against": ["B", "C", "D"]}
    even, lost = {"mean": 91.0}, {"mean": 91.0, "diverged": 2}
    none = {**even, "seeds": 0}
    told = {"id": "c", "experiment": "clip-sweep", "measure": "accuracy", **best}
    assert words(tmp_path, best, {"A": even, "B": even, "C": lost, "D": none}) == ["can't be told"]
    (cell,) = claims.judge([told], tmp_path)["c"]
    assert cell.measured.endswith("; of the others 1 diverged, 1 not run")
    assert words(tmp_path, best, {"A": lost, "B": even, "C": even}) == ["can't be told"]
    (cell,) = claims.judge([told], tmp_path)["c"]
    assert cell.measured == "training diverged: A"


def test_the_same_training_is_no_rival(tmp_path):
    """A bound that is never reached can be taken away: that excludes no gain."""
    best = {"rule": "best", "row": "A", "against": ["A2", "B", "C"]}
    ours, low = {"mean": 91.0, "published": 92.0}, {"mean": 90.7, "spread": 0.2}
    table = a_table([{"A": ours, "A2": {**ours, "published": 91.0}, "B": low, "C": low}])
    first, second = table["rows"][:2]
    second["cells"][0]["values"] = first["cells"][0]["values"]
    folder = tmp_path / "clip-sweep"
    folder.mkdir()
    (folder / "table.json").write_text(json.dumps(table))
    told = {"id": "c", "experiment": "clip-sweep", "measure": "accuracy", **best}
    (cell,) = claims.judge([told], tmp_path)["c"]
    assert cell.word == "can't be told" and cell.measured.endswith("; the same training: A2")
    assert "best of 2 others" in cell.measured


def test_alike_means_all_starts(tmp_path):
    alike = {"rule": "alike", "row": "A", "rows": ["A", "B", "C"]}
    even, low = {"mean": 91.0, "spread": 0.02}, {"mean": 90.0, "spread": 0.02}
    assert words(tmp_path, alike, {"A": even, "B": even, "C": even}) == ["equivalent"]
    assert words(tmp_path, alike, {"A": even, "B": even, "C": low}) == ["worse"]
    vague = {"mean": 91.0, "spread": 1.0}
    assert words(tmp_path, alike, {"A": even, "B": even, "C": vague}) == ["can't be told"]


def test_rising_and_falling(tmp_path):
    steps = [{"mean": mean, "spread": 0.02} for mean in (1.0, 1.2, 1.5)]
    column = dict(zip("ABC", steps, strict=True))
    rows = ["A", "B", "C"]
    for rule, order, word in (
        ("rising", rows, "holds"),
        ("falling", rows, "does not hold"),
        ("rising", ["A", "C", "B"], "does not hold"),
    ):
        assert words(tmp_path, {"rule": rule, "rows": order}, column) == [word]
    flat = {**column, "B": {"mean": 1.0, "spread": 0.3}}
    assert words(tmp_path, {"rule": "rising", "rows": rows}, flat) == ["can't be told"]


def test_below(tmp_path):
    for limit, word in ((3.0, "holds"), (1.0, "does not hold"), (2.01, "can't be told")):
        claim = {"rule": "below", "row": "A", "limit": limit}
        assert words(tmp_path, claim, {"A": {"mean": 2.0}}, baseline="") == [word]


def test_claims_name_rows_and_columns_that_exist():
    for claim in spec.read_toml(spec.FOLDER / "_claims.toml")["claims"]:
        if claim["rule"] in ("epsilon", "algebra"):
            continue
        experiment = spec.load(claim["experiment"])
        rows = {row["label"] for row in experiment.rows}
        assert {claim.get("row"), *claim.get("rows", []), *claim.get("against", [])} - {
            None
        } <= rows
        assert claim["measure"] in {column.measure for column in plan.make_plan(experiment).columns}
        assert claim["rule"] in claims._RULES


PAPER = ROOT.parent / "shared/seed/000_32f4d8cacd2adeeb.txt"


@pytest.mark.skipif(
    not PAPER.exists(), reason="the paper's LaTeX source is not beside this checkout"
)
def test_claims_name_the_section_of_their_table():
    numbers, where = [0, 0, 0], {}
    for level, label in re.findall(
        r"\\((?:sub)*section)\{|\\label\{tab:(\w+)\}", PAPER.read_text(encoding="utf-8")
    ):
        if label:
            where[label] = ".".join(str(number) for number in numbers if number)
        else:
            depth = level.count("sub")
            numbers = [*numbers[:depth], numbers[depth] + 1, *[0] * (2 - depth)]
    told = [claim["where"] for claim in spec.read_toml(spec.FOLDER / "_claims.toml")["claims"]]
    named = [re.fullmatch(r"Section ([\d.]+), Table (\w+)", text) for text in told]
    assert sum(match is not None for match in named) == 7
    assert all(where[match[2]] == match[1] for match in named if match)


def test_the_papers_epsilon(tmp_path):
    claim = next(
        c for c in spec.read_toml(spec.FOLDER / "_claims.toml")["claims"] if c["rule"] == "epsilon"
    )
    (found,) = claims.judge([claim], tmp_path)["epsilon"]
    assert found.word == "does not hold" and "0.83" in found.measured and "1.02" in found.measured
    (other,) = claims.judge([{**claim, "sigma": 0.5068}], tmp_path)["epsilon"]
    assert other.word == "holds"


def test_the_page_of_claims_is_up_to_date():
    assert (ROOT / "docs/reproduction.md").read_text(encoding="utf-8") == claims.markdown(
        ROOT / "results"
    ), "run: zetaclip reproduce --claims docs/reproduction.md"


def test_the_page_of_claims_is_written_as_the_readme_prints_the_command(tmp_path, capsys):
    from zetaclip.cli import main

    shutil.copytree(ROOT / "results" / "imagenet", tmp_path / "imagenet")
    assert main(["reproduce", "--claims", "--out", str(tmp_path)]) == 0
    page = tmp_path / "reproduction.md"
    assert str(page) in capsys.readouterr().out
    assert page.read_text().startswith("# Reproduction, claim by claim")
