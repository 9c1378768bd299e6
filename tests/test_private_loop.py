"""The objects of a private run, each by the one thing that it promises."""

import dataclasses
import weakref

import pytest
import torch
from helpers import flat, mean_loss, private, tiny, toy_data, train

import zetaclip.mechanism
from zetaclip import ClipRule, Flat, Method, methods
from zetaclip.control import ClipState, Controller
from zetaclip.engine._checkpoint import CheckpointError, Remedy
from zetaclip.engine._group import Group, SingleProcess
from zetaclip.engine._open_batch import Stage
from zetaclip.gradients import Layout
from zetaclip.ledger import Ledger
from zetaclip.mechanism import Draw, Mechanism, Receipt, Room

LAYOUT = Layout.of({"w": torch.nn.Parameter(torch.zeros(2))})


def mechanism():
    return Mechanism(LAYOUT, Flat(), Draw(0, 0, "sum", 0, 1.0, 1.0, 0.5, 10.0, bytes(32)), None)


# -- hooks for frameworks


def test_hooks_tell_where_an_update_is():
    engine, module, optimizer, loader = private(tiny(), toy_data(), physical_batch_size=4, q=0.5)
    hooks, seen = engine.hooks, []
    assert not hooks.inside_batch and not hooks.inside_update and hooks.rows == 0
    for x, y in loader:
        assert hooks.inside_update and hooks.rows == len(x)
        mean_loss(module, (x, y)).backward()
        optimizer.step()
        seen.append(hooks.inside_update)
        assert seen[-1] != optimizer.stepped
        if optimizer.stepped:
            break
    assert True in seen and not hooks.detached
    engine.detach()
    assert hooks.detached


def test_what_hooks_collect_inside_an_update_is_its_start(tmp_path):
    options = {"method": methods.get("dp-sam"), "clipping": None, "epochs": 2, "target_delta": 1e-5}
    engine, module, optimizer, loader = private(tiny(), toy_data(), **options)
    start = flat(module).clone()
    batches = iter(loader)
    mean_loss(module, next(batches)).backward()
    optimizer.step()
    next(batches)  # at perturbed weights
    assert not torch.equal(flat(module), start)
    public, secret = engine.hooks.collect(tmp_path)
    saved = torch.cat([value.flatten() for value in public["module"].values()])
    assert torch.equal(saved, start) and not torch.equal(flat(module), start)
    hidden = tmp_path / "run.private"
    engine.hooks.write_secrets(hidden, {public["identity"]: secret})
    assert engine.hooks.secrets_in(hidden).keys() == {public["identity"]}
    assert hidden.stat().st_mode & 0o077 == 0
    engine.hooks.saved_in(tmp_path)
    engine.hooks.resume(public, tmp_path, hidden)
    assert torch.equal(flat(module), start)
    assert not engine.hooks.inside_batch and engine.hooks.inside_update


# -- rows precede noise


def test_no_noise_is_drawn_without_a_receipt_for_these_very_rows(monkeypatch):
    monkeypatch.setattr(zetaclip.mechanism, "add_noise", lambda *_: pytest.fail("noise was drawn"))
    undeclared, declared = mechanism(), mechanism()
    rows = declared.declare()
    others = (dataclasses.replace(rows[0], batch=7),)
    for some, receipt in (
        (undeclared, Receipt(rows)),
        (declared, Receipt(())),
        (declared, Receipt(others)),
    ):
        with pytest.raises(RuntimeError, match="receipt for its own rows"):
            some.release(receipt, SingleProcess(0), 1.0)


def test_a_receipt_serves_one_release():
    one = mechanism()
    receipt = Receipt(one.declare())
    one.release(receipt, SingleProcess(0), 1.0)
    with pytest.raises(RuntimeError, match="receipt for its own rows"):
        one.release(receipt, SingleProcess(0), 1.0)


def test_what_was_refused_is_not_released(monkeypatch):
    monkeypatch.setattr(zetaclip.mechanism, "add_noise", lambda *_: pytest.fail("noise was drawn"))
    one = mechanism()
    receipt = Receipt(one.declare())
    one.refuse(SingleProcess(0), "a record is broken")
    with pytest.raises(RuntimeError, match="receipt for its own rows"):
        one.release(receipt, SingleProcess(0), 1.0)


