"""The exact trainer of `no-tuning` against the engine, and its page."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import PrivacyEngine
from zetaclip.cli import main
from zetaclip.experiments import regret
from zetaclip.experiments._exact import Problem, Setting, start_of, train
from zetaclip.experiments._tasks import TASKS, Task, problem_of
from zetaclip.models import Perceptron


def problem(regression=False, outputs=3):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=g)
    y = torch.rand(40, generator=g) if regression else torch.arange(40) % max(2, outputs)
    return Problem(x[:30], y[:30], x[30:], y[30:], outputs, regression)


@pytest.mark.parametrize(
    ("hidden", "outputs", "regression"), [((), 3, False), ((4,), 1, False), ((4, 3), 1, True)]
)
def test_it_trains_as_the_engine_does(hidden, outputs, regression):
    """Without noise and with every record in every batch, both are the same sums."""
    data, widths = problem(regression, outputs), (5, *hidden, outputs)
    start = start_of(widths, 1)
    if not hidden:  # not from zero, so that a wrong first layer would show
        start = [0.1 * torch.ones_like(start[0])]
    found = train(
        data, start, [Setting(0.5, 0.2, 0.0), Setting(0.25, 0.7, 0.0)],
        sigma=0.0, batch=30, steps=4, seed=0,
    )  # fmt: skip
    for number, (rate, clip) in enumerate(((0.5, 0.2), (0.25, 0.7))):
        model = Perceptron((5,), outputs, hidden)
        with torch.no_grad():
            for layer, weight in zip(model.layers, start, strict=True):
                model.get_submodule(layer).weight.copy_(weight[:, :-1])
                model.get_submodule(layer).bias.copy_(weight[:, -1])
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        loader = DataLoader(TensorDataset(data.x, data.y), batch_size=30)
        engine = PrivacyEngine(accountant="rdp", seed=1)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0,
            clipping=clip, num_examples=30, sample_rate=1.0, decouple_lr=True,
        )  # fmt: skip
        for step in range(4):
            for x, y in loader:
                optimizer.param_groups[0]["lr"] = rate * (1 - step / 4)
                optimizer.zero_grad()
                out = model(x)
                if regression:
                    loss = F.mse_loss(out[:, 0], y)
                elif outputs == 1:
                    loss = F.binary_cross_entropy_with_logits(out[:, 0], y.float())
                else:
                    loss = F.cross_entropy(out, y)
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(found[number], model(data.test_x), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found[0], found[1], rtol=1e-2)


def test_the_noise_is_as_large_as_it_should_be():
    """Zero slopes are left out by an input of zeros: only the bias learns, the rest is noise."""
    data = Problem(torch.zeros(50, 200), torch.arange(50) % 2, torch.eye(200), torch.zeros(200), 1)
    found = train(
        data, start_of((200, 1), 0), [Setting(1.0, 0.5, 0.0)],
        sigma=3.0, batch=50, steps=30, seed=4,
    )  # fmt: skip
    rates = [(1 - t / 30) ** 2 for t in range(30)]
    assert float(found.std()) == pytest.approx(3.0 / 50 * sum(rates) ** 0.5, rel=0.12)


def test_every_task_without_stored_data_has_records():
    names = ("digits", "breast-cancer", "wine", "diabetes", "rare", "wide", "five", "outliers")
    for name in names:
        found = problem_of(Task(name, (), 1, True), 1)
        assert len(found.x) == len(found.y) and found.x.norm(dim=1).max() < 1.001
        bent = problem_of(Task(name, (8,), 1, True), 1)
        assert bent.x.abs().max() <= 1.0001
    assert {task.chosen_by for task in TASKS} == {True, False}


def test_a_page_is_written_and_finished_cells_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(regret, "TASKS", (Task("wine", (), 2, True),))
    monkeypatch.setattr(regret, "EPSILONS", (1.0,))
    words = ["reproduce", "no-tuning", "--out", str(tmp_path)]
    assert main([*words, "--only", "seed=1"]) == 0
    page = (tmp_path / "no-tuning" / "regret.md").read_text()
    assert "1 of 2 seeds not run" in page
    assert main(words) == 0
    cells = (tmp_path / "no-tuning" / "cells.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in cells] == [1, 2]
    assert "Not run" not in (tmp_path / "no-tuning" / "regret.md").read_text()
    assert (tmp_path / "no-tuning" / "regret.png").stat().st_size > 1000
    assert "2 of 2 cells" in capsys.readouterr().out


def test_regret_is_the_best_mean_minus_the_laws():
    cells = [
        {"task": "a", "epsilon": 1.0, "seed": seed, "constant": 50.0,
         "ladder": {"-1": low, "0": law, "1": high},
         "others": dict.fromkeys(regret._BASELINES, 60.0)}
        for seed, low, law, high in ((1, 70.0, 80.0, 84.0), (2, 75.0, 82.0, 80.0))
    ]  # fmt: skip
    (line,) = regret.summary(cells)
    assert line["best"] == 82.0 and line["best_factor"] == 2.0
    assert line["regret"]["auto"][0] == pytest.approx(82.0 - 81.0)
    assert line["regret"]["AUTO-S, rate 1"][0] == pytest.approx(22.0)
