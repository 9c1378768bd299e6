"""What each method's own part promises: the formulas, their limits, and what they converge to."""

import dataclasses
import math

import pytest
import torch
from helpers import private, tiny, toy_data, train

from zetaclip import methods
from zetaclip.clipping import AutoS, Counted, Important, Moments, Psac, Slack, Thinned, Whitened
from zetaclip.control import Paced, Quantile, Released, SlackControl
from zetaclip.mechanism import Coins


def norms(*values):
    return torch.tensor(values, dtype=torch.float64)


def released(gradient=(0.0,), step=0, clip=1.0, noise_std=0.0, **extras):
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in extras.items()}
    return Released(step, 0, clip, clip, noise_std, torch.tensor(gradient), values)


# -- clip rules ------------------------------------------------------------------------------------


def test_auto_s_limits():
    n = torch.logspace(-12, 12, 49, dtype=torch.float64)
    torch.testing.assert_close(AutoS().factors(n, 1.0, None) * n, n / (n + 0.01))
    torch.testing.assert_close(AutoS(1e-30).factors(n, 1.0, None) * n, torch.ones_like(n))
    torch.testing.assert_close(
        1e30 * AutoS(1e30).factors(n, 1.0, None), torch.ones_like(n), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize(("r", "peak", "where"), [(0.1, 1.878, 0.216), (0.01, 5.263, 0.09)])
def test_psac_weights(r, peak, where):
    rule = Psac(r)
    assert rule.factors(norms(0.0), 3.0, None).item() == 3.0
    n = torch.linspace(0, 2, 20001, dtype=torch.float64)
    weights = rule.factors(n, 1.0, None)
    assert (
        float(weights.max())
        == pytest.approx(1 / (2 * r**0.5 - r), rel=1e-6)
        == pytest.approx(peak, abs=1e-3)
    )
    assert (
        float(n[weights.argmax()])
        == pytest.approx(r**0.5 - r, abs=2e-4)
        == pytest.approx(where, abs=1e-3)
    )
    long = torch.logspace(2, 12, 11, dtype=torch.float64)
    assert ((rule.factors(long, 1.0, None) * long - 1).abs() <= 1.01 * r / long**2 + 1e-15).all()
    tiny_ones = torch.logspace(
        -12, -6, 7, dtype=torch.float64
    )  # no blow-up: the factor stays near 1
    torch.testing.assert_close(
        rule.factors(tiny_ones, 1.0, None), torch.ones(7).double(), rtol=1e-4, atol=0
    )


def test_thinning_joins_in_proportion_and_is_unbiased():
    """Frequencies within four standard errors; a rate of q_max for long gradients, half of it for
    half of C."""
    times, clip = 40_000, 2.0
    lengths = norms(0.0, 1.0, 2.0, 50.0)
    factors = Thinned().factors(lengths.repeat(times), clip, Coins(bytes(32))).view(times, 4)
    joined = (factors > 0).double().mean(0)
    for found, wanted in zip(joined.tolist(), (0.0, 0.5, 1.0, 1.0), strict=True):
        assert abs(found - wanted) <= 4 * math.sqrt(wanted * (1 - wanted) / times)
    lengths_joined = (factors * lengths)[factors > 0]
    torch.testing.assert_close(lengths_joined, torch.full_like(lengths_joined, clip))
    # On average each adds its clipped gradient; adding clip(g) instead of C g/|g| would give 0.5
    # for the second.
    assert abs(float((factors * lengths).mean(0)[1]) - 1.0) <= 4 * clip * 0.5 / math.sqrt(times)


def test_slots_are_the_distribution_of_the_norms():
    """Without noise p_j is the share of records below each bin, linear inside it."""
    clip, slots = 2.0, 8
    n = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    columns = Slack(slots).extras(n, clip)["slack"].columns
    assert (columns.diff(dim=1) <= 1e-12).all()
    width = clip / math.sqrt(slots)
    shares = columns.mean(0) / width
    for j in range(1, slots + 1):
        low, high = clip * (1 - j / slots), clip * (1 - (j - 1) / slots)
        wanted = ((high - n) / (high - low)).clamp(0, 1).mean()
        assert float(shares[j - 1]) == pytest.approx(float(wanted), abs=1e-12)
    ends = Slack(slots).extras(norms(0.0, clip), clip)["slack"].columns
    kept = Slack(slots).factors(norms(0.0, clip), clip, None) * norms(0.0, clip)
    torch.testing.assert_close(torch.hypot(kept, ends.norm(dim=1)), norms(clip, clip))


def test_the_count_is_centred():
    bits = Counted(tau=2.0, noise_multiplier=1.0).extras(norms(0.0, 1.9, 2.1, 9.0), 1.0)["count"]
    assert bits.columns.flatten().tolist() == [0.5, 0.5, -0.5, -0.5] and bits.sensitivity == 0.5


# -- controllers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0.2, 0.5, 0.9])
def test_quantile_finds_the_quantile(target):
    lengths = torch.linspace(0.5, 8.0, 400, dtype=torch.float64)
    control = Quantile(0.1, target, bounds=(1e-3, 1e3))
    state = control.init()
    for step in range(300):
        count = Counted().extras(lengths, state.clip)["count"].columns.mean(0)
        state = control.update(released(step=step, count=count.tolist()), state)
    assert state.clip == pytest.approx(float(lengths.quantile(target)), rel=0.02)
    assert control.entry(state) == (300, state.clip)


@pytest.mark.parametrize("count", [1e6, -1e6, 0.5, -0.5, 0.0])
@pytest.mark.parametrize(
    "control",
    [
        Quantile(1.0, bounds=(0.5, 2.0)),
        Quantile(1.0, bounds=(0.1, math.inf)),
        Paced(),
        SlackControl(bounds=(0.5, 2.0)),
    ],
    ids=repr,
)
def test_c_stays_inside_its_bounds_whatever_is_released(control, count):
    state = control.init()
    low, high = control.bounds
    for step in range(500):
        state = control.update(
            released(step=step, clip=state.clip, count=[count], slack=[count] * 3), state
        )
        assert low <= state.clip <= high and math.isfinite(state.clip)


def test_pacing_moves_the_rate_only_outside_its_band():
    control = Paced(clip_rate=0.2, band=0.1, smoothing=0.0, gain=0.0)
    for clipped, wanted in ((0.05, 1.01), (0.15, 1.0), (0.25, 1.0), (0.35, 0.995)):
        state = control.update(released(count=[0.5 - clipped]), control.init())
        assert state.rate == pytest.approx(wanted) and state.clip_rate == pytest.approx(clipped)
    state = control.init()
    for step in range(2000):
        state = control.update(released(step=step, count=[0.5]), state)
    assert state.rate == 2.0


def test_the_engine_paces_the_learning_rate_and_gives_it_back():
    """The update is proportional to the factor; scaling the gradient instead would do nothing to
    Adam."""
    moved = []
    for factor in (1.0, 0.25):
        method = methods.get(
            "dp-adam-ac", weight_decay=0.0, gain=0.0, up=1.0, down=1.0, sigma_b=5.0
        )
        module = tiny()
        optimizer = method.optimizer(module.parameters(), lr=0.01)
        _, module, optimizer, loader = private(
            module, toy_data(), method=method, optimizer=optimizer, clipping=None
        )
        loop = optimizer._loop
        paced = dataclasses.replace(loop.state.control, rate=factor)
        loop.state = dataclasses.replace(loop.state, control=paced)
        before = torch.cat([p.detach().flatten() for p in module.parameters()])
        train(module, optimizer, loader, steps=1)
        moved.append(torch.cat([p.detach().flatten() for p in module.parameters()]) - before)
        assert optimizer.param_groups[0]["lr"] == 0.01
    torch.testing.assert_close(moved[1], 0.25 * moved[0], rtol=1e-3, atol=1e-7)


def test_slaclip_moves_towards_the_norms():
    """Norms far above C raise it, norms far below lower it."""
    for length, up in ((10.0, True), (0.01, False)):
        control, rule = SlackControl(1.0), Slack(10)
        state = control.init()
        for step in range(20):
            slack = rule.extras(torch.full((50,), length, dtype=torch.float64), state.clip)[
                "slack"
            ].columns.mean(0)
            state = control.update(
                released(step=step, clip=state.clip, slack=slack.tolist()), state
            )
        assert (state.clip > 1.0) == up


# -- released maps ---------------------------------------------------------------------------------


def test_scales_give_the_least_noise_among_those_that_fit():
    """b_j = sqrt(s_j Σ s): E|w|² is C², and other scales that keep it cost more."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(50, generator=generator, dtype=torch.float64) + 0.01
    spread /= spread.norm()
    scale = Moments().scale(spread.square(), None)
    assert float((spread / scale).square().sum()) == pytest.approx(1.0)
    for _ in range(20):
        other = scale * torch.exp(0.2 * torch.randn(50, generator=generator, dtype=torch.float64))
        other *= (spread / other).norm()  # the same E|w|²
        assert float(other.square().sum()) > float(scale.square().sum())


def test_the_spread_is_found_and_the_noise_left_out():
    """Means of L records with known spreads, and noise: the estimate is of one record's spread,
    without the noise."""
    generator, batch, noise = torch.Generator().manual_seed(1), 50.0, 0.02
    spread = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64).repeat(200)
    moments = Moments(
        beta1=0.999, beta2=0.998, high=1e9, low=-1e9, cap=False
    )  # no clamp: the mean itself is tested
    state = moments.start(spread, 1000)
    for _ in range(2000):
        scale = moments.scale(state["variance"].clamp_min(1e-12), None)
        gradient = spread / batch**0.5 * torch.randn(600, generator=generator, dtype=torch.float64)
        gradient += noise * scale * torch.randn(600, generator=generator, dtype=torch.float64)
        one = Released(0, 0, 1.0, 1.0, noise, gradient, {})
        state = moments.update(
            one,
            {**state, "scale": scale, "variance": state["variance"].clamp_min(1e-12)},
            batch,
            None,
        )
    found = state["variance"].view(200, 3).mean(0).sqrt()
    torch.testing.assert_close(found, spread[:3], rtol=0.1, atol=0.02)


def test_capped_scales_never_cost_more_noise_than_dp_sgd():
    for values in (1e-12, 1.0, 1e6):
        variance = torch.full((1000,), values) * torch.rand(
            1000, generator=torch.Generator().manual_seed(0)
        )
        assert float(Moments().scale(variance, None).square().sum()) <= 1000 * (1 + 1e-5)
    assert float(Moments(cap=False).scale(variance, None).square().sum()) > 1e9


def test_an_empty_batch_releases_the_mean():
    rule = dataclasses.replace(Whitened(), batch=10.0)
    state = rule.update(released([1.0, -2.0, 3.0]), rule.init(3))
    affine = rule.transform(state)
    torch.testing.assert_close(affine.undo(torch.zeros(3)), 0.01 * torch.tensor([1.0, -2.0, 3.0]))
    assert rule.transform(rule.init(3)) is None


def test_the_mask_is_of_released_gradients_and_nothing_outside_moves():
    method = methods.get("adadpigu", keep=0.4, warmup=0.5)
    module = tiny()
    optimizer = method.optimizer(module.parameters(), lr=0.1)
    _, module, optimizer, loader = private(
        module,
        toy_data(),
        method=method,
        optimizer=optimizer,
        clipping=None,
        epochs=3,
        target_delta=1e-5,
    )
    run, gradients = optimizer._loop, []
    theta = None
    for step in range(6):
        train(module, optimizer, loader, steps=1)
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
        if step == 2:
            theta = torch.cat([p.detach().flatten() for p in module.parameters()])
    mask = run.state.rule["mask"]
    importance = torch.stack(gradients[:3]).abs().sum(0)
    assert int(mask.sum()) == round(0.4 * len(mask)) and float(importance[mask].min()) >= float(
        importance[~mask].max()
    )
    after = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert torch.equal(theta[~mask], after[~mask]) and bool((theta[mask] != after[mask]).all())


def test_masked_coordinates_use_up_no_norm():
    """A record that is long outside the mask only is not clipped inside."""
    state = {"updates": 1, "mask": torch.tensor([True, False])}
    affine = Important(whiten=False, keep=0.5).transform(state)
    mapped = affine.apply(torch.tensor([[0.5, 1e6]]))
    assert mapped.tolist() == [[0.5, 0.0]]


def test_ww_uses_its_options():
    method = methods.get("ww-dp-sgd", clip=0.7, paper=True, probe="0", period=5)
    assert method.controller.init().clip == 0.7 and method.controller.period == 5
    assert method.controller.smoothing == 0.98 and not method.controller.anti_windup


def test_the_noisy_clip_rate_has_the_level_of_its_row():
    """s_b = L/20 unless that is too little for the budget: then 2 z*."""
    for size, wanted in ((24, 2 * 1.5), (24 * 40, 24 * 40 * 0.5 / 20)):
        method = methods.get("quantile")
        module = tiny()
        engine, module, optimizer, loader = private(
            module,
            toy_data(size),
            method=method,
            optimizer=method.optimizer(module.parameters()),
            clipping=None,
            sigma=1.5,
        )
        train(module, optimizer, loader, steps=1)
        total, count = engine.ledger.rows()
        assert (count.query, count.clip, count.noise_std) == (
            "sum: count",
            0.5,
            pytest.approx(wanted * (1 + 2**-9)),
        )
        assert total.noise_multiplier**-2 + count.noise_multiplier**-2 == pytest.approx(
            1.5**-2, rel=1e-12
        )
