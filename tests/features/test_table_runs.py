"""Runs on tables: a linear head on bins, from the command's settings to predictions."""

import json

import numpy as np
import pytest
import torch

import zetaclip
from zetaclip.errors import PrivacyLeakWarning
from zetaclip.training import Config, ConfigError, train

SCHEMA = {
    "target": "outcome",
    "classes": ["ill", "well"],
    "columns": {
        "age": {"type": "numeric", "bounds": [18, 95]},
        "dose": {"type": "numeric", "bounds": [0, 10], "missing": "flag"},
        "ward": {"type": "categorical", "values": ["A", "B", "C"]},
    },
}


def rows(count, seed=0):
    draw = np.random.default_rng(seed)
    age, dose = draw.integers(18, 96, count), draw.uniform(0, 10, count).round(2)
    ward = draw.choice(["A", "B", "C"], count)
    ill = (np.abs(age - 55) / 20 + dose / 5 + (ward == "C") + draw.normal(0, 0.3, count)) > 2.3
    there = draw.random(count) > 0.05
    return [
        (str(a), f"{d}" if t else "", w, "ill" if i else "well")
        for a, d, t, w, i in zip(age, dose, there, ward, ill, strict=True)
    ]


def write(path, table):
    path.write_text("age,dose,ward,outcome\n" + "\n".join(",".join(row) for row in table) + "\n")
    return path


@pytest.fixture
def table(tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    return write(tmp_path / "train.csv", rows(1500))


def config(table, **changes):
    values = {
        "data": str(table),
        "schema": str(table.parent / "schema.json"),
        "num_examples": 1200,
        "method": "dp-sgd",
        "clip": 0.1,
        "epsilon": 3.0,
        "steps": 60,
        "seed": 3,
        "threads": 1,
    }
    return Config.from_mapping({**values, **changes})


def test_a_table_gets_bins_and_a_linear_head(table, tmp_path):
    result = train(config(table), tmp_path / "run")
    assert result["model"] == "head"
    assert result["features"]["kind"] == "bins"
    assert result["features"]["layout"] == [["number", 1], ["number", 2], ["category", 3]]
    assert any("fixed in advance, not trained: bins" in note for note in result["notes"])
    assert "fixed in advance, not trained (`bins`)" in (tmp_path / "run/MODEL_CARD.md").read_text()
    straight = train(config(table, features="none", model="linear"), tmp_path / "straight")
    # The outcome depends on |age - 55|: no straight line in the age can tell that.
    assert result["metric"]["value"] > straight["metric"]["value"] + 0.05
    assert result["metric"]["value"] > 0.85


def test_only_a_head_on_text_alone_has_a_bias(tmp_path):
    """The knots of a number and a category add up to 1; words don't."""
    draw = np.random.default_rng(0)
    labels = draw.random(400) < 0.9
    table = "".join(f"word{draw.integers(50)} {'up' if k else 'so'},{int(k)},3\n" for k in labels)
    (tmp_path / "train.csv").write_text("body,label,age\n" + table)
    columns = {"body": {"type": "text", "buckets": 64}}
    kinds = {"linear": {"type": "ignore"}, "head": {"type": "numeric", "bounds": [0, 9]}}
    for model, age in kinds.items():
        schema = {"target": "label", "classes": ["0", "1"], "columns": {**columns, "age": age}}
        (tmp_path / "schema.json").write_text(json.dumps(schema))
        given = config(tmp_path / "train.csv", num_examples=320, steps=3)
        result = train(given, tmp_path / model)
        assert result["model"] == model
        fc = zetaclip.load_run(tmp_path / model).model[1].fc
        assert (fc.bias is not None) == (model == "linear")


def test_predictions_come_from_raw_rows(table, tmp_path):
    train(config(table), tmp_path / "run")
    new = rows(300, seed=1)
    run = zetaclip.load_run(tmp_path / "run")
    said = run.predict(write(tmp_path / "new.csv", new))
    assert np.mean([s == row[3] for s, row in zip(said, new, strict=True)]) > 0.75
    x = run.prepare(tmp_path / "new.csv")
    features, head = run.model
    assert torch.equal(run.model(x), head(features(x)))
    odd = [("-7", "99", "unknown", "ill"), ("200", "NA", "", "ill")] * 5
    assert set(run.predict(write(tmp_path / "odd.csv", odd))) <= {"ill", "well"}


def test_a_named_network_has_no_features(table, tmp_path):
    result = train(config(table, model="mlp-2", steps=3), tmp_path / "run")
    assert result["features"] is None


def test_features_are_for_their_kind_of_data(table, tmp_path):
    with pytest.raises(ConfigError, match="'bins' are for tables"):
        train(config(table, data="digits", schema=None, features="bins"), tmp_path / "a")
    with pytest.raises(ConfigError, match="for pictures"):
        train(config(table, features="patches"), tmp_path / "b")
    with pytest.raises(ConfigError, match="has no option bin"):
        train(config(table, features_options={"bin": 3}), tmp_path / "c")


def test_an_inferred_layout_stays_private(table, tmp_path):
    with pytest.warns(PrivacyLeakWarning, match="inferred"):
        result = train(config(table, schema=None, target="outcome", steps=3), tmp_path / "run")
    assert "layout" not in result["features"]
    for path in (tmp_path / "run").glob("*.*"):
        assert b'"layout"' not in path.read_bytes(), path
    assert len(zetaclip.load_run(tmp_path / "run").predict(table)) == 1500
    (tmp_path / "run/private/input.json").unlink()
    published = zetaclip.load_run(tmp_path / "run")
    with pytest.raises(zetaclip.errors.InputError, match="inferred from private data"):
        published.predict(torch.zeros(2, 6))
