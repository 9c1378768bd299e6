"""Engines in several threads share torch's generators: nothing breaks, nothing secret is published,
no mask is public."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from helpers import mean_loss, private, tiny, toy_data, train
from torch import nn
from torch.utils.data import Dataset

from zetaclip.engine._data_digest import digest_of
from zetaclip.engine._records import zero_row
from zetaclip.gradients.capture import exact
from zetaclip.randomness import _forward as tape
from zetaclip.randomness._forward import (
    ForwardRng,
    alone,
    drawing_from,
    set_users_streams,
    untouched,
    users_streams,
)

CPU = torch.device("cpu")


class Augmented(Dataset):
    """Draws from all three streams for each record; not in memory, so reading goes through
    ``drawing_from``."""

    def __init__(self, size=40, pause=0.0):
        self.size, self.pause = size, pause

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.pause)
        drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor(drawn * 2), index % 3


def dropped():
    return nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))


def in_threads(*calls):
    """Runs the calls at once, each in its thread; what they raised."""
    errors = []

    def guarded(call):
        try:
            call()
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.fixture
def quick_switches():
    """Threads take turns so often that what can go wrong between two lines does."""
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("data", [toy_data(40), Augmented()], ids=["in memory", "read one by one"])
def test_the_users_streams_survive_two_engines_in_two_threads(tmp_path, quick_switches, data):
    """Every checkpoint that is saved on the way, and torch, numpy and Python in the end, have what
    the user had."""
    runs = [private(dropped(), data, q=0.1, seed=None) for _ in range(2)]
    own, numpys, pythons = (
        torch.get_rng_state(),
        np.random.get_state()[1].tolist(),
        random.getstate(),
    )
    published = []

    def loop(which):
        engine, module, optimizer, loader = runs[which]
        path = tmp_path / f"{which}.pt"
        for _ in range(6 + which):
            train(module, optimizer, loader, mean_loss)
            engine.save(path)
            published.append(torch.load(path, weights_only=True)["public_streams"][0]["cpu"])

    assert in_threads(lambda: loop(0), lambda: loop(1)) == []
    assert all(torch.equal(state, own) for state in published)
    assert torch.equal(torch.get_rng_state(), own)
    assert np.random.get_state()[1].tolist() == numpys and random.getstate() == pythons
    assert not ForwardRng._out and not ForwardRng._aside


def test_a_chunk_of_another_thread_draws_no_number_twice():
    """Records are read while another thread draws masks: that must not set its stream back."""
    drawn, key = [], b"k" * 32

    def other():
        lent = ForwardRng(CPU)
        lent.lend(b"l" * 32)
        lends.set()
        while not done.is_set():
            drawn.append(float(torch.rand((), dtype=torch.float64)))
        lent.take_back()

    lends, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    lends.wait()
    for i in range(100):
        with drawing_from(key[:-1] + bytes([i])):
            pass
        with untouched():
            float(torch.rand((), dtype=torch.float64))
    done.set()
    thread.join()
    assert len(drawn) > 100 and len(set(drawn)) == len(drawn)


def test_loading_a_checkpoint_gives_another_engines_chunk_no_public_masks(tmp_path):
    one, *_ = private(tiny(), toy_data(), seed=None)
    torch.manual_seed(77)
    one.save(tmp_path / "run.pt")
    public = torch.get_rng_state()
    torch.manual_seed(78)
    other, _, _, batches = private(dropped(), toy_data(), seed=None)
    next(iter(batches))
    one.load(tmp_path / "run.pt")
    assert not torch.equal(torch.get_rng_state(), public), "the other engine's chunk is still out"
    assert torch.equal(users_streams(CPU)["cpu"], public)
    other.detach()
    assert torch.equal(torch.get_rng_state(), public)


def test_states_are_set_at_once_where_the_engine_that_had_them_is_gone():
    left = ForwardRng(CPU)
    left.lend(b"l" * 32)
    wanted = torch.Generator().manual_seed(5).get_state()
    del left
    set_users_streams({"cpu": wanted}, CPU)
    assert torch.equal(torch.get_rng_state(), wanted)


def test_a_public_seed_waits_for_the_chunks_of_other_threads(monkeypatch):
    """A digest seeds torch in public: masks that were drawn meanwhile would be known to
    everybody."""
    lends, end, found = threading.Event(), threading.Event(), []

    def other():
        lent = ForwardRng(CPU)
        lent.lend(b"l" * 32)
        lends.set()
        while not end.is_set():
            found.append(torch.initial_seed())
        lent.take_back()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    lends.wait()
    monkeypatch.setattr(tape, "PATIENCE", 0.05)
    with pytest.raises(RuntimeError, match="another thread"):
        digest_of(Augmented())
    monkeypatch.setattr(tape, "PATIENCE", 60.0)
    threading.Timer(0.1, end.set).start()
    digest = digest_of(Augmented(pause=0.001))
    thread.join()
    assert 0 not in found, "the other thread never saw the public seed"
    assert digest == digest_of(Augmented())


def test_a_thread_that_ended_with_its_chunk_out_holds_nobody_up(monkeypatch):
    left = ForwardRng(CPU)
    thread = threading.Thread(target=left.lend, args=(b"l" * 32,))
    thread.start()
    thread.join()
    monkeypatch.setattr(tape, "PATIENCE", 0.05)
    with alone():
        pass
    left.take_back()


def test_a_replay_that_would_draw_other_masks_is_noticed(tmp_path):
    """Masks that came from another thread's key do not come again; the fingerprint in the journal
    tells."""
    data = toy_data(40)

    def run():
        return private(dropped(), data, q=1.0, seed=3)

    def with_a_stranger(batch, module):
        def elsewhere():
            lent = ForwardRng(CPU)
            lent.lend(b"l" * 32)
            lent.take_back()

        assert in_threads(elsewhere) == []
        return mean_loss(module, batch)

    engine, module, optimizer, loader = run()
    engine.save(tmp_path / "run.pt")
    train(module, optimizer, loader, lambda m, b: with_a_stranger(b, m), steps=1)
    engine.detach()
    again, module, optimizer, loader = run()
    again.load(tmp_path / "run.pt", replay=True)
    with pytest.raises(RuntimeError, match="gives another gradient"):
        train(module, optimizer, loader, mean_loss, steps=1)


def test_the_lock_is_free_in_a_fork():
    """A fork has no thread that would free a lock which was held at that moment."""
    import multiprocessing

    held, end = threading.Event(), threading.Event()

    def hold():
        with untouched():
            held.set()
            end.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    held.wait()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forks in a process with threads, from Python 3.12 on
        child = multiprocessing.get_context("fork").Process(target=users_streams, args=(CPU,))
        child.start()
    child.join(20)
    stuck = child.exitcode is None
    if stuck:
        child.kill()
    end.set()
    thread.join()
    assert not stuck and child.exitcode == 0


def test_the_zero_row_moves_no_public_stream():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    zero_row(torch.utils.data.DataLoader(Augmented()))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_one_thread_does_not_take_whole_float32_from_another():
    """The switches for short matmuls are the process's, too: the first to leave must not turn them
    while the other sums."""
    torch.set_float32_matmul_precision("high")
    inside, leave = threading.Event(), threading.Event()

    def other():
        with exact(CPU):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other, daemon=True)
    try:
        thread.start()
        inside.wait()
        with exact(CPU):
            leave.set()
            thread.join()
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        leave.set()
        torch.set_float32_matmul_precision("highest")
