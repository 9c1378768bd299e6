"""Which data sets of an experiment can't be found."""

from __future__ import annotations

from collections.abc import Iterable

from .planned import PlannedRun


def missing_data(runs: Iterable[PlannedRun]) -> dict[str, str]:
    """The data sets of these runs that can't be found, each with what to do about it."""
    from ..data import places
    from ..data.registry import ALIASES

    missing = {}
    for name in sorted({str(run.config["data"]) for run in runs}):
        known, kind = ALIASES.get(name, (name, None))
        if places.FORMS.get(known) and places.find(known, None, kind) is None:
            missing[name] = (
                f"the data set {name} is not here: set ZETACLIP_DATA, or run `zetaclip data fetch"
                f" {known}`"
            )
    return missing
