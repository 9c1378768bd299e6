"""The control law on stubbed readings: closed forms, bounds, options, and purity."""

import dataclasses
import itertools
import json
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zetaclip.control import Constant, Controller, Spectral, SpectralState
from zetaclip.spectrum import Probe, Reading, TailFit, random_null

FAILED = TailFit(0.0, 0.0, 0, 1.0, math.inf, False, False, "stub")


def fit(zeta, stderr=0.1, weak=False):
    return FAILED if zeta is None else TailFit(zeta, 1.0, 20, 0.1, stderr, True, weak, "")


def reading(step, *zetas, stderr=0.1, shape=(32, 512)):
    names = [f"layer{index}" for index in range(len(zetas))]
    return Reading(
        step,
        {name: fit(zeta, stderr) for name, zeta in zip(names, zetas)},
        dict.fromkeys(names, shape),
    )


def run(controller, zetas):
    """States after each probe; an element is one ζ or a tuple of them."""
    states = [controller.init()]
    for index, zeta in enumerate(zetas):
        values = zeta if isinstance(zeta, tuple) else (zeta,)
        states.append(controller.update(reading(50 * (index + 1), *values), states[-1]))
    return states


def clips(controller, zetas):
    return [state.clip for state in run(controller, zetas)]


# The closed forms


@pytest.mark.parametrize("make", [Spectral, Spectral.paper])
def test_at_the_centre_nothing_moves(make):
    assert clips(make(0.7), [4.0] * 30) == [0.7] * 31


def test_far_above_the_zone_c_grows_by_the_gain_until_the_bound():
    found = clips(Spectral(1.0, smoothing=0.0, bounds=(0.5, 3.0)), [100.0] * 15)
    assert found == pytest.approx([min(math.exp(0.1 * n), 3.0) for n in range(16)], rel=1e-12)


def test_far_below_the_zone_c_shrinks_by_the_gain_until_the_bound():
    found = clips(Spectral(1.0, smoothing=0.0, bounds=(0.5, 3.0)), [0.0] * 15)
    assert found == pytest.approx([max(math.exp(-0.1 * n), 0.5) for n in range(16)], rel=1e-12)


def test_literal_average_has_its_closed_form():
    final = run(Spectral.paper(1.0), [5.0] * 24)[-1]
    expected = 0.1 * sum((1.0 - 0.98**p) / 2.0 for p in range(1, 25))
    assert math.log(final.clip) == pytest.approx(expected, abs=1e-12)
    assert expected == pytest.approx(0.2587, abs=5e-5)
    assert final.zeta_hat == pytest.approx(4.0 + (1 - 0.98**24), abs=1e-12)


def test_algorithm_one_line_by_line():
    """The paper's loop written out again, against Spectral.paper() on a signal that visits both
    bounds."""
    zetas = [4.0 + 40.0 * math.cos(p / 30.0) for p in range(200)]
    beta, center, radius, kappa, low, high = 0.98, 4.0, 2.0, 0.1, 0.5, 3.0
    u, smooth, expected = math.log(1.0), center, []
    for zeta in zetas:
        smooth = beta * smooth + (1 - beta) * zeta
        phi = max(-1.0, min(1.0, (smooth - center) / radius))
        u = u + kappa * phi
        expected.append((smooth, phi, min(high, max(low, math.exp(u)))))
    states = run(Spectral.paper(1.0), zetas)[1:]
    found = [(state.zeta_hat, state.phi, state.clip) for state in states]
    for mine, theirs in zip(found, expected):
        assert mine == pytest.approx(theirs, rel=1e-12)
    assert {state.hit for state in states} == {"", "min", "max"}


def test_zero_gain_keeps_the_very_bits():
    lossy = [
        value / 100 for value in range(51, 300) if math.exp(math.log(value / 100)) != value / 100
    ]
    assert lossy  # C that going through the logarithm would change
    for initial in (1.0, *lossy):
        assert set(clips(Spectral(initial, gain=0.0), [100.0, 0.0, 5.0, None])) == {initial}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=40),
    st.sampled_from(["p", "pi", "pid"]),
    st.sampled_from(["first", "center", "debias"]),
    st.booleans(),
    st.sampled_from([(0.5, 3.0), None]),
)
def test_one_probe_moves_log_c_by_at_most_the_gain(zetas, law, start, anti_windup, bounds):
    controller = Spectral(
        1.0,
        law=law,
        start=start,
        anti_windup=anti_windup,
        bounds=bounds,
        gain=0.3,
        integral_gain=0.7,
    )
    found = clips(controller, zetas)
    for before, after in itertools.pairwise(found):
        assert abs(math.log(after) - math.log(before)) <= 0.3 + 1e-12
        assert bounds is None or 0.5 <= after <= 3.0


