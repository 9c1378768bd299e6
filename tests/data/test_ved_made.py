"""VED's canonical files, made small: what is a record, who is tested on, and what may never be a
feature."""

import zipfile
from xml.sax.saxutils import escape

import numpy as np
import pytest
import torch

from zetaclip.data import load
from zetaclip.errors import InputError

COLUMNS = [
    "DayNum",
    "VehId",
    "Trip",
    "Timestamp(ms)",
    "Latitude[deg]",
    "Longitude[deg]",
    "Vehicle Speed[km/h]",
    "MAF[g/sec]",
    "Engine RPM[RPM]",
    "Absolute Load[%]",
    "OAT[DegC]",
    "Fuel Rate[L/hr]",
    "Air Conditioning Power[kW]",
    "Air Conditioning Power[Watts]",
    "Heater Power[Watts]",
    "HV Battery Current[A]",
    "HV Battery SOC[%]",
    "HV Battery Voltage[V]",
    "Short Term Fuel Trim Bank 1[%]",
    "Short Term Fuel Trim Bank 2[%]",
    "Long Term Fuel Trim Bank 1[%]",
    "Long Term Fuel Trim Bank 2[%]",
]


def write_static(path, cars):
    """A table in the form of VED's static data: strings are shared, numbers are not."""
    header = [
        "VehId",
        "Vehicle Type",
        "Vehicle Class",
        "Engine Configuration & Displacement",
        "Transmission",
        "Drive Wheels",
        "Generalized_Weight",
    ]
    rows = [
        header,
        *(
            [number, kind, "Car", engine, "NO DATA", "NO DATA", weight]
            for number, kind, engine, weight in cars
        ),
    ]
    words = sorted({value for row in rows for value in row if isinstance(value, str)})
    lines = []
    for r, row in enumerate(rows, 1):
        cells = [
            f'<c r="{"ABCDEFG"[c]}{r}" t="s"><v>{words.index(v)}</v></c>'
            if isinstance(v, str)
            else f'<c r="{"ABCDEFG"[c]}{r}"><v>{v}</v></c>'
            for c, v in enumerate(row)
        ]
        lines.append(f'<row r="{r}">{"".join(cells)}</row>')
    main = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "xl/sharedStrings.xml",
            f"<sst {main}>{''.join(f'<si><t>{escape(w)}</t></si>' for w in words)}</sst>",
        )
        archive.writestr(
            "xl/worksheets/sheet1.xml",
            f"<worksheet {main}><sheetData>{''.join(lines)}</sheetData></worksheet>",
        )


def reading(vehicle, trip, second, speed, flow, engine=2000.0, load_=50.0):
    known = {
        "DayNum": 1.5, "VehId": vehicle, "Trip": trip, "Timestamp(ms)": int(1000 * second),
        "Vehicle Speed[km/h]": speed,
        "MAF[g/sec]": flow, "Engine RPM[RPM]": engine, "Absolute Load[%]": load_,
    }  # fmt: skip
    return ",".join(str(known.get(name, "NaN")) for name in COLUMNS)


def write_week(root, readings, name="VED_171101_week.csv"):
    (root / "ved").mkdir(exist_ok=True)
    (root / "ved" / name).write_text("\n".join([",".join(COLUMNS), *readings]) + "\n")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "ved").mkdir()
    cars = [(i, "ICE", "4-FI 2.0L T/C" if i % 2 else "6-FI 3.6L", 3500) for i in range(1, 41)]
    cars += [(98, "ICE", "8-DSL 6.7L T/C", 6000), (99, "HEV", "4-GAS/ELECTRIC 1.8L", "NO DATA")]
    write_static(tmp_path / "ved" / "VED_Static_Data_ICE&HEV.xlsx", cars)
    return tmp_path


def drive(vehicle, trip, minutes, flow=14.7, **options):
    return [reading(vehicle, trip, s, 36.0, flow, **options) for s in range(60 * minutes + 1)]


def test_a_steady_minute_has_the_fuel_rate_of_its_air(root):
    write_week(
        root,
        [line for car in range(1, 41) for line in drive(car, car, 3, flow=14.7 * (1 + car / 100))],
    )
    ved = load("ved", root)
    assert len(ved.train) + len(ved.test) == 40 * 3
    rates = torch.cat([ved.train.y, ved.test.y]).unique()
    assert torch.allclose(rates, torch.tensor([1 + car / 100 for car in range(1, 41)]), atol=1e-5)
    assert np.allclose(ved.train.x[:, 0], 2 * 36 / 160 - 1) and np.allclose(ved.train.x[:, 1], -1)
    # No vehicle on both sides: each has a fuel rate of its own here.
    assert not set(ved.train.y.tolist()) & set(ved.test.y.tolist())
    assert 2 <= len(ved.test.y.unique()) <= 16


