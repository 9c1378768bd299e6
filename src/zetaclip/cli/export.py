"""``zetaclip export``: a run's network as a file for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import InputError

DESCRIPTION = "Write a run's network for other programs, and try the file on records."
EPILOG = """examples:
  zetaclip export runs/a --format onnx                   writes a.onnx (needs zetaclip[onnx])
  zetaclip export runs/a --format torch-export --out model.pt2
  zetaclip export runs/a --format onnx --rows new.csv    try the file on these records

The file takes prepared records (`x`, float32) and gives the probabilities of the classes, or the
number of a regression. Its metadata have, under the key `zetaclip`, how records are prepared, the
classes, ε and δ. safetensors has the weights alone. A file that gives other answers than the run is
not kept. In Python, `zetaclip.load_run(RUN).prepare(rows)` prepares records."""

_FORMATS = ("onnx", "torchscript", "torch-export", "safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run of `zetaclip train`")
    parser.add_argument(
        "--format", choices=_FORMATS, default="onnx", help="the form of the file (default: onnx)"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="the file (default: the run's name, in the current folder)"
    )
    parser.add_argument(
        "--rows",
        metavar="FILE",
        help="try the file on these records (default: made-up ones)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exports, and says how well the file agrees."""
    if arguments.out is not None and not Path(arguments.out).parent.is_dir():
        raise InputError(f"there is no folder {Path(arguments.out).parent} to write to")
    from ..inference import ENDINGS, export, load_run

    trained = load_run(arguments.run_folder)
    name = trained.path.resolve().name + ENDINGS[arguments.format]
    out = Path(arguments.out or name)
    if out.is_dir():
        raise InputError(f"{out} is a folder; --out takes the name of a file")
    gap = export(trained, out, arguments.format, arguments.rows)
    tried = "made-up records" if arguments.rows is None else arguments.rows
    print(f"{out}: tried on {tried}, answers differ by at most {gap:.2g}")
    return 0
