"""Tables of the user's own: declared schemas, inference with a warning, and everything that can be
wrong with a file."""

import gzip
import json
import warnings

import numpy as np
import pytest
import torch

from zetaclip.data import load
from zetaclip.data.declared import read_schema
from zetaclip.data.reading import read_table
from zetaclip.data.template import template
from zetaclip.errors import InputError, OwnerWarning, PrivacyLeakWarning

HEADER = "age,job,code,income"
ROWS = [
    f"{20 + i},{'abc'[i % 3]},{'XY'[i % 2]}{i},{'yes' if i % 4 == 0 else 'no'}" for i in range(20)
]
SCHEMA = {
    "target": "income",
    "classes": ["no", "yes"],
    "columns": {
        "age": {"type": "numeric", "bounds": [0, 100]},
        "job": {"type": "categorical", "values": ["a", "b", "c", "d"]},
        "code": {"type": "ignore"},
    },
}


def write(path, lines, encoding="utf-8"):
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    return path


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "people.csv", [HEADER, *ROWS])


def test_whether_a_declared_class_occurs_decides_nothing(tmp_path):
    """If it did, the existence of a result would tell of one record."""
    lines = [f"{20 + i},a,X,no" for i in range(20)]
    with pytest.warns(OwnerWarning, match="every record is of the class 'no'"):
        data = load(write(tmp_path / "one.csv", [HEADER, *lines]), schema=SCHEMA)
    assert data.classes == ("no", "yes") and float(data.train.y.max()) == 0
    with pytest.raises(InputError, match="one class only"):
        load(write(tmp_path / "two.csv", [HEADER, *lines]), target="income")


def changed(**columns):
    return {**SCHEMA, "columns": {**SCHEMA["columns"], **columns}}


def test_a_declared_table_looks_at_nothing(table):
    people = load(table, schema=SCHEMA)  # warnings are errors here
    assert people.private_statistics == () and not people.public and people.nominal_size is None
    assert (people.task, people.outputs, people.unit, people.name) == (
        "binary",
        1,
        "one row",
        "people.csv",
    )
    assert people.features == ("age", "job=a", "job=b", "job=c", "job=d")
    assert len(people.train) + len(people.test) == 20 and len(people.train) > len(people.test)
    rows = torch.cat([people.train.x, people.test.x])
    rows = rows[rows[:, 0].argsort()]
    for i, row in enumerate(rows):
        assert row.tolist() == pytest.approx(
            [2 * (20 + i) / 100 - 1, *(float(i % 3 == k) for k in range(4))]
        )
    assert people.train.y.dtype == torch.float32
    both = torch.cat([people.train.y, people.test.y])
    assert both.sum() == 5
    assert "held out" in " ".join(people.notes) and "seed 0" in " ".join(people.notes)


def test_a_row_is_encoded_without_its_neighbours(tmp_path, table):
    whole = load(table, schema=SCHEMA, test_share=0)
    fewer = load(write(tmp_path / "fewer.csv", [HEADER, *ROWS[:-1]]), schema=SCHEMA, test_share=0)
    assert torch.equal(whole.train.x[:-1], fewer.train.x) and whole.test is None


@pytest.mark.parametrize("form", ["toml", "json", "dict"])
def test_schemas_come_as_toml_json_or_mapping(tmp_path, table, form):
    if form == "toml":
        source = write(
            tmp_path / "s.toml",
            [
                'target = "income"',
                'classes = ["no", "yes"]',
                "[columns.age]",
                'type = "numeric"',
                "bounds = [0, 100]",
                "[columns.job]",
                'type = "categorical"',
                'values = ["a", "b", "c", "d"]',
                "[columns.code]",
                'type = "ignore"',
            ],
        )
    else:
        source = SCHEMA
        if form == "json":
            source = write(tmp_path / "s.json", [json.dumps(SCHEMA)])
    assert torch.equal(load(table, schema=source).train.x, load(table, schema=SCHEMA).train.x)


def test_inference_warns_and_says_what_it_saw(table):
    with pytest.warns(PrivacyLeakWarning, match="bounds of age.*classes of income"):
        people = load(table, target="income")
    assert people.features == (
        "age",
        "job=a",
        "job=b",
        "job=c",
        *(f"code={r.split(',')[2]}" for r in sorted(ROWS, key=lambda r: r.split(",")[2])),
    )
    assert people.classes == ("no", "yes")
    assert {"bounds of age", "values of job", "classes of income"} <= set(people.private_statistics)
    half = {**SCHEMA, "columns": {**SCHEMA["columns"], "age": {"type": "numeric"}}}
    with pytest.warns(PrivacyLeakWarning) as caught:
        people = load(table, schema=half)
    assert people.private_statistics == ("bounds of age",) and len(caught) == 1


