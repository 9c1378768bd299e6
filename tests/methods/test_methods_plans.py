"""From DP-SGD's noise to each method's own: against numbers worked out elsewhere, and within the
budget."""

import math

import pytest
from helpers import private, tiny, toy_data, train
from toys import Counting

from zetaclip import Method, Pass, Plan, methods
from zetaclip.accounting import epsilon
from zetaclip.engine._guard import OrderError
from zetaclip.ledger import Event
from zetaclip.methods import NoiseBudget
from zetaclip.methods import _plans as plans

# 60000 records, batches of 256, 8 epochs.
Q, STEPS, EPOCH, DELTA = 256 / 60000, 1880, 235, 1e-5


def mnist(z, accountant="rdp", **change):
    values = {
        "sample_rate": Q,
        "steps": STEPS,
        "expected_batch_size": 256.0,
        "steps_per_epoch": EPOCH,
        **change,
    }
    return NoiseBudget(z, delta=DELTA, accountant=accountant, **values)


@pytest.mark.parametrize(
    ("ratio", "first", "last"),
    [pytest.param(0.99, 0.5601, 0.5221, marks=pytest.mark.slow), (0.9, 0.9907, 0.4739)],
)
def test_a_falling_sigma_is_composed_as_it_is(ratio, first, last):
    """At ε = 8 by RDP; DP-SGD's σ is 0.5386. Accounting every step at the first σ would say 7.01 or
    1.30 instead."""
    found = methods.get("adp-adamw", ratio=ratio).multipliers(mnist(0.5386))["sum"]
    assert found == (pytest.approx(first, rel=2e-3), pytest.approx(last, rel=2e-3))


