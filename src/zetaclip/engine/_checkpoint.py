"""Checkpoints: a public file, a private one beside it, and a journal of what was executed since.

The public file holds no per-example value, no clipped sum, no index of a record, and nothing from which noise
or batches could be told: those keys are in ``<path>.private``. Both are written whole or not at all.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
import secrets
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..control import Released
from ..files import replace_file
from ..gradients import rows
from ..ledger import Header, Ledger, Row
from ..ledger._journal import Journal, executed_after, read_all
from ..randomness import Stream, noise_source
from ..randomness._forward import set_users_streams
from ._data_digest import digest_of
from ._guard import FORKED, OrderError
from ._run import Run

_FORMAT = 4


class CheckpointError(ValueError):
    """The file can't be used here; the message says why, and nothing has been changed."""


def save(
    run: Run,
    path: str | os.PathLike[str],
    extra: dict[str, Any] | None = None,
    private: str | os.PathLike[str] | None = None,
) -> None:
    """See ``PrivacyEngine.save``."""
    if run.ranks is None:
        _save(run, Path(path), extra, private, [_own_part(run)])
    else:
        what = f"save() after {run.step_count} updates"
        parts = run.ranks.gather(_own_part(run), what)
        run.ranks.once(lambda: _save(run, Path(path), extra, private, parts), what)


def _own_part(run: Run) -> dict[str, Any]:
    """What each rank has for itself: torch's public streams, and the surroundings that its sums depend on."""
    return {"public_streams": run.standing().public, **_surroundings(run)}


def _surroundings(run: Run) -> dict[str, Any]:
    return {"threads": torch.get_num_threads(), "device": str(run.layout.device)}


def _save(
    run: Run,
    path: Path,
    extra: dict[str, Any] | None,
    private: str | os.PathLike[str] | None,
    parts: list[dict[str, Any]],
) -> None:
    hidden = _private_path(path, private)
    with run.weights.restored():
        public, secret = collect(run, path.parent, extra, parts)
        identity = public["identity"]
        # First the secrets of both the old checkpoint and the new, then the checkpoint, then only the new: a
        # crash in between leaves a checkpoint whose secrets are there.
        kept = read_private(hidden)
        write_private(hidden, {**kept, identity: secret})
        with replace_file(path) as file:
            torch.save(public, file)
        write_private(hidden, {identity: secret})
    run.watch(path.parent)


def home_from(run: Run, folder: Path) -> str:
    """Where the run's home is, as a path from the folder of a checkpoint: a tree of folders can then be moved as a whole.

    A run that was never saved gets its home in that folder: call ``run.watch`` with it when the checkpoint is written.
    """
    here = os.path.realpath(folder)
    return os.path.relpath(here if run.home is None else run.home.path.parent, here)


