"""The interfaces that methods are made of, each with a toy."""

import math

import pytest
import torch
from helpers import flat, looped_gradients, mean_loss, private, tiny, toy_data, train
from scipy import stats
from torch import nn
from toys import METHODS, Counting, FromCount, Slack, Whitened, network, two_pass

from zetaclip import Extra, Flat, Method, Plan, layer_rule
from zetaclip.engine._guard import OrderError
from zetaclip.gradients import LAYER_RULES
from zetaclip.methods import NoiseBudget


def level_p(noise, scale=1.0):
    """Two-sided p value of "these are normal with standard deviation scale", by their sum of
    squares."""
    total = sum((n / scale) ** 2 for n in noise)
    return 2 * min(stats.chi2.sf(total, len(noise)), stats.chi2.cdf(total, len(noise)))


def released(module, data, loss=mean_loss, **options):
    """What one update released."""
    seen = []
    _, module, optimizer, loader = private(module, data, **options)
    run = optimizer._loop
    use = run._use
    run._use = lambda batch, r: (seen.append(r), use(batch, r))
    train(module, optimizer, loader, loss, steps=1)
    return seen[0], run


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("size", [3, 8])
def test_physical_batches_change_nothing_for_any_method(name, size):
    weights = []
    for physical in (None, size):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        _, module, optimizer, loader = private(
            module,
            toy_data(),
            method=METHODS[name](),
            clipping=None,
            physical_batch_size=physical,
            lr=0.1,
        )
        assert train(module, optimizer, loader, epochs=2) == 4
        weights.append(flat(module))
    assert (weights[0] - weights[1]).norm() <= 1e-5 * weights[0].norm()


def test_joint_columns_share_the_gaussian():
    """sum of sqrt(C² - n²) over L, with the noise of the sum, and no further row in the ledger."""
    module, data = tiny(), toy_data()
    norms = looped_gradients(module, data, mean_loss).norm(dim=1).double()
    clean, _ = released(
        tiny(), data, q=1.0, sigma=0.0, clipping=1.0, method=Method("s", rule=Slack())
    )
    expected = (1 - norms.clamp_max(1).square()).clamp_min(0).sqrt().sum() / 24
    assert float(clean.extras["slack"][0]) == pytest.approx(float(expected), rel=1e-4)
    noise = []
    for seed in range(300):
        noisy, run = released(
            tiny(),
            data,
            q=1.0,
            sigma=2.0,
            clipping=1.0,
            method=Method("s", rule=Slack()),
            seed=seed,
        )
        noise.append(float(noisy.extras["slack"][0] - expected) * 24 / 2.0)
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    assert level_p(noise) > 1e-3 and level_p(noise, 2 / 3) < 1e-6 and level_p(noise, 1.5) < 1e-6
    assert [r.query for r in run.log.ledger.rows()] == ["sum"]


def test_an_own_query_has_its_own_row_noise_and_cost():
    module, data = tiny(), toy_data()
    norms = looped_gradients(module, data, mean_loss).norm(dim=1)
    clip = float(norms.quantile(0.3))
    method = Method("c", rule=Counting(3.0), controller=FromCount(clip))
    noise = []
    for seed in range(300):
        noisy, run = released(
            tiny(), data, q=1.0, sigma=2.0, clipping=None, method=method, seed=seed
        )
        expected = (norms <= clip * (1 + 1e-6)).double().sub(0.5).sum()
        noise.append((float(noisy.extras["count"][0]) * 24 - float(expected)) / 1.5)
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    assert level_p(noise) > 1e-3 and level_p(noise, 2 / 3) < 1e-6 and level_p(noise, 1.5) < 1e-6
    rows = list(run.log.ledger.rows())
    assert [(r.query, r.clip, r.noise_multiplier) for r in rows] == [
        ("sum", clip, 2.0),
        ("sum: count", 0.5, 3.0),
    ]
    (event,) = run.log.ledger.events()
    assert event.noise_multiplier == pytest.approx((1 / 4 + 1 / 9) ** -0.5)


