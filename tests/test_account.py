"""``zetaclip account`` against figures computed elsewhere with Opacus and dp-accounting."""

import json
import subprocess
import sys

import pytest

from zetaclip.cli import main

SETTING = [
    "--batch-size",
    "256",
    "--num-examples",
    "60000",
    "--epochs",
    "8",
    "--delta",
    "1e-5",
    "--json",
]


def told(capsys, *words):
    assert main(["account", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_epsilon_by_each_accountant(capsys):
    found = told(capsys, "--sigma", "1.1", *SETTING, "--accountant", "all")
    assert found["steps"] == 1880
    assert found["epsilon_by"] == pytest.approx(
        {"rdp": 1.0265, "prv": 0.8310, "pld": 0.8210}, rel=2e-3
    )


def test_one_accountant_unless_all_are_asked_for(capsys):
    assert list(told(capsys, "--sigma", "1.1", *SETTING)["epsilon_by"]) == ["pld"]
    prv = told(capsys, "--sigma", "1.1", *SETTING, "--accountant", "prv")["epsilon_by"]
    assert prv == pytest.approx({"prv": 0.8310}, rel=2e-3)


def test_it_answers_without_torch():
    """Torch and Opacus would take two seconds."""
    code = (
        "import sys; from zetaclip.cli import main; "
        f"assert main(['account', '--sigma', '1.1', *{SETTING!r}]) == 0; "
        "assert not {'torch', 'opacus'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_noise_by_each_accountant(capsys):
    found = told(capsys, "--epsilon", "8", *SETTING, "--accountant", "all")
    assert found["sigma_by"]["prv"] == pytest.approx(0.5126, rel=2e-3)
    assert found["sigma_by"]["rdp"] == pytest.approx(0.5386, rel=2e-3)


def test_no_noise_is_no_privacy(capsys):
    assert told(capsys, "--sigma", "0", *SETTING, "--accountant", "all")["epsilon_by"] == {
        "rdp": None,
        "prv": None,
        "pld": None,
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sigma", "1", "--steps", "10"], "--sample-rate"),
        (["--sigma", "1", "--sample-rate", "2", "--steps", "10"], "in (0, 1]"),
        (["--sigma", "1", "--sample-rate", "0.1"], "--steps or --epochs"),
        (["--sigma", "1", "--sample-rate", "0.1", "--steps", "0"], "positive"),
        (["--sigma", "-1", "--sample-rate", "0.1", "--steps", "5"], "at least 0"),
        (
            ["--sigma", "1", "--sample-rate", "0.1", "--steps", "5", "--delta", "0"],
            "between 0 and 1",
        ),
    ],
)
def test_what_can_not_be_accounted_is_said(capsys, words, said):
    assert main(["account", *words]) == 2
    assert said in capsys.readouterr().err
