"""Writes made-up data to try the command on: python examples/patients.py

`patients.csv` has 3000 patients with an outcome, `new-patients.csv` another 500 without it, and
`patients.toml` is the schema: what the columns can hold, from what they mean.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

COLUMNS = ["age", "dose", "ward", "outcome"]
SCHEMA = """\
target = "outcome"
classes = ["ill", "well"]

[columns.age]
type = "numeric"
bounds = [18, 95]

[columns.dose]
type = "numeric"
bounds = [0, 10]

[columns.ward]
type = "categorical"
values = ["A", "B", "C"]
"""


def patient(draw: random.Random) -> list[str]:
    """One row: the outcome follows from age, dose and ward, and from chance."""
    age, dose, ward = draw.randint(18, 95), draw.uniform(0, 10), draw.choice("ABC")
    score = 0.06 * (age - 55) + 0.5 * (dose - 5) + "ABC".index(ward) - 1 + draw.gauss(0, 1)
    return [str(age), f"{dose:.2f}", ward, "ill" if score > 0 else "well"]


def write(name: str, rows: list[list[str]], columns: list[str]) -> None:
    """Writes the first columns of the rows."""
    with Path(name).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(row[: len(columns)] for row in rows)


def main() -> None:
    """Writes the three files into the current folder."""
    draw = random.Random(7)
    write("patients.csv", [patient(draw) for _ in range(3000)], COLUMNS)
    write("new-patients.csv", [patient(draw) for _ in range(500)], COLUMNS[:-1])
    Path("patients.toml").write_text(SCHEMA)
    print("wrote patients.csv, new-patients.csv and patients.toml")


if __name__ == "__main__":
    main()
