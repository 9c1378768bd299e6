"""``load_run``: a run folder as an object that answers."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data import inputs
from ..errors import AccountingError, InputError
from ..training import card, description
from ..training.evaluate import Task
from ..training.folder import RunFolder
from ..training.weights import load_weights
from ._rows import prepared

if TYPE_CHECKING:
    from torch import Tensor, nn

_ROWS = 1024  # records at a time


class Run:
    """A trained model with all that it needs to answer.

    ``load_run`` makes it.

    Attributes:
        path: The run folder.
        model: The network, in eval mode, after the frozen features if there are any. It takes
            prepared records, see ``prepare``.
        task: "classification", "binary" or "regression".
        classes: Names of the classes, in the order of ``predict_proba``; empty for a regression.
        epsilon: ε of these weights; None if none is claimed.
        delta: δ of these weights.
        finished: Whether the training came to its end.
        steps: The updates that were taken.
        target_range: Range of a regression's target; None for classes.
        schema: How raw records are prepared. For a table it is what a schema file holds, and
            ``zetaclip.data.load`` takes it; None if it is private and not here.
        result: The content of result.json; empty if the run is not finished.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.path
        self._about = description.read(folder)
        self._hides = "private" in self._about
        network = description.build_network(self._about)
        facts = load_weights(network, folder)
        features = description.build_features(self._about.get("features"))
        self.model = _joined(features, network)
        self.task: str = self._about["task"]
        self.finished = folder.finished
        self.result: dict[str, Any] = {}
        if self.finished:
            self.result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.delta: float | None = config["delta"]
        self.steps: int = self.result.get("steps", facts.get("steps", 0))
        self.epsilon: float | None = (
            self.result["epsilon"] if self.finished else _spent(facts, config)
        )
        target = self._about.get("target")
        self.classes: tuple[str, ...] = tuple(target["classes"]) if target else ()
        self.target_range: tuple[float, float] | None = (
            tuple(target["range"]) if target and target["range"] else None
        )
        self.schema = _schema(self._about)
        self._card = folder / card.NAME

    def __repr__(self) -> str:
        spent = (
            "no ε is claimed"
            if self.epsilon is None
            else f"ε = {self.epsilon:.3g}, δ = {self.delta:.3g}"
        )
        state = "" if self.finished else f", interrupted after {self.steps} updates"
        name = self._about["network"]["name"]
        return f"Run({str(self.path)!r}: {self.task}, {name}, {spent}{state})"

    @property
    def card(self) -> str:
        """The text of MODEL_CARD.md.

        Raises:
            InputError: The run has none, because it was killed before it could write one.
        """
        try:
            return self._card.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InputError(
                f"{self.path} has no {card.NAME}: the run was killed. Resume it, and stop it with"
                " Ctrl-C or let it end"
            ) from None

    @property
    def description(self) -> dict[str, Any]:
        """The content of model.json, without what is private."""
        return {
            k: v for k, v in self._about.items() if not self._hides or k not in ("input", "target")
        }

    def made_up(self, count: int) -> Tensor:
        """Made-up records, prepared: numbers between -1 and 1, always the same ones."""
        import torch

        shape = self._about["network"]["arguments"]["input_shape"]
        if self._about["features"] is not None:  # the network's inputs are outputs of the features
            shape = self._input().shape
        generator = torch.Generator().manual_seed(0)
        return torch.rand(count, *shape, generator=generator) * 2 - 1

    def prepare(self, rows: Any) -> Tensor:
        """Raw records as the tensor that ``model`` takes. ``rows`` are as in ``predict``."""
        return self._prepared(rows)[0]

    def predict(self, rows: Any) -> np.ndarray:
        """The most likely class of each record, or the target of a regression within its range.

        Args:
            rows: New records. For a table: a file (.csv, .csv.gz, .tsv, .parquet), a DataFrame, a
                mapping of columns, a list of rows as mappings, or an array with the columns of the
                schema in their order. For pictures: a folder, a file, a list of files, or an array
                of pixels. A torch tensor is taken as prepared already. The target is not needed,
                and other columns are not used.

        Returns:
            Names of classes, or numbers.

        Raises:
            InputError: The records don't fit; the message names the column.
        """
        return self.answers(rows)["prediction"]

    def predict_proba(self, rows: Any) -> np.ndarray:
        """The probability of each class, one row per record, in the order of ``classes``.

        Args:
            rows: See ``predict``.

        Raises:
            InputError: The records don't fit, or the task is a regression.
        """
        self._check_classes()
        return _probabilities(self.task, self._outputs(self._prepared(rows)[0]))

    def answers(
        self, rows: Any, proba: bool = False, broken: dict[Path, str] | None = None
    ) -> dict[str, np.ndarray]:
        """What ``zetaclip predict`` writes, by column.

        Args:
            rows: See ``predict``.
            proba: Also the probability of each class.
            broken: Gets the picture files that can't be read, with the reason; they are left out.
                None makes such a file an error.

        Returns:
            ``prediction``; before it ``file``, if picture files were given; after it a column for
            each class.
        """
        if proba:
            self._check_classes()
        x, files = self._prepared(rows, broken)
        outputs = self._outputs(x)
        found: dict[str, np.ndarray] = {} if files is None else {"file": np.array(files)}
        if self.task == "regression":
            low, high = self.target_range or (-1.0, 1.0)
            task = Task("regression", "rmse", (low + high) / 2, (high - low) / 2)
            values = outputs.squeeze(1).double() * task.half + task.middle
            return {**found, "prediction": values.clamp(low, high).numpy()}
        shares = _probabilities(self.task, outputs)
        names = self.classes or tuple(str(i) for i in range(shares.shape[1]))
        found["prediction"] = np.array(names)[shares.argmax(axis=1)]
        if proba:
            for i, name in enumerate(names):
                found[f"{name} (class)" if name in found else name] = shares[:, i]
        return found

    def _check_classes(self) -> None:
        if self.task == "regression":
            raise InputError("the run predicts a number, so there are no probabilities of classes")

    def _prepared(
        self, rows: Any, broken: dict[Path, str] | None = None
    ) -> tuple[Tensor, list[str] | None]:
        import torch

        if isinstance(rows, torch.Tensor) and "features" in self._about:
            return rows, None
        return prepared(self._input(), rows, broken)

    def _input(self) -> inputs.Input:
        if "input" not in self._about:
            raise InputError(
                "how this run's records are prepared was inferred from private data and is in"
                f" private/input.json, which is not in {self.path}. Ask its owner for predictions,"
                " or for a run with a declared schema"
            )
        if self._about["input"] is None:
            raise InputError(
                f"records of {self.result.get('data', 'this data set')} can't be prepared one by"
                " one; give a tensor as zetaclip.data.load makes it"
            )
        return inputs.from_description(self._about["input"])

    def _outputs(self, x: Tensor) -> Tensor:
        import torch

        with torch.no_grad():
            parts = [self.model(part) for part in x.split(_ROWS)]
        outputs = torch.cat(parts).float()
        bad = (~outputs.isfinite()).flatten(1).any(dim=1)
        if bad.any():
            raise InputError(f"the network gives no finite output for {int(bad.sum())} records")
        return outputs


