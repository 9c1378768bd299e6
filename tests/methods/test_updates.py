"""AdamBC and the average of weights, against their formulas."""

import copy
from contextlib import suppress

import pytest
import torch
from helpers import flat, tiny
from torch import nn

from zetaclip.methods import AdamBC, WeightAverage
from zetaclip.methods._updates import scaled_rates


def steps(optimizer, parameter, gradients, stds):
    for gradient, std in zip(gradients, stds, strict=True):
        parameter.grad = gradient.clone()
        optimizer.set_noise_std(std)
        optimizer.step()


def gradients(count, numel=1000, std=1.0, mean=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return mean + std * torch.randn(count, numel, generator=generator, dtype=torch.float64)


def literal(theta, given, stds, lr, beta1, beta2, floor, decay):
    """The formula, with every sum written out: Φ̂ is the noise's own bias-corrected average."""
    for t in range(1, len(given) + 1):
        ages = torch.arange(t - 1, -1, -1, dtype=torch.float64)
        first = ((1 - beta1) * beta1**ages) @ given[:t] / (1 - beta1**t)
        second = ((1 - beta2) * beta2**ages) @ given[:t].square() / (1 - beta2**t)
        noise = float(
            ((1 - beta2) * beta2**ages) @ torch.tensor(stds[:t]).double().square() / (1 - beta2**t)
        )
        theta = (1 - lr * decay) * theta - lr * first / (second - noise).clamp_min(floor).sqrt()
    return theta


def test_adam_bc_is_its_formula_also_where_the_noise_moves():
    given, stds = gradients(12), [0.1 * (1 + t % 3) for t in range(12)]
    parameter = nn.Parameter(torch.linspace(-1, 1, 1000).double())
    start = parameter.detach().clone()
    steps(
        AdamBC([parameter], lr=0.05, betas=(0.8, 0.95), floor=0.3, weight_decay=0.1),
        parameter,
        given,
        stds,
    )
    torch.testing.assert_close(
        parameter.detach(), literal(start, given, stds, 0.05, 0.8, 0.95, 0.3, 0.1)
    )
    # The last noise in place of its average gives something else.
    wrong = literal(start, given, [stds[-1]] * 12, 0.05, 0.8, 0.95, 0.3, 0.1)
    assert (parameter.detach() - wrong).abs().max() > 1e-3


def test_adam_bc_without_noise_is_adam():
    given = gradients(10)
    ours, theirs = (
        nn.Parameter(torch.zeros(1000).double()),
        nn.Parameter(torch.zeros(1000).double()),
    )
    steps(AdamBC([ours], lr=0.01, floor=0.0), ours, given, [0.0] * 10)
    adam = torch.optim.Adam([theirs], lr=0.01, eps=0.0)
    for gradient in given:
        theirs.grad = gradient.clone()
        adam.step()
    torch.testing.assert_close(ours.detach(), theirs.detach())
    # With a floor of eps² and moments far above it, within one per cent of Adam with eps.
    near = nn.Parameter(torch.zeros(1000).double())
    steps(AdamBC([near], lr=0.01, floor=1e-16), near, given, [0.0] * 10)
    torch.testing.assert_close(near.detach(), theirs.detach(), rtol=0.01, atol=1e-12)


@pytest.mark.parametrize("count", [1, 5, 200])
def test_pure_noise_leaves_nothing_in_the_second_moment(count):
    std, numel, beta2 = 0.3, 20_000, 0.99
    parameter = nn.Parameter(torch.zeros(numel).double())
    optimizer = AdamBC([parameter], lr=0.0, betas=(0.9, beta2))
    steps(optimizer, parameter, gradients(count, numel, std), [std] * count)
    group = optimizer.param_groups[0]
    corrected = (optimizer.state[parameter]["exp_avg_sq"] - group["noise_sq"]) / (1 - beta2**count)
    error = 4 * std**2 * (2 / (numel * min(count, 2 / (1 - beta2)))) ** 0.5
    assert abs(float(corrected.mean())) <= error < 0.1 * std**2


def test_adam_bc_resumes_and_must_be_told_the_noise():
    given, stds = gradients(6), [0.2] * 6
    whole = nn.Parameter(torch.zeros(1000).double())
    optimizer = AdamBC([whole], lr=0.01)
    steps(optimizer, whole, given[:3], stds[:3])
    part = nn.Parameter(whole.detach().clone())
    other = AdamBC([part], lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(optimizer, whole, given[3:], stds[3:])
    steps(other, part, given[3:], stds[3:])
    assert torch.equal(whole, part)
    part.grad = given[0]
    with pytest.raises(RuntimeError, match="told the noise"):
        AdamBC([part]).step()
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"floor": -1.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match="must be"):
            AdamBC([part], **wrong)


def test_rates_are_scaled_inside_only():
    optimizer = torch.optim.SGD(tiny().parameters(), lr=0.4)
    with suppress(KeyError), scaled_rates(optimizer, 0.5):
        assert optimizer.param_groups[0]["lr"] == 0.2
        raise KeyError
    assert optimizer.param_groups[0]["lr"] == 0.4


def test_the_average_forgets_the_start():
    module = tiny(dtype=torch.float64)
    average = WeightAverage(module.parameters(), 0.9)
    start, seen = flat(module), []
    with average.applied():
        assert torch.equal(flat(module), start)
    for step in range(20):
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(float(step))
        average.update()
        seen.append(float(step))
    weights = torch.tensor([0.9 ** (19 - t) for t in range(20)]).double()
    wanted = float(weights @ torch.tensor(seen).double() / weights.sum())
    other = WeightAverage(module.parameters(), 0.9)
    other.load_state_dict(average.state_dict())
    with other.applied():
        torch.testing.assert_close(flat(module), torch.full_like(start, wanted))
    assert float(flat(module)[0]) == 19.0
    with pytest.raises(ValueError, match="other weights"):
        WeightAverage([nn.Parameter(torch.zeros(2))], 0.9).load_state_dict(average.state_dict())
    with pytest.raises(ValueError, match="decay"):
        WeightAverage(module.parameters(), 1.0)
