"""The code in README and docs runs as it stands there."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from helpers import ROOT, code_of, private
from torch import nn

import zetaclip
from zetaclip.cli import main

PAGES = [
    "README.md",
    "docs/architecture.md",
    "docs/sharp-edges.md",
    "docs/data.md",
    "docs/methods.md",
    "docs/using.md",
    "docs/units.md",
    "docs/audit.md",
    "docs/guides/scikit-learn.md",
    "docs/guides/from-opacus.md",
]
# The code of docs/guides/lightning.md and transformers.md, and the notebooks, run in tests/extras.
TEXTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "bench/*.md", "results/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off", "ignore:Full backward hook is firing"
)  # Opacus's own
@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page, capsys, own_rules):
    exec(compile(code_of(page), page, "exec"), {"__name__": "docs"})
    if page == "README.md":
        printed = capsys.readouterr().out
        epsilon, steps = re.search(r"ε = ([\d.]+) after (\d+) steps", printed).groups()
        assert 2.9 < float(epsilon) <= 3.0 and steps == "100"
        assert "OFF" not in printed and "clipped sum" in printed


def test_the_slow_container_is_slow_and_the_advice_helps():
    names = {"torch": torch, "nn": nn, "__name__": "docs"}
    exec(code_of("docs/sharp-edges.md"), names)
    data = (torch.randn(8, 64), torch.randint(0, 2, (8,)))
    slow, *_ = private(names["Slow"](), data)
    fast, *_ = private(names["Fast"](), data)
    assert {line.path for line in slow.describe()} == {"per example (vmap)"}
    assert [line.parameter for line in fast.describe() if "per example" in line.path] == [
        "scale.weight"
    ]


def prose(page):
    """The text of a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-") for words in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_files_that_pages_name_exist(page):
    named = re.findall(
        r"`((?:tests|bench|docs|examples|src)/[\w./-]+\.(?:py|md))`", (ROOT / page).read_text()
    )
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", path):
            continue  # elsewhere on the web
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (
            anchor and (target.suffix != ".md" or anchor not in anchors(target))
        ):
            broken.append(link)
    assert not broken


def test_a_link_to_a_missing_heading_is_noticed():
    assert "threat-model" in anchors("docs/privacy.md")
    assert "δ" in anchors("docs/choosing-epsilon.md")
    assert "no-such-heading" not in anchors("docs/privacy.md")


@pytest.mark.parametrize("page", [page for page in TEXTS if page.startswith("docs/")])
def test_nested_lists_are_lists_on_the_site_too(page):
    """Python-Markdown takes four spaces for a nested list; GitHub takes two as well."""
    assert not re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*$", prose(page), re.MULTILINE)


def test_every_page_is_in_the_menu_of_the_site():
    menu = re.findall(r"([\w/-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    pages = [*docs.rglob("*.md"), *docs.rglob("*.ipynb")]
    assert sorted(menu) == sorted(str(page.relative_to(docs).with_suffix("")) for page in pages)


def test_the_reference_has_every_public_name():
    named = re.findall(
        r"^::: zetaclip\.([\w.]+)$", (ROOT / "docs/api/zetaclip.md").read_text(), re.M
    )
    own_pages = {"losses", "methods", "optim"}
    assert sorted(named) == sorted({*zetaclip.__all__} - own_pages)


def test_the_figures_of_the_page_on_epsilon(capsys):
    page = "docs/choosing-epsilon.md"
    exec(compile(code_of(page), page, "exec"), {"__name__": "docs"})
    rows = [
        re.findall(r"[\d.]+", row)
        for row in re.findall(r"^\| [\d.]+ \|.*[\d %]+\|$", prose(page), re.MULTILINE)
        if " to " not in row
    ]
    printed = [re.findall(r"[\d.]+", line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 8 and rows == printed


@pytest.fixture
def patients(tmp_path, monkeypatch, capsys):
    """The commands of docs/getting-started.md, run in an empty folder as a new user would."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/getting-started.md").read_text()
    shell = "".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL))
    lines = shell.replace("\\\n", " ").splitlines()
    assert len(lines) == 5
    for line in lines:
        command, *words = shlex.split(line)
        if command == "python":
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
            schema = re.search(r"```toml\n# patients.toml\n(.*?)```", text, re.DOTALL)[1]
            assert schema == Path("patients.toml").read_text()
        else:
            assert command == "zetaclip" and main(words) == 0, (line, capsys.readouterr())
    return tmp_path


def test_from_a_table_to_predictions(patients, capsys):
    run = patients / "runs/patients"
    result = json.loads((run / "result.json").read_text())
    assert result["epsilon"] <= 3 and "preprocessing looked at" not in str(result)
    assert (run / "report.html").exists() and "add/remove" in (run / "MODEL_CARD.md").read_text()
    said = (patients / "predictions.csv").read_text().splitlines()
    assert len(said) == 501 and set(said) == {"prediction", "ill", "well"}
    capsys.readouterr()
    page = "docs/getting-started.md"
    exec(compile(code_of(page), page, "exec"), {"__name__": "docs"})
    printed = capsys.readouterr().out
    assert str(said[1]) in printed.splitlines()[0] and printed.count("ε = ") == 3


def wide(text, tables):
    """The numbers of lines above 100 characters; rows of a table can't be broken."""
    return [
        number
        for number, line in enumerate(text.split("\n"), 1)
        if len(line) > 100 and not (tables and line.lstrip().startswith("|"))
    ]


def test_lines_are_at_most_100_characters_wide():
    assert wide("x" * 101 + "\n| " + "y" * 101, True) == [1]  # the test can fail
    found = {}
    for kind in ("py", "pyi", "c", "h", "toml", "md"):
        for path in ROOT.rglob(f"*.{kind}"):
            inside = path.relative_to(ROOT)
            if not any(
                part in ("runs", "build", "dist") or part.startswith(".") or "egg-info" in part
                for part in inside.parts
            ):
                found[str(inside)] = wide(path.read_text(encoding="utf-8"), kind == "md")
    assert len(found) > 300 and {name: lines for name, lines in found.items() if lines} == {}
