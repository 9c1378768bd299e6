"""``zetaclip watch``: a live report of runs in progress, in the browser."""

from __future__ import annotations

import argparse

DESCRIPTION = (
    "Serve the report of one or many runs on this machine (127.0.0.1 only) and update it while they"
    " train. DIR is a run folder, or a folder of run folders. The page stays until Ctrl-C, also"
    " when the runs have ended. Ctrl-C does not affect the runs."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "folders", metavar="DIR", nargs="+", help="run folders, or folders that hold some"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port (default: a free one)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the default browser")


def run(arguments: argparse.Namespace) -> int:
    """Serves the page until Ctrl-C."""
    import threading

    from ..report import check_installed
    from ..report.live import serve

    check_installed()
    with serve(arguments.folders, arguments.port) as address:
        print(f"{address} (stays until Ctrl-C, also when training has ended)", flush=True)
        if arguments.open:
            import webbrowser

            webbrowser.open(address)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()
    return 0
