"""The code in README and docs runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch
from helpers import ROOT, code_of, private
from torch import nn

PAGES = [
    "README.md",
    "docs/architecture.md",
    "docs/sharp-edges.md",
    "docs/data.md",
    "docs/methods.md",
    "docs/using.md",
    "docs/guides/scikit-learn.md",
    "docs/guides/from-opacus.md",
]
GUIDES = [
    "docs/guides/lightning.md",
    "docs/guides/transformers.md",
]  # their code runs in tests/extras


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


@pytest.mark.parametrize(
    "page",
    [
        *PAGES,
        *GUIDES,
        "docs/privacy.md",
        "docs/spectral-control.md",
        "docs/paper-vs-code.md",
        "docs/reports.md",
        "docs/guides/distributed.md",
        "docs/guides/ray.md",
        "CONTRIBUTING.md",
    ],
)
def test_files_that_pages_name_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:tests|bench|docs|src)/[\w./-]+\.(?:py|md))`", text))
    named |= {str(Path(page).parent / link) for link in re.findall(r"\]\(([\w./-]+\.md)\)", text)}
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_lines_of_pages_are_short():
    """At most 100 columns, but for tables of measurements and what a command has written."""
    generated = {ROOT / "docs/reproduction.md"}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages
        if page not in generated
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 100 and not (page.name == "README.md" and line.startswith("|"))
    ]
    assert len(pages) > 10 and not long
