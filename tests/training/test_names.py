"""Names are checked before torch is imported and data are read; messages name flags."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import small_runs

from zetaclip.cli.flags import in_flags
from zetaclip.errors import ConfigError, InputError
from zetaclip.training.config import Config
from zetaclip.training.names import check_names
from zetaclip.training.recipe import build_method
from zetaclip.training.verify import verify

WRONG = {
    "method": (["--method", "dp-sdg"], "did you mean 'dp-sgd'"),
    "spectral": (["--set", "spectral.gian=1"], "did you mean 'gain'"),
    "model": (["--model", "resnet-smal"], "did you mean 'resnet-small'"),
    "option of a method": (
        ["--method", "dp-sam", "--set", "method_options.roh=0.1"],
        "method 'dp-sam' has no option 'roh'; did you mean 'rho'",
    ),
    "option at the wrong place": (
        ["--method", "dp-sam", "--set", "rho=0.1"],
        "did you mean method_options.rho?",
    ),
    "option of features": (["--set", "features_options.miror=1"], "did you mean 'mirror'"),
    "no such option of these": (
        ["--features", "scattering", "--set", "features_options.mirror=1"],
        "mirror",
    ),
    "setting": (["--set", "epsilom=1"], "did you mean epsilon"),
    "data": (["--data", "mnits"], "Did you mean mnist?"),
    "option": (["--data", "digits", "--set", "data_options.seeed=1"], "it has scaling, seed"),
    "schema": (["--data", "TABLE", "--schema", "SCHEMA"], "needs a type, one of numeric"),
    "both": (["--epochs", "1", "--steps", "2"], "give --epochs or --steps, not both"),
    "range": (["--batch-size", "0"], "--batch-size must be positive"),
    "choice": (["--set", "empty=maybe"], "--empty is one of"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each wrong command line answers, and whether torch was imported for it."""
    root = tmp_path_factory.mktemp("names")
    (root / "t.csv").write_text("a,b\n1,x\n2,y\n")
    (root / "s.toml").write_text('[columns.a]\ntype = "numerik"\n')
    names = {"TABLE": str(root / "t.csv"), "SCHEMA": str(root / "s.toml")}
    lines = {key: [names.get(word, word) for word in words] for key, (words, _) in WRONG.items()}
    code = (
        "import contextlib, io, json, sys\n"
        "from zetaclip.cli import main\n"
        "told = {}\n"
        f"for key, words in {lines!r}.items():\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        code = main(['train', *words])\n"
        "    told[key] = [code, said.getvalue(), 'torch' in sys.modules]\n"
        "print(json.dumps(told))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=root)
    assert not (root / "runs").exists()
    return json.loads(done.stdout)


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_name_is_told_before_torch_is_imported(answers, key):
    code, said, torch = answers[key]
    assert code == 2 and WRONG[key][1] in said and not torch


def test_good_names_pass_and_own_objects_are_left_to_the_run(tmp_path):
    check_names(Config())
    check_names(Config(method="anything:at_all", spectral={"gain": 0.2, "aggregate": "mean"}))
    with pytest.raises(InputError, match="neither a known data set"):
        check_names(Config(data=str(tmp_path / "none.csv")))
    with pytest.raises(ConfigError, match="there are: sgd, adam"):
        check_names(Config(method="zzzz"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_examples= was not given", "--num-examples was not given"),
        ("use accountant='pld' or a larger δ", "use --accountant pld or a larger δ"),
        ('normalize="realized" divides', "--normalize realized divides"),
        ("batch_size 99 is more than N", "--batch-size 99 is more than N"),
        ("give `epochs` or `steps`", "give --epochs or --steps"),
        ("raise max_epsilon or sigma", "raise --max-epsilon or sigma"),
        ("after 3 epochs and 20 steps", "after 3 epochs and 20 steps"),
        ("cannot read data/batch_size.csv", "cannot read data/batch_size.csv"),
        ("noise_multiplier= and epsilon", "--sigma and epsilon"),
    ],
)
def test_settings_become_flags_and_words_stay_words(text, said):
    assert in_flags(text) == said


@pytest.mark.parametrize(
    ("settings", "clip"),
    [({"method": "own_method:FIXED"}, 0.5), ({"method": "own_method:made", "clip": 2.0}, 2.0)],
)
def test_a_method_of_ones_own_is_trained_and_verified(tmp_path, settings, clip, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)  # a console script searches the working directory
    result = small_runs.run(tmp_path / "run", small_runs.small(steps=2, spectral={}, **settings))
    assert result["method"] == settings["method"] and result["clip"]["final"] == clip
    assert verify(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "own_method:FIXED", "clip": 2.0}, "clip can't be set here"),
        ({"method": "own_method:made", "method_options": {"rho": 1}}, "rho"),
        ({"method": "own_method:NUMBER"}, "int"),
        ({"method": "own_method:nothing"}, "cannot find the method"),
    ],
)
def test_what_is_no_method_is_told(settings, said, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises((ConfigError, InputError), match=said):
        build_method(Config(**settings))
