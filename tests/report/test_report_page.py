"""The page as text: what it says, what it escapes, and that it needs nothing from outside."""

import base64
import dataclasses
import hashlib
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_runs import dump, invented, lines, result, status

from zetaclip.cli import main
from zetaclip.report import write_report
from zetaclip.report.charts import charts_for, clip_chart
from zetaclip.report.format import duration, epsilon_text, joined, plain, summary
from zetaclip.report.interactive import bundle
from zetaclip.report.read import read_runs
from zetaclip.report.still import picture

VOID = {"meta", "link", "img", "br", "input"}


class Outline(HTMLParser):
    """Checks that tags are balanced, and collects texts, attributes and scripts."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.scripts, self.ids = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def outline(page):
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    return parser


def figures(page):
    return json.loads(
        re.search(r"id=zetaclip-figures>(.*?)</script>", page).group(1), parse_constant=pytest.fail
    )


def report(*folders, **options):
    return write_report(folders, **options).read_text(encoding="utf-8")


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures for print take most of a page's time; tests of its words do without."""
    monkeypatch.setattr("zetaclip.report.page.picture", lambda chart: "data:,")


pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return report(invented(tmp_path_factory.mktemp("one") / "run"))


def test_the_command_writes_one_file_and_says_where(tmp_path, capsys):
    run = invented(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main(["report", str(run), "--out", str(tmp_path / "page.html"), "--no-verify"]) == 0
    assert (tmp_path / "page.html").stat().st_size > 20_000


def test_nothing_is_loaded_from_outside(one):
    parser = outline(one)
    sources = [
        value
        for _, name, value in parser.attributes
        if name in ("src", "href", "srcset", "action", "data")
    ]
    assert sources and all(value.startswith("data:") for value in sources)
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']https?://", one)
    own = one.replace(bundle(), "")
    pictures = [
        base64.b64decode(data).decode()
        for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", own)
    ]
    assert pictures and not any(
        "<script" in svg or re.search(r"(href|src)=\"https?:", svg) for svg in pictures
    )
    # the names of XML's vocabularies are addresses that nobody opens
    addresses = set(re.findall(r"https?://[\w./-]+", re.sub(r"base64,[^\"]+", "", own)))
    assert addresses == set()


def test_only_the_two_scripts_of_the_page_may_run(one):
    policy = re.search(r'Content-Security-Policy content="([^"]+)"', one).group(1)
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    code = outline(one).scripts[2:]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
    assert re.findall(r"sha256-([^']+)", policy) == digests


def test_the_summary_is_one_line_that_a_person_understands(tmp_path):
    run = invented(tmp_path / "run")
    dump(
        run / "result.json",
        result(metric={"name": "accuracy", "value": 0.961}, epsilon=0.8299, delta=1e-5),
    )
    assert (
        summary(read_runs([run])[0])
        == "96.1 % accuracy at ε = 0.83, δ = 1e-5, add/remove one record"
    )
    dump(run / "result.json", result(metric={"name": "auc", "value": 0.9123}, epsilon=None))
    assert summary(read_runs([run])[0]) == "AUC 0.9123, trained without privacy"
    dump(
        run / "result.json",
        result(metric={"name": "rmse", "value": 1.5, "unit": "kWh"}, claim="none: realised size"),
    )
    assert summary(read_runs([run])[0]) == "RMSE 1.5 kWh; no privacy is claimed: realised size"
    (run / "result.json").unlink()
    dump(run / "status.json", status("stopped", 30, 120))
    assert summary(read_runs([run])[0]).startswith("Stopped at step 30 of 120: ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.8299, "0.83"),
        (0.8301, "0.84"),
        (3.0000000001, "3.00"),
        (2.9977, "3.00"),
        (0.01234, "0.0124"),
        (None, "∞"),
    ],
)
def test_epsilon_is_rounded_up(value, text):
    assert epsilon_text(value) == text


def test_small_words():
    assert plain(1e-5) == "1e-5" and plain(None) == "–" and plain(1234567.0) == "1.235e6"
    assert [duration(value) for value in (0.04, 59.6, 200, 7300)] == [
        "0.0 s",
        "60 s",
        "3 min 20 s",
        "2 h 01 min",
    ]


