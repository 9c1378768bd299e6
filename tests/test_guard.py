"""Ways by which a record could reach the weights past the mechanism. Each is stopped before a
release."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from helpers import flat, mean_loss, private, tiny, toy_data, train
from torch import nn

from zetaclip import ValidationError, methods
from zetaclip.engine._guard import COMPARED_BYTES, COMPARED_STEPS
from zetaclip.engine._order import OrderError
from zetaclip.gradients import CaptureError


def partly_frozen():
    module = tiny()
    module[0].requires_grad_(False)
    return module


def stopped(engine, module, optimizer, loader, match, loss=mean_loss, error=OrderError):
    """The next step raises, and neither weights nor ledger move."""
    before, spent = flat(module), len(engine.ledger)
    with pytest.raises(error, match=match):
        train(module, optimizer, loader, loss, steps=1)
    assert torch.equal(before, flat(module)) and len(engine.ledger) == spent


def test_a_layer_unfrozen_inside_a_batch():
    module = partly_frozen()
    inner = torch.optim.SGD(module.parameters(), lr=1.0)
    made = private(module, toy_data(), optimizer=inner)

    def loss(module, batch):
        module[0].requires_grad_(True)
        return mean_loss(module, batch)

    stopped(*made, r"0\.weight was unfrozen", loss)


def test_a_gradient_left_from_before_freezing():
    module = tiny()
    inner = torch.optim.SGD(module.parameters(), lr=1.0)
    mean_loss(module, toy_data()).backward()
    module[0].requires_grad_(False)
    before = module[0].weight.detach().clone()
    _, module, _, loader = made = private(module, toy_data(), optimizer=inner)
    for batch in loader:
        mean_loss(module, batch).backward()
        made[2].step()
    assert torch.equal(before, module[0].weight)


def test_parameters_slipped_into_the_inner_optimizer():
    module = tiny()
    inner = torch.optim.SGD(module.parameters(), lr=1.0)
    made = private(module, toy_data(), optimizer=inner)
    extra = nn.Linear(3, 3)
    inner.add_param_group({"params": list(extra.parameters())})
    stopped(*made, "not there at make_private", lambda m, b: F.cross_entropy(extra(m(b[0])), b[1]))


def test_parameters_added_while_a_batch_is_out_are_not_added_at_all():
    module = partly_frozen()
    _, module, optimizer, loader = private(module, toy_data())
    next(iter(loader))
    with pytest.raises(OrderError, match="while a private batch is out"):
        optimizer.add_param_group({"params": list(module[0].parameters())})
    assert len(optimizer.param_groups) == 1


def test_a_group_that_cannot_be_private_is_not_added():
    module = nn.Sequential(nn.Embedding(9, 6, max_norm=None), nn.Linear(6, 3))
    module[0].requires_grad_(False)
    _, module, optimizer, _ = private(
        module, (torch.randint(0, 9, (8,)), torch.randint(0, 3, (8,)))
    )
    module[0].requires_grad_(True)
    module[0].scale_grad_by_freq = True
    with pytest.raises(ValidationError, match="scale_grad_by_freq"):
        optimizer.add_param_group({"params": list(module[0].parameters())})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__(2, nn.Linear(8, 3)),
        lambda m: m.__setitem__(1, nn.BatchNorm1d(8, affine=False)),
        lambda m: m.append(nn.Linear(3, 3)),
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(8, 6))),
        lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
    ],
    ids=["layer", "batch-norm", "appended", "weight", "assigned"],
)
def test_a_module_that_was_rebuilt(change):
    made = private(tiny(), toy_data())
    change(made[1])
    stopped(*made, "after make_private")


def test_a_module_that_was_moved_to_another_precision():
    made = private(tiny(), toy_data())
    made[1].double()
    stopped(*made, r"moved to torch\.float64", lambda m, b: F.cross_entropy(m(b[0].double()), b[1]))


def test_a_forward_that_was_patched_afterwards():
    made = private(tiny(), toy_data())
    layer = made[1][0]
    layer.forward = lambda x: F.linear(x, layer.weight)
    stopped(*made, "forward of 0 was replaced")


class Learning(nn.Module):
    """Learns from records outside of its gradient, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.fc, self.way = nn.Linear(6, 3), way
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))
        self.slow = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        if self.way == "data":
            self.mean.data.add_(x.detach().mean(0))
        elif self.way == "kernel":
            F.batch_norm(x, self.mean, self.variance, training=True)
        elif self.way == "frozen":
            with torch.no_grad():
                self.slow.add_(x.mean(0))
        elif self.way == "assigned":
            self.mean = x.detach().mean(0)
        return self.fc(x)


