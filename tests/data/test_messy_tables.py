"""Tables as people have them: other encodings, words among numbers, signs, missing targets."""

import random
import warnings
from pathlib import Path

import pytest
import torch

from zetaclip.cli import main
from zetaclip.cli.flags import in_flags
from zetaclip.data import load
from zetaclip.data.declared import read_schema
from zetaclip.data.guess import guess
from zetaclip.data.pictures import told
from zetaclip.data.reading import encoding_of, read_table
from zetaclip.data.written import number, number_style
from zetaclip.errors import InputError, OwnerWarning, PrivacyLeakWarning
from zetaclip.words import grouped

ROOMS = {
    "target": "Preis",
    "target_bounds": [0, 2000],
    "columns": {
        "Straße": {"type": "categorical", "values": ["Süd", "Nord"]},
        "Fläche": {"type": "numeric", "bounds": [0, 200]},
    },
}


def rooms(path, encoding):
    lines = [
        "Straße;Fläche;Preis",
        *(f"{'Süd' if i % 2 else 'Nord'};{i};{10 * i}" for i in range(60)),
    ]
    path.write_bytes(("\r\n".join(lines) + "\r\n").encode(encoding))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_marked_encodings_are_read_and_nothing_is_inferred(tmp_path, encoding):
    data = load(rooms(tmp_path / "r.csv", encoding), schema=ROOMS, test_share=0)
    assert data.private_statistics == () and data.train.x[:, 0].sum() == 30


def test_another_encoding_is_guessed_with_a_warning_or_declared(tmp_path):
    """Whether a file is UTF-8 can hang on one record, so the guess is listed as inferred."""
    path = rooms(tmp_path / "r.csv", "cp1252")
    expected = load(rooms(tmp_path / "u.csv", "utf-8"), schema=ROOMS).train.x
    with pytest.warns(PrivacyLeakWarning, match="encoding of the file"):
        guessed = load(path, schema=ROOMS)
    assert torch.equal(guessed.train.x, expected) and len(guessed.private_statistics) == 1
    declared = load(path, schema={**ROOMS, "encoding": "cp1252"})
    assert torch.equal(declared.train.x, expected) and declared.private_statistics == ()
    with pytest.raises(InputError, match="is not text in utf-8: save it as UTF-8, or name its"):
        load(path, schema={**ROOMS, "encoding": "utf-8"})
    with pytest.raises(InputError, match="encoding must be a name such as"):
        read_schema({"encoding": "utf-9"})


