"""Learning rates: how one is chosen on its grid, when it is not, and whose it is."""

import io
import json

import pytest

from zetaclip.experiments import plan, session, spec, tuning
from zetaclip.experiments.progress import Progress
from zetaclip.experiments.runner import LocalBackend, run_all


def test_rates_are_chosen_on_the_grid_and_kept(mini, store):
    (grid,) = plan.make_plan(mini, "lite").tunings
    run_all(grid.runs, store, LocalBackend(2), 1, Progress(io.StringIO()))
    assert tuning.decide([grid], store) == {}
    rates = tuning.load_rates(store)
    assert tuning.values([grid], rates) == {
        "lite/mnist/paper/dp-sgd": 0.25
    }  # the stand-in is best there
    entry = rates[tuning.key(grid)]
    values = {point["lr"]: point["value"] for point in entry["grid"]}
    assert list(values) == [0.0625, 0.25, 1.0] and max(values, key=values.get) == 0.25
    assert entry["at_edge_of_grid"] is False
    assert "not free" in json.loads((store.out / "tuning.json").read_text())["note"]
    assert tuning.settled(grid, rates)
    other = plan.Tuning(grid.name, grid.runs[:2])
    assert not tuning.settled(other, rates)


def a_grid(store, metric, *values):
    """A grid of rates 1, 2, ... whose runs have ended with these values."""
    runs = []
    for lr, value in enumerate(values, 1):
        config = {"lr": float(lr), "seed": plan.TUNING_SEED}
        run = plan.PlannedRun(plan.config_key(config), config, {})
        store.folder(run.key).mkdir(parents=True)
        (store.folder(run.key) / "config.json").write_text(json.dumps(config))
        result = {"metric": {"name": metric, "value": value}}
        (store.folder(run.key) / "result.json").write_text(json.dumps(result))
        runs.append(run)
    return plan.Tuning("x", tuple(runs))


def test_the_smallest_rmse_is_the_best(store):
    assert tuning.decide([a_grid(store, "rmse", 0.5, None, 0.3)], store) == {}
    (entry,) = tuning.load_rates(store).values()
    assert entry["rate"] == 3.0 and entry["at_edge_of_grid"]


@pytest.mark.parametrize("diverged", [None, float("nan")])
def test_a_diverged_run_has_finished_and_cannot_win(store, diverged):
    grid = a_grid(store, "accuracy", diverged, 0.6, diverged)
    assert tuning.decide([grid], store) == {}
    rates = tuning.load_rates(store)
    entry = rates[tuning.key(grid)]
    assert (
        entry["rate"] == 2.0 and entry["at_edge_of_grid"] is False and tuning.settled(grid, rates)
    )
    assert [point["value"] for point in entry["grid"]] == [None, 0.6, None]


def test_a_grid_that_diverged_is_undecided(store):
    assert tuning.decide([a_grid(store, "accuracy", None, None)], store) == {
        "x": "every run of its grid diverged"
    }


def test_a_grid_with_a_failed_run_is_not_settled(store):
    grid = a_grid(store, "accuracy", 0.5, 0.6, 0.7)
    assert tuning.decide([grid], store) == {} and tuning.values(
        [grid], tuning.load_rates(store)
    ) == {"x": 3.0}
    (store.folder(grid.runs[2].key) / "result.json").unlink()
    assert tuning.decide([grid], store) == {
        "x": "1 of 3 runs of its grid have no result (the rate 3, chosen before, is dropped)"
    }
    assert tuning.load_rates(store) == {}


def test_a_choice_without_a_failed_run_is_made_again(store):
    grid = a_grid(store, "accuracy", 0.5, 0.6)
    points = [
        {"lr": 1.0, "value": 0.5, "run": grid.runs[0].key},
        {"lr": 2.0, "value": None, "run": grid.runs[1].key},
    ]
    assert not tuning.settled(
        grid, {tuning.key(grid): {"rate": 1.0, "at_edge_of_grid": True, "grid": points}}
    )


def test_a_grid_with_an_edited_run_is_not_decided(store):
    grid = a_grid(store, "accuracy", 0.5, 0.6)
    config = store.folder(grid.runs[0].key) / "config.json"
    config.write_text(config.read_text().replace("1.0", "8.0"))
    assert "1 of 2 runs" in tuning.decide([grid], store)["x"] and tuning.load_rates(store) == {}


def test_experiments_with_other_grids_leave_each_others_rates_alone(
    mini_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(session, "missing_data", lambda runs: {})
    other = mini_file.with_name("other.toml")
    text = mini_file.read_text(encoding="utf-8")
    other.write_text(
        text.replace("factors = [0.25, 1.0, 4.0]", "factors = [8.0, 16.0]"), encoding="utf-8"
    )
    out = tmp_path / "out"
    pages = []
    for path in (mini_file, other, mini_file):
        request = session.Request(spec.load(str(path)), "lite", str(out), workers=2)
        assert session.reproduce(request)[1] == 0
        pages.append((out / "mini/table.md").read_text(encoding="utf-8"))
    assert pages[0] == pages[1] == pages[2] and "9 of 9 runs" in pages[0]
    assert "| 2 | 2, 4 | yes |" in (out / "other/table.md").read_text(encoding="utf-8")


def test_rates_from_before_grids_had_keys_are_found(mini, store):
    (grid,) = plan.make_plan(mini, "lite").tunings
    points = [{"lr": run.config["lr"], "value": 0.5, "run": run.key} for run in grid.runs]
    old = {"rates": {grid.name: {"rate": 0.25, "at_edge_of_grid": False, "grid": points}}}
    (store.out / "tuning.json").write_text(json.dumps(old))
    assert tuning.values([grid], tuning.load_rates(store)) == {grid.name: 0.25}
    assert tuning.values([plan.Tuning(grid.name, grid.runs[:2])], tuning.load_rates(store)) == {}


def test_a_grid_without_any_result_is_named(mini, store):
    (grid,) = plan.make_plan(mini, "lite").tunings
    assert list(tuning.decide([grid], store)) == [grid.name]
