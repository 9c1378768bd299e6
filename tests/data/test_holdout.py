"""Held-out parts: one record more changes one part by one record, whatever the rows are like."""

import json
from collections import Counter

import numpy as np
import pytest

from zetaclip.data import load
from zetaclip.data.holdout import held_out
from zetaclip.errors import OwnerWarning
from zetaclip.training import Config, train
from zetaclip.training.records import load_data, nominal_size

SCHEMA = {
    "target": "y",
    "classes": ["no", "yes"],
    "columns": {
        "a": {"type": "numeric", "bounds": [0, 1000]},
        "b": {"type": "categorical", "values": ["u", "v"]},
    },
}


def multiset(split):
    return Counter(
        (row.tobytes(), label.tobytes())
        for row, label in zip(split.x.numpy(), split.y.numpy(), strict=True)
    )


def distance(left, right):
    return sum(((left - right) + (right - left)).values())


def lines(count, distinct):
    return [f"{i % distinct},{'uv'[i % 2]},{'yes' if i % 3 else 'no'}" for i in range(count)]


def write(path, rows):
    path.write_text("\n".join(["a,b,y", *rows]) + "\n")
    return path


def asked(path, validation):
    schema = path.with_suffix(".json")
    schema.write_text(json.dumps(SCHEMA))
    return Config.from_mapping({"data": str(path), "schema": str(schema), "validation": validation})


@pytest.mark.parametrize("place", [0, 137, 400])
@pytest.mark.parametrize("distinct", [1000, 7])
@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_one_row_more_moves_no_other(tmp_path, place, distinct, validation):
    rows = lines(400, distinct)
    more = [*rows[:place], "3,v,yes", *rows[place:]]
    found = []
    for name, content in (("one", rows), ("more", more)):
        path = write(tmp_path / f"{name}.csv", content)
        found.append(load_data(asked(path, validation)))
    parts = [
        distance(multiset(getattr(found[0], part)), multiset(getattr(found[1], part)))
        for part in ("train", "test")
    ]
    assert parts[0] <= 1 and parts[1] <= 1
    if not validation:  # with it a row may be in the untouched test part, and in neither of the two
        assert sum(parts) == 1


def test_a_permutation_of_the_rows_would_not_do():
    # What is rejected above: the same draw for the same number of rows moves many records when
    # there is one more.
    parts = [np.random.default_rng(0).permutation(n)[: n // 5] for n in (400, 401)]
    assert len(set(parts[0].tolist()) ^ set(parts[1].tolist())) > 10


def test_the_share_is_met_on_average_and_equal_rows_are_split_too():
    x, y = np.zeros((20_000, 2), np.float32), np.zeros(20_000, np.float32)
    for rows in (x, np.arange(40_000, dtype=np.float32).reshape(-1, 2)):
        count = held_out(rows, y, 0.3, 0, "test").sum()
        assert abs(count - 6000) < 5 * (20_000 * 0.3 * 0.7) ** 0.5


def test_seeds_and_purposes_choose_independently():
    x = np.arange(20_000, dtype=np.float32)[:, None]
    y = np.zeros(len(x), np.float32)
    first = held_out(x, y, 0.5, 0, "test")
    assert np.array_equal(first, held_out(x, y, 0.5, 0, "test"))
    for other in (held_out(x, y, 0.5, 1, "test"), held_out(x, y, 0.5, 0, "validation")):
        assert abs((first == other).mean() - 0.5) < 5 * 0.5 / len(x) ** 0.5


def test_of_own_data_the_number_that_is_left_is_not_called_public(tmp_path):
    path = write(tmp_path / "own.csv", lines(400, 1000))
    config = asked(path, 0.25)
    part = load_data(config)
    size, declared = nominal_size(config, part)
    assert size == len(part.train) and not declared
    assert str(len(part.test)) not in " ".join(part.notes)
    whole = load(path, schema=SCHEMA)
    assert multiset(whole.train) == multiset(part.train) + multiset(part.test)


def test_with_a_declared_size_no_note_tells_the_real_one(tmp_path):
    found = []
    for count in (235, 280):
        config = asked(write(tmp_path / f"{count}.csv", lines(count, 1000)), 0.0)
        config = config.changed(
            num_examples=200,
            epochs=1.0,
            sigma=2.0,
            method="dp-sgd",
            threads=1,
            seed=1,
            no_eval=True,
        )
        with pytest.warns(OwnerWarning, match=r"200 was declared, but the dataset has \d+ records"):
            result = train(config, tmp_path / f"run-{count}")
        found.append(result)
        for file in (tmp_path / f"run-{count}").glob("*.json*"):
            assert "records; the guarantee" not in file.read_text()
    assert found[0]["notes"] == found[1]["notes"] and found[0]["num_examples"] == 200
