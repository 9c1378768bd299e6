"""Which runs, under which names, in which order."""

import hashlib
import json
import random
from dataclasses import replace

import pytest

from zetaclip.errors import CommandError
from zetaclip.experiments import plan, session, spec

RATES = {"lite/mnist/paper/dp-sgd": 0.25}


def runs_of(name, row, profile="lite", rates=RATES):
    planned = plan.make_plan(spec.load(name), profile, rates)
    return [run for run in planned.runs if run.labels["row"] == row]


def test_a_hash_is_pinned():
    # Whoever changes this loses every run that has been done.
    config = {
        "data": "mnist",
        "method": "dp-sgd",
        "clip": 1.0,
        "spectral": {"bounds": [0.5, 3.0]},
        "seed": 1,
    }
    text = (
        '{"config":{"clip":1,"data":"mnist","method":"dp-sgd","seed":1,'
        '"spectral":{"bounds":[0.5,3]}}}'
    )
    assert (
        plan.config_key(config)
        == hashlib.sha256(text.encode()).hexdigest()[:16]
        == "2eee824d4773a1ca"
    )
    assert plan.config_key(config, alone=True) != plan.config_key(config)


def test_a_hash_depends_on_values_alone():
    config = {"a": 1.0, "b": {"c": [1, 2.5], "d": None}, "e": True}
    keys = list(config)
    random.Random(0).shuffle(keys)
    same = {key: json.loads(json.dumps(config[key])) for key in keys}
    same["a"] = 1
    assert plan.config_key(config) == plan.config_key(same)
    for other in (
        {**config, "a": 1.5},
        {**config, "e": False},
        {**config, "e": 0},
        {**config, "b": {}},
    ):
        assert plan.config_key(config) != plan.config_key(other)


def test_a_configuration_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        plan.config_key({"lr": float("nan")})


def test_seeds_are_paired(mini):
    planned = plan.make_plan(mini, "lite", RATES)
    for seeds in planned.cells.values():
        assert list(seeds) == [1, 2, 3]
        assert [planned.by_key[key].config["seed"] for key in seeds.values()] == [1, 2, 3]
    for name in spec.names():
        planned = plan.make_plan(spec.load(name), "lite")
        by_block = {}
        for (group, _, condition), seeds in planned.cells.items():
            by_block.setdefault((group, condition), set()).add(tuple(seeds))
        for lists in by_block.values():  # a row may have fewer seeds, but no others
            assert all(seeds == max(lists, key=len)[: len(seeds)] for seeds in lists)


def test_skews_are_paired_too():
    planned = plan.make_plan(spec.load("noniid"), "lite")
    assert all(run.config["skew_seed"] == run.config["seed"] for run in planned.runs)


def test_one_seed_of_all_rows_before_the_second_of_any():
    for name in spec.names():
        planned = plan.make_plan(spec.load(name), "lite")
        needed = {key for run in planned.runs for key in run.after}
        seeds = [run.config["seed"] for run in planned.runs if run.key not in needed]
        assert seeds == sorted(seeds)


def test_what_is_needed_comes_first(mini):
    planned = plan.make_plan(mini, "lite", RATES)
    seen = set()
    for run in planned.runs:
        assert set(run.after) <= seen
        seen.add(run.key)


def test_a_replay_follows_another_seed(mini):
    planned = plan.make_plan(mini, "lite", RATES)
    followed = {}
    for run in planned.runs:
        if run.labels["row"] == "Replay":
            (needed,) = run.after
            assert run.config["clipping"] == {"kind": "replay", "run": f"@run:{needed}"}
            assert planned.by_key[needed].labels["row"] == "Spectral"
            followed[run.config["seed"]] = planned.by_key[needed].config["seed"]
    assert followed == {1: 2, 2: 3, 3: 1}


def test_controls_follow_their_own_seed_where_they_should():
    planned = plan.make_plan(spec.load("controls"), "lite", RATES)
    for row in (
        "Straight line in log C, same mean",
        "Constant at the mean C",
        "C=1, step of the mean C",
    ):
        for run in (run for run in planned.runs if run.labels["row"] == row):
            (needed,) = (planned.by_key[key] for key in run.after)
            assert needed.labels["row"] == "Spectral feedback"
            assert needed.config["seed"] == run.config["seed"]
            assert [needed.config.get(key) for key in ("sigma", "epsilon")] == [
                run.config.get(key) for key in ("sigma", "epsilon")
            ]
            assert "clip" not in run.config or row == "C=1, step of the mean C"


