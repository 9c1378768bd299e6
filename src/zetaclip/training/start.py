"""The start and the end of a run: checks of its folder, setup, and cleanup after a failure."""

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
from ..errors import AccountingError, ConfigError, LedgerError, NoGuarantee
from . import description
from .config import Config
from .fixed import applied, frozen
from .folder import FolderError, RunFolder, Status
from .loop import Training
from .progress import Display
from .ranks import Leader, follow
from .recipe import build_method, build_model, check_choices, resolve
from .records import load_data
from .signals import Interrupted
from .steps import PlainSteps, PrivateSteps, Steps

_IN_MEMORY = "data in memory"  # what config.json says about data that were passed to ``train``


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
    data: Any = None,
) -> dict[str, Any]:
    """Trains what ``config`` says into the folder ``out``.

    Args:
        config: The settings.
        out: The run folder.
        resume: Continue an interrupted run exactly where it stopped, with the same secret random
            streams. It is an error if there is none.
        rekey: With ``resume``, use new random streams. Executed steps stay in the ledger.
        force: Delete a run that the folder contains.
        keep_state: Keep the secret resume state of the finished run.
        display: Where progress is printed; default: nowhere.
        series: Called with ("metrics" | "probe" | "clip", line), for logging elsewhere.
        begun: Called once the folder can be read.
        data: The training data, instead of what ``config.data`` names: a ``zetaclip.data.Dataset``,
            or a table in memory such as a pandas DataFrame, read as ``zetaclip.data.load`` reads
            it. To resume such a run, pass the same data.

    Returns:
        The content of ``result.json``; on ranks other than 0 an empty dict.

    Raises:
        ConfigError: A setting can't be used.
        FolderError: The folder can't be used.
        Interrupted: The run was asked to stop and has saved.

    **Guarantee.** Apart from how long things took, the folder reveals no more about the training
    records than the ledger says, unless ``non_private_diagnostics`` is set; then the result says
    so. Held-out metrics are about held-out records, which ε does not cover.

    **Edge cases.** ``resume`` returns the result of a finished folder; otherwise such a folder is
    an error. A start that fails before anything was executed leaves no files behind, so the folder
    can be used again.
    """
    others = ranks()
    if others is not None and not others.first:
        return follow(others)
    folder, leader = RunFolder(out), Leader(others)
    if data is not None:
        config = config.changed(data=_IN_MEMORY)
    try:
        if data is not None and others is not None:
            raise ConfigError("data in memory can't be trained on by several ranks; write a file")
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
                data,
            )
    except BaseException as error:
        leader.stop(error)
        raise


def _check_free(folder: RunFolder, resume: bool, force: bool) -> None:
    """Checks that the folder is free for a new run, or has one to resume."""
    if folder.finished and not force:
        raise FolderError(
            f"{folder.path} holds a finished run; choose another --out, or --force to replace it"
        )
    if folder.begun and not resume and not force:
        raise FolderError(
            f"{folder.path} holds a run that is not finished: --resume continues it, --force"
            " deletes it"
        )
    if resume and not folder.begun:
        # Most likely a wrong name: a new run would not be what was asked for.
        raise FolderError(
            f"nothing to resume in {folder.path}; leave --resume out to start a run there"
        )
    if resume and not folder.executed and (folder / "metrics.jsonl").exists():
        raise FolderError(
            f"{folder.path}: checkpoint/ is missing, so it is unknown which steps were executed."
            " Start a new run in another folder"
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
    data: Any,
) -> dict[str, Any]:
    started = time.perf_counter()
    check_device(config.device)
    method = build_method(config)
    check_choices(config, method)
    display.say(f"loading {config.data}")
    dataset = load_data(config, data)
    config = resolve(config, dataset, method, say=display.say)
    method = build_method(config)
    if leader.ranks is not None and not method.private:
        raise ConfigError(
            f"method {config.method!r} is not private, and only private methods train on several"
            " ranks. Train it in one process"
        )
    if config.threads is None:
        config = config.changed(threads=torch.get_num_threads())
    if going_on:
        _same_config(folder, config, allow_threads=rekey)
    if config.seed is None:
        torch.seed()
    else:
        torch.manual_seed(config.seed)
    fixed = frozen(config, dataset, display.say)
    model = build_model(config, dataset, fixed)
    replaced = not going_on and folder.begun
    before = folder.listed()
    try:
        folder.create(_needed_bytes(model))
    except FolderError:
        folder.undo(before)
        raise
    with folder.lock():
        if replaced:  # not before the lock: another process may be training there
            folder.clear()
            before &= folder.listed()
        status = Status(folder)
        with _failures_noted(folder, status, None if going_on else before):
            folder.write_text("config.json", config.to_json())
            if not going_on:
                folder.note_directory()
            status.write(state="running", message="setting up")
            if begun is not None:
                begun()
            display.say(
                "finding the noise" if method.private and config.sigma is None else "setting up"
            )
            leader.start(config, folder.path, going_on and folder.executed, rekey)
            if fixed is not None:
                dataset = applied(fixed, dataset, display)
            description.write(folder, config, dataset)
            kind = PrivateSteps if method.private else PlainSteps
            try:
                steps: Steps = kind(config, dataset, method, model)
            except (ValueError, AccountingError) as error:
                raise ConfigError(str(error)) from error
            if isinstance(steps, PrivateSteps) and steps.warning is not None:
                display.say(f"warning: {steps.warning}")
            run = Training(config, dataset, steps, folder, status, display, series)
            if going_on and folder.executed:
                run.restore(rekey)
            run.seconds["setup"] += time.perf_counter() - started
            try:
                result = run.train()
            except Interrupted as stop:
                with suppress(OSError):  # the checkpoint has been written
                    stop.left = run.leave()
                status.write(state="stopped", message=f"stopped by {stop}", **run.standing())
                raise
            if not keep_state:
                folder.drop_state()
            status.write(state="finished", message="", **run.standing())
    return result


