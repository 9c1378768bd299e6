"""``_chacha.c`` without a compiler: bit-identical results, tens of times slower.

Only +, -, *, / and square roots of float64 are used, in the order of the C source. numpy rounds
each of them as the standard requires, so both give the same numbers. Change both files together.
"""

from __future__ import annotations

import numpy as np

LANES = 8
WORDS = 16 * LANES
PAIRS = WORDS // 4
VALUES = 2 * PAIRS
ROUNDS = 12
NOISE, TAIL, COINS = 0, 1, 2  # nonces, which make the streams of one key independent

_GROUPS = 512  # processed at once, so that their arrays stay in the cache
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_MANTISSA = np.uint64(0x000FFFFFFFFFFFFF)
_ONE = np.uint64(0x3FF0000000000000)
_SIGN = np.uint64(1 << 63)
_ROUNDER = 1.5 * 2.0**52
_LN2, _HALF_PI, _ROOT2 = 0.6931471805599453, 1.5707963267948966, 1.4142135623730951
_SINE = [1.0 / n for n in (6227020800, -39916800, 362880, -5040, 120, -6)]
_COSINE = [1.0 / n for n in (-87178291200, 479001600, -3628800, 40320, -720, 24, -2)]


def stream(key: bytes, first: int, groups: int, nonce: int, rounds: int = ROUNDS) -> np.ndarray:
    """Groups of eight ChaCha blocks, word by word, as ``blocks`` in C.

    Args:
        key: 32 bytes.
        first: Number of the first group.
        groups: How many.
        nonce: Which stream of the key.
        rounds: Rounds of the cipher.

    Returns:
        An array of shape (groups, WORDS).
    """
    group = np.arange(first, first + groups, dtype=np.uint64)[:, None]
    counter: np.ndarray = group * np.uint64(LANES) + np.arange(LANES, dtype=np.uint64)
    shape = counter.shape
    low, high = counter.astype(np.uint32), (counter >> np.uint64(32)).astype(np.uint32)
    words = [*_CONSTANTS, *np.frombuffer(key, dtype="<u4")]
    start = [np.full(shape, word, dtype=np.uint32) for word in words]
    start += [low, high, np.full(shape, nonce, dtype=np.uint32), np.zeros(shape, dtype=np.uint32)]
    x = [word.copy() for word in start]

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for one, other, target, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[one] += x[other]
            mixed = x[target] ^ x[one]
            x[target] = (mixed << np.uint32(turn)) | (mixed >> np.uint32(32 - turn))

    for _ in range(0, rounds, 2):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return np.stack([a + b for a, b in zip(x, start, strict=True)], axis=1).reshape(groups, WORDS)


def _joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return high.astype(np.uint64) << np.uint64(32) | low


def _radius(m: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    f = (m | _ONE).view(np.float64)
    half = f >= _ROOT2
    power = np.where(half, exponent + 1.0, exponent)
    x = np.where(half, 0.5 * f, f) - 1.0
    s = x / (x + 2.0)
    z = s * s
    p = np.full_like(z, 1.0 / 21.0)
    for n in (19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        p = p * z + 1.0 / n
    p = p * z * s + s
    return np.sqrt(-2.0 * (power * _LN2 + 2.0 * p))


def _normal_groups(key: bytes, first: int, groups: int) -> np.ndarray:
    """(groups, VALUES) standard normal values."""
    k = stream(key, first, groups, NOISE)
    parts = [k[:, i * PAIRS : (i + 1) * PAIRS] for i in range(4)]
    word = _joined(parts[0], parts[1])
    m, leading = word & _MANTISSA, (word >> np.uint64(52)).astype(np.int64)
    exponent = np.frexp(leading.astype(np.float64))[1] - 13.0
    for group, pair in np.argwhere(leading == 0):
        more = stream(key, (first + int(group)) * PAIRS + int(pair), 1, TAIL)[0]
        exponent[group, pair] = (int(more[LANES]) << 32 | int(more[0])).bit_length() - 77.0
    r = _radius(m, exponent)

    word = _joined(parts[2], parts[3])
    f = (word >> np.uint64(10) & _MANTISSA | _ONE).view(np.float64)
    a = ((f - 1.5) + 1.1102230246251565e-16) * _HALF_PI
    z = a * a
    p = np.full_like(z, -1.0 / 1307674368000.0)
    for coefficient in _SINE:
        p = p * z + coefficient
    q = np.full_like(z, 1.0 / 20922789888000.0)
    for coefficient in _COSINE:
        q = q * z + coefficient
    s, c = (p * z * a + a).view(np.uint64), (q * z + 1.0).view(np.uint64)
    both = (s ^ c) * (word >> np.uint64(62) & np.uint64(1))
    c = c ^ both ^ ((word ^ word << np.uint64(1)) & _SIGN)
    s = s ^ both ^ (word & _SIGN)
    return np.concatenate([r * c.view(np.float64), r * s.view(np.float64)], axis=1)


def normals(key: bytes, values: np.ndarray) -> None:
    """Fills a float64 array with standard normal values."""
    for begin in range(0, len(values), _GROUPS * VALUES):
        part = values[begin : begin + _GROUPS * VALUES]
        groups = -(-len(part) // VALUES)
        part[:] = _normal_groups(key, begin // VALUES, groups).reshape(-1)[: len(part)]


def add_noise(key: bytes, values: np.ndarray, inverse: float, scale: float) -> None:
    """In a float64 array: value = round(value * inverse) + round(standard normal * scale).

    Args:
        key: 32 bytes.
        values: The array.
        inverse: One divided by the grid.
        scale: Standard deviation of the noise in units of the grid.
    """
    noise = np.empty_like(values)
    normals(key, noise)
    to_whole(values, inverse)
    to_whole(noise, scale)
    values += noise


def to_whole(values: np.ndarray, factor: float) -> None:
    """Computes value = round(value * factor) in place.

    ``rint`` would not do: a zero would keep the sign of what was rounded to it.

    Args:
        values: float64, below 2^51 after the product.
        factor: What to multiply by before rounding.
    """
    values *= factor
    values += _ROUNDER
    values -= _ROUNDER


def uniforms(key: bytes, values: np.ndarray) -> None:
    """Fills a float64 array with multiples of 2^-53 in [0, 1)."""
    half = WORDS // 2
    for begin in range(0, len(values), _GROUPS * half):
        part = values[begin : begin + _GROUPS * half]
        k = stream(key, begin // half, -(-len(part) // half), COINS)
        word = _joined(k[:, :half], k[:, half:]) >> np.uint64(11)
        part[:] = (word.astype(np.float64) * 2.0**-53).reshape(-1)[: len(part)]
