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
        ("sklearn", "sklearn.base"),
    ],
)
def test_a_missing_extra_is_one_sentence(layer, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"zetaclip.integrations.{layer}", raising=False)
    extra = "transformers" if layer == "language" else layer
    with pytest.raises(ImportError, match=rf"pip install 'zetaclip\[{extra}\]'$"):
        importlib.import_module(f"zetaclip.integrations.{layer}")


@pytest.mark.parametrize("missing", ["plotly", "matplotlib"])
@pytest.mark.parametrize("words", [["report", "."], ["watch", "."]])
def test_a_report_without_its_extra_says_what_to_install(missing, words, monkeypatch, capsys):
    from zetaclip.cli import main

    monkeypatch.setitem(sys.modules, missing, None)
    assert main(words) == 2
    assert "pip install 'zetaclip[report]'" in capsys.readouterr().err


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    from zetaclip import data
    from zetaclip.errors import InputError

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"pip install 'zetaclip\[sklearn\]'$"):
        data.load("digits")


def test_the_package_itself_needs_no_extra(tmp_path):
    """A training from a table, its prediction and its check, where no extra is installed."""
    table = tmp_path / "table.csv"
    table.write_text("a,y\n" + "".join(f"{i % 7},{i % 2}\n" for i in range(60)))
    run, out = tmp_path / "run", tmp_path / "predicted.csv"
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['plotly', 'matplotlib', 'sklearn'])); "
        "import zetaclip, zetaclip.experiments.session; from zetaclip.cli import main; "
        "zetaclip.PrivacyEngine, zetaclip.Budget; "
        f"train = ['train', '--data', {str(table)!r}, '--target', 'y', '--epsilon', '3']; "
        f"assert main([*train, '--steps', '3', '--out', {str(run)!r}]) == 0; "
        f"assert main(['predict', {str(run)!r}, {str(table)!r}, '--out', {str(out)!r}]) == 0; "
        f"assert main(['verify', {str(run)!r}]) == 0"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
