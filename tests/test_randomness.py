"""Keys, and the noise and coins that are made from them, with and without the compiled part."""

import math
import sys
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from helpers import flat, private, tiny, toy_data, train
from scipy import stats

import zetaclip.randomness._noise as source_module
from zetaclip.mechanism import Coins, Draw
from zetaclip.randomness import (
    Stream,
    _compiled,
    _numpy,
    add_noise,
    generator,
    normals,
    subkey,
    uniforms,
)

needs_compiler = pytest.mark.skipif(
    _compiled is None, reason="zetaclip was built without a C compiler"
)


@pytest.fixture(params=["compiled", "numpy"])
def source(request, monkeypatch):
    """Each test that asks for this runs with both ways to make noise."""
    if request.param == "numpy":
        monkeypatch.setattr(source_module, "_compiled", None)
    elif _compiled is None:
        pytest.skip("zetaclip was built without a C compiler")
    return request.param


def key(number):
    return number.to_bytes(32, "little")


# -- a cipher and a normal law that share no code with the package ---------------------------------


def chacha_block(key, counter, nonce, rounds):
    """One block as 16 words, from the description of the cipher."""
    words = [int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)]
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *words]
    start += [counter % 2**32, counter >> 32, nonce, 0]
    state = list(start)

    def mix(a, b, c, d):
        for to, by, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[to] = (state[to] + state[by]) % 2**32
            x = state[turned] ^ state[to]
            state[turned] = (x << bits | x >> (32 - bits)) % 2**32

    for _ in range(rounds // 2):
        for i in range(4):
            mix(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return [(x + y) % 2**32 for x, y in zip(state, start, strict=True)]


def words_of(key, group, nonce):
    """The 128 words of eight blocks, word by word."""
    blocks = [chacha_block(key, 8 * group + lane, nonce, 12) for lane in range(8)]
    return [block[word] for word in range(16) for block in blocks]


def exact_pair(key, pair):
    """Both values of a pair with 40 digits, and the exponent that was drawn for its radius."""
    words = words_of(key, pair // 32, 0)
    low, high, angle_low, angle_high = (words[32 * part + pair % 32] for part in range(4))
    word = high << 32 | low
    exponent = (word >> 52).bit_length() - 13
    if word >> 52 == 0:
        more = words_of(key, pair, 1)
        exponent = -77 + (more[8] << 32 | more[0]).bit_length()
    word_angle = angle_high << 32 | angle_low
    with mpmath.workdps(40):
        u = mpmath.mpf(word % 2**52 + 2**52) * mpmath.mpf(2) ** (exponent - 52)
        radius = mpmath.sqrt(-2 * mpmath.log(u))
        # 52 bits from -pi/4 to pi/4, and two for the quadrant: half turns, and a quarter turn.
        share = (mpmath.mpf(word_angle >> 10 & 2**52 - 1) + mpmath.mpf(1) / 2) / 2**52 - mpmath.mpf(
            1
        ) / 2
        c, s = mpmath.cos(share * mpmath.pi / 2), mpmath.sin(share * mpmath.pi / 2)
        if word_angle >> 62 & 1:
            c, s = s, c
        c = -c if (word_angle >> 63 ^ word_angle >> 62) & 1 else c
        s = -s if word_angle >> 63 else s
        return radius * c, radius * s, exponent


def test_the_cipher_is_chacha():
    """The first block under a key of zeros, as published for 20 rounds and for 12."""
    published = {
        20: "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7",
        12: "9bf49a6a0755f953811fce125f2683d5",
    }
    for rounds, start in published.items():
        found = {"here": chacha_block(bytes(32), 0, 0, rounds)}
        found["numpy"] = _numpy.stream(bytes(32), 0, 1, 0, rounds)[0].reshape(16, 8)[:, 0].tolist()
        if _compiled is not None:
            words = np.frombuffer(_compiled.stream(bytes(32), 0, 0, rounds), dtype=np.uint32)
            found["compiled"] = words.reshape(16, 8)[:, 0].tolist()
        for words in found.values():
            assert b"".join(word.to_bytes(4, "little") for word in words).hex().startswith(start)


def test_every_value_is_the_normal_value_of_its_bits(source):
    """Against 40 digits: an ordinary group, and every pair whose exponent comes from the stream of
    the tails."""
    count = 64 * 1500
    values = normals(key(1), count)
    high = _numpy.stream(key(1), 0, count // 64, 0)[:, 32:64]
    rare = np.argwhere(high < 2**20)
    assert len(rare) >= 5
    deepest = 0
    for pair in [*range(64), *(int(group) * 32 + int(place) for group, place in rare)]:
        c, s, exponent = exact_pair(key(1), pair)
        group, place = divmod(pair, 32)
        for found, exact in ((values[64 * group + place], c), (values[64 * group + 32 + place], s)):
            assert abs(found - exact) <= 4 * 2.0**-53 * abs(exact)
        deepest = min(deepest, exponent)
    assert deepest <= -13


@needs_compiler
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 5000, 400_003])
def test_both_sources_agree_bit_for_bit(count, monkeypatch):
    start = np.random.default_rng(0).normal(size=count) * 100
    made = []
    for compiled in (_compiled, None):
        monkeypatch.setattr(source_module, "_compiled", compiled)
        noisy = start.copy()
        noisy[::2] *= -1e-30  # a zero must not keep the sign of what was rounded to it
        add_noise(key(7), noisy, 2.0**9, 3.3)
        made.append((normals(key(7), count), uniforms(key(7), count), noisy))
    for one, other in zip(*made, strict=True):
        assert np.array_equal(one.view(np.uint64), other.view(np.uint64))


# -- the law ---------------------------------------------------------------------------------------


def test_the_normal_law_has_tails(source):
    limits = np.array([4.0, 4.5, 5.0])
    beyond, count = np.zeros(3), 0
    for number in range(40 if source == "compiled" else 6):
        values = np.abs(normals(key(number), 1_000_000))
        beyond += [(values > limit).sum() for limit in limits]
        count += len(values)
    expected = count * 2 * stats.norm.sf(limits)
    low, high = stats.poisson.cdf(beyond, expected), stats.poisson.sf(beyond - 1, expected)
    assert (low > 1e-4).all() and (high > 1e-4).all()
    if source == "compiled":  # a tail that is a tenth too heavy or too light would be seen
        assert stats.poisson.sf(beyond[0] - 1, expected[0] / 1.1) < 1e-3
        assert stats.poisson.cdf(beyond[0], expected[0] * 1.1) < 1e-3


@pytest.mark.parametrize("count", [0, 1, 63, 129, 200_001])
def test_normals_are_standard(count, source):
    values = normals(key(3), count)
    assert values.dtype == np.float64 and values.shape == (count,) and np.isfinite(values).all()
    assert np.array_equal(values[: count // 2], normals(key(3), count // 2))
    if count > 1000:
        assert stats.kstest(values, "norm").pvalue > 1e-3
        assert stats.kstest(values * 1.02, "norm").pvalue < 1e-3
        # Neighbours in memory, partners of a pair, and squares: no correlation beyond that of a
        # normal sample.
        for lag in (1, 8, 32, 64, 128):
            for power in (1, 2):
                a, b = values[:-lag] ** power, values[lag:] ** power
                assert abs(np.corrcoef(a, b)[0, 1]) < 5 / len(a) ** 0.5


def test_pairs_lie_evenly_on_the_circle(source):
    """Angle and radius of a pair are independent, and the angle is uniform, also within
    quadrants."""
    x, y = np.moveaxis(normals(key(5), 64 * 4000).reshape(-1, 2, 32), 1, 0).reshape(2, -1)
    angle, radius = (np.arctan2(y, x) / (2 * np.pi)) % 1.0, np.hypot(x, y)
    assert stats.kstest(angle, "uniform").pvalue > 1e-3
    assert stats.kstest(np.exp(-(radius**2) / 2), "uniform").pvalue > 1e-3
    assert abs(stats.spearmanr(angle, radius).statistic) < 0.02
    assert stats.kstest((angle * 4) % 1.0, "uniform").pvalue > 1e-3


def test_the_last_digits_of_radii_lie_on_no_coarse_grid(source):
    """exp(-r²/2) is a uniform: of 24 bits it would be whole multiples of 2^-24, as noise of float32
    once was."""

    def misfit(u):
        scaled = u[u > 0.98] * 2.0**24
        return float(np.abs(scaled - np.round(scaled)).mean())

    x, y = np.moveaxis(normals(key(6), 64 * 4000).reshape(-1, 2, 32), 1, 0).reshape(2, -1)
    u = np.exp(-(x**2 + y**2) / 2)
    assert misfit(u) == pytest.approx(0.25, abs=0.02)
    assert misfit(np.floor(u * 2**24) / 2**24) < 0.01  # the test can fail


def test_noise_is_rounded_and_added_to_rounded_sums(source):
    sums = np.linspace(-3, 5, 1001)
    noisy = sums.copy()
    add_noise(key(4), noisy, 2.0**10, 777.25)
    assert np.array_equal(noisy, np.rint(sums * 2.0**10) + np.rint(normals(key(4), 1001) * 777.25))
    still = sums.copy()
    add_noise(key(4), still, 2.0**10, 0.0)
    assert np.array_equal(still, np.rint(sums * 2.0**10))
    for scale in (2.0**48, math.inf, math.nan, -1.0):
        with pytest.raises(ValueError, match="more than float64 can count"):
            add_noise(key(4), still, 1.0, scale)


@needs_compiler
def test_the_compiled_part_takes_float64_buffers_alone():
    good = np.zeros(10)
    for bad in (good.astype(np.float32), np.zeros(20)[::2], np.zeros(10, dtype=np.int64)):
        with pytest.raises((TypeError, ValueError, BufferError)):
            _compiled.normals(key(1), bad)
    good.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        _compiled.normals(key(1), good)
    with pytest.raises(ValueError, match="32 bytes"):
        _compiled.normals(b"short", np.zeros(3))


@needs_compiler
def test_keys_are_overwritten_by_a_call_that_no_compiler_leaves_out():
    """A memset of memory that is not read again is optimised away."""
    library = Path(_compiled.__file__).read_bytes()
    if not sys.platform.startswith("linux"):
        pytest.skip("explicit_bzero is glibc's")
    assert b"explicit_bzero" in library


# -- keys and coins --------------------------------------------------------------------------------


def test_uniforms_have_53_bits(source):
    values = uniforms(key(8), 100_000)
    whole = values * 2.0**53
    assert (values >= 0).all() and (values < 1).all() and np.array_equal(whole, np.round(whole))
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    assert (whole % 2 == 1).mean() == pytest.approx(0.5, abs=0.01)  # the last bit is used
    words = words_of(key(8), 0, 2)
    assert [int(w) for w in whole[:64]] == [
        (words[64 + i] << 32 | words[i]) >> 11 for i in range(64)
    ]


def test_coins_are_the_same_however_they_are_asked_for():
    coins = Coins(key(9))
    asked = torch.cat([coins(count) for count in (3, 0, 70, 1)])
    assert torch.equal(asked, torch.from_numpy(uniforms(key(9), 74)))
    assert len(set(asked.tolist())) == 74


def test_every_use_of_a_batch_has_a_key_of_its_own():
    draw = Draw(0, 0, "sum", 0, 1.0, 1.0, 0.5, 10.0, key(10))
    keys = [
        draw.noise_key,
        draw.coin_key,
        draw.sum_key,
        draw.extra_key("count"),
        draw.extra_key("slack"),
    ]
    assert len(set(keys)) == len(keys)
    # Streams of one key are apart as well: noise, tails and coins.
    assert len({tuple(words_of(key(10), 0, nonce)) for nonce in (0, 1, 2)}) == 3
    assert not np.array_equal(
        _numpy.stream(key(10), 0, 1, _numpy.NOISE), _numpy.stream(key(10), 0, 1, _numpy.TAIL)
    )


def test_the_whole_state_of_torchs_generator_comes_from_the_key():
    """It then agrees with numpy's Mersenne Twister in the same state, which nobody here wrote."""
    import hashlib

    own = bytes(range(32))
    words = np.frombuffer(hashlib.shake_256(b"state\0" + own).digest(4 * 624), dtype="<u4")
    theirs = np.random.MT19937()
    theirs.state = {
        "bit_generator": "MT19937",
        "state": {"key": words.astype(np.uint32), "pos": 624},
    }
    expected = (
        theirs.random_raw(1000).astype(np.int64) % 2**24
    )  # the bits that a float32 uniform keeps
    drawn = (torch.rand(1000, generator=generator(own), dtype=torch.float32) * 2**24).long()
    assert np.array_equal(drawn.numpy(), expected)


def test_keys_that_differ_above_bit_32_give_other_noise():
    ours = [normals(key(n), 1000) for n in (123, 123 + (1 << 40))]
    assert not np.array_equal(*ours) and abs(np.corrcoef(*ours)[0, 1]) < 0.15
    # What a plain seed does with the same two numbers.
    seeded = [
        torch.randn(1000, generator=torch.Generator().manual_seed(n))
        for n in (123, 123 + (1 << 40))
    ]
    assert torch.equal(*seeded)


def test_a_stream_moves_one_way_and_never_repeats():
    stream = Stream.seeded(1, "noise")
    before = stream.state
    ahead = stream.copy()
    keys = [stream.draw() for _ in range(200)]
    assert len(set(keys)) == 200 and [ahead.draw() for _ in range(200)] == keys
    # Nothing that was drawn, and no earlier state, can be found in or derived from the state by
    # going on.
    later = Stream(stream.state)
    assert not set(keys) & {later.draw() for _ in range(500)} and stream.state != before
    assert Stream.fresh().state != Stream.fresh().state
    assert (
        Stream.seeded(1, "noise").state
        != Stream.seeded(1, "sampling").state
        != Stream.seeded(2, "sampling").state
    )
    assert subkey(keys[0], "coins") != subkey(keys[0], "sum")
    with pytest.raises(ValueError, match="32 bytes"):
        Stream(b"short")


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
