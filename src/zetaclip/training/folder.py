"""The folder of a run, written so that a process killed at any moment leaves it usable.

Public: config.json, model.json, status.json, metrics.jsonl, probes.jsonl, clips.jsonl,
ledger.jsonl, model.safetensors, result.json, MODEL_CARD.md, and during the run checkpoint/
(weights, optimizer, ledger and journal of releases: nothing that was not released). Secret:
private/ (mode 0700), the keys of sampling and noise. Both folders are deleted when the run is
finished, except private/input.json: what was inferred from private data to prepare the records.
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
    """Paths and writers of one run.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # Whether this process has written a checkpoint; it does so before the first step.
        self.saved = False

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return self.path / "checkpoint" / "run.pt"

    @property
    def secrets(self) -> Path:
        """The secret random streams."""
        return self.path / "private" / "streams.json"

    @property
    def hidden(self) -> Path:
        """What was inferred from private data to prepare the records, if anything was."""
        return self.path / "private" / "input.json"

    @property
    def directory(self) -> str | None:
        """Where the unfinished run was started: its relative paths are relative to this."""
        with suppress(OSError):
            return (self.path / "private" / "directory").read_text()
        return None

    def note_directory(self) -> None:
        """Writes where the run is started. The path may name a person, so it is not public."""
        with replace_file(self.path / "private" / "directory", mode=0o600) as file:
            file.write(os.getcwd().encode())

    @property
    def finished(self) -> bool:
        """Whether there is a result."""
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
        """The command that resumes the run, in as many processes as now."""
        import torch.distributed as dist

        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        program = (
            f"torchrun --nproc-per-node {dist.get_world_size()} -m zetaclip"
            if together
            else "zetaclip"
        )
        return f"{program} train --out {self.path} --resume"

    def listed(self) -> set[Path]:
        """The existing files and folders that a run writes, and the folders around them."""
        inside = (*(self.path / "checkpoint").glob("*"), *(self.path / "private").glob("*"))
        own = (
            self.path / "checkpoint",
            self.path / "private",
            *(self.path / name for name in _FILES),
        )
        return {*inside, *(path for path in (*own, self.path, *self.path.parents) if path.exists())}

    def undo(self, before: set[Path]) -> None:
        """Removes the files of a start that executed nothing: those not in ``before``.

        A folder that is not empty stays, because someone else has put a file there.
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
        """Makes the folder and checks that a run fits, before anything is trained.

        Raises:
            FolderError: The folder can't be written, or the disk is too full.
        """
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
                f"{self.path}: {free / 2**20:.0f} MiB free, and the run needs about"
                f" {needed_bytes / 2**20:.0f} MiB for its checkpoints and results. Free some space"
                " or choose another --out"
            )

    def clear(self) -> None:
        """Removes a run's own files and nothing else; hold the lock.

        Secret keys are overwritten first, as in ``drop_state``.
        """
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
        """Removes what only resuming needs.

        Secret keys are overwritten first, as far as the file system allows.
        """
        for path in (self.path / "private").glob("*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path != self.hidden:
                _blank(path)
                path.unlink()
        shutil.rmtree(self.path / "checkpoint", ignore_errors=True)
        with suppress(OSError):  # something is left in it
            (self.path / "private").rmdir()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Allows one process per folder inside the block.

        Raises:
            FolderError: Another process has it; the message says which one.
        """
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
        """Writes a file as JSON; infinity and NaN become null."""
        self.write_text(
            name, json.dumps(finite(values), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        )

    def write_text(self, name: str, text: str) -> None:
        """Writes a file; a reader sees the old or the new content, never a part."""
        with replace_file(self.path / name) as file:
            file.write(text.encode())

    def write_hidden(self, values: dict[str, Any]) -> None:
        """Writes private/input.json, readable by its owner only."""
        with replace_file(self.hidden, mode=0o600) as file:
            file.write(json.dumps(values, indent=2, ensure_ascii=False).encode())

    def append(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        """Adds lines in one write, so that only the last line of a file can be incomplete."""
        text = "".join(
            json.dumps(finite(line), ensure_ascii=False, allow_nan=False) + "\n" for line in lines
        )
        if text:
            with open(self.path / name, "ab") as file:
                file.write(text.encode())

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a file; an incomplete last one is left out."""
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
        """Removes lines after ``step`` from the logs, because they will be written again."""
        for name in ("metrics.jsonl", "probes.jsonl", "clips.jsonl", "diagnostics.jsonl"):
            if (self.path / name).exists():
                kept = [line for line in self.read_lines(name) if line.get("step", 0) <= step]
                self.write_text(
                    name, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
                )


_FILES = (
    "config.json", "model.json", "status.json", "metrics.jsonl", "probes.jsonl", "clips.jsonl",
    "diagnostics.jsonl", "ledger.jsonl", "model.safetensors", "result.json", "MODEL_CARD.md",
    "report.html", "trackers.json",
)  # fmt: skip


def _blank(path: Path) -> None:
    """Overwrites a file in place; truncating it first would write to other blocks of the disk."""
    if path.is_file():
        with open(path, "r+b") as file:
            file.write(b"\0" * path.stat().st_size)
            file.flush()
            os.fsync(file.fileno())


def finite(value: Any) -> Any:
    """The value with null for infinity and NaN, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


class Status:
    """Writes status.json: how far the run is. Callers write at most once a second (``due``).

    Args:
        folder: The run folder.
    """

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
        """Whether a second has passed since the last write."""
        return time.monotonic() >= self._next

    def write(self, **values: Any) -> None:
        """Updates the values and writes the file."""
        self._values.update(values, updated=time.time())
        self._next = time.monotonic() + 1.0
        self._folder.write_json("status.json", self._values)
