"""Run folders to report on: one that was really trained, and cheap ones with made-up series.

``trained`` takes a few seconds and writes what a trainer would: the ledger, probes and accuracies
are of a private run on scikit-learn's digits. ``invented`` costs a millisecond; its numbers only
have the right shape.
"""

import json
import math
import os
import socket
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from zetaclip import PrivacyEngine, Spectral
from zetaclip.accounting import epsilon
from zetaclip.ledger import Event, Header, Ledger, Row
from zetaclip.spectrum import eigenvalues, fit_tail, random_null

DELTA = 1e-5


def dump(path, value):
    path.write_text(json.dumps(value))


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(**changes):
    return {
        "zetaclip_run": 1,
        "data": "digits",
        "model": "mlp",
        "method": "dp-sgd",
        "clipping": "spectral",
        "spectral": {"period": 5, "bounds": [0.5, 3.0], "gain": 0.1},
        "clip": 1.0,
        "epsilon": 4.0,
        "delta": DELTA,
        "accountant": "rdp",
        "epochs": 12,
        "batch_size": 128,
        "lr": 0.5,
        "momentum": 0.0,
        "schedule": "constant",
        "seed": 1,
        "device": "cpu",
        "data_root": None,
    } | changes


def status(state, step, steps, **changes):
    return {
        "state": state,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.time() - 60,
        "updated": time.time(),
        "step": step,
        "steps": steps,
        "epoch": 1,
        "epochs": 12,
        "epsilon": 1.0,
        "clip": 1.0,
        "message": "",
        "resume": "zetaclip train --config config.json --out run --resume",
    } | changes


def result(**changes):
    bins = [
        {
            "low": i / 15,
            "high": (i + 1) / 15,
            "count": 3 * i,
            "confidence": (i + 0.5) / 15,
            "accuracy": ((i + 0.5) / 15) ** 0.8,
        }
        for i in range(15)
    ]
    return {
        "zetaclip_result": 1,
        "metric": {"name": "accuracy", "value": 0.912},
        "metrics": {"accuracy": 0.912, "ece": 0.031, "loss": 0.4},
        "epsilon": 1.234,
        "delta": DELTA,
        "accountant": "rdp",
        "epsilon_by": {"rdp": 1.234, "prv": 1.1, "pld": 1.1},
        "adjacency": "add/remove one record",
        "unit": "one image",
        "claim": "differential privacy",
        "sigma": 1.1,
        "multipliers": [1.1],
        "steps": 120,
        "sample_rate": 0.1,
        "num_examples": 1280,
        "expected_batch_size": 128,
        "method": "dp-sgd",
        "model": "mlp",
        "parameters": 9610,
        "data": "digits",
        "clip": {
            "initial": 1.0,
            "final": 1.4,
            "median": 1.2,
            "mean": 1.2,
            "min": 1.0,
            "max": 1.4,
            "hits_min": 0,
            "hits_max": 0,
        },
        "probes": {"count": 24, "in_zone_share": 0.5, "weak_fits": 3, "failed_fits": 0},
        "seconds": {"total": 9.0, "train": 7.0, "eval": 1.0, "probe": 0.4, "setup": 0.6},
        "probe_share": 0.04,
        "reliability": bins,
        "versions": {"zetaclip": "0.1.0", "torch": "2.13.0"},
        "commit": "0123abc",
        "noise_seed_known": False,
        "notes": [],
        "finished": "2026-01-01T00:00:00+00:00",
    } | changes


