"""What takes the updates: the private engine, or an ordinary optimizer.

Both look the same to the loop. ``updates(until)`` trains to the end of the epoch, or until that
many updates are done, and yields after each. ``save`` and ``load`` carry everything that the rest
of the run depends on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..clipping import ClipRule
from ..data.augment import Shift
from ..engine._rehearsal import MadeUp
from ..errors import NoGuarantee, OwnerWarning
from ..files import replace_file
from ..methods import Auto, WeightAverage
from ..randomness._forward import set_users_streams, users_streams
from . import lengths
from .config import Config, ConfigError
from .evaluate import Task
from .folder import RunFolder
from .recipe import (
    build_clipping,
    class_weights,
    nominal_size,
    rate_at,
    steps_per_epoch,
    total_steps,
)

if TYPE_CHECKING:
    from ..data import Dataset
    from ..methods import Method, NoiseBudget, Plan


# A request after an update is the number of a signal (0 for none), plus this to save the run.
SAVE = 128


class Diagnostics:
    """Values that ε does not cover, collected only if the user asked for them."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.sizes: list[int] = []
        self.clipped: list[float] = []

    def flush(self) -> dict[str, Any]:
        """Returns what was collected, and starts again."""
        taken = {
            "batch_losses": self.losses,
            "batch_sizes": self.sizes,
            "clip_fractions": self.clipped,
        }
        self.__init__()  # type: ignore[misc]
        return taken


class _NotingRule(ClipRule):
    """A clip rule that also notes which share of a chunk it clipped."""

    def __init__(self, rule: ClipRule, notes: Diagnostics) -> None:
        self._rule, self._notes = rule, notes
        self.name = rule.name
        self.extras, self.transform = rule.extras, rule.transform  # type: ignore[method-assign]
        self.init, self.update = rule.init, rule.update  # type: ignore[method-assign]

    @property
    def counts(self) -> bool:
        return self._rule.counts

    @property
    def remembers(self) -> bool:
        return self._rule.remembers

    @property
    def maps(self) -> bool:
        return self._rule.maps

    def __repr__(self) -> str:
        return repr(self._rule)

    def factors(self, norms: Tensor, clip: float, generator: Any) -> Tensor:
        """The factors of the wrapped rule.

        Args:
            norms: The norm of each record's gradient.
            clip: The clipping norm.
            generator: For rules that need randomness.
        """
        factors = self._rule.factors(norms, clip, generator)
        if len(norms):
            self._notes.clipped.append(float((norms > clip).double().mean()))
        return factors

    def sensitivity(self, clip: float) -> float:
        """The sensitivity of the wrapped rule."""
        return self._rule.sensitivity(clip)


def _noting(method: Method, notes: Diagnostics) -> Method:
    """The method with a rule that takes notes, also if its plan has another rule."""

    def plan(budget: NoiseBudget) -> Plan:
        found = method.plan(budget)
        return found if found.rule is None else replace(found, rule=_NotingRule(found.rule, notes))

    return replace(method, rule=_NotingRule(method.rule, notes), plan=plan)


