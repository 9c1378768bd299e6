"""MLflow and Weights & Biases: thin listeners to the lines of a run's public logs.

Each is called with ("metrics" | "probe" | "clip", line), as ``zetaclip.training.train(series=...)``
calls it, and ends with ``close(result)``.

**Guarantee.** They get the settings of config.json, the numbers of the logs and a part of
result.json, all of which are public files of the run folder. What the terminal shows is not sent:
warnings for the owner of the data may speak of records.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .lines import number
from .series import scalars

PROJECT = "zetaclip"

# What of result.json goes beside the run, for tables of runs.
_SUMMARY = ("epsilon", "delta", "accountant", "claim", "adjacency", "unit", "sigma", "steps")


class MlflowTracker:
    """Writes a run to MLflow, to wherever ``MLFLOW_TRACKING_URI`` points.

    Args:
        settings: The content of config.json.
        name: The name of the run.
        identity: The id of a run to continue; None begins a new one.
        uri: Where to write; default: MLflow's own choice.

    Raises:
        CommandError: MLflow is not installed, or can't be reached.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        name: str,
        identity: str | None = None,
        uri: str | None = None,
    ) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise CommandError(
                "--mlflow needs the package mlflow: pip install 'zetaclip[mlflow]'"
            ) from error
        self._metric = Metric
        try:
            self._client: Any = MlflowClient(tracking_uri=uri)
            self.identity = identity or self._begin(settings, name)
            self._client.update_run(self.identity, "RUNNING")
        except MlflowException as error:
            raise CommandError(f"MLflow can't be used: {error}") from error

    def _begin(self, settings: Mapping[str, Any], name: str) -> str:
        found = self._client.get_experiment_by_name(PROJECT)
        home = found.experiment_id if found else self._client.create_experiment(PROJECT)
        run = self._client.create_run(home, run_name=name)
        for key, value in _flat(settings).items():
            self._client.log_param(run.info.run_id, key, value)
        return str(run.info.run_id)

    def __call__(self, kind: str, line: Mapping[str, Any]) -> None:
        """Writes the numbers of a line."""
        import time

        step, now = int(number(line.get("step")) or 0), int(1000 * time.time())
        metrics = [
            self._metric(tag, value, now, step) for tag, value in scalars(kind, line).items()
        ]
        self._client.log_batch(self.identity, metrics=metrics)

    def close(self, result: Mapping[str, Any] | None) -> None:
        """Ends the run.

        Args:
            result: The content of result.json; None if the run was stopped.
        """
        for key, value in _summary(result).items():
            if isinstance(value, float):
                self._client.log_metric(self.identity, f"result/{key}", value)
            else:
                self._client.set_tag(self.identity, f"result.{key}", value)
        self._client.set_terminated(self.identity, "FINISHED" if result else "KILLED")


class WandbTracker:
    """Writes a run to Weights & Biases; ``WANDB_MODE=offline`` keeps it on this machine.

    The console, the code, git, the machine and its packages are not recorded.

    Args:
        settings: The content of config.json.
        name: The name of the run.
        folder: W&B puts its own folder `wandb` here.
        identity: The id of a run to continue; None begins a new one.

    Raises:
        CommandError: wandb is not installed, or can't be reached.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        name: str,
        folder: str | os.PathLike[str],
        identity: str | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise CommandError(
                "--wandb needs the package wandb: pip install 'zetaclip[wandb]'"
            ) from error
        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=PROJECT,
                name=name,
                id=identity,
                resume="allow" if identity else None,
                dir=os.fspath(folder),
                config=_flat(settings),
                settings=wandb.Settings(
                    console="off",
                    save_code=False,
                    disable_git=True,
                    disable_code=True,
                    x_disable_stats=True,
                    x_disable_meta=True,
                    x_save_requirements=False,
                    silent=True,
                ),
            )
        except wandb.Error as error:
            raise CommandError(
                f"Weights & Biases can't be used: {error}. WANDB_MODE=offline needs no network"
            ) from error
        self.identity = str(self._run.id)

    def __call__(self, kind: str, line: Mapping[str, Any]) -> None:
        """Writes the numbers of a line."""
        self._run.log(scalars(kind, line), step=int(number(line.get("step")) or 0))

    def close(self, result: Mapping[str, Any] | None) -> None:
        """Ends the run.

        Args:
            result: The content of result.json; None if the run was stopped.
        """
        self._run.summary.update(_summary(result))
        self._run.finish(exit_code=0 if result else 1)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were chosen, tables flattened to "table.key"."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": str(told) for inner, told in value.items()}
        elif value is not None:
            found[key] = value
    return found


def _summary(result: Mapping[str, Any] | None) -> dict[str, float | str]:
    if result is None:
        return {}
    found = {key: result.get(key) for key in _SUMMARY} | dict(result.get("metrics") or {})
    return {
        key: float(value) if isinstance(value, int | float) else str(value)
        for key, value in found.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }
