"""The method that leaves nothing to tune: its law, its gain, its firewall, its length."""

import math

import pytest
import torch
from helpers import flat, mean_loss, tiny, toy_data, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import network

from zetaclip import PrivacyEngine, Spectral, methods, optim
from zetaclip.mechanism import Mechanism
from zetaclip.methods._auto import law, layers, limits
from zetaclip.training.lengths import length, updates_for


def made_private(module=None, data=None, engine=None, optimizer=None, **options):
    module = module or network()
    engine = engine or PrivacyEngine(accountant="rdp", seed=3)
    optimizer = optimizer or optim.Auto(module.parameters(), gain=2.0)
    loader = DataLoader(TensorDataset(*(data or toy_data())), batch_size=8)
    options = {"noise_multiplier": 1.0, "epochs": 2, "clipping": "auto", **options}
    return (
        engine,
        *engine.make_private(
            module=module, optimizer=optimizer, data_loader=loader, num_examples=24, **options
        ),
    )


# -- the law


def test_under_the_law_noise_alone_moves_an_output_by_its_reach():
    """Simulated: pure noise through Auto itself, and the outputs' spread over many records."""
    torch.manual_seed(0)
    inputs = torch.nn.functional.normalize(torch.randn(200, 400), dim=1)
    head = nn.Linear(400, 20)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = optim.Auto(head.parameters(), steps=1000)
    for _ in range(1000):
        for p in head.parameters():
            p.grad = 0.05 * torch.randn_like(p)
        optimizer.set_noise_std(0.05)
        optimizer.step()
    spread = float((inputs @ head.weight.detach().T).std())
    # The weights' share of the gain √2 is 1, so they move an output by reach / √2.
    assert spread == pytest.approx(1.5 / math.sqrt(2.0), rel=0.08)
    # Twice the rate would not pass.
    assert 2 * spread != pytest.approx(1.5 / math.sqrt(2.0), rel=0.5)


def test_the_law_scales_as_it_should():
    rate = law(0.01, 300, 1.0, 2.0, 1e9)
    assert law(0.02, 300, 1.0, 2.0, 1e9) == pytest.approx(rate / 2)
    assert law(0.01, 1200, 1.0, 2.0, 1e9) == pytest.approx(rate / 2)
    assert law(0.01, 300, 4.0, 2.0, 1e9) == pytest.approx(rate / 4)
    assert law(0.0, 300, 1.0, 2.0, 16.0) == 16.0  # without noise, stability alone
    # The tuned rates of a linear head on fixed features of CIFAR-10: effective 200, 300 and 600
    # (rate over 1 - momentum) at σ of 4.75, 2.18 and 1.29, batches of 5000.
    for sigma, steps, tuned in ((4.745, 150, 200), (2.180, 200, 300), (1.287, 300, 600)):
        found = law(sigma / 5000, steps, 1.0, 1.5, 2048.0)
        assert tuned / 2 < found < 2 * tuned


def test_deep_networks_bear_less_noise_the_longer_they_train():
    """With two hidden layers the noise of T updates counts as T, of a shallower one as its root."""
    for depth, fall in ((1, 2.0), (2, 2.0), (3, 4.0), (4, 4.0)):
        first, later = (law(0.01, t, 1.0, *limits(depth, False, t)[:1], 1e9) for t in (300, 1200))
        assert first / later == pytest.approx(fall)
        assert limits(depth, True, 100) == limits(depth, True, 300)


def test_the_step_does_not_depend_on_c():
    """Far below every gradient's norm C changes nothing, with ``decouple_lr`` or without."""

    def weights(clip, decouple=False):
        method = methods.get("auto", gain=2.0)
        module = network()
        built = method.optimizer(module.parameters())
        _, _, optimizer, loader = made_private(
            module, optimizer=built, method=method, clipping=clip, decouple_lr=decouple
        )
        assert optimizer.clip == clip
        train(module, optimizer, loader, mean_loss, steps=3)
        return flat(module)

    torch.testing.assert_close(weights(1e-3), weights(1e-3, True), rtol=0, atol=0)
    torch.testing.assert_close(weights(1e-3), weights(2e-3), rtol=1e-2, atol=1e-3)
    assert (weights(1e-3) - weights(10.0)).abs().max() > 0.05  # here C matters


