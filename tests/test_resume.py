"""Checkpoints: exact replay, fresh keys, and what counts after a crash."""

import contextlib
import dataclasses
import json
import os
import shutil
import stat
import warnings

import numpy
import numpy as np
import pytest
import torch
from helpers import flat, mean_loss, private, tiny, toy_data, train
from torch import nn
from toys import METHODS, network

from zetaclip import Spectral, methods
from zetaclip.engine import _checkpoint as checkpoint
from zetaclip.engine._checkpoint import CheckpointError
from zetaclip.engine._data_digest import digest_of
from zetaclip.gradients import products, rows
from zetaclip.ledger._journal import Journal
from zetaclip.randomness import normals


def build(name="plain", data=None, **options):
    options = {
        "method": METHODS[name](),
        "clipping": None,
        "lr": 0.05,
        "optimizer": torch.optim.Adam,
        **options,
    }
    return private(network(), data or toy_data(), **options)


def drive(module, optimizer, loader):
    """The user's loop, stopping after every backward and after every step."""
    while True:
        for batch in loader:
            optimizer.zero_grad()
            mean_loss(module, batch).backward()
            yield "out"
            optimizer.step()
            yield "stepped"


def advance(loop, stops):
    for _ in range(stops):
        next(loop)


def finish(module, optimizer, loader, updates):
    """Goes on until the run has made this many updates."""
    run = optimizer._loop
    while run.state.step < updates:
        for batch in loader:
            optimizer.zero_grad()
            mean_loss(module, batch).backward()
            optimizer.step()
            if run.state.step >= updates:
                break


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("cut", [0, 1, 6, 7, 8, 9, 10, 11, 12])
def test_replay_is_bit_equal_wherever_it_was_cut(name, cut, tmp_path):
    """Chunks of 5 of about 12 records: the cuts fall between logical batches, inside them, and
    between passes."""
    torch.manual_seed(0)
    _, whole, optimizer, loader = build(name, physical_batch_size=5)
    finish(whole, optimizer, loader, 6)
    history, ledger = optimizer.clip_history, list(optimizer._loop.log.ledger.rows())

    torch.manual_seed(0)
    engine, module, optimizer, loader = build(name, physical_batch_size=5)
    loop = drive(module, optimizer, loader)
    advance(loop, cut)
    engine.save(tmp_path / "run.pt")
    advance(loop, 6)  # work that is lost

    torch.manual_seed(99)
    other, module, optimizer, loader = build(name, physical_batch_size=5, seed=None)
    train(module, optimizer, loader, steps=1)
    other.load(tmp_path / "run.pt", replay=True)
    finish(module, optimizer, loader, 6)
    assert torch.equal(flat(module), flat(whole))
    assert optimizer.clip_history == history
    rows = list(optimizer._loop.log.ledger.rows())

    def content(some):
        return [
            (r.step, r.batch, r.query, r.sensitivity, r.noise_multiplier, r.sample_rate)
            for r in some
        ]

    assert content(r for r in rows if r.stream == optimizer._loop.state.stream) == content(ledger)
    # The one update that the fresh engine made before it loaded was a release too.
    assert len({r.stream for r in rows}) == 2


@pytest.mark.parametrize("name", ["adaclip", "adadpigu"])
def test_a_whitened_run_goes_on_from_an_earlier_checkpoint_without_scales(name, tmp_path):
    def run(seed):
        return build(method=methods.get(name), epochs=4, seed=seed)

    torch.manual_seed(0)
    engine, whole, optimizer, loader = run(0)
    train(whole, optimizer, loader, epochs=2)
    path = tmp_path / "run.pt"
    engine.save(path)
    train(whole, optimizer, loader)
    saved = torch.load(path, weights_only=True)
    del saved["rule"]["scale"]
    torch.save(saved, path)

    other, module, optimizer, loader = run(None)
    other.load(path, replay=True)
    train(module, optimizer, loader)
    assert torch.equal(flat(module), flat(whole))