def collect(
    run: Run,
    folder: Path | None,
    extra: dict[str, Any] | None = None,
    parts: list[dict[str, Any]] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The public and the secret half of a checkpoint; the public one's ``identity`` names the secret that belongs to it.

    Call it inside ``run.weights.restored()``, and keep the two apart wherever they are written. ``folder`` is the one that ``restore``
    will be given; who does not know it yet puts ``home_from`` into the public half later. ``parts`` are what the ranks have for
    themselves; None with one process.
    """
    if not run.sampling.at_home:  # its owner goes on without a journal beside this checkpoint
        raise OrderError(FORKED)
    parts = [_own_part(run)] if parts is None else parts
    where = run.standing()
    public = {
        "zetaclip_checkpoint": _FORMAT,
        "identity": secrets.token_hex(16),
        "module": run.module.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "configuration": configuration(run),
        "control": dataclasses.asdict(run.control),
        "rule": run.rule_state,
        "memory": run.memory,
        "releases": [_plain(released) for released in run.releases],
        "clip_history": list(run.clip_history),
        "counts": {
            "step": run.step_count,
            "batch": run.batch_count,
            "phase": run.phase,
            "position": run.position,
            "tries": where.tries,
        },
        "stream": run.stream,
        "home": None if folder is None else home_from(run, folder),
        "ledger": run.ledger.state_dict(),
        "public_streams": [part["public_streams"] for part in parts],
        "deal": None if run.ranks is None else run.ranks.deal_seed,
        "extra": extra,
    }
    secret = {
        "sampling": where.sampling.hex(),
        "noise": where.noise.hex(),
        "same_batch": None if where.same_batch is None else where.same_batch.hex(),
        "data": _digest(run),
        "threads": [part["threads"] for part in parts],
        "device": [part["device"] for part in parts],
        "ranks": len(parts),
    }
    return public, secret


def load(
    run: Run,
    path: str | os.PathLike[str],
    replay: bool,
    private: str | os.PathLike[str] | None = None,
) -> dict[str, Any] | None:
    """See ``PrivacyEngine.load``. Everything is checked before anything is changed, and on rank 0 for all ranks."""
    path = Path(path)
    noise: list[bytes] = []  # stays on the rank that reads it
    if run.ranks is None:
        found = _read(run, path, replay, private, [_surroundings(run)], noise)
    else:
        parts = run.ranks.gather(_surroundings(run), "load()")
        found = run.ranks.once(lambda: _read(run, path, replay, private, parts, noise), "load()")
    public = _unpack(found.checkpoint, run.layout.device)
    return _take(run, public, path.parent, replay, found, noise)


def restore(
    run: Run, public: dict[str, Any], folder: Path, hidden: Path | None
) -> dict[str, Any] | None:
    """Goes on from the public half of a checkpoint that lies in ``folder``; with the secrets in ``hidden``, exactly.

    For one process, and for frameworks that keep checkpoints their own way. Everything is checked before anything is changed.
    """
    if run.ranks is not None:
        raise CheckpointError(
            "a checkpoint inside another framework's can't be restored on several ranks; use engine.load"
        )
    _check_version(public, "the private state of the checkpoint")
    noise: list[bytes] = []
    found = _examined(run, public, b"", folder, hidden, [_surroundings(run)], noise)
    return _take(run, public, folder, hidden is not None, found, noise)


def _take(
    run: Run, public: dict[str, Any], folder: Path, replay: bool, found: _Found, noise: list[bytes]
) -> dict[str, Any] | None:
    """Puts a checkpoint that was examined into the run."""
    control = _control_state(run, public["control"])
    releases = [Released(**released) for released in public["releases"]]
    saved = Ledger(run.ledger.header)
    saved.load_state_dict(public["ledger"])
    name = public["configuration"]["run"]
    if not found.whole:
        warnings.warn(
            f"{name}.journal is not {_place(public)}, or was begun without it: steps that were executed after the checkpoint, "
            "elsewhere, can't be counted",
            stacklevel=5,
        )
    executed = executed_after([*found.journaled, *run.ledger.rows()], saved)
    saved.header = _joined(run.ledger.header, saved.header)
    saved.merge(executed)
    rank = 0 if run.ranks is None else run.ranks.rank
    home: Journal | None = None
    if rank == 0:  # a disk may be full: before anything is changed
        run.journal_in(folder, name)
        home = run.journal_in(found.home or folder, name)
        if not replay:
            home.adopt(found.stream)

    run.abandon()
    # The ledger first: whatever happens next, nothing that was executed is forgotten.
    run.ledger = saved
    _load_weights(run, public)
    counts = public["counts"]
    # Also of its own rows: a checkpoint that was saved in a replay holds those that the replay had still before it.
    again = [
        row
        for row in saved.rows()
        if replay and row.stream == public["stream"] and row.step >= counts["step"]
    ]
    run.expected = {row.key: row for row in again}
    run.control, run.releases = control, releases
    run.rule_state, run.memory = public["rule"], public["memory"]
    run.clip_history = [tuple(entry) for entry in public["clip_history"]]
    run.step_count, run.batch_count = counts["step"], counts["batch"]
    run.phase, run.position, run.tries = counts["phase"], counts["position"], counts["tries"]
    if rank < len(public["public_streams"]):
        set_users_streams(public["public_streams"][rank], run.layout.device)
    # Together: a replay would ask another home than a stream's own in vain what was drawn from it.
    run.name, run.home = name, home
    run.rekey(
        Stream(found.sampling), Stream(noise[0]) if noise else None, found.stream, found.same_batch
    )
    if run.ranks is not None and public["deal"] is not None:
        run.ranks.take_share(run.records, public["deal"])
    run.resume()
    extra = public["extra"]
    return extra if extra is None else dict(extra)


@dataclasses.dataclass(frozen=True)
class _Found:
    """What lies on the disk, as rank 0 has read and checked it."""

    checkpoint: bytes = dataclasses.field(repr=False)
    home: Path | None  # the folder of the run's home; None if its journal is not there
    whole: bool
    journaled: list[Row]
    sampling: bytes = dataclasses.field(repr=False)
    same_batch: bytes | None = dataclasses.field(repr=False)
    stream: str


def _read(
    run: Run,
    path: Path,
    replay: bool,
    private: str | os.PathLike[str] | None,
    parts: list[dict[str, Any]],
    noise: list[bytes],
) -> _Found:
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}")
    raw = path.read_bytes()
    public = _read_public(raw, path.name, run.layout.device)
    return _examined(
        run,
        public,
        raw,
        path.parent,
        _private_path(path, private) if replay else None,
        parts,
        noise,
    )


def _examined(
    run: Run,
    public: dict[str, Any],
    raw: bytes,
    folder: Path,
    hidden: Path | None,
    parts: list[dict[str, Any]],
    noise: list[bytes],
) -> _Found:
    """What is beside a checkpoint, and whether both can be used here; ``hidden`` is where the secrets of a replay are."""
    _check_fits(run, public)
    _control_state(run, public["control"])
    beside = Journal(folder / public["configuration"]["run"])
    home = _home(public, folder)
    place = home.path.parent if home.path.exists() else None
    if hidden is not None:
        secret = _replayable(run, hidden, public, home, parts)
        same = None if secret["same_batch"] is None else bytes.fromhex(secret["same_batch"])
        noise.append(bytes.fromhex(secret["noise"]))
        sampling, stream = bytes.fromhex(secret["sampling"]), public["stream"]
    else:
        noise.append(Stream.fresh().state)
        sampling, same, stream = Stream.fresh().state, None, secrets.token_hex(8)
    # Where the home is lost the journal beside the checkpoint still tells a part of what was executed.
    return _Found(raw, place, home.whole, read_all([home, beside]), sampling, same, stream)


def _home(public: dict[str, Any], folder: Path) -> Journal:
    """The journal that hears of everything drawn from the checkpoint's stream, wherever its run was saved."""
    return Journal(
        Path(os.path.realpath(folder / (public["home"] or "."))) / public["configuration"]["run"]
    )


def _place(public: dict[str, Any]) -> str:
    """Where the journal at the run's home should be, in words."""
    if public["home"] in (None, os.curdir):
        return "beside the checkpoint"
    return (
        f"in {public['home']} (seen from the checkpoint's folder), which the run was saved in first"
    )


def _control_state(run: Run, saved: dict[str, Any]) -> Any:
    kind = type(run.method.controller.init())
    try:
        return kind(**saved)
    except TypeError:
        raise CheckpointError(
            f"the checkpoint's controller had another kind of state than {described(run.method.controller)}; use the clipping= "
            "that it was saved with"
        ) from None


def _load_weights(run: Run, public: dict[str, Any]) -> None:
    """Module and optimizer together, or neither."""
    before = copy.deepcopy(run.module.state_dict())
    try:
        run.module.load_state_dict(public["module"])
        run.optimizer.load_state_dict(public["optimizer"])
    except Exception as problem:
        run.module.load_state_dict(before)
        raise CheckpointError(f"the checkpoint does not fit: {problem}") from None


def _joined(own: Header, saved: Header) -> Header:
    """This run's terms, where the rows of the saved one take nothing away from them."""
    return dataclasses.replace(
        own,
        claim=own.claim if saved.claims_privacy else saved.claim,
        noise_seed_known=own.noise_seed_known or saved.noise_seed_known,
        notes=tuple(dict.fromkeys((*saved.notes, *own.notes))),
    )


def configuration(run: Run) -> dict[str, Any]:
    """What must be equal for an exact replay, as plain values; schedules are compared by their values."""
    horizon = run.plan.steps or 1000
    multipliers = [
        float(m) if not callable(m) else [float(m(step)) for step in range(horizon)]
        for m in run.plan.noise_multipliers
    ]
    return {
        "run": run.name,
        "settings": dataclasses.asdict(run.settings),
        "method": run.method.name,
        "options": {name: repr(value) for name, value in run.method.chosen.items()},
        "rule": repr(run.method.rule),
        "controller": described(run.method.controller),
        "optimizer": type(run.optimizer).__name__,
        "noise_multipliers": multipliers,
        "parameters": list(run.layout.names),
        "noise_source": noise_source(),
        "rows_source": rows.source(),
    }


def described(controller: Any) -> str:
    """A controller in words, the same in every process."""
    text = repr(controller)
    # The default repr of an object is its address, which says nothing and differs in every process.
    return type(controller).__name__ if " object at 0x" in text else text


def _plain(released: Released) -> dict[str, Any]:
    return {field.name: getattr(released, field.name) for field in dataclasses.fields(released)}


def _unpack(raw: bytes, device: torch.device) -> Any:
    return torch.load(io.BytesIO(raw), map_location=device, weights_only=True)


def _read_public(raw: bytes, name: str, device: torch.device) -> dict[str, Any]:
    try:
        public = _unpack(raw, device)
    except Exception as problem:
        raise CheckpointError(
            f"{name} can't be read as a checkpoint; it is cut off, damaged, or something else ({type(problem).__name__})"
        ) from None
    _check_version(public, name)
    assert isinstance(public, dict)
    return public


def _check_version(public: Any, name: str) -> None:
    if not isinstance(public, dict) or public.get("zetaclip_checkpoint") != _FORMAT:
        raise CheckpointError(f"{name} is not a checkpoint of this version of zetaclip")


def _check_fits(run: Run, public: dict[str, Any]) -> None:
    """The same model, the same method, the same groups of parameters."""
    own, saved = run.module.state_dict(), public["module"]
    if own.keys() != saved.keys():
        differing = sorted(own.keys() ^ saved.keys())[:4]
        raise CheckpointError(
            f"a checkpoint of another model: {', '.join(differing)} is in one of them only"
        )
    for name, value in own.items():
        if isinstance(value, Tensor) and value.shape != saved[name].shape:
            raise CheckpointError(
                f"a checkpoint of another model: {name} is {tuple(saved[name].shape)} there and {tuple(value.shape)} here"
            )
    if public["configuration"]["method"] != run.method.name:
        raise CheckpointError(
            f"the checkpoint was made with method {public['configuration']['method']!r}, this run has {run.method.name!r}"
        )
    there = [len(group["params"]) for group in public["optimizer"]["param_groups"]]
    here = [len(group["params"]) for group in run.optimizer.param_groups]
    if there != here:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {there} parameters, this one of {here}"
        )


