"""torch's default dtype is not float32: the noise has the declared level all the same, and covers
the sum."""

import json
import subprocess
import sys

import pytest

VICTIM = """
import json, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zetaclip import PrivacyEngine

kind, when, dtype = getattr(torch, sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3])
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(200, 40), nn.ReLU(), nn.Linear(40, 2)).to(dtype)
x = torch.randn(50, 200, dtype=dtype)
y = (x[:, 0] > 0).long()
if when == "before":
    torch.set_default_dtype(kind)
engine = PrivacyEngine(accountant="rdp", seed=1)
module, optimizer, loader = engine.make_private(
    module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
    data_loader=DataLoader(TensorDataset(x, y), batch_size=50), noise_multiplier=5.0,
    clipping=1.0, sample_rate=1.0, num_examples=50)
torch.set_default_dtype(kind)
for inputs, labels in loader:
    optimizer.zero_grad()
    # The sum is zero: what comes out is noise.
    (nn.functional.cross_entropy(module(inputs), labels) * 0.0).backward()
    optimizer.step()
noise = torch.cat([p.grad.flatten() for p in module.parameters()]).to(torch.float64) / 0.1
print(json.dumps({
    "levels": [float(part.std()) for part in noise.split(1000)], "zeros": int((noise == 0).sum()),
    "finite": bool(torch.isfinite(noise).all()), "distinct": len(noise.unique()),
    "count": len(noise), "epsilon": engine.get_epsilon(1e-5),
    "dtypes": sorted({str(p.grad.dtype) for p in module.parameters()})}))
"""


def wrong(seen):
    """What an attacker could use, in words; none of it if the noise is what was declared."""
    found = [
        f"level {level:.3g}" for level in seen["levels"] if not 0.85 < level < 1.15
    ]  # six deviations
    if seen["zeros"] > 3 or seen["distinct"] < 0.99 * seen["count"] or not seen["finite"]:
        found.append(
            f"{seen['zeros']} zeros, {seen['distinct']} values of {seen['count']}, finite: "
            f"{seen['finite']}"
        )
    return found


AFTER = pytest.param("float32", "after", marks=pytest.mark.slow)


@pytest.mark.parametrize(("dtype", "when"), [("float32", "before"), ("float64", "before"), AFTER])
@pytest.mark.parametrize("kind", ["float64", "bfloat16", "float16"])
def test_noise_has_the_declared_level_under_another_default(kind, dtype, when):
    """In a process of its own, which may crash; a clear error before any release would do as
    well."""
    done = subprocess.run(
        [sys.executable, "-c", VICTIM, kind, when, dtype], capture_output=True, text=True
    )
    assert done.returncode >= 0, f"crashed with signal {-done.returncode}"
    if done.returncode:
        assert "dtype" in done.stderr.splitlines()[-1], done.stderr
        return
    seen = json.loads(done.stdout)
    assert wrong(seen) == [] and seen["dtypes"] == [f"torch.{dtype}"] and 0 < seen["epsilon"] < 5


def test_noise_that_fills_half_of_its_memory_is_seen():
    """What float32 numbers look like in memory that was meant for float64: half of it is noise, the
    rest is not."""
    import numpy as np

    values = np.zeros(8000, dtype=np.float64)
    values.view(np.float32)[:8000] = np.random.default_rng(0).standard_normal(8000)
    levels = [float(np.nanstd(np.clip(part, -1e6, 1e6))) for part in np.split(values, 8)]
    seen = {
        "levels": levels,
        "zeros": int((values == 0).sum()),
        "distinct": len(np.unique(values)),
        "count": 8000,
    }
    assert len(wrong({**seen, "finite": True})) >= 4
    good = np.random.default_rng(0).standard_normal(8000)
    seen = {
        "levels": [float(part.std()) for part in np.split(good, 8)],
        "zeros": 0,
        "distinct": 8000,
        "count": 8000,
    }
    assert wrong({**seen, "finite": True}) == []