def test_load_without_replay_takes_fresh_keys_and_counts_what_was_executed(tmp_path):
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=2)
    engine.save(tmp_path / "run.pt")
    train(module, optimizer, loader, steps=2)  # executed after the checkpoint, seen by somebody
    first = flat(module)

    fork, module, optimizer, loader = build(seed=None)
    fork.load(tmp_path / "run.pt")
    assert optimizer._loop.state.step == 2 and fork.ledger.steps == 4
    train(module, optimizer, loader, steps=2)
    assert fork.ledger.steps == 6 and not torch.equal(first, flat(module))


def test_two_forks_of_a_run_do_not_share_noise(tmp_path):
    """The difference of the two releases still carries the noise of both; with the same noise it
    would cancel."""
    torch.manual_seed(0)
    data = (torch.zeros(64, 300), torch.zeros(64, dtype=torch.long))

    def engine():
        return private(nn.Linear(300, 200, bias=False), data, sigma=1.0, clipping=1.0, seed=None)

    first, module, optimizer, loader = engine()
    train(module, optimizer, loader, steps=1)
    first.save(tmp_path / "run.pt")
    start = flat(module)
    moves = []
    for replay in (False, False, True, True):
        fork, module, optimizer, loader = engine()
        fork.load(tmp_path / "run.pt", replay=replay)
        assert torch.equal(flat(module), start)
        train(module, optimizer, loader, steps=1)
        moves.append((start - flat(module)) * 32)
    apart = float((moves[0] - moves[1]).std())
    assert apart == pytest.approx(2**0.5, rel=0.02)
    assert torch.equal(moves[2], moves[3])  # an exact replay is the same release, not a second one
    assert float((moves[0] - moves[2]).std()) == pytest.approx(2**0.5, rel=0.02)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"sigma": 1.1}, "noise_multipliers"),
        ({"q": 0.4}, "settings"),
        ({"data": (toy_data()[0] + 1, toy_data()[1])}, "data"),
        ({"physical_batch_size": 3}, "settings"),
        ({"optimizer": torch.optim.SGD}, "optimizer"),
        ({"clipping": 0.9}, "controller"),
    ],
    ids=lambda c: next(iter(c)) if isinstance(c, dict) else "",
)
def test_replay_is_refused_where_anything_differs(change, word, tmp_path):
    engine, module, optimizer, loader = build(clipping=1.0)
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")
    other, module, *_ = build(**{"clipping": 1.0, **change})
    before = flat(module)
    with pytest.raises(CheckpointError, match=rf"different now: .*{word}") as refused:
        other.load(tmp_path / "run.pt", replay=True)
    assert torch.equal(before, flat(module)) and len(other.ledger) == 0
    for made in (engine, other):  # who has a digest can test a guess of all the records
        assert digest_of(made._loop.batches.dataset)[:8] not in str(refused.value)


def test_replay_is_refused_with_another_number_of_threads(tmp_path):
    engine, *_ = build()
    engine.save(tmp_path / "run.pt")
    torch.set_num_threads(2)
    try:
        other, *_ = build()
        with pytest.raises(CheckpointError, match="threads"):
            other.load(tmp_path / "run.pt", replay=True)
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(rows.compiled is None, reason="zetaclip was built without a C compiler")
@pytest.mark.parametrize("part", [rows, products])
def test_replay_is_refused_where_layers_are_summed_another_way(tmp_path, monkeypatch, part):
    """They agree to rounding only, and one draw of noise must not cover two sums."""
    engine, *_ = build()
    engine.save(tmp_path / "run.pt")
    monkeypatch.setattr(part, "compiled", None)
    other, *_ = build()
    with pytest.raises(CheckpointError, match=f"{part.__name__.split('.')[-1]}_source"):
        other.load(tmp_path / "run.pt", replay=True)


def test_replay_needs_the_private_file_and_it_is_private(tmp_path):
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")
    private_file = tmp_path / "run.pt.private"
    assert stat.S_IMODE(os.stat(private_file).st_mode) == 0o600
    private_file.rename(tmp_path / "elsewhere")
    other, *_ = build(seed=None)
    with pytest.raises(CheckpointError, match=r"run\.pt\.private"):
        other.load(tmp_path / "run.pt", replay=True)
    other.load(tmp_path / "run.pt")