def _replayable(
    run: Run, hidden: Path, public: dict[str, Any], home: Journal, parts: list[dict[str, Any]]
) -> dict[str, Any]:
    """The secrets of this checkpoint, if a replay would be exact; otherwise an error that names what differs."""
    if public["home"] is None or not home.covers(public["stream"]):
        raise CheckpointError(
            f"replay=True needs the run's journal {home.path.name} {_place(public)}: without it nobody can tell whether what is "
            "replayed is what was released before. load(path) goes on with fresh streams"
        )
    secret = read_private(hidden).get(public["identity"])
    if secret is None:
        raise CheckpointError(
            f"replay=True needs {hidden.name}, the secret streams that were saved with this checkpoint; it is missing or "
            "belongs to another one. load(path) goes on with fresh streams"
        )
    here = {
        **configuration(run),
        "data": _digest(run),
        "ranks": len(parts),
        "threads": [part["threads"] for part in parts],
        "device": [part["device"] for part in parts],
    }
    there = {
        **public["configuration"],
        **{name: secret[name] for name in ("data", "threads", "device", "ranks")},
    }
    differing = [name for name in here if name != "run" and here[name] != there.get(name)]
    if "ranks" in differing:  # then there are other lists of threads and devices, too
        differing = [name for name in differing if name not in ("threads", "device")]
    if differing:
        changes = "; ".join(
            # A digest of records can be looked up by whoever guesses them, and a terminal is often a log that others read.
            "data (other records, or in another order)"
            if name == "data"
            else f"{name} ({_short(there.get(name))} there, {_short(here[name])} here)"
            for name in differing
        )
        raise CheckpointError(
            f"an exact replay is not possible, because something else is different now: {changes}. The same noise on another "
            "sum would cancel by subtraction. load(path) goes on with fresh streams"
        )
    if not home.at_home(public["stream"]):
        raise CheckpointError(
            f"the folder looks like a copy: {home.path.name} {_place(public)} is not the file that the run began (its inode is another; a mounted "
            "bucket or drive may also number its files anew). What the run did in the original folder after it was copied, or will do, "
            "is not noted here, so a replay could put the same noise on another sum, and it would cancel by subtraction. Replay in the original folder (renaming it is fine), or go on "
            f"with fresh streams: load(path), or a framework's resume without {hidden.name}"
        )
    return secret


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _private_path(path: Path, private: str | os.PathLike[str] | None) -> Path:
    return path.with_name(path.name + ".private") if private is None else Path(private)


def read_private(hidden: Path) -> dict[str, Any]:
    try:
        values = json.loads(hidden.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def write_private(hidden: Path, values: dict[str, Any]) -> None:
    with replace_file(hidden, mode=0o600) as file:
        file.write(json.dumps(values).encode())


def _digest(run: Run) -> str:
    """Of the run's data, computed once."""
    if run.data_digest is None:
        run.data_digest = digest_of(run.dataset)
    return run.data_digest
