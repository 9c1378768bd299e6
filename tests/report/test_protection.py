"""The part of a report for people outside the field."""

import json
import math
import re

import pytest
from fake_runs import dump, invented, result

from zetaclip.cli import main
from zetaclip.report.protection import protection
from zetaclip.report.read import read_runs
from zetaclip.report.runs import _several, page_for
from zetaclip.report.trust import Trust

PASSED = Trust("passed")
FOUND = {
    "epsilon_claimed": 1.234,
    "epsilon_found": 0.8,
    "confidence": 0.99,
    "excess": False,
    "scores": {"edges": [0.0, 1.0, 2.0], "included": [1, 3], "excluded": [4, 2]},
}


def section(path, trust=PASSED, audit=None, **changes):
    invented(path)
    dump(path / "result.json", result(**changes))
    if audit is not None:
        dump(path / "audit.json", audit)
    return protection(read_runs([path])[0], trust)


@pytest.mark.parametrize("epsilon", [0.5, 1.234, 3.0])
def test_the_table_is_bayes_rule_at_the_worst_odds(tmp_path, epsilon):
    text = section(tmp_path, epsilon=epsilon).html
    found = dict(re.findall(r"<th scope=row>(\d+) %</th><td[^>]*>([\d.]+) %", text))
    assert set(found) == {"1", "10", "50", "90"}
    for before, after in found.items():
        prior = int(before) / 100
        exact = prior * math.exp(epsilon) / (prior * math.exp(epsilon) + 1 - prior)
        assert 0 <= float(after) / 100 - exact < 0.0011  # rounded up to a tenth of a per cent


def test_it_names_who_is_protected_and_how_sure_delta_is(tmp_path):
    text = section(tmp_path, unit="one patient with all its rows", delta=1e-5).html
    assert "one patient with all its rows" in text and "1 in 100,000" in text
    assert "recomputed from the ledger, and agree" in text


def test_what_is_not_covered_is_said(tmp_path):
    leak = "preprocessing looked at private data, which ε does not cover: bounds of age"
    assert "bounds of age" in section(tmp_path, notes=[leak, "nothing special"]).html
    assert "nothing special" not in section(tmp_path, notes=[leak, "nothing special"]).html


def test_an_audit_is_shown_with_its_scores(tmp_path):
    made = section(tmp_path, audit=FOUND)
    assert "at least 0.80" in made.html and "nothing contradicts" in made.html
    (chart,) = made.charts
    assert [one.y for one in chart.series] == [(1.0, 3.0), (4.0, 2.0)]
    assert chart.series[0].x == (0.5, 1.5)
    broken = section(tmp_path, audit=FOUND | {"excess": True})
    assert "the claim is wrong" in broken.html


@pytest.mark.parametrize("audit", [None, {}, {"epsilon_found": "x"}, []])
def test_without_a_readable_audit_the_page_says_so(tmp_path, audit):
    made = section(tmp_path, audit=audit)
    assert "not audited" in made.html and made.charts == ()


def test_a_failed_check_is_not_hidden(tmp_path):
    text = section(tmp_path, Trust("failed", ("ε differs",))).html
    assert "does not agree" in text and "and agree." not in text


def test_nothing_but_the_summary_stands_before_it(tmp_path):
    folder = invented(tmp_path / "run")
    dump(folder / "result.json", result(notes=["the seed is known"]))
    page = page_for(read_runs([folder]), verify=False)
    assert [section.id for section in page.sections][:3] == ["summary", "protection", "notes"]
    assert "the seed is known" not in page.sections[0].html
    assert "the seed is known" in page.sections[2].html


def test_a_known_seed_is_said_before_anything_is_claimed(tmp_path):
    """Who has the folder or the page has the seed, and can remove the noise."""
    text = section(tmp_path, noise_seed_known=True).html
    assert text.index("Nobody is protected from people who have the seed") < text.index(
        "Who is protected:"
    )
    assert "Everything in the run's folder" not in text and "don't publish these" in text
    plain = section(tmp_path, noise_seed_known=False).html
    assert "Nobody is protected" not in plain and "Everything in the run's folder" in plain


def test_several_runs_say_at_the_top_which_seeds_are_known_and_which_checks_failed(tmp_path):
    paths = [invented(tmp_path / name) for name in "abcdefg"]
    runs = read_runs(paths)
    known = Trust("passed", warnings=("The noise seed is known.",))
    trusts = dict(zip((run.name for run in runs), [known] * 6 + [PASSED], strict=True))
    trusts["b"] = Trust("failed", ("ε differs",), warnings=known.warnings)
    top = _several(runs, trusts)[0].html.split("<table")[0]
    assert top.count("The noise seed is known.") == 1 and "<b>6 of 7 runs</b>: The noise" in top
    assert "<b>b</b>: The check of the ledger failed: ε differs" in top
    few = _several(runs[:2] + runs[6:], trusts)[0].html
    assert "<b>a, b</b>: The noise seed is known." in few
    assert "<b>All runs</b>: The noise" in _several(runs[:3], trusts)[0].html
    assert "The noise" not in _several([runs[6], runs[6]], trusts)[0].html.split("<table")[0]


def test_no_claim_no_section(tmp_path):
    assert section(tmp_path, epsilon=None) is None


def test_the_command_leaves_its_result_for_the_report(tmp_path, capsys):
    run = tmp_path / "run"
    words = ["--data", "digits", "--method", "dp-sgd", "--model", "mlp", "--epsilon", "8"]
    assert main(["train", *words, "--steps", "2", "--quiet", "--seed", "1", "--out", str(run)]) == 0
    assert main(["audit", "--run", str(run), "--canaries", "100", "--seed", "2", "--quiet"]) == 0
    found = json.loads((run / "audit.json").read_text())
    assert found["steps"] == 2 and found["method"] == "dp-sgd" and found["canaries"] == 100
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "An attack on these settings showed" in page
    capsys.readouterr()