def load_run(folder: str | os.PathLike[str]) -> Run:
    """A run folder of ``zetaclip train``, ready to predict.

    Args:
        folder: The run folder. A run that was interrupted has the weights of that moment.

    Returns:
        The run.

    Raises:
        InputError: It is no run folder, or something that it needs is missing.

    **Guarantee.** Loading and predicting read the folder only. Predictions cost no further ε: they
    are computed from the weights.

    **Edge cases.** A network that was given as ``package.module:callable`` is imported again, so
    load such runs only from people whose code you would run.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise InputError(f"{path} is not a folder")
    return Run(RunFolder(path))


def _joined(features: nn.Module | None, network: nn.Module) -> nn.Module:
    from torch import nn

    return (network if features is None else nn.Sequential(features, network)).eval()


def _probabilities(task: str, outputs: Tensor) -> np.ndarray:
    """Shares of the classes, in double precision, so that each row adds up to 1."""
    import torch

    outputs = outputs.double()
    if task == "binary":
        outputs = torch.cat((torch.zeros_like(outputs), outputs), dim=1)
    found: np.ndarray = outputs.softmax(dim=1).numpy()
    return found


def _spent(facts: dict[str, Any], config: dict[str, Any]) -> float | None:
    """ε of the weights of an unfinished run; None if none is claimed or it can't be computed."""
    if facts.get("ledger") is None:
        return facts.get("epsilon")
    from ..accounting import epsilon
    from ..ledger import Header, Ledger

    ledger = Ledger(Header.from_plain(facts["ledger"]["header"]))
    ledger.load_state_dict(facts["ledger"])
    if not ledger.header.claims_privacy:
        return None
    try:
        value = epsilon(tuple(ledger.events()), config["delta"], config["accountant"])
    except AccountingError:
        return None
    return value if math.isfinite(value) else None


def _schema(about: dict[str, Any]) -> dict[str, Any] | None:
    source, target = about.get("input"), about.get("target")
    if source is None or target is None:
        return None
    if source["kind"] != "table":
        return dict(source)
    meaning: dict[str, Any] = {"target": target["name"], "task": about["task"]}
    if target["classes"]:
        meaning["classes"] = target["classes"]
    if target["range"]:
        meaning["target_bounds"] = target["range"]
    return {**meaning, "columns": source["columns"]}
