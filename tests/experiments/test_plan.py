"""Which runs, under which names, in which order."""

import hashlib
import json
import math
import random
from dataclasses import replace

import pytest

from zetaclip.errors import CommandError
from zetaclip.experiments import plan, session, spec
from zetaclip.experiments.planned import CAP, TUNING_SEED, config_key, ladder_of, with_dependencies

RATES = {"dp-sgd · σ = 1.1 · decoupled": 0.25}


def tuned(name):
    """A plan in which every ladder has chosen the same rate."""
    experiment = spec.load(name)
    rates = dict.fromkeys(plan.make_plan(experiment).ladders, 0.25)
    return plan.make_plan(experiment, rates)


def runs_of(name, row):
    planned = tuned(name)
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
        config_key(config) == hashlib.sha256(text.encode()).hexdigest()[:16] == "2eee824d4773a1ca"
    )
    assert config_key(config, alone=True) != config_key(config)


def test_a_hash_depends_on_values_alone():
    config = {"a": 1.0, "b": {"c": [1, 2.5], "d": None}, "e": True}
    keys = list(config)
    random.Random(0).shuffle(keys)
    same = {key: json.loads(json.dumps(config[key])) for key in keys}
    same["a"] = 1
    assert config_key(config) == config_key(same)
    for other in (
        {**config, "a": 1.5},
        {**config, "e": False},
        {**config, "e": 0},
        {**config, "b": {}},
    ):
        assert config_key(config) != config_key(other)


def test_a_configuration_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        config_key({"lr": float("nan")})


def test_seeds_are_paired(mini):
    planned = plan.make_plan(mini, RATES)
    for seeds in planned.cells.values():
        assert list(seeds) == [1, 2, 3]
        assert [planned.by_key[key].config["seed"] for key in seeds.values()] == [1, 2, 3]
    for name in spec.names():
        planned = tuned(name)
        by_block = {}
        for (group, _, condition), seeds in planned.cells.items():
            by_block.setdefault((group, condition), set()).add(tuple(seeds))
        for lists in by_block.values():  # a row may have fewer seeds, but no others
            assert all(seeds == max(lists, key=len)[: len(seeds)] for seeds in lists)


def test_skews_are_paired_too():
    planned = plan.make_plan(spec.load("noniid"))
    assert all(run.config["skew_seed"] == run.config["seed"] for run in planned.runs)


def test_one_seed_of_all_rows_before_the_second_of_any():
    for name in spec.names():
        planned = plan.make_plan(spec.load(name))
        needed = {key for run in planned.runs for key in run.after}
        seeds = [run.config["seed"] for run in planned.runs if run.key not in needed]
        assert seeds == sorted(seeds)


def test_what_is_needed_comes_first(mini):
    planned = plan.make_plan(mini, RATES)
    seen = set()
    for run in planned.runs:
        assert set(run.after) <= seen
        seen.add(run.key)


def test_a_replay_follows_another_seed(mini):
    planned = plan.make_plan(mini, RATES)
    followed = {}
    for run in planned.runs:
        if run.labels["row"] == "Replay":
            (needed,) = run.after
            assert run.config["clipping"] == {"kind": "replay", "run": f"@run:{needed}"}
            assert planned.by_key[needed].labels["row"] == "Spectral"
            followed[run.config["seed"]] = planned.by_key[needed].config["seed"]
    assert followed == {1: 2, 2: 1, 3: 2}


def test_controls_follow_their_own_seed_where_they_should():
    planned = tuned("controls")
    for row in (
        "Straight line in log C, same mean",
        "Constant at the mean C",
        "C=1, step of the mean C",
    ):
        for run in (run for run in planned.runs if run.labels["row"] == row):
            (needed,) = (planned.by_key[key] for key in run.after)
            assert needed.labels["row"] == "WW-DP-SGD, practical form"
            assert needed.config["seed"] == run.config["seed"]
            assert [needed.config.get(key) for key in ("sigma", "epsilon")] == [
                run.config.get(key) for key in ("sigma", "epsilon")
            ]
            assert "clip" not in run.config or row == "C=1, step of the mean C"


def test_random_signals_are_other_numbers_in_every_seed():
    """Otherwise three seeds are three trainings along one random path, and their interval says
    nothing about chance."""
    made = tuned("controls")
    seeds = {
        run.labels["seed"]: run.config["spectral"]
        for run in made.runs
        if run.labels["row"] == "Random ζ"
    }
    assert len(seeds) == 20 and all(
        options["signal_seed"] == seed for seed, options in seeds.items()
    )
    others = [run.config for run in made.runs if run.labels["row"] != "Random ζ"]
    assert others and not any("signal_seed" in config.get("spectral", {}) for config in others)


