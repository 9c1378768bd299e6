"""The settings of a run: one flat, frozen table, from flags, a file, or code.

Each field has its own help text, and the command line is made from this class. So a name, its
meaning and its default are in one place. ``None`` means "choose for me"; ``resolve`` (in
``recipe.py``) fills it in once the data are known.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from .checks import check_types, check_values
from .known import METHODS


def _option(default: Any, help: str, **more: Any) -> Any:
    metadata = {"help": help, **more}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """The settings of one run; equal settings, data and seed give equal runs.

    The fields and their meanings are listed by ``zetaclip train --help``.

    Raises:
        ConfigError: A value has the wrong type or is out of range.

    Examples:
        >>> Config(data="mnist", epsilon=1.0, epochs=8).epsilon
        1.0
    """

    # -- data and model
    data: str = _option(
        "digits",
        "a data set by name, a .csv or .parquet file, or a folder of images by class",
        kind=str,
    )
    data_root: str | None = _option(
        None, "where the data sets are (default: $ZETACLIP_DATA)", kind=str
    )
    data_options: dict[str, Any] = _option({}, "more arguments of the data set's loader")
    target: str | None = _option(None, "your own data: the column to predict", kind=str)
    task: str | None = _option(
        None,
        "your own data: the kind of target",
        kind=str,
        choices=("classification", "binary", "regression"),
    )
    schema: str | None = _option(
        None, "your own data: a file that declares columns, bounds and classes", kind=str
    )
    image_size: int | None = _option(
        None,
        "a folder of images: their side in pixels; they are scaled and cut to a square"
        " (default: 64)",
        kind=int,
    )
    text: str | None = _option(
        None,
        "your own data: a column of free text to predict from; without a schema no other column is"
        " used",
        kind=str,
    )
    class_weight: Any = _option(
        None,
        "public weights of classes in the loss, as LABEL=WEIGHT,...; other classes have weight 1",
        kind=str,
        metavar="LABEL=WEIGHT,...",
    )
    unit: str | None = _option(
        None,
        "your own tables: the column that says whose row it is; ε is for one of these with all"
        " its rows, and N and batch sizes count them (default: each row by itself)",
        kind=str,
    )
    rows_per_unit: int | None = _option(
        None,
        "largest number of rows that one unit brings into a batch (default: 10)",
        kind=int,
    )
    views: int = _option(
        1,
        "augmented copies of each picture (shifted; colour pictures mirrored, too) whose gradients"
        " are averaged before clipping; needs --features none",
        kind=int,
    )
    skew: float | None = _option(
        None, "label skew: Dirichlet alpha, smaller is more skewed", kind=float
    )
    skew_seed: int = _option(0, "seed of the skew", kind=int)
    skew_size: int | None = _option(
        None,
        "records left after the skew (default: as many as every alpha allows)",
        kind=int,
    )
    validation: float = _option(
        0.0,
        "share of the training records to hold out for evaluation, instead of the test set",
        kind=float,
    )
    num_examples: int | None = _option(
        None,
        "the public number of training records N (default: the set's published size)",
        kind=int,
    )
    model: str | None = _option(
        None,
        "a network by name, or package.module:callable (default: depends on the data set)",
        kind=str,
    )
    features: str = _option(
        "auto",
        "fixed features before the network, which is then a head on them: patches (from synthetic"
        " pictures alone), scattering, bins (tables), none; auto: patches for pictures and bins for"
        " tables, unless a model is named or the method reads spectra",
        kind=str,
        choices=("auto", "patches", "scattering", "bins", "none"),
    )
    features_options: dict[str, Any] = _option(
        {},
        "options of the features (patches: mirror, whether mirror images mean the same;"
        " scattering: length, of a row; bins: knots, crosses, share)",
    )
    # -- method and training
    method: str = _option(
        "",
        "a method by name (`zetaclip methods` lists them), or package.module:object (default: auto;"
        " with --recipe paper, ww-dp-sgd)",
        kind=str,
    )
    method_options: dict[str, Any] = _option({}, "options of the method")
    recipe: str = _option(
        "default",
        "default: decoupled step size, linear decay, the method's own learning rate; paper: the"
        " paper's constant, coupled learning rate and its controller as published (not for auto)",
        kind=str,
        choices=("default", "paper"),
    )
    minutes: float | None = _option(
        None,
        "about how long training may take; auto chooses batch and length by it, so that the run"
        " depends on the machine's speed",
        kind=float,
    )
    epochs: float | None = _option(
        None, "epochs to train (default: auto chooses by N and ε)", kind=float
    )
    steps: int | None = _option(None, "updates to train, instead of epochs", kind=int)
    batch_size: int | None = _option(
        None, "expected logical batch size L = qN (default: auto chooses by N and ε)", kind=int
    )
    physical_batch_size: int | None = _option(
        None,
        "largest number of records in memory at once; without views, results don't change (default:"
        " the logical batch, or less if a network on pictures would need much memory)",
        kind=int,
    )
    lr: float | None = _option(
        None,
        "learning rate (default: the method's); for auto a factor on the rate that it finds",
        kind=float,
    )
    schedule: str | None = _option(
        None,
        "schedule of the learning rate (default: linear, to zero; auto: late, as 1 - done²)",
        kind=str,
        choices=("linear", "late", "cosine", "constant"),
    )
    momentum: float | None = _option(None, "momentum of SGD (default: 0; auto: 0.9)", kind=float)
    weight_decay: float | None = _option(
        None,
        "weight decay of the optimizer (default: 0.01 for AdamW, else 0)",
        kind=float,
    )
    decouple: bool | None = _option(
        None, "divide the private gradient by C, so that C does not change the step size", kind=bool
    )
    weight_average: float | None = _option(
        None,
        "keep a moving average of the weights with this decay, and evaluate and save the average",
        kind=float,
    )
    # -- clipping
    clip: float | None = _option(
        None,
        "the clipping norm C; its start value if a controller sets it (default: 1; auto finds it, "
        "up to this)",
        kind=float,
    )
    clipping: Any = _option(
        None,
        "replaces the method's own clipping: 'spectral', or a number for a fixed norm",
        kind=str,
        metavar="KIND",
    )
    spectral: dict[str, Any] = _option(
        {}, "arguments of the spectral controller (gain, period, probe, ...)"
    )
    # -- privacy
    epsilon: float | None = _option(
        None, "target ε; determines σ (default: 3, unless --sigma is given)", kind=float
    )
    sigma: float | None = _option(
        None, "noise multiplier in DP-SGD's terms, instead of --epsilon", kind=float
    )
    delta: float | None = _option(None, "δ (default: the smaller of 1e-5 and N^-1.1)", kind=float)
    accountant: str = _option("pld", "how ε is computed", kind=str, choices=("pld", "prv", "rdp"))
    max_epsilon: float | None = _option(
        None, "stop before the step that would exceed this ε", kind=float
    )
    normalize: str = _option(
        "expected",
        "realized: divide by the actual batch size, as the paper does; claims no ε",
        kind=str,
        choices=("expected", "realized"),
    )
    empty: str = _option(
        "noise",
        "skip: skip empty batches, as the paper does; claims no ε",
        kind=str,
        choices=("noise", "skip"),
    )
    # -- machine and output
    seed: int | None = _option(
        None, "makes the run repeatable; anyone who knows the seed can remove the noise", kind=int
    )
    device: str = _option("cpu", "cpu, cuda, cuda:1, mps", kind=str)
    threads: int | None = _option(None, "threads of torch (default: torch's own choice)", kind=int)
    eval_every: int | None = _option(
        None, "epochs between two evaluations (default: 1; auto evaluates about 20 times)", kind=int
    )
    no_eval: bool = _option(
        False, "don't evaluate: ε does not cover metrics on held-out private data", kind=bool
    )
    non_private_diagnostics: bool = _option(
        False,
        "also write batch losses, batch sizes and clip fractions, which ε does not cover",
        kind=bool,
    )

    def __post_init__(self) -> None:
        check_types(self)
        if not self.method:
            object.__setattr__(self, "method", default_method(self.recipe))
        check_values(self)

    def data_arguments(self) -> dict[str, Any]:
        """The arguments of ``zetaclip.data.load`` beside the name, as far as they are set."""
        own = {
            "target": self.target,
            "task": self.task,
            "schema": self.schema,
            "text": self.text,
            "size": self.image_size,
            "unit": self.unit,
            "rows_per_unit": self.rows_per_unit,
        }
        return {
            **{name: value for name, value in own.items() if value is not None},
            **self.data_options,
        }

    def changed(self, **values: Any) -> Config:
        """A copy with other values."""
        return dataclasses.replace(self, **values)

    def to_json(self) -> str:
        """The content of config.json."""
        return (
            json.dumps(
                {"zetaclip_run": 1, **dataclasses.asdict(self)}, indent=2, ensure_ascii=False
            )
            + "\n"
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "the configuration") -> Config:
        """A config from plain values.

        Args:
            values: The settings by name; "-" in a name counts as "_".
            source: Where they come from, for error messages.

        Raises:
            ConfigError: A setting is unknown (the message names similar ones) or wrong.
        """
        values = {
            key.replace("-", "_"): value for key, value in values.items() if key != "zetaclip_run"
        }
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = (
                    difflib.get_close_matches(key, known, 3, 0.85)  # a slip
                    or _of_method(values, key)
                    or difflib.get_close_matches(key, known, 3)
                )
                hint = (
                    f"did you mean {' or '.join(near)}?"
                    if near
                    else f"there are: {', '.join(known)}"
                )
                raise ConfigError(f"{source}: unknown setting {key!r}; {hint}")
        return cls(**values)


def default_method(recipe: str) -> str:
    """The method of a run that names none."""
    return "ww-dp-sgd" if recipe == "paper" else "auto"


def _of_method(values: Mapping[str, Any], key: str) -> list[str]:
    """The full name of a setting that is an option of the chosen method."""
    name = values.get("method") or default_method(values.get("recipe", Config.recipe))
    return [f"method_options.{key}"] if key in METHODS.get(name, ()) else []