def test_a_floor_holds_and_every_level_is_there():
    decay = plans.Decay(1.0, 0.5, 0.3, 10)
    assert [decay(step) for step in (0, 9, 10, 19, 20, 1000)] == [1.0, 1.0, 0.5, 0.5, 0.3, 0.3]
    assert decay.events(0.1, 25) == [Event(0.1, 1.0, 10), Event(0.1, 0.5, 10), Event(0.1, 0.3, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(("z", "each"), [(0.5126, 0.551), (0.7656, 0.851), (1.5298, 2.026)])
def test_two_fresh_batches_by_prv(z, each):
    found = methods.get("dp-sam").multipliers(mnist(z, "prv"))
    assert found["ascent sum"][0] == found["descent sum"][0] == pytest.approx(each, rel=3e-3)


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_two_sums_on_one_batch(share):
    found = methods.get("dp-sam", ascent_batch="same", ascent_share=share).multipliers(mnist(0.512))
    first, second = found["ascent sum"][0], found["descent sum"][0]
    assert first**-2 + second**-2 == pytest.approx(0.512**-2, rel=1e-12)
    assert first**-2 / second**-2 == pytest.approx(share / (1 - share))
    if share == 0.5:
        assert first == pytest.approx(math.sqrt(2) * 0.512)


def elsewhere(rate, multipliers, steps):
    """ε of Gaussians on the records of one Poisson batch, many times over, as dp-accounting
    composes them by itself."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    batch = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(s) for s in multipliers])
    spent = RdpAccountant().compose(dp_accounting.PoissonSampledDpEvent(rate, batch), steps)
    return spent.get_epsilon(DELTA)


@pytest.mark.parametrize("multipliers", [(2.0, 2.0), (1.3, 0.9), (5.0, 1.1)])
@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_passes_over_one_batch_cost_both_together(multipliers, rate):
    passes = Pass("ascent"), Pass("descent", batch="same")
    for schedules in (multipliers, tuple(lambda step, s=s: s for s in multipliers)):
        planned = epsilon(Plan(schedules).events(passes, None, rate, 3, 43), DELTA, "rdp")
        assert planned == pytest.approx(elsewhere(rate, multipliers, 40), rel=1e-3)
    # The dearer one of the two alone is told apart, and so are two batches.
    assert elsewhere(rate, [min(multipliers)], 40) < 0.97 * planned
    fresh = Plan(multipliers).events((Pass("ascent"), Pass("descent")), None, rate, 3, 43)
    assert [(event.noise_multiplier, event.count) for event in fresh] == (
        [(2.0, 80)] if multipliers == (2.0, 2.0) else [(s, 40) for s in multipliers]
    )


def test_what_is_planned_for_two_passes_is_what_the_ledger_says():
    """Also with a query beside each sum: four Gaussians on the records of one batch."""
    own = (2.2, 1.7)
    method = Method(
        "two",
        rule=Counting(3.0),
        passes=(Pass("ascent"), Pass("descent", batch="same")),
        plan=lambda budget: Plan(own),
    )
    engine, module, optimizer, loader = private(
        tiny(), toy_data(40), q=0.1, method=method, clipping=1.0
    )
    done = train(module, optimizer, loader, epochs=3)
    told = [
        epsilon(events, DELTA, "rdp")
        for events in (engine.planned_events(0, done), engine.ledger.events())
    ]
    assert told == [pytest.approx(elsewhere(0.1, [*own, 3.0, 3.0], done), rel=1e-3)] * 2
    sam = methods.get("dp-sam", ascent_batch="same")
    engine, *_ = private(
        tiny(), toy_data(40), q=0.1, method=sam, clipping=None, epochs=4, target_delta=DELTA
    )
    assert epsilon(engine.planned_events(0, 40), DELTA, "rdp") == pytest.approx(
        elsewhere(0.1, [1.0], 40), rel=1e-3
    )


@pytest.mark.parametrize(
    ("z", "batch", "sigma_b", "wanted"),
    [
        (0.5124, 256.0, None, 0.5125),
        (1.1, 256.0, None, 1.1010),
        (1.345, 16.0, 0.8, 2.4833),
        (1.345, 16.0, None, 1.389),
    ],
)
def test_a_count_beside_the_sum(z, batch, sigma_b, wanted):
    for name in ("quantile", "bounded-adaptive", "dp-adam-ac"):
        found = methods.get(name, sigma_b=sigma_b).multipliers(mnist(z, expected_batch_size=batch))
        assert found["sum"][0] == pytest.approx(wanted, rel=1e-3)
        assert found["sum"][0] ** -2 + found["sum: count"][0] ** -2 == pytest.approx(
            z**-2, rel=1e-12
        )


def test_more_candidates_are_paid_for_at_the_most_that_a_record_is_included():
    for cap in (2.0, 5.0):
        _, plan = methods.get("dp-is", cap=cap).planned(mnist(1.1))
        z = plan.noise_multipliers[0]
        assert plan.sample_rate == cap * Q and plan.steps == STEPS and z > 1.1
        target = epsilon([Event(Q, 1.1, STEPS)], DELTA, "rdp")
        assert 0.99 * target < epsilon([Event(cap * Q, z, STEPS)], DELTA, "rdp") <= target
        # At DP-SGD's noise the same candidates would cost far more.
        assert epsilon([Event(cap * Q, 1.1, STEPS)], DELTA, "rdp") > 1.5 * target
    assert methods.get("dp-is").planned(mnist(1.1))[1].noise_multipliers == (1.1,)


def test_a_schedule_of_noise_goes_through_every_plan():
    falling = lambda step: 2.0 - step / STEPS  # noqa: E731
    for name, options in (
        ("quantile", {}),
        ("dp-sam", {"ascent_batch": "same"}),
        ("auto-s", {}),
        ("slaclip", {}),
    ):
        first, last = methods.get(name, **options).multipliers(mnist(falling))[
            "descent sum" if name == "dp-sam" else "sum"
        ]
        assert first > last >= 1.0
    with pytest.raises(ValueError, match="its own schedule"):
        methods.get("adp-adamw").multipliers(mnist(falling))
    short = mnist(lambda step: 1.0 + step % 2, steps=10)
    assert short.events() == [Event(Q, 1.0, 5), Event(Q, 2.0, 5)]


def test_no_noise_stays_no_noise():
    for name in methods.names(private=True):
        found = methods.get(name).multipliers(mnist(0.0))
        assert all(
            first == last == 0 for query, (first, last) in found.items() if "count" not in query
        )


@pytest.mark.parametrize("name", ["adp-adamw", "dp-sam"])
def test_noise_that_depends_on_the_steps_needs_them_and_ends_with_them(name):
    method = methods.get(name)
    module = tiny()

    def made(**options):
        optimizer = method.optimizer(module.parameters())
        return private(
            module, toy_data(), method=method, optimizer=optimizer, clipping=None, **options
        )

    for missing in ({}, {"epochs": 2}, {"target_delta": 1e-5}):
        with pytest.raises(ValueError, match=r"epochs= and target_delta="):
            made(**missing)
    _, module, optimizer, loader = made(epochs=1, target_delta=1e-5)
    assert train(module, optimizer, loader) == 2
    with pytest.raises(OrderError, match="planned for 2 updates"):
        train(module, optimizer, loader)


def test_adadpigu_needs_to_know_when_its_first_stage_ends():
    method = methods.get("adadpigu")
    with pytest.raises(ValueError, match="give epochs="):
        method.multipliers(mnist(1.0, steps=None))
    planned, plan = method.planned(mnist(1.0))
    assert planned.rule.first == STEPS * 0.2 and planned.rule.batch == 256.0 and plan.steps is None


BAD = {
    "sigma_b": ("quantile", {"sigma_b": 0.2}, 1.1, r"sigma_b = 0.2 is too small.*above 0.55"),
    "cap": ("dp-is", {"cap": 300.0}, 1.1, r"a probability is at most 1; lower it to 234.4"),
    "sigma_min": ("adp-adamw", {"sigma_min": 2.0}, 1.1, r"sigma_min = 2 is not below 1.1"),
    "schedule": ("dp-sgd", {}, lambda step: 1.0 - step, r"multiplier -1.0 at step 2"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_budget_that_does_not_work_out_says_what_to_change(name):
    method, options, z, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        methods.get(method, **options).planned(mnist(z))
