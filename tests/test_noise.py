"""The noise that leaves: its level, its shape, and that it is there when nothing else is."""

import pytest
import torch
from helpers import flat, mean_loss, private, train
from scipy import stats
from torch import nn

from zetaclip import Method
from zetaclip.control import ClipState, Controller


def released_noise(sigma, clip, q=0.5, steps=1, seed=0, **options):
    """What moves the weights of a layer whose inputs are zero, in units of σC/L. The seed is fixed:
    no test fails by chance."""
    data = (torch.zeros(64, 300), torch.zeros(64, dtype=torch.long))
    module = nn.Linear(300, 200, bias=False)
    _, module, optimizer, loader = private(
        module, data, sigma=sigma, clipping=clip, q=q, seed=seed, **options
    )
    found = []
    for _ in range(steps):
        before = module.weight.detach().clone()
        train(module, optimizer, loader, steps=1)
        found.append((before - module.weight.detach()).flatten() * q * 64)
    return torch.stack(found)


def p_values(noise, std):
    """Kolmogorov-Smirnov against the normal law at the right level, 2/3 and 3/2 of it."""
    return [
        stats.kstest((noise / (std * scale)).numpy(), "norm").pvalue for scale in (1, 2 / 3, 1.5)
    ]


@pytest.mark.parametrize(("sigma", "clip"), [(1.3, 0.7), (0.4, 5.0), (8.0, 0.01)])
def test_noise_has_the_declared_level(sigma, clip):
    right, low, high = p_values(released_noise(sigma, clip)[0], sigma * clip)
    assert right > 1e-4 and low < 1e-6 and high < 1e-6


@pytest.mark.slow
def test_noise_from_fresh_keys_has_the_declared_level():
    """The only test of a distribution that draws from the operating system. It fails by chance once
    in 10⁹ times."""
    right, low, high = p_values(released_noise(1.3, 0.7, seed=None)[0], 1.3 * 0.7)
    assert right > 1e-9 and low < 1e-12 and high < 1e-12
    again = released_noise(1.3, 0.7, seed=None)[0]
    assert not torch.equal(again, released_noise(1.3, 0.7, seed=None)[0])


class Growing(Controller):
    """C doubles at every step."""

    probe = None

    def init(self):
        return ClipState(0.5)

    def update(self, reading, state):
        return ClipState(state.clip * 2)

    def entry(self, state):
        return (state.clip,)


def test_noise_follows_a_moving_clip_and_a_schedule():
    """The C of the step scales its noise, and σ is the schedule's."""
    found = released_noise(lambda step: 1.0 + step, Growing(), steps=4)
    for step, noise in enumerate(found):
        right, low, high = p_values(noise, (1.0 + step) * 0.5 * 2**step)
        assert right > 1e-4 and low < 1e-6 and high < 1e-6


def test_noise_of_two_steps_is_independent():
    first, second = released_noise(1.0, 1.0, steps=2)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.02
    # The test would see a noise that is used twice.
    assert abs(float(torch.corrcoef(torch.stack([first, first + 0.5 * second]))[0, 1])) > 0.5


def test_noise_is_drawn_and_counted_when_every_batch_is_empty():
    data = (torch.randn(8, 5), torch.zeros(8, dtype=torch.long))
    engine, module, optimizer, loader = private(
        nn.Linear(5, 400), data, sigma=2.0, clipping=0.5, q=1e-9, num_examples=8
    )
    before = flat(module)
    rows = []
    for batch in loader:
        rows.append(len(batch[0]))
        assert not batch[0].any() and not batch[1].any()  # the marked row is zeros
        optimizer.zero_grad()
        mean_loss(module, batch).backward()
        optimizer.step()
        if len(rows) == 3:
            break
    assert rows == [1, 1, 1] and engine.ledger.steps == 3
    noise = (before - flat(module)) * (1e-9 * 8) / 3**0.5
    right, low, high = p_values(noise, 1.0)
    assert right > 1e-4 and low < 1e-6 and high < 1e-6


def test_empty_skip_takes_no_step():
    data = (torch.randn(8, 5), torch.zeros(8, dtype=torch.long))
    engine, module, optimizer, loader = private(
        nn.Linear(5, 4), data, q=1e-9, num_examples=8, empty="skip"
    )
    before = flat(module)
    batch = next(iter(loader))
    mean_loss(module, batch).backward()
    optimizer.step()
    assert not optimizer.stepped and torch.equal(before, flat(module)) and len(engine.ledger) == 0


def test_dividing_by_the_constant_doubles_when_the_records_do():
    """Duplicate the data at the same L: the clean part doubles. Dividing by the batch would leave
    it as it is."""
    moved = []
    for times in (1, 2):
        torch.manual_seed(0)
        x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
        module = nn.Linear(6, 3)
        before = flat(module)
        with pytest.warns(UserWarning, match="declared") if times == 2 else _nothing():
            _, module, optimizer, loader = private(
                module, (x.repeat(times, 1), y.repeat(times)), sigma=0.0, q=1.0, num_examples=16
            )
        train(module, optimizer, loader)
        moved.append(before - flat(module))
    torch.testing.assert_close(moved[1], 2 * moved[0], rtol=1e-5, atol=1e-7)


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def test_a_method_with_two_passes_noises_each():
    """Both queries of one batch have their own, independent noise."""
    import dataclasses

    from zetaclip.methods import Pass, Plan

    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watching:
        def __call__(self, releases, memory):
            seen.append([r.gradient.clone() for r in releases])
            return None

    method = Method(
        "two",
        passes=(Pass("ascent"), Pass("descent", batch="same", perturb=Watching())),
        plan=lambda b: Plan((2.0, 3.0)),
    )
    data = (torch.zeros(64, 300), torch.zeros(64, dtype=torch.long))
    module = nn.Linear(300, 200, bias=False)
    before = flat(module)
    _, module, optimizer, loader = private(module, data, clipping=0.7, q=0.5, method=method)
    train(module, optimizer, loader, steps=1)
    ascent, descent = seen[0][0] * 32, (before - flat(module)) * 32
    for noise, std in ((ascent, 1.4), (descent, 2.1)):
        right, low, high = p_values(noise, std)
        assert right > 1e-4 and low < 1e-6 and high < 1e-6
    assert abs(float(torch.corrcoef(torch.stack([ascent, descent]))[0, 1])) < 0.02