# The average


def test_first_starts_at_the_first_reading():
    states = run(Spectral(smoothing=0.9, start="first"), [6.0, 5.0])
    assert states[1].zeta_hat == 6.0 and states[2].zeta_hat == pytest.approx(0.9 * 6 + 0.1 * 5)


def test_debias_is_the_weighted_mean_of_what_was_seen():
    zetas = [6.0, 5.0, None, 3.0, 8.0]
    found = run(Spectral(smoothing=0.8, start="debias"), zetas)[-1].zeta_hat
    seen = [zeta for zeta in zetas if zeta is not None]
    weights = [0.8 ** (len(seen) - 1 - index) for index in range(len(seen))]
    assert found == pytest.approx(sum(w * z for w, z in zip(weights, seen)) / sum(weights))


def test_a_failed_fit_keeps_its_average_and_holds_c():
    states = run(Spectral(), [6.0, 7.0, None, None, 7.0])
    assert (
        states[3].zeta_hat == states[2].zeta_hat
        and states[3].clip == states[2].clip == states[4].clip
    )
    assert states[3].zeta is None and states[3].phi == 0.0
    assert states[5].clip > states[4].clip
    # the same average as if the failures had not been there
    assert states[5].zeta_hat == run(Spectral(), [6.0, 7.0, 7.0])[-1].zeta_hat


def test_nan_from_a_foreign_probe_never_reaches_c():
    controller = Spectral()
    bad = Reading(50, {"a": fit(math.nan), "b": fit(math.inf)}, {"a": (9, 9), "b": (9, 9)})
    state = controller.update(bad, controller.init())
    assert state.clip == 1.0 and math.isfinite(state.log_clip) and state.smoothed == {}


# Several layers


def test_layers_are_smoothed_alone_and_joined_by_the_median():
    controller = Spectral(smoothing=0.5, radius=2.0)
    series = [(9.0, 5.0, 4.5, 3.0), (1.0, 5.5, 4.5, 3.0), (1.0, None, 6.0, 3.0)]
    states = run(controller, series)
    layers = [[9.0, 5.0, 3.0], [5.0, 5.25, 5.25], [4.5, 4.5, 5.25], [3.0, 3.0, 3.0]]
    for index, state in enumerate(states[1:]):
        expected = statistics.median(layer[index] for layer in layers)
        assert state.zeta_hat == pytest.approx(expected)
        assert state.phi == pytest.approx((expected - 4.0) / 2.0)
    assert states[3].zeta == pytest.approx(statistics.median([1.0, 6.0, 3.0]))


def test_mean_is_the_other_aggregate():
    state = run(Spectral(probe=Probe("x", aggregate="mean")), [(9.0, 3.0, 4.5)])[-1]
    assert state.zeta_hat == pytest.approx(5.5) and state.phi == pytest.approx(0.75)


def test_a_layer_that_was_never_read_does_not_vote():
    state = run(Spectral(), [(None, 5.0)])[-1]
    assert state.smoothed == {"layer1": 5.0} and state.phi == pytest.approx(0.5)
    # with the paper's start it stands at the centre
    assert run(Spectral(start="center", smoothing=0.0), [(None, 5.0)])[-1].phi == pytest.approx(
        0.25
    )


# Bounds


def test_windup_is_the_difference_between_the_forms():
    zetas = [100.0] * 40 + [0.0] * 12
    tight = clips(Spectral(smoothing=0.0), zetas)
    wound = clips(Spectral(smoothing=0.0, anti_windup=False), zetas)
    assert tight[40] == wound[40] == 3.0
    assert tight[41] == pytest.approx(3.0 * math.exp(-0.1))  # comes back at once
    assert wound[52] == 3.0  # u stands at 40 * 0.1 - 12 * 0.1 = 2.8, still above log 3


def test_initial_outside_the_bounds_is_used_until_the_first_probe():
    with pytest.warns(UserWarning, match="outside the bounds"):
        controller = Spectral(8.0, bounds=(0.5, 3.0))
    states = run(controller, [4.0])
    assert states[0].clip == 8.0 and states[1].clip == 3.0 and states[1].hit == "max"
    assert run(controller, [None])[1].clip == 3.0