def test_rows_stand_in_the_ledger_when_the_noise_is_drawn(monkeypatch):
    engine, module, optimizer, loader = private(tiny(), toy_data())
    draw, seen = zetaclip.mechanism.add_noise, []

    def noted(*arguments):
        seen.append(len(engine.ledger))
        draw(*arguments)

    monkeypatch.setattr(zetaclip.mechanism, "add_noise", noted)
    train(module, optimizer, loader, steps=2)
    assert seen == [1, 2]


def test_a_ledger_that_fails_stops_the_release(monkeypatch):
    _, module, optimizer, loader = private(tiny(), toy_data())
    before = flat(module)

    def full(self, row):
        raise OSError("No space left on device")

    monkeypatch.setattr(Ledger, "append", full)
    monkeypatch.setattr(zetaclip.mechanism, "add_noise", lambda *_: pytest.fail("noise was drawn"))
    with pytest.raises(OSError, match="No space"):
        train(module, optimizer, loader, steps=1)
    assert torch.equal(before, flat(module))


# -- the state moves as a whole, and a batch that is out does not move it


def test_the_state_stands_still_while_a_batch_is_out():
    _, module, optimizer, loader = private(tiny(), toy_data(), physical_batch_size=4)
    loop = optimizer._loop
    train(module, optimizer, loader, steps=1)
    stages, start = [], None
    for batch in loader:
        start = start or loop.state
        assert loop.state is start and loop.batch.stage is Stage.OUT
        optimizer.zero_grad()
        mean_loss(module, batch).backward()
        optimizer.step()
        if optimizer.stepped:
            break
        stages.append(loop.batch.stage)
    assert stages and set(stages) == {Stage.ABSORBED} and loop.batch is None
    assert loop.state.step == start.step + 1 and loop.state.sampling != start.sampling
    with pytest.raises(dataclasses.FrozenInstanceError):
        loop.state.step = 0


@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("batch", ["fresh", "same"])
def test_what_is_read_ahead_is_what_is_handed_out(batch, physical):
    """Also from the middle of an update, and while a batch waits."""
    method = methods.get("dp-sam", ascent_batch=batch)
    _, module, optimizer, loader = private(
        tiny(),
        toy_data(),
        method=method,
        clipping=None,
        physical_batch_size=physical,
        epochs=4,
        target_delta=1e-5,
    )
    loop = optimizer._loop
    for _ in range(2):
        iterator, ahead = None, None
        for x in loader:
            if iterator is None:
                iterator, ahead = True, loop.batches.upcoming(loop.state)
            if loop.batch.done == 0:
                for rows in loop.batch.chunks:
                    assert not len(rows) or torch.equal(next(ahead), rows)
            optimizer.zero_grad()
            mean_loss(module, x).backward()
            optimizer.step()
        assert next(ahead, None) is None


def test_a_batch_that_was_abandoned_gets_other_noise():
    _, module, optimizer, loader = private(tiny(), toy_data())
    loop = optimizer._loop
    mean_loss(module, next(iter(loader))).backward()
    first = loop.batch
    loop.abandon()
    next(iter(loader))
    assert all(map(torch.equal, first.chunks, loop.batch.chunks))
    assert loop.batch.mechanism.draw.noise_key != first.mechanism.draw.noise_key
    assert loop.batch.mechanism.draw.query == "sum, try 2"


def test_a_chunk_that_is_cut_off_after_it_was_added_is_not_added_twice(monkeypatch):
    _, module, optimizer, loader = private(tiny(), toy_data())
    batch = next(iter(loader))
    mechanism = optimizer._loop.batch.mechanism
    absorb = mechanism.absorb

    def interrupted(chunk):
        absorb(chunk)
        raise KeyboardInterrupt

    monkeypatch.setattr(mechanism, "absorb", interrupted)
    mean_loss(module, batch).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    mean_loss(module, batch).backward()
    with pytest.raises(RuntimeError, match="would count twice"):
        optimizer.step()
    assert train(module, optimizer, loader, steps=1) == 1


def test_a_perturbation_that_fails_leaves_the_weights():
    calls = []

    def perturb(releases, memory):
        calls.append(1)
        return "nowhere" if len(calls) == 1 else None

    method = Method("p", passes=(dataclasses.replace(Method().passes[0], perturb=perturb),))
    _, module, optimizer, loader = private(tiny(), toy_data(), method=method)
    before = flat(module)
    with pytest.raises(TypeError, match="perturb of method 'p'"):
        next(iter(loader))
    assert torch.equal(before, flat(module)) and optimizer._loop.batch is None
    assert train(module, optimizer, loader, steps=1) == 1 and len(calls) == 2


