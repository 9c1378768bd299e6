"""Runs what is missing.

Finished runs are reused, cut ones resumed, failed ones reported while the rest continues.

Each run is a process of its own, ``zetaclip train --config FILE --out FOLDER``. The loop here only
decides what starts next; where it starts is a backend's affair (this machine, or Ray).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..data.places import ENVIRONMENT
from ..errors import CommandError
from . import fork_server
from .die_with_parent import bound
from .fork_server import ForkServer
from .outcome import Outcome
from .planned import PlannedRun
from .progress import Progress
from .store import Store

# A stand-in for `python -m zetaclip train`, for tests of the runner.
TRAIN_VARIABLE = "ZETACLIP_TRAIN_COMMAND"

_ATTEMPT = "--- a new attempt ---"


@dataclass(frozen=True)
class Job:
    """What a backend needs to know to start one training, on this machine or another."""

    key: str
    config: str
    folder: str
    log: str
    threads: int
    data: str | None = None  # where the data are: another machine's environment may not say


class Backend(Protocol):
    """Where trainings run."""

    slots: int

    def start(self, job: Job) -> Any:
        """Starts a training and returns a handle."""

    def poll(self, handle: Any) -> int | None:
        """The exit code, or None while it runs."""

    def stop(self, handles: Sequence[Any]) -> None:
        """Asks trainings to save and end, and waits for them."""

    def close(self) -> None:
        """Gives back what the backend holds."""


def run_all(
    runs: Sequence[PlannedRun], store: Store, backend: Backend, threads: int, progress: Progress
) -> dict[str, Outcome]:
    """Runs all that is not finished, in the given order, as far as each one's needs are met.

    Ctrl-C asks the running ones to save, and raises KeyboardInterrupt; everything can be resumed.

    Args:
        runs: What is planned, in order.
        store: The results folder.
        backend: Starts the trainings.
        threads: Threads of each training.
        progress: Shows what is done.

    Returns:
        What became of each run that was started, by key.
    """
    waiting = store.unfinished(runs)
    left = {run.key for run in waiting}
    outcomes: dict[str, Outcome] = {}
    for run in runs:
        if run.key not in left:  # what has a record but no folder needs no more
            problems = store.problems(run) if store.finished(run.key) else []
            outcomes[run.key] = (
                Outcome("failed", _edited(store, run, problems)) if problems else Outcome("reused")
            )
    running: dict[str, tuple[PlannedRun, Any]] = {}
    ended: list[
        tuple[PlannedRun, int]
    ] = []  # not yet verified, which takes a second: the next ones start first
    progress.begin(len(runs), outcomes)
    try:
        while waiting or running or ended:
            for run in list(waiting):
                states = [outcomes[key].state if key in outcomes else None for key in run.after]
                if any(state in ("failed", "blocked") for state in states):
                    waiting.remove(run)
                    outcomes[run.key] = Outcome("blocked", "a run that it needs has failed")
                    progress.ended(run, outcomes)
                elif len(running) < backend.slots and all(
                    state in ("done", "reused") for state in states
                ):
                    waiting.remove(run)
                    running[run.key] = (run, backend.start(_job(store, run, threads)))
            while ended:
                run, exit_code = ended.pop()
                outcomes[run.key] = _outcome(store, run, exit_code)
                progress.ended(run, outcomes)
            for key, (run, handle) in list(running.items()):
                code = backend.poll(handle)
                if code is not None:
                    del running[key]
                    ended.append((run, code))
            progress.show(store, [run for run, _ in running.values()], outcomes)
            if running:
                time.sleep(0.0 if ended else 0.05)
            elif waiting and not ended and not any(_ready(run, outcomes) for run in waiting):
                raise AssertionError("runs wait for runs that are not planned")
    except KeyboardInterrupt:
        progress.note("stopping: the running trainings save their state")
        backend.stop([handle for _, handle in running.values()])
        raise
    finally:
        progress.end()
    return outcomes


def train_command(config: str, folder: str, resume: bool) -> list[str]:
    """The command line of one training.

    Args:
        config: The file with the settings.
        folder: The run folder.
        resume: Whether a run in it is continued.
    """
    stand_in = os.environ.get(TRAIN_VARIABLE)
    command = shlex.split(stand_in) if stand_in else [sys.executable, "-m", "zetaclip", "train"]
    return [*command, *_train_words(config, folder, resume)]


def _train_words(config: str, folder: str, resume: bool) -> list[str]:
    return ["--config", config, "--out", folder, "--quiet", *(["--resume"] if resume else [])]


def _begun(folder: str) -> bool:
    """Whether there is something to resume.

    A training that was cut before it wrote this file has to be started again.
    """
    return (Path(folder) / "config.json").exists()


def environment_of(threads: int, data: str | None = None) -> dict[str, str]:
    """The environment of a training: its threads, and where the data are.

    If the runner's folder of data is not on this machine, this machine's own setting stays.
    """
    elsewhere = ENVIRONMENT in os.environ and data is not None and not Path(data).is_dir()
    told = {ENVIRONMENT: data} if data and not elsewhere else {}
    return {**os.environ, **told, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def start_training(job: Job) -> subprocess.Popen[bytes]:
    """Starts one training as a new process, which writes to its log and ends with this one."""
    command = bound(train_command(job.config, job.folder, _begun(job.folder)))
    with open(job.log, "ab") as log:
        log.write(_ATTEMPT.encode() + b"\n")
        log.flush()
        # A session of its own: Ctrl-C reaches the runner alone, which then asks each training to
        # save.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment_of(job.threads, job.data),
            start_new_session=True,
        )


class Training(Protocol):
    """A process, or a fork of the server."""

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Sends a signal, if it still runs."""


