"""From settings to what is run: rates, defaults, and C from another run."""

import itertools
import json
import math

import pytest
import small_runs
import torch

from zetaclip import Spectral, methods, models
from zetaclip.accounting import noise_multiplier_for
from zetaclip.data import load
from zetaclip.optim import Auto
from zetaclip.training import Config, ConfigError, memory
from zetaclip.training.clipping import build_clipping, mean_clip
from zetaclip.training.fixed import frozen
from zetaclip.training.recipe import build_method, build_model, rate_at, resolve, total_steps
from zetaclip.training.records import load_data, nominal_size


def resolved(**values):
    config = small_runs.small(**values)
    return resolve(config, load_data(config), build_method(config))


def test_the_schedules_start_at_the_rate_and_end_where_they_say():
    for schedule, last in (
        ("linear", 0.1),
        ("cosine", 0.5 * (1 + math.cos(0.9 * math.pi))),
        ("constant", 1.0),
    ):
        config = small_runs.small(lr=1.0, schedule=schedule)
        assert rate_at(config, 0, 10) == 1.0
        assert rate_at(config, 9, 10) == pytest.approx(last, rel=1e-12)


def test_the_default_recipe_is_decoupled_with_linear_decay_and_the_methods_rate():
    config = resolved()
    assert (config.decouple, config.schedule, config.lr, config.epsilon) == (
        True,
        "linear",
        1.0,
        None,
    )
    adam = resolved(method="dp-adam", spectral={})
    assert adam.lr == 1e-3


def test_a_network_with_large_activations_takes_few_pictures_at_once(monkeypatch):
    def rows(floats, **changes):
        monkeypatch.setattr(memory, "FLOATS", floats)
        values = {"model": "cnn", "batch_size": 1000, "method": "dp-sgd", "spectral": {}}
        config = small_runs.small(data="digits", **{**values, **changes})
        data = load_data(config)
        config = resolve(config, data, build_method(config))
        model = build_model(config, data, frozen(config, data))
        return memory.rows_at_once(config, data, model, lambda: model(torch.zeros(1, 1, 8, 8)))

    network = models.build("cnn", (1, 8, 8), 10)
    own = memory.activations(network, lambda: network(torch.zeros(1, 1, 8, 8)))
    assert rows(100 * own) == 100 and rows(999 * own + own - 1) == 999
    assert rows(1000 * own) is None and rows(own) == 64
    assert rows(own, physical_batch_size=7) == 7
    for other in (
        {"views": 3},
        {"non_private_diagnostics": True},
        {"model": None, "features": "patches"},
    ):
        assert rows(own, **other) is None


def test_activations_are_counted_layer_by_layer_and_leave_nothing_behind():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten()
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert memory.activations(model, lambda: model(torch.zeros(1, 1, 5, 5))) == 1 + 4 * 27
    assert model.training and not any(part._forward_hooks for part in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("method", ["sgd", "adam", *methods.names(private=True)])
def test_weight_decay_is_that_of_the_methods_optimizer(method):
    parameter = torch.nn.Parameter(torch.zeros(2))
    own = methods.get(method).optimizer([parameter]).defaults["weight_decay"]
    given = {"sigma": None} if method in ("sgd", "adam") else {}
    assert resolved(method=method, spectral={}, **given).weight_decay == own
    if "adamw" in method:
        assert own == torch.optim.AdamW([parameter]).defaults["weight_decay"] > 0
    assert resolved(method=method, spectral={}, weight_decay=0.0, **given).weight_decay == 0.0


@pytest.mark.parametrize(("model", "gain"), [(None, 1.0), ("linear", 1.414), ("mlp-2", None)])
def test_on_fixed_features_dp_sgd_takes_the_numbers_of_auto(model, gain):
    """A head has no bias, and features have length 1; another network has a gain of its own."""
    data = load("digits")

    def with_features(method):
        given = {"data": "digits", "model": model, "features": "patches", "epsilon": 2.0}
        config = Config.from_mapping({**given, "method": method})
        return resolve(config, data, build_method(config))

    config, auto = with_features("dp-sgd"), with_features("auto")
    assert (config.batch_size, config.epochs) == (auto.batch_size, auto.epochs)
    assert gain is None or auto.method_options["gain"] == gain
    # The rate is the one that the optimizer of "auto" has at the same noise.
    size, _ = nominal_size(config, data)
    steps = total_steps(config, size)
    sigma = noise_multiplier_for(2.0, config.delta, config.batch_size / size, steps, "pld")
    network = build_model(auto, data, frozen(auto, data))
    optimizer = Auto(network.parameters(), gain=auto.method_options["gain"], steps=steps)
    optimizer.set_noise_std(sigma / config.batch_size)
    optimizer.step()
    assert config.lr / (1 - config.momentum) == pytest.approx(optimizer.rate, rel=1e-3)
    assert (config.schedule, config.momentum) == ("late", 0.9)


def test_the_gain_is_that_of_features_of_the_length_they_have():
    """Of a linear layer it is the root of 1 + length²."""
    for length, gain in ((1.0, 1.414), (10.0, 10.05)):
        given = {"data": "digits", "model": "linear", "features": "scattering", "epsilon": 2.0}
        config = Config.from_mapping({**given, "features_options": {"length": length}})
        found = resolve(config, load("digits"), build_method(config))
        assert found.method_options["gain"] == gain


def test_the_papers_recipe_is_constant_coupled_and_literal():
    config = resolved(recipe="paper")
    assert (config.decouple, config.schedule, config.lr) == (False, "constant", 0.25)
    controller = build_clipping(config, build_method(config))
    literal = Spectral.paper(period=5)
    assert repr(controller) == repr(literal)


def test_delta_is_below_one_over_n():
    config = resolved(num_examples=10**7)
    assert config.delta == pytest.approx(1e7**-1.1)
    assert resolved().delta == 1e-5


def test_the_paper_rate_of_sgd_like_methods_moves_with_the_data():
    x = torch.zeros(40, 5)
    adult = load("digits")
    from dataclasses import replace

    from zetaclip.data import Split

    tabular = replace(
        adult,
        name="adult",
        train=Split(x, torch.zeros(40)),
        task="binary",
        outputs=1,
        nominal_size=40,
    )
    config = small_runs.small(recipe="paper", method="dp-sgd", spectral={}, model="mlp")
    assert resolve(config.changed(batch_size=8), tabular, build_method(config)).lr == pytest.approx(
        0.1
    )


def test_settings_of_a_controller_that_is_not_used_are_refused():
    config = small_runs.small(method="dp-sgd")
    with pytest.raises(ConfigError, match="does not use it"):
        build_clipping(config, build_method(config))


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ConfigError, match="more than"):
        resolved(batch_size=5000)


