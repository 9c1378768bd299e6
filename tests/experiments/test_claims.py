"""The rules by which a claim of the paper is judged, on tables made up for them; and the page that
stands in docs."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from zetaclip.experiments import claims, plan, spec

ROOT = Path(__file__).resolve().parents[2]


def a_table(cells, good=1, rows=("A", "B"), baseline="B", measure="accuracy", name="clip-sweep"):
    return {
        "name": name,
        "profile": "lite",
        "baseline": baseline,
        "columns": ["x"],
        "column_details": [{"condition": "", "measure": measure, "x": None, "good": good}],
        "rows": [
            {"label": row, "group": "", "method": "m", "cells": [cell]}
            for row, cell in zip(rows, cells)
        ],
    }


def a_cell(mean, low=None, high=None, better=None, values=None):
    """Three seeds around a mean, or the given values by seed. Two means differ by a hair more in
    the third: equal differences tell nothing."""
    values = values or {"1": mean - 0.1, "2": mean, "3": mean + 0.1 + 1e-6 * mean}
    difference = (
        None if low is None else {"mean": (low + high) / 2, "low": low, "high": high, "n": 3}
    )
    std = np.std(list(values.values()), ddof=1) if len(values) > 1 else None
    ours = {"mean": mean, "std": std, "n": len(values)}
    return {"ours": ours, "values": values, "difference": difference, "better": better}


NOTHING = {"ours": None, "values": {}, "difference": None, "better": None}


def verdict(tmp_path, claim, table):
    folder = tmp_path / "clip-sweep"
    folder.mkdir(exist_ok=True)
    (folder / "table.json").write_text(json.dumps(table))
    return claims.judge({"experiment": "clip-sweep", "measure": "accuracy", **claim}, tmp_path).word


def test_better(tmp_path):
    better = {"rule": "better", "row": "A"}
    for cell, word in (
        (a_cell(2, 0.5, 1.5, True), "holds"),
        (a_cell(2, -1.5, -0.5, False), "does not hold"),
        (a_cell(2, -0.5, 1.5, None), "can't be told"),  # the interval holds zero
        (NOTHING, "not tested here"),
    ):
        assert verdict(tmp_path, better, a_table([cell, a_cell(1)])) == word
    single = a_cell(2) | {"difference": {"mean": 1.0, "low": None, "high": None, "n": 1}}
    assert verdict(tmp_path, better, a_table([single, a_cell(1)])) == "can't be told"
    found = claims.judge({"experiment": "clip-sweep", "measure": "accuracy", **better}, tmp_path)
    assert "+1.00 (one seed)" in found.measured


def test_the_tally_counts_every_comparison_once(tmp_path):
    from zetaclip.experiments.tally import tally

    assert tally(tmp_path) == []
    forms = ("WW-DP-SGD", "WW-DP-SGD, practical form", "DP-SGD")
    single = a_cell(2) | {"difference": {"mean": 1.0, "low": None, "high": None, "n": 1}}
    tables = {
        "rates": [a_cell(2, 0.5, 1.5, True), a_cell(0, -1.5, -0.5, False), a_cell(1)],
        "iid": [
            a_cell(2, 0.5, 1.5, True),
            a_cell(3, -1.5, 0.5, None),
            a_cell(1),
        ],  # the first one's runs again
        "noniid": [single, NOTHING, a_cell(1)],
    }
    for name, cells in tables.items():
        (tmp_path / name).mkdir()
        table = a_table(cells, rows=forms, baseline="DP-SGD", name=name)
        (tmp_path / name / "table.json").write_text(json.dumps(table))
    (text, _) = tally(tmp_path)
    assert "(`iid`, `rates`)" in text
    assert "WW-DP-SGD 1 better, 0 worse, 0 can't be told" in text
    assert "WW-DP-SGD, practical form 0 better, 1 worse, 1 can't be told" in text


def test_without_loss(tmp_path):
    """Two rows that are one training: nothing against "best", but a part that changes nothing can
    be taken away."""
    best = {"rule": "best", "row": "A", "against": ["B"]}
    same = a_table([a_cell(2), a_cell(2)])
    assert verdict(tmp_path, best, same) == "can't be told"
    assert verdict(tmp_path, best | {"strict": True}, same) == "does not hold"
    near = a_table([a_cell(2), a_cell(2, values={"1": 1.8, "2": 2.0, "3": 2.2})])
    assert verdict(tmp_path, best | {"strict": True}, near) == "can't be told"
    assert verdict(tmp_path, best | {"strict": True}, a_table([a_cell(2), a_cell(1)])) == "holds"
    one = a_table([a_cell(2, values={"1": 2.0}), a_cell(2, values={"1": 2.0})])
    assert verdict(tmp_path, best | {"strict": True}, one) == "can't be told"


def test_below(tmp_path):
    below = {"rule": "below", "row": "A", "limit": 1.5}
    assert verdict(tmp_path, below, a_table([a_cell(1), a_cell(9)])) == "holds"
    assert verdict(tmp_path, below, a_table([a_cell(2), a_cell(0)])) == "does not hold"
    # 0.1 / sqrt(3) times Student's 4.303 for two degrees of freedom: 0.248 to either side.
    for mean, word in (
        (1.24, "holds"),
        (1.26, "can't be told"),
        (1.74, "can't be told"),
        (1.76, "does not hold"),
    ):
        assert verdict(tmp_path, below, a_table([a_cell(mean), a_cell(9)])) == word
    assert (
        verdict(tmp_path, below, a_table([a_cell(1, values={"1": 1.0}), a_cell(9)]))
        == "can't be told"
    )


def test_rising_and_falling(tmp_path):
    rising = {"rule": "rising", "rows": ["A", "B"]}
    assert verdict(tmp_path, rising, a_table([a_cell(1), a_cell(2)])) == "holds"
    assert verdict(tmp_path, rising, a_table([a_cell(2), a_cell(1)])) == "does not hold"
    assert (
        verdict(tmp_path, {**rising, "rule": "falling"}, a_table([a_cell(2), a_cell(1)])) == "holds"
    )
    # The means rise by 0.5, seed by seed by -1, 0.5 and 2.
    noisy = a_cell(1.5, values={"1": -0.1, "2": 1.5, "3": 3.1})
    assert verdict(tmp_path, rising, a_table([a_cell(1), noisy])) == "can't be told"
    other = a_cell(2, values={"4": 1.9, "5": 2.1})  # no seed in common
    assert verdict(tmp_path, rising, a_table([a_cell(1), other])) == "can't be told"


def test_feedback_must_beat_what_its_controls_do_not(tmp_path):
    only, three = {"rule": "only", "row": "A", "against": ["C", "D"]}, ("A", "B", "C", "D")
    feedback, baseline, fails = a_cell(2, 0.5, 1.5, True), a_cell(1), a_cell(1, -1, 1, None)
    wins, worse = a_cell(2, 0.5, 1.5, True), a_cell(0, -1.5, -0.5, False)
    single = a_cell(4) | {"difference": {"mean": 3.0, "low": None, "high": None, "n": 1}}
    for cells, word in (
        ((feedback, fails, fails), "holds"),
        ((feedback, fails, wins), "does not hold"),
        ((feedback, NOTHING, wins), "does not hold"),
        ((feedback, fails, NOTHING), "can't be told"),  # the one that is missing might do it
        ((feedback, fails, single), "can't be told"),
        ((worse, NOTHING, NOTHING), "does not hold"),
        ((a_cell(2, -0.5, 1.5, None), fails, fails), "can't be told"),
        ((NOTHING, fails, fails), "not tested here"),
    ):
        own, *controls = cells
        assert verdict(tmp_path, only, a_table([own, baseline, *controls], rows=three)) == word


def test_comparable_is_narrower_and_near(tmp_path):
    rows = ("A", "B", "C", "D")
    rule = {"rule": "narrower", "row": "A", "rows": ["A", "B"], "against": ["C", "D"], "limit": 1.0}
    cells = [a_cell(1), a_cell(1.5), a_cell(1), a_cell(9)]
    assert verdict(tmp_path, rule, a_table(cells, rows=rows)) == "holds"
    assert verdict(tmp_path, rule, a_table(cells[::-1], rows=rows)) == "does not hold"
    far = [
        a_cell(1),
        a_cell(8.0),
        a_cell(1),
        a_cell(12),
    ]  # narrower than 11, and seven points apart
    assert verdict(tmp_path, rule, a_table(far, rows=rows)) == "does not hold"
    found = claims.judge({"experiment": "clip-sweep", "measure": "accuracy", **rule}, tmp_path)
    assert "range 7.00 against 11.00, up to 7.00 from A (limit 1)" in found.measured
    absent = [a_cell(1), NOTHING, a_cell(1), a_cell(12)]
    assert verdict(tmp_path, rule, a_table(absent, rows=rows)) == "not tested here"
    single = [a_cell(1), a_cell(1.5), a_cell(1), a_cell(9, values={"1": 9.0})]
    assert verdict(tmp_path, rule, a_table(single, rows=rows)) == "can't be told"


SWEEP = ("WW-DP-SGD, C_0=1.00", "DP-SGD, C=1.00", "practical form, C_0=1.00")


def test_best_is_among_the_papers_private_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "_published_rivals", lambda claim, table, group: [SWEEP[1]])
    best = {"rule": "best", "row": SWEEP[0]}
    assert (
        verdict(tmp_path, best, a_table([a_cell(2), a_cell(1), a_cell(9)], rows=SWEEP)) == "holds"
    )
    assert (
        verdict(tmp_path, best, a_table([a_cell(1), a_cell(2), a_cell(0)], rows=SWEEP))
        == "does not hold"
    )
    assert (
        verdict(tmp_path, best, a_table([a_cell(1), a_cell(2), a_cell(0)], good=-1, rows=SWEEP))
        == "holds"
    )
    monkeypatch.undo()
    table = a_table([a_cell(2), a_cell(1), a_cell(9)], rows=SWEEP)
    assert claims._published_rivals(best, table, "") == [
        SWEEP[1]
    ]  # the practical form is ours, not the paper's


def test_best_is_told_by_common_seeds_and_by_all_rivals(tmp_path):
    rows = ("A", "B", "C")
    best = {"rule": "best", "row": "A", "against": ["B", "C"]}
    close = a_cell(
        1.99, values={"1": 2.09, "2": 1.99, "3": 1.89}
    )  # 0.2 above to 0.2 below, seed by seed
    for cells, word in (
        ((a_cell(2), a_cell(1), a_cell(0)), "holds"),
        ((a_cell(2), close, a_cell(0)), "can't be told"),
        ((close, a_cell(2), a_cell(0)), "can't be told"),
        ((a_cell(2), a_cell(2), a_cell(0)), "can't be told"),  # the same training
        ((a_cell(2), a_cell(1), NOTHING), "can't be told"),
        ((a_cell(2), a_cell(3), NOTHING), "does not hold"),
        ((a_cell(2), a_cell(3, values={"4": 2.9, "5": 3.1}), a_cell(0)), "can't be told"),
        ((a_cell(2), a_cell(3, values={"1": 3.0}), a_cell(0)), "can't be told"),
        ((a_cell(2), NOTHING, NOTHING), "not tested here"),
    ):
        assert verdict(tmp_path, best, a_table(cells, rows=rows)) == word


def test_the_best_of_many_rivals_needs_a_wider_interval(tmp_path):
    # Differences of 0.4, 0.5 and 0.6: t = 8.66, beyond 4.30 (one rival at 95 %) and within 9.92
    # (five at 99 %: 0.05 / 5).
    better = a_cell(1.5, values={"1": 1.3, "2": 1.5, "3": 1.7})
    assert stats.t.ppf(0.975, 2) < 0.5 / (0.1 / math.sqrt(3)) < stats.t.ppf(0.995, 2)
    for count, word in ((1, "does not hold"), (5, "can't be told")):
        names = [f"R{number}" for number in range(count)]
        table = a_table([a_cell(1), better, *[a_cell(0)] * (count - 1)], rows=("A", *names))
        assert verdict(tmp_path, {"rule": "best", "row": "A", "against": names}, table) == word


def test_the_full_protocol_speaks_first(tmp_path):
    claim = {"experiment": "clip-sweep", "measure": "accuracy", "rule": "better", "row": "A"}
    assert verdict(tmp_path, claim, a_table([a_cell(2, 0.5, 1.5, True), a_cell(1)])) == "holds"
    (tmp_path / "clip-sweep-paper").mkdir()
    for cell, word, profile in (
        (a_cell(2), "holds", "lite"),  # without a difference the other table has nothing to say
        (a_cell(2, -0.5, 1.5, None), "can't be told", "paper"),
    ):
        table = a_table([cell, a_cell(1)]) | {"profile": "paper"}
        (tmp_path / "clip-sweep-paper/table.json").write_text(json.dumps(table))
        found = claims.judge(claim, tmp_path)
        assert (found.word, set(found.profiles)) == (word, {profile})


def test_a_diverged_row_proves_nothing(tmp_path):
    rows = SWEEP[:2]
    table = a_table([a_cell(2) | {"diverged": 1}, a_cell(1)], rows=rows)
    for rule in (
        {"rule": "best"},
        {"rule": "below", "limit": 3.0},
        {"rule": "rising", "rows": rows[::-1]},
    ):
        assert verdict(tmp_path, {"row": rows[0], **rule}, table) == "not tested here"


def test_claims_name_rows_and_columns_that_exist():
    for claim in spec.read_toml(spec.FOLDER / "_claims.toml")["claims"]:
        if claim["rule"] == "epsilon":
            continue
        experiment = spec.load(claim["experiment"])
        rows = {row["label"] for row in experiment.rows}
        assert {claim.get("row"), *claim.get("rows", []), *claim.get("against", [])} - {
            None
        } <= rows
        assert claim["measure"] in {
            column.measure for column in plan.make_plan(experiment, "lite").columns
        }
        assert set(claim.get("groups", [])) <= {group["label"] for group in experiment.groups}
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
    assert sum(match is not None for match in named) == 6
    assert all(where[match[2]] == match[1] for match in named if match)


def test_the_papers_epsilon(tmp_path):
    claim = next(
        c for c in spec.read_toml(spec.FOLDER / "_claims.toml")["claims"] if c["rule"] == "epsilon"
    )
    found = claims.judge(claim, tmp_path)
    assert found.word == "does not hold" and "0.83" in found.measured and "1.02" in found.measured
    assert claims.judge({**claim, "sigma": 0.5068}, tmp_path).word == "holds"


def test_the_page_of_claims_is_up_to_date():
    assert (ROOT / "docs/reproduction.md").read_text(encoding="utf-8") == claims.markdown(
        ROOT / "results"
    ), "run: zetaclip reproduce --claims docs/reproduction.md"


def test_the_page_of_claims_is_written_as_the_readme_prints_the_command(tmp_path, capsys):
    from zetaclip.cli import main

    shutil.copytree(ROOT / "results" / "controls", tmp_path / "controls")
    assert main(["reproduce", "--claims", "--out", str(tmp_path)]) == 0
    page = tmp_path / "reproduction.md"
    assert str(page) in capsys.readouterr().out
    assert page.read_text().startswith("# Reproduction, claim by claim")
