"""Breaks the lines that carry the guarantee, one at a time, and checks that a test notices each.

    PYTHONPATH=tests python -m mutation.run                  # all of mutations.py
    PYTHONPATH=tests python -m mutation.run nonce journal    # with one of these words in the name

The package and its tests are copied to a temporary folder, so the tree is never edited. For each
mutation only the tests that it names are run, one process at a time. They must pass without the
mutation and fail with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from copied import build, copy_tree, run_tests
from mutation.mutations import MUTATIONS, Mutation, find

SECONDS = 300  # for the tests of one mutation: one that makes them wait for ever is not caught
FAILED = 1  # pytest's exit code where tests ran and some failed; others mean that they did not run


def try_out(root: Path, mutation: Mutation) -> str:
    """Nothing if the mutation is caught, otherwise what is wrong."""
    path = find(root / "src" / "zetaclip", mutation)
    whole = path.read_text(encoding="utf-8")
    changed = whole
    for old, new in mutation.edits.items():
        changed = changed.replace(old, new)
    path.write_text(changed, encoding="utf-8")
    try:
        if path.suffix in (".c", ".h"):
            build(root)
        code, said = run_tests(root, list(mutation.tests), "-x", seconds=SECONDS)
    finally:
        path.write_text(whole, encoding="utf-8")
        if path.suffix in (".c", ".h"):
            build(root)
    if code == FAILED:
        return ""
    if code == 0:
        return "not caught: its tests pass"
    return f"its tests did not run (exit code {code}):\n{said[-1500:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutations with one of these in their name")
    words = parser.parse_args().words
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="zetaclip-mutation-") as folder:
        root = Path(folder)
        copy_tree(root)
        build(root)
        code, said = run_tests(root, sorted({test for m in chosen for test in m.tests}))
        if code:
            print(said[-3000:])
            print(f"the tests must pass before anything is changed (exit code {code})")
            return 1
        for mutation in chosen:
            begun = time.monotonic()
            try:
                problem = try_out(root, mutation)
            except (ValueError, RuntimeError) as error:
                problem = str(error)
            passed, failed = passed + (not problem), failed + bool(problem)
            state = "FAILED" if problem else "caught"
            print(f"{state}  {time.monotonic() - begun:5.1f} s  {mutation.name}", flush=True)
            if problem:
                print(f"        {problem}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
