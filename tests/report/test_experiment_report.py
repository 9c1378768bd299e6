"""The page of an experiment: bold only where the interval says so, and sentences that no result can
choose."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from fake_experiment import experiment, table
from test_report_page import figures, outline

from zetaclip.cli import main
from zetaclip.errors import CommandError
from zetaclip.report import curves, write_report
from zetaclip.report.curves import budget_charts, mean_curve
from zetaclip.report.experiment import sentences
from zetaclip.report.experiment_read import read_experiment
from zetaclip.report.read import Follower


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return experiment(tmp_path_factory.mktemp("results"))


@pytest.fixture
def page(root, tmp_path, monkeypatch):
    monkeypatch.setattr("zetaclip.report.page.picture", lambda chart: "data:,")
    return write_report([root], tmp_path / "page.html", experiment="iid").read_text(
        encoding="utf-8"
    )


def test_the_page_goes_beside_the_table(root, capsys, monkeypatch):
    monkeypatch.setattr("zetaclip.report.page.picture", lambda chart: "data:,")
    assert main(["report", str(root), "--experiment", "iid"]) == 0
    assert capsys.readouterr().out.strip() == str(root / "iid" / "report.html")


def test_an_experiment_that_is_not_there(tmp_path):
    experiment(tmp_path, seeds=1)
    with pytest.raises(CommandError, match=r"'zone'; .* iid\. `zetaclip reproduce zone` makes"):
        read_experiment(tmp_path, "zone")


def test_bold_only_where_the_interval_leaves_zero_out(page):
    outline(page)
    # "claimed" says better=true with an interval from -1 to 18: not bold
    assert re.findall(r"<strong>([^<]+)</strong>", page) == ["91.50 ± 0.30"]


def test_ours_and_theirs_stand_side_by_side_with_the_difference(page):
    cell = re.search(r"<td[^>]*><strong>91.50.*?</td>", page).group(0)
    assert "paper 94.00 ± 0.20; ours -2.50" in cell
    assert "vs dp-sgd +1.40 (+0.60 to +2.20)" in cell


def test_three_fixed_sentences(root):
    assert sentences(read_experiment(root, "iid")) == [
        "Finished: 6 of 7 planned runs (up to 3 seeds per cell), ε = 1.24 at δ = 1e-5, from"
        " their ledgers.",
        "Compared with dp-sgd: 1 of 3 cells better, 0 worse, 2 neither (by more than the"
        " smallest effect).",
        "The paper reports 4 of our cells: ours is higher in 1 and lower in 3, and differs from "
        "it by 2.4 % in the median.",
    ]


def test_a_worse_cell_is_counted_as_worse(tmp_path):
    rows = table()["rows"]
    rows[1]["cells"][0] |= {
        "difference": {"mean": -2.0, "low": -3.0, "high": -1.0},
        "better": False,
    }
    experiment(tmp_path, seeds=1, rows=rows)
    assert "0 of 3 cells better, 1 worse, " in sentences(read_experiment(tmp_path, "iid"))[1]


def test_the_figures_and_the_origin(page):
    drawn = figures(page)
    assert set(drawn) == {"clip-0", "zeta-0", "budget-0", "budget-1", "ece-0", "time"}
    ece = {trace["name"]: trace["y"] for trace in drawn["ece-0"]["data"]}
    assert ece == {"dp-sgd": [10.0] * 12, "ww-dp-sgd": [5.0] * 12}
    assert all("error_y" in trace for trace in drawn["budget-0"]["data"])
    assert [drawn[f"budget-{place}"]["layout"]["yaxis"]["title"]["text"] for place in (0, 1)] == [
        "accuracy (%)",
        "ECE (%)",
    ]
    # All rows spend the same here: side by side, not on top of one another.
    assert [trace["x"] for trace in drawn["budget-0"]["data"]] == [[1.0], [2.0]]
    assert "Accuracy at ε = 1.24" in page and "against ε" not in page
    for text in (
        "0123abc",
        "zetaclip reproduce iid",
        "6 finished of 7 planned",
        "accountant rdp",
    ):
        assert text in page


def test_different_budgets_are_an_axis(root):
    runs = [Follower(folder).read() for folder in sorted((root / "runs").iterdir())]
    spent = {"a": runs[:1], "b": [replace(runs[1], result={**runs[1].result, "epsilon": 3.0})]}
    chart = budget_charts({("digits", ""): spent})[0]
    assert chart.title == "Accuracy against ε, digits"
    assert [series.x for series in chart.series] == [(runs[0].epsilon,), (3.0,)]


def test_a_cell_without_a_value_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("zetaclip.report.page.picture", lambda chart: "data:,")
    rows = table()["rows"]
    rows[0]["cells"][1] |= {"ours": None, "finished": 3, "published": None}
    rows[1]["cells"][0] |= {
        "ours": None,
        "finished": 3,
        "diverged": 3,
        "published": None,
        "difference": None,
    }
    rows[1]["cells"][1] |= {"finished": 3, "diverged": 1, "published": None, "difference": None}
    rows[2]["cells"][0] |= {"ours": None, "finished": 0, "published": None, "difference": None}
    experiment(tmp_path, seeds=1, rows=rows)
    page = write_report([tmp_path], experiment="iid").read_text(encoding="utf-8")
    shown = re.findall(r"<td[^>]*>([^<]*)</td>", page.partition("id=figures")[0])
    assert [text for text in shown if "diverged" in text or text in ("–", "not run")] == [
        "–",
        "3 of 3 diverged",
        "80.20 ± 1.10 (1 of 3 diverged)",
        "not run",
    ]
    assert "A seed that diverged has no value" in page


def test_only_finished_runs_are_drawn(tmp_path):
    experiment(tmp_path)
    path = tmp_path / "iid" / "runs.csv"
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    for row in rows:
        if row["run"] in (
            "dp-sgd-2",
            "ww-dp-sgd-1",
            "ww-dp-sgd-2",
        ):  # cut: a folder that is there, and no result
            row["state"] = "not run"
            (tmp_path / "runs" / row["run"] / "result.json").unlink()
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = read_experiment(tmp_path, "iid")
    assert sum(folder is not None for folder in found.folders) == 6
    chart = next(
        chart for chart in curves.figures(found.runs, found.folders) if chart.id == "ece-0"
    )
    assert chart.summary == "Mean of up to 2 seeds."
    assert [any(spread is not None for spread in series.error) for series in chart.series] == [
        True,
        False,
    ]


def test_nothing_of_the_paper_to_compare_with(tmp_path):
    rows = table()["rows"]
    for row in rows:
        for cell in row["cells"]:
            if cell:
                cell["published"] = None
    experiment(tmp_path, seeds=1, rows=rows)
    assert (
        sentences(read_experiment(tmp_path, "iid"))[2]
        == "The paper reports none of the cells that have been run."
    )


def test_seeds_are_averaged_where_they_have_points():
    x, mean, spread = mean_curve([[(0, 1.0), (10, 3.0)], [(0, 2.0), (5, 4.0)]])
    assert x == (0, 5, 10)
    assert mean == (1.5, 2.5, 3.5)
    assert spread == pytest.approx((0.5**0.5, 4.5**0.5, 0.5**0.5))
    assert mean_curve([[(1, 7.0)]]) == ((1,), (7.0,), (None,))


def test_results_that_are_not_there(tmp_path, root):
    with pytest.raises(CommandError, match="no such folder"):
        read_experiment(tmp_path / "none", "iid")
    with pytest.raises(CommandError, match="there are results of: iid"):
        read_experiment(root, "noniid")
    (tmp_path / "iid").mkdir()
    (tmp_path / "iid" / "table.json").write_text('{"rows": 3')
    with pytest.raises(CommandError, match="damaged"):
        read_experiment(tmp_path, "iid")


def test_a_table_alone_makes_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr("zetaclip.report.page.picture", lambda chart: "data:,")
    (tmp_path / "iid").mkdir()
    bare = {
        "columns": ["<b>x</b>"],
        "rows": [{"label": "<i>", "cells": [None]}, {"label": "b", "cells": []}, 3],
    }
    (tmp_path / "iid" / "table.json").write_text(json.dumps(bare))
    page = write_report([tmp_path], experiment="iid").read_text(encoding="utf-8")
    outline(page)
    assert "<i>" not in page.partition("<script>")[0] and figures(page) == {}


def test_a_run_outside_of_the_results_is_not_read(tmp_path):
    from fake_runs import invented

    invented(tmp_path / "secret", ledger=False)
    results = experiment(tmp_path / "results", seeds=1)
    text = (results / "iid" / "runs.csv").read_text()
    (results / "iid" / "runs.csv").write_text(text.replace("dp-sgd-0", "../../secret"))
    assert all(folder is None for folder in read_experiment(results, "iid").folders)