def test_what_determines_the_target_never_reaches_the_features(root):
    def features(flow, load_):
        lines = [
            line for car in range(1, 41) for line in drive(car, car, 2, flow=flow, load_=load_)
        ]
        write_week(root, lines)
        return load("ved", root)

    a, b = features(14.7, 10.0), features(29.4, 90.0)
    assert torch.equal(a.train.x, b.train.x) and torch.allclose(2 * a.train.y, b.train.y)


def test_diesel_and_hybrids_are_left_out(root):
    lines = [line for car in (*range(1, 41), 98, 99) for line in drive(car, 1, 2)]
    write_week(root, lines)
    ved, more = load("ved", root), load("ved", root, hybrids=True)
    assert len(ved.train) + len(ved.test) == 80 and len(more.train) + len(more.test) == 82
    assert more.name == "ved-hybrids"


def test_a_trip_has_at_most_so_many_records_and_does_not_decide_over_others(root):
    flows = {car: 14.7 * (1 + car / 100) for car in range(1, 41)}
    lines = {car: drive(car, 7, 12, flow=flows[car]) for car in flows}
    # In every minute another speed, so that the chosen minutes can be told apart.
    for car in lines:
        lines[car] = [reading(car, 7, s, 5.0 * (s // 60), flows[car]) for s in range(12 * 60 + 1)]
    write_week(root, [line for part in lines.values() for line in part])
    ved = load("ved", root, segments_per_trip=4)
    _, counts = torch.cat([ved.train.y, ved.test.y]).unique(return_counts=True)
    assert counts.tolist() == [4] * 40 and ved.records_per_group == 4
    chosen = {
        tuple(sorted(ved.train.x[ved.train.y == y][:, 0].tolist())) for y in ved.train.y.unique()
    }
    assert len(chosen) > 5  # not the same minutes in every trip
    write_week(root, [line for car, part in lines.items() if car != 3 for line in part])
    fewer = load("ved", root, segments_per_trip=4)
    for before, after in ((ved.train, fewer.train), (ved.test, fewer.test)):
        others = (before.y - 1.03).abs() > 1e-4
        assert torch.equal(before.x[others], after.x)
    assert len(load("ved", root, segments_per_trip=100).train) > len(ved.train)


def test_gaps_and_unknown_values_do_not_make_a_record(root):
    silent = [reading(1, 1, s, 50.0, "NaN") for s in range(61)]
    short = [reading(2, 1, s, 50.0, 20.0) for s in range(31)]
    sparse = [reading(3, 1, s, 50.0, 20.0) for s in range(0, 61, 20)]  # 5 s of every 20 are known
    write_week(
        root,
        [*silent, *short, *sparse, *(line for car in range(4, 41) for line in drive(car, 1, 1))],
    )
    ved = load("ved", root)
    assert len(ved.train) + len(ved.test) == 37


def test_weeks_are_joined_and_overlaps_dropped(root):
    lines = [line for car in range(1, 41) for line in drive(car, 1, 1)]
    write_week(root, lines)
    write_week(
        root,
        [*lines, *(line for car in range(1, 41) for line in drive(car, 2, 1))],
        "VED_171108_week.csv",
    )
    ved = load("ved", root)
    assert len(ved.train) + len(ved.test) == 80 and "2 weeks" in ved.notes[0]


def test_files_that_do_not_fit(root):
    (root / "ved" / "VED_171101_week.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="as a week of VED"):
        load("ved", root)
    write_week(root, drive(1, 1, 1))
    with pytest.raises(InputError, match="too few segments"):
        load("ved", root)
    for options in ({"segments_per_trip": 0}, {"test_share": 1.0}):
        with pytest.raises(InputError, match="must"):
            load("ved", root, **options)
    (root / "ved" / "VED_Static_Data_ICE&HEV.xlsx").write_bytes(b"not a table")
    with pytest.raises(InputError, match=r"as an \.xlsx table"):
        load("ved", root)
