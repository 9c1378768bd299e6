"""A run that was cut leaves weights, and says what they cost."""

import json
import os
import signal

import pytest
import torch
from made_up import patients, settings, write
from safetensors.torch import load_file

import zetaclip
from zetaclip.accounting import epsilon
from zetaclip.errors import InputError
from zetaclip.ledger import Ledger
from zetaclip.training import Interrupted, train
from zetaclip.training.steps import PrivateSteps


class _Stop(Exception):
    pass


def cut(monkeypatch, config, folder, after, kind):
    """Stops a run after some updates, by a signal or as if it had been killed."""
    moved = PrivateSteps.moved

    def counting(self, *args):
        moved(self, *args)
        if self.done == after:
            if kind == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise _Stop

    with monkeypatch.context() as patch:
        patch.setattr(PrivateSteps, "moved", counting)
        with pytest.raises(Interrupted if kind == "signal" else _Stop) as caught:
            train(config, folder)
    return caught.value


@pytest.mark.parametrize("average", [None, 0.9])
def test_a_stopped_run_has_weights_a_card_and_a_cost(tmp_path, monkeypatch, average):
    data = write(tmp_path / "p.csv", patients())
    config = settings(data, weight_average=average)
    stop = cut(monkeypatch, config, tmp_path / "cut", 25, "signal")
    assert "the weights after 25 of 40 updates, at ε = " in stop.left
    train(config.changed(steps=25, schedule="linear"), tmp_path / "short")
    run = zetaclip.load_run(tmp_path / "cut")
    assert not run.finished and run.steps == 25
    spent = epsilon(
        tuple(Ledger.from_jsonl(tmp_path / "cut" / "ledger.jsonl").events()),
        run.delta,
        config.accountant,
    )
    whole = json.loads((tmp_path / "short" / "result.json").read_text())["epsilon"]
    assert run.epsilon == pytest.approx(spent) == pytest.approx(whole)
    assert f"{spent:.4g}" in run.card and "interrupted" in run.card
    assert run.predict({"age": [40], "dose": [1], "ward": ["A"]}).tolist()[0] in run.classes
    # Going on from there ends as if nothing had happened, and the card is that of the whole run.
    train(config, tmp_path / "whole")
    train(config, tmp_path / "cut", resume=True)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in b)
    run = zetaclip.load_run(tmp_path / "cut")
    assert (
        run.finished and run.steps == 40 and run.epsilon > spent and "interrupted" not in run.card
    )


@pytest.mark.parametrize("average", [None, 0.9])
def test_a_killed_run_has_its_last_checkpoint(tmp_path, monkeypatch, average):
    data = write(tmp_path / "p.csv", patients())
    config = settings(data, weight_average=average)
    stop = cut(monkeypatch, config, tmp_path / "stopped", 12, "signal")
    assert stop.left
    before = zetaclip.load_run(tmp_path / "stopped")
    for name in ("model.safetensors", "ledger.jsonl", "MODEL_CARD.md"):
        (tmp_path / "stopped" / name).unlink()  # what a kill would not have written
    run = zetaclip.load_run(tmp_path / "stopped")
    for name, value in before.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], value)
    assert run.steps == 12 and run.epsilon == pytest.approx(before.epsilon)
    with pytest.raises(InputError, match="the run was killed"):
        _ = run.card


def test_the_weights_before_the_first_update_cost_nothing(tmp_path, monkeypatch):
    data = write(tmp_path / "p.csv", patients())
    cut(monkeypatch, settings(data), tmp_path / "run", 1, "kill")
    run = zetaclip.load_run(tmp_path / "run")  # the checkpoint before the first update
    assert run.steps == 0 and run.epsilon == 0.0
