"""A loss that does not reduce as was declared is refused before its first backward; a right one
meets no word.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from helpers import flat, private, tiny, train
from torch import nn

from zetaclip.errors import LossError, OwnerWarning

WEIGHT = torch.tensor([1.0, 5.0, 2.0])


def data(rows=30, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.arange(rows) % classes


def one_hot(y):
    return F.one_hot(y, 3).float()


def each(out, y):
    return F.cross_entropy(out, y, reduction="none")


def focal(out, y):
    own = each(out, y)
    return (1 - torch.exp(-own)) ** 2 * own


MEANS = {
    "cross entropy": lambda out, y: F.cross_entropy(out, y),
    "label smoothing": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "soft labels": lambda out, y: F.cross_entropy(out, one_hot(y)),
    "soft labels, weighted": lambda out, y: F.cross_entropy(out, one_hot(y), weight=WEIGHT),
    "mean of each": lambda out, y: each(out, y).mean(),
    "each weighted": lambda out, y: (each(out, y) * WEIGHT[y]).mean(),
    "sum over rows": lambda out, y: each(out, y).sum() / len(y),
    "rows first": lambda out, y: (each(out, y) / len(y)).sum(),
    "mse": lambda out, y: F.mse_loss(out, one_hot(y)),
    "bce": lambda out, y: F.binary_cross_entropy_with_logits(out, one_hot(y), pos_weight=WEIGHT),
    "mean, mean": lambda out, y: (out - one_hot(y)).square().mean(1).mean(),
    "mean over records first": lambda out, y: (out - one_hot(y)).square().mean(0).sum(),
    "transposed": lambda out, y: (out - one_hot(y)).square().t().mean(1).sum(),
    "kl": lambda out, y: F.kl_div(out.log_softmax(1), one_hot(y), reduction="batchmean"),
    "gather": lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).mean(),
    "two terms": lambda out, y: 0.3 * F.cross_entropy(out, y) + out.square().mean(),
    "stacked terms": lambda out, y: torch.stack(
        [F.cross_entropy(out, y), out.square().mean()]
    ).mean(),
    "accumulation": lambda out, y: F.cross_entropy(out, y) / 4,
    "focal": lambda out, y: focal(out, y).mean(),
    "pooled": lambda out, y: F.cross_entropy(out.unsqueeze(2).expand(-1, -1, 4).mean(2), y),
    "positions": lambda out, y: F.cross_entropy(
        out.unsqueeze(1).expand(-1, 5, -1).reshape(-1, 3), y.repeat_interleave(5)
    ),
}
SUMS = {
    "cross entropy": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "weighted": lambda out, y: F.cross_entropy(out, y, weight=WEIGHT, reduction="sum"),
    "ignored": lambda out, y: F.cross_entropy(out, y, ignore_index=0, reduction="sum"),
    "sum of each": lambda out, y: each(out, y).sum(),
    "constant": lambda out, y: each(out, y).sum() / 64.0,
    "mean times rows": lambda out, y: F.cross_entropy(out, y) * len(y),
    "only some": lambda out, y: each(out, y)[y > 0].sum(),
    "focal": lambda out, y: focal(out, y).sum(),
    "mean over columns": lambda out, y: (out - one_hot(y)).square().mean(1).sum(),
}
# Under either declaration.
WRONG = {
    "root": lambda out, y: F.mse_loss(out, one_hot(y)).sqrt(),
    "focal of the mean": lambda out, y: (
        (1 - torch.exp(-F.cross_entropy(out, y))) ** 2 * F.cross_entropy(out, y)
    ),
    "norm": lambda out, y: (out - one_hot(y)).norm(),
    "hardest": lambda out, y: each(out, y).topk(2)[0].sum(),
    "largest": lambda out, y: each(out, y).max(),
    "flooding": lambda out, y: (F.cross_entropy(out, y) - 0.1).abs() + 0.1,
    "mean of some": lambda out, y: each(out, y)[y > 0].mean(),
    "mean of some rows": lambda out, y: F.cross_entropy(out[y > 0], y[y > 0]),
    "a ratio": lambda out, y: each(out, y).sum() / out.square().sum(),
}
# Neither a mean over the rows nor a sum, but a mean by name.
WEIGHTED_MEANS = {
    "weight": lambda out, y: F.cross_entropy(out, y, weight=WEIGHT),
    "weight of ones": lambda out, y: F.cross_entropy(out, y, weight=torch.ones(3)),
    "ignore_index": lambda out, y: F.cross_entropy(out, y, ignore_index=0),
    "ignored by default": lambda out, y: F.cross_entropy(out, y.masked_fill(y == 0, -100)),
    "smoothed and ignored": lambda out, y: F.cross_entropy(
        out, y, ignore_index=1, label_smoothing=0.1
    ),
    "by hand": lambda out, y: (each(out, y) * WEIGHT[y]).sum() / WEIGHT[y].sum(),
    "counted": lambda out, y: (each(out, y) * (y > 0)).sum() / (y > 0).sum(),
}


def run(loss, declared, rows=30, q=1.0, epochs=1, **options):
    """A loop of one's own, and whether anything was released."""
    module = tiny()
    engine, module, optimizer, loader = private(
        module, data(rows), q=q, loss_reduction=declared, num_examples=rows + 1, **options
    )
    before = flat(module)
    try:
        train(module, optimizer, loader, lambda m, b: loss(m(b[0]), b[1]), epochs=epochs)
    except LossError:
        if engine.updates == 0:
            assert len(engine.ledger) == 0 and torch.equal(before, flat(module))
        raise
    return engine


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_taken_for_one(name):
    run(MEANS[name], "mean")
    with pytest.raises(
        LossError,
        match=r"takes the mean.*loss_reduction='sum' was declared.*loss_reduction=\"mean\"",
    ):
        run(MEANS[name], "sum")


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_taken_for_one(name):
    run(SUMS[name], "sum")
    with pytest.raises(LossError, match="loss_reduction='mean' was declared"):
        run(SUMS[name], "mean")