def test_the_checkpoint_holds_no_secret_and_no_record(tmp_path):
    """Taken in the middle of a logical batch: no key, no index, no per-example value, and θ, not
    the perturbed weights."""
    engine, module, optimizer, loader = build("sat", physical_batch_size=5)
    train(module, optimizer, loader, steps=1)
    theta = flat(module)
    advance(drive(module, optimizer, loader), 3)  # the second chunk is out
    engine.save(tmp_path / "run.pt")
    assert not torch.equal(theta, flat(module))  # perturbed just now
    public = torch.load(tmp_path / "run.pt", weights_only=True)
    assert torch.equal(torch.cat([v.flatten() for v in public["module"].values()]), theta)
    run = optimizer._loop
    blob = (tmp_path / "run.pt").read_bytes()
    for secret in (
        run.state.sampling,
        run.state.noise,
        run.batch.drawn.sampling,
        run.batch.drawn.noise,
        run.batch.drawn.key,
    ):
        assert secret not in blob and secret.hex().encode() not in blob
    sizes = {tuple(v.shape) for v in public["module"].values()} | {
        tuple(v.shape) for v in public["memory"].values()
    }
    assert (5, 6) not in sizes and set(public) == {
        "zetaclip_checkpoint",
        "identity",
        "module",
        "optimizer",
        "configuration",
        "control",
        "rule",
        "memory",
        "releases",
        "clip_history",
        "counts",
        "stream",
        "home",
        "ledger",
        "public_streams",
        "deal",
        "extra",
    }


def test_a_saved_state_does_not_reveal_earlier_draws(tmp_path):
    engine, module, optimizer, loader = build()
    run = optimizer._loop
    early = {run.state.noise, run.state.sampling}
    first = run.batches.draw(run.state)
    drawn = {first.noise_key, first.key}
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")
    (secret,) = json.loads((tmp_path / "run.pt.private").read_text()).values()
    kept = {bytes.fromhex(secret[k]) for k in ("noise", "sampling")}
    assert not kept & (early | drawn)


def test_bad_files_leave_everything_as_it_is(tmp_path):
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")
    before, spent = flat(module), len(engine.ledger)
    whole = (tmp_path / "run.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pt").write_text("not a checkpoint")
    torch.save({"a": 1}, tmp_path / "other.pt")
    for name, word in (
        ("cut.pt", "cut off"),
        ("text.pt", "can't be read"),
        ("other.pt", "not a checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=word):
            engine.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        engine.load(tmp_path / "missing.pt")
    stranger, *_ = private(tiny(), toy_data())
    with pytest.raises(CheckpointError, match="another model"):
        stranger.load(tmp_path / "run.pt")
    wide, *_ = private(
        nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 3)), toy_data()
    )
    with pytest.raises(CheckpointError, match=r"0\.weight is \(8, 6\) there and \(9, 6\) here"):
        wide.load(tmp_path / "run.pt")
    assert torch.equal(before, flat(module)) and len(engine.ledger) == spent


def test_a_failed_save_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")
    old = (tmp_path / "run.pt").read_bytes()
    train(module, optimizer, loader, steps=1)

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        engine.save(tmp_path / "run.pt")
    monkeypatch.undo()
    assert (tmp_path / "run.pt").read_bytes() == old
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    other, twin, opt, their = build(seed=None)
    other.load(tmp_path / "run.pt", replay=True)  # its secrets are still there
    finish(twin, opt, their, 2)
    assert torch.equal(flat(twin), flat(module))


def test_a_replay_that_ends_early_still_counts_what_was_executed(tmp_path):
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")
    finish(module, optimizer, loader, 5)
    other, twin, opt, their = build(seed=None)
    other.load(tmp_path / "run.pt", replay=True)
    finish(twin, opt, their, 3)
    assert opt._loop.state.step == 3 and other.ledger.steps == 5
    finish(twin, opt, their, 6)
    assert other.ledger.steps == 6


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("stops", [1, 2, 3, 4, 5])
def test_a_checkpoint_of_a_replay_is_replayed(tmp_path, name, stops):
    """Killed twice: the second checkpoint knows more releases than it has made again itself."""
    engine, module, optimizer, loader = build(name)
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")
    finish(module, optimizer, loader, 4)
    whole, spent = flat(module), len(engine.ledger)
    for more in (stops, 0):
        engine, module, optimizer, loader = build(name, seed=None)
        engine.load(tmp_path / "run.pt", replay=True)
        advance(drive(module, optimizer, loader), more)
        engine.save(tmp_path / "run.pt")
    finish(module, optimizer, loader, 4)
    assert torch.equal(flat(module), whole) and len(engine.ledger) == spent


