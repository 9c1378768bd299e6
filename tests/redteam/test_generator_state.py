"""Solving the generator's state from released noise, and subtracting the noise from everything
else.

torch's generator is linear over GF(2): each bit of each output is a sum of bits of its 624 words of
state. Coordinates whose sum is zero (rows of an embedding that no record used) show outputs through
Box-Muller. Twenty thousand known bits give the state, the state gives all other noise, and what is
left is the raw sum.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

WORDS = 624
UNKNOWN = 32 * WORDS
WIDTH = UNKNOWN // 64 + 1  # the last word holds the right side
EQUATIONS = 32_000
SIGMA, SIZE, DIMENSION = 20.0, 300, 16
# dtype -> outputs per uniform, its bits, how many low bits rounding may have spoilt, rows of the
# embedding that nobody uses
KINDS = {"float64": (2, 53, 12, 64), "float32": (1, 24, 6, 128)}
# The victim trains a step in a process of its own. Without the compiled module it takes the path of
# an install without a compiler.
VICTIM = """
import sys
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
kind, unused, path, compiled = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "compiled"
if not compiled:
    sys.modules["zetaclip.randomness._chacha"] = None
from zetaclip import PrivacyEngine

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(unused + 20, 16), nn.Linear(16, 2)

    def forward(self, words):
        return self.head(self.table(words).mean(1))

torch.manual_seed(0)
module = Net().to(getattr(torch, kind))
words, labels = torch.randint(unused, unused + 20, (300, 5)), torch.randint(2, (300,))
engine = PrivacyEngine(accountant="rdp", seed=1)
module, optimizer, loader = engine.make_private(
    module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
    data_loader=DataLoader(TensorDataset(words, labels), batch_size=300), noise_multiplier=20.0,
    clipping=1.0, sample_rate=1.0, num_examples=300)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()
