"""Two sets of the UCI repository: Adult (census income) and Heart Disease (four clinics)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import InputError
from .columns import Categorical, Column, Numeric, encode, feature_names, is_missing
from .dataset import Dataset, Split
from .files import read_bytes, words
from .inputs import TableInput
from .places import CLINICS, Place

# Vocabularies as in adult.names. Ranges: the survey asks people above 16 and top-codes age at 90,
# hours have two digits, and there are sixteen levels of education. Gains and losses are mostly 0
# and otherwise span several orders of magnitude, hence log.
ADULT: tuple[Column, ...] = (
    Numeric("age", 17, 90),
    Categorical(
        "workclass",
        (
            "Private",
            "Self-emp-not-inc",
            "Self-emp-inc",
            "Federal-gov",
            "Local-gov",
            "State-gov",
            "Without-pay",
            "Never-worked",
        ),
    ),
    Numeric("fnlwgt", 0, 1_500_000),
    Categorical(
        "education",
        words(
            "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
            "Masters 1st-4th 10th Doctorate 5th-6th Preschool"
        ),
    ),
    Numeric("education-num", 1, 16),
    Categorical(
        "marital-status",
        words(
            "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
            "Married-AF-spouse"
        ),
    ),
    Categorical(
        "occupation",
        words(
            "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
            "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
            "Priv-house-serv Protective-serv Armed-Forces"
        ),
    ),
    Categorical(
        "relationship",
        ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    ),
    Categorical("race", ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black")),
    Categorical("sex", ("Female", "Male")),
    Numeric("capital-gain", 0, 99_999, log=True),
    Numeric("capital-loss", 0, 5_000, log=True),
    Numeric("hours-per-week", 1, 99),
    Categorical(
        "native-country",
        words(
            "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) "
            "India Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica "
            "Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti "
            "Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
            "Trinadad&Tobago Peru Hong Holand-Netherlands"
        ),
    ),
)
# Values as in heart-disease.names; ranges are those of adult patients in general, not of these.
HEART: tuple[Column, ...] = (
    Numeric("age", 20, 80),
    Categorical("sex", ("0", "1")),
    Categorical("cp", ("1", "2", "3", "4")),
    Numeric("trestbps", 80, 200, flag_missing=True),
    Numeric("chol", 100, 600, flag_missing=True),
    Categorical("fbs", ("0", "1")),
    Categorical("restecg", ("0", "1", "2")),
    Numeric("thalach", 60, 220, flag_missing=True),
    Categorical("exang", ("0", "1")),
    Numeric("oldpeak", -3, 7, flag_missing=True),
    Categorical("slope", ("1", "2", "3")),
    Categorical("ca", ("0", "1", "2", "3")),
    Categorical("thal", ("3", "6", "7")),
)
_ZERO_IS_MISSING = ("trestbps", "chol")  # 0 is impossible for a living patient


def adult(place: Place) -> Dataset:
    """Census income: does a person earn more than 50,000 dollars a year?

    32,561 people are for training and 16,281 for testing, as published.

    Args:
        place: The files that were found.

    Returns:
        A binary task.

    Raises:
        InputError: A file is damaged.
    """
    train, test = (_adult_split(path) for path in place.files[:2])
    return Dataset(
        name="adult",
        task="binary",
        train=train,
        test=test,
        outputs=1,
        unit="one person",
        classes=("<=50K", ">50K"),
        notes=("a missing value ('?') is a group of zeros",),
        nominal_size=len(train),
        features=feature_names(ADULT),
        target="income",
        inputs=TableInput(ADULT),
    )


def _adult_split(path: Path) -> Split:
    lines = read_bytes(path).decode("utf-8", "replace").splitlines()
    rows = [
        [field.strip() for field in line.split(",")]
        for line in lines
        if line.strip() and line[0] != "|"
    ]
    _check_width(path, rows, len(ADULT) + 1)
    labels = [row[-1].rstrip(".") for row in rows]
    if set(labels) - {"<=50K", ">50K"}:
        raise InputError(f"{path} has a label other than <=50K and >50K")
    table = {column.name: [row[i] for row in rows] for i, column in enumerate(ADULT)}
    return _split(encode(ADULT, table), np.array([label == ">50K" for label in labels]))


def heart(
    place: Place, *, clinics: str | Sequence[str] = CLINICS, test_share: float = 0.2, seed: int = 0
) -> Dataset:
    """Patients of up to four clinics: is a coronary artery narrowed by more than half?

    Args:
        place: The files that were found.
        clinics: One clinic or several of ``CLINICS``.
        test_share: Share of the patients that is held out, per clinic and diagnosis.
        seed: Public seed of the split.

    Returns:
        A binary task. In new rows a missing blood pressure or cholesterol must be empty, not 0.

    Raises:
        InputError: A file is damaged, or an argument has a value that is not allowed.
    """
    chosen = [clinics] if isinstance(clinics, str) else list(clinics)
    if not chosen or len(set(chosen)) != len(chosen) or set(chosen) - set(CLINICS):
        raise InputError(f"clinics are some of {', '.join(CLINICS)}, each once, not {clinics!r}")
    if not 0 < test_share < 1:
        raise InputError(f"test_share must lie between 0 and 1, not {test_share!r}")
    generator = np.random.default_rng(seed)
    train: list[tuple[np.ndarray, np.ndarray]] = []
    test: list[tuple[np.ndarray, np.ndarray]] = []
    for clinic in CLINICS:
        if clinic not in chosen:
            continue
        x, y = _clinic(place.files[CLINICS.index(clinic)])
        for label in (False, True):
            rows = generator.permutation(np.flatnonzero(y == label))
            cut = round(test_share * len(rows))
            test.append((x[rows[:cut]], y[rows[:cut]]))
            train.append((x[rows[cut:]], y[rows[cut:]]))
    splits = [
        _split(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        for parts in (train, test)
    ]
    name = (
        "heart"
        if len(chosen) == len(CLINICS)
        else "heart-" + "-".join(c for c in CLINICS if c in chosen)
    )
    return Dataset(
        name=name,
        task="binary",
        train=splits[0],
        test=splits[1],
        outputs=1,
        unit="one patient",
        classes=("no disease", "disease"),
        notes=(
            f"the split is stratified by clinic and diagnosis, with public seed {seed} "
            f"and test share {test_share:g}",
            "a missing number is the middle of its range and is marked in a column of its own, "
            "a missing category is a group of zeros; "
            "a blood pressure or cholesterol of 0 counts as missing",
        ),
        nominal_size=len(splits[0]),
        features=feature_names(HEART),
        target="disease",
        inputs=TableInput(HEART),
    )


def _clinic(path: Path) -> tuple[np.ndarray, np.ndarray]:
    lines = read_bytes(path).decode("ascii", "replace").splitlines()
    rows = [[field.strip() for field in line.split(",")] for line in lines if line.strip()]
    _check_width(path, rows, len(HEART) + 1)
    table: dict[str, list[str]] = {}
    for i, column in enumerate(HEART):
        fields = [row[i] for row in rows]
        if isinstance(column, Categorical):  # both "1.0" and "1" occur
            fields = [field if is_missing(field) else f"{float(field):g}" for field in fields]
        elif column.name in _ZERO_IS_MISSING:
            fields = [
                "" if not is_missing(field) and float(field) == 0 else field for field in fields
            ]
        table[column.name] = fields
    return encode(HEART, table), np.array([float(row[-1]) > 0 for row in rows])


def _check_width(path: Path, rows: Sequence[Sequence[str]], width: int) -> None:
    if not rows:
        raise InputError(f"{path} is empty")
    for row in rows:
        if len(row) != width:
            raise InputError(
                f"{path} has a row of {len(row)} fields instead of {width}: {','.join(row)[:60]}"
            )


def _split(x: np.ndarray, y: np.ndarray) -> Split:
    import torch

    return Split(torch.from_numpy(x), torch.from_numpy(y.astype(np.float32)))
