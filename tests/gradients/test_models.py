"""Whole networks against autograd, one example at a time."""

import pytest
import torch
from helpers import assert_parity, mean_loss
from networks import MODELS

from zetaclip import check_parity


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 3e-5)], ids=["f64", "f32"]
)
def test_network_agrees_with_the_loop(name, dtype, tolerance):
    build, inputs = MODELS[name]
    x = inputs(6)
    module = build().to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    assert_parity(module, (x, torch.randint(0, 10, (6,))), mean_loss, tolerance)


@pytest.mark.parametrize("name", list(MODELS))
def test_check_parity_says_so_to_anyone(name):
    build, inputs = MODELS[name]
    module = build()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    report = check_parity(module, (inputs(4), torch.randint(0, 10, (4,))), mean_loss)
    assert report.ok, str(report)
    assert {layer.parameter for layer in report.layers} == dict(module.named_parameters()).keys()
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all("forward" not in part.__dict__ for part in module.modules())


def test_check_parity_sees_through_reentrant_checkpointing():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = torch.nn.Linear(6, 6), torch.nn.Linear(6, 10)

        def forward(self, x):
            return self.out(
                torch.tanh(checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=True))
            )

    assert check_parity(
        Checkpointed(), (torch.randn(4, 6), torch.randint(0, 10, (4,))), mean_loss
    ).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "transformer"])
def test_half_precision_norms_are_those_of_float64(name, dtype):
    """bf16 weights: the norm of what was recorded, taken in float32, equals the float64 norm of the
    same records."""
    from helpers import recorded

    build, inputs = MODELS[name]
    module, x = build().to(dtype), inputs(6).to(dtype)
    chunk, layout, _ = recorded(module, (x, torch.randint(0, 10, (6,))), mean_loss)
    with torch.no_grad():
        exact = torch.cat([chunk._flat(torch.tensor([i]), torch.float64) for i in range(6)])
        norms = chunk.norms()
        total = torch.zeros(layout.numel, dtype=torch.float64)
        chunk.add_weighted_sum(total, torch.ones(6, dtype=torch.float64))
    assert layout.dtype == torch.float32
    torch.testing.assert_close(norms, exact.norm(dim=1), rtol=1e-5, atol=0)
    assert (total - exact.sum(0)).norm() <= 1e-5 * exact.sum(0).norm()


@pytest.mark.parametrize("name", list(MODELS))
def test_parts_that_are_dropped_once_added_give_the_same_sum(name):
    from helpers import recorded

    build, inputs = MODELS[name]
    torch.manual_seed(0)
    chunk, layout, _ = recorded(build(), (inputs(6), torch.randint(0, 10, (6,))), mean_loss)
    factors = torch.linspace(0.1, 1.7, 6, dtype=torch.float64)
    kept, dropped = (torch.zeros(layout.numel, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        chunk.norms()
        chunk.add_weighted_sum(kept, factors)
        assert chunk.parts
        chunk.add_weighted_sum(dropped, factors, drop=True)
    assert not chunk.parts and torch.equal(kept, dropped) and bool(kept.any())


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "transformer", "words"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_autocast_records_in_float32(name, inside):
    """bf16 autocast: the norms are float32's, and one pass is as near to float64 as autograd's own
    autocast loop is."""
    from helpers import looped_gradients, recorded

    build, inputs = MODELS[name]
    module, x, y = build(), inputs(6), torch.randint(0, 10, (6,))

    class Result:
        def __init__(self, loss):
            self.loss = loss

        def backward(self):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                self.loss.backward()

    def loss_fn(module, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(batch[0])
        return Result(torch.nn.functional.cross_entropy(out.float(), batch[1]))

    chunk, *_ = recorded(module, (x, y), loss_fn)
    with torch.no_grad():
        norms = chunk.norms()
        exact = torch.cat([chunk._flat(torch.tensor([i]), torch.float64) for i in range(6)])
    torch.testing.assert_close(norms, exact.norm(dim=1), rtol=1e-5, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = looped_gradients(
            module, (x, y), lambda m, b: torch.nn.functional.cross_entropy(m(b[0]).float(), b[1])
        )
    wide = (x.double() if x.is_floating_point() else x, y)
    loop = looped_gradients(module.double(), wide, mean_loss)
    assert 0 < (exact - loop).norm() <= 1.5 * (rough - loop).norm()
