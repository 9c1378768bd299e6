"""Trainings that are forked from one warm process are the trainings that a cold start would
give."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from zetaclip.cli.warm import _preload
from zetaclip.errors import CommandError
from zetaclip.experiments import spec
from zetaclip.experiments.fork_server import ForkServer, available
from zetaclip.experiments.plan import make_plan
from zetaclip.experiments.planned import config_key
from zetaclip.experiments.progress import Progress
from zetaclip.experiments.runner import TRAIN_VARIABLE, LocalBackend, run_all
from zetaclip.experiments.store import Store
from zetaclip.training import provenance

pytestmark = pytest.mark.skipif(not available(), reason="forks of a warm process are for Linux")

DIGITS = """
title = "Digits"
baseline = "DP-SGD"
data = "small"
measures = ["accuracy"]
[datasets.small]
size = 1437
rates = { sgd = 0.5 }
looks = [2]
set = { data = "digits", model = "mlp", batch_size = 64, steps = 12, sigma = 2.0 }
[[rows]]
label = "DP-SGD"
method = "dp-sgd"
"""


@pytest.fixture(scope="module")
def server():
    made = ForkServer({**os.environ, "OMP_NUM_THREADS": "1"})
    yield made
    made.close()


def ended(fork, seconds=60):
    deadline = time.monotonic() + seconds
    while (code := fork.poll()) is None:
        assert time.monotonic() < deadline, "it did not end"
        time.sleep(0.02)
    return code


def test_exit_codes_logs_and_processes_are_their_own(server, tmp_path):
    good = server.start(
        ["account", "--sigma", "1", "--sample-rate", "0.01", "--steps", "10"],
        str(tmp_path / "good"),
    )
    wrong = server.start(["train", "--data", "no-such-data"], str(tmp_path / "wrong"))
    usage = server.start(["train", "--no-such-flag"], str(tmp_path / "usage"))
    assert len({good.pid, wrong.pid, usage.pid, os.getpid()}) == 4
    assert (ended(good), ended(wrong), ended(usage)) == (0, 2, 2)
    assert "ε" in (tmp_path / "good").read_text(encoding="utf-8")
    assert "no-such-data" in (tmp_path / "wrong").read_text(encoding="utf-8")
    assert "no-such-flag" in (tmp_path / "usage").read_text(encoding="utf-8")
    assert good.poll() == 0  # asked again after it was reaped
    good.send_signal(signal.SIGKILL)  # and never sent to whoever has the number now


def test_forks_carry_the_commit_that_was_loaded():
    provenance.commit.cache_clear()
    _preload()
    assert (
        provenance.commit.cache_info().currsize == 1
    )  # what a fork stamps was asked before it was forked


def long_run(server, folder):
    words = [
        "train",
        "--data",
        "digits",
        "--model",
        "mlp",
        "--sigma",
        "2",
        "--steps",
        "1000000",
        "--accountant",
        "rdp",  # the others refuse, or take minutes for, so many steps
        "--seed",
        "1",
        "--quiet",
    ]
    fork = server.start([*words, "--out", str(folder)], str(folder) + ".log")
    deadline = time.monotonic() + 60
    while not list((folder / "checkpoint").glob("*.journal")):  # it takes steps
        assert fork.poll() is None and time.monotonic() < deadline, Path(f"{folder}.log").read_text(
            encoding="utf-8"
        )
        time.sleep(0.05)
    return fork


def test_a_polite_signal_saves_and_a_rude_one_is_seen(server, tmp_path):
    first, second = long_run(server, tmp_path / "a"), long_run(server, tmp_path / "b")
    first.send_signal(signal.SIGINT)
    assert ended(first) == 130
    assert "--resume" in (tmp_path / "a.log").read_text(encoding="utf-8")
    second.send_signal(signal.SIGKILL)
    assert ended(second) == -signal.SIGKILL


def test_an_answer_that_was_not_read_is_not_taken_for_the_next(server, tmp_path):
    fork = server.start(["--version"], str(tmp_path / "log"))
    process = server._process
    process.stdin.write(
        json.dumps({"number": -1, "poll": fork.pid}) + "\n"
    )  # as if Ctrl-C had come before the answer
    process.stdin.flush()
    late = server.start(["--version"], str(tmp_path / "late"))
    assert late.pid != fork.pid and ended(late) == 0


def test_a_warm_training_is_a_cold_one(tmp_path, monkeypatch):
    monkeypatch.delenv(TRAIN_VARIABLE)
    path = tmp_path / "digits.toml"
    path.write_text(DIGITS, encoding="utf-8")
    planned = []
    for run in make_plan(spec.load(str(path))).runs:
        config = {**run.config, "lr": 0.5}  # not tuned
        planned.append(replace(run, key=config_key(config), config=config))
    assert len(planned) == 2
    store = Store.open(tmp_path / "out")
    backend = LocalBackend(2)
    outcomes = run_all(planned, store, backend, 1, Progress(io.StringIO()))
    backend.close()
    assert {outcome.state for outcome in outcomes.values()} == {"done"}, outcomes
    weights = [load_file(store.folder(run.key) / "model.safetensors") for run in planned]
    run = planned[0]
    config = json.loads((store.folder(run.key) / "config.json").read_text(encoding="utf-8"))
    assert config["seed"] == run.config["seed"]
    cold = [
        sys.executable,
        "-m",
        "zetaclip",
        "train",
        "--config",
        str(tmp_path / "out/configs" / f"{run.key}.json"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run(
        [*cold, "--out", str(tmp_path / "cold"), "--quiet"],
        check=True,
        env=environment,
        capture_output=True,
    )
    reference = load_file(tmp_path / "cold/model.safetensors")
    assert all((weights[0][name] == value).all() for name, value in reference.items())
    assert any(
        (weights[1][name] != value).any() for name, value in reference.items()
    )  # another seed


def test_no_training_outlives_its_server(tmp_path):
    server = ForkServer({**os.environ, "OMP_NUM_THREADS": "1"})
    fork = long_run(server, tmp_path / "a")
    server._process.kill()
    deadline = time.monotonic() + 10
    while (
        Path(f"/proc/{fork.pid}").exists()
        and " Z " not in Path(f"/proc/{fork.pid}/stat").read_text()
    ):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)
    with pytest.raises(CommandError, match=r"exit code -9.*run the same command again"):
        server.start(["--version"], str(tmp_path / "log"))
    server.close()
