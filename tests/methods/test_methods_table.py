"""The table itself: names, options, optimizers, and the command that prints it."""

import json
import math

import pytest
import torch
from helpers import private, tiny, toy_data
from torch.utils.data import DataLoader, TensorDataset

import zetaclip
from zetaclip import Flat, PrivacyEngine, Spectral, methods
from zetaclip.accounting import epsilon
from zetaclip.cli import main
from zetaclip.clipping import Counted, Moments, Slack, Whitened
from zetaclip.control import Paced, Quantile, SlackControl
from zetaclip.methods import AdamBC
from zetaclip.methods._updates import FAMILIES

NAMES = [
    "sgd",
    "adam",
    "auto",
    "dp-sgd",
    "dp-adam",
    "dp-adam-bc",
    "dp-adamw",
    "adp-adamw",
    "dp-is",
    "dp-sam",
    "dp-sat",
    "dp-adam-ac",
    "auto-s",
    "dp-psac",
    "bounded-adaptive",
    "adadpigu",
    "ww-dp-sgd",
    "quantile",
    "adaclip",
    "slaclip",
]


def test_every_name_is_there_and_described():
    assert sorted(methods.names()) == sorted(NAMES)
    assert methods.names(private=False) == ["sgd", "adam"]
    assert zetaclip.methods is methods
    for name in NAMES:
        method = methods.get(name)
        assert method.name == name and method.private == (name not in ("sgd", "adam"))
        assert all((method.summary, method.reads, method.queries, method.noise, method.source))
        assert method.lr > 0 and method.paper_lr > 0 and method.unsound == ""
        assert method.chosen.keys() == method.options.keys()
        for default, meaning in method.options.values():
            assert meaning and default is not ...


def test_options_are_what_they_were_set_to():
    method = methods.get("dp-sam", rho=0.2, momentum=0.9)
    assert (
        method.chosen["rho"] == 0.2
        and method.chosen["clip"] == 1.0
        and method.update == {"momentum": 0.9}
    )
    assert (
        method.optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.5).defaults["momentum"] == 0.9
    )
    engine, *_ = private(
        tiny(), toy_data(), method=method, clipping=None, epochs=1, target_delta=1e-5
    )
    assert "method options rho=0.2, momentum=0.9" in engine.ledger.header.notes


