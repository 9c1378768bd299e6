"""Reads a run folder.

Whatever the folder contains becomes a ``Run``. A file that is cut off, damaged or missing loses its
own lines only and adds a sentence to ``problems``. Only a folder without a run is an error.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .lines import Lines, last, number, parse_object

# A process on another machine can't be checked. Its run counts as stopped after this many seconds
# without an update.
SILENCE = 300.0


@dataclass(frozen=True)
class Run:
    """One run folder, read once.

    Args:
        path: The folder.
        name: A name that no other run of the page has.
        config: config.json.
        status: status.json.
        result: result.json; None before the end.
        metrics: The lines of metrics.jsonl, one per epoch.
        probes: The lines of probes.jsonl.
        clips: The lines of clips.jsonl.
        state: running, finished, stopped, failed or unknown.
        problems: What could not be read.
    """

    path: Path
    name: str
    config: dict[str, Any]
    status: dict[str, Any]
    result: dict[str, Any] | None
    metrics: tuple[dict[str, Any], ...]
    probes: tuple[dict[str, Any], ...]
    clips: tuple[dict[str, Any], ...]
    state: str
    problems: tuple[str, ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """A fact about the run: from its result, else from its configuration."""
        for source in (self.result or {}, self.config):
            if source.get(key) is not None:
                return source[key]
        return default

    @property
    def metric_name(self) -> str:
        """accuracy, auc or rmse; "" if nothing was measured."""
        stated = (self.result or {}).get("metric")
        if isinstance(stated, dict) and isinstance(stated.get("name"), str):
            return str(stated["name"])
        # A binary task reports its accuracy beside the AUC, which is its metric.
        names = ("auc", "rmse", "accuracy")
        return next((name for name in names if any(name in line for line in self.metrics)), "")

    @property
    def metric(self) -> float | None:
        """The final value, or the last one measured."""
        stated = (self.result or {}).get("metric")
        if isinstance(stated, dict):
            return number(stated.get("value"))
        return last(number(line.get("metric")) for line in self.metrics)

    @property
    def epsilon(self) -> float | None:
        """The ε at the end, or the newest one known; None without privacy."""
        if self.result is not None:
            return number(self.result.get("epsilon"))
        return number(self.status.get("epsilon")) or last(
            number(line.get("epsilon")) for line in self.metrics
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Time by part since the start; without a result, as of the last epoch."""
        stated = (self.result or {}).get("seconds") or (
            self.metrics[-1].get("seconds") if self.metrics else None
        )
        if not isinstance(stated, dict):
            return {}
        return {part: value for part in stated if (value := number(stated[part])) is not None}

    @property
    def reach(self) -> float:
        """The last step that anything is known about."""
        steps = (
            number(line.get("step"))
            for line in (*self.metrics[-1:], *self.probes[-1:], self.status, self.result or {})
        )
        return max((step for step in steps if step is not None), default=0.0)


class Follower:
    """Reads a run folder again and again, each time only what is new.

    Args:
        path: The run folder.
        name: The run's name; default: the folder's.

    Raises:
        CommandError: The folder does not exist or contains no run.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path = Path(path)
        self.name = name or self.path.resolve().name
        if not self.path.exists():
            raise CommandError(f"{self.path}: no such folder")
        if not self.path.is_dir():
            raise CommandError(
                f"{self.path} is a file; give the folder that `zetaclip train --out` wrote"
            )
        if not (self.path / "config.json").exists():
            raise CommandError(_no_run(self.path))
        self._metrics = Lines(self.path / "metrics.jsonl", "epoch")
        self._probes = Lines(self.path / "probes.jsonl", "step")
        self._clips = Lines(self.path / "clips.jsonl", "step")

    def stamp(self) -> tuple[Any, ...]:
        """Changes whenever a file that a page shows changes; takes a few system calls."""
        names = (
            "config.json",
            "status.json",
            "result.json",
            "metrics.jsonl",
            "probes.jsonl",
            "clips.jsonl",
        )
        stats = []
        for name in names:
            try:
                found = os.stat(self.path / name)
                stats.append((found.st_ino, found.st_size, found.st_mtime_ns))
            except OSError:
                stats.append((0, 0, 0))
        return tuple(stats)

    def state(self) -> str:
        """The state alone, without reading the series."""
        return state_of(
            _object(self.path / "status.json", []), (self.path / "result.json").exists()
        )

    def read(self) -> Run:
        """The run as it is now."""
        problems: list[str] = []
        config = _object(self.path / "config.json", problems)
        status = _object(self.path / "status.json", problems)
        result = _object(self.path / "result.json", problems) or None
        state = state_of(status, result is not None)
        metrics, probes, clips = self._metrics.update(), self._probes.update(), self._clips.update()
        for lines in (self._metrics, self._probes, self._clips):
            problems += lines.problems(growing=state == "running")
        return Run(
            self.path,
            self.name,
            config,
            status,
            result,
            metrics,
            probes,
            clips,
            state,
            tuple(problems),
        )


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs of these folders, each with a unique name."""
    return [follower.read() for follower in follow(paths)]


def follow(paths: Sequence[str | os.PathLike[str]]) -> list[Follower]:
    """A ``Follower`` for each folder, with unique names."""
    followers = [Follower(path) for path in dict.fromkeys(Path(path) for path in paths)]
    for follower, name in zip(followers, unique_names([follower.path for follower in followers])):
        follower.name = name
    return followers


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as make it unique."""
    parts = [path.resolve().parts for path in paths]
    names = [""] * len(parts)
    for depth in range(1, max((len(part) for part in parts), default=0) + 1):
        candidates = ["/".join(part[-depth:]) for part in parts]
        for place, candidate in enumerate(candidates):
            if not names[place] and candidates.count(candidate) == 1:
                names[place] = candidate
    return [name or str(path) for name, path in zip(names, paths)]


def _no_run(path: Path) -> str:
    inside = sorted(child.name for child in path.iterdir() if (child / "config.json").exists())
    if inside:
        shown = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
        return (
            f"{path} holds no run, but there are runs inside it ({shown}): give those, e.g."
            f" {path}/*"
        )
    return (
        f"{path} holds no run (there is no config.json); give the folder that `zetaclip train"
        " --out` wrote"
    )


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{path.name} can't be read: {error.strerror}")
        return {}
    value = parse_object(data)
    if value is None:
        problems.append(f"{path.name} is damaged and left out")
    return value or {}


def state_of(status: dict[str, Any], finished: bool, now: float | None = None) -> str:
    """The state that the folder states, corrected if it says "running" and the process has ended.

    Args:
        status: status.json.
        finished: Whether there is a result.json.
        now: The time in unix seconds; default: the clock.
    """
    if finished:
        return "finished"
    stated = status.get("state")
    if stated == "running":
        return "running" if _alive(status, time.time() if now is None else now) else "stopped"
    return stated if stated in ("stopped", "failed", "finished") else "unknown"


def _alive(status: dict[str, Any], now: float) -> bool:
    updated, pid = number(status.get("updated")), status.get("pid")
    if status.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return updated is None or now - updated < SILENCE
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    born = _born(pid)
    # A process that began after the last update is another one with the same id.
    return born is None or updated is None or born <= updated + 2.0


def _born(pid: int) -> float | None:
    """When a process began, in unix seconds, if the system says so."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted = next(
            line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
        )
        if fields[0] in "ZX":  # a zombie: it has ended
            return math.inf
        return float(booted.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, IndexError, ValueError):
        return None
