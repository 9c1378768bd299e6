"""``zetaclip train`` as somebody types it."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from zetaclip.cli import main
from zetaclip.training.signals import Interrupted

ROOT = Path(__file__).parents[2]
WORDS = [
    "train",
    "--data",
    "digits",
    "--model",
    "mlp-2",
    "--batch-size",
    "64",
    "--threads",
    "1",
    "--quiet",
]


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_flags_go_over_the_file_and_set_over_both(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        'method = "ww-dp-sgd"\nsigma = 5.0\nsteps = 3\nlr = 0.1\n'
        "[spectral]\nperiod = 1\ngain = 0.3\n"
    )
    words = [
        *WORDS,
        "--config",
        str(file),
        "--sigma",
        "2",
        "--set",
        "lr=0.2",
        "--set",
        "spectral.gain=0.05",
    ]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["sigma"], config["steps"], config["lr"]) == (2.0, 3, 0.2)
    assert config["spectral"] == {"period": 1, "gain": 0.05}
    printed = capsys.readouterr().out
    for part in (
        "accuracy",
        "ε =",
        "δ = 1e-05",
        "PLD",
        "add/remove one record: one image",
        "C: final",
        "folder:",
    ):
        assert part in printed
    assert f"{result(tmp_path / 'run')['epsilon']:.3g}" in printed


def test_a_training_keeps_the_memory_it_frees(tmp_path, monkeypatch):
    from zetaclip.cli import train

    told = []
    monkeypatch.setattr(train, "keep_freed_memory", lambda: told.append(True))
    assert main([*WORDS, "--sigma", "2", "--steps", "1", "--out", str(tmp_path / "run")]) == 0
    assert told == [True]


def test_resume_needs_nothing_but_the_folder(tmp_path, monkeypatch, capsys):
    from zetaclip.training.steps import PrivateSteps

    out = str(tmp_path / "run")
    moved = PrivateSteps.moved

    def interrupted(self, clip=None):
        moved(self, clip)
        if self.done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    words = [*WORDS, "--sigma", "2", "--steps", "5", "--lr", "0.3", "--out", out]
    with monkeypatch.context() as patch:
        patch.setattr(PrivateSteps, "moved", interrupted)
        assert main(words) == 130
    assert f"zetaclip train --out {out} --resume" in capsys.readouterr().err
    assert main(["train", "--out", out, "--resume", "--lr", "0.4"]) == 2
    assert "lr (0.3 there, 0.4 here)" in capsys.readouterr().err
    assert main(["train", "--out", out, "--resume", "--quiet"]) == 0
    assert result(tmp_path / "run")["steps"] == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "dp-sdg", "--sigma", "1"], "dp-sgd"),
        (["--method", "ww-dp-sgd", "--set", "spectral.gian=1", "--sigma", "1"], "gian"),
        (["--data", "digit", "--sigma", "1"], "digits"),
        (["--model", "cn", "--sigma", "1"], "cnn"),
        (["--epsilon", "1", "--sigma", "1"], "not both"),
        (["--method", "sgd", "--epsilon", "1"], "not private"),
        (["--resume"], "--out"),
        (["--rekey"], "--resume"),
        (["--method", "dp-sgd", "--set", "spectral.gain=1", "--sigma", "1"], "does not use it"),
        (["--clipping", "spectral", "--method", "quantile", "--sigma", "1"], "can't replace"),
        (["--epsilon", "1e-9", "--accountant", "rdp"], "ε"),
        (["--device", "foo", "--sigma", "1"], "there is: cpu"),
        (["--device", "cuda:99", "--sigma", "1"], "there is: cpu"),
        (["--out", "TYPO", "--resume"], "nothing to resume in TYPO; leave --resume out"),
    ],
)
def test_what_can_not_be_done_is_said_in_one_line_without_a_traceback(
    tmp_path, capsys, words, said
):
    place = [] if "--resume" in words else ["--out", str(tmp_path / "run")]
    assert main([*WORDS, *words, *place]) == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed
    assert not (tmp_path / "run").exists() and not Path("TYPO").exists()


def test_ctrl_c_before_the_first_step_is_one_line(tmp_path, monkeypatch, capsys):
    from zetaclip.training import start

    def interrupted(*_):
        raise KeyboardInterrupt

    for name in ("load_data", "PrivateSteps"):
        with monkeypatch.context() as patch:
            patch.setattr(start, name, interrupted)
            assert (
                main([*WORDS, "--sigma", "2", "--steps", "1", "--out", str(tmp_path / "run")])
                == 130
            )
        assert (
            capsys.readouterr().err == "zetaclip: interrupted\n" and not (tmp_path / "run").exists()
        )


def test_help_does_not_wait_for_torch():
    for words in (["--help"], ["train", "--help"]):
        code = (
            f"import sys; sys.argv = ['zetaclip', *{words!r}]\nfrom zetaclip.cli import "
            "main\ntry:\n    main()\nexcept SystemExit:\n    assert 'torch' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_example_script_trains_and_resumes(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "examples" / "train.py"),
        "--epochs=1",
        "--network=mlp-2",
        "--accountant=rdp",
    ]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "epoch 1/1" in first.stdout and (tmp_path / "ledger.jsonl").exists()
    again = subprocess.run(
        [*command, "--resume=True"], cwd=tmp_path, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert "6 steps, 6 releases" in again.stdout


def test_a_device_that_is_there_and_fails_says_why(monkeypatch):
    import torch

    from zetaclip.training import ConfigError
    from zetaclip.training.start import check_device

    def full(*_, **__):
        raise RuntimeError("out of memory\nand a page of advice")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(
        ConfigError, match=r"^device 'cpu' can't be used here \(out of memory\); there is: cpu"
    ):
        check_device("cpu")
    with pytest.raises(ConfigError, match=r"^device 'gpu' can't be used here; there is: cpu"):
        check_device("gpu")


def test_the_live_report_stays_until_ctrl_c(tmp_path, capsys, monkeypatch):
    pages = []

    class Event:
        def wait(self):
            address = capsys.readouterr().err.rpartition("stays at ")[2].split()[0]
            with urllib.request.urlopen(address) as answer:
                pages.append(answer.read().decode())
            raise KeyboardInterrupt

    monkeypatch.setattr("zetaclip.cli.train.threading", SimpleNamespace(Event=Event))
    words = [*WORDS, "--sigma", "2", "--steps", "2", "--watch", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert len(pages) == 1 and '<span class="state finished">' in pages[0]


def test_a_run_is_resumed_from_any_working_directory(tmp_path, capsys, monkeypatch):
    """Data and schema were given relative to where the run was started."""
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    begun.mkdir(), elsewhere.mkdir()
    rows = "\n".join(f"{number % 7},{number % 5},{number % 2}" for number in range(80))
    (begun / "table.csv").write_text(f"a,b,y\n{rows}\n")
    (begun / "schema.toml").write_text(
        'target = "y"\nclasses = ["0", "1"]\n'
        '[columns.a]\ntype = "numeric"\nbounds = [0, 6]\n'
        '[columns.b]\ntype = "numeric"\nbounds = [0, 4]\n'
    )
    words = "--data table.csv --schema schema.toml --num-examples 63 --batch-size 20 --sigma 2"
    monkeypatch.chdir(begun)
    monkeypatch.setattr("zetaclip.training.loop.Training.train", _interrupted)
    assert main(["train", *words.split(), "--steps", "6", "--seed", "1", "--out", "run"]) == 130
    monkeypatch.undo()
    monkeypatch.chdir(elsewhere)
    capsys.readouterr()
    assert main(["train", "--out", str(begun / "run"), "--resume"]) == 0
    assert f"continuing in {begun}" in capsys.readouterr().err
    assert Path.cwd() == begun  # the command's process ends here
    assert json.loads((begun / "run" / "result.json").read_text())["steps"] == 6


def _interrupted(training):
    """Takes two updates, saves, and stops as after Ctrl-C."""
    for done in training.steps.updates(2):
        assert done
    training.save()
    raise Interrupted(2)
