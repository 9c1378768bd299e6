"""What a checkpoint holds: from a run to plain values, and back."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...control import Released
from ...ledger import Header
from .._configuration import described
from .._loop import PrivateLoop
from .._state import RunState
from ._errors import CheckpointError

_FORMAT = 4


def own_part(loop: PrivateLoop) -> dict[str, Any]:
    """What differs between processes: torch's public streams, and settings that change sums."""
    return {"public_streams": loop.public_streams(), **surroundings(loop)}


def surroundings(loop: PrivateLoop) -> dict[str, Any]:
    return {"threads": torch.get_num_threads(), "device": str(loop.model.layout.device)}


def collect(
    loop: PrivateLoop,
    folder: Path | None,
    extra: dict[str, Any] | None = None,
    parts: list[dict[str, Any]] | None = None,
    states: tuple[Any, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The public and the secret half of a checkpoint.

    Call it inside ``loop.model.weights.restored()``.

    Args:
        loop: the run, whether a batch is out or not.
        folder: the one that ``restore`` will be given; who does not know it yet puts
            ``loop.log.home_from`` into the public half later.
        extra: the user's own values.
        parts: what the processes have for themselves; None with one process.
        states: of module and optimizer, where the ranks have put them together.

    Returns:
        Both halves, to be kept apart wherever they are written. The public one's ``identity``
        names the secret that belongs to it.
    """
    loop.check_home()  # the owner would continue without a journal beside it
    if states is None:
        if loop.model.sharding is not None:
            raise CheckpointError(
                "parameters that are spread over ranks (fully_shard) are saved by engine.save, "
                "which every rank calls, and not inside another framework's checkpoint"
            )
        states = loop.model.module.state_dict(), loop.update.optimizer.state_dict()
    parts = [own_part(loop)] if parts is None else parts
    state, log = loop.state, loop.log
    public = {
        "zetaclip_checkpoint": _FORMAT,
        "identity": secrets.token_hex(16),
        "module": states[0],
        "optimizer": states[1],
        "configuration": loop.configuration(),
        "control": dataclasses.asdict(state.control),
        "rule": state.rule,
        "memory": state.memory,
        "releases": [
            {field.name: getattr(released, field.name) for field in dataclasses.fields(released)}
            for released in state.releases
        ],
        "clip_history": list(state.clip_history),
        "counts": {
            "step": state.step,
            "batch": state.batch,
            "phase": state.phase,
            "position": state.position,
            "tries": state.tries,
        },
        "stream": state.stream,
        "home": None if folder is None else log.home_from(folder),
        "ledger": log.ledger.state_dict(),
        "public_streams": [part["public_streams"] for part in parts],
        "deal": loop.group.deal_seed,
        "extra": extra,
    }
    secret = {
        "sampling": state.sampling.hex(),
        "noise": b"".hex() if state.noise is None else state.noise.hex(),
        "same_batch": None if state.same_batch is None else state.same_batch.hex(),
        "data": loop.batches.digest(),
        "owners": loop.batches.units.digest(),
        "threads": [part["threads"] for part in parts],
        "device": [part["device"] for part in parts],
        "ranks": len(parts),
    }
    return public, secret


@dataclasses.dataclass(frozen=True)
class Keys:
    """The secret streams that a run continues with, and their public name."""

    sampling: bytes = dataclasses.field(repr=False)
    same_batch: bytes | None = dataclasses.field(repr=False)
    stream: str


def state_from(
    loop: PrivateLoop, public: dict[str, Any], keys: Keys, noise: bytes | None
) -> RunState:
    """The state that a checkpoint holds, with these streams."""
    counts = public["counts"]
    return RunState(
        sampling=keys.sampling,
        noise=noise,
        stream=keys.stream,
        control=control_state(loop, public["control"]),
        same_batch=keys.same_batch,
        rule=public["rule"],
        memory=public["memory"],
        releases=tuple(Released(**released) for released in public["releases"]),
        clip_history=[tuple(entry) for entry in public["clip_history"]],
        **{name: counts[name] for name in ("step", "batch", "phase", "position", "tries")},
    )


def control_state(loop: PrivateLoop, saved: dict[str, Any]) -> Any:
    """The controller's state."""
    kind = type(loop.method.controller.init())
    try:
        return kind(**saved)
    except TypeError:
        raise CheckpointError(
            "the checkpoint's controller had another kind of state than "
            f"{described(loop.method.controller)}; use the clipping= that it was saved with"
        ) from None


def check_version(public: Any, name: str) -> None:
    """It is a checkpoint, of this version."""
    if not isinstance(public, dict) or public.get("zetaclip_checkpoint") != _FORMAT:
        raise CheckpointError(f"{name} is not a checkpoint of this version of zetaclip")


def check_fits(loop: PrivateLoop, public: dict[str, Any]) -> None:
    """The same model, the same method, the same groups of parameters."""
    own, saved = loop.model.module.state_dict(), public["module"]
    if own.keys() != saved.keys():
        differing = sorted(own.keys() ^ saved.keys())[:4]
        raise CheckpointError(
            f"a checkpoint of another model: {', '.join(differing)} is in one of them only"
        )
    for name, value in own.items():
        if isinstance(value, Tensor) and value.shape != saved[name].shape:
            raise CheckpointError(
                f"a checkpoint of another model: {name} is {tuple(saved[name].shape)} there and "
                f"{tuple(value.shape)} here"
            )
    method = public["configuration"]["method"]
    if method != loop.method.name:
        raise CheckpointError(
            f"the checkpoint was made with method {method!r}, this run has {loop.method.name!r}"
        )
    there = [len(group["params"]) for group in public["optimizer"]["param_groups"]]
    here = [len(group["params"]) for group in loop.update.optimizer.param_groups]
    if there != here:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {there} parameters, this one of {here}"
        )


def joined(own: Header, saved: Header) -> Header:
    """This run's terms, where the rows of the saved one take nothing away from them.

    Raises:
        CheckpointError: One protects records and the other units of several rows: no ε holds for
            both together.
    """
    before, now = (header.adjacency.split(" (")[0] for header in (saved, own))
    if before != now:
        raise CheckpointError(
            f"what was released so far is private for {before!r}, but this run is for {now!r}, so "
            "one ledger can't tell an ε for both: go on with the same units= as before"
        )
    return dataclasses.replace(
        own,
        claim=own.claim if saved.claims_privacy else saved.claim,
        noise_seed_known=own.noise_seed_known or saved.noise_seed_known,
        notes=tuple(dict.fromkeys((*saved.notes, *own.notes))),
    )
