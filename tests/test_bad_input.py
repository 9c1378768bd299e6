"""What bad input gets: an error that says what to do, before anything is released."""

import math

import pytest
import torch
from helpers import flat, mean_loss, private, tiny, toy_data, train
from torch import nn

from zetaclip import PrivacyEngine, ValidationError
from zetaclip.control.base import Constant
from zetaclip.gradients import CaptureError


@pytest.mark.parametrize("clip", [0, -1, math.nan, math.inf, 0.0])
def test_clipping_norms_must_be_positive(clip):
    with pytest.raises(ValueError, match="positive and finite"):
        private(tiny(), toy_data(), clipping=clip)


@pytest.mark.parametrize("clip", [True, "1", None])
def test_clipping_must_be_given_and_a_number(clip):
    with pytest.raises(TypeError, match="clipping"):
        private(tiny(), toy_data(), clipping=clip)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"sigma": -1.0}, "noise_multiplier"),
        ({"sigma": math.nan}, "noise_multiplier"),
        ({"q": 0.0}, "sample_rate"),
        ({"q": 1.5}, "sample_rate"),
        ({"num_examples": 0}, "num_examples"),
        ({"num_examples": 2.5}, "num_examples"),
        ({"physical_batch_size": 0}, "physical_batch_size"),
        ({"physical_batch_size": 1.5}, "physical_batch_size"),
        ({"loss_reduction": "none"}, "loss_reduction"),
        ({"normalize": "batch"}, "normalize"),
        ({"empty": "drop"}, "empty"),
        ({"epochs": 0}, "epochs"),
    ],
    ids=lambda v: str(v),
)
def test_arguments_out_of_range_are_named(options, word):
    with pytest.raises(ValueError, match=word):
        private(tiny(), toy_data(), **options)


def test_unknown_arguments_and_accountants_are_errors():
    with pytest.raises(TypeError, match="max_norm"):
        private(tiny(), toy_data(), max_norm=1.0)
    with pytest.raises(ValueError, match=r"gdp.*rdp"):
        PrivacyEngine(accountant="gdp")
    with pytest.raises(TypeError, match="seed"):
        PrivacyEngine(seed="a")
    with pytest.raises(TypeError, match="finds σ"):
        PrivacyEngine().make_private_with_epsilon(
            module=tiny(),
            optimizer=None,
            data_loader=None,
            target_epsilon=1.0,
            target_delta=1e-5,
            epochs=1,
            noise_multiplier=1.0,
        )


def test_a_second_make_private_is_refused():
    engine, module, optimizer, loader = private(tiny(), toy_data())
    with pytest.raises(ValueError, match=r"private already.*detach"):
        private(module, toy_data())
    with pytest.raises(RuntimeError, match="new PrivacyEngine"):
        engine.make_private(
            module=tiny(),
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            clipping=1.0,
            num_examples=24,
        )
    with pytest.raises(ValueError, match="optimizer is private already"):
        private(tiny(), toy_data(), optimizer=optimizer)
    engine.detach()
    private(module, toy_data())


def test_what_was_refused_late_can_be_mended_and_tried_again():
    """A controller that can't start is found after the parameters were claimed; they must not stay
    claimed."""

    class Broken(Constant):
        def init(self):
            raise ValueError("no start")

    module = tiny()
    with pytest.raises(ValueError, match="no start"):
        private(module, toy_data(), clipping=Broken(1.0))
    private(module, toy_data())


def test_nothing_before_make_private():
    engine = PrivacyEngine()
    for call in (
        lambda: engine.ledger,
        lambda: engine.get_epsilon(1e-5),
        engine.describe,
        engine.detach,
    ):
        with pytest.raises(RuntimeError, match="make_private first"):
            call()


def test_batch_norm_is_refused_by_name_with_what_to_use():
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(ValidationError, match=r"1 \(BatchNorm1d\).*\n?.*zetaclip\.fix.*GroupNorm"):
        private(module, toy_data())
    assert all("forward" not in part.__dict__ for part in module.modules())
    from opacus.validators import ModuleValidator

    fixed = ModuleValidator.fix(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3))
    )
    fixed(torch.randn(2, 1, 6, 6))
    data = (torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,)))
    _, fixed, optimizer, loader = private(fixed, data)
    assert train(fixed, optimizer, loader) == 2