def test_steps_are_a_decaying_average_of_the_gradients():
    parameter = nn.Parameter(torch.zeros(3, 1))
    optimizer = optim.Auto([parameter], gain=2.0, steps=4, momentum=0.5)
    average = torch.zeros(3, 1)
    expected = torch.zeros(3, 1)
    reach = 1.5 * math.sqrt(20 / 3)  # of few inputs: one counts as three
    for t in range(4):
        gradient = torch.tensor([[1.0], [2.0], [-3.0]]) * (t + 1)
        parameter.grad = gradient.clone()
        optimizer.set_noise_std(0.3)
        optimizer.step()
        average = 0.5 * average + 0.5 * gradient
        rate = 1 / (2.0 * (0.3 * math.sqrt(32 / 15) / reach + 1 / 2048)) * (1 - (t / 4) ** 2)
        expected -= rate * average
        assert optimizer.rate == pytest.approx(rate)
    torch.testing.assert_close(parameter.detach(), expected)


# -- the gain


@pytest.mark.parametrize(("bias", "expected"), [(True, math.sqrt(2.0)), (False, 1.0)])
def test_a_linear_layer_on_inputs_of_length_1_needs_no_measured_gain(bias, expected):
    module = nn.Linear(7, 3, bias=bias)
    inputs = nn.functional.normalize(torch.randn(9, 7), dim=1)
    assert optim.Auto(module.parameters()).gain == pytest.approx(expected)
    assert optim.gain(module, inputs) == pytest.approx(expected, rel=1e-5)


def test_gain_is_the_length_of_the_outputs_derivative():
    torch.manual_seed(1)
    module, inputs = tiny(), torch.randn(6, 6)
    total = 0.0
    for row in inputs:
        for output in module(row[None])[0]:
            grads = torch.autograd.grad(output, list(module.parameters()), retain_graph=True)
            total += sum(float(g.square().sum()) for g in grads)
    outputs = module(inputs).shape[1]
    literal = math.sqrt(total / (len(inputs) * outputs))
    # Random signs make it an estimate, so many rows are needed for a sharp comparison.
    assert optim.gain(module, inputs.repeat(60, 1)) == pytest.approx(literal, rel=0.05)


def test_gain_leaves_the_module_as_it_was():
    module = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    before, state = flat(module), torch.get_rng_state()
    first = optim.gain(module, torch.ones(3, 5))
    assert module.training and torch.equal(before, flat(module))
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert optim.gain(module, torch.ones(3, 5)) == first  # no dropout in it


def test_a_unit_head_needs_no_gain_and_a_network_says_that_it_does():
    head = nn.Linear(50, 10)
    unit = torch.nn.functional.normalize(torch.randn(4, 50), dim=1)
    assert optim.gain(head, unit) == pytest.approx(optim.Auto(head.parameters()).gain)
    with pytest.raises(ValueError, match=r"gain=zetaclip.optim.gain\(model, inputs\)"):
        optim.Auto(tiny().parameters())


# -- in the engine


def test_auto_clipping_needs_its_optimizer_and_a_length():
    module = network()
    with pytest.raises(ValueError, match="updates with Auto, not SGD"):
        made_private(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="how many updates"):
        made_private(epochs=None)
    with pytest.raises(TypeError, match="a method of its own"):
        made_private(method=methods.get("dp-sgd"))
    with pytest.raises(ValueError, match="its C is fixed"):
        made_private(method=methods.get("auto", gain=2.0), clipping=Spectral())


def test_c_comes_from_the_gain():
    module = network()
    for regression, share in ((False, 0.18), (True, 0.05)):
        optimizer = optim.Auto(module.parameters(), gain=3.0, regression=regression)
        _, _, private, _ = made_private(network(), optimizer=None)
        assert private.clip == pytest.approx(0.18 * 2.0)
        assert optimizer.clip_norm == pytest.approx(share * 3.0)


def test_a_larger_c_than_the_laws_is_not_taken_and_a_smaller_one_is():
    """Too large a C would drown the gradients in noise, and the step does not depend on C."""
    for clip, taken in ((8.0, 0.18 * 2.0), (0.02, 0.02)):
        module = network()
        _, _, private, _ = made_private(
            module, clipping=None, method=methods.get("auto", clip=clip)
        )
        assert private.clip == pytest.approx(taken)