@pytest.mark.parametrize(
    ("way", "name"),
    [("data", "mean"), ("kernel", "mean"), ("frozen", "slow"), ("assigned", "mean")],
)
def test_state_that_learns_from_records(way, name):
    engine, module, optimizer, loader = private(Learning(way), toy_data())
    with pytest.raises(OrderError, match=f"changed .*{name}"):
        train(module, optimizer, loader)
    assert len(engine.ledger) == 0


class Late(nn.Module):
    """Leaves its buffer alone for some forwards, then writes to it in a way that torch does not
    count."""

    def __init__(self, way, quiet, buffer):
        super().__init__()
        self.fc, self.way, self.quiet = nn.Linear(6, 3), way, quiet
        self.register_buffer("mean", buffer)
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x):
        self.quiet -= 1
        if self.quiet < 0:
            if self.way == "kernel":
                F.batch_norm(x, self.mean, self.variance, training=True)
            elif self.way == "pointed":
                self.mean.data = self.mean + x.detach().mean()
            else:
                self.mean.data.add_(x.detach().mean())
        return self.fc(x)


@pytest.mark.parametrize("way", ["data", "kernel", "pointed"])
def test_a_small_buffer_that_begins_to_learn_late(way):
    quiet = 2 * COMPARED_STEPS
    engine, module, optimizer, loader = private(Late(way, quiet, torch.zeros(6)), toy_data())
    with pytest.raises(OrderError, match="changed mean"):
        train(module, optimizer, loader, epochs=quiet)
    assert engine.ledger.steps == quiet