def test_without_bounds_c_is_free_but_finite():
    assert clips(Spectral(bounds=None, smoothing=0.0), [100.0] * 60)[-1] == pytest.approx(
        math.exp(6.0)
    )
    far = clips(Spectral(bounds=None, smoothing=0.0, gain=50.0), [100.0] * 60)[-1]
    assert math.isfinite(far) and far < 3e38
    near = clips(Spectral(bounds=None, smoothing=0.0, gain=50.0), [-100.0] * 60)[-1]
    assert near > 1e-38


# Options


def test_sign_turns_the_feedback_round():
    plus, minus = clips(Spectral(), [5.0] * 5), clips(Spectral(sign=-1), [5.0] * 5)
    assert [a * b for a, b in zip(plus, minus)] == pytest.approx([1.0] * 6)
    assert plus[-1] > 1.0


def test_gain_by_error_trusts_uncertain_fits_less():
    controller = Spectral(gain_by_error=True, radius=2.0)
    state = controller.update(reading(50, 100.0, stderr=4.0), controller.init())
    assert math.log(state.clip) == pytest.approx(0.1 / (1 + (4.0 / 2.0) ** 2))
    sure = controller.update(reading(50, 100.0, stderr=0.0), controller.init())
    assert math.log(sure.clip) == pytest.approx(0.1)


def test_pi_adds_the_sum_of_past_errors():
    states = run(Spectral(law="pi", smoothing=0.0, integral_gain=0.2, bounds=None), [4.5, 4.5, 3.0])
    # errors in radii: 0.25, 0.25, -0.5; sums: 0.25, 0.5, 0.0
    assert [state.phi for state in states[1:]] == pytest.approx([0.25 + 0.05, 0.25 + 0.1, -0.5])


def test_pid_adds_the_change_of_the_smoothed_error():
    controller = Spectral(law="pid", smoothing=0.5, integral_gain=0.0, derivative_gain=0.4)
    states = run(controller, [4.4, 5.0])
    # smoothed: 4.4, 4.7; errors in radii: 0.2, 0.35
    assert [state.phi for state in states[1:]] == pytest.approx([0.2, 0.35 + 0.4 * 0.15])


def test_the_integral_does_not_wind_up():
    zetas = [100.0] * 40 + [3.0] * 3
    tight = run(Spectral(law="pi", smoothing=0.0), zetas)
    loose = run(Spectral(law="pi", smoothing=0.0, anti_windup=False), zetas)
    assert tight[40].integral < 2.0 and loose[40].integral == pytest.approx(40.0)
    assert tight[41].phi < 0.0 < loose[41].phi


@pytest.mark.parametrize(("sign", "zeta"), [(1, 4.5), (-1, 3.5)])
def test_the_integral_stops_at_a_bound_too(sign, zeta):
    # far from saturation, but C cannot rise any more
    held = run(Spectral(1.0, law="pi", smoothing=0.0, bounds=(0.5, 1.0), sign=sign), [zeta] * 5)
    assert [state.hit for state in held[1:]] == ["max"] * 5
    assert held[-1].integral == 0.0
    free = run(Spectral(1.0, law="pi", smoothing=0.0, bounds=(0.5, 3.0), sign=sign), [zeta] * 5)
    assert abs(free[-1].integral) == pytest.approx(5 * 0.25)


def test_relative_zone_is_centred_below_what_noise_reads():
    null = random_null((32, 512), "rank").median
    controller = Spectral(zone="relative", radius=2.0, center=-50.0)
    assert run(controller, [null - 2.0])[-1].phi == pytest.approx(0.0)
    assert run(controller, [null])[-1].phi == pytest.approx(1.0)
    assert run(controller, [null - 3.0])[-1].phi == pytest.approx(-0.5)
    # where the fixed zone has saturated already
    assert run(Spectral(), [null])[-1].phi == 1.0


def test_relative_zone_has_a_centre_per_layer():
    controller = Spectral(zone="relative")
    shapes = {"wide": (32, 1024), "square": (64, 64)}
    nulls = {name: random_null(shape, "rank").median for name, shape in shapes.items()}
    offsets = {"wide": -1.0, "square": -2.5}
    fits = {name: fit(nulls[name] + offsets[name]) for name in shapes}
    state = controller.update(Reading(50, fits, shapes), controller.init())
    assert state.phi == pytest.approx(statistics.median([1.0, -0.5]) / 2.0)


