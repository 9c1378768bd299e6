"""The subcommands of ``zetaclip``, one module each.

A module has ``add_arguments(parser)`` and ``run(arguments) -> exit code``. What costs time to import (torch above all)
is imported inside ``run``, so that ``--help`` answers at once.
"""