def invented(path, seed=0, epochs=12, state="finished", metric="accuracy", ledger=True, **changes):
    """A folder in about a millisecond. ``changes`` go into config.json."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    steps = 10 * epochs
    dump(path / "config.json", config(seed=seed, epochs=epochs, **changes))
    dump(path / "status.json", status(state, steps, steps))
    rows, probes, clip = [], [], 1.0
    shared = np.sort(draw.pareto(2.0, 64) + 0.1)[::-1]
    for epoch in range(1, epochs + 1):
        value = 0.95 - 0.7 * math.exp(-epoch / 4) + 0.01 * draw.standard_normal()
        before, clip = clip, clip * math.exp(0.03 * draw.standard_normal() + 0.02)
        rows.append(
            {
                "epoch": epoch,
                "step": 10 * epoch,
                "epsilon": 0.35 * math.sqrt(epoch),
                "metric": value,
                metric: value,
                "loss": 1 / epoch,
                "clip": clip,
                "zeta": 4.0,
                "lr": 0.5 * (1 - (10 * epoch - 1) / (10 * epochs)),
                "seconds": {"train": 0.5 * epoch, "eval": 0.1 * epoch, "probe": 0.02 * epoch},
            }
        )
        layer = {
            "zeta": 4 + draw.standard_normal(),
            "stderr": 0.5,
            "lambda_min": float(shared[32]),
            "n_tail": 33,
            "ks": 0.1,
            "ok": epoch != 5,
            "weak": epoch % 3 == 0,
            "reason": "random matrices read 2.85 to 3.50" if epoch % 3 == 0 else "",
            "smoothed": 4.2,
            "center": 4.0,
            "null_low": 2.85,
            "null_high": 3.5,
            "eigenvalues": [float(v) for v in shared * (1 + 0.02 * epoch)],
        }
        probes.append(
            {
                "probe": epoch,
                "step": 10 * epoch,
                "layers": {"fc1": layer},
                "zeta": layer["zeta"],
                "smoothed": 4 + 0.5 * math.sin(epoch / 3),
                "error": 0.1,
                "phi": 0.1,
                "clip_before": before,
                "clip": clip,
                "hit": "",
                "in_zone": True,
                "center": 4.0,
                "radius": 2.0,
                "bounds": [0.5, 3.0],
            }
        )
    lines(path / "metrics.jsonl", rows)
    lines(path / "probes.jsonl", probes)
    if ledger:
        header = Header(1280, "declared", 128.0, "rdp", "dp-sgd")
        book = Ledger(header)
        for step in range(steps):
            book.append(Row(step, step, "gradient", 1.0, 1.1, 1.1, 0.1, "a", 1.0, 0.0))
        book.to_jsonl(path / "ledger.jsonl")
    if state == "finished":
        name = {"name": metric, "value": rows[-1]["metric"] if rows else None}
        dump(path / "result.json", result(metric=name, seed=seed))
    return path


def trained(path, seed=1, clipping="spectral", epochs=12, sigma=1.5, lr=2.0, pause=0.0):
    """A private run on digits, written as it goes. ``pause`` slows it down, for a page that
    watches."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    x, y, test_x, test_y = digits()
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("fc1", nn.Linear(64, 128))
    model.add_module("act", nn.ReLU())
    model.add_module("fc2", nn.Linear(128, 10))
    spectral = Spectral(initial=1.0, probe="fc1", period=5, gain=0.15)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=128)
    engine = PrivacyEngine(accountant="rdp", seed=seed)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=sigma,
        clipping=spectral if clipping == "spectral" else clipping,
        sample_rate=0.1,
        num_examples=len(x),
    )
    total = epochs * len(loader)
    dump(
        path / "config.json",
        config(seed=seed, epochs=epochs, clipping=clipping, lr=lr, sigma=sigma, epsilon=None),
    )
    (path / "metrics.jsonl").write_text("")
    step, known, probes, started = 0, 0, 0, time.time()
    spent = {"train": 0.0, "eval": 0.0, "probe": 0.0}
    clips = [float(optimizer.clip)]
    for epoch in range(1, epochs + 1):
        begun = time.perf_counter()
        probing = 0.0
        for inputs, labels in loader:
            before = float(optimizer.clip)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            step += 1
            clips.append(float(optimizer.clip))
            if len(optimizer.clip_history) > known:
                known, probes = len(optimizer.clip_history), probes + 1
                clock = time.perf_counter()
                append(
                    path / "probes.jsonl",
                    probe_line(model, probes, optimizer.clip_history[-1], before, spectral),
                )
                probing += time.perf_counter() - clock
        train_seconds = time.perf_counter() - begun - probing
        clock = time.perf_counter()
        with torch.no_grad():
            logits = model(test_x)
        measured = (logits.argmax(1) == test_y).float().mean().item()
        seconds = {"train": train_seconds, "eval": time.perf_counter() - clock, "probe": probing}
        spent = {part: spent[part] + seconds[part] for part in spent}
        now = epsilon([Event(0.1, sigma, step)], DELTA, "rdp")
        append(
            path / "metrics.jsonl",
            {
                "epoch": epoch,
                "step": step,
                "epsilon": now,
                "metric": measured,
                "accuracy": measured,
                "loss": nn.functional.cross_entropy(logits, test_y).item(),
                "clip": clips[-1],
                "zeta": None,
                "lr": lr,
                "seconds": spent,
            },
        )
        dump(
            path / "status.json",
            status("running", step, total, epoch=epoch, epochs=epochs, epsilon=now, clip=clips[-1]),
        )
        time.sleep(pause)
    engine.ledger.to_jsonl(path / "ledger.jsonl")
    bins = reliability(logits, test_y)
    ece = sum(
        one["count"] * abs(one["confidence"] - one["accuracy"]) for one in bins if one["count"]
    ) / len(test_y)
    dump(
        path / "result.json",
        result(
            metric={"name": "accuracy", "value": measured},
            metrics={"accuracy": measured, "ece": ece, "loss": 0.0},
            epsilon=now,
            epsilon_by={"rdp": now},
            sigma=sigma,
            steps=step,
            num_examples=len(x),
            clip={"initial": 1.0, "final": clips[-1]},
            probes=None,
            seconds={"total": time.time() - started + 0.2, "setup": 0.2, **spent},
            reliability=bins,
            notes=["The noise seed is known: this run is for tests."],
        ),
    )
    dump(path / "status.json", status("finished", step, total, epsilon=now, clip=clips[-1]))
    return path


