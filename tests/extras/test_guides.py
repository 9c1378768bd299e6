"""The guides for the extras, and the example, run as they stand there."""

import re
import runpy
import sys

import pytest
from helpers import ROOT, code_of


@pytest.mark.parametrize(
    ("page", "package"), [("lightning", "lightning"), ("transformers", "transformers")]
)
@pytest.mark.filterwarnings("ignore")  # the frameworks' own
def test_code_blocks_run(page, package, capsys, own_rules):
    pytest.importorskip(package, reason=f"the extra `{package}` is not installed")
    exec(compile(code_of(f"docs/guides/{page}.md"), page, "exec"), {"__name__": "docs"})
    value = float(re.search(r"ε = ([\d.]+) after", capsys.readouterr().out)[1])
    target = 3.0 if page == "lightning" else 8.0
    assert 0.97 * target < value <= target


@pytest.mark.filterwarnings("ignore")
def test_adapters_learn_private_text(capsys, monkeypatch, own_rules):
    pytest.importorskip("peft", reason="the extra `transformers` is not installed")
    monkeypatch.setattr(sys, "argv", ["lora_text.py", "--public-steps", "150", "--epochs", "8"])
    runpy.run_path(str(ROOT / "examples/lora_text.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert float(re.search(r"ε = ([\d.]+) at", printed)[1]) <= 8.0
    before, after = map(
        float, re.search(r"([\d.]+) before, ([\d.]+) after training", printed).groups()
    )
    assert after < before - 0.05


@pytest.mark.filterwarnings("ignore")
def test_the_language_model_trains_both_ways(capsys, monkeypatch):
    sizes = "--layers 1 --width 64 --tokens 16 --vocabulary 512 --records 200 --public-steps 10"
    monkeypatch.setattr(sys, "argv", ["language_model.py", *sizes.split()])
    runpy.run_path(str(ROOT / "examples/language_model.py"), run_name="__main__")
    found = re.findall(r"loss ([\d.]+) -> ([\d.]+), ε = ([\d.]+) at", capsys.readouterr().out)
    assert len(found) == 2
    for before, after, epsilon in found:
        assert 7.5 < float(epsilon) <= 8.0
        assert float(after) < float(before) + 0.05