def test_the_proposal_declares_the_encoding(tmp_path, capsys):
    path = rooms(tmp_path / "r.csv", "cp1252")
    assert main(["data", "schema", str(path), "--target", "Preis", "--values"]) == 0
    (tmp_path / "s.toml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert load(path, schema=tmp_path / "s.toml").private_statistics == ()
    assert main(["data", "schema", str(rooms(path, "utf-8")), "--target", "Preis"]) == 0
    assert "encoding" not in capsys.readouterr().out


def test_a_spreadsheet_is_told_to_be_saved_as_csv(tmp_path):
    with pytest.raises(InputError, match="save the sheet as CSV first"):
        read_table(tmp_path / "t.xlsx")
    assert encoding_of(tmp_path / "t.parquet") == "utf-8-sig"  # not looked at


def test_the_row_number_of_pandas_is_explained(tmp_path):
    (tmp_path / "t.csv").write_text(",x,y\n0,1,2\n")
    with pytest.raises(InputError, match=r"column 1 has no name.*to_csv\(\.\.\., index=False\)"):
        read_table(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("fields", "style", "values"),
    [
        (["$1,234.50", "$ 7", "-$3"], (".", ","), [1234.5, 7, -3]),
        (["1.234,50 €", "7 €"], (",", "."), [1234.5, 7]),
        (["45%", "7 %"], (".", ""), [45, 7]),
        (["$$5"], None, []),
        (["5 apples"], None, []),
    ],
)
def test_signs_of_currency_and_percent(fields, style, values):
    assert number_style(fields) == style
    if style:
        assert [number(field, *style) for field in fields] == values


def test_signs_do_not_make_two_categories_one(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("share,y\n" + "".join(f"{'5' if i % 2 else '5%'},{i % 2}\n" for i in range(20)))
    schema = {"target": "y", "classes": ["0", "1"]}
    column = {"share": {"type": "categorical", "values": ["5", "6"]}}
    x = load(path, schema={**schema, "columns": column}, test_share=0).train.x
    assert x.sum() == 10  # "5%" is unknown here, not 5


def numbers_with(words, count=400, every=20):
    rng = random.Random(3)
    return [rng.choice(words) if i % every == 0 else f"{i}.5" for i in range(count)]


def test_few_words_among_numbers_are_missing_values():
    seen = guess("area", numbers_with(["-", "unknown", "k.A.", ""]))
    assert (seen.kind, seen.words, seen.said) == ("numeric", (), "")
    seen = guess("area", numbers_with(["see file", "ask Ann"]))
    assert seen.kind == "numeric" and set(seen.words) == {"see file", "ask Ann"}
    assert "words among them count as missing" in seen.said and "Ann" not in seen.said
    assert guess("area", numbers_with(["see file"], every=5)).kind != "numeric"  # a fifth is much
    many = [f"room {i}" if i % 10 == 0 else f"{i}" for i in range(400)]
    assert guess("room", many).kind == "ignore"
    assert guess("job", ["none", "cook", "unknown"] * 9).kind == "categorical"


def test_words_for_missing_values_can_be_declared(tmp_path):
    path = tmp_path / "t.csv"
    fields = ["999", "see file", "-", "", *map(str, range(1, 17))]
    path.write_text("x,y\n" + "".join(f"{field},{i % 2}\n" for i, field in enumerate(fields)))
    column = {"type": "numeric", "bounds": [0, 17], "missing": "flag"}
    schema = {"target": "y", "classes": ["0", "1"], "columns": {"x": column}}
    with pytest.raises(InputError, match=r"line 3: 'see file'.*declare the word.*missing_values"):
        load(path, schema=schema)
    column["missing_values"] = [999, "see file"]
    x = load(path, schema=schema, test_share=0).train.x
    assert x[:, 1].tolist() == [1] * 4 + [0] * 16 and x[:4, 0].tolist() == [0] * 4
    column["missing_values"] = "999"
    with pytest.raises(InputError, match="missing_values of 'x' must be a list"):
        load(path, schema=schema)


def test_inferred_words_for_missing_values_are_listed_and_kept(tmp_path, capsys):
    path = tmp_path / "t.csv"
    fields = numbers_with(["see file"])
    path.write_text("x,y\n" + "".join(f"{field},{'ab'[i % 2]}\n" for i, field in enumerate(fields)))
    with pytest.warns(PrivacyLeakWarning, match="words for a missing value of x"):
        data = load(path, target="y", test_share=0)
    assert data.features == ("x", "x: missing") and data.train.x[:, 1].sum() == 20
    assert data.inputs.prepare({"x": ["see file", "3"]})[:, 1].tolist() == [1, 0]
    assert type(data.inputs).from_description(data.inputs.describe()) == data.inputs
    assert main(["data", "schema", str(path), "--target", "y"]) == 0
    assert "see file" not in capsys.readouterr().out
    assert main(["data", "schema", str(path), "--target", "y", "--values"]) == 0
    (tmp_path / "s.toml").write_text(capsys.readouterr().out)
    assert load(path, schema=tmp_path / "s.toml").private_statistics == ()


def test_rows_without_a_target_are_left_out(tmp_path):
    path = tmp_path / "t.csv"
    lines = [f"{i},{'' if i % 7 == 0 else 'NA' if i % 11 == 0 else 'ab'[i % 2]}" for i in range(70)]
    path.write_text("\n".join(["x,y", *lines]) + "\n")
    schema = {
        "target": "y",
        "classes": ["a", "b"],
        "columns": {"x": {"type": "numeric", "bounds": [0, 70]}},
    }
    with pytest.warns(OwnerWarning, match="16 rows without y left out. The number is private"):
        data = load(path, schema=schema, test_share=0)
    kept = [i for i in range(70) if i % 7 and i % 11]
    assert data.train.x[:, 0].tolist() == pytest.approx([2 * i / 70 - 1 for i in kept], abs=1e-6)
    assert data.train.y.tolist() == [i % 2 for i in kept]
    path.write_text("\n".join(["x,y", *(line for line in lines if line[-1] in "ab")]) + "\n")
    clean = load(path, schema=schema, test_share=0)  # no warning
    assert clean.notes == data.notes and torch.equal(clean.train.x, data.train.x)
    path.write_text("\n".join(["x,y", *(f"{i}," for i in range(70))]) + "\n")
    with pytest.warns(OwnerWarning), pytest.raises(InputError, match="without the rows that have"):
        load(path, schema=schema)


def test_rows_without_a_target_take_their_owner_along(tmp_path):
    path = tmp_path / "t.csv"
    rows = [(i, i % 5, "" if i % 3 == 0 else "ab"[i % 2]) for i in range(60)]
    path.write_text("x,who,y\n" + "".join(f"{x},{who},{y}\n" for x, who, y in rows))
    with pytest.warns((OwnerWarning, PrivacyLeakWarning)):
        data = load(path, target="y", unit="who", test_share=0)
    whose = [who for _, who, y in rows if y]
    same = [[a == b for b in whose] for a in whose]
    found = data.owners.tolist()
    assert [[a == b for b in found] for a in found] == same


def test_inferred_bounds_of_a_target_stand_in_no_note(tmp_path):
    """They are the targets of two records, and notes are published with a run."""
    path = tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{i % 7},{1234.5 + i}\n" for i in range(40)))
    with pytest.warns(PrivacyLeakWarning) as caught:
        data = load(path, target="y")
    told = " ".join([*data.notes, *data.private_statistics, *(str(w.message) for w in caught)])
    assert "1234.5" not in told and "1273.5" not in told and "1,234" not in told
    assert "the target is clipped to its inferred bounds" in data.notes
    schema = {"target_bounds": [0, 2000], "columns": {"x": {"type": "numeric", "bounds": [0, 9]}}}
    assert "the target is clipped to 0 to 2000" in load(path, target="y", schema=schema).notes


def visits(path, number="visit_id", who="Kunden-Nr."):
    rng = random.Random(1)
    lines = [f"{i},K{rng.randrange(150)},{i % 9},{'ab'[i % 2]}" for i in range(600)]
    path.write_text("\n".join([f"{number},{who},x,y", *lines]) + "\n")
    return path


def test_identifiers_are_left_out_and_repeated_ones_suggest_a_unit(tmp_path):
    path = visits(tmp_path / "t.csv")
    with pytest.warns() as caught:
        data = load(path, target="y")
    assert data.features == ("x",)  # neither the number of the row nor the customer
    told = [str(w.message) for w in caught if w.category is OwnerWarning]
    assert len(told) == 1 and "unit='Kunden-Nr.'" in told[0]
    assert "--unit Kunden-Nr. protects these" in in_flags(told[0])
    assert "--unit 'who is it' protects" in in_flags("unit='who is it' protects")


def test_a_text_is_no_reason_to_forget_whose_it_is(tmp_path):
    """With ``text`` all other columns are left out, but nobody has declared so."""
    path = tmp_path / "t.csv"
    lines = [f"P{i % 150},word{i % 9} and more,{'ab'[i % 2]}" for i in range(600)]
    path.write_text("\n".join(["patient_id,note,y", *lines]) + "\n")
    with pytest.warns(OwnerWarning, match="unit='patient_id' protects"):
        load(path, target="y", text="note", schema={"classes": ["a", "b"]})


def test_a_column_that_is_declared_as_ignored_is_not_warned_of(tmp_path):
    path = visits(tmp_path / "t.csv", who="patient_id")
    schema = {
        "target": "y",
        "classes": ["a", "b"],
        "columns": {
            "visit_id": {"type": "ignore"},
            "patient_id": {"type": "ignore"},
            "x": {"type": "numeric", "bounds": [0, 9]},
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path, schema=schema)


def test_the_proposal_for_a_quantity_says_how_it_is_written(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("x;y\n" + "".join(f"{i % 5};1.{i:03d},5\n" for i in range(40)))
    assert main(["data", "schema", str(path), "--target", "y"]) == 0
    text = capsys.readouterr().out
    assert 'task = "regression"' in text and "classes" not in text
    assert 'target_decimal = ","' in text and 'target_thousands = "."' in text
    (tmp_path / "s.toml").write_text(text.replace("# target_bounds", "target_bounds"))
    with pytest.warns(PrivacyLeakWarning, match="bounds of x"):
        assert load(path, schema=tmp_path / "s.toml").task == "regression"


def test_phrases_are_grouped():
    phrases = ["type of a", "bounds of a", "type of b", "task, from the values of y"]
    assert grouped(phrases) == "type of a, b; bounds of a; task, from the values of y"


@pytest.mark.parametrize("form", ["file", "frame", "mapping", "rows"])
def test_spaces_around_names_of_columns_are_left_out(tmp_path, form):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "t.csv"
    path.write_text(" x , y\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(20)))
    frame = pandas.read_csv(path)
    assert list(frame) == [" x ", " y"]
    source = {
        "file": path,
        "frame": frame,
        "mapping": {name: frame[name].tolist() for name in frame},
        "rows": frame.to_dict("records"),
    }[form]
    with pytest.warns(PrivacyLeakWarning):
        data = load(source, target="y")
    assert data.features == ("x",)
    assert data.inputs.prepare({"x": ["3"]}).shape == (1, 1)


def test_names_that_differ_in_spaces_alone_are_refused():
    with pytest.raises(InputError, match="two columns of the table are called 'x'"):
        load({"x": [1], "x ": [2]}, target="x")


def test_missing_columns_of_new_records_are_told_at_once(tmp_path):
    columns = {name: {"type": "numeric", "bounds": [0, 1]} for name in "abcdefg"}
    inputs = load(
        {**{name: [0, 1] * 5 for name in "abcdefg"}, "y": ["u", "v"] * 5},
        schema={"target": "y", "classes": ["u", "v"], "columns": columns},
        test_share=0,
    ).inputs
    with pytest.raises(InputError, match=r"^7 columns are missing: a, b, c, 4 more\."):
        inputs.prepare({"x": ["1"]})
    with pytest.raises(InputError, match=r"^2 columns are missing: a, b\. The table has c, d"):
        inputs.prepare({name: ["1"] for name in "cdefg"})


def test_what_is_missing_is_named_as_a_flag_and_with_a_near_name(tmp_path, capsys):
    path = visits(tmp_path / "t.csv", who="patient_id")
    assert main(["train", "--data", str(path)]) == 2
    assert (
        "name the column to predict with --target; the file has visit_id" in capsys.readouterr().err
    )
    assert main(["train", "--data", str(path), "--target", "y", "--unit", "patient"]) == 2
    said = capsys.readouterr().err
    assert (
        "no column 'patient'. Did you mean 'patient_id'? For the unit there are: visit_id" in said
    )


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "1 of 9 pictures can't be read and is left out: 0"),
        (2, "2 of 9 pictures can't be read and are left out: 0, 1"),
    ],
)
def test_one_picture_and_several(count, said):
    assert told({Path(str(i)): "" for i in range(count)}, 9) == said