def test_random_signals_are_other_numbers_in_every_seed():
    """Otherwise three seeds are three trainings along one random path, and their interval says
    nothing about chance."""
    made = plan.make_plan(spec.load("controls"), "lite", {"lite/mnist/paper/dp-sgd": 1.0})
    seeds = {
        run.labels["seed"]: run.config["spectral"]
        for run in made.runs
        if run.labels["row"] == "Random ζ"
    }
    assert len(seeds) == 5 and all(
        options["signal_seed"] == seed for seed, options in seeds.items()
    )
    others = [run.config for run in made.runs if run.labels["row"] != "Random ζ"]
    assert others and not any("signal_seed" in config.get("spectral", {}) for config in others)


def test_all_controls_share_one_learning_rate():
    planned = plan.make_plan(spec.load("controls"), "lite", RATES)
    rates = [run.config["lr"] for run in planned.runs]
    assert {rate["rate"] if isinstance(rate, dict) else rate for rate in rates} == {0.25}


def test_equal_runs_are_shared_between_experiments():
    sweep = runs_of("clip-sweep", "DP-SGD, C=1.00")
    assert [run.key for run in sweep] == [
        run.key for run in runs_of("components", "DP-SGD (fixed C)")
    ]
    assert {run.key for run in sweep} <= {run.key for run in runs_of("controls", "DP-SGD, C=1")}


def test_timed_runs_are_shared_with_none():
    timed = runs_of("runtime", "DP-SGD (fixed C)")
    shared = {run.key: run.config for run in runs_of("clip-sweep", "DP-SGD, C=1.00")}
    assert all(
        run.config in shared.values() and run.key not in shared and run.alone for run in timed
    )


def test_plain_training_ignores_the_budget():
    planned = plan.make_plan(spec.load("calibration"), "lite", RATES)
    cells = [seeds for (_, row, _), seeds in planned.cells.items() if row == "Non-private (SGD)"]
    assert len(cells) == 3 and all(seeds == cells[0] for seeds in cells)


def test_grids_are_short_runs_on_held_out_records():
    planned = plan.make_plan(spec.load("iid"), "lite")
    for tuning in planned.tunings:
        assert len(tuning.runs) == 3
        low, middle, high = (run.config["lr"] for run in tuning.runs)
        assert middle / low == pytest.approx(4) and high / middle == pytest.approx(4)
        for run in tuning.runs:
            assert run.config["validation"] == 0.1 and run.config["seed"] == plan.TUNING_SEED
            assert run.config.get("epochs") == 2 or run.config.get("steps") == 150
    middles = {tuning.name: tuning.runs[1].config["lr"] for tuning in planned.tunings}
    assert (
        middles["lite/mnist/paper/dp-sgd"] == 0.25 and middles["lite/cifar10/paper/dp-sgd"] == 0.5
    )
    assert middles["lite/mnist/paper/dp-adam"] == 1e-3
    assert plan.TUNING_SEED not in {run.config["seed"] for run in planned.runs}


def test_every_method_has_a_rate_of_its_own_unless_the_experiment_says_otherwise():
    shared = {"clip-sweep", "zone", "components", "smoothing", "probe-layer", "runtime", "controls"}
    for name in spec.names():
        planned = plan.make_plan(spec.load(name), "lite")
        rates = {
            (run.labels["method"], plan.tuning_of(run).rpartition("/")[2]) for run in planned.runs
        }
        if name in shared:
            assert {rate for _, rate in rates} == {"dp-sgd"}
        elif name in (
            "rates",
            "accuracy",
            "accuracy-tables",
        ):  # its columns are the rates; nothing is tuned
            assert {rate for _, rate in rates} == {""}
        else:
            assert all(method == rate for method, rate in rates)


def test_every_run_of_a_grid_has_a_description_of_its_own():
    planned = plan.make_plan(spec.load("budget"), "lite")
    told = [run.describe() for tuning in planned.tunings for run in tuning.runs]
    assert (
        len(set(told)) == len(told)
        and "learning rate · mnist, default recipe · dp-sgd, lr 1 · seed 1000" in told
    )


