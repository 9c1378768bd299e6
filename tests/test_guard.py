"""Ways by which a record could reach the weights past the mechanism. Each is stopped before a release."""

import pytest
import torch
import torch.nn.functional as F
from helpers import flat, mean_loss, private, tiny, toy_data, train
from torch import nn

from zetaclip import ValidationError
from zetaclip.gradients import CaptureError
from zetaclip.run import OrderError


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
    _, module, optimizer, _ = private(module, (torch.randint(0, 9, (8,)), torch.randint(0, 3, (8,))))
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
    ("way", "name"), [("data", "mean"), ("kernel", "mean"), ("frozen", "slow"), ("assigned", "mean")]
)
def test_state_that_learns_from_records(way, name):
    engine, module, optimizer, loader = private(Learning(way), toy_data())
    with pytest.raises(OrderError, match=f"changed .*{name}"):
        train(module, optimizer, loader)
    assert len(engine.ledger) == 0


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