def test_a_regression_clips_its_target_to_declared_bounds(tmp_path):
    lines = ["x,y", *(f"{i},{1000 * i + 0.5}" for i in range(20))]
    path = write(tmp_path / "t.csv", lines)
    schema = {"columns": {"x": {"type": "numeric", "bounds": [0, 20]}}, "target_bounds": [0, 10000]}
    data = load(path, target="y", schema=schema)
    assert (data.task, data.outputs, data.target_range) == ("regression", 1, (0.0, 10000.0))
    assert float(torch.cat([data.train.y, data.test.y]).max()) == 10000.0
    assert torch.allclose(
        data.encode_target(torch.tensor([0.0, 5000.0])), torch.tensor([-1.0, 0.0])
    )
    with pytest.warns(
        PrivacyLeakWarning, match="bounds of x, the target y; task, from the values of y"
    ):
        assert load(path, target="y").target_range == (0.5, 19000.5)
    with pytest.raises(InputError, match="the target x has another value in every row"):
        load(path, target="x", task="classification")
    classes = [str(i) for i in range(20)]
    with pytest.warns(PrivacyLeakWarning):  # of the columns; the classes are declared
        declared = load(path, target="x", schema={"classes": classes})
    assert declared.outputs == 20


def test_missing_and_unknown_values_have_a_stated_treatment(tmp_path):
    rows = [
        "?,a,1,no",
        ",zzz,1,yes",
        "NaN,NA,1,no",
        "1000,b,1,yes",
        "-5, c ,1,no",
        *(f"50,a,{i},no" for i in range(8)),
    ]
    path = write(tmp_path / "t.csv", [HEADER, *rows])
    schema = changed(age={"type": "numeric", "bounds": [0, 100], "missing": "flag"})
    data = load(path, schema=schema, test_share=0)
    assert data.features[:2] == ("age", "age: missing")
    assert data.train.x[:5, :2].tolist() == [[0, 1], [0, 1], [0, 1], [1, 0], [-1, 0]]
    assert data.train.x[:5, 2:].sum(1).tolist() == [1, 0, 0, 1, 1]
    assert "missing or unknown category is a group of zeros" in data.notes[0]
    # How often it happened is private, so the notes of two files with different accidents are the
    # same.
    clean = write(
        tmp_path / "clean.csv", [HEADER, *(f"50,a,{i},{'no' if i else 'yes'}" for i in range(12))]
    )
    assert load(clean, schema=schema, test_share=0).notes == data.notes
    with pytest.warns(PrivacyLeakWarning):
        inferred = load(path, target="income", test_share=0)
    assert "age: missing" in inferred.features


def test_columns_that_say_nothing_are_left_out_and_named(tmp_path):
    rows = [f"{i},7,same,,name{i},{'ab'[i % 2]}" for i in range(150)]
    path = write(tmp_path / "t.csv", ["x,constant,word,empty,name,y", *rows])
    with pytest.warns(PrivacyLeakWarning):
        data = load(path, target="y")
    assert data.features == ("x",)
    named = " ".join(data.notes)
    assert all(
        f"column {name} was left out" in named for name in ("constant", "word", "empty", "name")
    )


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], {}, "is empty: the first line must name the columns"),
        ([HEADER], {}, "has no records"),
        ([HEADER, *ROWS[:5]], {}, "5 records; at least 10"),
        (
            [HEADER, *ROWS],
            {"target": "incme"},
            r"no column 'incme'. Did you mean 'income'\? The file has age, job",
        ),
        ([HEADER, *ROWS], {"target": None}, "name the column to predict with target="),
        ([HEADER, *ROWS, "1,2,3"], {}, "line 22: 3 fields, but the header has 4"),
        (["age,age,x,income", *ROWS], {}, "two columns are called 'age'"),
        ([",job,x,income", *ROWS], {}, "column 1 has no name"),
        ([HEADER, *(r.replace("yes", "no") for r in ROWS)], {}, "one class only"),
        ([HEADER, *ROWS], {"task": "ranking"}, "must be classification or regression"),
        (
            [HEADER, *ROWS],
            {"target": "job", "task": "regression"},
            "job is not a column of finite numbers",
        ),
        ([HEADER, *ROWS], {"test_share": 1.5}, "test_share must be"),
        ([HEADER, *ROWS], {"test_share": 0.001}, "too few to hold out"),
        ([HEADER, *ROWS], {"depth": 3}, "no option depth"),
        ([HEADER, '"unclosed', *ROWS], {}, "cannot read"),
    ],
)
def test_files_and_options_that_cannot_be_used(tmp_path, lines, options, message):
    path = tmp_path / "bad.csv"
    path.write_text("".join(line + "\n" for line in lines))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyLeakWarning)
        with pytest.raises(InputError, match=message):
            load(path, **{"target": "income", **options})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (changed(age={"type": "numeric", "bounds": [5, 5]}), "two numbers, the lower first"),
        (changed(age={"type": "numeric", "bounds": [0, float("inf")]}), "two numbers"),
        (changed(age={"type": "number"}), "needs a type, one of numeric, categorical, date"),
        (changed(age={"type": "numeric", "low": 3}), "has no 'low'; it has type, bounds"),
        (changed(job={"type": "categorical", "values": ["a", "a"]}), "at least two different"),
        (changed(job={"type": "categorical", "values": [True, False]}), "words or numbers"),
        (
            changed(agee={"type": "ignore"}),
            r"names a column that the file lacks.*Did you mean 'age'",
        ),
        ({**SCHEMA, "clases": ["a"]}, "unknown key 'clases'"),
        ({**SCHEMA, "classes": ["no", "maybe"]}, "line 2: 'yes' is not among the declared classes"),
        (
            {**SCHEMA, "columns": {"age": {"type": "numeric", "bounds": [0, 1]}}},
            "column 'job' is not in the schema",
        ),
        (
            changed(code={"type": "numeric", "bounds": [0, 1]}),
            "line 2: 'X0' in column code is not a finite number",
        ),
        (changed(age={"type": "ignore"}, job={"type": "ignore"}), "no column is left"),
    ],
)
def test_schemas_that_do_not_fit(table, schema, message):
    with pytest.raises(InputError, match=message):
        load(table, schema=schema)


