"""A table of made-up patients, and short runs on it."""

import json
import random

from zetaclip.training import Config

SCHEMA = {
    "target": "outcome",
    "classes": ["ill", "well"],
    "columns": {
        "age": {"type": "numeric", "bounds": [18, 95]},
        "dose": {"type": "numeric", "bounds": [0, 10], "missing": "flag"},
        "ward": {"type": "categorical", "values": ["A", "B", "C"]},
        "name": {"type": "ignore"},
    },
}


def patients(count=300):
    """Rows whose outcome follows age and dose, with made-up names."""
    rng = random.Random(3)
    rows = []
    for i in range(count):
        age, dose = rng.randint(18, 95), rng.uniform(0, 10)
        outcome = "ill" if 0.06 * (age - 55) + 0.5 * (dose - 5) > 0 else "well"
        rows.append((age, f"{dose:.2f}", rng.choice("ABC"), f"Mx Secret{i}", outcome))
    return rows


def write(path, rows, header="age,dose,ward,name,outcome"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def settings(data, **more):
    schema = data.with_suffix(".json")
    schema.write_text(json.dumps(SCHEMA))
    base = {"method": "dp-sgd", "model": "mlp-2", "sigma": 0.6, "steps": 40, "batch_size": 64}
    base["data_options"] = {"test_share": 0}
    return Config(
        **{**base, "data": str(data), "schema": str(schema), "num_examples": 300, "seed": 5, **more}
    )
