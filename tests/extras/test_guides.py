"""The guides for the extras, and the example, run as they stand there."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from zetaclip.gradients import LAYER_RULES

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(("page", "package"), [("lightning", "lightning"), ("transformers", "transformers")])
@pytest.mark.filterwarnings("ignore")  # the frameworks' own
def test_code_blocks_run(page, package, capsys):
    pytest.importorskip(package, reason=f"the extra `{package}` is not installed")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / f"docs/guides/{page}.md").read_text(), re.DOTALL)
    known = dict(LAYER_RULES)
    try:
        exec(compile("\n".join(blocks), page, "exec"), {"__name__": "docs"})
    finally:
        LAYER_RULES.clear()
        LAYER_RULES.update(known)
    value, target = (
        float(re.search(r"ε = ([\d.]+) after", capsys.readouterr().out)[1]),
        3.0 if page == "lightning" else 8.0,
    )
    assert 0.97 * target < value <= target


@pytest.mark.filterwarnings("ignore")
def test_adapters_learn_private_text(capsys, monkeypatch):
    pytest.importorskip("peft", reason="the extra `transformers` is not installed")
    known = dict(LAYER_RULES)
    monkeypatch.setattr(sys, "argv", ["lora_text.py", "--public-steps", "150", "--epochs", "8"])
    try:
        runpy.run_path(str(ROOT / "examples/lora_text.py"), run_name="__main__")
    finally:
        LAYER_RULES.clear()
        LAYER_RULES.update(known)
    printed = capsys.readouterr().out
    assert float(re.search(r"ε = ([\d.]+) at", printed)[1]) <= 8.0
    before, after = map(float, re.search(r"([\d.]+) without the adapters, ([\d.]+) with them", printed).groups())
    assert after < before - 0.05