def test_all_controls_have_the_rate_of_the_feedback():
    planned = plan.make_plan(spec.load("controls"))
    own = {"DP-SGD": "dp-sgd", "WW-DP-SGD": "ww-dp-sgd"}
    for run in planned.runs:
        assert ladder_of(run).startswith(own.get(run.labels["row"], "ww-practical") + " · ")


def test_equal_runs_are_shared_between_experiments():
    sweep = runs_of("clip-sweep", "DP-SGD, C=1.00")
    assert [run.key for run in sweep] == [
        run.key for run in runs_of("components", "DP-SGD (fixed C)")
    ]
    assert {run.key for run in sweep} <= {run.key for run in runs_of("controls", "DP-SGD")}


def test_timed_runs_are_shared_with_none():
    timed = runs_of("runtime", "DP-SGD (fixed C)")
    shared = {run.key: run.config for run in runs_of("clip-sweep", "DP-SGD, C=1.00")}
    assert all(
        run.config in shared.values() and run.key not in shared and run.alone for run in timed
    )


def test_plain_training_ignores_the_budget():
    planned = tuned("calibration")
    cells = [seeds for (_, row, _), seeds in planned.cells.items() if row == "Non-private (SGD)"]
    assert len(cells) == 3 and all(seeds == cells[0] for seeds in cells)


@pytest.mark.parametrize("name", ["iid", "noniid", "tabular", "budget", "calibration"])
def test_a_ladder_is_under_the_very_conditions_of_its_cell(name):
    """Length, ε, schedule, skew, batch and method: all but rate, seed and the held-out records."""
    planned = tuned(name)
    unlike = ("lr", "seed", "skew_seed", "data_options", "validation", "clipping")
    for run in planned.runs:
        if run.labels["row"] in ("Sign reversed", "Random ζ") or "clipping" in run.config:
            continue  # they have the rate of the practical form
        ladder = planned.ladders[ladder_of(run)]
        (rung, *_) = ladder.runs(0.25)
        assert rung.config["validation"] == 0.1 and rung.config["seed"] == TUNING_SEED
        told, wanted = (
            {key: value for key, value in config.items() if key not in unlike}
            for config in (rung.config, run.config)
        )
        assert told == wanted, run.labels
    assert TUNING_SEED not in {run.config["seed"] for run in planned.runs}
    assert {ladder.cap for ladder in planned.ladders.values()} == {CAP}


def test_every_method_has_a_rate_of_its_own():
    for name in ("iid", "tabular", "recent", "noniid", "calibration", "budget"):
        for run in plan.make_plan(spec.load(name)).runs:
            if "clipping" not in run.config and "at the rate of" not in run.labels["row"]:
                assert ladder_of(run).startswith(run.labels["method"] + " · ")


def test_every_run_of_a_ladder_has_a_description_of_its_own():
    planned = plan.make_plan(spec.load("budget"))
    told = [
        run.describe()
        for ladder in planned.ladders.values()
        for rate in (1.0, 2.0)
        for run in ladder.runs(rate)
    ]
    assert len(set(told)) == len(told) and "Adult · ε=1 · dp-sgd, lr 2 · seed 1000" in told


def test_splits_follow_the_seed_and_ladders_average_over_their_own():
    planned = tuned("tabular")
    heart = [run for run in planned.runs if run.labels["data"] == "heart"]
    assert {run.config["data_options"]["seed"] for run in heart} == set(range(1, 21))
    assert all(run.config["data_options"]["seed"] == run.config["seed"] for run in heart)
    ladder = planned.ladders["dp-sgd · Heart (AUC), ε = 8 · decoupled"]
    assert [run.config["data_options"]["seed"] for run in ladder.runs(1.0)] == [*range(1000, 1005)]


def test_settings_that_depend_on_the_length():
    planned = tuned("tabular")
    configs = {
        run.labels["row"]: run.config
        for run in planned.runs
        if run.labels["data"] == "adult" and run.labels["recipe"] == "decoupled"
    }
    # 20 epochs of 32 steps: the noise halves over them, the average looks back 64 steps
    assert configs["ADP-AdamW"]["method_options"]["ratio"] ** 20 == pytest.approx(0.5, rel=1e-2)
    assert configs["DP-Adam-AC"]["weight_average"] == pytest.approx(1 - 1 / 64, rel=1e-3)
    assert configs["DP-SAM, equal work"]["epochs"] == 10 and configs["DP-SAM"]["epochs"] == 20
    assert configs["DP-IS"]["method_options"]["cap"] == 4