WRONG = {
    "name": (("dp-sgdd", {}), r"no method 'dp-sgdd'; did you mean 'dp-sgd'"),
    "far name": (("resnet", {}), r"no method 'resnet'; there are: sgd, adam"),
    "option": (("dp-sam", {"roh": 0.1}), r"'dp-sam' has no option 'roh'; did you mean 'rho'"),
    "other family's option": (
        ("dp-adam", {"momentum": 0.9}),
        r"'dp-adam' has no option 'momentum'; there are: clip",
    ),
    "rho": (("dp-sam", {"rho": -0.1}), r"rho must be at least 0, not -0.1"),
    "rho of sat": (("dp-sat", {"rho": math.nan}), r"rho must be at least 0"),
    "batch": (("dp-sam", {"ascent_batch": "both"}), r"'fresh' or 'same'"),
    "share": (("dp-sam", {"ascent_share": 1.0}), r"between 0 and 1"),
    "clip": (("dp-sgd", {"clip": -1.0}), r"positive and finite"),
    "start": (("quantile", {"clip": 0.0}), r"positive and finite"),
    "bounds": (("slaclip", {"bounds": (2.0, 1.0)}), r"lowest C, highest C"),
    "target": (("quantile", {"target": 1.5}), r"between 0 and 1"),
    "beta of slaclip": (("slaclip", {"beta": math.nan}), r"beta must be at least 0"),
    "up": (("dp-adam-ac", {"up": -1.0}), r"up must be at least 1"),
    "down": (("dp-adam-ac", {"down": math.nan}), r"down must be above 0"),
    "band": (("dp-adam-ac", {"band": -1.0}), r"band must be at least 0"),
    "clip rate": (("dp-adam-ac", {"clip_rate": 2.0}), r"clip_rate must be between 0 and 1"),
    "endless gain": (("quantile", {"gain": math.inf}), r"gain must be at least 0"),
    "sigma_b": (("bounded-adaptive", {"sigma_b": 0.0}), r"positive"),
    "gamma": (("auto-s", {"gamma": 0.0}), r"positive"),
    "keep": (("adadpigu", {"keep": 0.0}), r"above 0"),
    "slots": (("slaclip", {"slots": 2.5}), r"whole number"),
    "ratio": (("adp-adamw", {"ratio": 1.1}), r"at most 1"),
    "cap": (("dp-is", {"cap": 0.5}), r"at least 1"),
    "spectral": (("ww-dp-sgd", {"perod": 5}), r"did you mean 'period'"),
    "gain": (("slaclip", {"gain": -0.1}), r"at least 0"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_bad_input_is_an_error_that_says_what_to_change(case):
    (name, options), message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        methods.get(name, **options)


# -- optimizers ------------------------------------------------------------------------------------


def test_every_method_builds_its_own_optimizer():
    for name in methods.names():
        method = methods.get(name, **({"gain": 2.0} if name == "auto" else {}))
        made = method.optimizer(tiny().parameters())
        assert FAMILIES[method.family].matches(made) and made.param_groups[0]["lr"] == method.lr
        assert method.optimizer(tiny().parameters(), lr=0.123).param_groups[0]["lr"] == 0.123
    assert type(methods.get("dp-adam-bc").optimizer(tiny().parameters())) is AdamBC
    assert methods.get("dp-adamw", betas=[0.8, 0.9]).optimizer(tiny().parameters()).defaults[
        "betas"
    ] == (0.8, 0.9)
    with pytest.raises(ValueError, match="no option 'momentum' here"):
        methods.get("dp-adam").optimizer(tiny().parameters(), momentum=0.9)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("dp-sgd", torch.optim.Adam, "updates with SGD, not Adam.*or use method 'dp-adam'"),
        ("dp-adam", torch.optim.AdamW, "updates with Adam, not AdamW.*or use method 'dp-adamw'"),
        ("dp-adam-ac", torch.optim.SGD, "updates with AdamW, not SGD"),
        ("dp-adam-bc", torch.optim.RMSprop, "updates with AdamBC, not RMSprop"),
        ("adaclip", AdamBC, "one noise variance"),
    ],
)
def test_another_family_is_refused(name, kind, message):
    module = tiny()
    with pytest.raises(ValueError, match=message):
        private(
            module,
            toy_data(),
            method=methods.get(name),
            clipping=None,
            optimizer=kind(module.parameters(), lr=0.1),
        )


def test_methods_that_say_so_take_any_optimizer():
    for name in ("auto-s", "dp-sat", "ww-dp-sgd", "slaclip"):
        module = tiny()
        options = {"probe": "0"} if name == "ww-dp-sgd" else {}
        optimizer = torch.optim.RMSprop(module.parameters(), lr=0.1)
        private(
            module,
            toy_data(),
            method=methods.get(name, **options),
            clipping=None,
            optimizer=optimizer,
        )


def test_what_is_not_private_is_not_made_private():
    with pytest.raises(ValueError, match="ordinary loop"):
        private(tiny(), toy_data(), method=methods.get("sgd"), clipping=None)


# -- combinations that make no sense ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "clipping", "message"),
    [
        ("auto-s", Spectral(), "C only scales the step"),
        ("dp-psac", Flat(), "its weights are the method"),
        ("quantile", 0.5, "read by nobody; its starting norm is the method's option clip="),
        ("quantile", Spectral(), "read by nobody"),
        ("slaclip", Spectral(), "read by nobody"),
        ("adaclip", Spectral(), "units of one C"),
        ("ww-dp-sgd", 1.0, "spectral control is the method"),
        ("dp-is", Flat(), "joining by norm"),
    ],
)
def test_what_does_not_combine_is_refused_with_the_reason(name, clipping, message):
    with pytest.raises(ValueError, match=message):
        methods.get(name).with_clipping(clipping)


def test_a_part_may_be_replaced_by_one_of_its_kind():
    assert methods.get("quantile").with_clipping(Quantile(0.7)).controller.init().clip == 0.7
    assert methods.get("ww-dp-sgd").with_clipping(Spectral(0.7)).controller.initial == 0.7
    assert methods.get("auto-s").with_clipping(2.0).controller.init().clip == 2.0
    assert methods.get("adaclip").with_clipping(2.0).controller.init().clip == 2.0


