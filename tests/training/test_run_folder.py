"""What a run leaves behind, and what it must not."""

import json
import math
import os
import signal
import stat
import subprocess

import pytest
import small_runs
import torch
from safetensors.torch import load_file

from zetaclip import PrivacyEngine, methods
from zetaclip.data import load
from zetaclip.engine._checkpoint import CheckpointError
from zetaclip.errors import AccountingError, PrivacyLeakWarning, RankError
from zetaclip.gradients import CaptureError
from zetaclip.ledger import Ledger
from zetaclip.models import build
from zetaclip.training import ConfigError, FolderError, Interrupted
from zetaclip.training.folder import RunFolder
from zetaclip.training.steps import PrivateSteps


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def test_the_files_are_there_and_the_secrets_are_gone(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.json", "model.json", "status.json", "metrics.jsonl", "probes.jsonl",
        "ledger.jsonl", "model.safetensors", "result.json", "MODEL_CARD.md",
    }  # fmt: skip
    assert json.loads((finished / "status.json").read_text())["state"] == "finished"


def test_the_epsilon_is_opacus_own(finished):
    from opacus.accountants import PRVAccountant

    result = result_of(finished)
    accountant = PRVAccountant()
    accountant.history = [(2.0, 64 / 1437, 30)]
    assert result["epsilon"] == pytest.approx(accountant.get_epsilon(delta=1e-5), rel=0.03)
    assert result["sample_rate"] == 64 / 1437 and result["steps"] == 30 and result["sigma"] == 2.0
    assert (
        result["epsilon_by"]["pld"] <= result["epsilon"] + 0.01
        and result["epsilon"] <= result["epsilon_by"]["rdp"]
    )


def test_the_weights_are_those_of_a_loop_written_by_hand(tmp_path):
    """The same run without the trainer: engine, optimizer, loop."""
    config = small_runs.small(method="dp-sgd", spectral={}, steps=5, schedule="linear", clip=0.5)
    small_runs.run(tmp_path / "run", config)
    torch.manual_seed(7)
    data = load("digits")
    model = build("mlp-2", tuple(data.train.x.shape[1:]), 10)
    engine = PrivacyEngine(seed=7)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data.train.x, data.train.y), batch_size=64
    )
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=loader,
        noise_multiplier=2.0,
        clipping=0.5,
        num_examples=1437,
        loss_reduction="sum",
        decouple_lr=True,
    )
    for step, (x, y) in enumerate(loader):
        if step == 5:
            break
        for group in optimizer.param_groups:
            group["lr"] = 1.0 * (1 - step / 5)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(saved[name], value), name


def test_the_metric_is_that_of_the_saved_weights(finished):
    data = load("digits")
    model = build("mlp-2", tuple(data.train.x.shape[1:]), 10)
    model.load_state_dict(load_file(finished / "model.safetensors"))
    with torch.no_grad():
        right = (model(data.test.x).argmax(1) == data.test.y).double().mean().item()
    assert result_of(finished)["metric"] == {"name": "accuracy", "value": right}


