"""The part of the page about held-out records."""

import pytest
import torch
from fake_runs import dump, invented, result

from zetaclip.report.quality import confusions, quality_charts
from zetaclip.report.read import read_runs
from zetaclip.report.runs import page_for
from zetaclip.training.evaluate import Task


def run_with(path, details, **changes):
    folder = invented(path)
    dump(folder / "result.json", result(evaluation=details, **changes))
    return read_runs([folder])[0]


def binary():
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(400, generator=generator) < 0.25).float()
    scores = torch.randn(400, generator=generator) + 1.5 * y - 0.5
    return Task("binary", "auc").details(scores[:, None], y, ("no", "<b>yes</b>"))


def test_two_classes_have_both_curves_and_the_level_of_guessing(tmp_path):
    details = binary()
    run = run_with(tmp_path / "run", details, metrics={"auc": 0.87})
    roc, precision, *rest = quality_charts([run])
    curve = roc.series[0]
    assert list(zip(curve.x, curve.y)) == [(100 * x, 100 * y) for x, y in details["roc"]]
    assert "Area 0.87" in roc.summary
    share = 100 * details["per_class"][1]["records"] / 400
    assert precision.series[-1].y == pytest.approx((share, share))
    assert all(chart.empty for chart in rest)


def test_classes_are_a_table_and_names_are_escaped(tmp_path):
    details = binary()
    html = confusions(run_with(tmp_path / "run", details))
    assert "<b>yes" not in html and "&lt;b&gt;yes" in html
    for row in details["confusion"]:
        for count in row:
            assert f">{count}</span>" in html
    right = details["per_class"][0]["accuracy"]
    assert f"{100 * right:.1f} %" in html
    del details["confusion"]  # as with many classes
    assert "taken for which" not in confusions(run_with(tmp_path / "many", details))


def test_a_regression_has_residuals_in_its_unit(tmp_path):
    y = torch.linspace(0, 10, 200)
    details = Task("regression", "rmse", 5.0, 5.0).details((y * 0.1 - 0.5)[:, None], y, ())
    run = run_with(tmp_path / "run", details, metric={"name": "rmse", "value": 1.0, "unit": "kWh"})
    roc, precision, predictions, residuals = quality_charts([run])
    assert roc.empty and precision.empty
    assert "kWh" in predictions.x.label and "kWh" in residuals.x.label
    assert sum(residuals.series[0].y[:-1]) == pytest.approx(100.0)
    low, high = predictions.series[0].y[0], predictions.series[0].y[-1]
    assert 2.5 <= low < high <= 7.5


def test_the_page_says_what_epsilon_does_not_cover(tmp_path):
    page = page_for([run_with(tmp_path / "run", binary())], verify=False)
    section = next(one for one in page.sections if one.id == "quality")
    assert "does not cover" in section.html and "<table" in section.html
    assert {chart.id for chart in section.charts} == {"reliability", "roc", "precision-recall"}


@pytest.mark.parametrize(
    "details",
    [
        None,
        [],
        {"roc": 3, "per_class": "x", "classes": 1},
        {"roc": [[1], None, ["a", "b"]], "residuals": {"histogram": {"edges": [1], "counts": []}}},
        {"classes": ["a"], "per_class": [None], "confusion": [[1]]},
        {"residuals": {"by_target": [3], "histogram": []}},
    ],
)
def test_what_is_damaged_is_left_out(tmp_path, details):
    run = run_with(tmp_path / "run", details)
    assert all(chart.empty for chart in quality_charts([run]))
    assert confusions(run) == ""


def test_several_runs_share_a_chart_and_have_no_table_each(tmp_path):
    runs = [run_with(tmp_path / name, binary()) for name in "ab"]
    page = page_for(runs, verify=False)
    section = next(one for one in page.sections if one.id == "quality")
    assert "<table" not in section.html
    roc = next(chart for chart in section.charts if chart.id == "roc")
    assert [one.name for one in roc.series] == ["a", "b", "guessing"]


def several(classes):
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, classes, (600,), generator=generator)
    logits = torch.randn(600, classes, generator=generator)
    logits += 2 * torch.nn.functional.one_hot(y, classes)
    names = tuple(f"kind {number}" for number in range(classes))
    return Task("classification", "accuracy").details(logits, y, names)


def test_more_classes_have_a_curve_each_and_several_runs_one_each(tmp_path):
    details = several(4)
    run = run_with(tmp_path / "a", details, metrics={"accuracy": 0.8})
    roc, precision, *_ = quality_charts([run])
    assert [one.name for one in roc.series] == [*details["classes"], "guessing"]
    assert [one.name for one in precision.series] == details["classes"]
    assert f"Mean area {details['auc']:.4g}" in roc.summary and "against all others" in roc.summary
    assert "class 1" not in roc.x.label + precision.x.label
    other = run_with(tmp_path / "b", several(4), metrics={"accuracy": 0.8})
    roc, *_ = quality_charts([run, other])
    assert [one.name for one in roc.series][:2] == [run.name, other.name]
    assert "all pairs of a record and a class" in roc.summary
    many = run_with(tmp_path / "c", several(20), metrics={"accuracy": 0.8})
    roc, *_ = quality_charts([many])
    assert len(roc.series) == 2  # twenty lines could not be told apart
