"""The Vehicle Energy Dataset: the mean fuel rate of a minute of driving, from speed and engine.

One record is a 60 s segment of a trip. Its target is the mean fuel rate in g/s: mass air flow
divided by 14.7, the stoichiometric ratio of petrol. Mass air flow and absolute load determine the
target, so they are never features; neither are the fuel trims, which correct it.
"""

from __future__ import annotations

import csv
import gzip
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from ..errors import InputError
from .columns import Numeric
from .dataset import Dataset, Split
from .files import cached
from .holdout import owner_numbers
from .inputs import TableInput
from .places import Place
from .xlsx import sheet

SECONDS = 60
AIR_FUEL_RATIO = 14.7
TARGET_RANGE = (0.0, 5.0)  # g/s: the upper end is 24 litres an hour for a whole minute
_COVERED = 45.0  # seconds of a segment in which speed, engine speed and air flow must be known
_GAP = 5.0  # a reading is valid until the next one, but at most this many seconds

# A feature and the range that is mapped to [-1, 1]: typical of road cars, not computed from these.
FEATURES: tuple[tuple[str, float, float], ...] = (
    ("mean speed [km/h]", 0, 160),
    ("deviation of speed [km/h]", 0, 60),
    ("largest speed [km/h]", 0, 160),
    ("share of time at rest", 0, 1),
    ("mean acceleration [m/s2]", 0, 2),
    ("mean braking [m/s2]", 0, 2),
    ("mean power of acceleration [W/kg]", 0, 20),
    ("mean cubed speed [(100 km/h)3]", 0, 2),
    ("mean engine speed [1/min]", 0, 5000),
    ("deviation of engine speed [1/min]", 0, 2000),
    ("largest engine speed [1/min]", 0, 7000),
    ("displacement [l]", 1, 7),
    ("cylinders", 3, 10),
    ("turbocharged", 0, 1),
    ("weight class [lb]", 2000, 6500),
    ("weight class: missing", 0, 1),
)
_COLUMNS = (
    "VehId",
    "Trip",
    "Timestamp(ms)",
    "Vehicle Speed[km/h]",
    "MAF[g/sec]",
    "Engine RPM[RPM]",
)
_CACHE = "ved-segments-1"  # increase the number when ``segments`` changes
_DRIVING = 11  # the first 11 features come from driving, the others from the car


@dataclass(frozen=True)
class Car:
    """Static data of a petrol car; NaN where unknown.

    Attributes:
        displacement: Litres.
        cylinders: Their number.
        turbo: 1 with a turbocharger, otherwise 0.
        weight: Weight class in pounds.
    """

    displacement: float
    cylinders: float
    turbo: float
    weight: float


