"""What the live page costs the run that it shows.

    OMP_NUM_THREADS=1 python bench/watch.py --seconds 60

The folder of a long run (200 epochs, 400 probes of a 512 x 512 layer) gets a new line every second,
as in training, while a browser in another process asks as often as it is told to. Printed is the
processor time of this process over the elapsed time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

from zetaclip.report.live import serve


def line(place: int) -> dict[str, object]:
    """A line of probes.jsonl."""
    fit = {
        "zeta": 3.0,
        "stderr": 0.2,
        "lambda_min": 0.5,
        "n_tail": 256,
        "ks": 0.1,
        "ok": True,
        "weak": False,
        "reason": "",
    }
    layer = fit | {
        "smoothed": 3.0,
        "center": 4.0,
        "eigenvalues": [1.0 + 0.01 * rank for rank in range(512)],
    }
    zone = {"center": 4.0, "radius": 2.0, "bounds": [0.5, 3.0], "in_zone": True, "hit": ""}
    return {
        "probe": place,
        "step": 10 * place,
        "layers": {"fc1": layer},
        "zeta": 3.0,
        "smoothed": 3.0,
        "clip": 1.0,
    } | zone


def epoch(place: int) -> dict[str, object]:
    """A line of metrics.jsonl."""
    return {
        "epoch": place,
        "step": 20 * place,
        "epsilon": 0.1 * place**0.5,
        "metric": 0.9,
        "accuracy": 0.9,
        "clip": 1.0,
    }


def make(folder: Path) -> None:
    """Writes the folder of a long run."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "probes.jsonl").write_text(
        "".join(json.dumps(line(place)) + "\n" for place in range(1, 401))
    )
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(epoch(place)) + "\n" for place in range(1, 201))
    )
    state = {
        "state": "running",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "updated": time.time(),
        "step": 1,
        "steps": 9,
    }
    (folder / "status.json").write_text(json.dumps(state))


def ask(address: str) -> None:
    """Asks as the page does: with the tag of the last answer, after the server's pause."""
    tag = shape = ""
    while True:
        headers = {"If-None-Match": tag, "X-Shape": urllib.parse.quote(shape)}
        with urllib.request.urlopen(
            urllib.request.Request(f"{address}data.json", headers=headers)
        ) as answer:
            shape = json.load(answer)["shape"]
            tag, wait = answer.headers["ETag"], float(answer.headers["X-Wait"])
        time.sleep(wait)


def main() -> None:
    """Prints the share of one core."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        make(folder)
        texts = [
            json.dumps(line(place)) + "\n" for place in range(401, 401 + int(arguments.seconds) + 1)
        ]
        with serve([folder]) as address:
            with urllib.request.urlopen(address) as answer:  # opening the page is not counted
                answer.read()
            reader = multiprocessing.get_context("spawn").Process(
                target=ask, args=(address,), daemon=True
            )
            reader.start()
            time.sleep(5)
            began, worked = time.perf_counter(), time.process_time()
            for text in texts[: int(arguments.seconds)]:
                with open(folder / "probes.jsonl", "a") as file:
                    file.write(text)
                time.sleep(1)
            passed, work = time.perf_counter() - began, time.process_time() - worked
            reader.terminate()
            reader.join()
    print(
        f"{1000 * work:.0f} ms of processor time in {passed:.0f} s: {100 * work / passed:.2f} % of"
        " one core"
    )


if __name__ == "__main__":
    main()
