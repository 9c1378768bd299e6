"""What takes the updates: the private engine, or an ordinary optimizer.

Both look the same to the loop. ``updates(until)`` trains to the end of the epoch, or until that
many updates are done, and yields after each. ``save`` and ``load`` carry everything that the rest
of the run depends on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..data.augment import Shift
from ..engine._rehearsal import MadeUp
from ..errors import ConfigError, NoGuarantee, OwnerWarning
from ..files import replace_file
from ..randomness._forward import set_users_streams, users_streams
from . import lengths
from .clipping import build_clipping
from .config import Config
from .diagnostics import noting
from .folder import RunFolder
from .memory import rows_at_once
from .recipe import steps_per_epoch, total_steps
from .steps_base import StepsBase

if TYPE_CHECKING:
    from ..data import Dataset
    from ..methods import Method


# A request after an update is the number of a signal (0 for none), plus this to save the run.
SAVE = 128


def _augmentation(config: Config, dataset: Dataset) -> Shift | None:
    if config.views == 1:
        return None
    if dataset.train.x.ndim != 4:
        raise ConfigError(
            "`views` are augmented pictures, and this network gets no pictures: use --features none"
            " and a network (--model cnn), or leave `views` out"
        )
    return Shift()


class PrivateSteps(StepsBase):
    """Updates by ``PrivacyEngine``.

    Args:
        config: The settings, all of them chosen.
        dataset: The data.
        method: The method.
        model: The network, on its device.
    """

    def __init__(self, config: Config, dataset: Dataset, method: Method, model: nn.Module) -> None:
        from ..accounting import epsilon, noise_multiplier_for
        from ..engine import PrivacyEngine
        from ..engine._group import on_first_rank

        super().__init__(config, dataset, method, model)
        assert config.batch_size is not None and config.delta is not None
        rate = min(1.0, config.batch_size / self.size)
        if config.sigma is not None:
            self.sigma = config.sigma
        else:
            assert config.epsilon is not None
            target = (config.epsilon, config.delta, rate, self.total, config.accountant)
            self.sigma = on_first_rank(
                lambda: noise_multiplier_for(*target), "the search for the noise"
            )
        if self.diagnostics is not None:
            method = noting(method, self.diagnostics)
        self.engine = PrivacyEngine(accountant=config.accountant, seed=config.seed)
        tensors = self.tensors(dataset)
        blank = [torch.zeros_like(part[:1]) for part in tensors]
        rows = rows_at_once(config, dataset, model, lambda: self.loss(*blank))
        loader = DataLoader(TensorDataset(*tensors), batch_size=config.batch_size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, self.optimizer, self.loader = self.engine.make_private(
                module=model,
                optimizer=method.optimizer(
                    model.parameters(), config.lr, **self.optimizer_options()
                ),
                data_loader=loader,
                noise_multiplier=self.sigma,
                method=method,
                clipping=build_clipping(config, method),
                num_examples=self.size if self.declared else None,
                physical_batch_size=rows,
                loss_reduction="sum",
                decouple_lr=bool(config.decouple),
                normalize=config.normalize,
                empty=config.empty,
                epochs=self.total / self.per_epoch,
                target_delta=config.delta,
                units=self.owners(dataset),
                rows_per_unit=dataset.rows_per_unit,
                views=config.views,
                augment=_augmentation(config, dataset),
            )
        for warning in caught:
            if issubclass(warning.category, OwnerWarning):  # not for the notes: they are published
                warnings.warn(warning.message, stacklevel=2)
            else:
                self.notes.append(str(warning.message))
        inputs = math.prod(dataset.input_shape)
        self.warning = lengths.warning(self.sigma, config.batch_size, self.total, self.size, inputs)
        if self.warning is not None:
            self.notes.append(self.warning)
        self.engine.hooks.rehearse(self.made_up(dataset), lambda model, batch: self.loss(*batch))
        self._stop: int | None = None  # updates that max_epsilon allows, as far as is known
        if config.sigma is not None and self.engine.ledger.header.claims_privacy:
            # If this accountant can't compute ε, fail now rather than after the training.
            planned = (self.engine.planned_events(0, self.total), config.delta, config.accountant)
            on_first_rank(lambda: epsilon(*planned), "the computation of the planned ε")

    def tensors(self, dataset: Dataset) -> tuple[Tensor, ...]:
        """The training records, one tensor for each argument of ``loss``."""
        split = dataset.train
        return (split.x, split.y) if split.weight is None else (split.x, split.y, split.weight)

    def owners(self, dataset: Dataset) -> Tensor | None:
        """The unit of each training record; None if each is a unit of its own."""
        return dataset.owners

    def made_up(self, dataset: Dataset) -> MadeUp:
        """Made-up records of the right shape, with targets of every kind."""
        made = MadeUp(self.loader.blank(), 5)
        numbers = torch.arange(made.rows)
        if dataset.task == "classification":
            made.batch[1] = numbers % dataset.outputs
        elif dataset.task == "binary":
            made.batch[1] = (numbers % 2).to(made.batch[1])
        return made

    @property
    def users_optimizer(self) -> torch.optim.Optimizer:
        """See ``StepsBase.users_optimizer``."""
        return self.optimizer.inner

    @property
    def sample_rate(self) -> float:
        """The sampling rate q."""
        return self.loader.sample_rate

    @property
    def clip(self) -> float:
        """The current clipping norm."""
        return self.optimizer.clip

    @property
    def probe_seconds(self) -> float:
        """Seconds spent on probes."""
        return self.engine.control_seconds

    def epsilon(self, accountant: str | None = None) -> float | None:
        """ε so far from the ledger; None if none is claimed or it is infinite."""
        assert self.config.delta is not None
        try:
            value = self.engine.get_epsilon(self.config.delta, accountant)
        except NoGuarantee:
            return None
        return value if math.isfinite(value) else None

    def updates(self, until: int) -> Iterator[int]:
        """Trains to the end of the epoch or to ``until`` updates; yields after each update."""
        for batch in self.loader:
            self.set_rate(self.optimizer)
            self.optimizer.zero_grad()
            self.backward(*batch)
            clip = self.optimizer.clip
            if self.engine.ranks is not None:
                # Requests are sent with the sum, so that all ranks act after the same update.
                self.engine.ranks.word = self.wish()
            self.optimizer.step()
            if self.optimizer.stepped:
                self.moved(clip)
                yield self.done
                if self.done >= until:
                    return

    def agreed(self) -> int:
        """See ``StepsBase.agreed``."""
        if self.engine.ranks is None:
            return self.wish()
        words = self.engine.ranks.words
        return max(word % SAVE for word in words) + SAVE * (words[0] >= SAVE)

    def affordable(self) -> int:
        """How many updates in all ``max_epsilon`` allows, at most the planned number."""
        limit, ranks = self.config.max_epsilon, self.engine.ranks
        if limit is None:
            return self.total
        if self._stop is None:
            if ranks is None:
                self._stop = self._largest_affordable(limit)
            else:
                self._stop = ranks.once(
                    lambda: self._largest_affordable(limit),
                    "the computation of what max_epsilon allows",
                )
        assert self._stop is not None
        return self._stop

    def _largest_affordable(self, limit: float) -> int:
        from ..accounting import affordable

        assert self.config.delta is not None
        spent = self.engine.ledger.events()
        return affordable(
            lambda count: [*spent, *self.engine.planned_events(self.done, count)],
            self.done,
            self.total,
            limit,
            self.config.delta,
            self.config.accountant,
        )

    def save(self, folder: RunFolder, trainer: dict[str, Any]) -> None:
        """Writes the checkpoint and the secret streams."""
        self.engine.save(folder.checkpoint, extra=self.extra(trainer), private=folder.secrets)

    def load(self, folder: RunFolder, rekey: bool) -> dict[str, Any]:
        """Loads the checkpoint; returns the trainer's part."""
        extra = self.engine.load(folder.checkpoint, replay=not rekey, private=folder.secrets)
        assert extra is not None
        self.done = self.engine.updates
        return self.take(extra)


