"""Ladders of learning rates, on curves made up for them."""

import math

import pytest

from zetaclip.experiments import ladder, session, spec
from zetaclip.experiments.ladder import climb
from zetaclip.experiments.measures import Run
from zetaclip.experiments.planned import TUNING_SEED, Ladder


def a_ladder(start=1.0, cap=8, seeds=1, follows=""):
    labels = {"group": "", "condition": "", "row": "m", "data": "d"}
    return Ladder("m", {"data": "d"}, labels, start, follows, seeds, cap)


def climbed(curve, metric="accuracy", **kwargs):
    """Runs all that a ladder asks for; returns its last stand and the rates in order of trial."""
    one, done, order = a_ladder(**kwargs), {}, []
    for _ in range(30):
        found = climb(one, one.start, lambda run: done.get(run.key))
        if not found.wanted:
            return found, order
        assert found.rate is None, "nothing is chosen before the ladder is climbed"
        for rate in found.wanted:
            order.append(rate)
            for run in one.runs(rate):
                value = curve(run.config["lr"], run.config["seed"])
                done[run.key] = Run(None, {"metric": {"name": metric, "value": value}})
    raise AssertionError("it never ends")


def bump(best):
    return lambda rate, seed: 1 - abs(math.log2(rate / best)) / 20


@pytest.mark.parametrize("best", [1 / 8, 1 / 2, 1.0, 2.0, 8.0])
def test_it_climbs_until_both_neighbours_are_worse(best):
    found, order = climbed(bump(best), cap=10)
    assert found.rate == best and not found.capped
    assert {best / 2, best, best * 2} <= set(found.rates) and sorted(found.rates) == sorted(order)


def test_the_half_step_goes_to_the_better_neighbour():
    found, order = climbed(bump(1.4))
    assert order[-1] == found.rate == pytest.approx(math.sqrt(2), rel=1e-3)
    found, order = climbed(bump(0.75))
    assert order[-1] == found.rate == pytest.approx(math.sqrt(0.5), rel=1e-3)
    assert order == [0.5, 1.0, 2.0, found.rate]  # no more than it needs


def test_a_lower_rmse_is_better():
    found, _ = climbed(lambda rate, seed: abs(math.log2(rate / 4)), metric="rmse")
    assert found.rate == 4 and found.metric == "rmse"


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_what_diverges_is_worse_than_all(lost):
    found, _ = climbed(lambda rate, seed: lost if rate > 0.5 else bump(64)(rate, seed))
    assert found.rate == 0.5 and found.rates[1.0] is None
    found, order = climbed(lambda rate, seed: lost)
    assert found.rate is None and not found.wanted and min(order) < 0.1, "the way is down"


def test_the_cap_is_told():
    found, order = climbed(bump(1024), cap=6)
    assert len(order) == 6 and found.capped and found.rate == 16
    found, order = climbed(bump(1.0), cap=3)
    assert len(order) == 3 and not found.capped and found.rate == 1


def test_a_rate_is_the_mean_of_its_seeds():
    """One lucky seed at 2 does not move the choice; one that diverged loses."""

    def curve(rate, seed):
        return bump(1.0)(rate, seed) + (0.1 if (rate, seed) == (2.0, TUNING_SEED) else 0.0)

    assert climbed(curve, seeds=5)[0].rate == 1 and climbed(curve, seeds=1)[0].rate == 2
    lost = climbed(
        lambda rate, seed: None if (rate, seed) == (1.0, TUNING_SEED + 4) else bump(1)(rate, 0),
        seeds=5,
    )[0]
    assert lost.rates[1.0] is None


def test_a_ladder_that_follows_another_waits_for_it():
    ladders = {"a": a_ladder(), "b": Ladder("b", {"data": "e"}, a_ladder().labels, 1.0, "a")}
    done = {}
    found = ladder.climb_all(ladders, ["b"], lambda run: done.get(run.key))
    assert found["a"].wanted and not found["b"].wanted and found["b"].rate is None
    for rate in (0.5, 1.0, 2.0, 4.0, 8.0, 2 * math.sqrt(2), 4 * math.sqrt(2)):
        for run in ladders["a"].runs(float(f"{rate:.4g}")):
            value = bump(4.0)(rate, 0)
            done[run.key] = Run(None, {"metric": {"name": "accuracy", "value": value}})
    found = ladder.climb_all(ladders, ["b"], lambda run: done.get(run.key))
    assert found["a"].rate == 4 and found["b"].wanted == (2.0, 4.0, 8.0)


def test_the_session_climbs_and_uses_what_was_chosen(mini_file, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    text = mini_file.read_text(encoding="utf-8").replace("sgd = 0.25", "sgd = 2.0")
    mini_file.write_text(text, encoding="utf-8")
    request = session.Request(spec.load(str(mini_file)), str(tmp_path / "out"), workers=2)
    _, failed = session.reproduce(request)
    store = session.open_store(request.out)
    planned, climbs = session.plan_of(request.experiment, store)
    (found,) = climbs.values()
    assert failed == 0 and 0.125 < found.rate < 0.5 and len(found.rates) >= 6
    assert {run.config["lr"] for run in planned.runs} == {found.rate}
    page = (tmp_path / "out/mini/table.md").read_text(encoding="utf-8")
    assert "](rates-1-1-decoupled.png)" in page