@pytest.mark.parametrize("declared", ["mean", "sum"])
@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_mixes_records_is_refused(name, declared):
    with pytest.raises(
        LossError, match=re.escape("zetaclip.losses") + "|neither mean nor sum|was declared"
    ):
        run(WRONG[name], declared)


@pytest.mark.parametrize("name", WEIGHTED_MEANS)
def test_a_weighted_mean_is_refused(name):
    with pytest.raises(LossError, match=r"weights|labels"):
        run(WEIGHTED_MEANS[name], "mean")


def test_pos_weight_divides_by_the_elements_and_not_by_weights():
    """So the mean of BCEWithLogitsLoss with pos_weight is a mean over rows, and ε holds."""
    logits, y, weight = torch.randn(7), torch.tensor([0.0, 1, 1, 0, 1, 0, 0]), torch.tensor(50.0)
    own = F.binary_cross_entropy_with_logits(logits, y, pos_weight=weight, reduction="none")
    for rows in (5, 7):
        mean = F.binary_cross_entropy_with_logits(logits[:rows], y[:rows], pos_weight=weight)
        assert torch.allclose(mean, own[:rows].sum() / rows)


def test_one_record_alone_tells_nothing_and_an_empty_batch_neither():
    """Mean and sum are the same there. The first chunk of two records is looked at, before it is
    released.
    """
    run(SUMS["cross entropy"], "mean", physical_batch_size=1)
    with pytest.raises(LossError, match="adds up"):
        run(SUMS["cross entropy"], "mean", q=0.02, epochs=20)


def test_a_constant_that_equals_the_rows_by_chance_is_not_taken_for_them():
    """q = 1 here: the size of every batch is the size that a public constant has, too."""
    with pytest.warns(OwnerWarning, match="by chance or not"):
        sums(lambda out, y: each(out, y).sum() / 30)
    # The first batch has 15 of 30 records, as expected; some later one has not.
    seed = next(seed for seed in range(100) if first_rows(seed) == 15)
    with pytest.warns(OwnerWarning, match="by chance or not"):
        assert sums(lambda out, y: each(out, y).sum() / 15, q=0.5, seed=seed).updates == 6
    with (
        pytest.raises(LossError, match="takes the mean"),
        pytest.warns(OwnerWarning, match="by chance or not"),
    ):
        sums(lambda out, y: each(out, y).sum() / len(y), q=0.5, seed=seed)


def first_rows(seed):
    engine, *_, loader = private(tiny(), data(), q=0.5, seed=seed)
    rows = len(next(iter(loader))[0])
    engine.detach()
    return rows