class LocalBackend:
    """Processes on this machine."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise CommandError(f"--workers must be at least 1, not {workers}")
        self.slots = workers
        self._server: ForkServer | None = None

    def start(self, job: Job) -> Training:
        """Starts a training; by a fork of the server where there can be one."""
        if TRAIN_VARIABLE in os.environ or not fork_server.available():
            return start_training(job)
        if self._server is None:
            self._server = ForkServer(environment_of(job.threads, job.data))
        with open(job.log, "ab") as log:
            log.write(_ATTEMPT.encode() + b"\n")
        return self._server.start(
            ["train", *_train_words(job.config, job.folder, _begun(job.folder))], job.log
        )

    def poll(self, handle: Training) -> int | None:
        """The exit code; None while it runs."""
        return handle.poll()

    def stop(self, handles: Sequence[Training]) -> None:
        """Stops trainings, which save what they have."""
        stop_processes(handles)

    def close(self) -> None:
        """Ends the fork server."""
        if self._server is not None:
            self._server.close()
            self._server = None


def stop_processes(processes: Sequence[Training], patience: float = 30.0) -> None:
    """Asks politely, then less politely."""
    for sent, wait in ((signal.SIGINT, patience), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        for process in processes:
            if process.poll() is None:
                process.send_signal(sent)
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            if all(process.poll() is not None for process in processes):
                return
            time.sleep(0.05)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_line(log: Path) -> str:
    """The last thing that a training said: most errors end with the sentence that matters."""
    if not log.exists():
        return ""
    said = log.read_text(encoding="utf-8", errors="replace").rpartition(_ATTEMPT)[2]
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")


def _job(store: Store, run: PlannedRun, threads: int) -> Job:
    config = store.prepare(run)
    folder, log = str(store.folder(run.key)), str(store.log_file(run.key))
    return Job(run.key, str(config), folder, log, threads, os.environ.get(ENVIRONMENT))


def _outcome(store: Store, run: PlannedRun, code: int) -> Outcome:
    if code == 0 and store.finished(run.key):
        problems = store.problems(run)
        if problems:
            return Outcome("failed", _edited(store, run, problems))
        store.record([run])
        return Outcome("done")
    said = last_line(store.log_file(run.key))
    if code == 0:
        said = f"it ended without a result{': ' + said if said else ''}"
    elif not said:
        said = (
            f"it ended with code {code} and said nothing"
            if code > 0
            else f"it was killed by signal {-code}"
        )
    return Outcome("failed", said)


def _edited(store: Store, run: PlannedRun, problems: list[str]) -> str:
    folder = store.folder(run.key)
    return f"{folder} can't be trusted: {'; '.join(problems)}. Delete the folder to run it again"


def _ready(run: PlannedRun, outcomes: dict[str, Outcome]) -> bool:
    return all(key in outcomes for key in run.after)
