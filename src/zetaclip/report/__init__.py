"""Reports: one self-contained HTML page for runs, for an experiment, or for a run in progress.

``write_report`` is what ``zetaclip report`` calls. ``live.serve`` shows the same page while a run
writes its folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["write_report"]


def check_installed() -> None:
    """Raises ``CommandError`` where what a page is made of is not installed."""
    from importlib.util import find_spec

    from ..errors import CommandError

    if any(find_spec(name) is None for name in ("plotly", "matplotlib")):
        raise CommandError(
            "reports need plotly and matplotlib: pip install 'zetaclip[report]' (the run "
            "itself is not affected)"
        )


def write_report(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    experiment: str | None = None,
    verify: bool = True,
) -> Path:
    """Writes the page for run folders, or for the results of one experiment.

    Args:
        folders: Run folders; with ``experiment``, the one folder that ``zetaclip reproduce --out``
            wrote.
        out: The file to write; default: ``report.html`` in the first folder, or beside the
            experiment's table.
        experiment: The name of an experiment.
        verify: Whether to recompute ε and every C from the ledger of each finished run.

    Returns:
        The path of the page.

    Raises:
        CommandError: The user can put it right: a folder without a run, a file that can't be
            written.
    """
    check_installed()
    from ..errors import CommandError
    from .experiment import page_for_experiment
    from .experiment_read import read_experiment
    from .page import render
    from .read import read_runs
    from .runs import page_for

    first = Path(folders[0])
    if experiment is None:
        page = page_for(read_runs(folders), verify=verify)
        default = first / "report.html"
    else:
        found = read_experiment(first, experiment)
        page = page_for_experiment(found)
        default = found.folder / "report.html"
    target = Path(out) if out is not None else default
    if target.is_dir():
        raise CommandError(
            f"{target} is a folder; give the name of a file to write, e.g. {target / 'report.html'}"
        )
    return _write(target, render(page))


def _write(target: Path, text: str) -> Path:
    from ..errors import CommandError
    from ..files import replace_file

    try:
        with replace_file(target) as file:
            # A folder's name may contain bytes that are not valid text.
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise CommandError(f"cannot write {target}: {error.strerror}") from error
    return target