class _Steps:
    """What both kinds share: the task, the learning rate schedule, the average of the weights."""

    optimizer: Any

    def __init__(self, config: Config, dataset: Dataset, method: Method, model: nn.Module) -> None:
        self.config = config
        self.method = method
        self.model = model
        self.task = Task.of(dataset)
        self.device = torch.device(config.device)
        weights = class_weights(config, dataset)
        self.weights = None if weights is None else torch.tensor(weights, device=self.device)
        self.size, self.declared = nominal_size(config, dataset)
        self.per_epoch = steps_per_epoch(config, self.size)
        self.total = total_steps(config, self.size)
        self.done = 0
        self.clips: list[float] = []  # C of each update
        self.notes: list[str] = []
        self.wish: Callable[[], int] = lambda: 0
        self.diagnostics = Diagnostics() if config.non_private_diagnostics else None
        decay = config.weight_average
        self.average = (
            None
            if decay is None
            else WeightAverage([p for p in model.parameters() if p.requires_grad], decay)
        )

    def optimizer_options(self) -> dict[str, Any]:
        """Options over the method's own. Families without momentum get none, which equals 0."""
        options: dict[str, Any] = {"weight_decay": self.config.weight_decay}
        if self.config.momentum or self.method.family == "auto":
            options["momentum"] = self.config.momentum
        if self.method.family == "auto":
            regression = self.task.kind == "regression"
            options |= {"steps": self.total, "regression": regression, "decay": False}
            options["gain"] = self.config.method_options.get("gain")
        return options

    def set_rate(self, optimizer: torch.optim.Optimizer) -> float:
        """Sets the learning rate of the next update."""
        rate = rate_at(self.config, self.done, self.total)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    @property
    def last_rate(self) -> float:
        """The learning rate of the last update."""
        inner = self.optimizer.inner if isinstance(self, PrivateSteps) else self.optimizer
        return inner.rate if isinstance(inner, Auto) else float(inner.param_groups[0]["lr"])

    def backward(self, *batch: Tensor, divisor: int = 1) -> None:
        """Backpropagates the loss summed over these records.

        A sum keeps each record's gradient bit-identical whatever the batch size.

        Args:
            batch: The arguments of ``loss``.
            divisor: Divides the loss.
        """
        loss = self.loss(*batch)
        (loss if divisor == 1 else loss / divisor).backward()
        if self.diagnostics is not None:
            rows = len(batch[0])
            self.diagnostics.losses.append(loss.item() / rows)
            self.diagnostics.sizes.append(rows)

    def loss(self, *batch: Tensor) -> Tensor:
        """The loss summed over these records, weighted by class and record if that was declared.

        Args:
            batch: Inputs, targets, and a weight for each record if there are weights.
        """
        x, y, *weight = batch
        outputs, y = self.model(x.to(self.device)), y.to(self.device)
        if self.weights is None and not weight:
            return self.task.loss(outputs, y, reduction="sum")
        losses = self.task.loss(outputs, y, reduction="none")
        if self.weights is not None:
            losses = losses * self.weights[y.long()]
        return (losses * weight[0].to(self.device) if weight else losses).sum()

    def agreed(self) -> int:
        """The request of this process, or, with several ranks, the one they agreed on."""
        return self.wish()

    def moved(self, clip: float | None = None) -> None:
        """Counts an update, and notes its C."""
        self.done += 1
        if clip is not None:
            self.clips.append(clip)
        if self.average is not None:
            self.average.update()

    def extra(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint contains besides weights and optimizer."""
        average = None if self.average is None else self.average.state_dict()
        return {
            "average": average,
            "trainer": trainer,
            "clips": torch.tensor(self.clips, dtype=torch.float64),
        }

    def take(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Takes over ``extra`` from a checkpoint; returns the trainer's part."""
        if self.average is not None:
            self.average.load_state_dict(extra["average"])
        self.clips = extra["clips"].tolist()
        return dict(extra["trainer"])


def _augmentation(config: Config, dataset: Dataset) -> Shift | None:
    if config.views == 1:
        return None
    if dataset.train.x.ndim != 4:
        raise ConfigError(
            "`views` are augmented pictures, and this network gets no pictures: use --features none"
            " and a network (--model cnn), or leave `views` out"
        )
    return Shift()


class PrivateSteps(_Steps):
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
            method = _noting(method, self.diagnostics)
        self.engine = PrivacyEngine(accountant=config.accountant, seed=config.seed)
        loader = DataLoader(TensorDataset(*self.tensors(dataset)), batch_size=config.batch_size)
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
                physical_batch_size=config.physical_batch_size,
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
        """See ``_Steps.agreed``."""
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


class PlainSteps(_Steps):
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
