"""``verify`` finds what was changed by hand."""

import json
import shutil
from dataclasses import replace

import pytest

from zetaclip.accounting import group_epsilon
from zetaclip.cli import main
from zetaclip.grid import spacing, widened
from zetaclip.ledger import Ledger
from zetaclip.training import Config, train
from zetaclip.training.provenance import digest, seal
from zetaclip.training.verify import verify


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def edit(path, change, reseal=True):
    """Changes result.json, or a line-wise file and then the digest that result.json has of it; and
    renews the seal."""
    if path.name == "result.json":
        values = json.loads(path.read_text())
        change(values)
        values["seal"] = seal(values) if reseal else values["seal"]
        path.write_text(json.dumps(values))
        return
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if reseal:
        result = path.parent / "result.json"
        values = json.loads(result.read_text())
        values["files"][path.name] = digest(path)
        values["seal"] = seal(values)
        result.write_text(json.dumps(values))


def test_an_untouched_run_fits(finished, capsys):
    assert verify(finished) == []
    assert main(["verify", str(finished)]) == 0
    assert "all fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "key", ["epsilon", "delta", "steps", "claim", "noise_seed_known", "num_examples"]
)
def test_a_changed_claim_is_found(copy, key):
    def change(values):
        values[key] = {"claim": "none: changed", "noise_seed_known": False}.get(key, 0.5)

    edit(copy / "result.json", change)
    assert verify(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", "dp-sgd-plus"),
        ("model", "resnet-18"),
        ("accountant", "prv"),
        ("sigma", 5.0),
        ("sample_rate", 0.001),
        ("expected_batch_size", 1),
        ("releases", 3),
        ("num_examples_source", "guessed"),
        ("multipliers", [9.0]),
    ],
)
def test_a_changed_figure_beside_epsilon_is_found(copy, key, value):
    assert json.loads((copy / "result.json").read_text())[key] != value
    edit(copy / "result.json", lambda values: values.update({key: value}))
    assert any(key in problem for problem in verify(copy))


@pytest.mark.parametrize("accountant", ["rdp", "prv", "pld"])
def test_the_epsilon_of_each_accountant_is_computed_again(copy, accountant):
    edit(copy / "result.json", lambda values: values["epsilon_by"].update({accountant: 0.1}))
    assert any(f"ε by {accountant}" in problem for problem in verify(copy))


def test_the_epsilon_of_a_group_is_computed_again(copy):
    from zetaclip.ledger import Ledger

    events = Ledger.from_jsonl(copy / "ledger.jsonl").events()
    delta = json.loads((copy / "result.json").read_text())["delta"]
    true = group_epsilon(events, delta, 3)
    for said, fits in ((true, True), (0.1, False)):
        group = {"unit": "person", "records": 3, "epsilon": said, "delta": delta}
        edit(copy / "result.json", lambda values, group=group: values.update(group=group))
        assert (verify(copy) == []) == fits


def test_a_line_that_nothing_else_knows_is_sealed(copy):
    edit(
        copy / "result.json",
        lambda values: values.update(notes=[], unit="one hospital"),
        reseal=False,
    )
    assert verify(copy) == ["result.json is not what the run wrote: its seal differs"]


def test_a_step_without_a_row_is_found(copy):
    from zetaclip.ledger import Ledger

    whole = Ledger.from_jsonl(copy / "ledger.jsonl")
    fewer = Ledger(whole.header)
    for row in whole.rows():
        if row.step != 4:
            fewer.append(row)
    fewer.to_jsonl(copy / "ledger.jsonl")
    edit(
        copy / "result.json",
        lambda values: values["files"].update({"ledger.jsonl": digest(copy / "ledger.jsonl")}),
    )
    assert any("no sum for 1 of" in problem for problem in verify(copy))


@pytest.mark.filterwarnings(
    "ignore:the 12 updates that the noise was chosen for"
)  # skipped ones are counted there
def test_batches_that_were_skipped_have_no_row(tmp_path):
    settings = {
        "data": "digits",
        "method": "dp-sgd",
        "empty": "skip",
        "batch_size": 1,
        "steps": 12,
        "sigma": 1.0,
        "seed": 2,
    }
    train(Config.from_mapping({**settings, "threads": 1, "no_eval": True}), tmp_path / "run")
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[1:]
    ]
    assert max(row["step"] for row in rows) > 11  # one of them was empty
    assert verify(tmp_path / "run") == []
    edit(tmp_path / "run" / "ledger.jsonl", lambda lines: lines.pop())
    assert verify(tmp_path / "run")


