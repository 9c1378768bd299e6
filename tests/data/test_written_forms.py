"""Numbers, dates and free text as people write them, and tables in memory."""

import datetime
import math

import numpy as np
import pytest
import torch

from zetaclip.cli import main
from zetaclip.data import load
from zetaclip.data.columns import Date
from zetaclip.data.declared import read_schema
from zetaclip.data.frames import table_of
from zetaclip.data.template import template
from zetaclip.data.written import date_style, moment, number, number_style
from zetaclip.errors import InputError, PrivacyLeakWarning

WORDS = "the quick brown fox jumps over a lazy dog and then sleeps under".split()  # noqa: SIM905


@pytest.mark.parametrize(
    ("fields", "style", "values"),
    [
        (["1.5", "-2", "3e2"], (".", ""), [1.5, -2, 300]),
        (["1,5", "-2", "0,25"], (",", ""), [1.5, -2, 0.25]),
        (["1,234", "12", "1,234,567.5"], (".", ","), [1234, 12, 1234567.5]),
        (["1.234,5", "12,25"], (",", "."), [1234.5, 12.25]),
        (["1 234,5", "1\u00a0234\u202f567"], (",", " "), [1234.5, 1234567]),
        (["1'234.5", "7"], (".", "'"), [1234.5, 7]),
        (["1,2,3"], None, []),
        (["12.34.56"], None, []),
        (["one"], None, []),
    ],
)
def test_how_numbers_are_written(fields, style, values):
    assert number_style(fields) == style
    if style:
        assert [number(field, *style) for field in fields] == values


def test_a_point_is_not_taken_for_a_group_of_thousands():
    """With the marks of 1.234,5, a field 1.5 is no number; it must not become 15."""
    assert number("1.500", ",", ".") == 1500.0 and math.isnan(number("1.5", ",", "."))
    table, _ = table_of({"x": [1.5, 1.567]})  # but a number that was no text is what it is
    assert [number(field, ",", ".") for field in table["x"]] == [1.5, 1.567]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        (["2024-01-31", "2024-02-01 10:30"], "iso"),
        (["2024-01-31T10:00:00Z", "2024-01-31T10:00:00+02:00"], "iso"),
        (["31.01.2024", "1.2.2024"], "%d.%m.%Y"),
        (["31/01/2024", "01/02/2024"], "%d/%m/%Y"),
        (["01/31/2024", "02/01/2024"], "%m/%d/%Y"),
        (["31.01.2024 10:30"], "%d.%m.%Y %H:%M"),
        (["20240131", "20240201"], None),
        (["31.13.2024"], None),
        (["2024"], None),
    ],
)
def test_how_dates_are_written(fields, form):
    assert date_style(fields) == form


def test_a_zone_is_turned_into_utc():
    assert moment("2024-01-31T00:30:00+02:00", "iso") == datetime.datetime(2024, 1, 30, 22, 30)


def test_a_date_is_its_place_in_the_range_and_in_year_and_week():
    column = Date("day", "2020-01-01", "2022-01-01", flag_missing=True)
    rows = column.encode(["2020-01-01", "2020-12-31", "2022-01-01", "1999-05-05", ""])
    width = (datetime.date(2022, 1, 1) - datetime.date(2020, 1, 1)).days
    assert rows[:4, 0] == pytest.approx([-1, 2 * 365 / width - 1, 1, -1], abs=1e-6)
    assert rows[:4, 1:3] ** 2 @ [1, 1] == pytest.approx(1, abs=1e-6)  # on the circle of the year
    assert rows[0, 2] == 1 and rows[1, 2] > 0.99  # the end of a year is near its beginning
    week = column.encode([f"2021-03-{day:02d}" for day in range(1, 9)])[:, 3:5]
    assert week[0] == pytest.approx(week[7], abs=1e-5) and np.abs(week[0] - week[3]).max() > 0.5
    assert rows[:, 5].tolist() == [0, 0, 0, 0, 1] and rows[4, :5].tolist() == [0] * 5
    with pytest.raises(InputError, match="line 7: 'soon' in column day is not a date"):
        column.encode(["soon"], [7])
    assert Date.from_entry("day", column.entry()) == column


@pytest.fixture
def orders(tmp_path):
    """A table as a shop would write it in Germany, with remarks of customers."""
    rng = np.random.default_rng(1)
    lines = ["paid;on;remark;code;late"]
    for i in range(120):
        text = " ".join(rng.choice(WORDS, 6))
        price = f"1.{i:03d},50" if i % 2 else f"{i},25"
        lines.append(
            f"{price};{1 + i % 28}.{1 + i % 12}.2023;{text};K{i};{'ja' if i % 3 else 'nein'}"
        )
    path = tmp_path / "orders.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_what_is_recognised_is_said(orders):
    with pytest.warns(PrivacyLeakWarning) as caught:
        data = load(orders, target="late", test_share=0)
    said = " ".join(str(one.message) for one in caught)
    for words in (
        "column paid holds numbers with a decimal comma and points between thousands",
        "column on holds dates, written as %d.%m.%Y",
        "column remark",
        "free text",
        "column code was left out",
    ):
        assert words in said and words in " ".join(data.notes)
    assert data.features[:2] == ("paid", "on") and data.classes == ("ja", "nein")
    low, high = 0.25, 1119.5
    assert data.train.x[1, 0] == pytest.approx(2 * (1001.5 - low) / (high - low) - 1, abs=1e-5)


