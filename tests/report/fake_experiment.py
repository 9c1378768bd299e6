"""Results of an experiment as `zetaclip reproduce` writes them, with made-up numbers."""

import csv
import json

from fake_runs import invented

METHODS = ("dp-sgd", "ww-dp-sgd")


def cell(mean, std, n=3, published=None, difference=None, better=None):
    return {
        "ours": {"mean": mean, "std": std, "n": n},
        "published": published and {"mean": published[0], "std": published[1]},
        "difference": difference and dict(zip(("mean", "low", "high"), difference)),
        "better": better,
    }


def table(**changes):
    rows = [
        {
            "label": "dp-sgd",
            "cells": [
                cell(90.1, 0.4, published=(92.0, 0.3)),
                cell(80.0, 1.0, published=(79.0, 0.5)),
            ],
        },
        {
            "label": "ww-dp-sgd",
            "cells": [
                cell(91.5, 0.3, published=(94.0, 0.2), difference=(1.4, 0.6, 2.2), better=True),
                cell(80.2, 1.1, published=(83.0, 0.4), difference=(0.2, -0.9, 1.3), better=None),
            ],
        },
        {
            "label": "claimed",
            "cells": [cell(99.0, 0.1, difference=(8.9, -1.0, 18.0), better=True), None],
        },
    ]
    return {
        "title": "Accuracy at one budget",
        "command": "zetaclip reproduce iid",
        "commit": "0123abc",
        "baseline": "dp-sgd",
        "columns": ["digits: accuracy, %", "skewed: accuracy, %"],
        "rows": rows,
        "notes": ["The paper's σ and ε do not agree."],
    } | changes


def experiment(root, seeds=3, **changes):
    """ROOT/iid with table.json and runs.csv, and ROOT/runs with a folder per run."""
    rows = []
    for place, method in enumerate(METHODS):
        for seed in range(seeds):
            name = f"{method}-{seed}"
            run = invented(
                root / "runs" / name, seed=10 * place + seed, method=method, ledger=False
            )
            result = json.loads((run / "result.json").read_text())
            with open(run / "metrics.jsonl") as file:
                lines = [json.loads(line) | {"ece": 0.1 / (1 + place)} for line in file]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            rows.append(
                {
                    "experiment": "iid",
                    "group": "digits",
                    "row": method,
                    "condition": "",
                    "data": "digits",
                    "method": method,
                    "seed": seed,
                    "run": name,
                    "state": "finished",
                    "metric": "accuracy",
                    "value": result["metric"]["value"],
                    "epsilon": result["epsilon"],
                    "delta": 1e-5,
                    "accountant": "rdp",
                    "sigma": 1.1,
                    "seconds_total": 9.0,
                    "commit": "0123abc",
                }
            )
    rows.append(rows[0] | {"run": "gone", "seed": 9, "state": "not run", "value": ""})
    folder = root / "iid"
    folder.mkdir(parents=True)
    (folder / "table.json").write_text(json.dumps(table(**changes)))
    with open(folder / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return root