def sums(loss, q=1.0, seed=0):
    engine, module, optimizer, loader = private(
        tiny(), data(), q=q, seed=seed, loss_reduction="sum"
    )
    train(module, optimizer, loader, lambda m, b: loss(m(b[0]), b[1]), epochs=3)
    return engine


def test_a_later_change_of_the_loss_is_seen():
    """Chunks 1, 2, 4, 8, ... are looked at."""
    count = [0]

    def loss(out, y):
        count[0] += 1
        return F.cross_entropy(out, y, reduction="mean" if count[0] < 4 else "sum")

    with pytest.raises(LossError):
        run(loss, "mean", epochs=5)
    assert count[0] == 4


def test_what_cannot_be_told_is_said_once():
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            return x.mean()

        @staticmethod
        def backward(ctx, g):
            return g.expand(ctx.shape) / ctx.shape.numel()

    with pytest.warns(OwnerWarning, match="can't be told.*OddBackward.*criterion=") as caught:
        run(lambda out, y: Odd.apply(each(out, y)), "mean", epochs=3)
    assert len(caught) == 1


def test_a_similarity_of_all_pairs_is_not_silent():
    with pytest.warns(OwnerWarning, match="compares every record"):
        run(lambda out, y: F.cross_entropy(out @ out.t(), torch.arange(len(y))), "mean")


def column(out):
    return out[:, :1]


