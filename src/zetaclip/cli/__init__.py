"""The command ``zetaclip``.

One module a subcommand, each with ``add_arguments(parser)`` and ``run(arguments) -> exit code``.

What costs time to import (torch above all) is imported inside ``run``, so that ``--help`` answers
at once.
"""

from ._main import main

__all__ = ["main"]
