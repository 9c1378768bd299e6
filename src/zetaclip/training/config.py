"""The settings of a run: one flat, frozen table, from flags, a file, or code.

Each field has its own help text, and the command line is made from this class. So a name, its
meaning and its default are in one place. ``None`` means "choose for me"; ``resolve`` (in
``recipe.py``) fills it in once the data are known.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .known import METHODS


class ConfigError(ValueError):
    """A setting that can't be used; the message says which one and what to do."""


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
        "options of the features (patches: mirror, whether mirror images mean the same; bins:"
        " knots, crosses, share)",
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
        "largest number of records in memory at once; results don't change (default: the logical"
        " batch)",
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
        _check_types(self)
        if not self.method:
            object.__setattr__(self, "method", default_method(self.recipe))
        _check_values(self)

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


_TABLES = ("data_options", "features_options", "method_options", "spectral")
_CHOICES = {
    f.name: f.metadata["choices"] for f in dataclasses.fields(Config) if "choices" in f.metadata
}
_POSITIVE = (
    "skew", "skew_size", "num_examples", "minutes", "epochs", "steps", "batch_size",
    "physical_batch_size", "lr", "clip", "epsilon", "max_epsilon", "threads", "eval_every",
    "rows_per_unit", "views",
)  # fmt: skip


def _check_types(config: Config) -> None:
    for f in dataclasses.fields(config):
        value, kind = getattr(config, f.name), f.metadata.get("kind", str)
        if f.name in _TABLES:
            if not isinstance(value, dict):
                raise ConfigError(f"{f.name} is a table (key = value), not {value!r}")
        elif f.name == "clipping":
            object.__setattr__(config, "clipping", _clipping(value))
        elif f.name == "class_weight":
            object.__setattr__(config, "class_weight", _class_weight(value))
        elif value is None:
            if f.default is not None:
                raise ConfigError(f"`{f.name}` needs a value")
        elif kind is float and _is_number(value):
            object.__setattr__(config, f.name, float(value))
        elif (
            kind is int
            and _is_number(value)
            and (isinstance(value, numbers.Integral) or float(value).is_integer())
        ):
            object.__setattr__(config, f.name, int(value))
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"`{f.name}` takes {_kind_name(kind)}, not {value!r}")


def _is_number(value: Any) -> bool:
    """Also true for numpy's numbers, e.g. from a grid search."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _kind_name(kind: type) -> str:
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[kind]


def _clipping(value: Any) -> Any:
    if isinstance(value, str) and value != "spectral":
        try:
            value = float(value)
        except ValueError:
            raise ConfigError(f"`clipping` is 'spectral' or a number, not {value!r}") from None
    if isinstance(value, bool) or not (
        value is None or isinstance(value, (str, int, float, Mapping))
    ):
        raise ConfigError(
            f"`clipping` is 'spectral', a number or a table with a kind, not {value!r}"
        )
    return (
        dict(value)
        if isinstance(value, Mapping)
        else float(value)
        if isinstance(value, int)
        else value
    )


def _class_weight(value: Any) -> dict[str, float] | None:
    """Weights by label, from a table or from "LABEL=WEIGHT,..."."""
    if value is None:
        return None
    if isinstance(value, str):
        if "=" not in value:
            raise ConfigError(
                f"class_weight is LABEL=WEIGHT,..., not {value!r}. Weights computed from the data,"
                " like 'balanced', reveal how many records each class has, which ε does not cover:"
                " declare weights from public knowledge"
            )
        value = dict(part.rsplit("=", 1) for part in value.split(",") if "=" in part)
    try:
        found = {str(label).strip(): float(weight) for label, weight in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(f"class_weight is a table of numbers by label, not {value!r}") from None
    if not found or not all(math.isfinite(weight) and weight >= 0 for weight in found.values()):
        raise ConfigError("class_weight takes finite weights of at least 0")
    return found


def _check_values(config: Config) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        if value is not None and value not in choices:
            raise ConfigError(f"`{name}` is one of {', '.join(choices)}, not {value!r}")
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"`{name}` must be positive, not {value:g}")
    if config.image_size is not None and "size" in config.data_options:
        raise ConfigError("give image_size or data_options.size, not both")
    if config.epochs is not None and config.steps is not None:
        raise ConfigError("give `epochs` or `steps`, not both")
    if config.epsilon is not None and config.sigma is not None:
        raise ConfigError("give `epsilon` (which determines σ) or `sigma`, not both")
    if config.sigma is not None and not (math.isfinite(config.sigma) and config.sigma >= 0):
        raise ConfigError(f"`sigma` must be at least 0, not {config.sigma:g}")
    if config.delta is not None and not 0 < config.delta < 1:
        raise ConfigError(f"`delta` must be between 0 and 1, not {config.delta:g}")
    if not 0 <= config.validation < 1:
        raise ConfigError(
            "`validation` is a share of the training records, at least 0 and below 1, not"
            f" {config.validation:g}"
        )
    if config.weight_average is not None and not 0 < config.weight_average < 1:
        raise ConfigError(
            f"weight_average is a decay between 0 and 1, not {config.weight_average:g}"
        )
    if isinstance(config.clipping, float) and config.clip is not None:
        raise ConfigError("a number for `clipping` is the clipping norm itself: leave `clip` out")


def read_file(path: str | Path) -> dict[str, Any]:
    """The settings of a .toml or .json file.

    Raises:
        ConfigError: The file can't be read or is not valid.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    try:
        values = json.loads(text) if path.suffix == ".json" else parse_toml(text)
    except ValueError as error:
        raise ConfigError(
            f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must contain a table of settings")
    return values


def parse_toml(text: str) -> dict[str, Any]:
    """The content of a TOML text."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    return tomllib.loads(text)


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """The values of ``--set key=value``.

    A key may be dotted. A value is TOML, or else plain text.

    Raises:
        ConfigError: A word is not key=value, or uses a value as a table.
    """
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set takes key=value, not {word!r}")
        try:
            value = parse_toml(f"value = {text}")["value"]
        except ValueError:
            value = text
        *tables, last = [part.replace("-", "_") for part in key.strip().split(".")]
        place = values
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {word}: {table} is a value already, not a table")
        place[last] = value
    return values


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers override earlier ones; tables are joined key by key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            name = key.replace("-", "_")
            old = merged.get(name)
            merged[name] = (
                {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
            )
    return merged