# Under "mean". Each compares records with each other, by shapes that broadcast.
PAIRS = {
    "(B, 1) - (B,)": lambda out, y: ((column(out) - y) ** 2).mean(),
    "(B,) - (B, 1)": lambda out, y: ((out[:, 0] - y[:, None]) ** 2).mean(),
    "absolute": lambda out, y: (column(out) - y).abs().mean(),
    "mse_loss": lambda out, y: F.mse_loss(column(out), y.float()),
    "huber_loss": lambda out, y: F.huber_loss(column(out), y.float()),
    "transposed": lambda out, y: F.softplus(column(out).t() - column(out)).mean(),
    "einsum": lambda out, y: F.cross_entropy(
        torch.einsum("id,jd->ij", out, out), torch.arange(len(y))
    ),
    "product": lambda out, y: F.cross_entropy(
        (out[:, None] * out[None]).sum(-1), torch.arange(len(y))
    ),
    "cosine": lambda out, y: F.cross_entropy(
        F.cosine_similarity(out[:, None], out[None], dim=-1), torch.arange(len(y))
    ),
    "constant on the other side": lambda out, y: (out @ one_hot(y).t()).exp().mean(),
    "distances": lambda out, y: torch.cdist(out, out).mean(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_warned_of_and_refused_once_other_rows_show_them(name):
    with (
        pytest.warns(OwnerWarning, match=r"compares every record.*makes shape.*squeeze\(1\)"),
        pytest.raises(LossError, match=r"compares every record.*makes shape.*squeeze\(1\)"),
    ):
        run(PAIRS[name], "mean", rows=60, q=0.5, epochs=4)
    # Full batches all have the same rows.
    with (
        pytest.warns(OwnerWarning, match="compares every record"),
        pytest.raises(LossError, match="compares every record"),
    ):
        run(PAIRS[name], "mean", epochs=2)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_in_a_criterion_are_refused_before_the_first_batch(name):
    with pytest.raises(LossError, match=r"^criterion"):
        private(tiny(), data(), criterion=PAIRS[name])


ACROSS = {
    "softmax": lambda out, y: F.nll_loss(out.log_softmax(0), y),
    "standardised": lambda out, y: F.cross_entropy((out - out.mean(0)) / out.std(0), y),
    "centred": lambda out, y: F.cross_entropy(out - out.mean(0), y),
    "scaled by the mean": lambda out, y: F.cross_entropy(out / out.abs().mean(), y),
    "cox": lambda out, y: -(out[:, 0] - out[:, 0].logcumsumexp(0)).mean(),
    "sorted": lambda out, y: (out[:, 0].sort().values - y.float().sort().values).abs().mean(),
    "running sum": lambda out, y: out.cumsum(0).mean(),
    "norm by column": lambda out, y: (out - one_hot(y)).norm(dim=0).mean(),
    "correlation": lambda out, y: 1 - F.cosine_similarity(out[:, 0], y.float(), dim=0),
    "gram of columns": lambda out, y: (out.t() @ out / len(y) - torch.eye(3)).square().sum(),
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_runs_along_the_records_is_refused(name):
    with pytest.raises(LossError, match=r"mixes records|adds up"):
        run(ACROSS[name], "mean")


DIVIDED = {
    "by weights": lambda out, y: (each(out, y) * WEIGHT[y]).mean() / WEIGHT[y].mean(),
    "by a mask": lambda out, y: (each(out, y) * (y > 0)).mean() / (y > 0).float().mean(),
    "before the mean": lambda out, y: (each(out, y) * WEIGHT[y] / WEIGHT[y].mean()).mean(),
    "by itself": lambda out, y: each(out, y).mean() / each(out, y).mean().detach(),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_mean_that_is_divided_by_a_tensor_is_not_silent(name):
    with pytest.warns(OwnerWarning, match="divides by a tensor"):
        run(DIVIDED[name], "mean")


@pytest.mark.parametrize(
    ("loss", "declared"),
    [
        (lambda out, y: (each(out, y) * (y > 0)).sum() / int((y > 0).sum()), "sum"),
        (lambda out, y: each(out, y).mean() / float((y > 0).float().mean()), "mean"),
        (lambda out, y: each(out, y).mean() / each(out, y).mean().item(), "mean"),
    ],
)
def test_a_divisor_that_changes_with_the_batch_is_not_silent(loss, declared):
    with pytest.warns(OwnerWarning, match="another one for each batch"):
        run(loss, declared, rows=61, q=0.5, epochs=4)


BY_BATCH = {
    "counts": (lambda out, y: (each(out, y) / torch.bincount(y)[y]).sum(), "sum"),
    "counts in a mean": (lambda out, y: (each(out, y) / torch.bincount(y)[y]).mean(), "mean"),
    "reciprocals": (lambda out, y: (each(out, y) * (1 / torch.bincount(y))[y]).sum(), "sum"),
    "a sum of one": (lambda out, y: (each(out, y) * (WEIGHT[y] / WEIGHT[y].sum())).sum(), "sum"),
    "a mean of one": (
        lambda out, y: (each(out, y) * (WEIGHT[y] / WEIGHT[y].mean())).mean(),
        "mean",
    ),
}


@pytest.mark.parametrize("name", BY_BATCH)
def test_weights_made_from_the_batch_are_not_silent(name):
    with pytest.warns(OwnerWarning, match="weighs records by what seems"):
        run(*BY_BATCH[name], rows=61, q=0.5, epochs=8)


def test_weights_of_ones_own_are_silent():
    run(lambda out, y: (each(out, y) * WEIGHT[y]).sum(), "sum", rows=60, q=0.5, epochs=8)
    run(lambda out, y: (each(out, y) / (1 + y)).sum(), "sum", rows=60, q=0.5, epochs=8)
    halves = torch.tensor([0.5, 1.5, 1.0])
    run(lambda out, y: (each(out, y) * halves[y]).mean(), "mean", rows=60, q=0.5, epochs=8)


RIGHT = {
    "norm": lambda out, y: (out - one_hot(y)).norm() ** 2 / len(y),
    "dot": lambda out, y: torch.dot(each(out, y), each(out, y)) / len(y),
    "product with weights": lambda out, y: each(out, y) @ WEIGHT[y] / len(y),
    "diagonal": lambda out, y: -torch.diag(out @ one_hot(y).t()).sigmoid().mean(),
    "trace": lambda out, y: -torch.trace(out @ one_hot(y).t()) / len(y),
    "loop": lambda out, y: (
        sum(each(o[None], t[None]).exp().mean() for o, t in zip(out, y, strict=True)) / len(y)
    ),
    "stacked loop": lambda out, y: torch.stack([(o.exp().sum() + 1).log() for o in out]).mean(),
    "sliced loop": lambda out, y: (
        sum(F.cross_entropy(out[i : i + 1], y[i : i + 1]) for i in range(len(y))) / len(y)
    ),
    "mean beside each": lambda out, y: (each(out, y) + 0.1 * out.square().mean()).mean(),
    "by row": lambda out, y: F.cross_entropy(
        (out - out.mean(1, keepdim=True)) / out.std(1, keepdim=True), y
    ),
    "normalized": lambda out, y: (F.normalize(out) - one_hot(y)).square().mean(),
    "quantiles": lambda out, y: (column(out) - torch.linspace(0, 1, 5)).abs().mean(),
    "prototypes": lambda out, y: torch.cdist(out, torch.eye(3)).mean(),
    "pairs within a record": lambda out, y: F.softplus(out[:, :, None] - out[:, None]).mean(),
    "distillation": lambda out, y: 9 * F.cross_entropy(out / 3, y),
}


@pytest.mark.filterwarnings("ignore:num_examples")
@pytest.mark.parametrize("rows", [3, 5, 9, 30])
@pytest.mark.parametrize("name", RIGHT)
def test_an_everyday_mean_is_silent(name, rows):
    """Also where the rows are as many as classes, quantiles or a factor."""
    run(RIGHT[name], "mean", rows=rows)


def test_a_number_of_all_records_beside_each_keeps_its_power():
    with pytest.raises(LossError, match="adds up"):
        run(lambda out, y: (each(out, y) + out.square().sum()).mean(), "mean")
    run(lambda out, y: (each(out, y) + out.square().mean()).sum(), "sum")


def test_a_constant_dimension_that_equals_the_rows_once_is_no_pair():
    seed = next(seed for seed in range(100) if first_rows(seed) == 15)
    engine, module, optimizer, loader = private(tiny(), data(), q=0.5, seed=seed)
    grid = torch.linspace(0, 1, 15)
    train(module, optimizer, loader, lambda m, b: (m(b[0])[:, :1] - grid).abs().mean(), epochs=4)
    assert engine.updates > 4


def test_other_models_and_reentrant_checkpoints_are_left_alone():
    from torch.utils.checkpoint import checkpoint

    other = nn.Linear(3, 1)
    engine, module, optimizer, loader = private(tiny(), data(), q=1.0)
    for x, y in loader:
        other(torch.randn(4, 3)).sum().backward()  # a sum, and none of ours
        optimizer.zero_grad()
        out = checkpoint(module, x.requires_grad_(), use_reentrant=True)
        F.cross_entropy(out, y).backward()
        optimizer.step()
    assert engine.updates == 1


def test_edges_and_several_roots_are_roots():
    from torch.autograd.graph import get_gradient_edge

    engine, module, optimizer, loader = private(tiny(), data(), q=1.0)
    for x, y in loader:
        out = module(x)
        first, second = F.cross_entropy(out, y), out.square().sum()
        with pytest.raises(LossError, match="adds up"):
            torch.autograd.backward([first, second])
        with pytest.raises(LossError, match="adds up"):
            torch.autograd.backward(get_gradient_edge(second), torch.ones(()))
        torch.autograd.backward(tensor for tensor in [first, out.square().mean()])
        optimizer.step()
    assert engine.updates == 1


def test_a_vector_is_a_sum_by_its_gradient():
    engine, module, optimizer, loader = private(tiny(), data(), q=1.0)
    for x, y in loader:
        own = each(module(x), y)
        with pytest.raises(LossError, match="adds up"):
            own.backward(torch.ones_like(own))
        own.backward(torch.full_like(own, 1 / len(y)))
        optimizer.step()
    assert engine.updates == 1


def test_a_module_that_is_run_record_by_record_is_looked_at():
    """Recurrent layers take the loop, and their graph is one part per record."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.gru(x.view(len(x), 2, 3))[0].mean(1))

    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        _, module, optimizer, loader = private(Recurrent(), data(), q=1.0)
        if reduction == "mean":
            train(module, optimizer, loader)
        else:
            with pytest.raises(LossError):
                train(
                    module,
                    optimizer,
                    loader,
                    lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
                )


def test_the_graph_of_another_model_is_not_judged_while_a_chunk_is_out():
    """Reentrant checkpointing hides whose layers are inside; those of this run did not run."""
    from torch.utils.checkpoint import checkpoint

    *_, loader = private(tiny(), data(), q=1.0)
    next(iter(loader))
    other = torch.nn.Linear(6, 6)
    x = torch.randn(30, 6, requires_grad=True)
    torch.tanh(checkpoint(other, x, use_reentrant=True).mean()).backward()
    assert other.weight.grad is not None