def test_extras_are_released_from_an_empty_batch_too():
    noisy, run = released(
        tiny(),
        toy_data(),
        q=1e-9,
        sigma=1.0,
        clipping=None,
        method=Method("c", rule=Counting(3.0), controller=FromCount()),
    )
    assert (
        noisy.extras["count"].shape == (1,)
        and float(noisy.extras["count"][0]) != 0
        and len(run.log.ledger) == 2
    )


def test_the_transform_is_applied_before_the_norm_and_undone_after():
    module, data = tiny(), toy_data()
    loop = looped_gradients(module, data, mean_loss)
    state = Whitened().init(loop.shape[1])
    mapped = state["mask"] * loop / state["scale"]
    clipped = mapped * (0.2 / mapped.norm(dim=1, keepdim=True).clamp_min(0.2))
    expected = state["mask"] * state["scale"] * clipped.sum(0) / 24
    found, run = released(
        tiny(), data, q=1.0, sigma=0.0, clipping=0.2, method=Method("w", rule=Whitened())
    )
    assert (found.gradient - expected).norm() <= 1e-5 * expected.norm()
    torch.testing.assert_close(run.state.rule["shift"], 0.5 * found.gradient)
    noisy, _ = released(
        tiny(), data, q=1.0, sigma=5.0, clipping=0.2, method=Method("w", rule=Whitened())
    )
    assert not noisy.gradient[~state["mask"]].any()  # masked coordinates are not even noised


def test_a_poisoned_record_under_a_transform_counts_as_zero():
    data = toy_data()
    sums = []
    for value in (math.nan, math.inf, 1e30):
        x = data[0].clone()
        x[3] = value
        found, _ = released(
            tiny(),
            (x, data[1]),
            q=1.0,
            sigma=0.0,
            clipping=0.2,
            method=Method("w", rule=Whitened()),
        )
        assert torch.isfinite(found.gradient).all()
        sums.append(found.gradient)
    assert torch.equal(sums[0], sums[1])


def test_a_rule_that_lies_stops_before_anything_is_released():
    class Liar(Flat):
        def factors(self, norms, clip, coins):
            return torch.ones_like(norms)

    engine, module, optimizer, loader = private(
        tiny(), toy_data(), clipping=0.01, method=Method("liar", rule=Liar())
    )
    before = flat(module)
    with pytest.raises(RuntimeError, match="'flat' scaled an example"):
        train(module, optimizer, loader)
    assert len(engine.ledger) == 0 and torch.equal(before, flat(module))


class Told(torch.optim.SGD):
    """An optimizer that wants to know the noise in the gradient it gets."""

    def set_noise_std(self, std):
        self.told = [*getattr(self, "told", []), std]


@pytest.mark.parametrize("decouple", [False, True])
def test_the_update_is_told_the_noise_it_gets(decouple):
    module = tiny()
    inner = Told(module.parameters(), lr=0.1)
    _, module, optimizer, loader = private(
        module,
        toy_data(),
        sigma=lambda t: 1.0 + t,
        clipping=0.25,
        optimizer=inner,
        decouple_lr=decouple,
    )
    train(module, optimizer, loader)
    unit = (1.0 if decouple else 0.25) * (1 + 2**-9)
    assert inner.told == pytest.approx([1.0 * unit / 12, 2.0 * unit / 12])


def test_two_passes_on_the_same_batch_compose_as_one_gaussian():
    for batch, counted in (("same", 1), ("fresh", 2)):
        engine, module, optimizer, loader = private(
            tiny(), toy_data(), clipping=1.0, method=two_pass(batch)
        )
        sizes, stepped = [], []
        for data in loader:
            sizes.append(data[0].clone())
            optimizer.zero_grad()
            mean_loss(module, data).backward()
            optimizer.step()
            stepped.append(optimizer.stepped)
        assert len(loader) == 2 and stepped == [False, True, False, True]
        equal = [
            torch.equal(sizes[i], sizes[i + 1]) if len(sizes[i]) == len(sizes[i + 1]) else False
            for i in (0, 2)
        ]
        assert equal == [batch == "same"] * 2
        assert [r.query for r in engine.ledger.rows()] == ["ascent sum", "descent sum"] * 2
        assert engine.ledger.steps == 2 * counted
        multipliers = sorted({e.noise_multiplier for e in engine.ledger.events()})
        assert multipliers == pytest.approx(
            [(1.5**-2 + 2.0**-2) ** -0.5] if batch == "same" else [1.5, 2.0]
        )


