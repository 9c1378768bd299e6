"""A small experiment and a results folder to run it in, with a trainer that trains nothing."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zetaclip.experiments import spec
from zetaclip.experiments.runner import TRAIN_VARIABLE
from zetaclip.experiments.store import Store

STAND_IN = Path(__file__).with_name("stand_in.py")

MINI = """
title = "Mini"
baseline = "DP-SGD"
data = "mnist"
readings = ["sigma"]
measures = ["accuracy", "clip_mean"]
[datasets.mnist]
rates = { sgd = 0.25 }
looks = [3]
[[rows]]
label = "DP-SGD"
method = "dp-sgd"
[[rows]]
label = "Spectral"
method = "ww-practical"
rate_of = "dp-sgd"
[[rows]]
label = "Replay"
method = "dp-sgd"
set = { clipping = { kind = "replay", run = "@run:Spectral@other-seed" } }
[[series]]
name = "clip"
kind = "probes"
values = ["clip"]
title = "C"
[published]
"DP-SGD" = ["94.22 ± 0.15", "--"]
"Spectral" = ["95.99 ± 0.08", "1.05"]
"""


@pytest.fixture
def mini_file(tmp_path):
    path = tmp_path / "mini.toml"
    path.write_text(MINI, encoding="utf-8")
    return path


@pytest.fixture
def mini(mini_file):
    return spec.load(str(mini_file))


@pytest.fixture
def two_readings():
    """The experiment iid with two readings of one data set."""
    experiment = spec.load("iid")
    columns = tuple(
        {**column, "readings": ["sigma", "eight"]} if column["data"] == "mnist" else column
        for column in experiment.columns
    )
    return replace(experiment, columns=columns)


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path / "out", verify=lambda folder: [])


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch, tmp_path_factory):
    # The runner looks whether MNIST is there; the stand-in never opens it.
    root = tmp_path_factory.mktemp("data")
    (root / "mnist").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (root / "mnist" / f"{name}-ubyte").touch()
    monkeypatch.setenv("ZETACLIP_DATA", str(root))
    monkeypatch.setenv(TRAIN_VARIABLE, f"{sys.executable} -I {STAND_IN}")
    for name in ("STAND_IN_STEPS", "STAND_IN_PAUSE", "STAND_IN_FAIL", "STAND_IN_STUCK"):
        monkeypatch.delenv(name, raising=False)
