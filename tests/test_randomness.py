"""Keys, generators, and the tails of the normal law."""

import math
import struct

import numpy as np
import pytest
import torch
from helpers import flat, private, tiny, toy_data, train
from scipy import stats

import zetaclip.randomness as randomness
from zetaclip.randomness import TAIL, Stream, few_gaussians, gaussian, generator, subkey


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
    ours = [gaussian(k, 1000, torch.float32) for k in (low, high)]
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


@pytest.fixture(params=["compiled", "torch"])
def source(request, monkeypatch):
    """Each test below runs with both sources of float32 noise."""
    if request.param == "torch":
        monkeypatch.setattr(randomness, "_compiled", None)
    elif randomness._compiled is None:
        pytest.skip("zetaclip was built without a C compiler")
    return request.param


def key(number):
    return number.to_bytes(32, "little")


def test_the_normal_law_has_tails(source):
    """torch's own float32 normals end at 5.77; ours go on, as often as they should."""
    beyond = np.zeros(3)
    limits = np.array([4.0, 5.0, 5.3])
    count, plain = 0, 0.0
    for number in range(40):
        values = gaussian(key(number), 1_000_000, torch.float32).abs()
        beyond += [int((values > limit).sum()) for limit in limits]
        count += len(values)
        if number < 5:
            plain = max(plain, float(torch.randn(1_000_000).abs().max()))
    expected = count * 2 * stats.norm.sf(limits)
    assert (stats.poisson.sf(beyond - 1, expected) > 1e-4).all() and (stats.poisson.cdf(beyond, expected) > 1e-4).all()
    # A tail that is a tenth too heavy or too light would be seen.
    assert (
        stats.poisson.sf(beyond[0] - 1, expected[0] / 1.1) < 1e-3
        and stats.poisson.cdf(beyond[0], expected[0] * 1.1) < 1e-3
    )
    assert plain < 5.78


def test_far_values_of_torchs_normals_follow_the_exact_conditional_law(monkeypatch):
    """With the threshold moved to 1 the redrawn part is large enough to test: still normal, and not otherwise."""
    monkeypatch.setattr(randomness, "_compiled", None)
    monkeypatch.setattr(randomness, "TAIL", 1.0)
    values = gaussian(key(2), 200_000, torch.float32).double().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    far = np.abs(values[np.abs(values) > 1.0])
    assert stats.kstest(stats.norm.sf(far) / stats.norm.sf(1.0), "uniform").pvalue > 1e-3
    assert stats.kstest(stats.norm.sf(far * 1.05) / stats.norm.sf(1.0), "uniform").pvalue < 1e-6
    assert TAIL == 5.0 and (values > 0).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 63, 129, 200_001])
def test_normals_are_standard(dtype, numel, source):
    values = gaussian(key(3), numel, dtype)
    assert values.dtype == dtype and values.shape == (numel,) and torch.isfinite(values).all()
    assert torch.equal(values, gaussian(key(3), numel, dtype))
    if numel > 1000:
        plain = values.double().numpy()
        assert stats.kstest(plain, "norm").pvalue > 1e-3 and stats.kstest(plain * 1.02, "norm").pvalue < 1e-3
        # Neighbours in memory, partners of one pair, and squares: no correlation that a normal sample would not have.
        for lag in (1, 8, 16, 64, 128):
            for power in (1, 2):
                a, b = plain[:-lag] ** power, plain[lag:] ** power
                assert abs(np.corrcoef(a, b)[0, 1]) < 5 / len(a) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scaled_noise_is_the_same_noise_times_the_scale(dtype, source):
    assert torch.equal(gaussian(key(4), 1000, dtype, 0.37), gaussian(key(4), 1000, dtype) * 0.37)
    assert not gaussian(key(4), 1000, dtype, 0.0).any()


def test_a_few_normals_are_standard_and_reach_far(monkeypatch):
    values = np.array(few_gaussians(key(6), 50_000))
    assert list(values) == few_gaussians(key(6), 50_000) and few_gaussians(key(6), 0) == []
    assert list(values[:10]) == few_gaussians(key(6), 10) != few_gaussians(key(7), 10)
    assert stats.kstest(values, "norm").pvalue > 1e-3 and stats.kstest(values * 1.04, "norm").pvalue < 1e-3
    assert abs(np.corrcoef(np.sign(values), np.abs(values))[0, 1]) < 5 / len(values) ** 0.5
    # Words by hand: the signs, the middle and both ends of the tail, against scipy's quantiles.
    words = [0, -(2**63), 2**63 - 1, -1, 2**62, 12345, -(2**40)]

    class Words:
        def digest(self, size):
            return struct.pack(f"<{len(words)}q", *words)

    monkeypatch.setattr(randomness.hashlib, "shake_256", lambda data: Words())
    found = few_gaussians(b"", len(words))
    for value, word in zip(found, words, strict=True):
        tail = stats.norm.isf(((word % 2**63) + 0.5) * 2.0**-64)
        assert value == pytest.approx(tail if word >= 0 else -tail, rel=1e-12, abs=1e-12)
    assert found[0] == -found[1] > 9.1 and found[2] == found[3] == 0.0


def test_the_stream_cipher_is_chacha():
    """The first block under a key of zeros, as published for 20 rounds and for 12."""
    if randomness._compiled is None:
        pytest.skip("zetaclip was built without a C compiler")
    published = {
        20: "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7",
        12: "9bf49a6a0755f953811fce125f2683d5",
    }
    for rounds, start in published.items():
        assert randomness._compiled.stream(bytes(32), rounds).hex().startswith(start)


def test_pairs_lie_evenly_on_the_circle():
    """Angle and radius of a pair are independent, and the angle is uniform: the compiled source turns each point itself."""
    if randomness._compiled is None:
        pytest.skip("zetaclip was built without a C compiler")
    values = gaussian(key(5), 128 * 2000, torch.float32).view(-1, 2, 64).double()
    x, y = values[:, 0].flatten().numpy(), values[:, 1].flatten().numpy()
    angle, radius = (np.arctan2(y, x) / (2 * np.pi)) % 1.0, np.hypot(x, y)
    assert stats.kstest(angle, "uniform").pvalue > 1e-3
    assert stats.kstest(np.exp(-(radius**2) / 2), "uniform").pvalue > 1e-3
    assert abs(stats.spearmanr(angle, radius).statistic) < 0.02
    assert stats.kstest((angle * 4) % 1.0, "uniform").pvalue > 1e-3  # within quadrants, where a kink would show


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
