"""The start and the end of a run: what its folder may hold, what is set up, and what is left behind if it fails."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..engine._group import ranks
from ..errors import AccountingError, LedgerError, NoGuarantee
from .config import Config, ConfigError
from .folder import FolderError, RunFolder, Status
from .loop import Training
from .progress import Display
from .recipe import build_method, build_model, load_data, resolve
from .signals import Interrupted
from .steps import PlainSteps, PrivateSteps, Steps
from .together import Leader, follow


def train(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    rekey: bool = False,
    force: bool = False,
    keep_state: bool = False,
    display: Display | None = None,
    series: Callable[[str, dict[str, Any]], None] | None = None,
    begun: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Trains what ``config`` says into the folder ``out`` and returns its result.

    ``resume`` goes on where a cut run stopped, replaying its secret streams exactly, and is refused where there is none; ``rekey``
    goes on with fresh ones, and everything that was executed stays in the ledger. ``force`` discards what the folder holds. ``series`` is called with
    ("metrics" | "probe" | "clip", line) for whoever wants to log elsewhere, ``begun`` once the folder can be read.

    **Guarantee.** The folder tells no more about the training records than the ledger says, apart from the time that things took,
    unless ``non_private_diagnostics`` is set, and then the result says so. Held-out metrics are about held-out records, which ε
    does not cover. **Edge cases.** A finished folder is returned as it is by ``resume`` and refused otherwise. A start that fails
    before anything was executed leaves no files behind, so that the folder is free for the next.
    """
    others = ranks()
    if others is not None and not others.first:
        return follow(others)
    folder, leader = RunFolder(out), Leader(others)
    try:
        if resume and folder.finished and not force:
            _same_config(folder, config)
            result = json.loads((folder / "result.json").read_text())
            leader.finished(result)
            return result
        _check_free(folder, resume, force)
        with _threads(config.threads):
            return _run(
                config,
                folder,
                resume,
                rekey,
                keep_state,
                display or Display(quiet=True),
                series,
                begun,
                leader,
            )
    except BaseException as error:
        leader.stop(error)
        raise


def _check_free(folder: RunFolder, resume: bool, force: bool) -> None:
    """Whether what the folder holds is what was asked for: nothing for a new run, one that can go on for ``resume``."""
    if folder.finished and not force:
        raise FolderError(
            f"{folder.path} holds a finished run; choose another --out, or --force to replace it"
        )
    if folder.begun and not resume and not force:
        raise FolderError(
            f"{folder.path} holds a run that is not finished: --resume goes on with it, --force discards it"
        )
    if resume and not folder.begun:
        # A wrong name, most likely: a new run would train something else than was asked for.
        raise FolderError(
            f"nothing to resume in {folder.path}; leave --resume out to start a run there"
        )
    if resume and not folder.executed and (folder / "metrics.jsonl").exists():
        raise FolderError(
            f"{folder.path}: checkpoint/ is gone, so nobody can tell which steps were executed. Start a new run in another folder"
        )


def _run(
    config: Config,
    folder: RunFolder,
    going_on: bool,
    rekey: bool,
    keep_state: bool,
    display: Display,
    series: Callable[[str, dict[str, Any]], None] | None,
    begun: Callable[[], None] | None,
    leader: Leader,
) -> dict[str, Any]:
    started = time.perf_counter()
    check_device(config.device)
    display.say(f"loading {config.data}")
    dataset = load_data(config)
    method = build_method(config)
    config = resolve(config, dataset, method)
    if leader.ranks is not None and not method.private:
        raise ConfigError(
            f"method {config.method!r} is not private: only private sums are added up over ranks. Train it in one process"
        )
    if config.threads is None:
        config = config.changed(threads=torch.get_num_threads())
    if going_on:
        _same_config(folder, config, allow_threads=rekey)
    if config.seed is None:
        torch.seed()
    else:
        torch.manual_seed(config.seed)
    model = build_model(config, dataset)
    replaced = not going_on and folder.begun
    before = folder.listed()
    try:
        folder.create(_needed_bytes(model))
    except FolderError:
        folder.undo(before)
        raise
    with folder.lock():
        if replaced:  # only now: somebody may be training there
            folder.clear()
            before &= folder.listed()
        status = Status(folder)
        with _failures_noted(folder, status, None if going_on else before):
            folder.write_text("config.json", config.to_json())
            status.write(state="running", message="setting up")
            if begun is not None:
                begun()
            display.say(
                "finding the noise" if method.private and config.sigma is None else "setting up"
            )
            leader.start(config, folder.path, going_on and folder.executed, rekey)
            kind = PrivateSteps if method.private else PlainSteps
            try:
                steps: Steps = kind(config, dataset, method, model)
            except (ValueError, AccountingError) as error:
                raise ConfigError(str(error)) from error
            run = Training(config, dataset, steps, folder, status, display, series)
            if going_on and folder.executed:
                run.restore(rekey)
            run.seconds["setup"] += time.perf_counter() - started
            try:
                result = run.train()
            except Interrupted as stop:
                status.write(state="stopped", message=f"stopped by {stop}", **run.standing())
                raise
            if not keep_state:
                folder.drop_state()
            status.write(state="finished", message="", **run.standing())
    return result


