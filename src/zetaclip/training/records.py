"""The records of a run: loaded, skewed, split, and how many there are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .config import Config

if TYPE_CHECKING:
    from ..data import Dataset


_VALIDATION_SEED = 20240


def load_data(config: Config, data: Any = None) -> Dataset:
    """The data set of a run: loaded, skewed, and with a validation part if one was asked for.

    Args:
        config: The settings.
        data: A ``Dataset``, or a table in memory, instead of what ``config.data`` names.
    """
    from ..data import Dataset, dirichlet_skew, load

    if isinstance(data, Dataset):
        dataset = data
    else:
        source = config.data if data is None else data
        dataset = load(source, root=config.data_root, **config.data_arguments())
    if config.skew is not None:
        if dataset.owners is not None:
            raise ConfigError("`skew` is for rows, not for units of several rows; leave one out")
        dataset = dirichlet_skew(dataset, config.skew, config.skew_seed, size=config.skew_size)
    if config.validation:
        dataset = _with_validation(dataset, config.validation)
    return dataset


def _with_validation(dataset: Dataset, share: float) -> Dataset:
    """Replaces the test set by a fixed random part of the training records.

    For a public set, a permutation of the positions is enough. In private data, each record is held
    out independently of the others, so that one more record does not move them (see
    ``data.holdout``); how many are left is then not public.
    """
    import torch

    from ..data import Split
    from ..data.holdout import held_out, held_out_owners

    x, y = dataset.train.x, dataset.train.y
    if dataset.public:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(_VALIDATION_SEED))
        count = round(share * len(y))
        held, kept = order[:count], order[count:].sort().values
        note = f"evaluated on {count} held-out training records, not on the test set"
    else:
        where = (share, _VALIDATION_SEED, "validation")
        chosen = torch.from_numpy(
            held_out(x.numpy(), y.numpy(), *where)
            if dataset.owners is None
            else held_out_owners(dataset.owners.numpy(), *where)
        )
        held, kept = (rows.nonzero()[:, 0] for rows in (chosen, ~chosen))
        note = (
            f"evaluated on about a share of {share:g} of the training records, not on the test set"
        )
    if not (len(held) and len(kept)):
        raise ConfigError(
            f"`validation` = {share:g} of {len(y)} training records leaves one part empty"
        )
    return dataclasses.replace(
        dataset,
        train=Split(x[kept], y[kept]),
        test=Split(x[held], y[held]),
        nominal_size=len(kept) if dataset.public else None,
        owners=None if dataset.owners is None else dataset.owners[kept],
        notes=(*dataset.notes, note),
    )


def nominal_size(config: Config, dataset: Dataset) -> tuple[int, bool]:
    """The public N, and whether it was declared rather than counted in the private data."""
    if config.num_examples is not None:
        return config.num_examples, True
    if dataset.nominal_size is not None:
        return dataset.nominal_size, True
    if dataset.owners is not None:
        return len(dataset.owners.unique()), False
    return len(dataset.train.y), False


def class_weights(config: Config, dataset: Dataset) -> list[float] | None:
    """The weight of each class in the order of the network's outputs; None if none was declared.

    Raises:
        ConfigError: A label is unknown, or the task has no classes.
    """
    if config.class_weight is None:
        return None
    if dataset.task == "regression":
        raise ConfigError("class_weight is for classes, but the target is a number; leave it out")
    count = 2 if dataset.task == "binary" else dataset.outputs
    names = list(dataset.classes) or [str(number) for number in range(count)]
    for label in config.class_weight:
        if label not in names:
            raise ConfigError(
                f"class_weight names {label!r}, which is no class; there are:"
                f" {', '.join(names[:20])}"
            )
    return [config.class_weight.get(name, 1.0) for name in names]