def append(path, row):
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def probe_line(model, count, entry, before, spectral):
    step, zeta, smoothed, phi, clip, hit = entry
    weight = model.fc1.weight.detach()
    spectrum = eigenvalues(weight)
    fit, null = fit_tail(spectrum, "rank", shape=(64, 128)), random_null((64, 128), "rank")
    layer = {
        "zeta": fit.zeta,
        "stderr": fit.stderr,
        "lambda_min": fit.lambda_min,
        "n_tail": fit.n_tail,
        "ks": fit.ks,
        "ok": fit.ok,
        "weak": fit.weak,
        "reason": fit.reason,
        "smoothed": smoothed,
        "center": 4.0,
        "null_low": null.low,
        "null_high": null.high,
        "eigenvalues": [float(value) for value in spectrum],
    }
    return {
        "probe": count,
        "step": step,
        "layers": {"fc1": layer},
        "zeta": zeta,
        "smoothed": smoothed,
        "error": (smoothed - 4.0) / 2.0,
        "phi": phi,
        "clip_before": before,
        "clip": clip,
        "hit": hit,
        "in_zone": abs(smoothed - 4.0) <= 2.0,
        "center": 4.0,
        "radius": 2.0,
        "bounds": list(spectral.bounds),
    }


def reliability(logits, labels, bins=15):
    sure, guess = torch.softmax(logits, 1).max(1)
    right = (guess == labels).float()
    made = []
    for place in range(bins):
        inside = (sure > place / bins) & (sure <= (place + 1) / bins)
        count = int(inside.sum())
        made.append(
            {
                "low": place / bins,
                "high": (place + 1) / bins,
                "count": count,
                "confidence": sure[inside].mean().item() if count else None,
                "accuracy": right[inside].mean().item() if count else None,
            }
        )
    return made


def digits():
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.data / 16.0, dtype=torch.float32)
    y = torch.tensor(bunch.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]