def test_a_second_pass_that_was_tried_twice_still_composes_with_the_first():
    """Broken off in the second pass and begun again, with dropout: the records are those of the
    first pass."""
    method = two_pass("same")
    engine, module, optimizer, loader = private(network(), toy_data(), clipping=1.0, method=method)
    for _ in range(2):
        batches = iter(loader)
        for stop in (False, True):
            mean_loss(module, next(batches)).backward()
            if not stop:
                optimizer.step()
        train(module, optimizer, loader, steps=1)  # a new iterator: the second pass again
    assert {r.batch for r in engine.ledger.rows()} == {0, 1} and len(engine.ledger) == 4
    (event,) = engine.ledger.events()
    assert (event.count, event.noise_multiplier) == (2, pytest.approx((1.5**-2 + 2.0**-2) ** -0.5))


def test_an_own_query_without_noise_is_refused():
    class Bare(Counting):
        def extras(self, norms, clip):
            return {
                "count": Extra(torch.zeros(len(norms), 1, dtype=torch.float64), sensitivity=0.5)
            }

    with pytest.raises(ValueError, match="no noise_multiplier"):
        private(tiny(), toy_data(), clipping=1.0, method=Method("bare", rule=Bare()))


def test_a_perturbation_is_on_while_the_batch_is_out_and_undone_bitwise():
    """Reference: sharpness-aware minimisation by hand, without noise, on the whole data."""
    data = toy_data()
    method = Method("sam", passes=two_pass("same").passes, plan=lambda b: Plan((0.0, 0.0)))
    _, module, optimizer, loader = private(
        tiny(), data, q=1.0, sigma=0.0, clipping=1e6, method=method, lr=0.5
    )
    reference = tiny()
    theta = flat(module)
    inside = []
    for number, batch in enumerate(loader):
        inside.append(flat(module))
        optimizer.zero_grad()
        mean_loss(module, batch).backward()
        optimizer.step()
        if number == 0:
            assert torch.equal(flat(module), theta)
    assert torch.equal(inside[0], theta) and float((inside[1] - theta).norm()) == pytest.approx(
        0.05, rel=1e-4
    )
    params = list(reference.parameters())
    ascent = torch.cat(
        [g.flatten() for g in torch.autograd.grad(mean_loss(reference, data), params)]
    )
    torch.nn.utils.vector_to_parameters(theta + 0.05 * ascent / ascent.norm(), params)
    descent = torch.cat(
        [g.flatten() for g in torch.autograd.grad(mean_loss(reference, data), params)]
    )
    torch.testing.assert_close(flat(module), theta - 0.5 * descent, rtol=1e-5, atol=1e-6)


def test_whenever_no_batch_is_out_the_module_holds_theta():
    method = METHODS["sat"]()
    engine, module, optimizer, loader = private(
        tiny(), toy_data(), method=method, clipping=1.0, physical_batch_size=5
    )
    train(module, optimizer, loader, steps=1)
    theta = flat(module)
    batches = iter(loader)
    next(batches)
    assert float((flat(module) - theta).norm()) == pytest.approx(0.05, rel=1e-3)
    engine.detach()
    assert torch.equal(flat(module), theta)


def test_schedules_are_in_the_ledger_as_drawn():
    engine, module, optimizer, loader = private(
        tiny(), toy_data(), sigma=lambda step: 2.0 - 0.5 * step, q=0.5
    )
    train(module, optimizer, loader)
    assert [r.noise_multiplier for r in engine.ledger.rows()] == [2.0, 1.5]