def test_a_batch_norm_that_wakes_up_is_caught():
    """Frozen with eval() it mixes nothing; train() wakes it, and its buffers give it away before a
    release."""
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False).eval(), nn.Linear(4, 3))
    engine, module, optimizer, loader = private(module, toy_data())
    train(module, optimizer, loader)
    spent = len(engine.ledger)
    module.train()
    with pytest.raises(RuntimeError, match=r"changed .*1\.running_mean"):
        train(module, optimizer, loader)
    assert len(engine.ledger) == spent


def test_running_statistics_that_wake_up_are_caught():
    norm = nn.InstanceNorm2d(4, track_running_stats=True).eval()
    module = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(64, 3))
    engine, module, optimizer, loader = private(
        module, (torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,)))
    )
    module.train()
    with pytest.raises(RuntimeError, match=r"changed .*1\.running_mean"):
        train(module, optimizer, loader)
    assert len(engine.ledger) == 0


def test_running_statistics_without_parameters_are_refused_too():
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    with pytest.raises(ValidationError, match="track_running_stats=False"):
        private(module, (torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,))))


def test_parameters_outside_the_optimizer_are_named():
    module = tiny()
    with pytest.raises(
        ValidationError, match=r"2\.weight, 2\.bias: trainable, but not in the optimizer"
    ):
        private(module, toy_data(), optimizer=torch.optim.SGD(module[0].parameters(), lr=1.0))
    with pytest.raises(ValidationError, match="not the module's"):
        private(
            module,
            toy_data(),
            optimizer=torch.optim.SGD([*module.parameters(), *tiny().parameters()], lr=1.0),
        )
    frozen = tiny().requires_grad_(False)
    with pytest.raises(ValidationError, match="nothing to train"):
        private(frozen, toy_data(), optimizer=torch.optim.SGD(tiny().parameters(), lr=1.0))


def test_wrappers_and_lazy_modules_are_refused():
    with pytest.raises(ValidationError, match=r"DataParallel.*module inside"):
        private(nn.DataParallel(tiny()), toy_data())
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValidationError, match="not initialised yet"):
        private(lazy, toy_data(), optimizer=torch.optim.SGD(lazy.parameters(), lr=1.0))
    engine = PrivacyEngine()
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        engine.make_private(
            module=3, optimizer=None, data_loader=None, noise_multiplier=1.0, clipping=1.0
        )


def test_an_empty_data_set_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        private(
            tiny(),
            (torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)),
            loader_options={"sampler": None},
        )


def test_other_data_while_a_batch_is_out_is_noticed():
    _, module, _, loader = private(tiny(), toy_data())
    batch = next(iter(loader))
    with pytest.raises(CaptureError, match="records are out"):
        mean_loss(module, toy_data(len(batch[0]) + 1))


def test_a_private_optimizer_is_not_pickled():
    import copy
    import pickle

    _, _, optimizer, _ = private(tiny(), toy_data())
    for attempt in (lambda: pickle.dumps(optimizer), lambda: copy.deepcopy(optimizer)):
        with pytest.raises(TypeError, match=r"engine\.save"):
            attempt()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 1e-42, 0.0])
def test_a_whole_batch_of_poison_leaves_finite_weights(value):
    data = (torch.full((12, 6), value), torch.zeros(12, dtype=torch.long))
    engine, module, optimizer, loader = private(tiny(), data, sigma=0.5)
    before = flat(module)
    assert train(module, optimizer, loader, epochs=2) == 4
    assert torch.isfinite(flat(module)).all() and not torch.equal(before, flat(module))
    assert math.isfinite(engine.get_epsilon(1e-5))


def test_a_diverged_model_goes_on_and_is_counted():
    module = tiny()
    with torch.no_grad():
        module[0].weight.fill_(math.nan)
    engine, module, optimizer, loader = private(module, toy_data())
    assert train(module, optimizer, loader) == 2 == engine.ledger.steps
