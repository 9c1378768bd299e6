"""Tables against independent arithmetic; what the pages must say."""

import csv
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from zetaclip.experiments import ladder, missing, plan, plots, results, session, spec, tables
from zetaclip.experiments.cells import compared, difference_text, digits_of, direction
from zetaclip.experiments.evidence import Rules
from zetaclip.experiments.measures import MEASURES, Run, diverged
from zetaclip.experiments.planned import ladder_of, with_dependencies
from zetaclip.experiments.progress import Progress
from zetaclip.experiments.runner import LocalBackend, run_all

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def done(mini, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    request = session.Request(mini, str(tmp_path / "out"), workers=2)
    session.reproduce(request)
    return tmp_path / "out"


def lines(path):
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def flowing(path):
    """A page without the breaks of lines inside its paragraphs."""
    return re.sub(r"(?<=\S)\n *(?=[^\s|#!-])", " ", path.read_text(encoding="utf-8"))


def test_only_common_seeds_are_paired():
    rules = Rules((2,), 0.0)
    found = compared({1: 1.0, 2: 5.0, 4: 3.0}, {1: 0.0, 3: 9.0, 4: 1.0}, rules)
    assert found.n == 2 and found.mean == 1.5
    assert compared({1: 1.0}, {2: 1.0}, rules) is None
    alone = compared({1: 1.0}, {1: 0.5}, rules)
    assert alone.mean == 0.5 and alone.low is None and alone.word == "can't be told"
    assert difference_text(vars(alone), 2) == "+0.50 (1 seed)"


def test_equal_differences_prove_what_they_say():
    """One test record of ten thousand in every seed is less than the smallest effect."""
    base = {seed: 95.0 + 0.17 * seed for seed in range(1, 6)}
    less = {seed: value - 0.01 for seed, value in base.items()}
    found = compared(less, base, Rules((5,), 0.2))
    assert found.word == "equivalent" and found.low == found.high
    assert difference_text(vars(found), 2) == "-0.01, the same in every seed"


def test_lower_may_be_better():
    base = {seed: 1.0 + 0.01 * seed for seed in range(1, 6)}
    less = {seed: value - 0.1 - 0.001 * (seed % 2) for seed, value in base.items()}
    up, down = (compared(less, base, Rules((5,), 0.02), good) for good in (1, -1))
    assert (up.word, down.word) == ("worse", "better") and up.mean == down.mean < 0
    excluded = compared(less, base, Rules((5,), 0.2), 1, published=0.5)
    assert excluded.word == "equivalent" and excluded.p["the published gain is excluded"] < 0.001


def test_the_table_is_the_csv(done):
    table = json.loads((done / "mini/table.json").read_text(encoding="utf-8"))
    rows = lines(done / "mini/runs.csv")
    assert len(rows) == 9 and {row["state"] for row in rows} == {"finished"}
    assert table["columns"] == ["σ = 1.1: accuracy, %", "σ = 1.1: mean C"]
    assert (
        table["runs"] == {"finished": 9, "planned": 9, "recorded": 0, "unsigned": 9}
        and table["commit"] == "0000000"
    )
    values = {
        name: [100 * float(row["accuracy"]) for row in rows if row["row"] == name]
        for name in ("DP-SGD", "Spectral")
    }
    by_label = {line["label"]: line["cells"] for line in table["rows"]}
    ours = by_label["Spectral"][0]["ours"]
    assert ours["n"] == 3
    assert ours["mean"] == pytest.approx(np.mean(values["Spectral"]))
    assert ours["std"] == pytest.approx(np.std(values["Spectral"], ddof=1))
    interval = stats.ttest_rel(values["Spectral"], values["DP-SGD"]).confidence_interval(0.95)
    difference = by_label["Spectral"][0]["difference"]
    assert (difference["low"], difference["high"]) == pytest.approx((interval.low, interval.high))
    # one point between the two, a tenth of a point of noise after pairing, one point before:
    # pairing shows it
    assert by_label["Spectral"][0]["better"] is True and by_label["DP-SGD"][0]["difference"] is None
    assert stats.ttest_ind(values["Spectral"], values["DP-SGD"]).confidence_interval(0.95).low < 0
    assert by_label["Spectral"][0]["published"] == {"mean": 95.99, "std": 0.08}
    assert by_label["Spectral"][1]["published"] == {"mean": 1.05, "std": None}
    assert by_label["DP-SGD"][1]["published"] is None and by_label["Replay"][0]["published"] is None
    assert by_label["DP-SGD"][0]["epsilon"] == [0.83, 0.83]


def test_training_without_privacy_beats_nobody(mini_file, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    text = mini_file.read_text(encoding="utf-8")
    plain = '[[rows]]\nlabel = "Plain"\nmethod = "sgd"\n[[series]]'
    mini_file.write_text(text.replace("[[series]]", plain), encoding="utf-8")
    session.reproduce(session.Request(spec.load(str(mini_file)), str(tmp_path / "out"), workers=2))
    table = json.loads((tmp_path / "out/mini/table.json").read_text(encoding="utf-8"))
    cells = {line["label"]: line["cells"][0] for line in table["rows"]}
    assert cells["Plain"]["ours"]["n"] == 3
    assert cells["Plain"]["difference"] is None and cells["Plain"]["better"] is None
    assert cells["Plain"]["delta"] is None and cells["Spectral"]["delta"] == 1e-5
    assert cells["Spectral"]["better"] is True


def test_the_page_says_what_it_must(done):
    page = flowing(done / "mini/table.md")
    assert "δ = 1e-05" in page and "0.83" in page and "add" in page
    assert "[95.99 ± 0.08]" in page and "not free" in page
    assert "Not run" not in page
    for picture in re.findall(r"\]\(([^)]+\.png)\)", page):
        assert (done / "mini" / picture).read_bytes().startswith(b"\x89PNG")
    assert (
        "cells.png" in page
        and (done / "mini/clip.csv").exists()
        and "| probe |" in (done / "mini/clip.md").read_text()
    )


def test_a_page_tells_what_its_runs_can_not_prove():
    signed, older = ({"runs": {"recorded": 5, "unsigned": count}} for count in (0, 3))
    assert "digests" not in tables._recorded(signed)
    assert "3 without the digests of their files" in tables._recorded(older)
    commit = "0123456789abcdef"
    assert tables._commits(commit) == "commit 0123456789"
    assert tables._commits(f"{commit}, f{commit}+").startswith(
        "commits 0123456789, f012345678+ (+: with changes"
    )


def test_a_metric_of_mixed_kind_is_named_by_group():
    def cell(metric, pairs=3):
        difference = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": pairs, "word": "better"}
        ours = {"mean": 95.0, "std": 1.0, "n": 3}
        common = {"published": None, "diverged": 0, "finished": 3, "planned": 3, "better": None}
        return {"metric": metric, "ours": ours, "difference": difference, **common}

    table = {"columns": ["ε=1: metric"], "column_details": [{"measure": "metric"}], "baseline": "B"}
    for metric, title, value in (
        ("accuracy", "ε=1: accuracy, %", "95.00"),
        ("auc", "ε=1: AUC", "95.000"),
    ):
        shown = "\n".join(tables._values(table, [{"label": "A", "cells": [cell(metric)]}], [0]))
        assert title in shown and f"{value} ± 1.0" in shown
    mixed = [{"label": "A", "cells": [cell("auc")]}, {"label": "C", "cells": [cell("accuracy")]}]
    assert "ε=1: metric" in "\n".join(tables._values(table, mixed, [0]))
    assert tables._difference(cell("accuracy"), 2) == "+0.50 [+0.25, +0.75]: better"
    assert (
        tables._difference(cell("accuracy", pairs=5), 2) == "+0.50 [+0.25, +0.75] (5 seeds): better"
    )


def diverge(out, row, seeds):
    """These seeds of a row end without a number, as `zetaclip train` writes it."""
    for line in lines(out / "mini/runs.csv"):
        if line["row"] == row and int(line["seed"]) in seeds:
            path = out / "runs" / line["run"] / "result.json"
            result = json.loads(path.read_text(encoding="utf-8"))
            result["metric"]["value"] = result["metrics"]["accuracy"] = None
            path.write_text(json.dumps(result), encoding="utf-8")


@pytest.mark.parametrize("row", ["Spectral", "DP-SGD"])
def test_a_seed_that_diverged_is_counted(mini, done, row):
    diverge(done, row, [2])
    session.tables_only(session.Request(mini, str(done)))
    table = json.loads((done / "mini/table.json").read_text(encoding="utf-8"))
    cells = {line["label"]: line["cells"] for line in table["rows"]}
    assert (
        cells[row][0]["ours"]["n"] == 2
        and cells[row][0]["diverged"] == 1
        and cells[row][0]["finished"] == 3
    )
    assert cells["Spectral"][0]["difference"] is None and cells["Spectral"][0]["better"] is None
    page = flowing(done / "mini/table.md")
    assert "(1 of 3 diverged)" in page and "a seed that diverged has no value" in page
    assert "have finished" not in page and "**" not in page


def test_a_cell_of_which_nothing_is_left(mini, done):
    diverge(done, "Spectral", [1, 2, 3])
    session.tables_only(session.Request(mini, str(done)))
    page = flowing(done / "mini/table.md")
    assert "| Spectral | 3 of 3 diverged [95.99 ± 0.08] |" in page and "not run" not in page


def test_what_a_run_was_never_asked_for_is_no_divergence():
    run = Run(
        Path(),
        {"metric": {"name": "accuracy", "value": 0.9}, "metrics": {"accuracy": 0.9, "ece": None}},
    )
    told = {name: diverged(run, measure) for name, measure in MEASURES.items()}
    assert [name for name, value in told.items() if value] == ["ece"]


def test_the_command_is_one_that_works(mini, mini_file):
    request = session.Request(mini, "results")
    assert session.command_line(request) == f"zetaclip reproduce {mini_file}"
    request = session.Request(spec.load("iid"), "my results")
    assert session.command_line(request) == "zetaclip reproduce iid --out 'my results'"


def test_a_finished_run_that_is_not_used_is_named(mini, done):
    key = lines(done / "mini/runs.csv")[0]["run"]
    config = done / "runs" / key / "config.json"
    config.write_text(config.read_text().replace('"sigma": 1.1', '"sigma": 0.9'))
    said = session.tables_only(session.Request(mini, str(done)))
    told = "not used: σ = 1.1 · DP-SGD · seed 1: it was run with another sigma: 0.9, not 1.1"
    assert told in said and f"- {told}" in flowing(done / "mini/table.md")


def test_what_is_missing_is_said(mini, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    request = session.Request(
        mini, str(tmp_path / "out"), only={"seed": ["1"], "row": ["DP-SGD"]}, workers=2
    )
    session.reproduce(request)
    page = flowing(tmp_path / "out/mini/table.md")
    assert f"8 of 9 runs: `{session.command_line(request)}`, about" in page
    assert "not run [95.99 ± 0.08]" in page and "(1/3)" in page
    assert sum(row["state"] == "not run" for row in lines(tmp_path / "out/mini/runs.csv")) == 8
    before = (tmp_path / "out/mini/table.json").read_text(encoding="utf-8")
    session.tables_only(request)
    assert (tmp_path / "out/mini/table.json").read_text(encoding="utf-8") == before


def test_what_is_missing_is_told_by_data_set_and_reading(store, two_readings):
    experiment = two_readings
    planned = plan.make_plan(experiment)
    left = [
        run
        for run in planned.runs
        if run.labels["data"] != "mnist" or run.labels["reading"] != "sigma"
    ]
    climbs = ladder.climb_all(planned.ladders, planned.ladders, lambda run: None)
    parts = missing.parts(planned, planned.runs, left, climbs, "go", lambda runs: float(len(runs)))
    found = {part["what"]: part for part in parts}
    assert set(found) == {
        "MNIST, ε = 8",
        "EMNIST letters, subset, ε = 8",
        "CIFAR-10, ε = 8",
        "CIFAR-100, ε = 8",
    }
    for part in found.values():
        only = session.parse_only(
            part["command"].removeprefix("go --only "), session.known_labels(experiment)
        )
        # Plain training is the same run under both readings of MNIST, and is done.
        chosen = [run for run in session.select(planned, only) if run in left]
        assert len(chosen) == part["left"] == part["planned"]
        assert part["rungs"] == 4 * len({ladder_of(run) for run in chosen})
        assert part["seconds"] == part["left"] + part["rungs"]


def test_the_first_page_names_every_experiment_and_what_is_left(mini, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    out = tmp_path / "out"
    request = session.Request(mini, str(out), only={"seed": ["1"], "row": ["DP-SGD"]}, workers=2)
    session.reproduce(request)
    session.tables_only(session.Request(spec.load("zone"), str(out)))
    page = flowing(out / "README.md")
    assert "| [mini](mini/table.md): Mini | 1 of 9 |" in page
    assert f"- mini: 8 of 9 runs: `{session.command_line(request)}`, about" in page
    assert "| 0 of 150 | not known |" in page and "time not known (`--dry-run` measures it)" in page
    assert all(
        f"- {name}: not started, `zetaclip reproduce {name}`" in page
        for name in spec.names()
        if name != "zone"
    )
    assert "- zone: not started" not in page


@pytest.mark.parametrize("content", ["{", "[]", '{"title": "mine"}'])
def test_the_first_page_names_what_it_can_not_read(mini, done, content):
    (done / "mine").mkdir()
    (done / "mine/table.json").write_text(content)
    session.tables_only(session.Request(mini, str(done)))
    assert "- mine: its table.json can't be read" in (done / "README.md").read_text(
        encoding="utf-8"
    )


def test_rows_are_shown_by_the_seeds_that_the_baseline_has(mini, tmp_path, monkeypatch):
    # The replay of seed 1 follows the spectral run of seed 2, which so is ahead of the baseline.
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    out = tmp_path / "out"
    session.reproduce(session.Request(mini, str(out), only={"seed": ["1"]}, workers=2))
    values = {
        (row["row"], row["seed"]): row["value"]
        for row in lines(out / "mini/runs.csv")
        if row["value"]
    }
    assert ("Spectral", "2") in values and ("DP-SGD", "2") not in values
    table = json.loads((out / "mini/table.json").read_text(encoding="utf-8"))
    cell = next(line["cells"][0] for line in table["rows"] if line["label"] == "Spectral")
    assert (
        cell["ours"]["mean"] == pytest.approx(100 * float(values["Spectral", "1"]))
        and cell["finished"] == 1
    )


def test_a_row_with_fewer_planned_seeds_does_not_shorten_the_others(
    mini_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    text, rest = mini_file.read_text(encoding="utf-8").split('[[rows]]\nlabel = "Replay"')
    few = "[[series]]" + rest.partition("[[series]]")[2]
    text = text.replace("looks = [3]", "looks = [3]\nseeds_of = { dp-sgd = 1 }")
    mini_file.write_text(text + few, encoding="utf-8")
    out = tmp_path / "out"
    session.reproduce(session.Request(spec.load(str(mini_file)), str(out), workers=2))
    table = json.loads((out / "mini/table.json").read_text(encoding="utf-8"))
    cells = {line["label"]: line["cells"][0] for line in table["rows"]}
    assert (cells["DP-SGD"]["finished"], cells["DP-SGD"]["planned"]) == (1, 1)
    assert (cells["Spectral"]["finished"], cells["Spectral"]["planned"]) == (3, 3)


def test_a_run_that_failed_before_is_not_taken_for_one_that_was_never_tried(
    mini, tmp_path, monkeypatch
):
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    monkeypatch.setenv("STAND_IN_FAIL", "ww-dp-sgd")
    request = session.Request(mini, str(tmp_path / "out"), workers=2)
    assert session.reproduce(request)[1]
    session.tables_only(request)
    assert (
        "- when last tried, failed: σ = 1.1 · Spectral · seed 1: zetaclip: the stand-in was told"
        in (tmp_path / "out/mini/table.md").read_text(encoding="utf-8")
    )
    monkeypatch.delenv("STAND_IN_FAIL")
    session.reproduce(request)
    assert "when last tried" not in (tmp_path / "out/mini/table.md").read_text(encoding="utf-8")


def test_a_cap_that_ends_a_ladder_is_told(mini_file, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    text = mini_file.read_text(encoding="utf-8").replace("sgd = 0.25", "sgd = 64.0")
    mini_file.write_text(text, encoding="utf-8")  # the stand-in is best at 0.25
    session.reproduce(session.Request(spec.load(str(mini_file)), str(tmp_path / "out"), workers=2))
    page = flowing(tmp_path / "out/mini/table.md")
    assert "| 1 (cap reached) | 1, 2, 4, 8, 16, 32, 64, 128 |" in page


@pytest.mark.parametrize(
    ("low", "high", "least", "digits"),
    [(-0.5, 0.7, 2, 2), (-0.000218, -0.00015, 3, 6), (-2, 3, 3, 3), (0, 0, 2, 2)],
)
def test_intervals_are_shown_to_two_figures_of_their_width(low, high, least, digits):
    assert digits_of(low, high, least) == digits


@pytest.mark.parametrize(
    ("spectral", "zone"),
    [("gain = 0.2", ["zone 2 to 6"]), ("center = 5.0", []), ('zone = "relative"', [])],
)
def test_a_zone_is_drawn_where_all_rows_have_it(mini_file, tmp_path, monkeypatch, spectral, zone):
    other = (
        '[[rows]]\nlabel = "Other"\nmethod = "ww-practical"\nset = '
        f"{{ spectral = {{ {spectral} }} }}\n[[series]]"
    )
    text = mini_file.read_text(encoding="utf-8").replace("[[series]]", other)
    mini_file.write_text(
        text.replace('values = ["clip"]', 'values = ["smoothed"]'), encoding="utf-8"
    )
    legends = {}
    save = plots._save

    def look(figure, folder, name):
        legends[name] = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        return save(figure, folder, name)

    monkeypatch.setattr(plots, "_save", look)
    session.reproduce(session.Request(spec.load(str(mini_file)), str(tmp_path / "out"), workers=2))
    (legend,) = (texts for name, texts in legends.items() if "smoothed" in name)
    assert legend == ["Spectral", "Other", *zone]


def test_one_picture_of_all_groups_with_values_published_elsewhere(monkeypatch, tmp_path):
    planned = plan.make_plan(spec.load("accuracy"))
    table = results.table(planned, {}, "", 0)
    values = {"mean": 90.0, "std": 1.0}
    for line in table["rows"]:
        if line["label"] == "Fixed features, linear head" and line["group"] != "CIFAR-100":
            line["cells"] = [{"ours": values, "published": None} for _ in line["cells"]]
    seen = []
    monkeypatch.setattr(plots, "_save", lambda figure, folder, name: seen.append(figure) or [name])
    (wanted,) = planned.experiment.plots
    assert plots._lines(planned, table, wanted, tmp_path) == ["Test accuracy against ε"]
    (figure,) = seen
    assert [ax.get_title() for ax in figure.axes] == [g["label"] for g in planned.experiment.groups]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["Fixed features, linear head", "published elsewhere"]
    stars = {ax.get_title(): [text.xy for text in ax.texts] for ax in figure.axes if ax.texts}
    assert stars == {"MNIST": [(3.0, 98.7)], "CIFAR-10": [(3.0, 69.3), (1.0, 72.3)]}


def test_a_subset_is_not_put_beside_published_cells():
    experiment = spec.load("noniid")
    planned = plan.make_plan(experiment)
    cells = {
        line["group"]: line["cells"]
        for line in results.table(planned, {}, "", 0)["rows"]
        if line["label"] == "DP-SGD"
    }
    assert all(cell["published"] is None for cell in cells["EMNIST"])
    assert cells["MNIST"][0]["published"] == {"mean": 94.53, "std": 0.20}
    for name in ("iid", "noniid"):
        assert any("EMNIST is another data set" in note for note in spec.load(name).notes)


def test_time_leaves_out_the_first_epoch(store):
    experiment = spec.load("runtime")
    planned = plan.make_plan(experiment)
    planned = plan.make_plan(experiment, dict.fromkeys(planned.ladders, 0.25))
    run_all(planned.runs, store, LocalBackend(2), 1, Progress(io.StringIO()))
    table = results.table(planned, results.collect(planned, store), "", 6)
    table["ladders"] = {}
    plain, spectral = ([cell["ours"] for cell in line["cells"]] for line in table["rows"])
    # the stand-in: a first epoch of 10 s, then three of 2 s and 0.5 s of evaluation, with 0.1 s of
    # probing on top
    assert [cell["mean"] for cell in plain[:3]] == pytest.approx([7.5, 6.0, 1.5])
    assert plain[3] is None
    page = tables.markdown(planned, table, failures=[], skipped=[], pictures=[])
    assert "| 7.50 ± 0.00 [411.393] | 6.00 ± 0.00 [330.112] | 1.50 ± 0.00 [81.281] | – |" in page
    assert [cell["mean"] for cell in spectral] == pytest.approx(
        [7.8, 6.3, 1.5, 100 * 0.3 / 7.5, 100 * 0.3 / 6.3]
    )


@pytest.mark.slow
def test_every_experiment_makes_its_page(store, monkeypatch):
    # One finished run is enough to draw, and most are missing: no page may trip over that.
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    for name in spec.names():
        experiment = spec.load(name)
        request = session.Request(experiment, str(store.out), workers=2)
        planned = plan.make_plan(experiment)
        rungs = [
            run
            for one in list(planned.ladders.values())[:1]
            for factor in (0.5, 1.0, 2.0)
            for run in one.runs(one.start * factor)
        ]
        run_all(rungs, store, LocalBackend(2), 1, Progress(io.StringIO()))
        planned = plan.make_plan(experiment, dict.fromkeys(planned.ladders, 1.0))
        some = with_dependencies(planned, planned.runs[:2])
        outcomes = run_all(some, store, LocalBackend(2), 1, Progress(io.StringIO()))
        assert {outcome.state for outcome in outcomes.values()} <= {"done", "reused"}
        session.tables_only(request)
        page = flowing(store.out / name / "table.md")
        assert experiment.title in page and "## Not run" in page
        assert list((store.out / name).glob("*.png"))


def test_a_metric_in_per_cent_only_if_it_is_an_accuracy():
    read = MEASURES["metric"].read
    assert read(Run(Path(), {"metric": {"name": "accuracy", "value": 0.9}})) == pytest.approx(90)
    assert read(Run(Path(), {"metric": {"name": "auc", "value": 0.9}})) == 0.9
    assert read(Run(Path(), {"metric": {"name": "auc", "value": None}})) is None
    assert (
        direction(MEASURES["metric"], [Run(Path(), {"metric": {"name": "rmse", "value": 1.0}})])
        == -1
    )


# The claims.


def test_committed_results_hold_no_weights():
    folder = ROOT / "results"
    if not folder.exists():
        pytest.skip("there are no results yet")
    kept = [
        Path(base) / name
        for base, folders, names in os.walk(folder)
        if "runs" not in Path(base).parts
        for name in names
    ]
    assert not [path for path in kept if path.suffix in (".safetensors", ".pt", ".private")]
