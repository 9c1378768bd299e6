"""The Lightning callback: the training is private, and Lightning's counters count updates."""

import csv
import os
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip(
    "lightning.pytorch", reason="the extra `lightning` is not installed"
)

from lightning.pytorch.callbacks import (  # noqa: E402
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

from zetaclip import PrivacyLeakWarning, Spectral  # noqa: E402
from zetaclip.accounting import epsilon  # noqa: E402
from zetaclip.integrations.lightning import Privacy  # noqa: E402
from zetaclip.ledger import Event  # noqa: E402

pytestmark = [
    # Lightning's own advice, and what it touches in torch.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

N, L = 60, 8
PER_EPOCH = 8  # ceil(60 / 8)


@pytest.fixture(autouse=True)
def _one_process():
    """Lightning starts a process group before any callback can refuse one."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Net(lightning.LightningModule):
    """An ordinary module: nothing in it knows of privacy."""

    def __init__(self, lr=0.5, dropout=0.0, log=False, interval=None):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Linear(6, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 3)
        )
        self.lr, self.log_loss, self.interval = lr, log, interval
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(len(y))
        loss = F.cross_entropy(self.body(x), y)
        if self.log_loss:
            self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.body(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        if self.interval is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": self.interval},
        }


def data(size=N):
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(size, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def loader(size=N):
    return DataLoader(TensorDataset(*data(size)), batch_size=L)


def privacy(**terms):
    given = {
        "noise_multiplier": 1.0,
        "target_delta": 1e-5,
        "clipping": 1.0,
        "accountant": "rdp",
        "seed": 0,
    }
    return Privacy(**{**given, "num_examples": N, **terms})


def trainer(tmp_path, *callbacks, **options):
    given = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
    }
    given |= {
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
    }
    return lightning.Trainer(callbacks=list(callbacks), **{**given, **options})


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def by_hand(**terms):
    """Two epochs of an ordinary loop with the seed 5: the network, and its engine."""
    from zetaclip import PrivacyEngine

    net, engine = Net(), PrivacyEngine(accountant="rdp", seed=5)
    _, optimizer, private = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        data_loader=loader(), noise_multiplier=1.0, clipping=1.0, **terms,
    )  # fmt: skip
    for _ in range(2):
        for x, y in private:
            optimizer.zero_grad()
            F.cross_entropy(net.body(x), y).backward()
            optimizer.step()
    return net, engine


# -- privacy ---------------------------------------------------------------------------------------


def test_it_is_the_engines_own_training(tmp_path):
    """Bit for bit what the loop by hand with the same seed gives."""
    net, told = Net(), privacy(seed=5)
    trainer(tmp_path, told).fit(net, loader())
    other, engine = by_hand(num_examples=N)
    assert torch.equal(flat(net), flat(other))
    assert told.engine.ledger.events() == engine.ledger.events()
    assert told.engine.get_epsilon(1e-5) == epsilon(engine.ledger.events(), 1e-5, "rdp")


def test_the_update_has_the_right_noise(tmp_path):
    """Records without a gradient: the update is the noise, lr σ C / L a coordinate. 2/3 and 3/2 of
    it are rejected."""

    class Still(Net):
        def training_step(self, batch, batch_idx):
            return 0.0 * self.body(batch[0]).sum()

    net = Still(lr=1.0)
    before = flat(net)
    trainer(tmp_path, privacy(noise_multiplier=3.0, clipping=2.0), max_steps=40, max_epochs=-1).fit(
        net, loader()
    )
    moved = (flat(net) - before) / (3.0 * 2.0 / L * 40**0.5)
    spread = float(moved.square().mean())
    limit = 4 * (2 / len(moved)) ** 0.5
    assert (
        abs(spread - 1) < limit
        and abs(spread * 4 / 9 - 1) > limit
        and abs(spread * 9 / 4 - 1) > limit
    )


def test_a_wrong_loss_is_found_before_the_first_update(tmp_path):
    """The trial on made-up records finds both; what the module logs in it is not kept, and seeded
    runs are as before."""
    from zetaclip import LossError

    class Summed(Net):
        def training_step(self, batch, batch_idx):
            self.log("train_loss", 0.0)
            return F.cross_entropy(self.body(batch[0]), batch[1], reduction="sum")

    class Mixed(Net):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.body(batch[0] - batch[0].mean(0)), batch[1])

    for net, says in ((Summed(), 'loss_reduction="sum"'), (Mixed(), "mixes")):
        callback, before = privacy(), flat(net)
        with pytest.raises(LossError, match=says):
            trainer(tmp_path, callback, max_steps=2, max_epochs=-1).fit(net, loader())
        assert len(callback.engine.ledger) == 0 and torch.equal(flat(net), before)


def test_a_trial_of_the_loss_changes_no_seeded_run(tmp_path, monkeypatch):
    def weights():
        torch.manual_seed(1)
        net = Net(dropout=0.5)
        trainer(tmp_path, privacy(seed=3), max_steps=3, max_epochs=-1).fit(net, loader())
        return flat(net)

    tried = weights()
    monkeypatch.setattr("zetaclip.engine.Hooks.rehearse", lambda *_: None)
    assert torch.equal(tried, weights())


def test_noise_destroys_accuracy(tmp_path):
    """A callback that is not wired in would train the ordinary model, and nobody would notice."""
    x, y = data()

    def accuracy(sigma):
        net = Net(lr=0.5)
        trainer(tmp_path, privacy(noise_multiplier=sigma), max_epochs=30).fit(net, loader())
        return float((net.body(x).argmax(1) == y).float().mean())

    assert accuracy(0.1) > 0.85 and accuracy(1000.0) < 0.6


def test_target_epsilon_is_for_the_trainers_own_steps(tmp_path):
    told = privacy(noise_multiplier=None, target_epsilon=3.0)
    trainer(tmp_path, told, max_epochs=3).fit(Net(), loader())
    assert told.engine.updates == 3 * PER_EPOCH
    assert 2.95 < told.engine.get_epsilon(1e-5) <= 3.0


def test_estimated_stepping_batches_does_not_keep_the_ordinary_loader(tmp_path):
    class Asks(Net):
        def configure_optimizers(self):
            self.asked = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    net, told = Asks(), privacy()
    trainer(tmp_path, told).fit(net, loader())
    assert net.asked == 2 * PER_EPOCH == told.engine.updates == len(told.engine.ledger)
    assert len(set(net.seen)) > 1  # Poisson batches vary; the ordinary loader's have 8 rows


def test_a_loop_past_the_optimizer_is_an_error(tmp_path):
    class Past(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()
            optimizer.optimizer.inner.step()

    with pytest.raises(
        RuntimeError, match="would move the weights by gradients without clipping or noise"
    ):
        trainer(tmp_path, privacy()).fit(Past(), loader())


def test_a_loop_without_the_optimizer_is_an_error(tmp_path):
    class Without(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()

    with pytest.raises(RuntimeError, match="0 private updates were taken"):
        trainer(tmp_path, privacy()).fit(Without(), loader())


# -- what Lightning counts -------------------------------------------------------------------------


class Rates(Callback):
    def __init__(self):
        self.rates = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    "terms", [{}, {"physical_batch_size": 3}, {"method": "dp-sam", "clipping": None}], ids=str
)
def test_steps_epochs_and_schedulers_count_updates(tmp_path, terms):
    net, told, rates = Net(interval="step"), privacy(**terms), Rates()
    fitted = trainer(tmp_path, told, rates)
    fitted.fit(net, loader())
    assert fitted.global_step == told.engine.updates == 2 * PER_EPOCH and fitted.current_epoch == 2
    assert rates.rates == [0.5 * 0.5 ** (k + 1) for k in range(16)]
    passes = 2 if "method" in terms else 1
    assert told.engine.ledger.steps == passes * 16
    if "physical_batch_size" in terms:
        assert max(net.seen) <= 3 and len(net.seen) > 16


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_max_steps_and_epoch_schedulers(tmp_path, interval):
    net, told = Net(interval=interval), privacy(physical_batch_size=3)
    fitted = trainer(tmp_path, told, max_steps=11, max_epochs=-1)
    fitted.fit(net, loader())
    assert fitted.global_step == told.engine.updates == 11
    assert fitted.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5 ** (
        11 if interval == "step" else 1
    )


def test_limited_epochs(tmp_path):
    told = privacy()
    fitted = trainer(tmp_path, told, limit_train_batches=3, max_epochs=4)
    fitted.fit(Net(), loader())
    assert told.engine.updates == 12 and fitted.current_epoch == 4


def test_physical_batches_change_nothing_but_memory(tmp_path):
    whole, split = Net(), Net()
    trainer(tmp_path, privacy(seed=2)).fit(whole, loader())
    trainer(tmp_path, privacy(seed=2, physical_batch_size=3)).fit(split, loader())
    assert torch.allclose(flat(whole), flat(split), atol=1e-5)


def test_chunks_go_through_the_modules_hooks(tmp_path):
    class Hooked(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] * 0.0 + 7.0, batch[1]]

        def training_step(self, batch, batch_idx):
            assert (batch[0] == 7.0).all()
            return super().training_step(batch, batch_idx)

    trainer(tmp_path, privacy(physical_batch_size=2)).fit(Hooked(), loader())


def test_validation_between_updates(tmp_path):
    net = Net()
    fitted = trainer(tmp_path, privacy(physical_batch_size=3), val_check_interval=4)
    fitted.fit(net, loader(), loader())
    assert "val_loss" in fitted.callback_metrics and fitted.global_step == 16
    fitted.validate(net, loader(), verbose=False)


# -- what it shows and where it stops --------------------------------------------------------------


def test_epsilon_and_clip_are_in_the_progress_bar(tmp_path):
    told = privacy(clipping=Spectral(initial=0.7, period=5, probe="body.3"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="none of the")  # a layer of 3 x 32 has no tail
        fitted = trainer(tmp_path, told)
        fitted.fit(Net(), loader())
    shown = fitted.progress_bar_metrics
    assert shown["clip"] == pytest.approx(0.7, rel=1e-4)
    assert shown["epsilon"] == pytest.approx(
        told.engine.get_epsilon(1e-5), rel=1e-6
    )  # Lightning keeps float32


def test_no_line_of_a_log_tells_less_than_was_spent(tmp_path):
    told = privacy()
    fitted = trainer(tmp_path, told, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    fitted.fit(Net(), loader())
    with open(Path(fitted.logger.log_dir) / "metrics.csv") as file:
        lines = [line for line in csv.DictReader(file) if line["epsilon"]]
    assert len(lines) == fitted.global_step > 5
    (event,) = told.engine.ledger.events()
    for line in lines:
        spent = epsilon(
            [Event(event.sample_rate, event.noise_multiplier, int(line["step"]) + 1)], 1e-5, "rdp"
        )
        assert float(line["epsilon"]) >= spent * (1 - 1e-6)
    assert float(lines[-1]["epsilon"]) == pytest.approx(told.engine.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("method", ["dp-sgd", "dp-sam"])
def test_max_epsilon_ends_training_before_it_is_exceeded(tmp_path, method):
    told = privacy(method=method, clipping=None, max_epsilon=5.0, physical_batch_size=3)
    fitted = trainer(tmp_path, told, max_epochs=10)
    fitted.fit(Net(), loader())
    events = told.engine.ledger.events()
    more = [*events, *told.engine.planned_events(told.engine.updates, told.engine.updates + 1)]
    assert 0 < told.engine.updates == fitted.global_step < 10 * PER_EPOCH
    assert epsilon(events, 1e-5, "rdp") <= 5.0 < epsilon(more, 1e-5, "rdp")


def test_max_epsilon_holds_against_min_epochs(tmp_path):
    told = privacy(max_epsilon=5.0)
    trainer(tmp_path, told, max_epochs=10, min_epochs=10).fit(Net(), loader())
    assert told.engine.get_epsilon(1e-5) <= 5.0


def test_max_epsilon_that_allows_nothing(tmp_path):
    with pytest.raises(ValueError, match="does not allow a single update"):
        trainer(tmp_path, privacy(max_epsilon=0.01)).fit(Net(), loader())


def test_training_metrics_are_warned_of_once_and_noted(tmp_path):
    told = privacy()
    with pytest.warns(UserWarning, match="the module logs train_loss in training") as caught:
        trainer(tmp_path, told).fit(Net(log=True), loader())
    assert sum("train_loss" in str(w.message) for w in caught) == 1
    assert "not covered: logged in training: train_loss" in told.engine.ledger.header.notes
    silent = privacy()
    trainer(tmp_path, silent).fit(
        Net(), loader(), loader()
    )  # validation metrics are the user's own affair
    assert not any("not covered" in note for note in silent.engine.ledger.header.notes)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_second_fit_goes_on_in_the_same_ledger_with_other_noise(tmp_path, monkeypatch, seed):
    import zetaclip.mechanism as mechanism

    drawn, draw = [], mechanism.add_noise

    def noted(key, *rest):
        drawn.append(key)  # the noise is a function of it
        draw(key, *rest)

    monkeypatch.setattr(mechanism, "add_noise", noted)
    told, net = privacy(seed=seed), Net()
    for fit in (1, 2, 3):
        trainer(tmp_path, told).fit(net, loader())
        assert told.engine.ledger.steps == 16 * fit and told.engine.updates == 16
    assert len(drawn) == 48 and len(set(drawn)) == 48
    assert 0 < told.engine.get_epsilon(1e-5) < float("inf")


# -- checkpoints -----------------------------------------------------------------------------------


def saving(folder, **options):
    return ModelCheckpoint(
        dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=5, **options
    )


@pytest.mark.parametrize(
    "terms", [{}, {"physical_batch_size": 3}, {"method": "dp-sam", "clipping": None}], ids=str
)
def test_resume_is_bit_equal_with_the_private_file(tmp_path, terms):
    whole = Net(dropout=0.3, interval="step")
    torch.manual_seed(9)
    trainer(tmp_path, privacy(seed=None, **terms), saving(tmp_path), enable_checkpointing=True).fit(
        whole, loader()
    )
    path = tmp_path / "step=10.ckpt"
    assert path.with_name("step=10.ckpt.private").stat().st_mode & 0o777 == 0o600
    again, told = Net(dropout=0.3, interval="step"), privacy(seed=None, **terms)
    torch.manual_seed(77)
    fitted = trainer(tmp_path, told, enable_checkpointing=False)
    fitted.fit(again, loader(), ckpt_path=path)
    assert torch.equal(flat(whole), flat(again)) and fitted.global_step == 16
    # The steps after the checkpoint were made twice, with the same noise: they count once.
    assert told.engine.ledger.steps == (32 if "method" in terms else 16)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_resume_is_bit_equal_from_any_folder_and_hears_of_the_others(tmp_path, monkeypatch):
    """The last and the best, each in a folder of its own, older ones removed; and a resumed run
    that saves into a third.

    Runs draw keys of their own, but the same ones in every test: half a gradient is no other one
    once it is clipped, and a batch of eight is now and then clipped whole.
    """
    monkeypatch.setattr(os, "urandom", random.Random(5).randbytes)

    def fit(net, folder, **options):
        told = privacy(seed=None)
        last = ModelCheckpoint(
            dirpath=folder, filename="last-{step}", save_top_k=1, every_n_train_steps=5
        )
        best = ModelCheckpoint(
            dirpath=folder / "best", filename="{step}", save_top_k=1, every_n_train_steps=7
        )
        trainer(tmp_path, told, last, best, enable_checkpointing=True).fit(net, loader(), **options)
        return told

    whole = Net(dropout=0.3)
    fit(whole, tmp_path / "first")
    (path,) = (tmp_path / "first").glob("*.ckpt")
    (best,) = (tmp_path / "first" / "best").glob("*.ckpt")
    again = Net(dropout=0.3)
    fit(again, tmp_path / "second", ckpt_path=best)
    (third,) = (tmp_path / "second").glob("*.ckpt")
    for start in (path, best, third):
        other, told = Net(dropout=0.3), privacy(seed=None)
        trainer(tmp_path, told).fit(other, loader(), ckpt_path=start)
        assert torch.equal(flat(whole), flat(other)) and told.engine.ledger.steps == 16
        with pytest.raises(RuntimeError, match="another gradient"):
            trainer(tmp_path, privacy(seed=None)).fit(
                Halved(dropout=0.3), loader(), ckpt_path=start
            )


class Halved(Net):
    def training_step(self, batch, batch_idx):
        return 0.5 * super().training_step(batch, batch_idx)


def test_resume_without_the_home_of_the_run_says_what_to_do(tmp_path):
    later = ModelCheckpoint(dirpath=tmp_path / "b", filename="{step}", every_n_train_steps=10)
    folders = saving(tmp_path / "a"), later
    trainer(tmp_path, privacy(seed=None), *folders, enable_checkpointing=True).fit(Net(), loader())
    for journal in (tmp_path / "a").glob("*.journal"):
        journal.unlink()
    path = tmp_path / "b" / "step=10.ckpt"
    with pytest.raises(
        ValueError, match=r"journal in \.\./a .*resume without step=10\.ckpt\.private"
    ):
        trainer(tmp_path, privacy(seed=None)).fit(Net(), loader(), ckpt_path=path)
    path.with_name(path.name + ".private").unlink()
    told = privacy(seed=None)
    with (
        pytest.warns(UserWarning, match="can't be counted"),
        pytest.warns(UserWarning, match="fresh noise"),
    ):
        trainer(tmp_path, told).fit(Net(), loader(), ckpt_path=path)
    assert told.engine.ledger.steps == 16 + 6  # the journal beside the checkpoint is still there


def test_resume_without_the_private_file_is_rekeyed_and_said(tmp_path):
    whole = Net()
    trainer(tmp_path, privacy(seed=None), saving(tmp_path), enable_checkpointing=True).fit(
        whole, loader()
    )
    path = tmp_path / "step=10.ckpt"
    path.with_name(path.name + ".private").unlink()
    again, told = Net(), privacy(seed=None)
    with pytest.warns(UserWarning, match="continues with fresh noise and batches"):
        trainer(tmp_path, told).fit(again, loader(), ckpt_path=path)
    assert not torch.equal(flat(whole), flat(again))
    assert told.engine.ledger.steps == 16 + 6 and told.engine.updates == 16


def test_checkpoints_hold_no_secret(tmp_path):
    told = privacy(seed=None)
    trainer(tmp_path, told, saving(tmp_path), enable_checkpointing=True).fit(Net(), loader())
    path = tmp_path / "step=10.ckpt"
    public = torch.load(path, weights_only=True)
    assert public["zetaclip"]["counts"]["step"] == 10
    import json

    secret = next(iter(json.loads(path.with_name(path.name + ".private").read_text()).values()))
    content = path.read_bytes()
    for name in ("sampling", "noise"):
        assert secret[name].encode() not in content and bytes.fromhex(secret[name]) not in content


def test_no_way_of_saving_writes_secrets_into_a_checkpoint(tmp_path):
    """Not even through a Trainer that was never told to keep them apart."""
    told, net = privacy(seed=None), Net()
    trainer(tmp_path, told, max_epochs=1).fit(net, loader())
    run = told.engine._private()
    other = trainer(tmp_path, told)
    other.validate(net, loader(), verbose=False)
    other.save_checkpoint(tmp_path / "other.ckpt")
    content = (tmp_path / "other.ckpt").read_bytes()
    for key in (run.state.sampling, run.state.noise):
        assert key not in content and key.hex().encode() not in content
    assert not (tmp_path / "other.ckpt.private").exists()


def test_removed_checkpoints_take_their_secrets_along(tmp_path):
    keep = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=1)
    trainer(tmp_path, privacy(), keep, enable_checkpointing=True, max_epochs=3).fit(Net(), loader())
    names = sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(".journal"))
    assert names == ["epoch=2.ckpt", "epoch=2.ckpt.private"]


def test_weights_only_checkpoints_need_no_secrets(tmp_path):
    only = saving(tmp_path, save_weights_only=True)
    trainer(tmp_path, privacy(), only, enable_checkpointing=True).fit(Net(), loader())
    assert not list(tmp_path.glob("*.private")) and list(tmp_path.glob("*.ckpt"))


def test_a_checkpoint_of_ordinary_training_is_told(tmp_path):
    ordinary = trainer(tmp_path, saving(tmp_path), enable_checkpointing=True)
    ordinary.fit(Net(), loader())
    with pytest.warns(UserWarning, match="holds no private state"):
        trainer(tmp_path, privacy(), max_epochs=3).fit(
            Net(), loader(), ckpt_path=tmp_path / "step=10.ckpt"
        )


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.*Privacy clips each record's"),
        ({"accumulate_grad_batches": 2}, "gradient accumulation.*physical_batch_size"),
        ({"strategy": "ddp"}, "DDPStrategy wraps the module.*devices=1"),
        ({"reload_dataloaders_every_n_epochs": 1}, "would change the data"),
        ({"max_epochs": -1}, "needs a training with an end"),
    ],
)
def test_trainers_that_are_refused(tmp_path, options, message):
    told = privacy(noise_multiplier=None, target_epsilon=3.0)
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, told, **options).fit(Net(), loader())


def test_an_accumulation_schedule_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gradient accumulation"):
        trainer(tmp_path, privacy(), GradientAccumulationScheduler({1: 2})).fit(Net(), loader())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
def test_finders_are_refused_in_any_order(tmp_path, finder, first):
    """They train on the records by themselves, and what they find would be in no ledger."""

    class Loads(Net):  # a finder takes no loader that is given to fit
        batch_size = L

        def train_dataloader(self):
            return loader()

    callbacks = (finder(), privacy()) if first else (privacy(), finder())
    net = Loads()
    before = flat(net).clone()
    with pytest.raises(
        ValueError, match=f"{finder.__name__} trains on the private records.*public data"
    ):
        trainer(tmp_path, *callbacks).fit(net)
    assert torch.equal(flat(net), before)


def test_the_tuner_is_refused(tmp_path):
    net = Net()
    with pytest.raises(ValueError, match="LearningRateFinder trains on the private records"):
        Tuner(trainer(tmp_path, privacy())).lr_find(net, loader())


def test_the_other_package_is_named(tmp_path):
    other = pytest.importorskip("pytorch_lightning")
    strange = other.Trainer(default_root_dir=tmp_path, logger=False, enable_checkpointing=False)
    with pytest.raises(TypeError, match=r"comes from 'pytorch_lightning'.*from lightning.pytorch"):
        privacy().setup(strange, Net(), "fit")


def test_a_module_is_free_after_training_broke_off(tmp_path):
    class Breaks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                raise RuntimeError("on purpose")

    net, told = Net(), privacy()
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(tmp_path, told, Breaks()).fit(net, loader())
    assert len(told.engine.ledger) == 2
    again = privacy()
    trainer(tmp_path, again, max_epochs=1).fit(net, loader())
    assert len(again.engine.ledger) == again.engine.updates > 2


def test_half_precision_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"16-true.*bf16-mixed"):
        trainer(tmp_path, privacy(), precision="16-true").fit(Net(), loader())


def test_manual_optimization_and_several_optimizers_are_refused(tmp_path):
    class Manual(Net):
        automatic_optimization = False

    class Two(Net):
        def configure_optimizers(self):
            return [
                torch.optim.SGD(self.body[0].parameters()),
                torch.optim.SGD(self.body[3].parameters()),
            ]

    with pytest.raises(ValueError, match=r"manual optimization.*automatic"):
        trainer(tmp_path, privacy()).fit(Manual(), loader())
    with pytest.raises(RuntimeError, match="multiple optimizers"):  # Lightning's own
        trainer(tmp_path, privacy()).fit(Two(), loader())


def test_loaders_that_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"one DataLoader.*ConcatDataset"):
        trainer(tmp_path, privacy()).fit(Net(), [loader(), loader()])


def test_two_callbacks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="more than one Privacy"):
        trainer(tmp_path, privacy(), privacy()).fit(Net(), loader())


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"noise_multiplier": None}, "target_epsilon=.*or noise_multiplier="),
        ({"target_epsilon": 1.0}, "give either target_epsilon="),
        ({"max_epsilon": 1.0, "target_delta": None}, "max_epsilon= needs target_delta="),
        ({"clipping": None}, "clipping="),
        ({"clippng": 1.0}, "clippng"),
    ],
)
def test_terms_that_can_not_be(terms, message):
    with pytest.raises(TypeError, match=message):
        privacy(**terms)


def test_a_data_module_and_bfloat16(tmp_path):
    class Module(lightning.LightningDataModule):
        def train_dataloader(self):
            return loader()

    told = privacy()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyLeakWarning)  # the mean is undone exactly
        trainer(tmp_path, told, precision="bf16-mixed").fit(Net(), datamodule=Module())
    assert told.engine.updates == 16
    assert not any("half precision" in note for note in told.engine.ledger.header.notes)


# -- units -----------------------------------------------------------------------------------------

OWNERS = torch.arange(N) % 23  # two or three rows each


def of_units(**terms):
    return privacy(**{"units": OWNERS, "rows_per_unit": 3, "num_examples": 23, **terms})


@pytest.mark.parametrize("physical", [None, 6])
def test_a_step_of_units_adds_each_unit_clipped_once(tmp_path, physical):
    """Without noise and sampling, beside autograd on the rows of one unit at a time."""
    net = Net(lr=1.0)
    x, y = data()
    expected = torch.zeros_like(flat(net))
    for unit in OWNERS.unique():
        own = unit == OWNERS
        loss = F.cross_entropy(net.body(x[own]), y[own])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, net.parameters())])
        expected -= gradient * min(1.0, 0.3 / float(gradient.norm())) / 23
    before = flat(net)
    told = of_units(
        noise_multiplier=0.0, sample_rate=1.0, clipping=0.3, physical_batch_size=physical
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the missing noise
        trainer(tmp_path, told, max_steps=1, max_epochs=-1).fit(net, loader())
    moved = flat(net) - before
    assert (moved - expected).norm() <= 1e-4 * expected.norm()
    assert len(net.seen) > 1 if physical else sum(net.seen) >= N


def test_units_train_as_by_hand_and_epsilon_is_for_one(tmp_path):
    net, told = Net(), of_units(seed=5)
    trainer(tmp_path, told).fit(net, loader())
    other, _ = by_hand(num_examples=23, units=OWNERS, rows_per_unit=3)
    assert torch.equal(flat(net), flat(other))
    assert told.engine.updates == 2 * 3  # ceil(23 / 8) batches of units
    assert told.engine.get_epsilon(1e-5) == epsilon([Event(8 / 23, 1.0, 6)], 1e-5, "rdp")
    assert "unit" in told.engine.ledger.header.adjacency


def test_a_resumed_run_has_the_same_units(tmp_path):
    saved = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=2)
    trainer(tmp_path, of_units(), saved, max_epochs=1, enable_checkpointing=True).fit(
        Net(), loader()
    )
    path = next((tmp_path / "kept").glob("*.ckpt"))
    with pytest.raises(ValueError, match="data"):
        trainer(tmp_path, of_units(units=OWNERS.roll(1)), max_epochs=2).fit(
            Net(), loader(), ckpt_path=path
        )
    net, told = Net(), of_units()
    trainer(tmp_path, told, max_epochs=2).fit(net, loader(), ckpt_path=path)
    whole = Net()
    trainer(tmp_path, of_units(), max_epochs=2).fit(whole, loader())
    assert told.engine.updates == 6 and torch.equal(flat(net), flat(whole))


def test_a_module_that_sorts_is_refused_with_units(tmp_path):
    class Sorted(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            order = x.sum(1).argsort()
            return F.cross_entropy(self.body(x[order]), y[order])

    with pytest.raises(ValueError, match="others in a batch than by themselves"):
        trainer(tmp_path, of_units(), max_steps=1, max_epochs=-1).fit(Sorted(), loader())
