"""The folder of a run: what lies where, written so that a kill at any moment leaves something usable.

Public: config.json, status.json, metrics.jsonl, probes.jsonl, clips.jsonl, ledger.jsonl, model.safetensors, result.json, and while
the run goes on checkpoint/ (weights, optimizer, ledger and journal of releases: nothing that was not released).
Secret: private/ (mode 0700), the keys of sampling and noise. Both folders go when the run is finished.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from ..files import replace_file


class FolderError(Exception):
    """The run folder can't be used; the message says why and what to do."""


class RunFolder:
    """Paths and writers of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.saved = False  # whether this process has written a checkpoint, which comes before the first step

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint" / "run.pt"

    @property
    def secrets(self) -> Path:
        return self.path / "private" / "streams.json"

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").exists()

    @property
    def begun(self) -> bool:
        """Whether a run has written its configuration here."""
        return (self.path / "config.json").exists()

    @property
    def executed(self) -> bool:
        """Whether steps may have been taken: a checkpoint is written before the first one."""
        return self.checkpoint.exists()

    @property
    def resume_command(self) -> str:
        """What goes on with the run here, in as many processes as now."""
        import torch.distributed as dist

        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        program = (
            f"torchrun --nproc-per-node {dist.get_world_size()} -m zetaclip"
            if together
            else "zetaclip"
        )
        return f"{program} train --out {self.path} --resume"

    def listed(self) -> set[Path]:
        """What lies here of the kind that a run writes, and the folders around it."""
        inside = (*(self.path / "checkpoint").glob("*"), *(self.path / "private").glob("*"))
        own = (
            self.path / "checkpoint",
            self.path / "private",
            *(self.path / name for name in _FILES),
        )
        return {*inside, *(path for path in (*own, self.path, *self.path.parents) if path.exists())}

    def undo(self, before: set[Path]) -> None:
        """Takes back a start that executed nothing: what ``listed`` now and did not ``before``. Anything else stays.

        A folder that is not empty stays as well: somebody else has put something there.
        """
        for path in sorted(self.listed() - before, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):
                if path.is_dir():
                    path.rmdir()
                else:
                    if path.parent.name == "private":
                        _blank(path)
                    path.unlink()

    def create(self, needed_bytes: int) -> None:
        """Makes the folder and sees whether it can hold a run, before anything is trained."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "checkpoint").mkdir(exist_ok=True)
            private = self.path / "private"
            private.mkdir(mode=0o700, exist_ok=True)
            private.chmod(0o700)
            with replace_file(self.path / "writable") as file:
                file.write(b"yes")
            (self.path / "writable").unlink()
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise FolderError(
                f"cannot write to {self.path}: {error.strerror}. Choose another --out"
            ) from error
        if free < needed_bytes:
            raise FolderError(
                f"{self.path}: {free / 2**20:.0f} MiB free, and the run needs about {needed_bytes / 2**20:.0f} MiB for its "
                "checkpoints and results. Free some space or choose another --out"
            )

    def clear(self) -> None:
        """Removes a run's own files, and nothing else that may lie here; secret keys as ``drop_state`` does. The lock stays: hold it."""
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        for path in (*(self.path / "checkpoint").glob("*"), *(self.path / "private").glob("*")):
            if path.name == "lock":
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                if path.parent.name == "private":
                    _blank(path)
                path.unlink(missing_ok=True)

    def drop_state(self) -> None:
        """Removes what only resuming needs; the secret keys are overwritten first, as far as a file system honours that."""
        for path in (self.path / "private").glob("*"):
            _blank(path)
        for name in ("private", "checkpoint"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process per folder; a second one is told who has it."""
        descriptor = os.open(self.path / "private" / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not lock_descriptor(descriptor, blocking=False):
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise FolderError(
                    f"{self.path} is in use by another run ({holder or 'unknown process'})"
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    # -- files

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        self.write_text(
            name, json.dumps(finite(values), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        )

    def write_text(self, name: str, text: str) -> None:
        with replace_file(self.path / name) as file:
            file.write(text.encode())

    def append(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        """Adds lines in one write each, so that a reader sees whole lines or, at the very end, a part of one."""
        text = "".join(
            json.dumps(finite(line), ensure_ascii=False, allow_nan=False) + "\n" for line in lines
        )
        if text:
            with open(self.path / name, "ab") as file:
                file.write(text.encode())

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a file; a last one that was cut off is left out."""
        try:
            raw = (self.path / name).read_bytes()
        except FileNotFoundError:
            return []
        lines = []
        for line in raw.split(b"\n"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                lines.append(value)
        return lines

    def cut_back(self, step: int) -> None:
        """Takes out of the logs what came after ``step``: it will be written again."""
        for name in ("metrics.jsonl", "probes.jsonl", "clips.jsonl", "diagnostics.jsonl"):
            if (self.path / name).exists():
                kept = [line for line in self.read_lines(name) if line.get("step", 0) <= step]
                self.write_text(
                    name, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
                )


_FILES = (
    "config.json", "status.json", "metrics.jsonl", "probes.jsonl", "clips.jsonl", "diagnostics.jsonl", "ledger.jsonl",
    "model.safetensors", "result.json", "report.html",
)  # fmt: skip


def _blank(path: Path) -> None:
    """Overwrites a file in place: one that is cut off first would get other blocks of the disk."""
    if path.is_file():
        with open(path, "r+b") as file:
            file.write(b"\0" * path.stat().st_size)
            file.flush()
            os.fsync(file.fileno())


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: both become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


class Status:
    """status.json: where the run stands, for whoever watches; rewritten at most once a second."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._values: dict[str, Any] = {
            "state": "running",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.time(),
            "resume": folder.resume_command,
        }
        self._next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def write(self, **values: Any) -> None:
        self._values.update(values, updated=time.time())
        self._next = time.monotonic() + 1.0
        self._folder.write_json("status.json", self._values)
