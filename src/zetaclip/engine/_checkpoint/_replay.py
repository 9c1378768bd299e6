"""What lies beside a checkpoint, and whether an exact replay is possible."""

from __future__ import annotations

import dataclasses
import os
import secrets
from pathlib import Path
from typing import Any

from ...ledger import Row
from ...ledger._journal import Journal, read_all
from ...randomness import Stream
from .._loop import PrivateLoop
from ._errors import CheckpointError, Remedy
from ._format import Keys, check_fits, control_state
from ._secrets import read_private


@dataclasses.dataclass(frozen=True)
class Found:
    """What lies on the disk, as the first process has read and checked it.

    It is sent to all; the noise is not in it.
    """

    checkpoint: bytes = dataclasses.field(repr=False)
    home: Path | None  # the folder of the run's home; None if its journal is not there
    whole: bool
    journaled: list[Row]
    keys: Keys
    compared: bool  # whether units, if there are any, could be compared


def examined(
    loop: PrivateLoop,
    public: dict[str, Any],
    raw: bytes,
    folder: Path,
    hidden: Path | None,
    replay: bool,
    parts: list[dict[str, Any]],
    noise: list[bytes],
) -> Found:
    """Whether a checkpoint, and what is beside it, can be used here.

    Args:
        loop: the run that is to continue from it.
        public: its public half.
        raw: the same, as bytes.
        folder: where it lies.
        hidden: where the secrets are, if they are there.
        replay: whether to continue their streams.
        parts: the surroundings of all processes.
        noise: gets the key of the noise stream, which stays on this process.

    Raises:
        CheckpointError: it can't; nothing has been changed.
    """
    check_fits(loop, public)
    control_state(loop, public["control"])
    beside = Journal(folder / public["configuration"]["run"])
    home = Journal(
        Path(os.path.realpath(folder / (public["home"] or "."))) / public["configuration"]["run"]
    )
    place = home.path.parent if home.path.exists() else None
    compared = True
    if replay:
        assert hidden is not None
        secret = _replayable(loop, hidden, public, home, parts)
        same = None if secret["same_batch"] is None else bytes.fromhex(secret["same_batch"])
        noise.append(bytes.fromhex(secret["noise"]))
        keys = Keys(bytes.fromhex(secret["sampling"]), same, public["stream"])
    else:
        compared = _same_owners(loop, public, hidden)
        noise.append(Stream.fresh().state)
        keys = Keys(Stream.fresh().state, None, secrets.token_hex(8))
    # Where the home is lost the journal beside the checkpoint still tells a part of what was
    # executed.
    return Found(raw, place, home.whole, read_all([home, beside]), keys, compared)


def _same_owners(loop: PrivateLoop, public: dict[str, Any], hidden: Path | None) -> bool:
    """Whether units could be compared; other ones for the same number of rows are refused.

    A ledger adds up what one unit has lost. Where rows change hands between two parts of a run,
    that sum is nobody's.

    **Edge cases.** The digest of the owners is secret, as the records are. So without the private
    file nothing is compared, and the ledger says so. Other rows (new ones, say) have other owners,
    and that is the user's to judge.
    """
    own = loop.batches.units.digest()
    if not own:
        return True
    secret = read_private(hidden).get(public["identity"], {}) if hidden is not None else {}
    there = secret.get("owners", "")
    if not there:
        return False
    if there.partition(":")[0] == own.partition(":")[0] and there != own:
        raise CheckpointError(
            "units= gives the rows to other units than in the run that was saved: what one unit "
            "has lost in both parts could not be added up. Give the ids of that run"
        )
    return True


def place_of_home(public: dict[str, Any]) -> str:
    """Where the journal at the run's home should be, in words."""
    if public["home"] in (None, os.curdir):
        return "beside the checkpoint"
    return (
        f"in {public['home']} (seen from the checkpoint's folder), which the run was saved in first"
    )


def _replayable(
    loop: PrivateLoop,
    hidden: Path,
    public: dict[str, Any],
    home: Journal,
    parts: list[dict[str, Any]],
) -> dict[str, Any]:
    """The secrets of this checkpoint, if a replay would be exact.

    Otherwise an error that names what differs.
    """
    place = place_of_home(public)
    if public["home"] is None or not home.covers(public["stream"]):
        raise CheckpointError(
            f"an exact replay needs the run's journal {home.path.name} {place}: without it nobody "
            "can tell whether what is replayed is what was released before",
            Remedy.FRESH_STREAMS,
        )
    secret = read_private(hidden).get(public["identity"])
    if secret is None:
        raise CheckpointError(
            f"an exact replay needs {hidden.name}, the secret streams that were saved with this "
            "checkpoint; it is missing or belongs to another one",
            Remedy.FRESH_STREAMS,
        )
    changes = _changes(loop, public, secret, parts)
    if changes:
        raise CheckpointError(
            f"an exact replay is not possible, because something else is different now: {changes}. "
            "Two sums with the same noise would reveal their difference",
            Remedy.FRESH_STREAMS,
        )
    if not home.at_home(public["stream"]):
        raise CheckpointError(
            f"the folder looks like a copy: {home.path.name} {place} is not the file that the run "
            "began (its inode is another; a mounted bucket or drive may also number its files "
            "anew). What the run did in the original folder after it was copied, or will do, is "
            "not noted here, so a replay could put the same noise on another sum, which would "
            "reveal their difference. Replay in the original folder (renaming it is fine)",
            Remedy.FRESH_STREAMS,
            ", or go on with fresh streams: load(path), or a framework's resume without "
            f"{hidden.name}",
        )
    return secret


def _changes(
    loop: PrivateLoop, public: dict[str, Any], secret: dict[str, Any], parts: list[dict[str, Any]]
) -> str:
    """What differs from the run that was saved; empty if nothing does."""
    here = {
        **loop.configuration(),
        "data": loop.batches.digest(),
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
    return "; ".join(
        # A digest of records can be looked up by whoever guesses them, and a terminal is often a
        # log that others read.
        "data (other records, or in another order)"
        if name == "data"
        else f"{name} ({_short(there.get(name))} there, {_short(here[name])} here)"
        for name in differing
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