def test_charts_show_the_numbers_of_the_folder(one, tmp_path):
    run = invented(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    probes = [json.loads(line) for line in (run / "probes.jsonl").read_text().splitlines()]
    drawn = figures(one)
    assert set(drawn) == {
        *("epsilon", "metric-accuracy", "clip", "rate", "zeta", "reliability", "time"),
        *("spectrum-0-first", "spectrum-0-middle", "spectrum-0-last"),
    }
    accuracy = drawn["metric-accuracy"]["data"][0]
    assert accuracy["y"] == pytest.approx([100 * row["metric"] for row in rows], rel=1e-5)
    assert drawn["epsilon"]["data"][0]["x"] == [row["step"] for row in rows]
    assert drawn["clip"]["data"][0]["y"] == pytest.approx(
        [1.0, *(probe["clip"] for probe in probes)], rel=1e-5
    )
    rate = drawn["rate"]["data"][0]
    assert rate["x"] == [row["step"] for row in rows] and rate["y"] == pytest.approx(
        [0.5 * (1 - (row["step"] - 1) / (10 * len(rows))) for row in rows], rel=1e-5
    )
    by_name = {trace["name"]: trace for trace in drawn["zeta"]["data"]}
    assert set(by_name) == {"zone 2 to 6", "ζ", "ζ, weak fit", "no fit", "ζ̂, smoothed"}
    assert by_name["ζ, weak fit"]["x"] == [30, 60, 90, 120] and by_name["no fit"]["x"] == [50]
    assert by_name["ζ"]["error_y"]["array"] == [0.5] * 7
    for figure in drawn.values():
        assert all(
            re.search(r"\(.+\)", figure["layout"][axis]["title"]["text"])
            for axis in ("xaxis", "yaxis")
        )


def test_the_fitted_tail_is_the_power_law_that_was_fitted(tmp_path):
    chart = next(
        chart
        for chart in charts_for(read_runs([invented(tmp_path / "run")]))
        if chart.id == "spectrum-0-last"
    )
    line = next(one for one in chart.series if one.name.startswith("fit"))
    zeta = float(line.name.rpartition(" ")[2])
    with open(tmp_path / "run" / "probes.jsonl") as file:
        layer = json.loads(file.readlines()[-1])["layers"]["fc1"]
    assert zeta == pytest.approx(layer["zeta"], abs=0.005)
    above = sum(value >= layer["lambda_min"] for value in layer["eigenvalues"]) / len(
        layer["eigenvalues"]
    )
    assert line.x[0] == layer["lambda_min"] and line.y[0] == pytest.approx(above)
    for x, y in zip(line.x, line.y):
        assert y == pytest.approx(
            above * (x / layer["lambda_min"]) ** (1 - layer["zeta"]), rel=1e-9
        )
    (band,) = chart.bands
    assert band.name == "random weights 2.85 to 3.50"
    assert all(low <= high for low, high in zip(band.low, band.high))


def test_every_chart_has_a_table_and_a_picture(one):
    count = len(figures(one))
    assert one.count("Numbers as a table") == one.count("<img class=still") == count
    table = re.search(
        r"data-part=table-metric-accuracy>(.*?)</div></details>", one, re.DOTALL
    ).group(1)
    assert table.count("<tr>") == 13 and "<caption>" in table and "scope=col" in table


EVIL = "\"><script>alert('x')</script><b>%{x}&amp;$1$"


def test_a_name_with_html_stays_a_name(tmp_path):
    folder = tmp_path / EVIL.replace("/", "∕")
    run = invented(folder, data=EVIL, method="<img src=x onerror=alert(1)>")
    dump(
        run / "result.json",
        result(notes=["<script>alert(2)</script>"], data=EVIL, method="<i>", unit="<u>"),
    )
    other = invented(tmp_path / "plain")
    for page in (report(run), report(run, other, out=tmp_path / "both.html")):
        parser = outline(page)
        assert len(parser.scripts) == 4
        own = page.replace(bundle(), "")
        assert (
            "<script>alert" not in own
            and "<img src=x" not in own
            and "onerror=" not in re.sub(r"&lt;.*?&gt;", "", own)
        )
        assert not any(name.startswith("on") for _, name, _ in parser.attributes)
        for figure in figures(page).values():
            assert not any("<" in str(trace["name"]) for trace in figure["data"])
            assert not any(
                "<" in str(text) for trace in figure["data"] for text in trace.get("text", [])
            )


def test_a_name_that_is_no_text(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    page = write_report([invented(folder)], out=tmp_path / "page.html").read_bytes().decode("utf-8")
    outline(page)


def test_nan_and_gaps(tmp_path):
    run = invented(tmp_path / "run")
    text = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(text[3]) | {
        "metric": float("nan"),
        "epsilon": None,
        "clip": float("inf"),
        "seconds": None,
    }
    text[3] = json.dumps(row)
    (run / "metrics.jsonl").write_text("\n".join(text) + "\n")
    drawn = figures(report(run))
    assert drawn["metric-accuracy"]["data"][0]["y"][3] is None
    assert sum(value is None for value in drawn["metric-accuracy"]["data"][0]["y"]) == 1


def test_only_nan(tmp_path):
    run = invented(tmp_path / "run")
    lines(
        run / "metrics.jsonl",
        [{"epoch": 1, "step": 1, "metric": None, "accuracy": None, "epsilon": None, "clip": None}],
    )
    dump(
        run / "result.json",
        result(metric={"name": "accuracy", "value": None}, reliability=None, seconds=None),
    )
    (run / "probes.jsonl").unlink()
    page = report(run)
    assert "accuracy not measured" in page and figures(page) == {}


def test_a_run_that_has_only_a_configuration(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    page = report(run)
    outline(page)
    assert "Not started" in page


def test_a_stopped_run_says_how_to_resume(tmp_path):
    run = invented(tmp_path / "run", state="stopped")
    dump(
        run / "status.json",
        status(
            "stopped", 60, 120, message="interrupted", resume="zetaclip train --out 'a&b' --resume"
        ),
    )
    page = report(run)
    assert "The run stopped at step 60 of 120. interrupted." in page
    assert "zetaclip train --out &#x27;a&amp;b&#x27; --resume" in page


def test_runs_of_different_tasks_share_no_axis(tmp_path):
    page = report(
        invented(tmp_path / "a"),
        invented(tmp_path / "b", metric="rmse"),
        invented(tmp_path / "c", metric="auc"),
    )
    drawn = figures(page)
    assert [
        [trace["name"] for trace in drawn[f"metric-{name}"]["data"]]
        for name in ("accuracy", "rmse", "auc")
    ] == [
        ["a"],
        ["b"],
        ["c"],
    ]
    assert "These runs have different metrics (accuracy, RMSE, AUC)" in page


def test_several_runs_are_laid_over_each_other_and_listed(tmp_path):
    runs = [invented(tmp_path / f"run-{seed}", seed=seed, lr=0.1 * (1 + seed)) for seed in range(3)]
    page = report(*runs)
    outline(page)
    drawn = figures(page)
    assert [trace["name"] for trace in drawn["metric-accuracy"]["data"]] == [
        "run-0",
        "run-1",
        "run-2",
    ]
    table = re.search(r"<table class=sortable>(.*?)</table>", page, re.DOTALL).group(1)
    assert table.count("<tr>") == 4 and "data-key=" in table
    different = page[page.index("What differs in the configuration") :]
    assert re.search(r"<button type=button>lr</button>.*0\.3", different, re.DOTALL)
    assert "<button type=button>epochs</button>" not in different


def test_ten_long_runs_stay_under_six_megabytes(tmp_path):
    """200 epochs each, 400 probes of three layers; the probes that are drawn have 512
    eigenvalues."""
    first = invented(tmp_path / "run-0", epochs=200, ledger=False)
    probes = [json.loads(line) for line in (first / "probes.jsonl").read_text().splitlines()]
    rows = []
    for place in range(400):
        values = [1.0 + 0.01 * rank**1.3 for rank in range(512 if place in (0, 200, 399) else 4)]
        layer = probes[0]["layers"]["fc1"] | {"eigenvalues": values, "zeta": 2.5, "lambda_min": 2.0}
        rows.append(
            probes[place % 200]
            | {"step": 5 * place + 5, "layers": dict.fromkeys(("stem", "layer2", "fc"), layer)}
        )
    lines(first / "probes.jsonl", rows)
    runs = [first]
    for seed in range(1, 10):
        runs.append(tmp_path / f"run-{seed}")
        shutil.copytree(first, runs[-1])
    page = report(*runs, verify=False)
    charts = charts_for(read_runs(runs))
    assert len(figures(page)) == len(charts) == 10
    pictures = sum(len(picture(chart)) for chart in charts)
    assert pictures > 100_000 and len(page) + pictures < 6_000_000


def test_two_hundred_runs(tmp_path):
    runs = [
        invented(tmp_path / f"run-{seed}", seed=seed, epochs=5, ledger=False) for seed in range(200)
    ]
    page = report(*runs, verify=False)
    outline(page)
    assert len(figures(page)["metric-accuracy"]["data"]) == 200
    assert len(page) < 9_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "{tmp}/nothing"], "no such folder"),
        (["report", "{tmp}"], "holds no run"),
        (["report", "{tmp}/run", "--out", "{tmp}"], "is a folder"),
        (["report", "{tmp}/run", "--out", "{tmp}/no/where.html"], "cannot write"),
        (["report", "{tmp}/run", "{tmp}/run", "--experiment", "iid"], "takes one folder"),
        (["report", "{tmp}/run", "--experiment", "iid"], "no results of the experiment 'iid'"),
        (["watch", "{tmp}/nothing"], "no such folder"),
        (["watch", "{tmp}/run", "--port", "99999"], "can't listen on port 99999"),
    ],
)
def test_what_the_user_can_put_right(tmp_path, capsys, arguments, message):
    run = invented(tmp_path / "run")
    if "{tmp}" in arguments:
        run.rename(tmp_path / "gone")
        (tmp_path / "gone" / "config.json").unlink()
    if arguments[-1] == "{tmp}" and "--out" in arguments:
        invented(tmp_path / "run")
    assert main([word.format(tmp=tmp_path) for word in arguments]) == 2
    assert message in capsys.readouterr().err


