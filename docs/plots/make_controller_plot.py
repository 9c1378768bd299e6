"""Makes the picture of docs/reproduction.md: C over the run, a line for every run of the tables.

python docs/plots/make_controller_plot.py            # from results/
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results"
# The table, and the data set in it, of each panel. All runs are of the coupled column.
PANELS = {
    "Adult": ("tabular", "adult"),
    "Heart": ("tabular", "heart"),
    "MNIST's features": ("controls", "mnist-features"),
    "MNIST's network": ("components", "mnist"),
}
# The paper calls its controller by its probed layer in the table of components.
ROWS = {
    "WW-DP-SGD": "the paper's controller",
    "WW-DP-SGD (full, probe=fc1)": "the paper's controller",
    "WW-DP-SGD, practical form": "practical form",
    "Sign reversed": "practical, sign reversed",
    "Random ζ": "random numbers for the spectrum",
}
COLOURS = {
    "the paper's controller": "C0",
    "practical form": "C1",
    "practical, sign reversed": "C3",
    "random numbers for the spectrum": "0.6",
}
BOUNDS = 0.5, 3.0


def trajectories() -> dict[str, list[float]]:
    """C at the start and after each probe, by run."""
    found = {}
    with (RESULTS / "records.jsonl").open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if probes := record["lines"].get("probes.jsonl"):
                found[record["run"]] = [
                    record["config"]["clip"],
                    *(probe["clip"] for probe in probes),
                ]
    return found


def runs(table: str, data: str) -> list[tuple[str, str]]:
    """The finished runs of a panel: form and key."""
    path = RESULTS / table / "runs.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [
            (ROWS[line["row"]], line["run"])
            for line in csv.DictReader(file)
            if line["data"] == data
            and line["recipe"] == "coupled"
            and line["row"] in ROWS
            and line["state"] == "finished"
        ]


def main() -> None:
    paths = trajectories()
    panels = {title: runs(*place) for title, place in PANELS.items()}
    panels = {title: found for title, found in panels.items() if found}
    drawing = Figure(figsize=(3.0 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(drawing)
    for axes, (title, found) in zip(
        drawing.subplots(1, len(panels), squeeze=False, sharey=True)[0],
        panels.items(),
        strict=True,
    ):
        for form, colour in reversed(COLOURS.items()):
            for run in (run for label, run in found if label == form):
                share = [100 * i / (len(paths[run]) - 1) for i in range(len(paths[run]))]
                axes.plot(share, paths[run], color=colour, linewidth=0.8, alpha=0.7)
        for bound in BOUNDS:
            axes.axhline(bound, color="black", linewidth=0.8, linestyle=":")
        axes.set_yscale("log")
        axes.set_yticks([0.5, 1, 2, 3], ["0.5", "1", "2", "3"])
        axes.minorticks_off()
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("share of the training, %")
        print(title, {form: sum(label == form for label, _ in found) for form in COLOURS})
    drawing.axes[0].set_ylabel("C, and with it the step (start: 1)")
    handles = [Line2D([], [], color=colour, label=form) for form, colour in COLOURS.items()]
    drawing.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    drawing.savefig(HERE / "controller.png", dpi=90)


if __name__ == "__main__":
    main()
