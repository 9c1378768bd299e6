"""zetaclip.losses weigh one record at a time; criterion= and the rehearsals find a loss that does
not.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import flat, private, tiny, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import LossError, PrivacyEngine, check_parity, losses
from zetaclip.engine._loss_check import LossCheck
from zetaclip.engine._rehearsal import MadeUp, rehearse
from zetaclip.errors import OwnerWarning

WEIGHT = [1.0, 50.0, 2.0]


def data(rows=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.arange(rows) % 3


def by(criterion):
    return lambda module, batch: criterion(module(batch[0]), batch[1])


# -- zetaclip.losses ------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "made",
    [
        lambda reduction: losses.CrossEntropy(WEIGHT, reduction=reduction),
        lambda reduction: losses.CrossEntropy({1: 50.0}, classes=3, reduction=reduction),
        lambda reduction: losses.CrossEntropy(ignore_index=0, reduction=reduction),
        lambda reduction: losses.CrossEntropy(
            WEIGHT, ignore_index=2, label_smoothing=0.1, reduction=reduction
        ),
    ],
)
def test_cross_entropy_is_one_record_at_a_time(made, reduction):
    criterion = made(reduction)
    assert check_parity(tiny(), data(), by(criterion), reduction)
    engine, module, optimizer, loader = private(
        tiny(), data(), loss_reduction=reduction, criterion=criterion
    )
    train(module, optimizer, loader, by(criterion))
    assert engine.updates == 2


def test_cross_entropy_weighs_as_torch_does_per_record():
    out, y = torch.randn(9, 3), torch.arange(9) % 3
    own = F.cross_entropy(out, y, weight=torch.tensor(WEIGHT), reduction="none")
    assert torch.allclose(losses.CrossEntropy(WEIGHT)(out, y), own.mean())
    assert torch.allclose(losses.CrossEntropy(WEIGHT, reduction="sum")(out, y), own.sum())
    weights = torch.arange(9.0)
    assert torch.allclose(losses.CrossEntropy(WEIGHT)(out, y, weights), (own * weights).mean())


def test_positions_are_averaged_within_their_record():
    out, y = torch.randn(4, 3, 5), torch.randint(0, 3, (4, 5))
    y[0] = -100
    y[1, 2:] = -100
    criterion = losses.CrossEntropy()
    each = torch.stack([criterion(out[i : i + 1], y[i : i + 1]) for i in range(4)])
    assert each[0] == 0 and torch.allclose(each[1], F.cross_entropy(out[1:2, :, :2], y[1:2, :2]))
    assert torch.allclose(criterion(out, y), each.mean())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_binary_cross_entropy(reduction):
    x, y = data()
    criterion = losses.BCEWithLogits(pos_weight=50.0, reduction=reduction)
    batch = (x, F.one_hot(y, 3).float())
    assert check_parity(tiny(), batch, by(criterion), reduction)
    want = F.binary_cross_entropy_with_logits(x[:, :3], batch[1], pos_weight=torch.tensor(50.0))
    assert torch.allclose(criterion(x[:, :3], batch[1]), want * (24 if reduction == "sum" else 1))


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        ("balanced", "private"),
        ({7: 1.0}, "0 to 2"),
        ([1.0, -1.0, 1.0], "at least 0"),
        ([0.0] * 3, "not all of them 0"),
    ],
)
def test_weights_are_public_constants(weight, says):
    with pytest.raises(ValueError, match=says):
        losses.CrossEntropy(weight, classes=3)


# -- make_private(criterion=) ---------------------------------------------------------------------


def pairs(out, y):
    return (out[: len(out) // 2] - out[len(out) // 2 : 2 * (len(out) // 2)]).square().mean()


BAD = {
    "weight": nn.CrossEntropyLoss(weight=torch.tensor(WEIGHT)),
    "ignore_index": nn.CrossEntropyLoss(ignore_index=1),
    "never seen ignore_index": nn.CrossEntropyLoss(ignore_index=-1),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "pairs": pairs,
    "contrastive": lambda out, y: F.cross_entropy(out @ out.t(), torch.arange(len(out))),
    "centred": lambda out, y: F.cross_entropy(out - out.mean(0), y),
    "hidden": lambda out, y: (
        F.cross_entropy(out, y, reduction="none") * F.softmax(out.detach()[:, 0], 0)
    ).sum(),
    "root": lambda out, y: F.cross_entropy(out, y).sqrt(),
}


@pytest.mark.parametrize("name", BAD)
def test_a_criterion_that_mixes_records_is_refused(name):
    with pytest.raises(LossError, match=r"^criterion") as caught:
        private(tiny(), data(), criterion=BAD[name])
    assert any(cure in str(caught.value) for cure in ("zetaclip.losses", 'loss_reduction="sum"'))


@pytest.mark.parametrize(
    "criterion",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), nn.MultiMarginLoss()],
)
def test_an_ordinary_criterion_passes_and_leaves_no_trace(criterion):
    """Three values come back, as ever; nothing of module, streams or the run hangs on the check."""

    def run(**options):
        torch.manual_seed(7)
        engine, module, optimizer, loader = private(tiny(), data(), **options)
        drawn = torch.rand(1)
        train(module, optimizer, loader, by(criterion))
        assert engine.updates == 2
        return torch.cat([flat(module), drawn])

    assert torch.equal(run(), run(criterion=criterion))
    with pytest.raises(LossError, match="takes the mean"):
        private(tiny(), data(), criterion=criterion, loss_reduction="sum")


def test_a_criterion_gets_no_value_of_a_record():
    seen = []

    def spying(out, y):
        seen.append((out.detach().clone(), y.clone()))
        return F.mse_loss(out[:, 0], y)

    x, y = torch.full((24, 6), 1234.5), torch.full((24,), 777.0)
    private(tiny(), (x, y), criterion=spying)
    assert seen and all(float(y.abs().max()) < 100 for _, y in seen)
    with torch.no_grad():
        real = tiny()(x[:1])[0]
    assert not any(torch.allclose(row, real) for out, _ in seen for row in out)


def test_what_a_criterion_needs_and_what_it_cannot_be_tried_on():
    with pytest.raises(TypeError, match=r"\(inputs, targets\)"):
        private(tiny(), (data()[0],), criterion=nn.MSELoss())
    with pytest.raises(TypeError, match="function of"):
        private(tiny(), data(), criterion="cross entropy")

    def picky(out, y):
        raise KeyError("only on Mondays")

    with pytest.warns(OwnerWarning, match=r"only on Mondays.*engine\.validate"):
        private(tiny(), data(), criterion=picky)


# -- rehearsals -----------------------------------------------------------------------------------


def test_validate_names_a_wrong_reduction():
    engine, *_ = private(tiny(), data())
    (problem,) = engine.validate(
        data(), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum")
    )
    assert 'it is their sum: give make_private loss_reduction="sum"' in problem
    engine, *_ = private(tiny(), data(), loss_reduction="sum")
    (problem,) = engine.validate(data(), lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    assert 'it is their mean: give make_private loss_reduction="mean"' in problem


class Restless(nn.Module):
    """Draws, counts and collects in every forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))
        self.total, self.outputs, self.calls = torch.zeros(()), [], 0

    def forward(self, x):
        out = self.body(x)
        self.count += 1
        self.total += out.detach().sum()
        self.outputs.append(out.detach())
        self.calls += 1
        return out + 0 * torch.rand(())


