"""Keys, generators, and the tails of the normal law."""

import math

import numpy as np
import pytest
import torch
from helpers import flat, private, tiny, toy_data, train
from scipy import stats

from zetaclip.randomness import TAIL, Stream, gaussian, generator, subkey


def test_the_whole_state_comes_from_the_key():
    """torch's generator then agrees with numpy's Mersenne Twister in the same state, which nobody here wrote."""
    import hashlib

    key = bytes(range(32))
    words = np.frombuffer(hashlib.shake_256(b"state\0" + key).digest(4 * 624), dtype="<u4")
    theirs = np.random.MT19937()
    theirs.state = {"bit_generator": "MT19937", "state": {"key": words.astype(np.uint32), "pos": 624}}
    expected = theirs.random_raw(1000).astype(np.int64) % 2**24  # the bits that a float32 uniform keeps
    drawn = (torch.rand(1000, generator=generator(key)) * 2**24).long()
    assert np.array_equal(drawn.numpy(), expected)


def test_keys_that_differ_above_bit_32_give_other_noise():
    low = (123).to_bytes(32, "little")
    high = (123 + (1 << 40)).to_bytes(32, "little")
    ours = [gaussian(1000, torch.float32, generator(k)) for k in (low, high)]
    assert not torch.equal(*ours) and abs(float(torch.corrcoef(torch.stack(ours))[0, 1])) < 0.15
    # What a plain seed does with the same two numbers.
    seeded = [torch.randn(1000, generator=torch.Generator().manual_seed(n)) for n in (123, 123 + (1 << 40))]
    assert torch.equal(*seeded)


def test_a_stream_moves_one_way_and_never_repeats():
    stream = Stream.seeded(1, "noise")
    before = stream.state
    ahead = stream.copy()
    keys = [stream.draw() for _ in range(200)]
    assert len(set(keys)) == 200 and [ahead.draw() for _ in range(200)] == keys
    # Nothing that was drawn, and no earlier state, can be found in or derived from the state by going on.
    later = Stream(stream.state)
    assert not set(keys) & {later.draw() for _ in range(500)} and stream.state != before
    assert Stream.fresh().state != Stream.fresh().state
    assert Stream.seeded(1, "noise").state != Stream.seeded(1, "sampling").state != Stream.seeded(2, "sampling").state
    assert subkey(keys[0], "coins") != subkey(keys[0], "sum")
    with pytest.raises(ValueError, match="32 bytes"):
        Stream(b"short")


def test_the_normal_law_has_tails():
    """torch's own float32 normals end at 5.77; ours reach further, and as often as they should."""
    source = generator(b"\1" * 32)
    count, beyond_five, largest = 0, 0, 0.0
    plain = 0.0
    for _ in range(40):
        values = gaussian(1_000_000, torch.float32, source).abs()
        beyond_five += int((values > 5).sum())
        largest = max(largest, float(values.max()))
        count += len(values)
        plain = max(plain, float(torch.randn(1_000_000, generator=source).abs().max()))
    expected = count * 2 * stats.norm.sf(5)
    assert stats.poisson.sf(beyond_five - 1, expected) > 1e-4 and stats.poisson.cdf(beyond_five, expected) > 1e-4
    assert plain < 5.78


def test_far_values_follow_the_exact_conditional_law(monkeypatch):
    """With the threshold moved to 1 the redrawn part is large enough to test: still normal, and not otherwise."""
    import zetaclip.randomness as randomness

    monkeypatch.setattr(randomness, "TAIL", 1.0)
    values = gaussian(200_000, torch.float32, generator(b"\2" * 32)).double().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    far = np.abs(values[np.abs(values) > 1.0])
    assert stats.kstest(stats.norm.sf(far) / stats.norm.sf(1.0), "uniform").pvalue > 1e-3
    assert stats.kstest(stats.norm.sf(far * 1.05) / stats.norm.sf(1.0), "uniform").pvalue < 1e-6
    assert TAIL == 5.0 and (values > 0).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_normals_are_standard(dtype):
    values = gaussian(200_001, dtype, generator(b"\3" * 32))
    assert values.dtype == dtype and stats.kstest(values.double().numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(values.double().numpy() * 1.02, "norm").pvalue < 1e-3


def test_a_seed_fixes_the_streams_and_the_ledger_says_so():
    weights = []
    for seed in (3, 3, 4, None, None):
        engine, module, optimizer, loader = private(tiny(), toy_data(), seed=seed)
        train(module, optimizer, loader)
        weights.append(flat(module))
        assert engine.ledger.header.noise_seed_known == (seed is not None)
    assert torch.equal(weights[0], weights[1])
    for a in range(1, 5):
        for b in range(a + 1, 5):
            assert not torch.equal(weights[a], weights[b])


def test_torchs_global_seed_does_not_reach_the_secret_streams():
    weights = []
    for _ in range(2):
        module = tiny()
        _, module, optimizer, loader = private(module, toy_data(), seed=None)
        torch.manual_seed(0)
        train(module, optimizer, loader)
        weights.append(flat(module))
    assert not torch.equal(*weights)


def test_the_secret_streams_do_not_move_torchs_global_one():
    _, module, optimizer, loader = private(tiny(), toy_data())
    state = torch.get_rng_state()
    train(module, optimizer, loader)
    assert torch.equal(state, torch.get_rng_state()) and math.isfinite(flat(module).sum())