@contextmanager
def _failures_noted(folder: RunFolder, status: Status, before: set[Path] | None) -> Iterator[None]:
    """What goes wrong is noted in the status; a start that saved nothing, and so executed nothing, is taken back to ``before``.

    Otherwise the next start would find a run that is not finished, and resuming it would only fail in the same way again.
    """
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        if before is not None and not folder.saved:
            folder.undo(before)
        else:
            _note_failure(status, error)
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise _unwritable(folder, error) from error
        raise


def _unwritable(folder: RunFolder, error: OSError) -> FolderError:
    """A full disk, most often: the same sentence whichever of the run's files met it."""
    reason = error.strerror or str(error)
    if folder.begun:
        return FolderError(
            f"{folder.path}: the run's files can't be written ({reason}); the last good state is kept. Make room and go on with: "
            f"{folder.resume_command}"
        )
    return FolderError(
        f"cannot write to {folder.path}: {reason}. Make room, or choose another --out"
    )


def _needed_bytes(model: nn.Module) -> int:
    """Two checkpoints with an optimizer's two moments each, the average, the weights; and some for the logs."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return 10 * size + 16 * 2**20


def check_device(name: str) -> None:
    """Whether this machine can compute there; otherwise an error that lists where it can."""
    try:
        torch.zeros(1, device=name).item()
    except (
        Exception
    ) as error:  # torch has one kind for an unknown name, others for a card that is missing or full
        cards = (
            [f"cuda:{number}" for number in range(torch.cuda.device_count())]
            if torch.cuda.is_available()
            else []
        )
        there = ["cpu", *cards, *(["mps"] if torch.backends.mps.is_available() else [])]
        known = name in there or (name == "cuda" and cards)
        why = f" ({str(error).splitlines()[0][:150]})" if known and str(error) else ""
        raise ConfigError(
            f"device {name!r} can't be used here{why}; there is: {', '.join(there)}"
        ) from None


def _same_config(folder: RunFolder, config: Config, allow_threads: bool = False) -> None:
    """What is asked for now must be what the folder's run was asked for; an open choice agrees with anything."""
    saved = json.loads((folder / "config.json").read_text())
    differing = [
        f"{name} ({saved.get(name)!r} there, {value!r} here)"
        for name, value in asdict(config).items()
        if value is not None
        and value != {}
        and saved.get(name) != value
        and not (name == "threads" and allow_threads)
    ]
    if differing:
        raise FolderError(
            f"{folder.path} is a run with another configuration: {'; '.join(differing)}. Resume it with its own settings "
            "(--out and --resume are enough), or start a new run elsewhere"
        )


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """torch's number of threads for this run, if one was asked for."""
    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# What these say is about settings, the run's folder and the ledger. Any other error may tell of records: a batch's size, a label,
# the path of an image; or, if a checkpoint does not fit, the digest of the data.
_ABOUT_NO_RECORD = (AccountingError, ConfigError, FolderError, LedgerError, NoGuarantee)


def _note_failure(status: Status, error: BaseException) -> None:
    with suppress(OSError):  # a full disk is often the reason, and the error itself matters more
        status.write(state="failed", message=_public_words(error)[:500])


def _public_words(error: BaseException) -> str:
    """An error as a public file may tell it. One that repeats another is as public as that one."""
    name, said = type(error).__name__, "what it said is on the terminal of the run"
    repeats = error.__cause__
    if isinstance(error, _ABOUT_NO_RECORD) and isinstance(
        repeats, (*_ABOUT_NO_RECORD, OSError, type(None))
    ):
        said = str(error)
    elif isinstance(error, OSError) and error.errno is not None:
        said = os.strerror(error.errno)  # and not its own text, which names a file
    return f"{name}: {said}"
