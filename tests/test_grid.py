"""The public grid: what it is computed from, that releases lie on it, and what rounding to it can
do."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import flat, private, tiny, toy_data, train
from torch import nn

from zetaclip import methods
from zetaclip.errors import LedgerError
from zetaclip.grid import on_grid, spacing, widened
from zetaclip.ledger import Ledger, Row
from zetaclip.randomness import poisson_indices, uniforms


@pytest.mark.parametrize("bound", [1e-6, 0.1, 1.0, 3.7, 1e5])
@pytest.mark.parametrize("sigma", [0.01, 0.5, 1.1, 50.0])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 1000, 4**8, 4**8 + 1, 11_000_000])
def test_the_grid_is_the_largest_power_of_two_that_keeps_both_bounds(bound, sigma, size):
    found = spacing(bound, sigma, size)
    assert math.log2(found).is_integer()
    padded = 4 ** math.ceil(round(math.log(size, 4), 9))
    limits = bound / 1024 / math.sqrt(padded), sigma * bound / 2**16
    assert found <= min(limits) < 2 * found
    assert found * math.sqrt(size) <= bound / 1024
    assert on_grid(found, bound, sigma, size) and on_grid(found / 8, bound, sigma, size)
    assert not on_grid(2 * found, bound, sigma, size) and not on_grid(
        0.75 * found, bound, sigma, size
    )


def test_without_noise_there_is_no_grid_and_what_is_too_small_is_refused():
    assert (
        spacing(1.0, 0.0, 10) == 0.0 and on_grid(0.0, 1.0, 0.0) and not on_grid(2.0**-20, 1.0, 0.0)
    )
    for bound, sigma in ((1e-300, 1.0), (1.0, 1e-300)):
        with pytest.raises(ValueError, match="too small for float64"):
            spacing(bound, sigma, 10)


@pytest.mark.parametrize("name", ["dp-sgd", "quantile", "slaclip", "adadpigu", "dp-sam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_release_is_a_whole_number_of_its_grid(name, dtype, monkeypatch):
    from zetaclip.mechanism import Mechanism

    seen, release = [], Mechanism.release

    def spy(self, *args):
        released = release(self, *args)
        seen.append((self, released))
        return released

    monkeypatch.setattr(Mechanism, "release", spy)
    method = methods.get(name)
    module = tiny(dtype=dtype)
    engine, module, optimizer, loader = private(
        module,
        toy_data(dtype=dtype),
        method=method,
        clipping=None,
        optimizer=method.optimizer(module.parameters()),
        epochs=2,
        target_delta=1e-5,
    )
    train(module, optimizer, loader, epochs=2)
    rows = iter(engine.ledger.rows())
    assert seen
    for mechanism, released in seen:
        row = next(rows)
        assert (
            row.sensitivity == row.clip * (1 + 2**-9)
            and row.noise_std == row.noise_multiplier * row.sensitivity
        )
        if mechanism.affine is None:
            whole = released.gradient.double() * mechanism.draw.divisor / row.grid
            slack = 1e-6 if dtype == torch.float64 else float(whole.abs().max()) * 2**-23
            assert (whole - whole.round()).abs().max() <= slack
        for extra in released.extras.values():
            own = row if name == "slaclip" else next(rows)
            whole = extra * mechanism.draw.divisor / own.grid
            torch.testing.assert_close(whole, whole.round(), rtol=0, atol=1e-6)


def test_rounding_moves_two_sums_apart_by_at_most_a_thousandth():
    """Sums that differ by one record of length C, placed where each coordinate rounds the other
    way."""
    size, clip = 4096, 1.0
    grid = spacing(clip, 1.0, size)
    step = torch.full((size,), clip / math.sqrt(size), dtype=torch.float64)
    base = torch.full((size,), 0.49 * grid, dtype=torch.float64)  # rounds down
    other = base + step + 0.02 * grid  # a little more than the record, and it rounds up
    apart = (other / grid).round().sub((base / grid).round()).norm() * grid
    assert float((other - base).norm()) < clip * (1 + 1e-4) < float(apart) <= widened(clip)


@pytest.mark.filterwarnings("ignore:num_examples = ")
def test_sums_that_float64_can_not_count_are_refused():
    module = tiny()
    _, module, optimizer, loader = private(
        module, toy_data(), sigma=1e-9, num_examples=10**6, q=1.0
    )
    before = flat(module)
    with pytest.raises(ValueError, match="too small for 1000000 records"):
        train(module, optimizer, loader)
    assert torch.equal(before, flat(module)) and len(optimizer._loop.log.ledger) == 0


def one_sum(values, sigma, clip=1.0):
    """The release for records that are their own gradients, as a sum."""
    module = nn.Linear(values.shape[1], 1, bias=False)
    nn.init.zeros_(module.weight)
    _, module, optimizer, loader = private(
        module,
        (values,),
        sigma=sigma,
        clipping=clip,
        q=1.0,
        num_examples=len(values),
        loss_reduction="sum",
    )
    train(module, optimizer, loader, lambda m, b: m(b[0]).sum())
    return -flat(module).double() * len(values)


def test_what_leaves_does_not_depend_on_the_order_of_the_records():
    """Sums of one multiset differ in their last digits by the order; on the grid they don't."""
    values = torch.randn(300, 20, generator=torch.Generator().manual_seed(0))
    turned = values.flip(0)
    sums = [some.numpy().cumsum(0, dtype="float32")[-1] for some in (values, turned)]
    assert not np.array_equal(*sums)
    assert torch.equal(one_sum(values, 0.5), one_sum(turned, 0.5))