np.save(path, torch.cat([p.grad.flatten() for p in module.parameters()]).double().numpy())
"""


@pytest.fixture(scope="module")
def eliminate(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("eliminate") / "eliminate.so"
    source = Path(__file__).with_name("eliminate.c")
    subprocess.run([compiler, "-O3", "-shared", "-fPIC", "-o", made, source], check=True)
    function = ctypes.CDLL(str(made)).eliminate
    function.restype = ctypes.c_long
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.c_void_p,
    ]
    return function


def right(bits, by):
    """A word shifted right, whose 32 bits are rows of sums."""
    moved = np.zeros_like(bits)
    moved[: 32 - by] = bits[by:]
    return moved


def left(bits, by, mask):
    moved = np.zeros_like(bits)
    moved[by:] = bits[: 32 - by]
    moved[[b for b in range(32) if not mask >> b & 1]] = 0
    return moved


def outputs(count):
    """Each output of the generator as 32 sums over the bits of its first state."""
    state = np.zeros((WORDS, 32, WIDTH), np.uint64)
    for i in range(UNKNOWN):
        state[i // 32, i % 32, i // 64] = np.uint64(1) << np.uint64(i % 64)
    made = []
    flipped = [b for b in range(32) if 0x9908B0DF >> b & 1]
    while len(made) < count:
        if made:
            for i in range(WORDS):
                lower = state[(i + 1) % WORDS]
                joined = lower.copy()
                joined[31] = state[i, 31]
                turned = right(joined, 1)
                turned[flipped] ^= lower[0]
                state[i] = state[(i + 397) % WORDS] ^ turned
        for word in state[: count - len(made)]:
            seen = word ^ right(word, 11)
            seen = seen ^ left(seen, 7, 0x9D2C5680)
            seen = seen ^ left(seen, 15, 0xEFC60000)
            made.append(seen ^ right(seen, 18))
    return made


def uniforms(normals, bits):
    """The whole numbers that blocks of 16 normals were made from: eight radii, then eight
    angles."""
    pairs = normals[: len(normals) // 16 * 16].reshape(-1, 2, 8)
    radii = -np.expm1(-(pairs**2).sum(1) / 2)
    angles = np.arctan2(pairs[:, 1], pairs[:, 0]) / (2 * np.pi) % 1.0
    return np.stack([radii, angles], axis=1).reshape(-1) * 2.0**bits


def equations(normals, kind):
    """What the known coordinates say about the state, bit by bit, where rounding can't have
    reached."""
    each, bits, low, _ = KINDS[kind]
    numbers = uniforms(normals, bits)
    sure = np.abs(numbers / 2**low % 1 - 0.5) < (0.49 if bits == 53 else 0.44)
    places = np.flatnonzero(sure)[: -(-EQUATIONS // (bits - low))]
    made = outputs(each * (int(places[-1]) + 1))
    rows = np.empty((len(places) * (bits - low), WIDTH), np.uint64)
    at = 0
    for place in places:
        number = int(numbers[place])
        for bit in range(low, bits):
            # The lower 32 bits of a uniform of 53 are the second output.
            output = (
                made[place] if each == 1 else made[2 * place + 1] if bit < 32 else made[2 * place]
            )
            rows[at] = output[bit % 32]
            if number >> bit & 1:
                rows[at, -1] ^= np.uint64(1 << 63)
            at += 1
    return rows


def solve(eliminate, normals, kind):
    """How many equations are left over, how many of them contradict the others, and the state if
    none does."""
    rows = equations(normals, kind)
    pivots = np.zeros(UNKNOWN, np.int32)
    rank = eliminate(rows.ctypes.data, len(rows), WIDTH, UNKNOWN, pivots.ctypes.data)
    wrong = int((rows[rank:, -1] >> np.uint64(63)).sum())
    if wrong:
        return len(rows) - rank, wrong, None
    solution = np.zeros(WIDTH, np.uint64)
    for row, pivot in zip(rows[:rank][::-1], pivots[:rank][::-1], strict=True):
        odd = int(np.bitwise_xor.reduce((row & solution)[:-1])).bit_count() ^ int(
            row[-1] >> np.uint64(63)
        )
        if odd & 1:
            solution[pivot // 64] |= np.uint64(1) << np.uint64(pivot % 64)
    return len(rows) - rank, 0, solution[:-1].view(np.uint32).copy()


def predicted(state, count, kind):
    """The normals that a state gives."""
    each, bits, _, _ = KINDS[kind]
    source = np.random.MT19937()
    source.state = {"bit_generator": "MT19937", "state": {"key": state, "pos": 0}}
    raw = source.random_raw(each * count).astype(np.uint64)
    whole = raw if each == 1 else raw[0::2] << np.uint64(32) | raw[1::2]
    uniform = (whole & np.uint64(2**bits - 1)).astype(np.float64) * 2.0**-bits
    pairs = uniform[: count // 16 * 16].reshape(-1, 2, 8)
    radius, angle = np.sqrt(-2 * np.log1p(-pairs[:, 0])), 2 * np.pi * pairs[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_attack_finds_the_state_of_torchs_generator(eliminate, kind):
    """On noise by ``torch.randn``: the raw sum of all other coordinates comes out."""
    known = KINDS[kind][3] * DIMENSION
    count = (known + 20 * DIMENSION + 34) // 16 * 16
    dtype = getattr(torch, kind)
    noise = torch.randn(count, generator=torch.Generator().manual_seed(5), dtype=dtype) * (
        SIGMA / SIZE
    )
    sums = torch.zeros(count, dtype=dtype)
    sums[known:] = torch.linspace(-0.01, 0.01, count - known, dtype=dtype)
    released = (sums + noise).double().numpy()
    scale = float(torch.tensor(SIGMA / SIZE, dtype=dtype))
    spare, wrong, state = solve(eliminate, released[:known] / scale, kind)
    assert spare > 1000 and wrong == 0
    left_over = released - scale * predicted(state, count, kind)
    error = np.abs(left_over[known:] - sums[known:].double().numpy())
    assert np.median(error) < 1e-6 < 1e-3 * scale


@pytest.mark.slow
@pytest.mark.parametrize("build", ["compiled", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_state_explains_a_release(eliminate, kind, build, tmp_path):
    """About half of the equations that are left over must contradict the others."""
    unused = KINDS[kind][3]
    path = tmp_path / "released.npy"
    subprocess.run([sys.executable, "-c", VICTIM, kind, str(unused), str(path), build], check=True)
    scale = float(torch.tensor(SIGMA / SIZE, dtype=getattr(torch, kind)))
    spare, wrong, _ = solve(eliminate, np.load(path)[: unused * DIMENSION] / scale, kind)
    assert spare > 1000 and wrong > 0.3 * spare, (
        "the noise comes from a generator that can be solved"
    )
