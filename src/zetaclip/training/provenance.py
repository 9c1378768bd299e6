"""Where a result comes from: files and their digests, versions, the commit."""

from __future__ import annotations

import hashlib
import json
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .folder import finite

# Files whose digests are in result.json.
SEALED = (
    "config.json",
    "model.json",
    "metrics.jsonl",
    "probes.jsonl",
    "clips.jsonl",
    "ledger.jsonl",
    "model.safetensors",
)


def seal(result: dict[str, Any]) -> str:
    """A digest of everything else in result.json.

    It reveals an edited line. It does not stop a forger, who would compute a new one.
    """
    whole = finite({name: value for name, value in result.items() if name != "seal"})
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that results depend on."""
    import platform

    found = {"python": platform.python_version()}
    for name in ("zetaclip", "torch", "numpy", "scipy", "opacus", "dp-accounting"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str | None:
    """The commit of the source tree that is running; "+" marks uncommitted changes of the package.

    None if the package does not run from its own repository.
    """
    package = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        command = ["git", "-C", str(package), *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        if not git("ls-files", "--", "__init__.py"):  # installed inside somebody else's repository
            return None
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None
