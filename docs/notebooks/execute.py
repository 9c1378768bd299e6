"""Runs the notebooks beside this file and writes what they print into them.

    python docs/notebooks/execute.py                # all of them
    python docs/notebooks/execute.py tables         # one

Needs the extra `docs`; the notebook on text also `transformers`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in an empty folder. A cell that fails is an error."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=900,
            kernel_name="python3",
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs from one machine to the next: times, versions, progress bars."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.ipynb"))
    for name in names:
        path = HERE / f"{name}.ipynb"
        nbformat.write(tidy(executed(path)), path)
        print(f"wrote {path}")
