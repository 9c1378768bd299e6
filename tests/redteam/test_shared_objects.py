"""One controller, rule or method for several engines: nothing of one run gets into another."""

import dataclasses

import pytest
import torch
from helpers import flat, mean_loss, private, toy_data, train
from torch import nn

from zetaclip import Method, Spectral, methods
from zetaclip.control import ClipState, Controller
from zetaclip.spectrum import Probe


def network(hidden, classes=3):
    torch.manual_seed(hidden)
    return nn.Sequential(nn.Linear(24, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def deeper():
    """Another layer is the one to probe here."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 18), nn.Tanh(), nn.Linear(18, 3)
    )


def trained(controllers, data):
    """Two runs, made before either is trained, then trained in turns; their weights and histories
    of C."""
    modules = network(32), deeper()
    runs = [private(m, data, clipping=c, seed=1) for m, c in zip(modules, controllers, strict=True)]
    for _ in range(3):
        for _, module, optimizer, loader in runs:
            train(module, optimizer, loader, mean_loss)
    return [(flat(module), optimizer.clip_history) for _, module, optimizer, _ in runs]


@pytest.mark.parametrize("probe", [None, "0", "2"])
def test_a_controller_for_two_engines_serves_both_as_two_would(probe):
    """The default choice of a layer is another one in each network; a probe that follows the last
    one reads the wrong weights."""
    data = toy_data(48, inputs=24)

    def make():
        return Spectral(period=1, probe=probe)

    one = make()
    described = repr(one), dict(vars(one.probe))
    shared, apart = trained([one, one], data), trained([make(), make()], data)
    for (weights, history), (expected, wanted) in zip(shared, apart, strict=True):
        assert torch.equal(weights, expected) and history == wanted and history
    assert (repr(one), vars(one.probe)) == described, "the user's own object is as it was"


def test_a_probe_that_is_bound_twice_reads_each_module_by_its_own_names():
    probe = Probe()
    wide = network(32)
    narrow = nn.Sequential(nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 40), nn.Linear(40, 24))
    first = probe.bind(wide, dict(wide.named_parameters()))
    second = probe.bind(narrow, dict(narrow.named_parameters()))
    assert list(first.bound) == ["0"] and list(second.bound) == ["3"] and not probe.bound
    with pytest.raises(RuntimeError, match="probe that bind"):
        probe.read(wide, 1)


class Keeping:
    """A probe as it was written once: it keeps what it chose, and gives nothing back."""

    def bind(self, module, trained):
        self.name = next(iter(trained))

    def read(self, module, step):
        return float(module.get_parameter(self.name).detach().abs().max())


@dataclasses.dataclass(frozen=True)
class Following(Controller):
    probe: Keeping

    def init(self):
        return ClipState(1.0)

    def update(self, reading, state):
        return ClipState(reading)

    def entry(self, state):
        return None


def test_a_probe_that_gives_nothing_back_is_refused_with_the_cure():
    with pytest.raises(TypeError, match=r"Keeping must return a probe .*copy\.copy\(self\)"):
        private(network(16), toy_data(inputs=24), clipping=Following(Keeping()))
    module = network(16)
    private(module, toy_data(inputs=24))  # and nothing was begun: the module is free


def insides(value):
    """An object as plain data, down to its last attribute."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: insides(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [insides(item) for item in value]
    if type(value).__module__.startswith("zetaclip"):
        return type(value).__name__, insides(vars(value))
    return repr(value)


@pytest.mark.parametrize("name", methods.names(private=True))
def test_a_method_is_the_same_object_after_a_run(name):
    """So what it holds can't get from one run into another."""
    method = methods.get(name, **({"gain": 2.0} if name == "auto" else {}))
    before = insides(method)
    module = network(20)
    optimizer = method.optimizer(module.parameters(), lr=0.1)
    engine, module, optimizer, loader = private(
        module,
        toy_data(40, inputs=24),
        optimizer=optimizer,
        method=method,
        clipping=None,
        epochs=3,
        target_delta=1e-5,
    )
    train(module, optimizer, loader, mean_loss, epochs=3)
    assert engine.updates and insides(method) == before


def test_the_comparison_sees_a_controller_that_keeps_something():
    class Counting(Following):
        def update(self, reading, state):
            self.seen.append(reading)
            return state

    class Still(Keeping):
        def bind(self, module, trained):
            return self

        def read(self, module, step):
            return 1.0

    controller = Counting(Still())
    object.__setattr__(controller, "seen", [])
    type(controller).__module__ = "zetaclip.made_up"
    method = Method("counting", controller=controller)
    before = insides(method)
    _, module, optimizer, loader = private(
        network(16), toy_data(inputs=24), method=method, clipping=None
    )
    train(module, optimizer, loader, mean_loss)
    assert insides(method) != before
