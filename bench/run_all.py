"""Runs the benches with modest settings and writes bench/results/latest.md and latest.json.

python bench/run_all.py                   # what `make bench` calls
python bench/run_all.py --quick           # two models, few turns: checks that everything runs
python bench/run_all.py --readme          # also puts the step table into README.md
python bench/run_all.py --only step ledger
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from common import surroundings

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
# name: (title, options, options of --quick)
PARTS: dict[str, tuple[str, list[str], list[str]]] = {
    "step": (
        "Time of a step, over the same model without privacy",
        [],
        ["--models", "mlp", "mnist", "--turns", "5", "--peer-turns", "2"],
    ),
    "memory": (
        "Peak memory of a step, over the same model without privacy",
        [],
        ["--models", "mnist", "--no-peers"],
    ),
    "loader": ("An epoch of MNIST-sized data, end to end", [], ["--share", "0.05"]),
    "methods": (
        "Time of a method's step, over DP-SGD's",
        [],
        ["--models", "mlp", "--seconds", "0.5"],
    ),
    "ranks": (
        "A step on two ranks, over one process",
        ["--batches", "128", "512", "--turns", "7"],
        ["--turns", "1"],
    ),
    "ledger": ("A million steps in the ledger", [], []),
    "noise": ("How far the noise is from a Gaussian on its grid", [], []),
}


def run(name: str, arguments: list[str], scratch: Path) -> tuple[str, Any, float]:
    """What the script printed, its JSON, and how many seconds it took."""
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    target = scratch / f"{name}.json"
    if name not in ("ledger", "noise"):  # they have no figures as JSON
        command += ["--json", str(target)]
    start = time.perf_counter()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"bench/{name}.py ended with code {done.returncode}")
    return done.stdout.strip(), json.loads(target.read_text()) if target.exists() else None, seconds


def command_line(name: str, arguments: list[str]) -> str:
    """The command as a user would type it."""
    return " ".join(["python", f"bench/{name}.py", *arguments])


def fill_readme(readme: Path, text: str) -> None:
    """Replaces the table between the two marks."""
    whole = readme.read_text()
    before, rest = whole.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    """Runs the benches and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--readme", action="store_true", help="put the step table into README.md")
    parser.add_argument(
        "--out", default=str(HERE / "results"), help="folder for latest.md and latest.json"
    )
    options = parser.parse_args()
    here = surroundings()
    where = (
        f"{here['processor']}, one thread; torch {here['torch']}, Opacus {here['opacus']}, "
        f"Python {here['python']}; {date.today().isoformat()}"
    )
    text = ["# Results of the last run", "", f"`python bench/run_all.py` on {where}.", ""]
    values: dict[str, Any] = {"surroundings": here, "date": date.today().isoformat()}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only or PARTS:
            title, normal, quick = PARTS[name]
            arguments = quick if options.quick else normal
            print(f"{name} ...", file=sys.stderr, flush=True)
            printed, values[name], seconds = run(name, arguments, Path(scratch))
            command = command_line(name, arguments)
            text += [f"## {title}", "", f"`{command}`, {seconds:.0f} s", "", printed, ""]
            if name == "step" and options.readme:
                source = (
                    f"From `{command}` on {where}. In brackets: 10th to 90th percentile of single"
                    " turns."
                )
                fill_readme(HERE.parent / "README.md", f"{printed}\n\n{source}")
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest.md").write_text("\n".join(text))
    (folder / "latest.json").write_text(json.dumps(values, indent=1) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
