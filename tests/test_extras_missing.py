"""Extras are extras: nothing loads them unasked, and where one is missing one sentence says what to
do."""

import importlib
import subprocess
import sys

import pytest


def test_importing_zetaclip_loads_no_extra():
    code = (
        "import sys, zetaclip; zetaclip.PrivacyEngine, zetaclip.Budget; import "
        "zetaclip.integrations; "
        "found = {'lightning', 'transformers', 'peft', 'accelerate', 'ray'} & set(sys.modules); "
        "assert not found, found; assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("layer", "missing"),
    [
        ("lightning", "lightning.fabric.plugins"),
        ("transformers", "transformers"),
        ("language", "transformers.pytorch_utils"),
    ],
)
def test_a_missing_extra_is_one_sentence(layer, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"zetaclip.integrations.{layer}", raising=False)
    extra = "lightning" if layer == "lightning" else "transformers"
    with pytest.raises(ImportError, match=rf"pip install 'zetaclip\[{extra}\]'$"):
        importlib.import_module(f"zetaclip.integrations.{layer}")


@pytest.mark.parametrize("missing", ["plotly", "matplotlib"])
@pytest.mark.parametrize("words", [["report", "."], ["watch", "."]])
def test_a_report_without_its_extra_says_what_to_install(missing, words, monkeypatch, capsys):
    from zetaclip.cli import main

    monkeypatch.setitem(sys.modules, missing, None)
    assert main(words) == 2
    assert "pip install 'zetaclip[report]'" in capsys.readouterr().err


def test_the_package_itself_needs_neither_plotly_nor_matplotlib():
    code = (
        "import sys; sys.modules['plotly'] = sys.modules['matplotlib'] = None; "
        "import zetaclip, zetaclip.cli.train, zetaclip.training, zetaclip.experiments.session; "
        "zetaclip.PrivacyEngine, zetaclip.Budget"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
