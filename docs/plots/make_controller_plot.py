"""Makes the picture of docs/reproduction.md: C over the run, a line for every run of the tables.

python docs/plots/make_controller_plot.py            # from results/records.jsonl
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

HERE = Path(__file__).parent
RECORDS = HERE.parents[1] / "results" / "records.jsonl"
PANELS = {"adult": "Adult", "heart": "Heart", "ved": "VED"}
FORMS = {
    "paper's form": "C0",
    "practical form": "C1",
    "practical, sign reversed": "C3",
    "random numbers for the spectrum": "0.6",
}
BOUNDS = 0.5, 3.0


def form(spectral: dict) -> str | None:
    """Which row of the table a run belongs to; None if it is none of these."""
    if spectral.get("signal") == "random":
        return "random numbers for the spectrum"
    if spectral.get("sign") == -1:
        return "practical, sign reversed"
    return "paper's form" if spectral.get("paper") else "practical form"


def paths(lines) -> dict[str, dict[str, list[list[float]]]]:
    """C after each probe by data set and form, of the coupled column, without ladders' runs."""
    found: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        record = json.loads(line)
        config = record["config"]
        if config["data"] not in PANELS or config["method"] != "ww-dp-sgd":
            continue
        if config.get("validation") or config.get("decouple") or config["seed"] >= 1000:
            continue
        probes = record["lines"].get("probes.jsonl", [])
        values = [config["clip"], *(probe["clip"] for probe in probes)]
        found[config["data"]][form(config["spectral"])].append(values)
    return found


def main() -> None:
    with RECORDS.open(encoding="utf-8") as lines:
        found = paths(lines)
    panels = [name for name in PANELS if name in found]
    drawing = Figure(figsize=(3.6 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(drawing)
    for axes, name in zip(drawing.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label in reversed(FORMS):
            for values in found[name][label]:
                share = [100 * i / (len(values) - 1) for i in range(len(values))]
                axes.plot(share, values, color=FORMS[label], linewidth=0.8, alpha=0.7)
        for bound in BOUNDS:
            axes.axhline(bound, color="black", linewidth=0.8, linestyle=":")
        axes.set_yscale("log")
        axes.set_yticks([0.5, 1, 2, 3], ["0.5", "1", "2", "3"])
        axes.minorticks_off()
        seeds = max(map(len, found[name].values()))
        axes.set_title(f"{PANELS[name]}, up to {seeds} seeds", fontsize=10)
        axes.set_xlabel("share of the training, %")
    drawing.axes[0].set_ylabel("C, and with it the step (start: 1)")
    handles = [Line2D([], [], color=colour, label=label) for label, colour in FORMS.items()]
    drawing.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    drawing.savefig(HERE / "controller.png", dpi=90)
    print({name: {label: len(runs) for label, runs in found[name].items()} for name in panels})


if __name__ == "__main__":
    main()