def test_rate_and_weights_follow_from_the_releases_alone(monkeypatch):
    """The firewall: with the releases replayed and the data gone, all is the same."""
    recording = []
    release = Mechanism.release

    def recorder(self, *args):
        recording.append(release(self, *args))
        return recording[-1]

    def run(data):
        _, module, optimizer, loader = made_private(data=data)
        rates = []
        for _ in range(4):
            train(module, optimizer, loader, mean_loss, steps=1)
            rates.append(optimizer.inner.rate)
        return flat(module), rates, optimizer.clip

    monkeypatch.setattr(Mechanism, "release", recorder)
    weights, rates, clip = run(toy_data())
    replayed = iter(recording)
    monkeypatch.setattr(Mechanism, "absorb", lambda self, chunk, last=False: None)
    monkeypatch.setattr(Mechanism, "release", lambda self, *args: next(replayed))
    again, rates_again, clip_again = run((torch.zeros(24, 6), torch.zeros(24, dtype=torch.long)))
    assert torch.equal(weights, again) and rates == rates_again and clip == clip_again
    assert rates[0] > rates[-1] > 0


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    engine, module, optimizer, loader = made_private(epochs=4)
    train(module, optimizer, loader, mean_loss, epochs=1)
    engine.save(tmp_path / "run.pt")
    train(module, optimizer, loader, mean_loss, epochs=1)
    other, again, resumed, batches = made_private(epochs=4)
    other.load(tmp_path / "run.pt", replay=True)
    train(again, resumed, batches, mean_loss, epochs=1)
    assert torch.equal(flat(module), flat(again))
    assert resumed.inner.rate == optimizer.inner.rate > 0


# -- batch and length


def test_small_sets_get_full_batches_and_noise_few_updates():
    assert length(700, 1.0, True) == (700, 300.0)
    assert [updates_for(e) for e in (0.1, 1.0, 8.0, 50.0)] == [300, 300, 1002, 1002]
    batch, epochs = length(50_000, 1.0, True)
    assert batch == round(2e6 / 300) and epochs * -(-50_000 // batch) == pytest.approx(300)


def test_a_linear_model_of_many_inputs_gets_larger_batches():
    few, many = (length(50_000, 8.0, True, inputs=inputs) for inputs in (999, 1000))
    assert (few[0], many[0]) == (round(2e6 / 1002), round(5e6 / 1002))
    assert length(50_000, 8.0, False, inputs=1000) == length(50_000, 8.0, False)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("size", [3, 40, 1437, 60_000, 3_000_000])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, None])
def test_lengths_can_always_be_run(linear, size, epsilon):
    batch, epochs = length(size, epsilon, linear)
    assert 1 <= batch <= size
    steps = epochs * math.ceil(size / batch)
    assert steps + 1e-6 >= 300 and batch * steps >= 2.9 * size


def test_what_is_given_stays_and_the_rest_follows():
    assert length(1437, 3.0, True, batch=10)[0] == 10
    assert length(60_000, 1.0, True, epochs=4) == (800, 4)  # 300 updates before a larger batch
    assert length(60_000, 1.0, True, steps=100) == (20_000, None)
    assert length(60_000, 1.0, True, records=60_000)[0] == 200


def test_few_inputs_bear_more_noise_in_shallow_models_only():
    """Twice the reach with a quarter of the inputs; 20 and more, and deep networks, as ever."""
    for regression in (False, True):
        for depth in (1, 2):
            usual, bound = limits(depth, regression, 300)
            assert limits(depth, regression, 300, 5) == (pytest.approx(2 * usual), bound)
            assert limits(depth, regression, 300, 20) == limits(depth, regression, 300, 784)
            assert limits(depth, regression, 300, 20) == (usual, bound)
        assert limits(3, regression, 300, 5) == limits(3, regression, 300)
        assert limits(1, regression, 300, 1) == limits(1, regression, 300, 3)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.Linear(7, 3), (1, 7)),
        (nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 2)), (2, 7)),
        (nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 9), nn.Linear(9, 2)), (3, None)),
        (nn.Sequential(nn.Conv2d(1, 9, 3), nn.Flatten(), nn.Linear(9, 2)), (2, None)),
        (nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2)), (2, None)),
        (nn.LayerNorm(6), (1, None)),
    ],
)
def test_inputs_are_counted_where_a_weight_tells_them(model, found):
    """A kernel of 9 numbers sees a whole picture, an embedding of 8 a whole vocabulary."""
    assert layers(model.parameters()) == found


def test_the_rate_of_a_small_table_follows_its_inputs():
    """The same noise and gain: 5 inputs have twice the rate of 20, but for the bound."""
    rates = []
    for inputs in (5, 20):
        weight = nn.Parameter(torch.zeros(1, inputs))
        update = optim.Auto([weight], gain=1.0, steps=10)
        update.set_noise_std(1.0)
        weight.grad = torch.ones_like(weight)
        update.step()
        rates.append(update.rate)
    assert rates[0] == pytest.approx(2 * rates[1], rel=1e-2)