def test_a_method_that_draws_more_candidates_fits(tmp_path):
    settings = {
        "data": "digits",
        "method": "dp-is",
        "method_options": {"cap": 2.0},
        "batch_size": 64,
        "steps": 3,
    }
    train(
        Config.from_mapping({**settings, "sigma": 2.0, "threads": 1, "no_eval": True}),
        tmp_path / "run",
    )
    assert verify(tmp_path / "run") == []
    edit(
        tmp_path / "run" / "result.json",
        lambda values: values.update(sample_rate=values["sample_rate"] / 2),
    )
    assert any(problem.startswith("sample_rate") for problem in verify(tmp_path / "run"))


def test_rows_of_another_rate_are_found(copy):
    import dataclasses

    from zetaclip.ledger import Ledger

    whole = Ledger.from_jsonl(copy / "ledger.jsonl")
    rarer = Ledger(whole.header)
    for row in whole.rows():
        rarer.append(dataclasses.replace(row, sample_rate=row.sample_rate / 2))
    rarer.to_jsonl(copy / "ledger.jsonl")
    edit(
        copy / "result.json",
        lambda values: values["files"].update({"ledger.jsonl": digest(copy / "ledger.jsonl")}),
    )
    assert any(problem.startswith("sample_rate of the ledger") for problem in verify(copy))


def rewritten(folder, change):
    """Changes rows of the ledger and writes it anew, with its digest and the run's seal."""
    rows = [change(row) for row in Ledger.from_jsonl(folder / "ledger.jsonl").rows()]
    ledger = Ledger(Ledger.from_jsonl(folder / "ledger.jsonl").header)
    for row in rows:
        ledger.append(row)
    ledger.to_jsonl(folder / "ledger.jsonl")

    def renew(values):
        values["files"]["ledger.jsonl"] = digest(folder / "ledger.jsonl")

    edit(folder / "result.json", renew)


def test_releases_on_no_grid_are_found(copy):
    rewritten(copy, lambda row: replace(row, clip=row.sensitivity, grid=0.0))
    assert any("releases are not on a grid" in problem for problem in verify(copy))


def test_a_grid_that_is_too_coarse_for_the_network_is_found(copy):
    rewritten(copy, lambda row: row)
    assert verify(copy) == []
    rewritten(copy, lambda row: replace(row, grid=spacing(row.clip, row.noise_multiplier, 1)))
    assert any("not that of" in problem for problem in verify(copy))
    rewritten(copy, lambda row: replace(row, grid=row.grid / 2**100))
    assert any("not that of" in problem for problem in verify(copy))


def test_another_clip_than_the_runs_is_found(copy):
    def change(row):
        bound = 2 * row.clip
        grid = spacing(bound, row.noise_multiplier, 10**6)
        sensitivity = widened(bound)
        std = row.noise_multiplier * sensitivity
        return replace(row, clip=bound, sensitivity=sensitivity, noise_std=std, grid=grid)

    rewritten(copy, change)
    assert any("clipped at" in problem or "has clip" in problem for problem in verify(copy))


@pytest.mark.parametrize(
    ("which", "says"), [("sum", "clipped at"), ("sum: count", "is bounded by 0.5")]
)
def test_another_clip_in_later_rows_is_found(tmp_path, which, says):
    settings = {"data": "digits", "method": "quantile", "batch_size": 64, "steps": 4, "sigma": 2.0}
    train(
        Config.from_mapping({**settings, "threads": 1, "no_eval": True, "seed": 3}),
        tmp_path / "run",
    )
    assert verify(tmp_path / "run") == []

    def change(row):
        if row.query != which or row.step == 0:
            return row
        bound, sigma = 100 * row.clip, row.noise_multiplier
        sensitivity = widened(bound)
        grid = spacing(bound, sigma, 10**4 if which == "sum" else 1)
        return replace(
            row, clip=bound, sensitivity=sensitivity, noise_std=sigma * sensitivity, grid=grid
        )

    rewritten(tmp_path / "run", change)
    assert any(says in problem or "not that of" in problem for problem in verify(tmp_path / "run"))