def test_a_rate_that_is_not_tuned_leaves_a_placeholder(mini):
    assert {run.config["lr"] for run in plan.make_plan(mini, "lite").runs} == {
        "@tuned:lite/mnist/paper/dp-sgd"
    }


def test_only():
    assert session.parse_only("method=dp-sgd,ww-dp-sgd, data=mnist,seed=1", {}) == {
        "method": ["dp-sgd", "ww-dp-sgd"],
        "data": ["mnist"],
        "seed": ["1"],
    }
    assert session.parse_only(None, {}) == {}
    with pytest.raises(CommandError, match="KEY=VALUE"):
        session.parse_only("methods=dp-sgd", {})


def test_only_takes_labels_with_commas_in_them():
    experiment = spec.load("clip-sweep")
    known = session.known_labels(experiment, "lite")
    text = "row=DP-SGD, C=1.00,WW-DP-SGD, C_0=0.25,seed=1,2"
    only = session.parse_only(text, known)
    assert only == {"row": ["DP-SGD, C=1.00", "WW-DP-SGD, C_0=0.25"], "seed": ["1", "2"]}
    chosen = session.select(plan.make_plan(experiment, "lite", RATES), only)
    assert {run.labels["row"] for run in chosen} == set(only["row"])
    # The longest label wins, and a value that is no label ends at the comma.
    assert session.parse_only("row=a, b,a", {"row": ["a", "a, b"]}) == {"row": ["a, b", "a"]}
    assert session.parse_only("row=x, b", {"row": ["a", "a, b"]}) == {"row": ["x", "b"]}


def test_only_knows_every_place_of_a_run():
    planned = plan.make_plan(spec.load("iid"), "lite")
    rows = [
        {run.labels["row"] for run in session.select(planned, {"reading": [name]})}
        for name in ("sigma", "epsilon")
    ]
    assert rows[0] == rows[1] and "Non-private (SGD)" in rows[1]


def test_only_selects(mini):
    planned = plan.make_plan(mini, "lite", RATES)
    chosen = session.select(planned, {"row": ["Replay"], "seed": ["1"]})
    assert [run.describe() for run in chosen] == ["σ = 1.1 · Replay · seed 1"]
    assert [run.labels["row"] for run in plan.with_dependencies(planned, chosen)] == [
        "Spectral",
        "Replay",
    ]
    with pytest.raises(CommandError, match="there are: DP-SGD, Replay, Spectral"):
        session.select(planned, {"row": ["Spectrum"]})
    with pytest.raises(CommandError, match="nothing to run"):
        session.select(planned, {"row": ["DP-SGD"], "method": ["ww-practical"]})


def test_one_seed_can_not_replay_another(mini_file):
    text = mini_file.read_text(encoding="utf-8").replace("lite = 3", "lite = 1")
    mini_file.write_text(text, encoding="utf-8")
    with pytest.raises(CommandError, match="two seeds"):
        plan.make_plan(spec.load(str(mini_file)), "lite")


def test_a_run_that_needs_itself_is_refused(mini_file):
    text = mini_file.read_text(encoding="utf-8").replace("@run:Spectral@next-seed", "@run:Replay")
    mini_file.write_text(text, encoding="utf-8")
    with pytest.raises(CommandError, match="needs its own result"):
        plan.make_plan(spec.load(str(mini_file)), "lite")


def test_a_rate_that_is_said_is_not_tuned(mini):
    """And a run with a rate that a grid happens to choose is the same run."""
    columns = (
        {**mini.columns[0], "label": "lr=1", "set": {"lr": 1.0}},
        {**mini.columns[0], "label": "tuned"},
    )
    mixed = plan.make_plan(
        replace(mini, columns=columns, published={}), "lite", {"lite/mnist/paper/dp-sgd": 1.0}
    )
    said, tuned = (
        {
            run.key
            for run in mixed.runs
            if mixed.cells["", "DP-SGD", f"{label}, σ = 1.1"].get(run.labels["seed"]) == run.key
        }
        for label in ("lr=1", "tuned")
    )
    assert said == tuned and len(said) == 3
    alone = plan.make_plan(replace(mini, columns=columns[:1], published={}), "lite")
    assert alone.tunings == () and {run.config["lr"] for run in alone.runs} == {1.0}
    assert {plan.tuning_of(run) for run in alone.runs} == {""}
