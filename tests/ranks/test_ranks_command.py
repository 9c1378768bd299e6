"""``zetaclip train`` on two ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_work

from zetaclip.ledger import Ledger
from zetaclip.training.verify import verify

WORDS = [
    "train",
    "--data",
    "digits",
    "--model",
    "mlp-2",
    "--batch-size",
    "64",
    "--seed",
    "7",
    "--threads",
    "1",
]
SPECTRAL = ["--method", "ww-dp-sgd", "--set", "spectral.period=5"]


def read(folder):
    return json.loads((folder / "result.json").read_text())


def contents(folder):
    return {
        name: (folder / name).read_bytes()
        for name in ("model.safetensors", "ledger.jsonl", "probes.jsonl")
    }


def test_two_ranks_spend_what_one_process_does_and_only_rank_0_writes(two, tmp_path):
    words = [*WORDS, *SPECTRAL, "--steps", "30", "--epsilon", "8", "--accountant", "rdp"]
    assert rank_work.command(0, [*words, "--out", str(tmp_path / "one")])["code"] == 0
    first, second = two.run(rank_work.command, [*words, "--out", str(tmp_path / "two")])
    assert first["code"] == second["code"] == 0, first
    assert "epoch 1/2" in first["err"] and "ε = " in first["out"]
    assert second["out"] == second["err"] == ""
    one, both = read(tmp_path / "one"), read(tmp_path / "two")
    for name in (
        "epsilon",
        "steps",
        "sample_rate",
        "sigma",
        "expected_batch_size",
        "num_examples",
        "claim",
    ):
        assert both[name] == one[name], name
    assert (one["ranks"], both["ranks"]) == (1, 2)
    ledgers = [Ledger.from_jsonl(tmp_path / name / "ledger.jsonl") for name in ("one", "two")]
    assert len({ledger.header for ledger in ledgers}) == 1
    assert len(ledgers[0]) == len(ledgers[1]) == 30
    assert verify(tmp_path / "two") == []
    assert both["metrics"]["accuracy"] > 0.5 and both["probes"]["count"] == 6


def test_a_signal_to_one_rank_stops_all_and_the_rest_is_bit_equal(two, tmp_path):
    words = [*WORDS, *SPECTRAL, "--steps", "20", "--sigma", "2"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    two.run(rank_work.command, [*words, "--out", str(whole)])
    for found in two.run(rank_work.command, [*words, "--out", str(cut)], 9):
        assert found["code"] == 128 + signal.SIGTERM
    status = json.loads((cut / "status.json").read_text())
    # Rank 1's signal came after update 9, so it travelled with the sum of the next.
    assert status["state"] == "stopped" and status["step"] == 10
    assert status["resume"] == f"torchrun --nproc-per-node 2 -m zetaclip train --out {cut} --resume"
    other = tmp_path / "other"
    shutil.copytree(cut, other)
    for words in (
        ["train", "--out", str(cut), "--resume"],
    ) * 2:  # the second time it is finished already
        assert [found["code"] for found in two.run(rank_work.command, words)] == [0, 0]
    assert contents(whole) == contents(cut)

    refused = rank_work.command(0, ["train", "--out", str(other), "--resume"])
    assert (
        refused["code"] == 2
        and "ranks (2 there, 1 here)" in refused["err"]
        and "--rekey" in refused["err"]
    )
    assert rank_work.command(0, ["train", "--out", str(other), "--resume", "--rekey"])["code"] == 0
    rows = list(Ledger.from_jsonl(other / "ledger.jsonl").rows())
    assert len(rows) == 20 and len({row.stream for row in rows}) == 2


def test_errors_before_training_are_said_once(two, tmp_path):
    (tmp_path / "file").write_text("")
    for words, said in (
        (["--sigma", "1", "--method", "sgd"], "sigma means nothing"),
        (["--method", "sgd"], "Train it in one process"),
        (["--model", "nonsense"], "nonsense"),
        (["--sigma", "1", "--out", str(tmp_path / "file" / "run")], "cannot write"),
        (["--sigma", "0.6", "--max-epsilon", "0.001"], "does not allow a single step"),
        (["--set", "method_options.nonsense=3"], "no option 'nonsense'"),
    ):
        words = [*WORDS, "--steps", "3", "--out", str(tmp_path / "run"), "--force", *words]
        first, second = two.run(rank_work.command, words)
        assert first["code"] == second["code"] == 2
        assert first["err"].count("zetaclip: ") == 1 and said in first["err"]
        assert second["err"] == ""


def test_max_epsilon_stops_every_rank_after_the_same_update(two, tmp_path):
    words = [
        *WORDS,
        *SPECTRAL,
        "--steps",
        "30",
        "--sigma",
        "1",
        "--max-epsilon",
        "2",
        "--accountant",
        "rdp",
    ]
    rank_work.command(0, [*words, "--out", str(tmp_path / "one")])
    two.run(rank_work.command, [*words, "--out", str(tmp_path / "two")])
    one, both = read(tmp_path / "one"), read(tmp_path / "two")
    assert 0 < one["steps"] == both["steps"] < 30 and one["epsilon"] == both["epsilon"] <= 2


@pytest.mark.slow
def test_torchrun_with_a_rank_killed_in_the_middle(tmp_path):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "zetaclip",
    ]
    out = tmp_path / "run"
    words = [*launcher, *WORDS, *SPECTRAL, "--steps", "400", "--sigma", "2", "--out", str(out)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "OMP_NUM_THREADS": "1",
    }
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
    deadline = time.monotonic() + 120
    while (
        sum(
            path.read_bytes().count(b'"noise_std"')
            for path in (out / "checkpoint").glob("*.journal")
        )
        < 40
    ):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    victim = _rank(process.pid, 1)
    os.kill(victim, signal.SIGKILL)
    assert process.wait(60) != 0
    assert f"rank 1 (process {victim}" in (tmp_path / "log").read_text()
    done = subprocess.run(
        [*launcher, "train", "--out", str(out), "--resume"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert verify(out) == [] and read(out)["steps"] == 400
    streams = {row.stream for row in Ledger.from_jsonl(out / "ledger.jsonl").rows()}
    assert (
        len(streams) == 1 and len(Ledger.from_jsonl(out / "ledger.jsonl")) == 400
    )  # replayed: counted once


def _rank(launcher, rank):
    """The process of that rank among the launcher's children."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if (
                parent == launcher
                and f"RANK={rank}\0".encode() in b"\0" + (folder / "environ").read_bytes()
            ):
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank}")