def ved(
    place: Place,
    *,
    segments_per_trip: int = 10,
    test_share: float = 0.2,
    seed: int = 0,
    hybrids: bool = False,
    unit: str | None = None,
    rows_per_unit: int | None = None,
) -> Dataset:
    """Segments of trips of petrol cars, split by vehicle.

    Args:
        place: The files that were found.
        segments_per_trip: The largest number of segments that is kept of one trip.
        test_share: Expected share of the vehicles that is held out for testing.
        seed: Public seed of the split and of the kept segments.
        hybrids: Also use cars with an additional electric motor.
        unit: "trip" or "vehicle": ε is for one of these with all its segments (default: for one
            segment).
        rows_per_unit: The largest number of segments that a unit brings into a batch (default: 10).

    Returns:
        A regression.

    Raises:
        InputError: A file is damaged, there are too few segments, or an argument has a value that
            is not allowed.

    **Guarantee.** Whether a vehicle is for testing, and which segments of a long trip are kept,
    depends only on their numbers and the public seed. So a trip has at most ``segments_per_trip``
    records, and no trip influences another.
    """
    if (
        isinstance(segments_per_trip, bool)
        or not isinstance(segments_per_trip, int)
        or segments_per_trip < 1
    ):
        raise InputError(
            f"segments_per_trip must be a whole number, at least 1, not {segments_per_trip!r}"
        )
    if not 0 < test_share < 1:
        raise InputError(f"test_share must lie between 0 and 1, not {test_share!r}")
    if unit not in (None, "trip", "vehicle"):
        raise InputError(f"unit is trip or vehicle, not {unit!r}")
    if unit is None and rows_per_unit is not None:
        raise InputError("rows_per_unit needs unit (trip or vehicle)")
    static, *weeks = place.files
    cars = petrol_cars(static, hybrids)
    rows = np.concatenate([cached(_CACHE, [week], partial(segments, week)) for week in weeks])
    rows = rows[np.isin(rows[:, 0], list(cars))]
    rows = _unique(rows)
    rows = rows[_kept(rows, segments_per_trip, seed)]
    testing = _uniform(seed, 1, rows[:, 0]) < test_share
    if not len(rows) or testing.all() or not testing.any():
        raise InputError(f"too few segments of petrol cars in {place.folder} to train and to test")
    x, y = _features(rows, cars), np.clip(rows[:, 3], *TARGET_RANGE)
    train, test = _split(x, y, ~testing), _split(x, y, testing)
    owners = None
    if unit is not None:
        import torch

        numbers = rows[~testing, : 1 if unit == "vehicle" else 2].astype(np.int64)
        owners = torch.from_numpy(owner_numbers(map(tuple, numbers.tolist())))
    return Dataset(
        name="ved" if not hybrids else "ved-hybrids",
        task="regression",
        train=train,
        test=test,
        outputs=1,
        unit=f"one {SECONDS} s segment of a trip"
        if unit is None
        else f"one {unit} with all its segments",
        notes=(
            f"the files of {len(weeks)} week{'s' if len(weeks) > 1 else ''} of VED's 54 were "
            f"found; at most {segments_per_trip} segments of a trip are kept, "
            "chosen by the public seed",
            f"split by vehicle: a share of {test_share:g} of the vehicles, "
            f"by the public seed {seed}, is for testing",
            "the target is clipped to its declared range, "
            f"{TARGET_RANGE[0]:g} to {TARGET_RANGE[1]:g} g/s",
        ),
        nominal_size=len(train) if owners is None else len(owners.unique()),
        target_range=TARGET_RANGE,
        target_unit="g/s",
        records_per_group=segments_per_trip if unit is None else 1,
        group="trip" if unit is None else "",
        owners=owners,
        rows_per_unit=None if unit is None else (rows_per_unit or 10),
        features=tuple(name for name, _, _ in FEATURES),
        target="mean fuel rate [g/s]",
        inputs=TableInput(tuple(Numeric(*feature) for feature in FEATURES)),
    )


