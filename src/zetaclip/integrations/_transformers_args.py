"""What a PrivateTrainer refuses: settings of the Trainer, and losses in half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_EXACT_ROWS = 256  # bfloat16 represents whole numbers exactly up to here


def check_loss_dtype(loss: Tensor, rows: int | None) -> None:
    """Refuses rounding that depends on the number of records: the ledger does not cover it.

    Args:
        loss: The mean over the rows of a chunk.
        rows: The most rows that a chunk can have; None for any number.

    Raises:
        ValueError: The loss is in half precision, and there may be too many rows for it.
    """
    if loss.dtype in (torch.bfloat16, torch.float16) and (rows is None or rows > _EXACT_ROWS):
        raise ValueError(
            f"the model computes its loss in {loss.dtype}, in which a mean over more than"
            f" {_EXACT_ROWS} rows rounds each record's gradient by their number: use"
            f" Privacy(physical_batch_size={_EXACT_ROWS}) or less, a float32 model with"
            " bf16=True, or override compute_loss so that it returns float32"
        )


def check_arguments(args: Any, diagnostics: bool) -> None:
    """Refuses settings that would bypass the mechanism or reveal what it hides.

    Args:
        args: The trainer's arguments.
        diagnostics: Whether values that ε does not cover may be logged.

    Raises:
        ValueError: The message says what to do instead.
    """
    counted = getattr(args, "include_num_input_tokens_seen", "no")
    if counted not in (False, "no") and not diagnostics:
        raise ValueError(
            f"include_num_input_tokens_seen={counted!r} counts the tokens of batches whose size is"
            " private: leave it out, or give Privacy(non_private_diagnostics=True)"
        )
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} would put several"
            " logical batches into one step: set per_device_train_batch_size to the total batch"
            " size, and limit memory with Privacy(physical_batch_size=...)"
        )
    strategy = getattr(args, "train_sampling_strategy", "random")
    if str(getattr(strategy, "value", strategy)) != "random":
        raise ValueError(
            f"train_sampling_strategy={strategy!r} is not what the accountant assumes: leave it at"
            " 'random'; batches are Poisson samples"
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size changes the sampling rate in the middle of a run: leave it out,"
            " and limit memory with Privacy(physical_batch_size=...)"
        )
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get(
        "use_reentrant", False
    ):
        raise ValueError(
            "reentrant gradient checkpointing hides the graph in which the loss is checked: use"
            " gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    if args.fp16:
        raise ValueError(
            "fp16 scales the loss and skips steps depending on the data: use bf16=True or 32-bit"
        )
    if args.n_gpu > 1:
        raise ValueError(
            "DataParallel splits a batch over replicas: make one GPU visible (CUDA_VISIBLE_DEVICES)"
        )
    for name, what in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP")):
        if getattr(args, name, None):
            raise ValueError(
                f"{what} shards or sums raw gradients: train on one device, without {name}="
            )
    if args.world_size > 1:
        raise ValueError(
            "the Trainer wraps the model for several processes and sums raw gradients: train in one"
            " process, or write the loop yourself and start it with torchrun; the engine adds up"
            " clipped gradients over processes (docs/guides/distributed.md), and record_loss is the"
            " loss that you need"
        )
    if args.torch_compile:
        raise ValueError(
            "torch_compile hides per-example gradients: leave it out; compile a copy for inference"
        )
