"""``zetaclip predict``: answers of a trained run for new records."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import Any

from ..errors import InputError

DESCRIPTION = "Predict with a trained run: a column `prediction`, in the order of the records."
EPILOG = """examples:
  zetaclip predict runs/a new.csv                        print the predictions as CSV
  zetaclip predict runs/a new.csv --out predictions.csv --proba
  zetaclip predict runs/pets pictures/ --out predictions.csv

New records are prepared as the training records were. A table needs the columns of the schema; the
target is not needed, and other columns are not used. Missing values and unknown categories are
treated as in training. For a folder of pictures, a column `file` names each picture.

Predictions cost no further ε, whoever they are about. They are about the new records, which may be
private: they are written where you say, and never into the run's folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run of `zetaclip train`")
    parser.add_argument(
        "records", metavar="FILE", help="a .csv, .csv.gz, .tsv or .parquet file, or pictures"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the predictions there (default: print them)"
    )
    parser.add_argument(
        "--proba", action="store_true", help="also a column for each class, with its probability"
    )


def run(arguments: argparse.Namespace) -> int:
    """Predicts, and writes a CSV."""
    folder, out = Path(arguments.run_folder), arguments.out
    records = Path(arguments.records).expanduser()
    if not records.exists():
        raise InputError(f"{records} does not exist")
    if out is not None:
        _check_out(Path(out), folder)
    from ..inference import load_run

    trained = load_run(folder)
    if not trained.finished:
        print(
            f"warning: the run is not finished; these are its weights after {trained.steps}"
            " updates",
            file=sys.stderr,
        )
    broken: dict[Path, str] = {}
    answers = trained.answers(records, arguments.proba, broken)
    if broken:
        from ..data.pictures import told

        total = len(broken) + len(answers["prediction"])
        print(f"warning: {told(broken, total)}", file=sys.stderr)
    text = _csv(answers)
    if out is None:
        sys.stdout.write(text)
        return 0
    from ..files import replace_file

    try:
        with replace_file(out) as file:
            file.write(text.encode())
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error
    count = len(answers["prediction"])
    print(f"{count} prediction{'s' * (count != 1)}: {out}")
    return 0


def _check_out(out: Path, folder: Path) -> None:
    """Predictions are about new records; a run folder is there to be given away."""
    if out.is_dir():
        raise InputError(f"{out} is a folder; --out takes the name of a file")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent} to write {out.name} to")
    if folder.resolve() in out.resolve().parents:
        raise InputError(
            f"{out} is in the run's folder, which may be published: choose another --out"
        )


def _csv(answers: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answers)
    writer.writerows(zip(*map(_written, answers.values()), strict=True))
    return text.getvalue()


def _written(column: Any) -> list[Any]:
    """Values as they stand in a CSV: numbers with seven digits, which is what float32 carries."""
    return [f"{v:.7g}" if isinstance(v, float) else v for v in column.tolist()]
