"""``zetaclip watch``: the report of runs that still go on, in the browser."""

from __future__ import annotations

import argparse

DESCRIPTION = (
    "Serves the report of one or many runs on this machine (127.0.0.1 only) and renews it while they go on. DIR is a run folder, or "
    "a folder of run folders. Ctrl-C ends it; the runs don't notice."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", metavar="DIR", nargs="+", help="run folders, or folders that hold some"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port (default: a free one)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the default browser")


def run(arguments: argparse.Namespace) -> int:
    import threading

    from ..report import check_installed
    from ..report.live import serve

    check_installed()
    with serve(arguments.folders, arguments.port) as address:
        print(f"{address} (Ctrl-C to end)", flush=True)
        if arguments.open:
            import webbrowser

            webbrowser.open(address)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()
    return 0
