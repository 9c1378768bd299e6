"""Fixed features for pictures and tables: nothing in them was learned from real records.

    module = patches((3, 32, 32))           # frozen; made once from synthetic pictures, then cached
    features = precompute(dataset, module)  # the data set with features in place of pictures

A head that is trained privately on such features needs far less privacy than a whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError
from ._patches import Patches, fits, patches
from ._precompute import features_of, precompute
from ._scattering import Scattering, scattering
from ._shared import shared
from ._tables import Bins, bins, needs_bias, rebuilt_bins

Fixed = Patches | Scattering | Bins
KINDS = ("patches", "scattering")  # of pictures
_OPTION = {"patches": "mirror", "scattering": "length"}

__all__ = [
    "KINDS",
    "Bins",
    "Fixed",
    "Patches",
    "Scattering",
    "bins",
    "build",
    "features_of",
    "fits",
    "needs_bias",
    "patches",
    "precompute",
    "rebuilt",
    "scattering",
    "shared",
]


def build(
    kind: str,
    shape: tuple[int, ...],
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Fixed:
    """Features of pictures by name.

    Args:
        kind: One of ``KINDS``.
        shape: (channels, height, width) of the pictures.
        options: Options of that kind; patches have ``mirror``, scattering has ``length``.
        say: Told when constants are made, which takes seconds to minutes.

    Raises:
        InputError: There are no such features, or not for such a shape, or not with such an option.
    """
    given = dict(options or {})
    if kind not in _OPTION:
        raise InputError(f"there are no features {kind!r}; there are: {', '.join(KINDS)}")
    if unknown := sorted(set(given) - {_OPTION[kind]}):
        raise InputError(f"{kind} has no option {', '.join(unknown)}; it has {_OPTION[kind]}")
    if kind == "scattering":
        return scattering(shape, **given)
    mirror = given.get("mirror")
    if mirror not in (None, True, False):
        raise InputError(f"mirror is true or false, not {mirror!r}")
    return patches(shape, mirror=mirror, say=say)


def rebuilt(description: Mapping[str, Any]) -> Fixed:
    """The features that ``describe()`` told of.

    Raises:
        InputError: This version makes other features from these settings.
    """
    kind = str(description["kind"])
    if kind == "bins":
        return rebuilt_bins(description)
    shape = tuple(int(side) for side in description["shape"])
    option = _OPTION.get(kind, "")
    options = {option: description[option]} if option in description else {}
    made = build(kind, shape, options)
    if made.describe().get("digest") != description.get("digest"):
        raise InputError(
            f"the {kind} features of this model were made by another version of zetaclip; use that"
            " version, or train the head again"
        )
    return made
