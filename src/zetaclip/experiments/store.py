"""The folder of `zetaclip reproduce`: runs by the hash of their configuration, one user at a time.

OUT/runs/KEY/       a run folder of `zetaclip train`
OUT/configs/KEY.json  what it was asked to do
OUT/logs/KEY.log    what it said
OUT/records.jsonl   what each finished run came to, for where its folder is not
OUT/failures.json   runs that failed when they were last tried
OUT/speeds.json     what `--dry-run` has measured
OUT/private/        features that runs share, while they run
OUT/README.md       every experiment, and what of it has not been run
OUT/NAME/           tables, CSV and plots of one experiment

The folder may be moved: finished runs stay what they are. Only a run that follows another one and
was cut before the move can't be resumed, because `zetaclip train` continues with the very
configuration it began with, and that names the followed run by its whole path. Delete its folder to
run it again.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from ..errors import CommandError
from . import records
from .files import read_cache, read_json, read_own, write_json
from .measures import Run
from .planned import PlannedRun, config_key

FORMAT = 1

# The files whose contents `verify` judges; if none has changed, its verdict stands.
_JUDGED = (
    "config.json",
    "result.json",
    "ledger.jsonl",
    "probes.jsonl",
    "clips.jsonl",
    "metrics.jsonl",
)


@dataclass(frozen=True)
class Store:
    """One results folder.

    ``verify`` looks at a finished run folder and says what is wrong with it.
    """

    out: Path
    verify: Callable[[Path], Sequence[str]]

    @classmethod
    def open(
        cls,
        out: str | os.PathLike[str],
        verify: Callable[[Path], Sequence[str]] | None = None,
        create: bool = True,
    ) -> Store:
        """The results folder, made if it is not there.

        Args:
            out: The folder.
            verify: Gives the problems of a finished run folder; None for ``zetaclip verify``.
            create: Whether to make a folder that is not there.

        Raises:
            CommandError: It is a file, or another version wrote it.
        """
        path = Path(out).expanduser().resolve()
        if path.exists() and not path.is_dir():
            raise CommandError(f"{path} is a file; --out takes a folder")
        marker = path / "reproduce.json"
        if marker.exists():
            found = read_own(marker).get("zetaclip_reproduce")
            if found != FORMAT:
                raise CommandError(
                    f"{path} was written by another version of zetaclip (format {found}, this "
                    f"one writes {FORMAT}); "
                    "choose another folder with --out"
                )
        elif path.exists() and any(path.iterdir()) and not _only_results(path):
            raise CommandError(
                f"{path} holds other files; choose an empty folder or a new one with --out"
            )
        if create:
            path.mkdir(parents=True, exist_ok=True)
            if not marker.exists():
                write_json(marker, {"zetaclip_reproduce": FORMAT})
        return cls(path, verify or _verify)

    def folder(self, key: str) -> Path:
        """The run folder of a key."""
        return self.out / "runs" / key

    def config_file(self, key: str) -> Path:
        """The configuration that its training is given."""
        return self.out / "configs" / f"{key}.json"

    def log_file(self, key: str) -> Path:
        """What its training printed."""
        return self.out / "logs" / f"{key}.log"

    def finished(self, key: str) -> bool:
        """Whether the folder holds a result."""
        return (self.folder(key) / "result.json").exists()

    @cached_property
    def records(self) -> dict[str, Run]:
        """The runs that have finished somewhere, here or not; read once."""
        return records.read(self.out)

    def run(self, planned: PlannedRun) -> Run | None:
        """A finished run: its folder, or its record where there is no folder.

        A folder counts if it can be trusted.
        """
        if not self.finished(planned.key):
            return self.records.get(planned.key)
        return None if self.problems(planned) else Run.read(self.folder(planned.key))

    def record(self, runs: Iterable[PlannedRun]) -> None:
        """Records those whose folders are here and can be trusted."""
        here = ((planned, self.run(planned)) for planned in runs if self.finished(planned.key))
        records.write(self.out, [(planned, run) for planned, run in here if run is not None])

    def unfinished(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Those that have to be run.

        The ones with neither folder nor record, and any whose folder such a one reads.
        """
        by_key = {run.key: run for run in runs}
        todo: set[str] = set()

        def add(run: PlannedRun) -> None:
            if run.key not in todo and not self.finished(run.key):
                todo.add(run.key)
                for key in run.after:
                    add(by_key[key])

        for run in runs:
            if run.key not in self.records:
                add(run)
        return [run for run in runs if run.key in todo]

    def prepare(self, run: PlannedRun) -> Path:
        """Writes the run's configuration, placeholders filled in, and returns its file."""
        file = self.config_file(run.key)
        file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file(run.key).parent.mkdir(parents=True, exist_ok=True)
        self.folder(run.key).parent.mkdir(parents=True, exist_ok=True)
        write_json(file, self.materialise(run.config))
        return file

    def materialise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration as `zetaclip train` takes it.

        Paths and numbers instead of placeholders.
        """
        filled = {key: self._filled(value) for key, value in config.items()}
        rate = filled.get("lr")
        if isinstance(rate, dict):
            filled["lr"] = rate["rate"] * self._mean_clip(Path(rate["times_mean_clip_of"]))
        return filled

    def _mean_clip(self, folder: Path) -> float:
        if not self.finished(folder.name) and folder.name in self.records:
            return float(self.records[folder.name].result["clip"]["mean"])
        return float(read_json(folder / "result.json")["clip"]["mean"])

    def _filled(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._filled(inner) for key, inner in value.items()}
        if isinstance(value, str) and value.startswith("@run:"):
            return str(self.folder(value.removeprefix("@run:")))
        if isinstance(value, str) and value.startswith("@tuned:"):
            raise CommandError(
                f"the learning rate {value.removeprefix('@tuned:')} has not been tuned"
            )
        return value

    def problems(self, run: PlannedRun) -> list[str]:
        """What is wrong with a finished run.

        The folder was edited, or holds another configuration.
        """
        folder = self.folder(run.key)
        try:
            digest = _digest(folder)
            if config_key(run.config, run.alone) != run.key:
                return ["its name is not the hash of its configuration"]
            found = read_json(folder / "config.json")
            # Whole but for the paths of other runs: what they were when this one ran says nothing
            # about it.
            wanted = {**run.config, "lr": self.materialise({"lr": run.config["lr"]})["lr"]}
        except (OSError, ValueError, KeyError) as error:
            return [f"its files can't be read: {error}"]
        other = [
            key
            for key, value in wanted.items()  # None leaves the choice to train
            if key in found and value is not None and not _same(found[key], value)
        ]
        if other:
            return [
                f"it was run with another {key}: {found[key]!r}, not {wanted[key]!r}"
                for key in other
            ]
        judged = self.out / "verified.json"
        verdicts = read_cache(judged)
        if verdicts.get(run.key) == digest:
            return []
        problems = list(self.verify(folder))
        if not problems:
            write_json(judged, {**verdicts, run.key: digest})
        return problems

    def failures(self) -> dict[str, str]:
        """What has been said of the runs that failed when they were last tried, by key."""
        return read_cache(self.out / "failures.json")

    def keep_failures(self, failed: Mapping[str, str], over: Collection[str]) -> None:
        """Of these runs (``over``) only the given ones failed; what is known of others stays."""
        kept = {key: said for key, said in self.failures().items() if key not in over} | dict(
            failed
        )
        if kept or self.failures():
            write_json(self.out / "failures.json", kept)

    @contextlib.contextmanager
    def lock(self) -> Iterator[int]:
        """Holds the folder for this process; the file descriptor is handed out."""
        path = self.out / ".lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not lock_descriptor(handle, blocking=False):
                raise CommandError(f"{self.out} is in use: {_holder(path)}")
            holder = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "user": _user(),
                "command": shlex.join(["zetaclip", *sys.argv[1:]]),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(holder).encode(), 0)
            yield handle
            os.ftruncate(handle, 0)
        finally:
            os.close(handle)  # gives up the lock


def _only_results(path: Path) -> bool:
    """True for a folder that a checkout brought along: tables without the marker and the runs."""
    kinds = (".md", ".json", ".jsonl")
    return all(
        entry.is_dir() or entry.suffix in kinds or entry.name == ".lock" for entry in path.iterdir()
    )


def _digest(folder: Path) -> str:
    content = hashlib.sha256()
    for name in _JUDGED:
        path = folder / name
        content.update(name.encode() + (path.read_bytes() if path.exists() else b"-"))
    return content.hexdigest()


def _verify(folder: Path) -> Sequence[str]:
    from ..training.verify import verify

    return verify(folder)


def _same(found: Any, wanted: Any) -> bool:
    """Resolved configurations may say more (a table with its defaults), but not something else."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return all(_same(found[key], value) for key, value in wanted.items() if key in found)
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    if isinstance(wanted, str) and wanted.startswith("@run:"):
        return isinstance(found, str) and Path(found).name == wanted.removeprefix("@run:")
    if isinstance(wanted, str) and isinstance(found, list):
        return found == [wanted]
    return bool(found == wanted)


def _holder(path: Path) -> str:
    try:
        holder = read_json(path)
    except (OSError, ValueError):
        return "another process holds its lock"
    return (
        f"process {holder['pid']} of {holder['user']} on {holder['host']} has held it since "
        f"{holder['since']} "
        f"({holder['command']}). Wait for it, stop it, or choose another folder with --out"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user entry
        return f"uid {os.getuid()}"
