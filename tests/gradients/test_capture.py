"""How layers are watched: what the module looks like meanwhile, and what is noticed."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    assert_parity,
    looped_gradients,
    mean_loss,
    private,
    recorded,
    tiny,
    toy_data,
    train,
)
from networks import MODELS, Encoder, Scaled, Words
from torch import nn
from torch.utils.checkpoint import checkpoint

from zetaclip.gradients import CaptureBuffer, CaptureError, make_shadows
from zetaclip.gradients.capture import LayerCapture, exact
from zetaclip.mechanism import Mechanism


def attached(module):
    recorder = CaptureBuffer()
    shadows, _ = make_shadows(module, {p for p in module.parameters() if p.requires_grad}, recorder)
    for shadow in shadows:
        shadow.attach()
    return recorder


def test_the_module_comes_back_as_it_was():
    module = tiny()
    kinds = [type(part) for part in module.modules()]
    keys, flags = list(module.state_dict()), [p.requires_grad for p in module.parameters()]
    engine, same, *_ = private(module, toy_data())
    assert same is module
    assert [type(part) for part in module.modules()] == kinds
    assert (
        list(module.state_dict()) == keys
        and [p.requires_grad for p in module.parameters()] == flags
    )
    engine.detach()
    assert all("forward" not in part.__dict__ for part in module.modules())


def test_an_own_forward_on_the_instance_comes_back_on_detach():
    module = nn.Sequential(nn.Linear(6, 3))
    layer = module[0]
    plain = nn.Linear.forward

    def doubled(x):
        return 2 * plain(layer, x)

    layer.forward = doubled
    engine, *_ = private(module, toy_data())
    assert "per example" in engine.describe()[0].path  # nn.Linear's own rule would be wrong here
    engine.detach()
    assert layer.forward is doubled


@pytest.mark.parametrize("name", ["mlp", "transformer", "raw-parameter", "gru"])
def test_copies_are_plain(name):
    build, inputs = MODELS[name]
    module, x = build(), inputs(4)
    expected = module(x).detach()
    recorder = attached(module)
    recorder.open(4)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    averaged = torch.optim.swa_utils.AveragedModel(module)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
        copy.deepcopy(copy.deepcopy(module)),
        pickle.loads(pickle.dumps(copy.deepcopy(module))),
        averaged.module,
    ]
    for other in copies:
        recorder.clear()
        out = other(x)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        assert all(
            p.grad is not None for p in other.parameters()
        )  # ordinary autograd, not our engine
        assert not recorder.received and not recorder.forwards
        assert not any(p is q for p in other.parameters() for q in module.parameters())


@pytest.mark.parametrize("name", ["mlp", "cnn", "raw-parameter"])
def test_transforms_of_torch_func_are_refused(name):
    """They would run the layers on something else than the records that are out."""
    build, inputs = MODELS[name]
    module, x = build(), inputs(4)
    recorder = attached(module)
    recorder.open(4)
    with pytest.raises(CaptureError, match=r"a transform of torch.func"):
        torch.func.vmap(lambda row: module(row.unsqueeze(0)))(x)
    with pytest.raises(CaptureError, match=r"a transform of torch.func"):
        torch.func.grad(lambda scale: module(x * scale).sum())(torch.ones(()))
    with torch.no_grad():
        torch.func.vmap(lambda row: module(row.unsqueeze(0)))(x)


def test_a_forward_without_a_backward_leaves_nothing_behind():
    module = tiny()
    recorder = attached(module)
    recorder.open(4)
    x = torch.randn(4, 6)
    alive = weakref.ref(x)
    loss = module(x).sum()
    del x, loss
    gc.collect()
    assert alive() is None and not recorder.received


def test_no_gradients_are_summed_by_autograd():
    module = tiny()
    recorder = attached(module)
    recorder.open(4)
    module(torch.randn(4, 6)).sum().backward()
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert len(recorder.received) == 4


def test_nothing_is_recorded_when_no_batch_is_out_or_without_gradients():
    module = tiny()
    recorder = attached(module)
    module(torch.randn(4, 6)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    recorder.open(4)
    with torch.no_grad():
        module(torch.randn(9, 6))  # evaluation while a batch is out, on any number of rows
    assert not recorder.forwards


def test_rows_that_are_not_records_are_refused():
    class Merged(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            return self.fc(x.reshape(-1, 6)).view(x.shape[0], -1, 3).mean(1)

    module = Merged()
    attached(module).open(4)
    with pytest.raises(CaptureError, match=r"fc got a tensor of shape \(20, 6\), but 4 records"):
        module(torch.randn(4, 5, 6))


def test_a_shared_row_is_refused():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 6)

        def forward(self, x):
            return x + self.table(torch.arange(5)[None])

    module = Positions()
    attached(module).open(4)
    with pytest.raises(CaptureError, match="expand it to one row per record"):
        module(torch.randn(4, 5, 6))


class Checkpointed(nn.Module):
    """Two checkpointed passes through the same layers."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 10)

    def segment(self, x):
        return torch.tanh(self.second(torch.relu_(self.first(x))))

    def forward(self, x):
        x = x.clone().requires_grad_() if self.reentrant else x
        x = checkpoint(self.segment, x, use_reentrant=self.reentrant)
        return self.out(checkpoint(self.segment, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_passes_parity(reentrant):
    module = Checkpointed(reentrant=False).double()
    batch = (torch.randn(5, 6).double(), torch.randint(0, 10, (5,)))
    loop = looped_gradients(
        module, batch, mean_loss
    )  # torch refuses autograd.grad through the reentrant kind
    module.reentrant = reentrant
    chunk, *_ = recorded(module, batch, mean_loss)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(list(chunk.pieces())), loop, rtol=1e-10, atol=1e-12)
    # The second run of the forward is not a second use: no warning about uses, and it trains.
    _, module, optimizer, loader = private(Checkpointed(reentrant), toy_data(classes=3), sigma=0.1)
    assert train(module, optimizer, loader) == 2


class ResidualBlock(nn.Module):
    """The input of a layer inside a checkpoint is read by that layer alone."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 6)
        self.down, self.out = nn.Linear(6, 6), nn.Linear(6, 10)

    def segment(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))

    def forward(self, x):
        return self.out(checkpoint(self.segment, x, use_reentrant=False))


def test_a_checkpointed_residual_block_passes_parity():
    """torch lets each saved tensor be read once."""
    module = ResidualBlock().double()
    batch = (torch.randn(5, 6).double(), torch.randint(0, 10, (5,)))
    loop = looped_gradients(module, batch, mean_loss)
    chunk, *_ = recorded(module, batch, mean_loss)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(list(chunk.pieces())), loop, rtol=1e-10, atol=1e-12)


def test_autograd_grad_leaves_no_record():
    module = tiny()
    recorder = attached(module)
    recorder.open(4)
    x = torch.randn(4, 6, requires_grad=True)
    loss = module(x).square().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    assert not recorder.received
    loss.backward()
    assert len(recorder.received) == 4


def test_two_backwards_of_one_batch_add_up():
    module = tiny(dtype=torch.float64)
    x, y = toy_data(5, dtype=torch.float64)

    class Twice:
        def __init__(self, first, second):
            self.parts = first, second

        def backward(self):
            for part in self.parts:
                part.backward()

    def split(module, batch):
        return Twice(
            F.cross_entropy(module(batch[0]), batch[1]),
            0.1 * module(batch[0]).square().sum(1).mean(),
        )

    def whole(module, batch):
        return (
            F.cross_entropy(module(batch[0]), batch[1])
            + 0.1 * module(batch[0]).square().sum(1).mean()
        )

    found, *_ = recorded(module, (x, y), split)
    expected, *_ = recorded(module, (x, y), whole)
    with torch.no_grad():
        torch.testing.assert_close(found.norms(), expected.norms(), rtol=1e-12, atol=0)


def test_gradients_of_gradients_are_refused():
    module = tiny()
    attached(module).open(4)
    with pytest.raises(CaptureError, match="create_graph"):
        module(torch.randn(4, 6)).sum().backward(create_graph=True)


def test_an_input_that_changed_after_the_layer_saw_it_is_noticed():
    module = nn.Linear(6, 3)
    attached(module).open(4)
    x = torch.randn(4, 6)
    loss = module(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled_modules_are_refused_by_name():
    with pytest.raises(ValueError, match=r"torch.compile.*_orig_mod"):
        private(torch.compile(tiny(), backend="eager"), toy_data())
    inplace = tiny()
    inplace.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled in place"):
        private(inplace, toy_data())


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_compiling_a_module_after_it_became_private_is_refused():
    _, module, optimizer, loader = private(tiny(), toy_data())
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        compiled(torch.randn(3, 6))  # evaluation is free to be compiled
    with pytest.raises(CaptureError, match=r"torch.compile of a private module is not supported"):
        train(compiled, optimizer, loader)
    torch._dynamo.reset()


def test_uses_of_one_parameter_are_added_before_the_norm():
    """Adding norms instead of gradients would give another value: the test shows that it can
    tell."""
    module = Words(tied=True).double()
    x, y = torch.randint(0, 20, (5, 7)), torch.randint(0, 10, (5,))
    assert_parity(module, (x, y), mean_loss, 1e-11)
    chunk, _, shadows = recorded(module, (x, y), mean_loss)
    used_twice = [s.name for s in shadows if module.embed.weight in set(s.parameters.values())]
    assert used_twice == ["embed", "out"]
    recorder = attached(module)
    recorder.open(5)
    mean_loss(module, (x, y)).backward()
    with torch.no_grad():
        apart = (
            sum(
                part.norms().square() for parts in recorder.received.values() for part in parts
            ).sqrt()
            * 5
        )
        assert (apart - chunk.norms()).abs().min() > 1e-3


def test_describe_lists_every_path():
    engine, *_ = private(Encoder(), (torch.randn(8, 9, 16), torch.randint(0, 10, (8,))))
    paths = {line.parameter: line.path for line in engine.describe()}
    assert paths["encoder.layers.0.self_attn.in_proj_weight"] == "attention"
    assert paths["encoder.layers.1.norm2.bias"] == "layer norm" and paths["head.weight"] == "linear"
    assert "head.weight" in str(engine.describe())
    engine, *_ = private(Scaled(), (torch.randn(8, 6), torch.randint(0, 10, (8,))))
    assert {line.path for line in engine.describe()} == {"per example (vmap)"}


@pytest.fixture
def precision():
    """Sets torch's precision of float32, and puts it back after the test."""
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("wanted", ["medium", "high", "highest"])
def test_norms_and_sums_take_float32_as_it_is(precision, wanted):
    precision(wanted)
    with exact(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"
        with exact(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == wanted
    with pytest.raises(KeyError), exact(torch.device("cpu")):
        raise KeyError
    assert torch.get_float32_matmul_precision() == wanted


def test_autocast_and_a_low_precision_together(precision):
    precision("medium")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with exact(torch.device("cpu")):
            assert (
                torch.get_float32_matmul_precision() == "highest"
                and not torch.is_autocast_enabled("cpu")
            )
        assert torch.is_autocast_enabled("cpu")
    assert torch.get_float32_matmul_precision() == "medium"


needs_settings = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="an older torch"
)


@needs_settings
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "place", ["generic", "cuda", "mkldnn", "cuda matmul", "mkldnn matmul", "mkldnn conv"]
)
def test_the_settings_of_single_kernels_are_put_back_too(device, place):
    """Flags alone, so that those of a GPU can be looked at without one."""
    backend, kind = (place.split() + ["all"])[:2]
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    kinds = [("generic", "all")] + [
        (b, k) for b in ("cuda", "mkldnn") for k in ("all", "matmul", "conv", "rnn")
    ]
    for one in ("cuda", "mkldnn"):
        write(one, "matmul", "none")  # what another test has left
    start = [read(*one) for one in kinds]
    write(backend, kind, "tf32")
    try:
        before = [read(*one) for one in kinds]
        with exact(torch.device(device)):
            for used in ("matmul", "conv"):
                assert read("cuda" if device == "cuda" else "mkldnn", used) in ("ieee", "none")
        assert [read(*one) for one in kinds] == before
    finally:
        write(backend, kind, "none")
    # What was inherited still is. (cuDNN's own default can't be written, so what it was is set in
    # its place.)
    assert [read(*one) for one in kinds if one != ("cuda", "conv")] == [
        value for one, value in zip(kinds, start, strict=True) if one != ("cuda", "conv")
    ]
    # Later users of torch's older switch find cuDNN's two kinds of kernel alike, as at the start.
    torch.backends.cudnn.allow_tf32 = True
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    "build", [tiny, lambda: nn.Sequential(Scaled(), nn.LayerNorm(10))], ids=["rules", "per example"]
)
def test_whatever_bounds_records_in_a_step_is_exact(precision, monkeypatch, build):
    """Contributions in backward, norms with factors and sum, the noise; and the loop itself runs as
    the user asked for."""
    seen = {}

    def spied(kind, name):
        inner = getattr(kind, name)

        def spy(*args, **kwargs):
            seen.setdefault(name, set()).add(torch.get_float32_matmul_precision())
            return inner(*args, **kwargs)

        monkeypatch.setattr(kind, name, spy)

    for kind, name in ((LayerCapture, "hand_over"), (Mechanism, "absorb"), (Mechanism, "release")):
        spied(kind, name)
    _, module, optimizer, loader = private(build(), toy_data())
    precision("medium")
    assert train(module, optimizer, loader) == 2
    assert seen == {name: {"highest"} for name in ("hand_over", "absorb", "release")}
    assert torch.get_float32_matmul_precision() == "medium"
