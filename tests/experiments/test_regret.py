"""The exact trainer of `no-tuning` against the engine, and its page."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import PrivacyEngine, methods
from zetaclip.cli import main
from zetaclip.experiments import _regret_page, regret
from zetaclip.experiments._exact import Moved, Problem, Setting, _paced, start_of, train
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
        data, start, [Setting(0.5, 0.2, 0.0), Setting(0.25, 0.7, 0.0, late=False)],
        sigma=0.0, batch=30, steps=4, seed=0,
    )  # fmt: skip
    for number, (rate, clip, power) in enumerate(((0.5, 0.2, 2), (0.25, 0.7, 1))):
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
                optimizer.param_groups[0]["lr"] = rate * (1 - (step / 4) ** power)
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
    rates = [(1 - (t / 30) ** 2) ** 2 for t in range(30)]
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
    tasks = (Task("wine", (), 2, True, "", (1.0,)),)
    monkeypatch.setattr(regret, "TASKS", tasks)
    monkeypatch.setattr(_regret_page, "TASKS", tasks)
    words = ["reproduce", "no-tuning", "--out", str(tmp_path)]
    assert main([*words, "--only", "seed=1"]) == 0
    page = (tmp_path / "no-tuning" / "regret.md").read_text()
    assert "wine, of 2 seeds: 1 at ε 1" in page
    assert main(words) == 0
    cells = (tmp_path / "no-tuning" / "cells.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in cells] == [1, 2]
    assert "Not run" not in (tmp_path / "no-tuning" / "regret.md").read_text()
    assert (tmp_path / "no-tuning" / "regret.png").stat().st_size > 1000
    assert "2 of 2 cells" in capsys.readouterr().out


def test_a_cell_that_lacks_something_gets_just_that(tmp_path, monkeypatch):
    """A first seed, as it was written before other methods were asked for."""
    task = Task("wine", (8,), 1, False, "", (1.0,))
    monkeypatch.setattr(regret, "TASKS", (task,))
    monkeypatch.setattr(_regret_page, "TASKS", (task,))
    folder = tmp_path / "no-tuning"
    folder.mkdir()
    whole = regret.measure(task, problem_of(task, 1), 1.0, 1)
    spectral = {"spectral C, rate 1", "spectral C, else auto"}
    assert spectral < set(whole["others"]) and len(whole["others"]) == 6
    kept = {name: 1.5 for name in whole["others"] if name not in spectral}
    lines = [{**whole, "ladder": {"-1": 2.0, "0": 3.0, "1": 1.0}, "others": kept}]
    (folder / "cells.jsonl").write_text(json.dumps(lines[0]) + "\n")
    regret.run(tmp_path, say=lambda text: None)
    (found,) = regret.read(folder / "cells.jsonl")
    assert found["ladder"] == lines[0]["ladder"]
    assert found["others"] == {**kept, **{name: whole["others"][name] for name in spectral}}
    assert "own" not in found
    assert len((folder / "cells.jsonl").read_text().splitlines()) == 2
    regret.run(tmp_path, say=lambda text: None)
    assert len((folder / "cells.jsonl").read_text().splitlines()) == 2


def test_a_cell_of_an_earlier_law_keeps_its_ladder_and_runs_the_law_again(tmp_path, monkeypatch):
    task = Task("wine", (8, 4), 1, True, "", (3.0,))
    monkeypatch.setattr(regret, "TASKS", (task,))
    monkeypatch.setattr(_regret_page, "TASKS", (task,))
    folder = tmp_path / "no-tuning"
    folder.mkdir()
    now = regret.measure(task, problem_of(task, 1), 3.0, 1)
    ladder = {"-1": 100.0, "0": 10.0, "1": 20.0}
    old = {**now, "rate": now["rate"] * 1.5, "ladder": ladder, "tried": {"gone": 1.0}}
    old["others"] = {**now["others"], "spectral C, else auto": 1.0, "AUTO-S, rate 1": 2.0}
    (folder / "cells.jsonl").write_text(json.dumps(old) + "\n")
    assert regret.write(folder) == "no task has run yet"  # an earlier law's points are nobody's
    for _ in range(2):
        regret.run(tmp_path, say=lambda text: None)
        assert len((folder / "cells.jsonl").read_text().splitlines()) == 2
    (found,) = regret.read(folder / "cells.jsonl")
    assert found["ladder"] == ladder and found["own_rate"] == now["rate"]
    assert found["own"] == now["ladder"]["0"] and found["tried"] == now["tried"]
    assert found["others"] == {**now["others"], "AUTO-S, rate 1": 2.0}
    (line,) = _regret_page.summary([found])
    assert line["regret"]["auto"][0] == pytest.approx(100.0 - now["ladder"]["0"])
    # Another seed gets the ladder of the first one, and the law beside it.
    beside = regret.measure(task, problem_of(task, 1), 3.0, 1, centre=2 * now["rate"])
    assert beside["ladder"]["-1"] == beside["own"] == now["ladder"]["0"]
    assert (beside["rate"], beside["own_rate"]) == (2 * now["rate"], now["rate"])


def cell(task="a", epsilon=1.0, seed=1, ladder=(70.0, 80.0, 84.0), **more):
    return {
        "task": task, "epsilon": epsilon, "seed": seed, "constant": 50.0, "clip": 0.25,
        "ladder": dict(zip(("-1", "0", "1"), ladder, strict=True)),
        "tried": {}, "clips": {}, "others": {}, **more,
    }  # fmt: skip


def test_regret_is_the_best_mean_minus_the_laws():
    cells = [
        cell(others={"AUTO-S, rate 1": 60.0}, tried={"distance": 83.0}),
        cell(seed=2, ladder=(75.0, 82.0, 80.0), others={"AUTO-S, rate 1": 60.0},
             tried={"distance": 83.0}),
    ]  # fmt: skip
    (line,) = _regret_page.summary(cells)
    assert line["best"] == 82.0 and line["best_factor"] == 2.0
    assert line["regret"]["auto"][0] == pytest.approx(82.0 - 81.0)
    assert line["regret"]["AUTO-S, rate 1"][0] == pytest.approx(22.0)
    assert line["regret"]["distance"][0] == pytest.approx(-1.0)
    # Two differences of 4 and -2: t(0.975, 1) times √18 / √2.
    assert line["regret"]["auto"][1] == pytest.approx(12.7062 * 3.0, rel=1e-4)


def test_the_previous_default_is_spectral_where_a_layer_can_be_read():
    rate_1 = {"DP-SGD, C = 1, rate 1": 60.0}
    network = cell("b", others={**rate_1, "spectral C, rate 1": 70.0})
    lines = _regret_page.summary([cell("a", others=rate_1), network, cell("c")])
    found = {line["task"]: line["regret"].get("previous default", [None])[0] for line in lines}
    assert found == {"a": 24.0, "b": 14.0, "c": None}


def test_luck_of_the_best_rate_is_taken_out():
    """Two seeds like one rate, two the other: chosen by the others, each gets the wrong one."""
    ladders = [(90.0, 80.0, 69.0)] * 2 + [(69.0, 80.0, 90.0)] * 2 + [(79.5, 80.0, 79.0)]
    cells = [cell(seed=k, ladder=ladder) for k, ladder in enumerate(ladders)]
    told = "\n".join(_regret_page.crossed(cells))
    assert "- all, 1 lines: -8.80, -8.80, -8.80 instead of 0.00, 0.00, 0.00" in told
    always = [cell(seed=k) for k in range(5)]
    assert "4.00, 4.00, 4.00 instead of 4.00" in "\n".join(_regret_page.crossed(always))
    assert _regret_page.crossed(always[:4]) == []


def test_intervals_come_from_drawing_tasks():
    """All tasks alike: no width. One of two far off: from one to the other."""
    alike = _regret_page.summary([cell(task) for task in "abc"])
    assert "all: median 4.00 to 4.00" in "\n".join(_regret_page.resampled(alike))
    apart = _regret_page.summary([cell("a"), cell("b", ladder=(70.0, 80.0, 80.5))])
    assert "all: median 0.50 to 4.00" in "\n".join(_regret_page.resampled(apart))


def test_a_fall_with_epsilon_is_seen_and_chance_is_not_taken_for_one():
    def cells(task, points):
        return [
            cell(task, epsilon, seed, (0.0, point, 0.0))
            for epsilon, row in zip((1.0, 3.0), points, strict=True)
            for seed, point in enumerate(row)
        ]

    clear = cells("clear", ((80.0, 81.0, 82.0), (70.0, 71.5, 72.0)))
    chance = cells("chance", ((80.0, 81.0, 82.0), (70.0, 91.0, 78.0)))
    table, tasks, falls = _regret_page.rises([*clear, *chance])
    assert (tasks, falls) == (2, 1)
    rows = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in table[5:-1]}
    assert rows["clear"] == "-" and rows["chance"] == "="


def test_what_is_kept_is_counted_by_the_predicted_signal_to_noise():
    cells = [
        cell(epsilon=0.05, ladder=(0.0, 60.0, 0.0), signal=1.5),
        cell(epsilon=1.0, ladder=(0.0, 80.0, 0.0), signal=30.0),
        cell(epsilon=8.0, ladder=(0.0, 90.0, 0.0), signal=100.0),
    ]
    table = "\n".join(_regret_page.warned(cells))
    assert "| 1 to 2 | 1 | 0.25 | 0.25 | 1 (100 %) |" in table
    assert "| 16 to 64 | 1 | 0.75 | 0.75 | 0 (0 %) |" in table


def test_slaclip_moves_c_as_in_the_engine():
    """Without noise, and with every record in every batch."""
    data, widths = problem(), (5, 4, 3)
    start = start_of(widths, 1)
    found = train(
        data, start, [Setting(0.5, 1.0, 0.0, late=False, control="slaclip")],
        sigma=0.0, batch=30, steps=6, seed=0,
    )  # fmt: skip
    fixed = train(
        data, start, [Setting(0.5, 1.0, 0.0, late=False)], sigma=0.0, batch=30, steps=6, seed=0
    )
    model = Perceptron((5,), 3, (4,))
    with torch.no_grad():
        for layer, weight in zip(model.layers, start, strict=True):
            model.get_submodule(layer).weight.copy_(weight[:, :-1])
            model.get_submodule(layer).bias.copy_(weight[:, -1])
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=30)
    model, optimizer, loader = PrivacyEngine(accountant="rdp", seed=1).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=loader,
        noise_multiplier=0.0, method=methods.get("slaclip"), num_examples=30, sample_rate=1.0,
        decouple_lr=True,
    )  # fmt: skip
    for step in range(6):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = 0.5 * (1 - step / 6)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(found[0], model(data.test_x), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found[0], fixed[0], rtol=1e-2)


def test_spectral_c_moves_in_a_network():
    g = torch.Generator().manual_seed(1)
    norms = torch.rand(200, generator=g)
    moved = Moved("spectral", start_of((30, 40, 3), 1))
    weights = start_of((30, 40, 3), 1)
    for step in range(1, 101):
        clip = moved.move(step, weights, norms, 1.0, 200, g)
    assert moved.state.probes == 2 and clip != 1.0


@pytest.mark.parametrize(
    ("kind", "signal", "noise"), [("distance", 0.25, 1.0), ("energy", 2.0, 0.5)]
)
def test_paces_tell_signal_from_noise(kind, signal, noise):
    """A far move or a long gradient against the noise that is known, and noise alone."""
    g = torch.Generator().manual_seed(2)
    walk, drawn = torch.tensor([0.01]), 0.1 * torch.randn(60, 50, generator=g)
    far = _paced(kind, [drawn + 5.0], walk, [drawn + 5.0], 0.01)
    none = _paced(kind, [drawn], walk, [drawn], 0.01)
    assert float(far) == pytest.approx(signal, rel=1e-3) and float(none) == pytest.approx(
        noise, rel=0.05
    )


def test_one_planted_direction_halves_the_pace_of_its_layer_alone():
    g = torch.Generator().manual_seed(3)
    noise = [0.1 * torch.randn(60, 50, generator=g) for _ in range(2)]
    planted = [noise[0] + 5 * torch.outer(torch.ones(60) / 60**0.5, torch.ones(50) / 50**0.5)]
    found = _paced("outliers", [*planted, noise[1]], torch.tensor([0.01, 0.01]), noise, 0.01)
    assert found.tolist() == [0.5, 1.0]


def test_a_late_average_is_the_weighted_mean_of_the_weights():
    """One weight that moves by the same step: positions 1, 2, 3 count as t², nearly."""
    data = Problem(torch.zeros(20, 1), torch.ones(20), torch.zeros(1, 1), torch.ones(1), 1)
    start = start_of((1, 1), 0)
    one = Setting(0.1, None, 0.0, average=2.0)
    found = train(data, start, [one], sigma=0.0, batch=20, steps=3, seed=0)
    # Normalised gradients of length n / (n + 0.01), on the bias alone.
    places, bias = [], 0.0
    for _ in range(3):
        slope = 1 / (1 + torch.tensor(bias).exp())
        bias += 0.1 * float(slope / (slope + 0.01))
        places.append(bias)
    mean = 0.0
    for step, place in enumerate(places):
        mean += 3 / (step + 3) * (place - mean)
    assert float(found) == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("hidden", [(), (4,), (4, 3)])
def test_the_rate_is_the_one_that_the_optimizer_takes(hidden):
    """Five inputs, so that the rule for few of them acts where it should."""
    data = problem(outputs=1)
    update = regret._update((5, *hidden, 1), data)
    update.plan(300)
    update.set_noise_std(12.0 / 30)
    for group in update.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    update.step()
    task = Task("a", hidden, 1, True)
    found = regret._rate(task, False, update.gain, 12.0, 30, 300, 30, 5)
    assert update.rate == pytest.approx(found)
    many = regret._rate(task, False, update.gain, 12.0, 30, 300, 30, 50)
    assert found / many == pytest.approx(2.0 if len(hidden) < 2 else 1.0, rel=0.02)


def test_a_smaller_c_is_also_run_with_a_larger_rate():
    """Digits, where it costs points: the same as that C and that rate would have."""
    task = next(t for t in TASKS if t.label == "digits")
    data = problem_of(task, 1)
    found = regret.measure(task, data, 8.0, 4)["clips"]
    assert set(found) == {"0.02", "0.1", "0.02 x 1.4", "0.02 x 2", "0.1 x 1.4", "0.1 x 2"}
    assert found["0.02 x 2"] != found["0.02"]
    other = next(t for t in TASKS if t.label == "heart")
    assert not any(" x " in name for name in regret._besides(other, 8.0, 4)["clips"])
