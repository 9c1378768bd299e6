"""The interface that users hold: module, optimizer, loader, and what the engine tells."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import clipped_sum, flat, mean_loss, private, tiny, toy_data, train, without_warnings
from networks import CNN, MODELS, Words
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import NoGuarantee, PrivacyEngine
from zetaclip.engine._guard import OrderError
from zetaclip.gradients import Chunk, contributions


def test_the_readme_loop_takes_the_step_it_says():
    """σ = 0 and q = 1: the update is the clipped sum over L, by hand."""
    module, data = tiny(), toy_data()
    before, expected = flat(module), clipped_sum(module, data, 0.3)
    _, module, optimizer, loader = private(module, data, sigma=0.0, clipping=0.3, q=1.0)
    assert train(module, optimizer, loader) == 1
    moved = (before - flat(module)) * 24
    assert (moved - expected).norm() <= 1e-5 * expected.norm()


def test_max_grad_norm_is_the_same_thing():
    weights = []
    for options in ({"clipping": 0.3}, {"clipping": None, "max_grad_norm": 0.3}):
        _, module, optimizer, loader = private(tiny(), toy_data(), **options)
        train(module, optimizer, loader)
        weights.append(flat(module))
        assert optimizer.clip == 0.3
    assert torch.equal(*weights)
    with pytest.raises(TypeError, match="same thing"):
        private(tiny(), toy_data(), clipping=1.0, max_grad_norm=1.0)


def test_sum_and_mean_losses_agree():
    weights = []
    for reduction in ("mean", "sum"):
        _, module, optimizer, loader = private(tiny(), toy_data(), loss_reduction=reduction)
        train(
            module,
            optimizer,
            loader,
            lambda m, b, r=reduction: F.cross_entropy(m(b[0]), b[1], reduction=r),
        )
        weights.append(flat(module))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["f32", "f64"]
)
@pytest.mark.parametrize("name", ["mlp", "cnn", "words-tied", "transformer"])
def test_physical_batches_change_nothing_else(name, dtype, tolerance):
    build, inputs = MODELS[name]
    weights = []
    x = inputs(20)
    data = (x.to(dtype) if x.is_floating_point() else x, torch.randint(0, 10, (20,)))
    for size in (None, 7, 3, 1):
        torch.manual_seed(3)
        _, module, optimizer, loader = private(
            build().to(dtype), data, sigma=0.7, clipping=0.5, physical_batch_size=size, lr=0.1
        )
        assert train(module, optimizer, loader, epochs=2) == 2 * len(loader) == 4
        weights.append(flat(module))
    for other in weights[1:]:
        assert (other - weights[0]).norm() <= tolerance * weights[0].norm()


def test_a_chunk_is_not_a_step():
    _, module, optimizer, loader = private(tiny(), toy_data(), q=1.0, physical_batch_size=10)
    before = flat(module)
    seen = []
    for x, y in loader:
        optimizer.zero_grad()
        mean_loss(module, (x, y)).backward()
        optimizer.step()
        seen.append((len(x), optimizer.stepped, torch.equal(before, flat(module))))
    assert seen == [(10, False, True), (10, False, True), (4, True, False)]


def test_an_optimizer_with_its_own_zero_grad_is_asked():
    class Counting(torch.optim.SGD):
        asked = 0

        def zero_grad(self, set_to_none=True):
            self.asked += 1
            super().zero_grad(set_to_none)

    module = tiny()
    _, module, optimizer, loader = private(module, toy_data(), optimizer=Counting)
    train(module, optimizer, loader, steps=2)
    assert optimizer.inner.asked == 2
    optimizer.zero_grad()
    assert all(p.grad is None for p in module.parameters())


def test_zero_grad_clears_a_chunk_and_never_the_sum():
    """A backward that was taken back does not count; the chunks before it do."""
    weights = []
    for again in (False, True):
        _, module, optimizer, loader = private(
            tiny(), toy_data(), sigma=0.0, q=1.0, physical_batch_size=8
        )
        for batch in loader:
            if again:
                mean_loss(module, batch).backward()
            optimizer.zero_grad()
            mean_loss(module, batch).backward()
            optimizer.step()
        weights.append(flat(module))
    assert torch.equal(*weights)


def test_step_runs_a_closure_exactly_once():
    _, module, optimizer, loader = private(tiny(), toy_data())
    _, twin, other, their = private(tiny(), toy_data())
    calls = []
    for batch in loader:

        def closure(batch=batch):
            calls.append(1)
            optimizer.zero_grad()
            loss = mean_loss(module, batch)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    train(twin, other, their)
    assert len(calls) == len(loader) and torch.equal(flat(module), flat(twin))


# -- order -----------------------------------------------------------------------------------------


def test_accumulating_by_hand_is_refused():
    _, module, _, loader = private(tiny(), toy_data())
    batches = iter(loader)
    mean_loss(module, next(batches)).backward()
    with pytest.raises(OrderError, match="physical_batch_size"):
        next(batches)


def test_a_batch_that_was_only_looked_at_comes_again():
    _, module, optimizer, loader = private(tiny(), toy_data())
    _, twin, other, their = private(tiny(), toy_data())
    peeked = next(iter(loader))
    first = next(iter(loader))
    assert all(torch.equal(a, b) for a, b in zip(peeked, first, strict=True))
    mean_loss(module, first).backward()  # taken, and dropped by the next iterator
    train(module, optimizer, loader)
    train(twin, other, their)
    assert torch.equal(flat(module), flat(twin))


def test_a_void_iterator_says_so():
    _, module, optimizer, loader = private(tiny(), toy_data())
    old = iter(loader)
    next(old)
    train(module, optimizer, loader, steps=1)
    with pytest.raises(OrderError, match="void"):
        next(old)


def test_a_step_without_a_batch_or_a_backward_is_refused():
    engine, module, optimizer, loader = private(tiny(), toy_data())
    with pytest.raises(OrderError, match="without a private batch"):
        optimizer.step()
    for batch in loader:
        with pytest.raises(OrderError, match="without a backward"):
            optimizer.step()
        with torch.no_grad():
            mean_loss(module, batch)
        with pytest.raises(OrderError, match="without a backward"):
            optimizer.step()
        break
    assert len(engine.ledger) == 0


@pytest.mark.filterwarnings("ignore:.*loop over examples")
@pytest.mark.parametrize("physical", [None, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_pieces_of_a_sum_change_nothing_but_rounding(name, physical, monkeypatch):
    """Against autograd one example at a time, in the smallest pieces and with a record that is
    worked out in float64."""
    monkeypatch.setattr(contributions, "SUM_FLOATS", 1)
    build, inputs = MODELS[name]
    torch.manual_seed(3)
    module, x, y = build(), inputs(11), torch.randint(0, 10, (11,))
    if name == "mlp":
        x[5] *= 1e22  # the square of its norm is no float32
    exact = x.double() if x.is_floating_point() else x
    before, expected = flat(module), clipped_sum(copy.deepcopy(module).double(), (exact, y), 0.3)
    _, module, optimizer, loader = private(
        module, (x, y), sigma=0.0, clipping=0.3, q=1.0, physical_batch_size=physical
    )
    train(module, optimizer, loader)
    moved = (before - flat(module)) * 11
    assert (moved - expected).norm() <= 1e-4 * expected.norm()


def test_a_step_that_failed_while_adding_is_not_tried_again_on_top_of_itself(monkeypatch):
    """σ = 0 and q = 1, two chunks: after a failure in the middle of a sum the batch starts afresh,
    and each record counts once."""
    module, data = tiny(), toy_data()
    before, expected = flat(module), clipped_sum(module, data, 0.3)
    _, module, optimizer, loader = private(
        module, data, sigma=0.0, clipping=0.3, q=1.0, physical_batch_size=12
    )
    whole, failures = Chunk.add_weighted_sum, []

    def failing(self, *args, **kwargs):
        whole(self, *args, **kwargs)
        if not failures:
            failures.append(1)
            raise MemoryError("in the middle")

    monkeypatch.setattr(Chunk, "add_weighted_sum", failing)
    batch = next(iter(loader))
    for error, match in ((MemoryError, "middle"), (OrderError, "count twice")):
        optimizer.zero_grad()
        mean_loss(module, batch).backward()
        with pytest.raises(error, match=match):
            optimizer.step()
    assert torch.equal(flat(module), before)
    assert train(module, optimizer, loader) == 1
    moved = (before - flat(module)) * 24
    assert (moved - expected).norm() <= 1e-5 * expected.norm()


def test_a_gradient_that_autograd_wrote_is_an_error_at_any_step():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.outside = nn.Linear(6, 3), False

        def forward(self, x):
            return (
                F.linear(x, self.fc.weight, self.fc.bias) + self.fc(x)
                if self.outside
                else self.fc(x)
            )

    engine, module, optimizer, loader = private(Sometimes(), toy_data())
    train(module, optimizer, loader)
    spent, before = len(engine.ledger), flat(module)
    module.outside = True
    with pytest.raises(OrderError, match=r"fc\.weight\.grad was written by autograd itself"):
        train(module, optimizer, loader)
    assert len(engine.ledger) == spent and torch.equal(before, flat(module))


def test_a_penalty_on_weights_in_the_loss_is_caught():
    _, module, optimizer, loader = private(tiny(), toy_data())
    with pytest.raises(OrderError, match="weight_decay"):
        train(module, optimizer, loader, lambda m, b: mean_loss(m, b) + m[0].weight.square().sum())


def test_a_buffer_that_learns_is_caught_before_anything_is_released():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return self.fc(x)

    engine, module, optimizer, loader = private(Counting(), toy_data())
    with pytest.raises(OrderError, match="forward changed mean"):
        train(module, optimizer, loader)
    assert len(engine.ledger) == 0


def test_unused_parameters_are_named_once():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.used(x)

    _, module, optimizer, loader = private(Half(), toy_data())
    with pytest.warns(UserWarning, match=r"unused\.weight, unused\.bias") as caught:
        train(module, optimizer, loader, epochs=2)
    assert len(caught) == 1


# -- what the engine tells -------------------------------------------------------------------------


def test_epsilon_comes_from_the_ledger():
    from opacus.accountants import RDPAccountant

    engine, module, optimizer, loader = private(tiny(), toy_data(60), sigma=1.1, q=0.1)
    assert engine.get_epsilon(1e-5) == 0.0
    steps = train(module, optimizer, loader, epochs=3)
    assert steps == 30 == engine.ledger.steps
    theirs = RDPAccountant()
    theirs.history = [(1.1, 0.1, 30)]
    assert engine.get_epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)
    assert engine.get_epsilon(1e-5, accountant="pld") < engine.get_epsilon(1e-5)


def test_no_noise_is_no_privacy():
    engine, module, optimizer, loader = private(tiny(), toy_data(), sigma=0.0)
    train(module, optimizer, loader)
    assert engine.get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("options", [{"normalize": "realized"}, {"empty": "skip"}], ids=str)
def test_the_papers_literal_forms_work_and_claim_nothing(options):
    engine, module, optimizer, loader = private(tiny(), toy_data(), **options)
    assert train(module, optimizer, loader, epochs=2) == 4
    assert engine.ledger.header.claim.startswith("none: ")
    with pytest.raises(NoGuarantee, match=next(iter(options))):
        engine.get_epsilon(1e-5)


def test_realized_division_divides_by_the_batch():
    module, data = tiny(), toy_data()
    _, module, optimizer, loader = private(
        module, data, sigma=0.0, clipping=1e6, normalize="realized"
    )
    for batch in loader:
        before = flat(module)
        optimizer.zero_grad()
        mean_loss(module, batch).backward()
        optimizer.step()
        after = flat(module)
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(before, module.parameters())
        plain = torch.autograd.grad(mean_loss(module, batch), list(module.parameters()))
        expected = torch.cat([g.flatten() for g in plain])
        assert len(batch[0]) != 12  # not L, or the test would show nothing
        assert (before - after - expected).norm() <= 1e-5 * expected.norm()
        break


def test_target_epsilon_is_kept():
    data = toy_data(200)
    loader = DataLoader(TensorDataset(*data), batch_size=20)
    engine = PrivacyEngine(accountant="pld", seed=0)
    module = tiny()
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=loader,
        num_examples=200,
        clipping=1.0,
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=3,
    )
    assert train(module, optimizer, loader, epochs=3) == 30
    assert 1.9 < engine.get_epsilon(1e-5) <= 2.0


def test_validate_finds_what_would_go_wrong_and_leaves_no_trace():
    engine, module, _, _ = private(
        Words(), (torch.randint(0, 20, (8, 7)), torch.randint(0, 10, (8,)))
    )
    state = torch.get_rng_state()
    batch = (torch.randint(0, 20, (4, 7)), torch.randint(0, 10, (4,)))
    torch.set_rng_state(state)
    assert engine.validate(batch, mean_loss) == []
    assert torch.equal(state, torch.get_rng_state())
    problems = engine.validate(
        batch, lambda m, b: F.linear(m.embed(b[0]).mean(1), m.out.weight).sum()
    )
    assert any(p.startswith("out.weight: used outside") for p in problems)
    assert any(p.startswith("norm.weight: no gradient came back") for p in problems)
    (problem,) = engine.validate(batch, lambda m, b: m(b[0].reshape(1, -1)).sum())
    assert "embed got a tensor of shape (1, " in problem
    assert all(p.grad is None for p in module.parameters()) and len(engine.ledger) == 0


@pytest.mark.parametrize("registered", [False, True])
def test_validate_names_a_buffer_that_is_built_on_first_use(registered):
    class Building(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)
            if registered:
                self.register_buffer("kept", None)

        def forward(self, x):
            if getattr(self, "kept", None) is None:
                self.register_buffer("kept", x.detach().mean(0))
            return self.fc(x)

    module = Building()
    before = dict(module._buffers)
    engine, *_ = private(module, toy_data())
    (problem,) = engine.validate(toy_data(), mean_loss)
    assert (
        problem.startswith("kept: the training forward builds this buffer")
        and "before make_private" in problem
    )
    assert module._buffers == before


def test_validate_checks_how_the_loss_is_reduced():
    engine, *_ = private(tiny(), toy_data())
    assert engine.validate(toy_data(), mean_loss) == []
    (problem,) = engine.validate(
        toy_data(), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum")
    )
    assert "loss_reduction='mean'" in problem


def test_in_evaluation_mode_nothing_is_left_to_cudnn():
    """Its recurrent layers have no backward there."""
    from zetaclip import check_parity

    engine, module, _, _ = private(tiny(), toy_data())
    seen = set()

    def watched(module, batch):
        seen.add((module.training, torch.backends.cudnn.enabled))
        return mean_loss(module, batch)

    before = torch.backends.cudnn.enabled
    assert engine.validate(toy_data(), watched) == [] and check_parity(module, toy_data(), watched)
    assert (False, False) in seen and (False, True) not in seen
    assert module.training and torch.backends.cudnn.enabled == before


def test_check_parity_of_a_private_module_tests_the_rules_in_use():
    from zetaclip import check_parity

    _, module, *_ = private(tiny(), toy_data())
    report = check_parity(module, toy_data(), mean_loss)
    assert report.ok and {layer.path for layer in report.layers} == {"linear"}


def test_check_parity_detects_a_loss_that_divides_by_something_else():
    from zetaclip import check_parity

    module = tiny()
    x, y = toy_data(9)
    y[::3] = -100

    def ignoring(module, batch, reduction="mean"):
        out = F.cross_entropy(module(batch[0]), batch[1], ignore_index=-100, reduction=reduction)
        return torch.nan_to_num(out)

    report = check_parity(module, (x, y), ignoring)
    assert (
        not report.ok
        and "loss_reduction='sum'" in report.note
        and not any(layer.ok for layer in report.layers)
    )
    assert check_parity(module, (x, y), lambda m, b: ignoring(m, b, "sum"), loss_reduction="sum").ok


@pytest.mark.parametrize("head", [0.0, 1.0], ids=["fresh head of zeros", "trained"])
def test_class_weights_are_found_out_however_rare_the_class_is(head):
    """A weighted mean divides by the weights of the whole batch, so that one record scales the
    others' gradients."""
    from zetaclip import check_parity

    x, y = toy_data(60, classes=2)
    y[:], y[50] = 0, 1

    def weighted(reduction, divisor=1.0):
        weight = torch.tensor([1.0, 100.0, 1.0])
        return lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight, reduction=reduction).div(
            divisor
        )

    def per_record(m, b):
        own = (
            F.cross_entropy(m(b[0]), b[1], reduction="none") * torch.tensor([1.0, 100.0, 1.0])[b[1]]
        )
        return own.mean()

    module = tiny()
    with torch.no_grad():
        for p in module[2].parameters():
            p *= head  # with zeros every record has the same loss, whatever it weighs
    assert not check_parity(module, (x, y), weighted("mean"))
    assert check_parity(module, (x, y), weighted("sum"), loss_reduction="sum") and check_parity(
        module, (x, y), per_record
    )
    engine, module, *_ = private(module, (x, y))
    (problem,) = engine.validate((x, y), weighted("mean"))
    assert "class weights" in problem
    assert engine.validate((x, y), per_record) == []
    engine.detach()
    engine, *_ = private(module, (x, y), loss_reduction="sum")
    assert engine.validate((x, y), weighted("sum", divisor=60.0)) == []


