"""Messages of the library in the words of the command line.

``--num-examples``, not ``num_examples=``.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from ..training.config import Config

# Arguments of the engine that have another name on the command line.
_OTHERS = {
    "noise_multiplier": "sigma",
    "target_epsilon": "epsilon",
    "target_delta": "delta",
    "expected_batch_size": "batch-size",
    "sample_rate": "batch-size",
}
_FLAGS = {
    option.name: option.name.replace("_", "-")
    for option in dataclasses.fields(Config)
    if "kind" in option.metadata
} | _OTHERS
_ANY = "|".join(sorted(_FLAGS, key=len, reverse=True))
_LONG = "|".join(sorted((name for name in _FLAGS if "_" in name), key=len, reverse=True))
_PATTERNS = (
    # accountant='pld'; num_examples=; `epochs`
    re.compile(rf"""(?<![\w./-])(?P<name>{_ANY})=(?P<mark>['"])(?P<value>[^'"]+)(?P=mark)"""),
    re.compile(rf"(?<![\w./-])(?P<name>{_ANY})=(?!\w)"),
    re.compile(rf"`(?P<name>{_ANY})`"),
    # A name with an underscore is no English word, so it means the setting wherever it stands.
    re.compile(rf"(?<![\w./-])(?P<name>{_LONG})(?![\w/(=]|\.\w)"),
)


def in_flags(text: object) -> str:
    """The text with settings named as flags.

    Args:
        text: A message, or an error or warning.
    """
    said = str(text)
    for pattern in _PATTERNS:
        said = pattern.sub(_flag, said)
    return said


def _flag(match: re.Match[str]) -> str:
    value = match.groupdict().get("value")
    return f"--{_FLAGS[match['name']]}" + (f" {shlex.quote(value)}" if value else "")