def test_every_probe_is_kept_with_its_eigenvalues(finished):
    lines = [json.loads(line) for line in (finished / "probes.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 25, 30]
    weights = load_file(finished / "model.safetensors")["fc1.weight"].double()
    own = torch.linalg.svdvals(weights).square()
    kept = torch.tensor(lines[-1]["layers"]["fc1"]["eigenvalues"], dtype=torch.float64)
    assert torch.allclose(kept, own, rtol=1e-9)
    clip = result_of(finished)["clip"]
    path = [1.0, *(line["clip"] for line in lines[:-1])]
    assert clip["mean"] == pytest.approx(sum(path) / 6) and clip["final"] == lines[-1]["clip"]


@pytest.mark.parametrize("way", ["drop_state", "clear"])
def test_keys_are_overwritten_before_their_file_goes(tmp_path, way):
    """A second name for the same file shows what is left of it on the disk."""
    folder = RunFolder(tmp_path / "run")
    folder.create(needed_bytes=0)
    folder.secrets.write_bytes(b"a secret key")
    folder.checkpoint.write_bytes(b"weights")
    (tmp_path / "left").hardlink_to(folder.secrets)
    getattr(folder, way)()
    assert not folder.secrets.exists() and not folder.checkpoint.exists()
    assert (tmp_path / "left").read_bytes() == bytes(12)


def test_without_a_seed_none_is_written_and_two_runs_differ(tmp_path):
    config = small_runs.small(seed=None, steps=2)
    first, second = (small_runs.run(tmp_path / name, config) for name in ("a", "b"))
    assert "seed" not in first and first["noise_seed_known"] is False
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert not torch.equal(a["fc1.weight"], b["fc1.weight"])
    assert second["epsilon"] == first["epsilon"]


def test_batch_facts_are_written_only_when_asked_for(finished, tmp_path):
    for path in finished.iterdir():
        text = path.read_bytes()
        assert b"batch_losses" not in text and b"clip_fraction" not in text
    result = small_runs.run(
        tmp_path / "told", small_runs.small(steps=4, non_private_diagnostics=True)
    )
    lines = RunFolder(tmp_path / "told").read_lines("diagnostics.jsonl")
    assert sum(len(line["batch_sizes"]) for line in lines) == 4
    assert len({size for line in lines for size in line["batch_sizes"]}) > 1
    assert all(0 <= value <= 1 for line in lines for value in line["clip_fractions"])
    assert any("diagnostics.jsonl" in note for note in result["notes"])
    plain = small_runs.run(tmp_path / "plain", small_runs.small(steps=4))
    assert plain["metric"] == result["metric"]


@pytest.mark.parametrize(
    "method", ["adaclip", "adadpigu", "dp-adam-ac", "quantile", "bounded-adaptive", "slaclip"]
)
def test_the_share_that_was_clipped_is_noted_for_every_rule(tmp_path, method):
    changes = {"method": method, "steps": 4, "spectral": {}, "non_private_diagnostics": True}
    small_runs.run(tmp_path / "told", small_runs.small(**changes))
    lines = RunFolder(tmp_path / "told").read_lines("diagnostics.jsonl")
    shares = [share for line in lines for share in line["clip_fractions"]]
    assert len(shares) >= 4 and all(
        0 <= share <= 1 for share in shares
    )  # a batch may come in several pieces


def test_an_epsilon_that_can_not_be_told_is_found_before_training(tmp_path):
    config = small_runs.small(sigma=1.0, delta=1e-13, method="dp-sgd", spectral={})
    with pytest.raises(ConfigError, match="accountant='rdp'"):
        small_runs.run(tmp_path / "run", config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    result = small_runs.run(tmp_path / "run", config.changed(accountant="rdp"), force=True)
    assert result["epsilon"] > 0 and result["epsilon_by"]["prv"] is None


def test_an_epsilon_that_can_not_be_told_on_the_way_ends_no_training(tmp_path, monkeypatch):
    from zetaclip.accounting._accounting import AccountingError

    tell = PrivateSteps.epsilon

    def failing(self, accountant=None):
        if self.done < self.total:
            raise AccountingError("not now")
        return tell(self, accountant)

    monkeypatch.setattr(PrivateSteps, "epsilon", failing)
    result = small_runs.run(tmp_path / "run", small_runs.small(steps=30))
    told = [line["epsilon"] for line in RunFolder(tmp_path / "run").read_lines("metrics.jsonl")]
    assert told == [None, result["epsilon"]] and result["epsilon"] > 0


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (CaptureError("61 records are out"), None),
        (ValueError("no class for the label 'rare disease'"), None),
        (CheckpointError("something else is different now: data (5f3a there, 9c1b here)"), None),
        (RankError("rank 1: 61 records are out"), None),
        (
            FileNotFoundError(2, "No such file or directory", "patient-17.png"),
            "No such file or directory",
        ),
        (OSError("patient-17.png is cut off"), None),
        (AccountingError("PRV needs another grid"), "PRV needs another grid"),
        (ConfigError("sigma must be positive"), "sigma must be positive"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_an_error_says_of_records_is_not_published(tmp_path, monkeypatch, error, told):
    """The status is a public file; the terminal belongs to whoever holds the data."""

    def failing(*_):
        raise error

    monkeypatch.setattr(PrivateSteps, "moved", failing)
    with pytest.raises((type(error), FolderError)):
        small_runs.run(tmp_path / "run")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    said = "the message was printed on the terminal of the run" if told is None else told
    assert status["state"] == "failed" and status["message"] == f"{type(error).__name__}: {said}"


def test_an_error_that_repeats_another_tells_no_more_than_it(tmp_path, monkeypatch):
    """Setting up turns whatever is wrong with a value into an error about settings, also where that
    was a record's."""
    monkeypatch.setattr(PrivateSteps, "moved", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        small_runs.run(tmp_path / "run")

    def failing(*_):
        raise ValueError("no class for the label 'rare disease'")

    monkeypatch.setattr(PrivateSteps, "__init__", failing)
    with pytest.raises(ConfigError, match="rare disease"):
        small_runs.run(tmp_path / "run", resume=True)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["message"] == "ConfigError: the message was printed on the terminal of the run"


def test_no_eval_writes_no_metric(tmp_path):
    result = small_runs.run(tmp_path / "run", small_runs.small(steps=2, no_eval=True))
    assert (
        result["metric"]["value"] is None
        and result["metrics"] == {}
        and result["reliability"] is None
        and result["evaluation"] is None
    )


def test_the_result_has_what_each_class_was_taken_for(finished):
    result = result_of(finished)
    found = result["evaluation"]
    right = sum(row[place] for place, row in enumerate(found["confusion"]))
    assert right / sum(map(sum, found["confusion"])) == result["metric"]["value"]
    assert [part["records"] for part in found["per_class"]] == list(map(sum, found["confusion"]))


def test_class_names_that_came_from_private_records_are_not_published(tmp_path):
    rows = "\n".join(f"{n % 7},{'sick' if n % 2 else 'well'}" for n in range(200))
    (tmp_path / "t.csv").write_text(f"a,y\n{rows}\n")
    own = {"data": str(tmp_path / "t.csv"), "target": "y", "model": "mlp", "spectral": {}}
    with pytest.warns(PrivacyLeakWarning):
        small_runs.run(tmp_path / "run", small_runs.small(steps=2, **own))
    text = (tmp_path / "run" / "result.json").read_text()
    assert json.loads(text)["evaluation"]["classes"] == ["0", "1"]
    assert "sick" not in text


def test_the_paper_s_literal_form_claims_nothing(tmp_path):
    result = small_runs.run(tmp_path / "run", small_runs.small(steps=2, normalize="realized"))
    assert result["epsilon"] is None and result["claim"].startswith("none: ")
    assert Ledger.from_jsonl(tmp_path / "run" / "ledger.jsonl").header.claims_privacy is False


def test_max_epsilon_stops_before_it_is_exceeded(tmp_path, finished):
    whole = result_of(finished)["epsilon"]
    limit = 0.8 * whole
    result = small_runs.run(tmp_path / "run", small_runs.small(max_epsilon=limit))
    assert 0 < result["steps"] < 30 and result["epsilon"] <= limit
    more = small_runs.run(tmp_path / "more", small_runs.small(sigma=2.0, steps=result["steps"] + 1))
    assert more["epsilon"] > limit
    with pytest.raises(ConfigError, match="not allow a single step"):
        small_runs.run(tmp_path / "none", small_runs.small(max_epsilon=1e-3))


@pytest.mark.parametrize("method", ["dp-sam", "quantile", "adp-adamw", "dp-is"])
def test_the_plan_foretells_the_ledger(tmp_path, method):
    """What max_epsilon reckons with is what is then released."""
    from zetaclip.training.recipe import build_method, resolve
    from zetaclip.training.records import load_data

    config = small_runs.small(method=method, spectral={}, steps=6, batch_size=500)
    data, made = load_data(config), build_method(config)
    config = resolve(config, data, made)
    steps = PrivateSteps(config, data, made, build("mlp-2", (1, 8, 8), 10))
    planned = sorted(
        (e.sample_rate, e.noise_multiplier, e.count) for e in steps.engine.planned_events(0, 6)
    )
    while steps.done < 6:
        for _ in steps.updates(6):
            pass
    released = sorted(
        (e.sample_rate, e.noise_multiplier, e.count) for e in steps.engine.ledger.events()
    )
    assert [count for *_, count in planned] == [count for *_, count in released]
    for there, here in zip(planned, released, strict=True):
        assert there == pytest.approx(here, rel=1e-9)


def test_no_digit_of_a_gradient_hangs_on_how_many_others_are_in_the_batch():
    """As it would with a mean: a seventh in place of a fifth moves every last digit, and norms that
    lie on a threshold with it."""
    from zetaclip.training.recipe import build_method, resolve
    from zetaclip.training.records import load_data

    config = small_runs.small(steps=1)
    data, made = load_data(config), build_method(config)
    steps = PrivateSteps(resolve(config, data, made), data, made, build("mlp-2", (1, 8, 8), 10))
    assert steps.engine._private().settings.loss_reduction == "sum"
    logits = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))

    def at_the_output(count):
        outputs = logits[:count].clone().requires_grad_()
        steps.model = lambda x: outputs
        steps.backward(data.train.x[:count], data.train.y[:count])
        return outputs.grad[:5]

    assert torch.equal(at_the_output(5), at_the_output(7))


def test_plain_training_is_torch_s_own(tmp_path):
    config = small_runs.small(
        method="sgd", spectral={}, sigma=None, steps=4, lr=0.1, schedule="constant"
    )
    result = small_runs.run(tmp_path / "run", config)
    assert result["epsilon"] is None and "ledger.jsonl" not in {
        p.name for p in (tmp_path / "run").iterdir()
    }
    torch.manual_seed(7)
    data = load("digits")
    model = build("mlp-2", (1, 8, 8), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(7))
    for rows in order.split(64)[:4]:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data.train.x[rows]), data.train.y[rows]).backward()
        optimizer.step()
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_physical_batches_change_nothing_in_plain_training(tmp_path):
    common = {"method": "sgd", "spectral": {}, "sigma": None, "steps": 3}
    small_runs.run(tmp_path / "whole", small_runs.small(**common))
    small_runs.run(tmp_path / "parts", small_runs.small(**common, physical_batch_size=17))
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    for name, value in whole.items():
        assert torch.allclose(value, parts[name], rtol=1e-4, atol=1e-6), name


def test_a_finished_folder_is_never_overwritten_without_force(finished, tmp_path):
    before = (finished / "result.json").read_bytes()
    with pytest.raises(FolderError, match="finished run"):
        small_runs.run(finished)
    assert small_runs.run(finished, resume=True) == json.loads(before)
    assert (finished / "result.json").read_bytes() == before
    small_runs.run(tmp_path / "run", small_runs.small(steps=2))
    (tmp_path / "run" / "mine.txt").write_text("keep me")
    small_runs.run(tmp_path / "run", small_runs.small(steps=3), force=True)
    assert result_of(tmp_path / "run")["steps"] == 3
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep me"


def test_kept_state_is_readable_by_its_owner_alone(tmp_path):
    small_runs.run(tmp_path / "run", small_runs.small(steps=2), keep_state=True)
    private = tmp_path / "run" / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private.iterdir())


def test_a_folder_that_can_not_be_written_is_refused_before_training(tmp_path, monkeypatch):
    place = tmp_path / "file"
    place.write_text("in the way")
    with pytest.raises(FolderError, match="cannot write"):
        small_runs.run(place / "run", small_runs.small(steps=2))
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(FolderError, match="MiB free"):
        small_runs.run(tmp_path / "full", small_runs.small(steps=2))


def test_the_average_of_the_weights_is_what_is_saved_and_judged(tmp_path):
    result = small_runs.run(tmp_path / "run", small_runs.small(steps=6, weight_average=0.9))
    plain = small_runs.run(tmp_path / "plain", small_runs.small(steps=6))
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "plain"))
    assert not torch.equal(a["fc1.weight"], b["fc1.weight"])
    assert any("moving average" in note for note in result["notes"])
    assert result["epsilon"] == plain["epsilon"]


def test_every_named_method_has_a_rate(tmp_path):
    assert all(
        math.isfinite(methods.get(name).lr) and methods.get(name).lr > 0 for name in methods.names()
    )


def test_the_commit_is_the_one_that_git_names():
    from pathlib import Path

    from zetaclip.training.provenance import commit

    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    assert commit().rstrip("+") == done.stdout.strip()
