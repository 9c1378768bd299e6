"""MLflow and W&B get the series of the run folder, and nothing that the folder does not hold."""

import json
import sys

import pytest

from zetaclip.cli import main
from zetaclip.errors import CommandError
from zetaclip.report.series import scalars
from zetaclip.report.trackers import MlflowTracker, WandbTracker

WORDS = [
    *("train", "--data", "digits", "--model", "mlp-2", "--batch-size", "64", "--sigma", "2"),
    *("--steps", "60", "--seed", "3", "--threads", "1"),
    *("--method", "ww-dp-sgd", "--set", "spectral.period=20"),
]


@pytest.fixture
def database(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    pytest.importorskip("alembic", reason="MLflow's database needs alembic")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")


@pytest.fixture
def offline(monkeypatch):
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")


def lines(run, name):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


@pytest.mark.filterwarnings("ignore")  # those of MLflow and its database
def test_mlflow_gets_the_series_of_the_folder(tmp_path, database):
    from mlflow import MlflowClient

    run = tmp_path / "run"
    assert main([*WORDS, "--out", str(run), "--mlflow", "--quiet"]) == 0
    client, identity = MlflowClient(), json.loads((run / "trackers.json").read_text())["mlflow"]
    found, result = client.get_run(identity), json.loads((run / "result.json").read_text())

    def series(tag):
        return [(point.step, point.value) for point in client.get_metric_history(identity, tag)]

    epochs, probes = lines(run, "metrics.jsonl"), lines(run, "probes.jsonl")
    assert series("epoch/accuracy") == [(row["step"], row["accuracy"]) for row in epochs]
    assert series("zeta/smoothed") == [(row["step"], row["smoothed"]) for row in probes]
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert found.data.params["batch_size"] == "64"
    assert found.data.params["spectral.period"] == "20"
    assert found.data.metrics["result/epsilon"] == result["epsilon"]
    assert found.data.tags["result.claim"] == "differential privacy"
    assert {tag.partition("/")[0] for tag in found.data.metrics} <= {
        *("epoch", "seconds", "zeta", "control", "result")
    }


@pytest.mark.filterwarnings("ignore")
def test_a_stopped_run_is_continued_under_its_id(tmp_path, database):
    from mlflow import MlflowClient

    first = MlflowTracker({"epochs": 2, "lr": None}, "a")
    first("metrics", {"step": 5, "accuracy": 0.5})
    first.close(None)
    client = MlflowClient()
    assert client.get_run(first.identity).info.status == "KILLED"
    again = MlflowTracker({"epochs": 2}, "a", first.identity)
    again("metrics", {"step": 9, "accuracy": 0.75, "epsilon": float("nan")})
    again.close({"epsilon": 1.0, "metrics": {"accuracy": 0.75}})
    found = client.get_run(first.identity)
    points = client.get_metric_history(first.identity, "epoch/accuracy")
    assert [(point.step, point.value) for point in points] == [(5, 0.5), (9, 0.75)]
    assert found.info.status == "FINISHED" and found.data.params == {"epochs": "2"}


@pytest.mark.filterwarnings("ignore")
def test_wandb_gets_the_series_and_nothing_of_machine_or_terminal(tmp_path, offline, capfd):
    import wandb

    run = tmp_path / "run"
    assert main([*WORDS, "--out", str(run), "--wandb"]) == 0
    printed = capfd.readouterr().err
    assert "epoch 1/" in printed
    wandb.teardown()  # its own process writes the file, and may do so after the run has ended
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()
    for row in lines(run, "metrics.jsonl"):
        assert json.dumps(row["accuracy"]).encode()[:12] in written
    assert b"epoch/epsilon" in written and b"zeta/smoothed" in written
    assert b"differential privacy" in written  # the summary
    folder = [path for path in (run / "wandb").rglob("*") if path.is_file()]
    everything = b"".join(path.read_bytes() for path in folder if path.suffix != ".log")
    names = {path.name for path in folder}
    assert not names & {"wandb-metadata.json", "requirements.txt", "output.log", "diff.patch"}
    for word in ("loading digits", "epoch 1/", "--batch-size", "pytest"):
        assert word.encode() not in everything
    assert json.loads((run / "trackers.json").read_text())["wandb"] in file.name


@pytest.mark.filterwarnings("ignore")
def test_a_tracker_that_fails_does_not_stop_the_training(tmp_path, offline, monkeypatch, capsys):
    def broken(self, kind, line):
        raise OSError("the server is gone")

    monkeypatch.setattr(WandbTracker, "__call__", broken)
    run = tmp_path / "run"
    assert main([*WORDS, "--out", str(run), "--wandb", "--quiet"]) == 0
    said = capsys.readouterr().err
    assert said.count("wandb gets no further lines: the server is gone") == 1
    assert (run / "result.json").exists()


@pytest.mark.parametrize("name", ["mlflow", "wandb", "tensorboard"])
def test_without_the_package_the_message_says_what_to_install(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    assert main([*WORDS, "--out", str(tmp_path / "run"), f"--{name}"]) == 2
    assert f"pip install 'zetaclip[{name}]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    makers = {
        "mlflow": lambda: MlflowTracker({}, "a"),
        "wandb": lambda: WandbTracker({}, "a", tmp_path),
    }
    if name in makers:
        with pytest.raises(CommandError, match="pip install"):
            makers[name]()


def test_only_finite_numbers_of_known_fields_are_passed_on():
    line = {"step": 3, "accuracy": 0.5, "epsilon": None, "loss": float("inf"), "records": 17}
    assert scalars("metrics", line | {"seconds": {"train": 1}}) == {
        "epoch/accuracy": 0.5,
        "seconds/train": 1.0,
    }
    fits = {"fc1": {"ok": True, "zeta": 4.0}, "fc2": {"ok": False, "zeta": 9.0}}
    assert scalars("probe", {"step": 3, "layers": fits}) == {"zeta/fc1": 4.0}
    assert scalars("clip", {"step": 1, "clip": 0.5}) == {"control/clip": 0.5}
