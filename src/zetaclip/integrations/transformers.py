"""Privacy for transformers: ``PrivateTrainer``, a ``Trainer`` with one more argument.

    from zetaclip.integrations.transformers import Privacy, PrivateTrainer
    privacy = Privacy(target_epsilon=8.0, target_delta=1e-5, clipping=1.0)
    PrivateTrainer(model, args, train_dataset=rows, privacy=privacy).train()

One record is one row of the data set. A step of the trainer is one update: ``training_step`` runs
all chunks and passes of a logical batch. So steps, epochs and schedulers count updates.
"""

from __future__ import annotations

import copy
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

try:
    from transformers import Trainer
    from transformers.trainer_utils import TrainOutput
except ImportError as problem:
    raise ImportError(
        "zetaclip.integrations.transformers needs transformers: pip install"
        " 'zetaclip[transformers]'"
    ) from problem

from ..engine import PrivacyEngine, PrivateOptimizer
from ._transformers_args import check_arguments, check_loss_dtype
from ._transformers_counts import Epochs, First, Length, Taken
from ._transformers_files import load_engine, save_engine
from ._transformers_padding import AsDict, check_unpacked, try_padding
from .language import record_loss, register_rules
from .terms import EpsilonEstimate, Terms, Updates, released_before

__all__ = ["Privacy", "PrivateTrainer", "record_loss"]

# The trainer's metrics that reveal private batches: mean losses, token counts, numbers of records.
_HIDDEN = ("train_loss", "total_flos", "train_samples_per_second")
_LOG = logging.getLogger("zetaclip")
_MEAN_OVER_ROWS = "Let compute_loss return the mean over the rows, with each row's loss alone"


@dataclass(frozen=True, kw_only=True)
class Privacy(Terms):
    """The terms of a ``PrivateTrainer``.

    Args:
        non_private_diagnostics: Whether to log losses, which ε does not cover.

    The other arguments are those of ``Terms``.
    """

    non_private_diagnostics: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_reduction != "mean":
            raise ValueError(
                "PrivateTrainer computes the loss itself, as a mean over records: leave"
                " loss_reduction out"
            )


