"""A trainer that trains nothing: it writes a run folder in the agreed form, quickly, and can be
slow or fail on demand.

Standard library only, so that a run takes some hundredths of a second. What it is told by
environment variables: STAND_IN_STEPS, STAND_IN_PAUSE (seconds a step), STAND_IN_FAIL (a method
whose runs fail), STAND_IN_STUCK (a method that never ends).
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

EFFECT = {"dp-sgd": 0.0, "ww-dp-sgd": 0.01, "sgd": 0.04, "dp-adam": -0.02}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args()
    config = json.loads(Path(arguments.config).read_text())
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    if (out / "config.json").exists() != arguments.resume:
        sys.exit("zetaclip: --resume is for a run that has begun, and for no other")
    steps = int(os.environ.get("STAND_IN_STEPS", "8"))
    pause = float(os.environ.get("STAND_IN_PAUSE", "0"))
    checkpoint = out / "private"
    step = int(checkpoint.read_text()) if arguments.resume and checkpoint.exists() else 0
    with (out / "attempts.jsonl").open("a") as file:
        told = {
            "pid": os.getpid(),
            "from": step,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "resume": arguments.resume,
        }
        file.write(json.dumps(told) + "\n")
    (out / "config.json").write_text(json.dumps({**config, "zetaclip_run": 1}))
    if os.environ.get("STAND_IN_FAIL") == config["method"]:
        print("Traceback (most recent call last):", file=sys.stderr)
        sys.exit("zetaclip: the stand-in was told to fail")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while step < steps or os.environ.get("STAND_IN_STUCK") == config["method"]:
            time.sleep(pause)
            step += 1
            checkpoint.write_text(str(step))
            status = {"state": "running", "pid": os.getpid(), "step": step, "steps": steps}
            (out / "status.json").write_text(json.dumps(status))
    except KeyboardInterrupt:
        (out / "status.json").write_text(
            json.dumps({"state": "stopped", "step": step, "steps": steps})
        )
        sys.exit(130)
    finish(out, config, steps)


def finish(out, config, steps):
    common = random.Random(f"seed {config.get('seed')}").gauss(0, 0.02)  # what paired seeds share
    own = random.Random(f"{config['method']} {config.get('seed')} {config['lr']}").gauss(0, 0.001)
    best = -0.005 * abs(math.log(config["lr"] / 0.25))
    accuracy = 0.9 + EFFECT.get(config["method"], 0.005) + common + own + best
    spectral = "spectral" in config
    clips = (
        [round(1.0 + 0.02 * probe * (1 + 0.1 * config.get("seed", 0)), 6) for probe in range(5)]
        if spectral
        else [1.0]
    )
    private = config["method"] not in ("sgd", "adam")
    metrics = {
        "accuracy": accuracy,
        "ece": 0.03,
        "loss": 0.5,
        "auc": accuracy,
        "rmse": 1 - accuracy,
    }
    metric = {"adult": "auc", "heart": "auc", "ved": "rmse"}.get(config["data"], "accuracy")
    epochs = [
        {
            "epoch": epoch,
            "step": epoch * 2,
            "epsilon": 0.4 * epoch if private else None,
            "accuracy": accuracy - 0.1 / epoch,
            "clip": 1.0,
            "seconds": {
                "train": 8.0 + 2.0 * epoch,
                "eval": 0.5 * epoch,
                "probe": 0.1 * epoch * spectral,
            },
        }
        for epoch in range(1, 5)
    ]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in epochs))
    if spectral:
        probes = [
            {"probe": p, "step": 50 * p, "clip": clips[p], "smoothed": 4 + 0.1 * p}
            for p in range(1, 5)
        ]
        (out / "probes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in probes))
    result = {
        "zetaclip_result": 1,
        "metric": {"name": metric, "value": metrics[metric]},
        "metrics": metrics,
        "epsilon": (config.get("epsilon") or 0.83) if private else None,
        "delta": config.get("delta"),
        "accountant": "prv",
        "steps": steps,
        "clip": {
            "initial": clips[0],
            "final": clips[-1],
            "median": sorted(clips)[len(clips) // 2],
            "mean": sum(clips) / len(clips),
            "min": min(clips),
            "max": max(clips),
            "hits_min": 0,
            "hits_max": 1 if spectral else 0,
        },
        "probes": {"count": 4, "in_zone_share": 1.0, "weak_fits": 0, "failed_fits": 0}
        if spectral
        else None,
        "seconds": {"total": 3.0, "train": 2.0, "eval": 0.5, "probe": 0.0, "setup": 0.5},
        "commit": "0000000",
    }
    (out / "result.json").write_text(json.dumps(result))
    (out / "private").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