class PlainSteps(StepsBase):
    """Ordinary training: shuffled batches, no clipping, no noise, no privacy.

    Args:
        config: The settings, all of them chosen.
        dataset: The data.
        method: The method.
        model: The network, on its device.
    """

    sigma: float | None = None
    sample_rate: float | None = None
    clip: float | None = None
    probe_seconds = 0.0

    def __init__(self, config: Config, dataset: Dataset, method: Method, model: nn.Module) -> None:
        super().__init__(config, dataset, method, model)
        self.size = len(dataset.train.y)
        self.x, self.y = dataset.train.x, dataset.train.y
        self.optimizer = method.optimizer(model.parameters(), config.lr, **self.optimizer_options())
        self.order_seed = torch.initial_seed() % 2**62
        self.per_epoch = steps_per_epoch(config, self.size)
        self.total = total_steps(config, self.size)

    def epsilon(self, accountant: str | None = None) -> None:
        """None: nothing is claimed."""
        return None

    def affordable(self) -> int:
        """All planned updates."""
        return self.total

    def updates(self, until: int) -> Iterator[int]:
        """Trains to the end of the epoch or to ``until`` updates; yields after each update."""
        epoch, first = divmod(self.done, self.per_epoch)
        order = torch.randperm(
            self.size, generator=torch.Generator().manual_seed(self.order_seed + epoch)
        )
        rows = self.config.physical_batch_size or self.config.batch_size
        assert self.config.batch_size is not None and rows is not None
        for batch in order.split(self.config.batch_size)[first:]:
            self.set_rate(self.optimizer)
            self.optimizer.zero_grad()
            for part in batch.split(rows):
                self.backward(self.x[part], self.y[part], divisor=len(batch))
            self.optimizer.step()
            self.moved()
            yield self.done
            if self.done >= until:
                return

    def save(self, folder: RunFolder, trainer: dict[str, Any]) -> None:
        """Writes the checkpoint."""
        state = {
            "module": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": self.done,
            "order_seed": self.order_seed,
            "rng": users_streams(self.device)["cpu"],
            "extra": self.extra(trainer),
        }
        with replace_file(folder.checkpoint) as file:
            torch.save(state, file)

    def load(self, folder: RunFolder, rekey: bool) -> dict[str, Any]:
        """Loads the checkpoint; returns the trainer's part."""
        state = torch.load(folder.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.order_seed = state["done"], state["order_seed"]
        set_users_streams({"cpu": state["rng"]}, self.device)
        return self.take(state["extra"])


Steps = PrivateSteps | PlainSteps