def test_a_budget_for_plain_training_is_refused():
    with pytest.raises(ConfigError, match="not private"):
        resolved(method="sgd", spectral={}, sigma=1.0)


def test_a_validation_part_is_taken_from_the_training_records_and_disjoint():
    whole = load_data(small_runs.small())
    part = load_data(small_runs.small(validation=0.25))
    held = round(0.25 * len(whole.train))
    assert len(part.test) == held and len(part.train) == len(whole.train) - held
    rows = {tuple(row.flatten().tolist()) for row in whole.train.x}
    assert all(tuple(row.flatten().tolist()) in rows for row in part.test.x)
    both = torch.cat((part.train.x.flatten(1), part.test.x.flatten(1)))
    assert torch.equal(both.sum(0), whole.train.x.flatten(1).sum(0))
    assert nominal_size(small_runs.small(), part) == (len(part.train), True)


def test_steps_and_epochs_mean_the_same():
    config = resolved(steps=None, epochs=2.0)
    size, _ = nominal_size(config, load_data(config))
    assert total_steps(config, size) == 2 * math.ceil(size / 64)


def test_the_mean_of_a_path_weighs_each_norm_by_its_updates():
    assert mean_clip([(0, 1.0), (10, 2.0), (15, 4.0)], 20) == (10 * 1 + 5 * 2 + 5 * 4) / 20
    assert mean_clip([(0, 1.0), (10, 2.0), (20, 9.0)], 20) == 1.5


def test_c_of_another_run_is_replayed_averaged_or_straightened(finished, tmp_path):
    lines = [json.loads(line) for line in (finished / "probes.jsonl").read_text().splitlines()]
    clips = json.loads((finished / "result.json").read_text())["clip"]

    def controller(kind):
        config = small_runs.small(
            method="dp-sgd", spectral={}, clipping={"kind": kind, "run": str(finished)}
        )
        return build_clipping(config, build_method(config))

    replayed = controller("replay")
    assert replayed.function(0) == lines[0]["clip_before"]
    assert [replayed.function(line["step"]) for line in lines] == [line["clip"] for line in lines]
    assert controller("mean-of") == pytest.approx(clips["mean"], rel=1e-12)
    straight = controller("schedule")
    values = [straight.function(step) for step in range(30)]
    assert sum(values) / 30 == pytest.approx(clips["mean"], rel=1e-12)
    steps = [math.log(b / a) for a, b in itertools.pairwise(values)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-6)
    falling = [controller("decay").function(step) for step in range(30)]
    assert sum(falling) / 30 == pytest.approx(clips["mean"], rel=1e-12)
    assert falling[-1] / falling[0] == pytest.approx(0.25)
    config = small_runs.small(
        method="dp-sgd", spectral={}, clipping={"kind": "replay", "run": str(tmp_path)}
    )
    with pytest.raises(ConfigError, match="not a finished run"):
        build_clipping(config, build_method(config))