def test_a_smaller_epsilon_is_named(copy, capsys):
    edit(copy / "result.json", lambda values: values.update(epsilon=values["epsilon"] * 0.99))
    assert main(["verify", str(copy)]) == 1
    assert "ε: result.json says" in capsys.readouterr().out


def test_a_better_metric_is_found(copy):
    edit(copy / "result.json", lambda values: values["metric"].update(value=0.99))
    assert any("metric" in problem for problem in verify(copy))


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        *[("metrics", key, 0.0) for key in ("accuracy", "ece", "loss")],
        *[("clip", key, 7.0) for key in ("initial", "final", "median", "mean", "min", "max")],
        *[("clip", key, 99) for key in ("hits_min", "hits_max")],
        *[("probes", key, 0.5) for key in ("count", "in_zone_share", "weak_fits", "failed_fits")],
    ],
)
def test_every_figure_that_a_table_may_show_is_checked(copy, table, key, value):
    assert key in json.loads((copy / "result.json").read_text())[table]
    edit(copy / "result.json", lambda values: values[table].update({key: value}))
    assert verify(copy)


@pytest.mark.parametrize("method", ["dp-sgd", "quantile"])
def test_without_probes_c_is_told_by_the_ledger_and_its_changes(method, tmp_path):
    words = [
        "train",
        "--data",
        "digits",
        "--model",
        "mlp-2",
        "--sigma",
        "2",
        "--steps",
        "6",
        "--batch-size",
        "64",
    ]
    out = tmp_path / "run"
    assert (
        main(
            [
                *words,
                "--lr",
                "0.1",
                "--method",
                method,
                "--threads",
                "1",
                "--quiet",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert verify(out) == []
    result = json.loads((out / "result.json").read_text())
    assert (result["clip"]["min"] < result["clip"]["max"]) == (method == "quantile")
    for scaled in (["mean"], ["initial"], list(result["clip"])):
        edited = {
            **result,
            "clip": {
                name: value * (2 if name in scaled else 1) for name, value in result["clip"].items()
            },
        }
        (out / "result.json").write_text(json.dumps(edited))
        assert any(problem.startswith("C: ") for problem in verify(out))


def test_a_clipping_norm_that_does_not_follow_is_found_even_with_a_new_digest(copy):
    edit(copy / "probes.jsonl", lambda lines: lines[2].update(clip=lines[2]["clip"] * 1.01))
    problems = verify(copy)
    assert any(problem.startswith("probe 3: C should be") for problem in problems)


def test_an_exponent_that_its_eigenvalues_do_not_give_is_found(copy):
    edit(copy / "probes.jsonl", lambda lines: lines[1]["layers"]["fc1"].update(zeta=9.0))
    assert any("probe 2: ζ of fc1" in problem for problem in verify(copy))


def test_changed_eigenvalues_are_found(copy):
    def change(lines):
        lines[0]["layers"]["fc1"]["eigenvalues"][0] *= 2

    edit(copy / "probes.jsonl", change)
    assert any("probe 1" in problem for problem in verify(copy))


def test_a_ledger_row_taken_out_is_found(copy):
    lines = (copy / "ledger.jsonl").read_text().splitlines(keepends=True)
    (copy / "ledger.jsonl").write_text("".join(lines[:-1]))
    assert any("ledger.jsonl" in problem and "rows" in problem for problem in verify(copy))


def test_other_weights_are_found(copy):
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert verify(copy) == [
        "model.safetensors is not the file that the run wrote: its digest differs"
    ]


@pytest.mark.parametrize(
    "name", ["result.json", "config.json", "ledger.jsonl", "probes.jsonl", "metrics.jsonl"]
)
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    assert any(name in problem for problem in verify(copy))


def test_a_folder_without_a_run_is_told_from_one_that_does_not_fit(tmp_path):
    assert verify(tmp_path) == ["result.json is missing: the run is not finished"]
    assert verify(tmp_path / "nowhere") == [f"{tmp_path / 'nowhere'} is not a folder"]