def test_schema_files_that_cannot_be_read(tmp_path, table):
    with pytest.raises(InputError, match="cannot read the schema"):
        load(table, schema=tmp_path / "none.toml")
    with pytest.raises(InputError, match=r"s.toml is not valid"):
        load(table, schema=write(tmp_path / "s.toml", ["a = = 3"]))
    with pytest.raises(InputError, match=r"a \.toml or \.json file"):
        load(table, schema=write(tmp_path / "s.yaml", ["a: 3"]))


def test_other_delimiters_packing_and_a_byte_order_mark(tmp_path, table):
    expected = load(table, schema=SCHEMA).train.x
    semicolons = write(
        tmp_path / "s.csv", [line.replace(",", ";") for line in [HEADER, *ROWS]], "utf-8-sig"
    )
    assert torch.equal(load(semicolons, schema=SCHEMA).train.x, expected)
    packed = tmp_path / "p.csv.gz"
    packed.write_bytes(
        gzip.compress(table.read_bytes().replace(b"\n", b"\r\n\r\n"))
    )  # with empty lines
    assert torch.equal(load(packed, schema=SCHEMA).train.x, expected)


def test_the_split_follows_the_public_seed(table):
    a, b, c = (load(table, schema=SCHEMA, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.test.x, b.test.x) and not torch.equal(a.test.x, c.test.x)


def test_parquet(tmp_path, table, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "age": [20 + i for i in range(20)],
        "job": ["abc"[i % 3] for i in range(20)],
        "code": [None] * 20,
        "income": ["yes" if i % 4 == 0 else "no" for i in range(20)],
    }
    path = tmp_path / "people.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    assert torch.equal(load(path, schema=SCHEMA).train.x, load(table, schema=SCHEMA).train.x)
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(InputError, match="cannot read"):
        load(path, schema=SCHEMA)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"needs pyarrow: pip install 'zetaclip\[parquet\]'"):
        load(path, schema=SCHEMA)


def test_the_template_holds_no_value_of_the_data_and_loads_again(tmp_path, table):
    text = template(read_table(table)[0], "income")
    assert '[columns."age"]\ntype = "numeric"' in text and "yes" not in text and "39" not in text
    path = write(tmp_path / "s.toml", [text])
    assert set(read_schema(path)["columns"]) == {"age", "job", "code"}
    with pytest.warns(PrivacyLeakWarning, match="bounds of age"):
        load(table, schema=path)


def test_multiclass_labels_are_whole_numbers(tmp_path):
    rows = [f"{i},{(10, 9, 2)[i % 3]}" for i in range(30)]
    with pytest.warns(PrivacyLeakWarning):
        data = load(write(tmp_path / "t.csv", ["x,y", *rows]), target="y", test_share=0)
    assert (data.task, data.outputs, data.classes) == (
        "classification",
        3,
        ("2", "9", "10"),
    )  # in order of the numbers
    assert data.train.y.tolist() == [2, 1, 0] * 10 and data.train.y.dtype == torch.int64
    assert np.allclose(data.train.x[:, 0], np.linspace(-1, 1, 30), atol=1e-6)