def test_a_method_that_needs_the_number_of_steps_gets_it_or_raises():
    budgets = []

    def plan(budget):
        budgets.append(budget)
        return Plan((2 * budget.noise_multiplier,), steps=budget.steps)

    method = Method("long", plan=plan, needs_steps=True)
    with pytest.raises(ValueError, match=r"epochs= and target_delta="):
        private(tiny(), toy_data(), method=method, clipping=None)
    engine, module, optimizer, loader = private(
        tiny(), toy_data(), method=method, clipping=None, epochs=2, target_delta=1e-5, sigma=1.5
    )
    assert (
        budgets == [NoiseBudget(1.5, 0.5, 4, 1e-5, "rdp", 12.0, 2)]
        and optimizer.noise_multiplier == 3.0
    )
    train(module, optimizer, loader, epochs=2)
    with pytest.raises(OrderError, match="planned for 4 updates"):
        train(module, optimizer, loader)
    assert engine.ledger.steps == 4


def test_clipping_replaces_what_the_method_allows():
    own = Method("own", rule=Slack(), fixed=frozenset({"rule"}))
    _, _, optimizer, _ = private(tiny(), toy_data(), method=own, clipping=0.4)
    assert optimizer.clip == 0.4
    with pytest.raises(ValueError, match="brings its own clip rule"):
        private(tiny(), toy_data(), method=own, clipping=Flat())
    with pytest.raises(ValueError, match="brings its own clip controller"):
        private(
            tiny(),
            toy_data(),
            method=Method("x", controller=FromCount(), fixed=frozenset({"controller"})),
            clipping=1.0,
        )
    with pytest.raises(TypeError, match="number, a controller or a clip rule"):
        private(tiny(), toy_data(), clipping="small")


def test_a_controller_never_moves_c_inside_a_logical_batch():
    engine, module, optimizer, loader = private(
        network(), toy_data(), method=METHODS["weights"](), clipping=None, physical_batch_size=4
    )
    clips, steps = [], []
    for batch in loader:
        clips.append(optimizer.clip)
        optimizer.zero_grad()
        mean_loss(module, batch).backward()
        assert optimizer.clip == clips[-1]
        optimizer.step()
        steps.append(optimizer.stepped)
    ends = [i for i, s in enumerate(steps) if s]
    start = 0
    for end, row in zip(ends, engine.ledger.rows(), strict=True):
        assert set(clips[start : end + 1]) == {row.clip}
        start = end + 1
    assert len(optimizer.clip_history) == 1 and optimizer.clip_history[0][1] == optimizer.clip


def test_a_new_layer_rule_is_a_function():
    class Diagonal(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return x * self.weight

    try:

        @layer_rule(Diagonal, path="diagonal")
        def _diagonal(shadow, g, x):
            from zetaclip.gradients.contributions import Dense

            return {"weight": Dense(g * x, shadow.module.weight.shape)}

        module = nn.Sequential(Diagonal(), nn.Linear(6, 3))
        from helpers import assert_parity

        assert_parity(module.double(), toy_data(dtype=torch.float64), mean_loss, 1e-11)
        engine, *_ = private(module.float(), toy_data())
        assert engine.describe()[0].path == "diagonal"
        with pytest.raises(ValueError, match="already"):
            layer_rule(Diagonal, path="again")(_diagonal)
    finally:
        LAYER_RULES.pop(Diagonal, None)


def test_the_names_that_are_checked_before_torch_are_those_that_exist():
    import inspect

    import zetaclip
    from zetaclip import features, models
    from zetaclip.training import known

    assert list(known.METHODS) == zetaclip.methods.names()
    for name, options in known.METHODS.items():
        assert set(options) == set(zetaclip.methods.get(name).options), name
    spectral = {*inspect.signature(zetaclip.Spectral).parameters, "paper", "aggregate"}
    assert set(known.SPECTRAL) == spectral
    assert models.names() == known.MODELS
    assert set(known.FEATURES) == {*features.KINDS, "bins"}
    bins = set(inspect.signature(features.Bins).parameters) - {"layout"}
    assert set(known.FEATURES["bins"]) == bins