@contextmanager
def _failures_noted(folder: RunFolder, status: Status, before: set[Path] | None) -> Iterator[None]:
    """Notes a failure in the status, or removes the files of a start that executed nothing.

    Otherwise the next start would find an unfinished run, and resuming it would fail again.
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
    """An error for files that can't be written, most often because the disk is full."""
    reason = error.strerror or str(error)
    if folder.begun:
        return FolderError(
            f"{folder.path}: the run's files can't be written ({reason}); the last good state is"
            f" kept. Free some space and continue with: {folder.resume_command}"
        )
    return FolderError(
        f"cannot write to {folder.path}: {reason}. Free some space, or choose another --out"
    )


def _needed_bytes(model: nn.Module) -> int:
    """The size of a run: two checkpoints with two moments each, the average, weights and logs."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return 10 * size + 16 * 2**20


def check_device(name: str) -> None:
    """Checks that this machine can compute on the device.

    Raises:
        ConfigError: It can't; the message lists the devices that can be used.
    """
    try:
        torch.zeros(1, device=name).item()
    # torch raises different kinds of error for unknown names and for missing or full cards.
    except Exception as error:
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
    """Checks that the settings are those of the folder's run; a setting left open fits."""
    saved = json.loads((folder / "config.json").read_text())
    differing = [
        f"{name} ({saved.get(name)!r} there, {value!r} here)"
        for name, value in asdict(config).items()
        if value is not None
        and value != {}
        and (name, value) != ("features", "auto")
        and saved.get(name) != value
        and not (name == "threads" and allow_threads)
        and not (name == "features" and value == "auto")
    ]
    if differing:
        raise FolderError(
            f"{folder.path} is a run with another configuration: {'; '.join(differing)}. Resume it"
            " with its own settings (--out and --resume are enough), or start a new run elsewhere"
        )


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """Sets torch's number of threads for this run, if one is given."""
    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# These are about settings, the run's folder and the ledger. The text of any other error may be
# about records: a batch's size, a label, the path of an image, or the digest of the data.
_ABOUT_NO_RECORD = (AccountingError, ConfigError, FolderError, LedgerError, NoGuarantee)


def _note_failure(status: Status, error: BaseException) -> None:
    with suppress(OSError):  # often the disk is full; the first error matters more
        status.write(state="failed", message=_public_words(error)[:500])


def _public_words(error: BaseException) -> str:
    """The text of an error that may be written to a public file.

    An error that was raised from another one is only as public as that one.
    """
    name, said = type(error).__name__, "the message was printed on the terminal of the run"
    repeats = error.__cause__
    if isinstance(error, _ABOUT_NO_RECORD) and isinstance(
        repeats, (*_ABOUT_NO_RECORD, OSError, type(None))
    ):
        said = str(error)
    elif isinstance(error, OSError) and error.errno is not None:
        said = os.strerror(error.errno)  # its own text names a file
    return f"{name}: {said}"