def replaying(tmp_path):
    """A run that went one step beyond its checkpoint, loaded again to replay that step."""
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")
    train(module, optimizer, loader, steps=1)
    other, *again = build(seed=None)
    other.load(tmp_path / "run.pt", replay=True)
    return again


def test_a_replay_that_is_not_exact_is_stopped(tmp_path):
    """Whatever the configuration did not show: the journal knows what was released."""
    twin, opt, their = replaying(tmp_path)
    (row,) = opt._loop.log.expected.values()
    opt._loop.log.expected[row.key] = dataclasses.replace(
        row, noise_multiplier=2.0, noise_std=2.0 * row.sensitivity
    )
    before = flat(twin)
    with pytest.raises(RuntimeError, match="not exact"):
        train(twin, opt, their, steps=1)
    assert torch.equal(before, flat(twin))


def test_a_replay_by_another_loop_is_stopped_before_it_releases(tmp_path):
    """The engine can't see the user's loss, but it sees that another gradient comes out."""
    twin, opt, their = replaying(tmp_path)
    before = flat(twin)
    with pytest.raises(RuntimeError, match="another gradient than the run that it replays"):
        train(twin, opt, their, lambda m, b: -mean_loss(m, b), steps=1)
    assert torch.equal(before, flat(twin)) and all(p.grad is None for p in twin.parameters())


def test_a_release_that_was_cut_off_does_not_lend_its_noise(tmp_path, monkeypatch):
    """Interrupted after the row was written: the same records come again, under another name and
    with other noise."""
    import zetaclip.mechanism as mechanism

    engine, module, optimizer, loader = build()
    engine.save(tmp_path / "run.pt")
    drawn = []
    draw = mechanism.add_noise

    def interrupted(key, values, *rest):
        drawn.append(normals(key, len(values)))
        if len(drawn) == 1:
            raise KeyboardInterrupt
        draw(key, values, *rest)

    monkeypatch.setattr(mechanism, "add_noise", interrupted)
    first = next(iter(loader))
    with pytest.raises(KeyboardInterrupt):
        train(module, optimizer, loader, steps=1)
    again = next(iter(loader))
    assert torch.equal(first[0], again[0])
    train(module, optimizer, loader, steps=1)
    assert not np.array_equal(drawn[0], drawn[1])
    rows = [(r.batch, r.query) for r in engine.ledger.rows()]
    assert rows == [(0, "sum"), (0, "sum, try 2")]  # the same records: they compose as one Gaussian
    (event,) = engine.ledger.events()
    assert event.count == 1 and event.noise_multiplier == pytest.approx(2**-0.5)


def test_a_batch_that_was_tried_twice_does_not_share_noise_with_its_checkpoint(tmp_path):
    """The user has drawn in between, so the loop may now do something else than a replay would: the
    second try gets other noise."""
    engine, module, optimizer, loader = build()
    batch = next(iter(loader))
    mean_loss(module, batch).backward()
    engine.save(tmp_path / "run.pt")
    keys = [optimizer._loop.batch.mechanism.draw.noise_key]
    again = iter(loader)
    torch.manual_seed(5)  # what the user seeds is the user's, also while a batch waits
    next(again)
    train(module, optimizer, loader, steps=1)
    other, _, opt, their = build(seed=None)
    other.load(tmp_path / "run.pt", replay=True)
    next(iter(their))
    assert opt._loop.batch.mechanism.draw.noise_key == keys[0]
    # Another release from the same records: it composes with a replay of the first try.
    assert [(r.batch, r.query) for r in engine.ledger.rows()] == [(0, "sum, try 2")]


