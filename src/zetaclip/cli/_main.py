"""The command ``zetaclip``: a table of subcommands, each a module beside this one.

Only the module of the chosen command is imported, so that ``zetaclip --help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import CommandError

# Name: one line for the list of commands. The module has the same name.
COMMANDS: dict[str, str] = {
    "train": "train a private model",
    "predict": "predict with a trained run: a table or a folder of pictures",
    "export": "write a run's network as ONNX, TorchScript, torch.export or safetensors",
    "verify": "recompute ε and every clipping norm of a finished run",
    "audit": "attack a configuration on purpose, and compare with its ε",
    "account": "compute ε from noise, or noise from ε, with each accountant",
    "data": "list and download data sets, write schemas for your own files",
    "methods": "list the private methods, what they release and how much noise they add",
    "reproduce": "run an experiment of the paper and compare with the published numbers",
    "probe": "compute the spectral exponents of a checkpoint's matrices",
    "report": "write runs or an experiment as one HTML page",
    "watch": "serve a live report of runs in progress to the browser",
}


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser, with the arguments of the chosen command only."""
    parser = argparse.ArgumentParser(
        prog="zetaclip",
        description=(
            "Train PyTorch models with differential privacy, use them, and check their ε."
        ),
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers: Any = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for name, line in COMMANDS.items():
        if name != chosen:
            subparsers.add_parser(name, help=line)
            continue
        module = importlib.import_module(f".{name}", __package__)
        subparser = subparsers.add_parser(
            name,
            help=line,
            description=module.DESCRIPTION,
            epilog=getattr(module, "EPILOG", None),
            formatter_class=(
                argparse.RawDescriptionHelpFormatter
                if hasattr(module, "EPILOG")
                else argparse.HelpFormatter
            ),
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments; default: those of the process.

    Returns:
        The exit code. 2: wrong usage or input; 130: Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if word in COMMANDS), None)
    try:
        arguments = build_parser(chosen).parse_args(words)
        return int(arguments.run(arguments))
    except CommandError as error:
        print(f"zetaclip: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # a command that has something to save has done so
        print("zetaclip: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, e.g. `head`, has ended
        sys.stderr.close()
        return 1


def _version() -> str:
    from .. import __version__

    return f"zetaclip {__version__}"