def test_a_row_checks_its_clip_and_grid(tmp_path):
    good = Row(
        0, 0, "sum", widened(2.0), 1.1, 1.1 * widened(2.0), 0.1, "a", 2.0, spacing(2.0, 1.1, 100)
    )
    assert good.exact
    for change in (
        {"clip": 1.9},
        {"grid": 3 * good.grid},
        {"grid": 2.0**-3},
        {"grid": 0.0},
        {"grid": math.nan},
    ):
        with pytest.raises(LedgerError, match="clip"):
            replace(good, **change)
    engine, module, optimizer, loader = private(tiny(), toy_data())
    train(module, optimizer, loader)
    ledger = engine.ledger
    ledger.to_jsonl(tmp_path / "ledger.jsonl")
    assert list(Ledger.from_jsonl(tmp_path / "ledger.jsonl").rows()) == list(ledger.rows())
    assert all(row.exact for row in ledger.rows())


def test_a_ledger_without_grids_is_still_read(tmp_path):
    """As versions before the grid wrote it, digest included."""
    import hashlib
    import json

    engine, *_ = private(tiny(), toy_data())
    header = engine.ledger.state_dict()["header"] | {"notes": []}
    line = json.dumps(
        {
            "step": 0,
            "batch": 0,
            "query": "sum",
            "sensitivity": 1.0,
            "noise_multiplier": 1.1,
            "noise_std": 1.1,
        }
        | {"sample_rate": 0.1, "stream": "a"}
    )

    def opening(digest):
        return (
            json.dumps({"zetaclip_ledger": 1, "rows": 1, "sha256": digest, "header": header}) + "\n"
        )

    digest = hashlib.sha256((opening("0" * 64) + line + "\n").encode()).hexdigest()
    (tmp_path / "old.jsonl").write_text(opening(digest) + line + "\n")
    (row,) = Ledger.from_jsonl(tmp_path / "old.jsonl").rows()
    assert (row.clip, row.grid, row.exact) == (1.0, 0.0, False)


def test_a_rate_between_a_coin_and_its_float32_is_met_as_declared():
    """Coins of 24 bits would put records on the wrong side of q."""
    key = bytes(range(32))
    coins = uniforms(key, 1000)
    above = np.flatnonzero(coins.astype(np.float32) > coins)
    for record in above[:20].tolist():
        rate = math.nextafter(coins[record], 1.0)
        assert record in poisson_indices(key, 1000, rate).tolist()
        assert record not in poisson_indices(key, 1000, float(coins[record])).tolist()
    assert len(above) > 100