def test_a_rehearsal_leaves_no_trace_and_sees_mixing(monkeypatch):
    module = Restless()
    *_, optimizer, loader = private(module, data())
    before, state = flat(module), torch.get_rng_state()
    rehearse(optimizer._loop, loader, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    with pytest.raises(LossError, match="made-up records"):
        rehearse(
            optimizer._loop, loader, lambda m, b: F.cross_entropy(m(b[0] - b[0].mean(0)), b[1])
        )
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(before, flat(module))
    assert (float(module.count), float(module.total), module.outputs, module.calls) == (
        0.0,
        0.0,
        [],
        0,
    )

    def failing(m, b):
        m.calls += 1
        raise RuntimeError

    rehearse(optimizer._loop, loader, failing)  # told where it is trained
    rehearse(
        optimizer._loop,
        loader,
        lambda m, b: F.cross_entropy(m(b[0]) + torch.randn(len(b[0]), 3), b[1]),
    )  # a VAE, say
    assert module.calls == 0


def test_made_up_records_have_the_shape_and_no_value():
    row = {
        "ids": torch.full((1, 4), 9),
        "attention_mask": torch.zeros(1, 4, dtype=torch.long),
        "x": torch.zeros(1, 2),
    }
    made = MadeUp(row, 5).batch
    assert made["ids"].shape == (5, 4) and set(made["ids"].unique().tolist()) == {0, 1}
    assert bool((made["attention_mask"] == 1).all()) and made["x"].shape == (5, 2)
    assert not MadeUp(row, 5, plain=True).batch["ids"].any()


class Mixing(nn.Module):
    """A network of the user's own whose outputs hang on the whole batch."""

    def __init__(self, dataset):
        super().__init__()
        self.body = nn.Linear(dataset.input_shape[0], dataset.outputs)

    def forward(self, x):
        return self.body(x.flatten(1) - x.flatten(1).mean(0))


def test_the_estimators_and_the_command_rehearse(monkeypatch):
    """Both train by ``PrivateSteps``. Without the rehearsal nothing in a graph tells of a module
    that mixes records.
    """
    from zetaclip.data import Dataset, Split
    from zetaclip.training.config import Config
    from zetaclip.training.recipe import build_method, resolve
    from zetaclip.training.steps import PrivateSteps

    x, y = data(40)
    dataset = Dataset(
        "toy", "classification", Split(x, y), None, 3, "one row", public=True, nominal_size=40
    )
    config = Config(
        method="dp-sgd", sigma=1.0, clip=1.0, epochs=1, batch_size=10, accountant="rdp", seed=0
    )
    method = build_method(config)
    config = resolve(config, dataset, method)
    with pytest.raises(LossError, match="made-up records"):
        PrivateSteps(config, dataset, method, Mixing(dataset))
    weighted = config.changed(class_weight={"1": 30.0})
    steps = PrivateSteps(weighted, dataset, method, tiny())
    own = F.cross_entropy(steps.model(x), y, reduction="none")
    assert torch.allclose(steps.loss(x, y), (own * torch.tensor([1.0, 30.0, 1.0])[y]).sum())


def test_a_rehearsal_changes_no_seeded_run(monkeypatch):
    """Weights and torch's own stream are the same, bit for bit."""
    from zetaclip.integrations.sklearn import PrivateClassifier

    x, y = data(40)

    def weights():
        torch.manual_seed(11)
        given = {
            "bounds": (-3, 3),
            "classes": [0, 1, 2],
            "num_examples": 40,
            "epochs": 2,
            "method": "dp-sgd",
        }
        fitted = PrivateClassifier(epsilon=8.0, random_state=1, **given).fit(x.numpy(), y.numpy())
        return torch.cat([flat(fitted.module_), torch.rand(1)])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rehearsed = weights()
        monkeypatch.setattr("zetaclip.engine.Hooks.rehearse", lambda *_: None)
        assert torch.equal(rehearsed, weights())


# -- δ --------------------------------------------------------------------------------------------


def test_a_delta_of_one_over_n_is_told_once():
    engine, module, optimizer, loader = private(tiny(), data())
    train(module, optimizer, loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.get_epsilon(0.01)
        assert not caught
        engine.get_epsilon(1 / 24)
        engine.get_epsilon(0.5)
    (warning,) = caught
    assert issubclass(warning.category, OwnerWarning) and "1/N" in str(warning.message)
    module = tiny()
    with pytest.warns(OwnerWarning, match="1/N"):
        PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*data()), batch_size=6),
            target_epsilon=3.0,
            target_delta=0.05,
            epochs=1,
            clipping=1.0,
            num_examples=24,
        )


def test_the_checks_say_nothing_in_published_files(tmp_path):
    """Neither the ledger nor a checkpoint tells what the owner was told."""
    engine, module, optimizer, loader = private(tiny(), data(), q=1.0)
    with pytest.warns(OwnerWarning, match="compares every record"):
        train(
            module,
            optimizer,
            loader,
            lambda m, b: F.cross_entropy(m(b[0]) @ m(b[0]).t(), torch.arange(len(b[0]))),
        )
    engine.save(tmp_path / "run.pt")
    engine.ledger.to_jsonl(tmp_path / "ledger.jsonl")
    for file in tmp_path.iterdir():
        assert b"compares" not in file.read_bytes()
    assert isinstance(optimizer._loop.model.losses, LossCheck)
