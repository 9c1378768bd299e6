"""Makes report.png, the picture of a report in the README: trains a private model on digits and
photographs its page.

    python docs/plots/make_report_picture.py [RUN_FOLDER]

Needs Chromium (Debian: apt-get install chromium). Without a folder it trains one, about a minute on
one core.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = Path(__file__).with_name("report.png")
SIZE = "1280,1190"


def train(folder: Path) -> Path:
    command = ["train", "--data", "digits", "--epsilon", "3", "--quiet", "--out"]
    subprocess.run([sys.executable, "-m", "zetaclip", *command, str(folder)], check=True)
    return folder


def photograph(page: Path, target: Path) -> None:
    browser = next(
        (path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None
    )
    if browser is None:
        sys.exit("no chromium on this machine: apt-get install chromium")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=30000",
    ]
    subprocess.run(
        [
            browser,
            *options,
            f"--window-size={SIZE}",
            f"--screenshot={target}",
            page.resolve().as_uri(),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def shrink(path: Path) -> None:
    """256 colours are enough for a chart, and a third of the size."""
    from PIL import Image

    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else train(Path(scratch) / "digits")
        page = Path(scratch) / "page.html"
        subprocess.run(
            [sys.executable, "-m", "zetaclip", "report", str(run), "--out", str(page)], check=True
        )
        photograph(page, TARGET)
    shrink(TARGET)
    print(f"{TARGET}: {TARGET.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
