"""Extras are extras: nothing loads them unasked, and where one is missing one sentence says what to do."""

import importlib
import subprocess
import sys

import pytest


def test_importing_zetaclip_loads_no_extra():
    code = (
        "import sys, zetaclip; zetaclip.PrivacyEngine, zetaclip.Budget; import zetaclip.integrations; "
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
