"""Saving and loading: which files are written in which order, and what is changed when."""

from __future__ import annotations

import copy
import io
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from ...files import replace_file
from ...ledger import Ledger
from ...ledger._journal import Journal, executed_after
from ...randomness._forward import set_users_streams
from .._loop import PrivateLoop
from ._errors import CheckpointError, Remedy
from ._format import check_version, collect, joined, own_part, state_from, surroundings
from ._replay import Found, examined, place_of_home
from ._secrets import private_path, read_private, write_private
from ._shards import own_states, whole_states


def save(
    loop: PrivateLoop,
    path: str | os.PathLike[str],
    extra: dict[str, Any] | None = None,
    private: str | os.PathLike[str] | None = None,
) -> None:
    """See ``PrivacyEngine.save``.

    Args:
        loop: The run.
        path: Where the public file goes.
        extra: The user's own values, kept in it.
        private: Where the secret file goes, if not beside it.
    """
    what = f"save() after {loop.state.step} updates"
    parts = loop.group.gather(own_part(loop), what)
    states = whole_states(loop)
    loop.group.once(lambda: _save(loop, Path(path), extra, private, parts, states), what)


def _save(
    loop: PrivateLoop,
    path: Path,
    extra: dict[str, Any] | None,
    private: str | os.PathLike[str] | None,
    parts: list[dict[str, Any]],
    states: tuple[Any, Any] | None,
) -> None:
    hidden = private_path(path, private)
    with loop.model.weights.restored():
        public, secret = collect(loop, path.parent, extra, parts, states)
        identity = public["identity"]
        # First the secrets of both the old checkpoint and the new, then the checkpoint, then only
        # the new: a crash in between leaves a checkpoint whose secrets are there.
        kept = read_private(hidden)
        write_private(hidden, {**kept, identity: secret})
        with replace_file(path) as file:
            torch.save(public, file)
        write_private(hidden, {identity: secret})
    loop.log.watch(path.parent)


def load(
    loop: PrivateLoop,
    path: str | os.PathLike[str],
    replay: bool,
    private: str | os.PathLike[str] | None = None,
) -> dict[str, Any] | None:
    """See ``PrivacyEngine.load``.

    Everything is checked before anything is changed, by the first process for all.

    Args:
        loop: The run.
        path: The public file.
        replay: Whether the same batches and noise come again.
        private: The secret file, if it is not beside the public one.

    Returns:
        The user's own values.
    """
    path = Path(path)
    hidden = private_path(path, private)
    noise: list[bytes] = []  # stays on the process that reads it, unless each rank draws noise
    parts = loop.group.gather(surroundings(loop), "load()")
    found = loop.group.once(lambda: _read(loop, path, hidden, replay, parts, noise), "load()")
    public = _unpack(found.checkpoint, loop.model.layout.device)
    if loop.model.sharding is not None:
        noise = loop.group.once(lambda: noise, "load()")
    return _take(loop, public, path.parent, replay, found, noise)


def restore(
    loop: PrivateLoop, public: dict[str, Any], folder: Path, hidden: Path | None
) -> dict[str, Any] | None:
    """Continues from the public part of a checkpoint.

    It is for frameworks that keep that part in their own file, and for one process. Everything is
    checked before anything is changed.

    Args:
        loop: The run.
        public: The public part of the checkpoint.
        folder: The checkpoint's folder, where journals are looked for.
        hidden: The secret file, for an exact replay; None for fresh streams.

    Returns:
        The user's own values.

    Raises:
        CheckpointError: The checkpoint does not fit this run, or there are several processes.
    """
    if loop.group.count > 1:
        raise CheckpointError(
            "a checkpoint inside another framework's can't be restored on several ranks; use "
            "engine.load"
        )
    check_version(public, "the private state of the checkpoint")
    noise: list[bytes] = []
    replay = hidden is not None
    found = examined(loop, public, b"", folder, hidden, replay, [surroundings(loop)], noise)
    return _take(loop, public, folder, replay, found, noise)


def _read(
    loop: PrivateLoop,
    path: Path,
    hidden: Path,
    replay: bool,
    parts: list[dict[str, Any]],
    noise: list[bytes],
) -> Found:
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}")
    raw = path.read_bytes()
    try:
        public = _unpack(raw, loop.model.layout.device)
    except Exception as problem:
        raise CheckpointError(
            f"{path.name} can't be read as a checkpoint; it is cut off, damaged, or something else "
            f"({type(problem).__name__})",
            Remedy.NOTHING,
        ) from None
    check_version(public, path.name)
    return examined(loop, public, raw, path.parent, hidden, replay, parts, noise)


def _unpack(raw: bytes, device: torch.device) -> Any:
    return torch.load(io.BytesIO(raw), map_location=device, weights_only=True)


def _take(
    loop: PrivateLoop,
    public: dict[str, Any],
    folder: Path,
    replay: bool,
    found: Found,
    noise: list[bytes],
) -> dict[str, Any] | None:
    """Puts a checkpoint that was examined into the run."""
    log, rank = loop.log, loop.group.rank
    state = state_from(loop, public, found.keys, noise[0] if noise else None)
    ledger = Ledger(log.ledger.header)
    ledger.load_state_dict(public["ledger"])
    name = public["configuration"]["run"]
    if not found.whole:
        warnings.warn(
            f"{name}.journal is not {place_of_home(public)}, or was begun without it: steps that "
            "were executed after the checkpoint, elsewhere, can't be counted",
            stacklevel=4,
        )
    executed = executed_after([*found.journaled, *log.ledger.rows()], ledger)
    if not found.compared:
        log.note("the units of earlier steps could not be compared with those of later ones")
    ledger.header = joined(log.ledger.header, ledger.header)
    ledger.merge(executed)
    home: Journal | None = None
    if loop.group.first:  # a disk may be full: before anything is changed
        log.journal_in(folder, name)
        home = log.journal_in(found.home or folder, name)
        if not replay:
            home.adopt(found.keys.stream)

    loop.abandon()
    # The ledger first: whatever happens next, nothing that was executed is forgotten.
    log.ledger = ledger
    _load_weights(loop, public)
    # Also of its own rows: a checkpoint that was saved in a replay holds those that the replay had
    # still before it.
    again = [
        row
        for row in ledger.rows()
        if replay and row.stream == public["stream"] and row.step >= state.step
    ]
    log.go_on_as(name, home, again)
    if rank < len(public["public_streams"]):
        set_users_streams(public["public_streams"][rank], loop.model.layout.device)
    loop.group.take_share(loop.batches.units.count, public["deal"])
    loop.go_on(state)
    extra = public["extra"]
    return extra if extra is None else dict(extra)


def _load_weights(loop: PrivateLoop, public: dict[str, Any]) -> None:
    """Module and optimizer together, or neither."""
    module = loop.model.module
    before = copy.deepcopy(module.state_dict())
    try:
        weights, states = own_states(loop, public)
        module.load_state_dict(weights)
        loop.update.optimizer.load_state_dict(states)
    except Exception as problem:
        module.load_state_dict(before)
        raise CheckpointError(f"the checkpoint does not fit: {problem}") from None
