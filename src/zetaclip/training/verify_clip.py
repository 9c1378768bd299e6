"""Checks the path of C in a run folder: probes, changes, and the sums of the ledger."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..errors import LedgerError
from .config import Config
from .folder import RunFolder
from .probes import clip_figures, clip_lines_every, clip_path, probe_summary

# Accountants are deterministic, but the last digits may differ between versions of libraries.
_SLACK = 1e-6


def close(a: float | None, b: float | None) -> bool:
    """Whether two numbers are equal but for their last digits; None equals only None."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=_SLACK, abs_tol=1e-12)


def check_probes(folder: RunFolder, result: dict[str, Any], config: Config) -> list[str]:
    """Fits every tail again from its eigenvalues, and recomputes C with a new controller.

    Args:
        folder: The run folder.
        result: The content of result.json.
        config: The settings.

    Returns:
        A sentence per problem.
    """
    import torch

    from ..spectrum import Reading, fit_tail
    from .clipping import build_spectral

    lines = folder.read_lines("probes.jsonl")
    if not lines:
        return []
    controller = build_spectral(config)
    state = controller.init()
    k = getattr(controller.probe, "k", None)
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            spectra = {
                n: torch.tensor(v["eigenvalues"], dtype=torch.float64)
                for n, v in line["layers"].items()
            }
            shapes = {
                n: (int(v["shape"][0]), int(v["shape"][1])) for n, v in line["layers"].items()
            }
            fits = {n: fit_tail(spectra[n], controller.fit, k, shapes[n]) for n in spectra}
            for name, fit in fits.items():
                said = line["layers"][name]["zeta"]
                if fit.ok and not close(said, fit.zeta):
                    problems.append(
                        f"probe {number}: ζ of {name} is {fit.zeta:.6g} by its eigenvalues, not"
                        f" {said}"
                    )
            state = controller.update(Reading(line["step"], fits, shapes, spectra), state)
            if not close(line["clip"], state.clip):
                problems.append(
                    f"probe {number}: C should be {state.clip:.6g} and is {line['clip']}"
                )
                state = dataclasses.replace(state, clip=line["clip"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            return [*problems, f"probes.jsonl, line {number}, can't be used: {error!r}"]
    try:
        if result.get("probes") != probe_summary(lines):
            problems.append("the summary of the probes in result.json differs from probes.jsonl")
    except (KeyError, TypeError) as error:
        problems.append(f"probes.jsonl can't be summarised: {error!r}")
    return problems + _used(folder, result, lines)


def _used(folder: RunFolder, result: dict[str, Any], lines: list[dict[str, Any]]) -> list[str]:
    """Checks that the ledger's noise was scaled by the C of the probes."""
    from ..ledger import Ledger

    try:
        rows = list(Ledger.from_jsonl(folder / "ledger.jsonl").rows())
    except (FileNotFoundError, LedgerError):
        return []  # already reported
    clips = clip_path(lines[0]["clip_before"], lines, int(result.get("steps", 0)))
    first = clips[0] if clips else 1.0
    unit = next((row.clip / first for row in rows if row.step == 0), 1.0)  # of the clip rule, per C
    for row in rows:
        if (
            "sum" in row.query
            and row.step < len(clips)
            and not close(row.clip, unit * clips[row.step])
        ):
            return [
                f"step {row.step}: the ledger has clip {row.clip:.6g}, the probes C ="
                f" {clips[row.step]:.6g}"
            ]
    return []


def check_clip(folder: RunFolder, result: dict[str, Any]) -> list[str]:
    """Checks what result.json says about C against the lines that record its changes.

    A long run does not keep all changes; then nothing is checked.
    """
    said = result.get("clip")
    if said is None:
        return []
    probes, lines = folder.read_lines("probes.jsonl"), folder.read_lines("clips.jsonl")
    if lines and clip_lines_every(int(result.get("planned_steps") or 0)) > 1:
        return []
    try:
        first = probes[0]["clip_before"] if probes else said["initial"]
        changes = probes or lines
        wanted = {
            "initial": first,
            "final": changes[-1]["clip"] if changes else first,
            **clip_figures(clip_path(first, changes, int(result["steps"])), probes),
        }
        differing = [name for name, value in wanted.items() if not close(said[name], value)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return [f"what result.json says about C can't be checked: {error!r}"]
    return [
        f"C: result.json says {said[name]} ({name}), the lines that change it give {wanted[name]}"
        for name in differing
    ] + _clipped(folder, clip_path(first, changes, int(result["steps"])))


def _clipped(folder: RunFolder, clips: list[float]) -> list[str]:
    """Checks that every sum was clipped at the C of its update.

    A rule that divides by C has one bound for all sums.
    """
    from ..ledger import Ledger

    try:
        every = Ledger.from_jsonl(folder / "ledger.jsonl").rows()
        rows = [row for row in every if ": " not in row.query]
    except (FileNotFoundError, LedgerError):
        return []  # reported already
    if not rows or not clips:
        return []
    if not close(rows[0].clip, clips[0]):
        return [
            f"C: the run began at {clips[0]:.6g}, and its first sum was clipped at"
            f" {rows[0].clip:.6g}"
        ]
    if all(row.clip == rows[0].clip for row in rows):
        return []
    for row in rows:
        if row.step < len(clips) and not close(row.clip, clips[row.step]):
            return [
                f"step {row.step}: C was {clips[row.step]:.6g}, and the sum was clipped at"
                f" {row.clip:.6g}"
            ]
    return []