def test_a_batch_that_was_looked_at_has_the_same_dropout_masks_in_its_next_try(tmp_path):
    """So the sum is the same, too, and so may be the noise; a replay from a checkpoint gives the
    same gradient."""
    found = []
    for looks in (0, 2):
        engine, module, optimizer, loader = build()
        engine.save(tmp_path / f"{looks}.pt")
        for _ in range(looks):
            module(next(iter(loader))[0])  # draws dropout masks
        train(module, optimizer, loader, steps=1)
        assert [(r.batch, r.query) for r in engine.ledger.rows()] == [(0, "sum")]
        found.append(torch.cat([parameter.grad.flatten() for parameter in module.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("tries", [0, 1, 3])
def test_a_replay_that_needs_fewer_tries_takes_no_noise_of_another_batch(
    tmp_path, monkeypatch, tries
):
    """The first run draws before it trains on its batch, the replay does not: batch by batch the
    noise must stay in step."""
    import zetaclip.mechanism as mechanism

    drawn = []
    draw = mechanism.add_noise

    def noted(key, values, *rest):
        drawn.append(normals(key, len(values)))
        draw(key, values, *rest)

    engine, module, optimizer, loader = build()
    engine.save(tmp_path / "run.pt")
    monkeypatch.setattr(mechanism, "add_noise", noted)
    for number in range(tries):
        next(iter(loader))
        torch.manual_seed(number)
    train(module, optimizer, loader, steps=1)
    other, copy, opt, their = build(seed=None)
    other.load(tmp_path / "run.pt", replay=True)
    finish(copy, opt, their, 5)
    first, *replayed = drawn
    assert len(replayed) == 5
    assert np.array_equal(first, replayed[0]) == (
        tries == 0
    )  # the same noise only on the very same sum
    assert not any(np.array_equal(first, noise) for noise in replayed[1:])
    # What the first run released stays counted, beside the other release from the same records.
    rows = {(row.batch, row.query) for row in other.ledger.rows()}
    assert rows == {
        (0, f"sum, try {tries + 1}" if tries else "sum"),
        *((batch, "sum") for batch in range(5)),
    }


def test_older_checkpoints_count_what_came_after_them(tmp_path):
    engine, module, optimizer, loader = build()
    for number in range(3):
        train(module, optimizer, loader, steps=1)
        engine.save(tmp_path / f"epoch-{number}.pt")
    train(module, optimizer, loader, steps=1)
    other, *_ = build(seed=None)
    other.load(tmp_path / "epoch-0.pt")
    assert other.ledger.steps == 4


def test_a_checkpoint_without_its_journal_is_said_so(tmp_path):
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "run.pt").rename(moved / "run.pt")
    other, *_ = build(seed=None)
    with pytest.warns(UserWarning, match="can't be counted"):
        other.load(moved / "run.pt")
    assert other.ledger.steps == 1


def test_a_checkpoint_that_does_not_fit_changes_nothing_and_forgets_nothing(tmp_path):
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=3)
    engine.save(tmp_path / "run.pt")

    def grouped():
        module = network()
        groups = [{"params": module[0].parameters()}, {"params": module[3].parameters()}]
        return private(
            module,
            toy_data(),
            method=METHODS["plain"](),
            clipping=None,
            optimizer=torch.optim.Adam(groups),
        )

    other, twin, *_ = grouped()
    before = flat(twin)
    with pytest.raises(CheckpointError, match=r"groups of \[4\] parameters, this one of \[2, 2\]"):
        other.load(tmp_path / "run.pt")
    moving, again, *_ = build(clipping=Spectral(probe="0"))
    with pytest.raises(CheckpointError, match="another kind of state"):
        moving.load(tmp_path / "run.pt")
    assert (
        torch.equal(before, flat(twin))
        and torch.equal(before, flat(again))
        and len(moving.ledger) == 0
    )


def test_replay_needs_the_journal(tmp_path):
    """Elsewhere nobody can tell whether what is replayed is what was released: refused, now and at
    the next try."""
    engine, module, optimizer, loader = build()
    engine.save(tmp_path / "run.pt")
    train(module, optimizer, loader, steps=1)
    elsewhere = tmp_path / "copy"
    elsewhere.mkdir()
    for name in ("run.pt", "run.pt.private"):
        (elsewhere / name).write_bytes((tmp_path / name).read_bytes())
    for _ in range(2):
        other, *_ = build(seed=None)
        with pytest.raises(CheckpointError, match="journal"):
            other.load(elsewhere / "run.pt", replay=True)
        with pytest.warns(UserWarning, match="can't be counted"):
            other.load(elsewhere / "run.pt")


def test_a_copied_folder_is_not_replayed(tmp_path):
    """The original goes on, and the copy's journal doesn't hear of it: the same noise would come on
    another sum."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=1)
    engine.save(first / "run.pt")
    shutil.copytree(first, second)
    train(module, optimizer, loader, steps=1)
    other, twin, opt, their = build(seed=None)
    before = flat(twin)
    with pytest.raises(CheckpointError, match="looks like a copy"):
        other.load(second / "run.pt", replay=True)
    assert torch.equal(before, flat(twin)) and len(other.ledger) == 0
    other.load(second / "run.pt")
    train(twin, opt, their, steps=1)
    assert other.ledger.steps == 2
    # In place it is a replay as ever, also under another name.
    first.rename(tmp_path / "renamed")
    again, same, opt, their = build(seed=None)
    again.load(tmp_path / "renamed" / "run.pt", replay=True)
    train(same, opt, their, steps=1)
    assert torch.equal(flat(same), flat(module))


def test_a_copy_that_took_fresh_streams_is_replayed_with_those_only(tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    first.mkdir()
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=1)
    engine.save(first / "run.pt")
    shutil.copytree(first, second)
    other, twin, opt, their = build(seed=None)
    other.load(second / "run.pt")
    other.save(second / "own.pt")
    shutil.copytree(second, third)
    finish(twin, opt, their, 3)
    again, same, opt, their = build(seed=None)
    with pytest.raises(CheckpointError, match="looks like a copy"):
        again.load(second / "run.pt", replay=True)
    with pytest.raises(CheckpointError, match="looks like a copy"):
        again.load(third / "own.pt", replay=True)
    again.load(second / "own.pt", replay=True)
    finish(same, opt, their, 3)
    assert torch.equal(flat(same), flat(twin)) and again.ledger.steps == 3


def test_a_journal_that_does_not_know_its_place_is_taken_as_it_is(tmp_path):
    engine, module, optimizer, loader = build()
    engine.save(tmp_path / "run.pt")
    train(module, optimizer, loader, steps=1)
    (journal,) = tmp_path.glob("*.journal")
    begun, *rest = journal.read_text().splitlines(keepends=True)
    assert json.loads(begun) == {"journal": "whole", "inode": journal.stat().st_ino}
    journal.unlink()
    journal.write_text("".join(['{"journal": "whole"}\n', *rest]))
    other, twin, opt, their = build(seed=None)
    other.load(tmp_path / "run.pt", replay=True)
    train(twin, opt, their, steps=1)
    assert torch.equal(flat(twin), flat(module))


def test_two_runs_of_one_checkpoint_cannot_let_out_two_sums_under_one_noise(tmp_path):
    """The original goes on while a replay with another loss runs: whoever comes second is
    stopped."""
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")
    other, twin, opt, their = build(seed=None)
    other.load(tmp_path / "run.pt", replay=True)
    train(module, optimizer, loader, steps=1)  # after the other one looked
    before = flat(twin)
    with pytest.raises(RuntimeError, match="another gradient"):
        train(twin, opt, their, lambda m, b: 0.5 * mean_loss(m, b), steps=1)
    assert torch.equal(before, flat(twin))


def in_folders(tmp_path, *names):
    """A run that was saved into several folders, one after the other, after its first update; and
    its checkpoints."""
    engine, module, optimizer, loader = build()
    train(module, optimizer, loader, steps=1)
    paths = [tmp_path / name / "run.pt" for name in names]
    for path in paths:
        path.parent.mkdir()
        engine.save(path)
    return (module, optimizer, loader), paths


def gone_on(path, replay=True, loss=mean_loss, folder=None):
    """Another process that loads a checkpoint, and takes an update; it may save before, into a
    folder of its own."""
    engine, module, optimizer, loader = build(seed=None)
    engine.load(path, replay=replay)
    if folder is not None:
        folder.mkdir()
        engine.save(folder / "run.pt")
    train(module, optimizer, loader, loss, steps=1)
    return engine, flat(module)


def half(module, batch):
    return 0.5 * mean_loss(module, batch)


def test_a_run_in_two_folders_lets_out_one_sum_under_one_noise(tmp_path):
    """The best and the last checkpoint, say. Whoever goes on from one of them, the other one hears
    of it."""
    _, (first, second) = in_folders(tmp_path, "a", "b")
    for before, after in ((first, second), (second, first), (second, second), (first, first)):
        engine, weights = gone_on(before)
        with pytest.raises(RuntimeError, match="another gradient"):
            gone_on(after, loss=half)
        other, same = gone_on(after)  # that one was refused, and spoiled nothing
        assert torch.equal(weights, same) and engine.ledger.steps == other.ledger.steps == 2


def test_a_run_that_goes_on_hears_of_replays_from_every_folder(tmp_path):
    """Whoever comes first: the run itself, a replay of one folder, or a replay of one that it was
    loaded and saved into."""
    own, (_, second) = in_folders(tmp_path, "a", "b")
    gone_on(second, loss=half, folder=tmp_path / "c")
    before = flat(own[0])
    with pytest.raises(RuntimeError, match="another gradient"):
        train(*own, steps=1)
    assert torch.equal(before, flat(own[0]))
    for name in "abc":
        with pytest.raises(RuntimeError, match="another gradient"):
            gone_on(tmp_path / name / "run.pt")
        gone_on(tmp_path / name / "run.pt", loss=half)


def test_steps_from_every_folder_count(tmp_path):
    own, (first, second) = in_folders(tmp_path, "a", "b")
    gone_on(first, replay=False)
    engine, _ = gone_on(second, replay=False)
    assert engine.ledger.steps == 3
    engine, _ = gone_on(second, replay=False, folder=tmp_path / "c")
    train(*own, steps=1)
    for name in "abc":
        other, *_ = build(seed=None)
        other.load(tmp_path / name / "run.pt")
        assert other.ledger.steps == 5


@pytest.mark.parametrize("left", "abc")
def test_one_folder_that_is_left_knows_every_step(tmp_path, left):
    """Each journal gets every row, so a checkpoint counts them whichever other folders are gone."""
    own, _ = in_folders(tmp_path, "a", "b", "c")
    train(*own, steps=2)
    for name in set("abc") - {left}:
        shutil.rmtree(tmp_path / name)
    engine, *_ = build(seed=None)
    elsewhere = pytest.warns(UserWarning, match="elsewhere, can't be counted")
    with contextlib.nullcontext() if left == "a" else elsewhere:
        engine.load(tmp_path / left / "run.pt")
    assert engine.ledger.steps == 3


def test_folders_can_be_moved_together_and_by_other_names(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "tree" / "b")
    own, _ = in_folders(tmp_path / "tree", "a", "b")
    train(*own, steps=1)
    (tmp_path / "tree").rename(tmp_path / "moved")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "moved" / "b")
    for path in (tmp_path / "moved" / "b" / "run.pt", tmp_path / "link" / "run.pt"):
        engine, weights = gone_on(path)
        assert torch.equal(weights, flat(own[0])) and engine.ledger.steps == 2


def test_a_change_of_the_working_folder_does_not_move_the_journal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine, module, optimizer, loader = build()
    engine.save("run.pt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(module, optimizer, loader, steps=1)
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(RuntimeError, match="another gradient"):
        gone_on(tmp_path / "run.pt", loss=half)


def test_a_replay_needs_the_folder_that_the_run_was_saved_in_first(tmp_path):
    """Without it nobody knows what was loaded from there. Fresh streams have their home where they
    were loaded."""
    _, (first, second) = in_folders(tmp_path, "a", "b")
    gone_on(first)
    shutil.rmtree(first.parent)
    with pytest.raises(
        CheckpointError, match=r"zetaclip-\w+\.journal in \.\./a .*saved in first.* fresh streams"
    ):
        gone_on(second)
    fork, module, optimizer, loader = build(seed=None)
    with pytest.warns(UserWarning, match=r"not in \.\./a .*can't be counted"):
        fork.load(second)
    for name in ("b/own.pt", "c/run.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        fork.save(tmp_path / name)
    train(module, optimizer, loader, steps=1)
    for name in ("b/own.pt", "c/run.pt"):
        # They are replayed as ever, and what is missing stays missing.
        with pytest.warns(UserWarning, match="can't be counted"):
            _, weights = gone_on(tmp_path / name)
        assert torch.equal(weights, flat(module))
        with (
            pytest.warns(UserWarning, match="can't be counted"),
            pytest.raises(RuntimeError, match="another gradient"),
        ):
            gone_on(tmp_path / name, loss=half)
    with pytest.raises(CheckpointError, match="saved in first"):
        gone_on(second)


def test_a_copy_of_the_first_folder_does_not_stand_for_it(tmp_path):
    own, (first, second) = in_folders(tmp_path, "a", "b")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    train(*own, steps=1)
    first.parent.rename(tmp_path / "kept")
    (tmp_path / "copy").rename(first.parent)
    for path in (first, second):
        with pytest.raises(CheckpointError, match="looks like a copy"):
            gone_on(path)
    _, weights = gone_on(
        tmp_path / "kept" / "run.pt"
    )  # under another name it is still the first folder
    assert torch.equal(weights, flat(own[0]))


def test_a_load_that_fails_leaves_the_run_its_home(tmp_path, monkeypatch):
    """Otherwise its next checkpoint would send a replay to a journal that knows nothing of its
    stream."""
    (module, optimizer, _), (path,) = in_folders(tmp_path, "a")
    (tmp_path / "other").mkdir()
    _, (stranger,) = in_folders(tmp_path / "other", "a")
    run = optimizer._loop
    before = flat(module), run.log.name, run.state.stream, run.log.home.path

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(Journal, "adopt", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.load(run, stranger, replay=False)
    checkpoint.save(run, path)
    assert torch.equal(before[0], flat(module)) and before[1:] == (
        run.log.name,
        run.state.stream,
        run.log.home.path,
    )
    assert torch.load(path, weights_only=True)["home"] == "."


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y = toy_data()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def test_replay_is_bit_equal_for_data_that_is_not_in_memory(tmp_path):
    torch.manual_seed(0)
    _, whole, optimizer, loader = build(data=Rows(), q=0.2)
    finish(whole, optimizer, loader, 7)
    torch.manual_seed(0)
    engine, module, optimizer, loader = build(data=Rows(), q=0.2)
    finish(module, optimizer, loader, 3)
    engine.save(tmp_path / "run.pt")
    other, twin, opt, their = build(data=Rows(), q=0.2, seed=None)
    other.load(tmp_path / "run.pt", replay=True)
    finish(twin, opt, their, 7)
    assert torch.equal(flat(twin), flat(whole))


def test_the_seed_of_a_saved_run_stays_known(tmp_path):
    engine, *_ = build(seed=3)
    engine.save(tmp_path / "run.pt")
    other, *_ = build(seed=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.load(tmp_path / "run.pt")
    assert other.ledger.header.noise_seed_known


class Falling(torch.utils.data.Dataset):
    """Augments with torch's stream, and one of its records can't be read."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i == 11:
            raise OSError("unreadable")
        return torch.randn(6), torch.tensor(0)


def test_looking_at_the_data_leaves_torchs_streams_alone():
    from zetaclip.engine._data_digest import digest_of

    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    with pytest.raises(OSError, match="unreadable"):
        digest_of(Falling())
    assert torch.equal(torch.randn(4), expected)


def test_pictures_and_objects_are_compared_by_what_they_are_not_where():
    from zetaclip.engine._data_digest import digest_of

    class Picture:
        """As PIL's: its text is its address, numpy can read it."""

        def __init__(self, value):
            self.pixels = numpy.full((2, 2), value)
            self.__array_interface__ = self.pixels.__array_interface__

    def digest(*values):
        kept.append(
            [(Picture(value), object()) for value in values]
        )  # alive, so that no address comes twice
        return digest_of(kept[-1])

    kept = []
    assert digest(1, 2) == digest(1, 2) != digest(1, 3)
