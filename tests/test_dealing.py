"""Compiled work that is dealt to torch's threads."""

import ctypes
import multiprocessing
import threading

import numpy as np
import pytest
import torch

from zetaclip import threads
from zetaclip.gradients import rows
from zetaclip.randomness import _noise, add_noise

compiled = pytest.mark.skipif(rows.compiled is None, reason="nothing is compiled here")


BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
START = ctypes.CFUNCTYPE(None, BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def _address(function):
    return ctypes.cast(function, ctypes.c_void_p).value


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@compiled
@pytest.mark.parametrize("width", [1, 64, 65, 128, 129, 192, 193, 1000])
def test_every_column_is_summed_once_whoever_takes_the_shares(width):
    """A library of our own: each of three threads comes after the other, the last one first."""
    started = []

    @START
    def start(body, data, count, _):
        started.append(count)
        for _ in range(count):
            body(data)

    matrix, own = np.arange(2 * width, dtype=np.float32).reshape(2, width), np.zeros(width)
    rows.compiled.weigh([(matrix, own)], 2, np.array([1.0, 2.0]), (_address(start), 3))
    assert np.array_equal(own, matrix[0] + 2.0 * matrix[1])
    assert started == ([3] if width > 64 else [])  # a share is 64 columns at least


@pytest.mark.skipif(not threads._openmp(), reason="torch has no OpenMP library here")
def test_the_library_runs_a_function_in_several_threads(three):
    both = threading.Barrier(3, timeout=30)  # passed only by three threads at a time
    body = BODY(lambda _: both.wait())
    start, count = threads.team()
    START(start)(body, None, count, 0)
    assert count == 3 and not both.broken


def test_one_thread_needs_no_library(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert threads.team() == threads.ALONE
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(threads, "_openmp", lambda: 0)
    assert threads.team() == threads.ALONE


@compiled
@pytest.mark.parametrize("team", [(0, 0), (0, -1), (0, 1 << 20), (0,), "2", (None, 2)])
def test_a_team_that_can_not_be_is_refused(team):
    own = np.zeros(4)
    with pytest.raises((TypeError, ValueError, SystemError)):
        rows.compiled.weigh([(np.ones((2, 4), np.float32), own)], 2, np.ones(2), team)
    assert not own.any()


def _in_a_fork(answers):
    own = np.zeros(1000)
    rows.compiled.weigh([(np.ones((2, 1000), np.float32), own)], 2, np.ones(2), threads.team())
    answers.put((threads.team(), own.sum()))


@compiled
def test_a_fork_does_not_wait_for_its_parents_threads(three):
    own = np.zeros(1000)
    rows.compiled.weigh([(np.ones((2, 1000), np.float32), own)], 2, np.ones(2), threads.team())
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=_in_a_fork, args=(answers,), daemon=True)
    child.start()
    assert answers.get(timeout=60) == (threads.ALONE, 2000.0)
    child.join()


@compiled
@pytest.mark.parametrize("count", [1, 127, 128, 129, 5000])
def test_noise_is_the_same_in_any_number_of_threads(monkeypatch, count):
    monkeypatch.setattr(_noise, "_SHARED", 0)
    found = []
    for several in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda several=several: several)
        values = np.zeros(count)
        add_noise(bytes(range(32)), values, 1.0, 2.0**40)
        found.append(values)
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    assert len(np.unique(found[0])) == count  # no share repeats the noise of another


@compiled
def test_sums_of_rows_are_the_same_in_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(rows, "SHARED", 0)
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(13, width, generator=generator) for width in (1, 64, 300, 5000)]
    factors = torch.rand(13, generator=generator, dtype=torch.float64)
    found = []
    for several in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda several=several: several)
        sums = [torch.zeros(m.shape[1], dtype=torch.float64) for m in matrices]
        pairs = zip(matrices, sums, strict=True)
        rows.weigh([(matrix.numpy(), own.numpy()) for matrix, own in pairs], factors)
        found.append(sums)
    exact = [factors @ matrix.double() for matrix in matrices]
    for one, two, three, whole in zip(*found, exact, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
        assert torch.allclose(one, whole, rtol=1e-12, atol=1e-12)


@compiled
@pytest.mark.parametrize("several", [1, 3])
def test_joined_rows_are_weighted_sums_of_rows_in_any_number_of_threads(monkeypatch, several):
    monkeypatch.setattr(rows, "SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: several)
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(7, *shape, generator=generator) for shape in ((1,), (3, 5), (5000,))]
    other = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    index = torch.tensor([[0, 1, 1], [2, 6, 3], [5, 4, 4], [3, 3, 3]])
    weight = torch.tensor([[0.5, 0.5, 0], [1, 2, 3], [0.25, 0.75, 0], [1, 0, 0]])
    *found, none = rows.joined([*matrices, other], index, weight)
    for matrix, out in zip(matrices, found, strict=True):
        exact = torch.einsum("us,us...->u...", weight.double(), matrix.double()[index])
        assert out.shape == exact.shape and torch.allclose(out.double(), exact, atol=2e-6)
        assert torch.equal(out[3], matrix[3])
    assert none is None  # float64 is not for the compiled part


@compiled
@pytest.mark.parametrize("bad", [-1, 7])
def test_rows_that_do_not_exist_are_not_joined(bad):
    index = torch.tensor([[0, bad]])
    with pytest.raises(ValueError, match="no such row"):
        rows.joined([torch.ones(7, 4)], index, torch.ones(1, 2))


@compiled
def test_joined_rows_are_not_written_beyond_their_memory():
    matrix, index, weights = np.ones((2, 4), np.float32), np.zeros((2, 1), np.int64), np.ones(2)
    weights = weights.astype(np.float32)
    for out in (np.zeros((1, 4), np.float32), np.zeros((3, 4), np.float32)):
        with pytest.raises(ValueError, match="don't fit"):
            rows.compiled.join([(matrix, out)], index, weights, (2, 2, 1), threads.ALONE)
        assert not out.any()
    fixed = np.zeros((2, 4), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="don't fit"):
        rows.compiled.join([(matrix, fixed)], index, weights, (2, 2, 1), threads.ALONE)