def test_the_noise_halves_on_skewed_sets_too():
    """They are as large as the smallest class or as they are told to be, not as the whole set."""
    smallest = {"mnist-features": 5421, "cifar10": 5000}
    runs = [run for run in tuned("noniid").runs if run.labels["row"] == "ADP-AdamW"]
    assert {run.labels["data"] for run in runs} == {*smallest, "emnist", "cifar100"}
    sizes = set()
    for run in runs:
        size = run.config.get("skew_size", smallest.get(run.labels["data"]))
        an_epoch = math.ceil(size / run.config["batch_size"])
        falls = run.config["method_options"]["ratio"] ** (run.config["steps"] / an_epoch)
        assert falls == pytest.approx(0.5, rel=1e-2)
        sizes.add((run.labels["data"], run.config["skew"], size))
    assert ("cifar100", 0.5, 3300) in sizes and ("emnist", 0.1, 1000) in sizes
    assert len(sizes) == 16  # one for each cell, the same for all seeds


def test_a_ladder_may_begin_where_another_ended():
    planned = plan.make_plan(spec.load("resnet"))
    names = {name.partition(" · ")[0]: ladder for name, ladder in planned.ladders.items()}
    assert names["dp-sgd"].follows == "" and names["dp-sgd"].cap == CAP
    assert names["auto-s"].follows.startswith("dp-sgd · ") and names["auto-s"].cap == 3
    assert names["dp-adam"].follows == ""  # another family's rates tell nothing


def test_a_rate_that_is_not_tuned_leaves_a_placeholder(mini):
    assert {run.config["lr"] for run in plan.make_plan(mini).runs} == {
        "@tuned:dp-sgd · σ = 1.1 · decoupled"
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
    known = session.known_labels(experiment)
    text = "row=DP-SGD, C=1.00,WW-DP-SGD, C_0=0.25,seed=1,2"
    only = session.parse_only(text, known)
    assert only == {"row": ["DP-SGD, C=1.00", "WW-DP-SGD, C_0=0.25"], "seed": ["1", "2"]}
    chosen = session.select(plan.make_plan(experiment, RATES), only)
    assert {run.labels["row"] for run in chosen} == set(only["row"])
    # The longest label wins, and a value that is no label ends at the comma.
    assert session.parse_only("row=a, b,a", {"row": ["a", "a, b"]}) == {"row": ["a, b", "a"]}
    assert session.parse_only("row=x, b", {"row": ["a", "a, b"]}) == {"row": ["x", "b"]}


def test_only_knows_every_place_of_a_run(two_readings):
    planned = plan.make_plan(two_readings)
    rows = [
        {
            run.labels["row"]
            for run in session.select(planned, {"reading": [name], "data": ["mnist"]})
        }
        for name in ("sigma", "eight")
    ]
    assert rows[0] == rows[1] and "Non-private (SGD)" in rows[1]


def test_only_selects(mini):
    planned = plan.make_plan(mini, RATES)
    chosen = session.select(planned, {"row": ["Replay"], "seed": ["1"]})
    assert [run.describe() for run in chosen] == ["σ = 1.1 · Replay · seed 1"]
    assert [run.labels["row"] for run in with_dependencies(planned, chosen)] == [
        "Spectral",
        "Replay",
    ]
    with pytest.raises(CommandError, match="there are: DP-SGD, Replay, Spectral"):
        session.select(planned, {"row": ["Spectrum"]})
    with pytest.raises(CommandError, match="nothing to run"):
        session.select(planned, {"row": ["DP-SGD"], "method": ["ww-practical"]})


def test_one_seed_can_not_replay_another(mini_file):
    text = mini_file.read_text(encoding="utf-8").replace("looks = [3]", "looks = [1]")
    mini_file.write_text(text, encoding="utf-8")
    with pytest.raises(CommandError, match="two seeds"):
        plan.make_plan(spec.load(str(mini_file)))


def test_a_run_that_needs_itself_is_refused(mini_file):
    text = mini_file.read_text(encoding="utf-8").replace("@run:Spectral@other-seed", "@run:Replay")
    mini_file.write_text(text, encoding="utf-8")
    with pytest.raises(CommandError, match="needs its own result"):
        plan.make_plan(spec.load(str(mini_file)))


def test_a_rate_that_is_said_is_not_tuned(mini):
    """And a run with a rate that a grid happens to choose is the same run."""
    columns = (
        {**mini.columns[0], "label": "lr=1", "set": {"lr": 1.0}},
        {**mini.columns[0], "label": "tuned"},
    )
    mixed = plan.make_plan(
        replace(mini, columns=columns, published={}), {"dp-sgd · tuned, σ = 1.1 · decoupled": 1.0}
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
    alone = plan.make_plan(replace(mini, columns=columns[:1], published={}))
    assert alone.ladders == {} and {run.config["lr"] for run in alone.runs} == {1.0}
    assert {ladder_of(run) for run in alone.runs} == {""}