def test_the_proposal_names_all_of_it_without_a_value(orders, tmp_path, capsys):
    assert main(["data", "schema", str(orders), "--target", "late"]) == 0
    text, warned = capsys.readouterr()
    assert "ε does not cover" in warned and "not from what is in the file" in text
    for line in ('decimal = ","', 'thousands = "."', 'type = "date"', 'format = "%d.%m.%Y"'):
        assert line in text
    assert "nein" not in text and "2023" not in text and "K7" not in text
    (tmp_path / "s.toml").write_text(text)
    assert read_schema(tmp_path / "s.toml")["columns"]["on"]["format"] == "%d.%m.%Y"


def test_the_proposal_with_values_loads_without_a_warning(orders, tmp_path, capsys):
    assert main(["data", "schema", str(orders), "--target", "late", "--values"]) == 0
    text, warned = capsys.readouterr()
    assert "WARNING" in text and "bounds, values and classes are guessed" in warned
    assert 'classes = ["ja", "nein"]' in text and "bounds = [2023-01-01, 2023-12-31]" in text
    assert "bounds = [0.0, 1200.0]" in text or "bounds = [0.0, 1120.0]" in text
    (tmp_path / "s.toml").write_text(text)
    data = load(orders, schema=tmp_path / "s.toml")
    assert data.private_statistics == ()


def test_a_regression_with_decimal_commas(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x;y\n" + "".join(f"{i};{i},5\n" for i in range(40)))
    with pytest.warns(PrivacyLeakWarning):
        data = load(path, target="y", test_share=0)
    assert data.task == "regression" and data.train.y.tolist() == [i + 0.5 for i in range(40)]
    (tmp_path / "s.toml").write_text(
        template({"x": list("1234"), "y": ["1,5", "2", "3", "4"]}, "y", True)
    )
    assert read_schema(tmp_path / "s.toml")["target_decimal"] == ","
    schema = {"target_bounds": [0, 50], "columns": {"x": {"type": "numeric", "bounds": [0, 40]}}}
    with pytest.raises(InputError, match=r"'0,5' in column y is not a finite number; .* decimal"):
        load(path, target="y", schema=schema)
    data = load(path, target="y", schema={**schema, "target_decimal": ","}, test_share=0)
    assert float(data.train.y[3]) == 3.5


def test_all_errors_of_a_schema_at_once(tmp_path):
    schema = {
        "tsak": "classification",
        "classes": ["a"],
        "columns": {
            "x": {"type": "numeric", "bounds": [2, 1], "decimal": ";"},
            "d": {"type": "date", "bounds": ["2020-02-30", "2021-01-01"]},
            "w": {"type": "word"},
        },
    }
    with pytest.raises(InputError) as caught:
        read_schema(schema)
    text = str(caught.value)
    assert text.startswith("the schema has 6 errors:\n- ")
    for words in (
        "'tsak'",
        "classes must",
        "bounds of 'x'",
        "decimal of",
        "bounds of 'd'",
        "'w' needs",
    ):
        assert words in text
    columns = {name: {"type": "ignore"} for name in ("x", "agee", "jop")}
    table = {"x": ["1"] * 20, "age": ["2"] * 20, "job": ["a"] * 20, "y": ["p", "q"] * 10}
    with pytest.raises(InputError) as caught:
        load(table, target="y", schema={"columns": columns})
    text = str(caught.value)
    assert "the schema has 4 errors" in text and "Did you mean 'age'" in text
    assert "column 'job' is not in the schema" in text


# -- tables in memory


def test_a_data_frame_is_a_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "age": [20 + i if i % 5 else None for i in range(40)],
            "when": pandas.date_range("2024-01-01", periods=40),
            "job": pandas.Categorical(["a", "b", None, "c"] * 10),
            "vip": [i % 2 == 0 for i in range(40)],
            "y": [i % 2 for i in range(40)],
        }
    )
    schema = {
        "target": "y",
        "classes": [0, 1],
        "columns": {
            "age": {"type": "numeric", "bounds": [0, 100], "missing": "flag"},
            "when": {"type": "date", "bounds": ["2023-01-01", "2025-01-01"]},
            "job": {"type": "categorical", "values": ["a", "b", "c"]},
            "vip": {"type": "categorical", "values": ["True", "False"]},
        },
    }
    there = load(frame, schema=schema, test_share=0)
    frame.to_csv(tmp_path / "t.csv", index=False)
    here = load(tmp_path / "t.csv", schema=schema, test_share=0)
    assert torch.equal(there.train.x, here.train.x) and torch.equal(there.train.y, here.train.y)
    assert there.name == "table" and there.private_statistics == ()
    mappings = frame.to_dict(orient="records")
    assert torch.equal(load(mappings, schema=schema, test_share=0).train.x, here.train.x)
    with pytest.raises(InputError, match="two columns of the table are called 'a'"):
        load(pandas.DataFrame([[1, 2, 3]], columns=["a", "a", "y"]), target="y")
    with pytest.raises(InputError, match="the table has 3 records"):
        load(frame[:3], schema=schema)
    with pytest.raises(InputError, match="no option depth"):
        load(frame, depth=3)
    with pytest.raises(InputError, match=r"a table is a DataFrame.*not int"):
        load(3, target="y")


def test_whole_numbers_with_gaps_are_still_categories():
    """In pandas a column 1, 2, missing is one of floats, and its words are 1.0 and 2.0."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"cp": [1, 2, None, 3] * 5, "y": ["a", "b"] * 10})
    schema = {
        "classes": ["a", "b"],
        "columns": {"cp": {"type": "categorical", "values": [1, 2, 3]}},
    }
    data = load(frame, target="y", schema=schema, test_share=0)
    assert data.train.x[:4].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]]
    text = load(
        {"cp": ["1.0", "2", "", "3.00"] * 5, "y": ["a", "b"] * 10}, target="y", schema=schema
    )
    assert torch.equal(torch.cat([text.train.x, text.test.x]).sum(0), torch.tensor([5.0, 5.0, 5.0]))