def test_twelve_runs_have_twelve_line_styles(tmp_path):
    runs = [invented(tmp_path / f"run-{seed}", seed=seed, ledger=False) for seed in range(12)]
    for name, chart in figures(report(*runs, verify=False)).items():
        drawn = [one for one in chart["data"] if one.get("mode", "").startswith("lines")]
        drawn = [one for one in drawn if one["line"]["color"].lstrip("$").isdigit()]
        if name.startswith("spectrum") or len(drawn) != 12:
            continue
        marked = {(one["line"]["color"], one["line"]["dash"]) for one in drawn}
        assert len(marked) == 12, name


def test_a_finished_run_is_verified(tmp_path):
    folder = tmp_path / "run"
    words = "train --data digits --model mlp-2 --batch-size 64 --threads 1 --quiet --sigma 2"
    assert main([*words.split(), "--steps", "3", "--out", str(folder)]) == 0
    assert "Verified." in report(folder)


def test_a_value_is_not_broken_at_its_power():
    joint = "AUC 0.9 at ε\u00a0=\u00a03, δ\u00a0=\u00a01e-\u20605"
    assert joined("AUC 0.9 at ε = 3, δ = 1e-5") == joint
    assert joined("dp-sgd, a one-5") == "dp-sgd, a one-5"


@pytest.mark.parametrize(
    ("values", "limits", "said"),
    [
        ((0.05, 0.05), (0.0, 0.1), "C stayed at 0.05"),
        ((0.05, 0.2), None, "C went from 0.05 to 0.2"),
    ],
)
def test_a_constant_c_has_an_axis_from_zero(tmp_path, values, limits, said):
    """Around a flat line the axis would reach one below it: a negative norm."""
    (run,) = read_runs([invented(tmp_path / "run")])
    path = [{"step": 10 * i, "clip": value} for i, value in enumerate(values)]
    chart = clip_chart([dataclasses.replace(run, probes=(), clips=path, config={}, result={})])
    assert chart.y.limits == limits and said in chart.summary
