"""Runs the tests of the C parts with AddressSanitizer and UndefinedBehaviorSanitizer built in.

    PYTHONPATH=tests python -m sanitize.run

Needs gcc with libasan. Python itself is not built for it, so its leaks are not looked at.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from copied import build, copy_tree, run_tests

FLAGS = "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
TESTS = [
    "tests/test_dealing.py",
    "tests/test_randomness.py",
    "tests/gradients/test_mapped.py",
    "tests/gradients/test_rows.py",
    "tests/gradients/test_products.py",
]


def library(name: str) -> str:
    """Where gcc keeps one of its libraries."""
    words = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="zetaclip-sanitize-") as folder:
        root = Path(folder)
        copy_tree(root)
        build(root, CC="gcc", CFLAGS=FLAGS, LDSHARED="gcc -shared -fsanitize=address,undefined")
        for part in root.glob("src/**/*.so"):
            if b"__asan_report" not in part.read_bytes():
                print(f"{part.name} was built without the sanitizer")
                return 1
        code, said = run_tests(
            root,
            TESTS,
            # The C++ library too: without it the first exception inside torch ends the process.
            LD_PRELOAD=f"{library('libasan.so')} {library('libstdc++.so')}",
            # To a file, because pytest captures what is printed.
            ASAN_OPTIONS=f"detect_leaks=0:allocator_may_return_null=1:log_path={root / 'found'}",
            UBSAN_OPTIONS=f"halt_on_error=1:print_stacktrace=1:log_path={root / 'found'}",
        )
        said_of = [path.read_text(errors="replace") for path in root.glob("found.*")]
    # A test asks for memory that is not there.
    lines = [line for text in said_of for line in text.splitlines()]
    found = [line for line in lines if "failed to allocate" not in line]
    print(said[-6000:] if code else said.strip().splitlines()[-1])
    print("\n".join(found)[:6000])
    return int(code != 0 or bool(found))


if __name__ == "__main__":
    sys.exit(main())
