"""The collator of a PrivateTrainer, and whether its padding matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..randomness._forward import set_users_streams, users_streams
from .language import padding_is_inert

_TRIED = 16  # records on which padding is tried


class AsDict:
    """A collator whose batches are plain dicts, so that a row of zeros can be made in their shape.

    ``inert_padding`` tells the loader that batches may be padded to their longest record.
    """

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.inert_padding = False

    def __call__(self, rows: Any) -> dict[str, Any]:
        return dict(self.collate(rows))


def check_unpacked(loader: DataLoader) -> None:
    """Refuses a collator that packs the records of a batch into one row.

    Raises:
        ValueError: Two records come back as one row.
    """
    data: Any = loader.dataset
    try:
        batch = loader.collate_fn([data[0], data[len(data) - 1]])
        ids = batch["input_ids"]
    except Exception:  # an error in the data is reported when they are trained
        return
    if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[0] == 1:
        raise ValueError(
            "the data collator packs the records of a batch into one row, where their gradients"
            " can't be separated: use a collator that pads, or pack the data set itself beforehand."
            " A packed row is then one record, so ε protects a row: a text that is cut"
            " over k rows counts as a group of k"
        )


def try_padding(
    model: nn.Module,
    loader: DataLoader,
    loss_of: Callable[[nn.Module, Any], Tensor],
    device: torch.device,
    short: bool,
) -> bool:
    """Whether batches may have different lengths: tries whether padding matters to any loss.

    Args:
        model: The model.
        loader: Gives the records and the collator.
        loss_of: The mean loss of a batch.
        device: Where the model is.
        short: Whether it is computed in half precision.
    """
    data: Any = loader.dataset
    last = len(data) - 1
    parameters = [p for p in model.parameters() if p.requires_grad]
    exact = not short and all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    modes = [(part, part.training) for part in model.modules()]
    streams = users_streams(device)
    model.eval()
    try:
        chosen = sorted({round(k * last / (_TRIED - 1)) for k in range(_TRIED)})
        batch = loader.collate_fn([data[i] for i in chosen])
        tolerance = 1e-3 if exact else 5e-2
        return padding_is_inert(parameters, lambda rows: loss_of(model, rows), batch, tolerance)
    except Exception:  # an error in model or data is reported when they are trained
        return False
    finally:
        set_users_streams(streams, device)
        for part, mode in modes:
            part.training = mode
