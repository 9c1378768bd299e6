"""A copy of the package and its tests in a temporary folder, to be changed or built in another
way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("src", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def copy_tree(target: Path) -> None:
    """What the tests need, without what earlier runs left."""
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", ".hypothesis", "*.egg-info")
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=skipped)
        else:
            shutil.copy(source, target / name)


def environment(root: Path) -> dict[str, str]:
    """In which the copy is what is imported."""
    # No bytecode: a file that is changed twice within a second would be taken for the old one.
    return {
        **os.environ,
        "PYTHONPATH": str(root / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def build(root: Path, **variables: str) -> None:
    """Compiles the C sources of the copy.

    Raises:
        RuntimeError: One of them could not be compiled. (An installation goes on without them.)
    """
    words = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    done = subprocess.run(
        words, cwd=root, env=environment(root) | variables, capture_output=True, text=True
    )
    built, sources = list(root.glob("src/**/*.so")), list(root.glob("src/**/*.c"))
    if done.returncode or "failed" in done.stderr or len(built) != len(sources):
        raise RuntimeError(f"the C sources can't be compiled:\n{done.stderr[-2000:]}")


def run_tests(
    root: Path, tests: list[str], *options: str, seconds: float | None = None, **variables: str
) -> tuple[int, str]:
    """pytest's exit code and what it said; -1 where it took longer than ``seconds``."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *tests]
    try:
        done = subprocess.run(
            words,
            cwd=root,
            env=environment(root) | variables,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return -1, f"not done after {seconds:g} s"
    return done.returncode, done.stdout + done.stderr