def segments(path: Path) -> np.ndarray:
    """Every usable segment of a week.

    Means are over time: a reading is valid until the next one, but at most five seconds.

    Args:
        path: The file of the week.

    Returns:
        One row per segment: vehicle, trip, number of the minute, mean fuel rate, and the driving
        features.

    Raises:
        InputError: The file cannot be read.
    """
    vehicle, trip, stamp, speed, flow, engine = _readings(path)
    order = np.lexsort((stamp, trip, vehicle))
    vehicle, trip, stamp, speed, flow, engine = (
        part[order] for part in (vehicle, trip, stamp, speed, flow, engine)
    )
    same = np.r_[(vehicle[1:] == vehicle[:-1]) & (trip[1:] == trip[:-1]), False]
    gap = np.where(same, np.r_[np.diff(stamp), 0.0] / 1000.0, 0.0)
    minute = np.floor(stamp / (1000.0 * SECONDS))
    left = SECONDS - (stamp / 1000.0 - SECONDS * minute)  # of the minute
    known = ~(np.isnan(speed) | np.isnan(flow) | np.isnan(engine))
    weight = np.where(known, np.minimum(np.minimum(gap, _GAP), left), 0.0)
    start = np.r_[True, ~same[:-1] | (np.diff(minute) != 0)]
    group = np.cumsum(start) - 1
    total = np.bincount(group, weight)
    heads = np.flatnonzero(start)

    def mean(values: np.ndarray) -> np.ndarray:
        used = np.where(weight > 0, values, 0.0)
        with np.errstate(invalid="ignore"):  # some segments have no valid reading: 0 / 0
            return np.bincount(group, used * weight) / total

    def largest(values: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(np.where(weight > 0, values, 0.0), heads)

    following = np.r_[speed[1:], np.nan]
    usable = same & (gap > 0) & (gap <= _GAP) & ~np.isnan(following) & (weight > 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        pull = np.where(usable, (following - speed) / 3.6 / gap, 0.0)
    speed_mean, engine_mean = mean(speed), mean(engine)
    table = np.stack(
        [
            vehicle[heads],
            trip[heads],
            minute[heads],
            mean(flow) / AIR_FUEL_RATIO,
            speed_mean,
            np.sqrt(np.maximum(mean(speed**2) - speed_mean**2, 0.0)),
            largest(speed),
            mean((speed < 1.0).astype(float)),
            mean(np.maximum(pull, 0.0)),
            mean(np.maximum(-pull, 0.0)),
            mean(np.maximum(pull, 0.0) * speed / 3.6),
            mean((speed / 100.0) ** 3),
            engine_mean,
            np.sqrt(np.maximum(mean(engine**2) - engine_mean**2, 0.0)),
            largest(engine),
        ],
        axis=1,
    )
    return table[total >= _COVERED]


def petrol_cars(path: Path, hybrids: bool = False) -> dict[int, Car]:
    """The petrol cars of the static data.

    Args:
        path: The .xlsx file of the static data.
        hybrids: Also list cars with an additional electric motor.

    Returns:
        Cars by vehicle number.

    Raises:
        InputError: The file cannot be read or lacks a column.
    """
    cars: dict[int, Car] = {}
    header, *rows = sheet(path)
    try:
        places = [
            header.index(name)
            for name in ("VehId", "Vehicle Type", "Engine Configuration & Displacement")
        ]
        weight_at = header.index("Generalized_Weight")
    except ValueError as error:
        raise InputError(f"{path} lacks a column of VED's static data: {error}") from error
    for row in rows:
        number, kind, engine = (row[i] for i in places)
        if kind not in (("ICE", "HEV") if hybrids else ("ICE",)) or "DSL" in engine.upper():
            continue
        litres = re.search(r"(\d+\.\d+)\s*L", engine)
        cylinders = re.match(r"V?(\d+)", engine)
        cars[int(float(number))] = Car(
            displacement=float(litres.group(1)) if litres else np.nan,
            cylinders=float(cylinders.group(1)) if cylinders else np.nan,
            turbo=float("T/C" in engine),
            weight=float(row[weight_at])
            if re.fullmatch(r"\d+(\.\d+)?", row[weight_at])
            else np.nan,
        )
    return cars


def _readings(path: Path) -> list[np.ndarray]:
    """The columns of ``_COLUMNS``, by their names in the header."""
    try:
        with _open(path) as file:
            header = next(csv.reader(file), [])
            columns = [header.index(name) for name in _COLUMNS]
            table = np.loadtxt(file, delimiter=",", usecols=columns, ndmin=2)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"cannot read {path} as a week of VED: {error}") from error
    return list(table.T)


def _open(path: Path) -> IO[str]:
    return (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else open(path, encoding="utf-8")
    )


def _features(rows: np.ndarray, cars: dict[int, Car]) -> np.ndarray:
    static = np.array(
        [
            (car.displacement, car.cylinders, car.turbo, car.weight, float(np.isnan(car.weight)))
            for car in (cars[int(number)] for number in rows[:, 0])
        ]
    )
    raw = np.concatenate([rows[:, 4 : 4 + _DRIVING], static], axis=1)
    low, high = np.array([bounds[1:] for bounds in FEATURES], dtype=np.float64).T
    scaled = 2.0 * (np.clip(raw, low, high) - low) / (high - low) - 1.0
    return np.nan_to_num(scaled, nan=0.0)


def _unique(rows: np.ndarray) -> np.ndarray:
    """Each minute of each trip once, in order, because weekly files may overlap."""
    _, first = np.unique(rows[:, :3], axis=0, return_index=True)
    return rows[first]


def _kept(rows: np.ndarray, per_trip: int, seed: int) -> np.ndarray:
    """The segments of each trip with the smallest draws, which depend on their own numbers only."""
    draws = _uniform(seed, 2, *rows[:, :3].T)
    order = np.lexsort((draws, rows[:, 1], rows[:, 0]))
    trips = rows[order][:, :2]
    new = np.r_[True, (trips[1:] != trips[:-1]).any(axis=1)] if len(rows) else np.zeros(0, bool)
    start = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    keep = np.zeros(len(rows), bool)
    keep[order] = np.arange(len(rows)) - start < per_trip
    return keep


def _uniform(seed: int, stream: int, *numbers: np.ndarray) -> np.ndarray:
    """A number in [0, 1) per row, a fixed function of its integers and the seed (SplitMix64)."""
    with np.errstate(over="ignore"):
        state = np.full(
            len(numbers[0]), np.uint64(seed) * np.uint64(4) + np.uint64(stream), np.uint64
        )
        for values in numbers:
            state = _mix(
                state + np.uint64(0x9E3779B97F4A7C15) + values.astype(np.int64).astype(np.uint64)
            )
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed


def _split(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> Split:
    import torch

    return Split(
        torch.from_numpy(x[rows].astype(np.float32)), torch.from_numpy(y[rows].astype(np.float32))
    )
