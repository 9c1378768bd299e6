"""Tables in which several rows belong to one person: the split, the training and the claim."""

import json

import numpy as np
import pytest
import torch

from zetaclip.data import load
from zetaclip.data.augment import Shift, shifted
from zetaclip.data.holdout import held_out_owners, owner_numbers
from zetaclip.errors import ConfigError, InputError, OwnerWarning, PrivacyLeakWarning
from zetaclip.ledger import Ledger
from zetaclip.training import train
from zetaclip.training.config import Config
from zetaclip.training.verify import verify

SCHEMA = {
    "target": "ill",
    "classes": ["no", "yes"],
    "columns": {"age": {"type": "numeric", "bounds": [0, 100]}},
}


@pytest.fixture
def visits(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["patient,age,ill"]
    for patient in range(120):
        age = rng.integers(20, 90)
        for _ in range(rng.integers(1, 6)):
            lines.append(f"p{patient},{age},{'yes' if age > 55 else 'no'}")
    path = tmp_path / "visits.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_unit_is_no_feature_and_the_split_goes_by_it(visits):
    data = load(visits, schema=SCHEMA, unit="patient")
    assert data.features == ("age",) and data.unit == "one patient with all its rows"
    rows = visits.read_text().splitlines()[1:]
    owners = owner_numbers(row.split(",")[0] for row in rows)
    held = held_out_owners(owners, 0.2, 0, "test")
    assert torch.equal(data.owners, torch.from_numpy(owners[~held]))
    assert not set(owners[held]) & set(owners[~held])
    assert len(data.test) == held.sum() and 0.1 < held.mean() < 0.35
    assert data.rows_per_unit == 10


def test_one_person_more_moves_nobody_else(visits):
    before = load(visits, schema=SCHEMA, unit="patient")
    visits.write_text(visits.read_text() + "new,33,no\nnew,34,no\n")
    after = load(visits, schema=SCHEMA, unit="patient")
    assert len(after.train) - len(before.train) in (0, 2)
    kept = [owner for owner in after.owners.tolist() if owner != owner_numbers(["new"])[0]]
    assert kept == before.owners.tolist()


def test_spaces_around_a_name_make_nobody_else_of_a_person(visits):
    before = load(visits, schema=SCHEMA, unit="patient")
    visits.write_text(visits.read_text().replace("p7,", " p7 ,", 1))
    assert torch.equal(load(visits, schema=SCHEMA, unit="patient").owners, before.owners)
    assert any("each patient by its name" in note for note in before.notes)


def test_a_run_protects_people(visits, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    config = Config(
        data=str(visits), schema=str(schema), unit="patient", rows_per_unit=3, num_examples=100,
        epsilon=3.0, epochs=3, batch_size=20, model="linear", method="dp-sgd", seed=1,
    )  # fmt: skip
    result = train(config, tmp_path / "run")
    assert result["adjacency"] == "add/remove one unit (at most 3 rows per batch)"
    assert result["unit"] == "one patient with all its rows"
    head = Ledger.from_jsonl(tmp_path / "run" / "ledger.jsonl").header
    assert head.num_examples == 100 and head.expected_batch_size == 20
    assert verify(tmp_path / "run") == []
    assert "patient" not in (tmp_path / "run" / "ledger.jsonl").read_text()


def test_without_a_unit_a_column_that_repeats_is_warned_of(visits):
    undeclared = pytest.warns(PrivacyLeakWarning, match="inferred from the data")
    with pytest.warns(OwnerWarning, match="unit=.patient. protects these"), undeclared:
        load(visits, target="ill")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "doctor"}, "no column 'doctor'"),
        ({"rows_per_unit": 3}, "needs unit"),
    ],
)
def test_what_does_not_fit_is_said(visits, options, message):
    with pytest.raises(InputError, match=message):
        load(visits, schema=SCHEMA, **options)


def test_a_row_without_a_unit_is_named(visits):
    visits.write_text(visits.read_text() + ",33,no\n")
    last = len(visits.read_text().splitlines())
    with pytest.raises(InputError, match=f"line {last} has no patient"):
        load(visits, schema=SCHEMA, unit="patient")


# -- views


def test_a_shift_moves_whole_pictures_and_each_by_itself():
    torch.manual_seed(0)
    picture = torch.arange(36.0).view(1, 1, 6, 6)
    made = shifted(picture.expand(200, 1, 6, 6), 1, mirror=False)
    padded = torch.nn.functional.pad(picture, (1, 1, 1, 1), mode="replicate")[0, 0]
    windows = {
        tuple(padded[y : y + 6, x : x + 6].flatten().tolist()) for y in range(3) for x in range(3)
    }
    assert {tuple(one.flatten().tolist()) for one in made} == windows
    mirrored = shifted(picture.expand(200, 1, 6, 6), 0, mirror=True)
    found = {tuple(one.flatten().tolist()) for one in mirrored}
    assert found == {
        tuple(picture.flatten().tolist()), tuple(picture.flip(3).flatten().tolist())
    }  # fmt: skip


def test_letters_are_not_mirrored_and_targets_stay():
    torch.manual_seed(0)
    picture = torch.zeros(50, 1, 8, 8)
    picture[..., 0] = 1
    moved, y = Shift(pixels=0)([picture, torch.arange(50)])
    assert torch.equal(moved, picture) and torch.equal(y, torch.arange(50))
    colour = picture.expand(50, 3, 8, 8)
    assert not torch.equal(Shift(pixels=0)([colour, y])[0], colour)


def test_views_train_pictures_and_are_refused_elsewhere(tmp_path):
    terms = {"method": "dp-sgd", "epsilon": 3.0, "seed": 1, "steps": 3, "batch_size": 64}
    result = train(Config(data="digits", model="cnn", views=2, **terms), tmp_path / "a")
    assert result["steps"] == 3
    notes = Ledger.from_jsonl(tmp_path / "a" / "ledger.jsonl").header.notes
    assert "2 views of each row" in notes
    with pytest.raises(ConfigError, match="--features none"):
        train(Config(data="digits", features="patches", views=2, **terms), tmp_path / "b")
    with pytest.raises(ConfigError, match="does not clip"):
        train(Config(data="digits", model="cnn", views=2, method="sgd", steps=1), tmp_path / "c")
