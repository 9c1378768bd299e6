"""Seeds are added while a comparison is open, and no longer."""

from dataclasses import replace

import pytest

from zetaclip.experiments import looks, plan
from zetaclip.experiments.measures import Run

NAME = "dp-sgd · σ = 1.1 · decoupled"


@pytest.fixture
def planned(mini):
    data = {**mini.common["data"]["mnist"], "looks": [3, 6, 12], "effects": {"accuracy": 0.2}}
    common = {**mini.common, "data": {**mini.common["data"], "mnist": data}}
    return plan.make_plan(replace(mini, common=common), {NAME: 0.25})


def finished(planned, rows, most):
    """The first ``most`` seeds of all rows; each row has a mean and an amplitude of its noise."""
    found = {}
    for (_, row, _), seeds in planned.cells.items():
        mean, noise = rows[row]
        for seed, key in seeds.items():
            if seed <= most:
                value = 0.9 + (mean + noise * (-1) ** seed * (1 + 0.1 * seed)) / 100
                metrics = {"accuracy": value}
                result = {"metric": {"name": "accuracy", "value": value}, "metrics": metrics}
                found[key] = Run(None, result)
    return found


def seeds_of(planned, runs):
    told = {}
    for run in looks.needed(planned, runs):
        told[run.labels["row"]] = max(told.get(run.labels["row"], 0), run.labels["seed"])
    return told


CLEAR = {"DP-SGD": (0.0, 0.0), "Spectral": (1.0, 0.05), "Replay": (0.0, 0.01)}


def test_the_first_look_of_all_rows_comes_first(planned):
    assert seeds_of(planned, {}) == {"DP-SGD": 3, "Spectral": 3, "Replay": 3}
    assert seeds_of(planned, finished(planned, CLEAR, 2)) == {
        "DP-SGD": 3, "Spectral": 3, "Replay": 3
    }  # fmt: skip


def test_what_is_told_stops(planned):
    assert set(seeds_of(planned, finished(planned, CLEAR, 3)).values()) == {3}


def test_an_open_comparison_goes_on_with_its_baseline(planned):
    noisy = {**CLEAR, "Spectral": (0.2, 0.5)}
    told = seeds_of(planned, finished(planned, noisy, 3))
    assert told == {"DP-SGD": 6, "Spectral": 6, "Replay": 3}
    told = seeds_of(planned, finished(planned, noisy, 6))
    assert told == {"DP-SGD": 12, "Spectral": 12, "Replay": 3}, "the seeds it had count on"
    assert max(seeds_of(planned, finished(planned, noisy, 12)).values()) == 12


def test_a_look_that_told_is_not_taken_back(planned):
    """More seeds than a look asked for don't open it again, nor make it look shorter."""
    early = finished(planned, CLEAR, 12)
    assert set(seeds_of(planned, early).values()) == {3}


def test_the_subject_is_compared_with_published_rivals(planned):
    experiment = replace(planned.experiment, subject="Spectral", baseline="")
    published = {"": {**experiment.published[""], "Replay": [None, None]}}
    told = list(
        looks.pairs(replace(planned, experiment=replace(experiment, published=published)), "")
    )
    assert told == [("Spectral", "DP-SGD"), ("Spectral", "Replay")]
    assert list(looks.pairs(planned, "")) == [("Spectral", "DP-SGD"), ("Replay", "DP-SGD")]


def test_a_run_that_diverged_does_not_ask_for_more(planned):
    runs = finished(planned, {**CLEAR, "Spectral": (0.2, 0.5)}, 3)
    key = planned.cells["", "Spectral", "σ = 1.1"][2]
    lost = {"metric": {"name": "accuracy", "value": None}, "metrics": {"accuracy": None}}
    runs[key] = Run(None, lost)
    assert seeds_of(planned, runs)["Spectral"] == 3