def test_a_rule_that_is_put_in_is_the_one_that_runs():
    """Also where the plan completes the rule: with its own noise, not its own settings."""
    for name, rule, field, value in (
        ("quantile", Counted(tau=3.0), "tau", 3.0),
        ("bounded-adaptive", Counted(tau=7.0, normalised=False), "normalised", False),
        ("adaclip", Whitened(Moments(beta1=0.5)), "moments", Moments(beta1=0.5)),
        ("slaclip", Slack(3), "slots", 3),
    ):
        engine, *_ = private(tiny(), toy_data(), method=methods.get(name), clipping=rule)
        assert getattr(engine._private().method.rule, field) == value
    assert engine._private().plan.rule is None
    engine, *_ = private(
        tiny(), toy_data(), method=methods.get("quantile", sigma_b=9.0), clipping=Counted(tau=3.0)
    )
    assert engine._private().method.rule.noise_multiplier == 18.0


@pytest.mark.parametrize(
    ("name", "controller"),
    [("dp-sgd", Quantile()), ("dp-sat", Paced()), ("dp-sgd", SlackControl())],
)
def test_a_controller_without_its_signal_is_refused_before_anything_is_released(name, controller):
    with pytest.raises(
        ValueError,
        match=r"reads the query '(count|slack)', which the clip rule 'flat'.* does not release",
    ):
        private(tiny(), toy_data(), method=methods.get(name), clipping=controller)


def test_a_target_is_not_exceeded_by_a_query_that_nobody_planned():
    """The same rule is allowed with a noise multiplier, where no ε was promised, and in a method
    that plans it."""
    with pytest.raises(ValueError, match=r"no noise_multiplier"):
        private(tiny(), toy_data(), clipping=Counted())

    def aimed(**options):
        module, data = tiny(), TensorDataset(*toy_data())
        engine = PrivacyEngine(accountant="rdp", seed=0)
        engine.make_private_with_epsilon(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=len(data) // 2),
            num_examples=len(data),
            target_epsilon=2.0,
            target_delta=1e-5,
            epochs=4,
            **options,
        )
        return epsilon(engine.planned_events(0, 8), 1e-5, "rdp")

    rule = Counted(noise_multiplier=2.0)
    with pytest.raises(ValueError, match=r"'count' beside the sum.*the target ε would be exceeded"):
        aimed(clipping=rule)
    assert aimed(method=methods.get("quantile"), clipping=rule) <= 2.0
    engine, *_ = private(tiny(), toy_data(), clipping=rule)
    assert engine.planned_events(0, 1)[0].noise_multiplier == pytest.approx(0.8**0.5)


# -- resuming with something else ------------------------------------------------------------------


def test_a_replay_with_other_options_is_refused(tmp_path):
    def made(rho, seed=0):
        return private(
            tiny(), toy_data(), method=methods.get("dp-sat", rho=rho), clipping=None, seed=seed
        )

    engine, *_ = made(0.05)
    engine.save(tmp_path / "run.pt")
    other, *_ = made(0.06, seed=None)
    with pytest.raises(ValueError, match="options"):
        other.load(tmp_path / "run.pt", replay=True)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_lists_all(capsys):
    assert main(["methods", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["name"] for record in records] == methods.names()
    assert "multipliers" not in records[0]
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[1:]] == methods.names()


def test_the_command_works_out_a_budget(capsys):
    assert main(["methods", "quantile", "--sigma", "1.1", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["multipliers"] == {"sum": pytest.approx(1.1010, abs=1e-4), "sum: count": 25.6}
    assert (
        main(["methods", "dp-sam", "--epsilon", "4", "--accountant", "rdp", "--epochs", "1"]) == 0
    )
    shown = capsys.readouterr().out
    assert "ascent sum" in shown and "rho" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dp-sagd"], "did you mean 'dp-sgd'"),
        (["--sigma", "-1"], "--sigma must be at least 0"),
        (["--sigma", "1", "--batch-size", "0"], "--batch-size"),
        (["--epsilon", "0"], "target_epsilon must be positive"),
        (["--epsilon", "1", "--epochs", "-1"], "--epochs must be positive"),
    ],
)
def test_the_command_says_what_is_wrong(words, message, capsys):
    assert main(["methods", *words]) == 2
    assert message in capsys.readouterr().err