def test_a_large_buffer_is_compared_in_the_first_steps():
    large = torch.zeros(COMPARED_BYTES // 4 + 1)
    engine, module, optimizer, loader = private(Late("data", COMPARED_STEPS - 1, large), toy_data())
    with pytest.raises(OrderError, match="changed mean"):
        train(module, optimizer, loader, epochs=COMPARED_STEPS)
    assert engine.ledger.steps == COMPARED_STEPS - 1


class Building(nn.Module):
    """Makes something of the first records that it sees, and keeps it."""

    def __init__(self, what):
        super().__init__()
        self.fc, self.what = nn.Linear(6, 3), what

    def forward(self, x):
        if self.training and not hasattr(self, "kept"):
            mean = x.detach().mean(0)
            if self.what == "buffer":
                self.register_buffer("kept", mean)
            elif self.what == "parameter":
                self.kept = nn.Parameter(mean, requires_grad=False)
            else:
                self.kept = nn.BatchNorm1d(6)
        return self.fc(x)


@pytest.mark.parametrize("what", ["buffer", "parameter", "layer"])
def test_what_a_forward_builds_on_first_use(what):
    """Also if there is no next batch: one release is one too many."""
    engine, module, optimizer, loader = private(Building(what), toy_data())
    before = flat(module.fc)
    with pytest.raises(OrderError, match="builds it on first use"):
        train(module, optimizer, loader, steps=1)
    assert torch.equal(before, flat(module.fc)) and len(engine.ledger) == 0


class Codebook(nn.Module):
    """Its table is trained, and follows the records besides, after some quiet forwards."""

    def __init__(self, way, quiet=0, width=8):
        super().__init__()
        self.table, self.out = nn.Linear(6, width), nn.Linear(width, 3)
        self.way, self.quiet = way, quiet

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.quiet -= 1
            if self.quiet < 0:
                self.follow(self.table.weight, x.detach()[0])
        return self.out(torch.tanh(self.table(x)))

    def follow(self, weight, record):
        if self.way == "version":
            with torch.no_grad():
                weight[0].copy_(record)
        elif self.way == "data":
            weight.data[0] = record
        elif self.way == "pointed":
            weight.data = weight.data + record
        elif self.way == "once":
            self.way = "no more"
            weight.data[0] = record


LARGE = COMPARED_BYTES // 4


@pytest.mark.parametrize(
    ("way", "quiet", "width"),
    [
        ("version", 0, 8),
        ("data", 0, 8),
        ("data", 2 * COMPARED_STEPS, 8),
        ("data", COMPARED_STEPS - 1, LARGE),
        ("version", 2 * COMPARED_STEPS, LARGE),
        ("pointed", 2 * COMPARED_STEPS, LARGE),
    ],
)
@pytest.mark.parametrize("physical", [None, 5])
def test_a_trained_parameter_that_forward_writes_to(way, quiet, width, physical):
    """Noise on its gradient does not cover what is copied into it: with any σ the table would hold
    a record as it is."""
    module = Codebook(way, quiet, width)
    engine, module, optimizer, loader = private(
        module, toy_data(), q=1.0, sigma=50.0, physical_batch_size=physical
    )
    with pytest.raises(OrderError, match=r"table\.weight was written while a batch was out"):
        train(module, optimizer, loader, epochs=quiet + 1)
    assert engine.ledger.steps == (quiet if physical is None else quiet // 5)


def test_a_trained_table_that_a_function_rewrites():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.first = nn.Embedding(6, 2), nn.Linear(2, 3)

        def forward(self, ids):
            with torch.no_grad():
                F.embedding(ids, self.words.weight, max_norm=0.01)
            return self.first(self.words(ids))

    engine, *made = private(Words(), (torch.arange(24) % 5, torch.randint(0, 3, (24,))))
    with pytest.raises(OrderError, match=r"words\.weight was written"):
        train(*made)
    assert len(engine.ledger) == 0


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_what_was_written_once_stays_an_error_until_it_is_written_over(what):
    """A first value that is taken from the first batch: the second try writes nothing, and would
    train on with a record inside."""
    if what == "parameter":
        module, match = Codebook("once"), "written while a batch was out"
    else:
        module, match = Late("data", 0, torch.zeros(6)), "changed mean"
    clean = {name: value.clone() for name, value in module.state_dict().items()}
    engine, module, optimizer, loader = private(module, toy_data())
    with pytest.raises(OrderError, match=match):
        train(module, optimizer, loader)
    module.quiet = 100
    for _ in range(2):
        with pytest.raises(OrderError, match=f"{match}.*still there"):
            train(module, optimizer, loader)
    assert len(engine.ledger) == 0
    module.load_state_dict(clean)
    assert train(module, optimizer, loader) == 2


@pytest.mark.parametrize("name", ["dp-sgd", "dp-sam", "dp-sat"])
@pytest.mark.parametrize("shared", [False, True], ids=["lent", "copied"])
def test_what_the_engine_itself_does_to_weights_is_no_writing(tmp_path, name, shared):
    """Updates, perturbed weights, and a checkpoint that is saved while they are perturbed, before
    and after the forward."""
    module = tiny()
    if shared:  # then θ is copied away and back in place
        module.register_buffer("seen", module[0].bias.detach())
    engine, module, optimizer, loader = private(
        module,
        toy_data(),
        method=methods.get(name),
        physical_batch_size=7,
        epochs=3,
        target_delta=1e-3,
    )
    done = 0
    for _ in range(3):
        for batch in loader:
            engine.save(tmp_path / "run.pt")
            loss = mean_loss(module, batch)
            engine.save(tmp_path / "run.pt")
            loss.backward()
            engine.save(tmp_path / "run.pt")
            optimizer.step()
            done += optimizer.stepped
    assert done >= 6


def test_weights_that_are_lost_are_not_taken_for_written_ones():
    module = Codebook("not at all", width=LARGE)
    module.table.weight.data[0, 0] = math.nan
    _, module, optimizer, loader = private(module, toy_data())
    assert train(module, optimizer, loader) == 2


def test_trained_weights_may_be_set_between_batches():
    """A constraint on weights, say: they are released."""
    _, module, optimizer, loader = private(tiny(), toy_data())
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            mean_loss(module, batch).backward()
            optimizer.step()
            with torch.no_grad():
                module[0].weight.clamp_(-0.1, 0.1)
            module[2].weight.data = module[2].weight.data / 2


@pytest.mark.parametrize(
    "buffer",
    [
        torch.full((3,), math.nan),
        torch.zeros(0),
        torch.tensor(True),
        torch.zeros(4, 4).t()[:2],
        torch.zeros(2).bfloat16(),
    ],
    ids=["nan", "empty", "bool", "strided", "half"],
)
def test_buffers_of_all_kinds_are_left_alone(buffer):
    module = tiny()
    module.register_buffer("kept", buffer)
    _, module, optimizer, loader = private(module, toy_data())
    assert train(module, optimizer, loader, epochs=3) == 6


def test_a_buffer_may_be_set_between_batches():
    """By a schedule, say: the loop has no more than it was given."""
    _, module, optimizer, loader = private(Learning("none"), toy_data())
    for step in range(6):
        train(module, optimizer, loader, steps=1)
        if step % 2:
            module.mean = torch.full((6,), float(step))
        else:
            module.mean.fill_(step)


def forked(function):
    """What a fork of this process says to ``function``; the fork ends here."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(into, str(function()).encode())
        except BaseException as error:
            os.write(into, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as said:
        text = said.read().decode()
    os.waitpid(child, 0)
    return text


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@needs_fork
@pytest.mark.parametrize("moment", ["between", "out", "half"])
def test_a_fork_of_a_run_does_not_draw_its_parents_noise(moment):
    """Between batches, with one out, and between the chunks of one: whatever it releases its parent
    releases as well."""
    _, module, optimizer, loader = private(
        tiny(), toy_data(), q=1.0, seed=None, physical_batch_size=12 if moment == "half" else None
    )
    batches = iter(loader)
    if moment != "between":
        mean_loss(module, next(batches)).backward()
    if moment == "half":
        optimizer.step()
        assert not optimizer.stepped

    def go_on():
        if moment == "between":
            return train(module, optimizer, loader, steps=1)
        if moment == "half":
            mean_loss(module, next(batches)).backward()
        return optimizer.step()

    assert "OrderError: this process is a fork" in forked(go_on)
    go_on()  # the owner itself is left alone
    assert optimizer.stepped


@needs_fork
def test_a_fork_trains_with_streams_of_its_own(tmp_path):
    engine, module, optimizer, loader = private(tiny(), toy_data(), seed=None)
    train(module, optimizer, loader, steps=1)
    engine.save(tmp_path / "run.pt")

    assert "OrderError: this process is a fork" in forked(lambda: engine.save(tmp_path / "copy.pt"))

    def loaded():
        engine.load(tmp_path / "run.pt")
        return train(module, optimizer, loader, steps=1)

    def made():
        _, *parts = private(tiny(), toy_data(), seed=None)
        return train(*parts, steps=1)

    assert forked(loaded) == "1" and forked(made) == "1"


def test_state_that_does_not_learn_is_left_alone():
    _, module, optimizer, loader = private(Learning("none"), toy_data())
    assert train(module, optimizer, loader, epochs=3) == 6


def test_a_frozen_table_that_forward_rewrites_is_refused():
    module = nn.Sequential(nn.Embedding(9, 6, max_norm=0.5), nn.Flatten(), nn.Linear(6, 3))
    module[0].requires_grad_(False)
    with pytest.raises(ValidationError, match="max_norm"):
        private(module, (torch.randint(0, 9, (8,)), torch.randint(0, 3, (8,))))


def test_the_graph_of_an_earlier_chunk_is_not_taken_for_this_one():
    """A running total of losses would credit the first chunk's records to the second's."""
    _, module, optimizer, loader = private(tiny(), toy_data(), q=1.0, physical_batch_size=8)
    losses = []

    class Total:
        def backward(self):
            sum(losses).backward(retain_graph=True)

    def running_total(module, batch):
        losses.append(mean_loss(module, batch))
        return Total()

    with pytest.raises(CaptureError, match="not out any more"):
        train(module, optimizer, loader, running_total)


def test_one_parameter_has_one_ledger():
    first = nn.Linear(6, 3)
    second = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    second[1].weight = first.weight
    engine, *_ = private(first, toy_data())
    with pytest.raises(ValidationError, match=r"1\.weight is trained privately by another engine"):
        private(second, toy_data())
    engine.detach()
    private(second, toy_data())


def test_a_detached_engine_says_so():
    engine, module, optimizer, loader = private(tiny(), toy_data())
    engine.detach()
    with pytest.raises(OrderError, match="detached"):
        next(iter(loader))
    mean_loss(module, toy_data()).backward()
    with pytest.raises(OrderError, match="detached"):
        optimizer.step()


def test_a_squeezed_batch_of_one_is_refused():
    _, module, _, loader = private(nn.Linear(6, 3), toy_data(1), q=1.0)
    x, _ = next(iter(loader))
    with pytest.raises(CaptureError, match=r"shape \(6,\)"):
        module(x.squeeze(0))
