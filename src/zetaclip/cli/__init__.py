"""The command ``zetaclip``.

Each subcommand is a module with ``add_arguments(parser)`` and ``run(arguments) -> exit code``. Slow
imports (torch above all) are inside ``run``, so that ``--help`` answers at once.
"""

from ._main import main

__all__ = ["main"]