def test_random_signal_is_blind_repeatable_and_centred():
    controller = Spectral(signal="random", bounds=None, smoothing=0.0)
    assert (
        clips(controller, [100.0] * 20)
        == clips(controller, [0.0] * 20)
        == clips(controller, [None] * 20)
    )
    phis = [state.phi for state in run(controller, [4.0] * 400)[1:]]
    # uniform on [-1, 1]: a mean of 400 spreads by 0.029, the spread itself is 0.577
    assert abs(statistics.mean(phis)) < 0.1 and 0.5 < statistics.stdev(phis) < 0.65
    assert clips(Spectral(signal="random", signal_seed=1), [4.0] * 5) != clips(
        controller, [4.0] * 5
    )


def test_shuffled_signal_shuffles_in_the_probe():
    assert Spectral(signal="shuffled").probe.shuffle and not Spectral().probe.shuffle


# The interface


def test_it_is_a_controller():
    assert isinstance(Spectral(), Controller) and isinstance(Constant(1.0), Controller)


def test_update_is_pure_and_the_state_is_plain():
    controller = Spectral(law="pid")
    state = run(controller, [(5.0, 6.0)])[-1]
    frozen = dataclasses.asdict(state)
    first = controller.update(reading(100, 3.0, 4.0), state)
    assert (
        dataclasses.asdict(state) == frozen
        and controller.update(reading(100, 3.0, 4.0), state) == first
    )
    assert SpectralState(**json.loads(json.dumps(dataclasses.asdict(first)))) == first
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.clip = 2.0


def test_entry_has_the_columns_of_the_history():
    controller = Spectral(smoothing=0.0)
    states = run(controller, [5.0])
    assert controller.entry(states[0]) is None
    step, zeta, zeta_hat, phi, clip, hit = controller.entry(states[1])
    assert (step, zeta, zeta_hat, phi, hit) == (50, 5.0, 5.0, 0.5, "")
    assert clip == pytest.approx(math.exp(0.05))


def test_counts_and_the_warning_of_a_blind_run():
    controller = Spectral()
    state = controller.init()
    shapes = {"a": (9, 9), "b": (9, 9)}
    state = controller.update(Reading(50, {"a": fit(5.0, weak=True), "b": FAILED}, shapes), state)
    state = controller.update(Reading(100, {"a": fit(5.0), "b": FAILED}, shapes), state)
    assert controller.finish(state) == {
        "probes": 2,
        "ok_probes": 2,
        "ok_fits": 2,
        "weak_fits": 1,
        "failed_fits": 2,
    }
    with pytest.warns(UserWarning, match="none of the 3 spectral probes"):
        controller.finish(run(Spectral(), [None] * 3)[-1])
    assert (
        controller.finish(controller.init())["probes"] == 0
    )  # too short a run to probe is not blind


def test_a_given_probe_gets_the_controllers_period_and_fit():
    given = Probe(["a", "b"], k=7)
    probe = Spectral(probe=given, period=20, fit="ks").probe
    assert (probe.period, probe.fit, probe.k, probe.layers) == (20, "ks", 7, ["a", "b"])
    assert given.period == 1

    class Stub:
        def bind(self, module, trained):
            return self

        def read(self, module, step):
            return None

    stub = Stub()
    assert Spectral(probe=stub).probe is stub
    with pytest.raises(TypeError, match="probe must be"):
        Spectral(probe=3)


def test_paper_is_the_literal_form_and_takes_options():
    paper = Spectral.paper(2.0, probe="fc2", bounds=(1.0, 3.0))
    assert (paper.smoothing, paper.start, paper.anti_windup) == (0.98, "center", False)
    assert paper.initial == 2.0 and paper.probe.layers == ["fc2"] and paper.bounds == (1.0, 3.0)
    assert Spectral.paper(smoothing=0.0).smoothing == 0.0
    assert "0.98" in repr(paper) and "fc2" in repr(paper)


@pytest.mark.parametrize(
    "options",
    [
        {"initial": 0.0},
        {"initial": math.nan},
        {"smoothing": 1.0},
        {"smoothing": -0.1},
        {"radius": 0.0},
        {"center": math.nan},
        {"gain": -0.1},
        {"bounds": (3.0, 0.5)},
        {"bounds": (0.0, 1.0)},
        {"start": "zero"},
        {"zone": "wide"},
        {"law": "pd"},
        {"sign": 0},
        {"signal": "noise"},
        {"fit": "ols"},
        {"period": 0},
    ],
)
def test_wrong_arguments(options):
    with pytest.raises(ValueError, match=r"must be|unknown"):
        Spectral(**options)