# -- one process is a group like any other


def test_one_process_is_a_group():
    one: Group = SingleProcess(5)
    flat_sum, extras = torch.ones(3), torch.ones(2)
    assert one.first and one.add_up(flat_sum, extras, "x") is extras
    assert one.gather(3, "x") == [3] and one.once(lambda: 4, "x") == 4 and one.total(5, "x") == 5
    assert one.own_rows(bytes(32), 1.0).tolist() == [0, 1, 2, 3, 4]
    used = []
    assert one.conclude(lambda: used.append(1), lambda: (1.0, 1.0), "x") is None and used == [1]


# -- rules and controllers of one's own


class Bare:
    name = "bare"

    def factors(self, norms, clip, coins):
        return clip / (norms + 1.0)

    def sensitivity(self, clip):
        return clip


def test_a_rule_that_is_no_subclass_is_refused_with_the_cure():
    with pytest.raises(TypeError, match=r"subclass zetaclip\.ClipRule"):
        private(tiny(), toy_data(), clipping=Bare())
    with pytest.raises(TypeError, match=r"subclass zetaclip\.ClipRule"):
        Method("bare", rule=Bare())
    with pytest.raises(TypeError, match=r"subclass zetaclip\.control\.Controller"):
        Method("bare", controller=Bare())


def test_the_required_methods_are_enough():
    class Rule(Bare, ClipRule):
        pass

    class Shrinking(Controller):
        def init(self):
            return ClipState(1.0)

        def update(self, reading, state):
            return ClipState(0.5 * state.clip)

    assert not Rule().remembers and not Rule().maps and Rule().extras(torch.ones(1), 1.0) == {}
    method = Method("own", rule=Rule(), controller=Shrinking())
    _, module, optimizer, loader = private(tiny(), toy_data(), method=method, clipping=None)
    train(module, optimizer, loader, steps=2)
    assert optimizer.clip == 0.25 and optimizer.clip_history == []

    class Half(ClipRule):
        def factors(self, norms, clip, coins):
            return norms

    with pytest.raises(TypeError, match="abstract"):
        Half()


# -- checkpoints


def test_an_error_names_its_remedy(tmp_path):
    engine, *_ = private(tiny(), toy_data(), seed=None)
    engine.save(tmp_path / "run.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "run.pt").read_bytes()[:100])
    with pytest.raises(CheckpointError) as caught:
        engine.load(tmp_path / "cut.pt")
    assert caught.value.remedy is Remedy.NOTHING
    (tmp_path / "run.pt.private").unlink()
    with pytest.raises(CheckpointError) as caught:
        engine.load(tmp_path / "run.pt", replay=True)
    assert caught.value.remedy is Remedy.FRESH_STREAMS
    assert str(caught.value) == f"{caught.value.reason}. load(path) goes on with fresh streams"
    wide = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 3))
    other, *_ = private(wide, toy_data(), seed=None)
    with pytest.raises(CheckpointError) as caught:
        other.load(tmp_path / "run.pt")
    assert caught.value.remedy is Remedy.OTHER_RUN


def test_a_kept_gradient_is_not_overwritten_and_memory_is_used_again():
    room = Room(LAYOUT)
    first = torch.from_numpy(room.gradient()).fill_(3.0)
    address, view = first.data_ptr(), first[1:]
    del first
    assert room.gradient().ctypes.data != address  # a view of it is alive
    assert view.eq(3.0).all()
    again = room.gradient().ctypes.data
    assert room.gradient().ctypes.data == again  # nobody has held the second one
    assert room.zeros().data_ptr() not in (address, again)
    kept = room.zeros().add_(1.0)
    assert room.zeros().data_ptr() == kept.data_ptr() and not kept.any()


def test_large_sums_and_gradients_are_given_back(monkeypatch):
    monkeypatch.setattr(zetaclip.mechanism, "GIVEN_BACK", range(LAYOUT.numel, 10))
    room = Room(LAYOUT)
    total, gradient = room.zeros(), room.gradient()
    given = weakref.ref(total), weakref.ref(gradient)
    assert total.dtype == torch.float64 and not total.any() and len(gradient) == len(total)
    del total, gradient
    assert given[0]() is None and given[1]() is None