def test_class_weights_in_the_loss_break_the_sensitivity_and_a_sum_does_not(monkeypatch):
    """What one record of the rare class moves, against what the ledger says, where there is no
    noise. So it is refused."""
    from zetaclip.engine._loss_check import LossCheck
    from zetaclip.errors import LossError

    def sums(reduction, more):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(33, 6, generator=generator) + torch.tensor([5.0, 0, 0, 0, 0, 0])
        y = torch.tensor([0] * 32 + [1])
        size = 32 + more
        module = tiny()
        engine, module, optimizer, loader = private(
            module,
            (x[:size], y[:size]),
            sigma=0.0,
            q=1.0,
            num_examples=32,
            loss_reduction=reduction,
        )
        before = flat(module)
        weight = torch.tensor([1.0, 1000.0, 1.0])
        train(
            module,
            optimizer,
            loader,
            lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight, reduction=reduction),
        )
        return (before - flat(module)) * 32, next(iter(engine.ledger.rows())).sensitivity

    with pytest.raises(LossError, match="class weights"):
        sums("mean", 0)
    monkeypatch.setattr(LossCheck, "due", lambda check: 0)
    for reduction, holds in (("mean", False), ("sum", True)):
        (one, sensitivity), (other, _) = sums(reduction, 0), without_warnings(sums, reduction, 1)
        assert (float((one - other).norm()) <= sensitivity * (1 + 1e-5)) == holds


def test_check_parity_detects_a_wrong_rule(monkeypatch):
    """The check can fail: a rule that forgets a factor is reported for its layer, and for no
    other."""
    import dataclasses

    from zetaclip import check_parity
    from zetaclip.gradients import LAYER_RULES

    rule = LAYER_RULES[nn.Conv2d]

    def wrong(shadow, g, x):
        return rule.backward(shadow, g * 1.01, x)

    monkeypatch.setitem(LAYER_RULES, nn.Conv2d, dataclasses.replace(rule, backward=wrong))
    report = check_parity(CNN(), (torch.randn(3, 1, 28, 28), torch.randint(0, 10, (3,))), mean_loss)
    assert not report.ok
    assert {layer.parameter for layer in report.layers if not layer.ok} == {
        "conv1.weight",
        "conv1.bias",
        "conv2.weight",
        "conv2.bias",
    }
    assert "OFF" in str(report)