class PrivateTrainer(Trainer):
    """``Trainer`` whose training is private by the terms of ``privacy``.

    ``engine`` is the ``PrivacyEngine`` of the last ``train()``, with ``engine.ledger`` and
    ``engine.get_epsilon(delta)``.

    Args:
        model: As for ``Trainer``.
        args: As for ``Trainer``. ``max_grad_norm`` is set to 0, because it would clip the noisy
            mean.
        *rest: As for ``Trainer``.
        privacy: The privacy terms.
        **named: As for ``Trainer``.

    Raises:
        TypeError: ``privacy`` is not a ``Privacy``.
        ValueError: A setting would train without the mechanism; the message says what to do.

    **Guarantee.** As ``PrivacyEngine``, with one row of the training data set as the record. Frozen
    parameters (with LoRA, all but the adapters) are neither clipped, noised nor counted. The loss
    is ``record_loss``; to use another one, override ``compute_loss``, as a mean over rows. Training
    losses, gradient norms and counts of operations are not logged unless
    ``non_private_diagnostics``, and then the ledger's header says so.

    **Edge cases.** A second ``train()`` continues the same ledger. Checkpoints contain the engine's
    state. The secret streams are beside them in ``checkpoint-N.private``, which is not uploaded.
    With that file, resuming repeats a run bit for bit; without it, training continues with new
    noise and warns. Evaluation on private rows is not covered.
    """

    def __init__(
        self, model: Any = None, args: Any = None, *rest: Any, privacy: Privacy, **named: Any
    ) -> None:
        if not isinstance(privacy, Privacy):
            raise TypeError(
                "privacy must be a zetaclip.integrations.transformers.Privacy, not"
                f" {type(privacy).__name__}"
            )
        self.privacy = privacy
        self.engine: PrivacyEngine | None = None
        self._updates: Updates | None = None
        self._private: PrivateOptimizer | None = None
        self._estimate: EpsilonEstimate | None = None
        if args is not None:
            check_arguments(args, privacy.non_private_diagnostics)
            if args.max_grad_norm:
                _LOG.warning(
                    "max_grad_norm=%g is ignored: it would clip the noisy mean; privacy= sets how"
                    " each record's gradient is clipped",
                    args.max_grad_norm,
                )
            args = copy.copy(args)
            args.max_grad_norm = 0.0
            if args.gradient_checkpointing:
                more = args.gradient_checkpointing_kwargs or {}
                args.gradient_checkpointing_kwargs = {**more, "use_reentrant": False}
        super().__init__(model, args, *rest, **named)
        if args is None:
            self.args.max_grad_norm = 0.0
        if self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func sees a whole batch, and could mix its records. Override"
                " compute_loss in a subclass of PrivateTrainer instead: it returns the mean over"
                " rows of each row's own loss"
            )
        self.add_callback(Epochs(self))

    # -- before training

    def get_train_dataloader(self) -> DataLoader:
        """An ordinary loader over the training rows; the engine draws from its data set."""
        own = super().get_train_dataloader()
        return DataLoader(
            own.dataset,
            batch_size=self._train_batch_size,
            collate_fn=AsDict(own.collate_fn),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            worker_init_fn=own.worker_init_fn,
        )

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As the Trainer's, with the number of private updates in an epoch."""
        return super().set_initial_training_values(
            args, Length(dataloader, self.privacy.steps_per_epoch(dataloader))
        )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: Any
    ) -> Any:
        earlier = released_before(self.engine)
        if isinstance(getattr(self.optimizer, "optimizer", None), Taken):
            self.optimizer.optimizer = self.optimizer.optimizer.inner
        model, _ = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        if model is not self.model:
            raise ValueError(
                f"the model was wrapped into {type(model).__name__}, which can't be trained"
                " privately: use one device"
            )
        register_rules(model)
        check_unpacked(train_dataloader)
        if isinstance(train_dataloader.collate_fn, AsDict):
            train_dataloader.collate_fn.inert_padding = try_padding(
                model, train_dataloader, self._loss_of, self.args.device, self.args.bf16
            )
        self.engine, self._private, loader = self.privacy.make_private(
            model,
            self.optimizer.optimizer,
            train_dataloader,
            max_steps,
            earlier,
            loss_reduction="sum",
        )
        self.engine.hooks.check_losses_by_hand("mean", _MEAN_OVER_ROWS)
        self.engine.hooks.rehearse(loader, self._loss_of, "mean")
        self._updates = Updates(loader, self.engine)
        if resume_from_checkpoint is not None:
            load_engine(self.engine.hooks, self._updates, Path(resume_from_checkpoint))
        if self.privacy.non_private_diagnostics:
            self.engine.hooks.note("not covered: training losses and gradient norms are logged")
        self._updates.limit = self.privacy.allowed(self.engine, max_steps)
        self._estimate = EpsilonEstimate(
            self.engine, self.privacy.target_delta, self._updates.limit
        )
        # The trainer's scheduler keeps the outer optimizer, so the inner one is replaced.
        self.optimizer.optimizer = Taken(self._private)
        return model, self._updates

    def _loss_of(self, model: nn.Module, rows: Any) -> Tensor:
        loss: Tensor = self.compute_loss(model, self._prepare_inputs(rows))
        return loss

    # -- training

    def train(self, *rest: Any, **named: Any) -> TrainOutput:
        """As the Trainer's.

        If training fails, the engine is detached from the model, and what was spent stays counted.
        """
        try:
            return super().train(*rest, **named)
        except BaseException:
            if self.engine is not None:
                self.engine.detach()
            raise

    def hyperparameter_search(self, *rest: Any, **named: Any) -> Any:
        """As the Trainer's; every trial spends its own ε.

        Raises:
            ValueError: ``push_to_hub`` would upload the secret streams.
        """
        if self.args.push_to_hub:
            raise ValueError(
                "push_to_hub in a search uploads the trials' folders with checkpoint-N.private,"
                " which contains the keys of the noise: search without it, and push the model that"
                " you keep"
            )
        return super().hyperparameter_search(*rest, **named)

    def _run_epoch(self, **named: Any) -> None:
        first = (
            named["epoch"] == named["epochs_trained"]
            and named["resume_from_checkpoint"] is not None
        )
        skipped = named["steps_trained_in_current_epoch"]
        if first and skipped and not self.args.ignore_data_skip:
            # The engine continues inside the epoch by itself and does not draw old batches again.
            self._load_rng_state(named["resume_from_checkpoint"])
            rest = named["num_update_steps_per_epoch"] - skipped
            named |= {
                "train_dataloader": First(named["train_dataloader"], rest),
                "resume_from_checkpoint": None,
            }
        super()._run_epoch(**named)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """One update: forward, backward and step for every chunk and pass of a logical batch.

        Args:
            model: The model.
            inputs: The first chunk.
            num_items_in_batch: Ignored.

        Returns:
            The mean loss; 0 unless ``non_private_diagnostics``.
        """
        updates, private, engine = self._updates, self._private, self.engine
        assert updates is not None and private is not None and engine is not None
        model.train()
        total, chunks = torch.zeros((), device=self.args.device), 0
        for chunk in itertools.chain([inputs], updates.rest()):
            private.zero_grad()
            prepared = self._prepare_inputs(chunk)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, prepared)
            check_loss_dtype(loss, self.privacy.physical_batch_size)
            engine.hooks.check_loss(loss)
            # Times the rows, so that no gradient is divided before it is rounded to half precision.
            (loss * engine.hooks.rows).backward()
            private.step()
            total, chunks = total + loss.detach(), chunks + 1
        if updates.limit is not None and engine.updates >= updates.limit:
            _LOG.warning(
                "stopped after %d updates: the next one would exceed max_epsilon", engine.updates
            )
            self.control.should_training_stop = True
        return total / chunks if self.privacy.non_private_diagnostics else torch.zeros_like(total)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean over rows of each row's own loss, in training and in evaluation.

        Args:
            model: The model.
            inputs: The batch.
            return_outputs: Whether to return the model's outputs as well.
            num_items_in_batch: Ignored.
        """
        smoothing = self.args.label_smoothing_factor if model.training else 0.0
        return record_loss(model, dict(inputs), smoothing, outputs=return_outputs)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # By now .grad is the released, noisy gradient.
        return (
            super()._get_grad_norm(model, grad_norm)
            if self.privacy.non_private_diagnostics
            else None
        )

    def floating_point_ops(self, inputs: Any) -> int:
        """0 unless ``non_private_diagnostics``: the count depends on the private batch size."""
        return (
            int(super().floating_point_ops(inputs)) if self.privacy.non_private_diagnostics else 0
        )

    def log(self, logs: dict[str, float], *rest: Any, **named: Any) -> None:
        """Logs ε and C, and drops what ε does not cover."""
        logs = dict(logs)
        if not self.privacy.non_private_diagnostics:
            for name in ("loss", "grad_norm", *_HIDDEN):
                logs.pop(name, None)
        if self.is_in_train and self._private is not None and self._estimate is not None:
            epsilon = self._estimate.epsilon()
            logs |= {"clip": self._private.clip} | ({} if epsilon is None else {"epsilon": epsilon})
        super().log(logs, *rest, **named)

    def _finalize_training(self, *rest: Any, **named: Any) -> TrainOutput:
        if self._estimate is not None:
            self._estimate.epsilon(exact=True)
        output = super()._finalize_training(*rest, **named)
        assert self.engine is not None
        self.engine.detach()
        if self.privacy.non_private_diagnostics:
            return output
        metrics = {name: value for name, value in output.metrics.items() if name not in _HIDDEN}
        return TrainOutput(output.global_step, float("nan"), metrics)

    # -- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        root = Path(self._get_output_dir(trial=trial))
        folder = root / f"checkpoint-{self.state.global_step}"
        if not self.args.save_only_model:
            assert self.engine is not None
            save_engine(self.engine.hooks, folder)
        super()._save_checkpoint(model, trial)
        for hidden in root.glob("checkpoint-*.private"):
            if not hidden.with_suffix("").exists():
                # The trainer has removed the checkpoint, but does not know of its secrets.
                hidden.unlink()
