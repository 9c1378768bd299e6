"""A table of results as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .measures import MEASURES, Measure
from .plan import Plan
from .progress import duration
from .results import difference_text
from .spec import names

LITE = (
    "**Lite profile**, smaller than the paper's protocol: MNIST and EMNIST 4 epochs, Adult 10,"
    " CIFAR a ResNet 16-32-64 of one block a stage and 300 steps, mostly three seeds. Heart and VED"
    " are as in the `paper` profile."
)
_BESIDE = " Published cells stand beside ours to show the pattern; the levels can't be compared."


def _shortened(plan: Plan) -> bool:
    """Whether an experiment of ours trains a data set for less than its `paper` profile."""
    parts = (*plan.experiment.groups, *plan.experiment.columns)
    sets = [plan.experiment.common["data"].get(part.get("data"), {}) for part in parts]
    return plan.experiment.name in names() and any("lite" in one for one in sets)


def markdown(
    plan: Plan,
    table: Mapping[str, Any],
    *,
    failures: Sequence[str],
    rates: Mapping[str, Mapping[str, Any]],
    skipped: Sequence[str],
    pictures: Sequence[str],
) -> str:
    """The page of one experiment.

    Args:
        plan: The plan.
        table: The content of table.json.
        failures: Sentences about runs that failed.
        rates: The chosen learning rates, by name.
        skipped: Sentences about runs that were left out.
        pictures: The names of the plots.
    """
    done, planned = table["runs"]["finished"], table["runs"]["planned"]
    page = [f"# {plan.experiment.title}", "", plan.experiment.about, ""]
    beside = any(cell and cell["published"] for line in table["rows"] for cell in line["cells"])
    if plan.profile == "lite" and (beside or _shortened(plan)):
        page += [LITE + (_BESIDE if beside else ""), ""]
    page += _edges(plan, rates)
    page += [
        f"`{table['command']}` · profile {plan.profile} · {done} of {planned}"
        f" runs{_recorded(table)}" + (f" · {_commits(table['commit'])}" if table["commit"] else ""),
        "",
    ]
    for group in dict.fromkeys(line["group"] for line in table["rows"]):
        lines = [line for line in table["rows"] if line["group"] == group]
        columns = [
            place
            for place in range(len(table["columns"]))
            if any(line["cells"][place] for line in lines)
        ]
        page += [f"## {group}", ""] if group else []
        page += _values(table, lines, columns)
        page += _differences(table, lines, columns)
        page += _budgets(table, lines, columns)
    page += [f"![{name.removesuffix('.png')}]({name})\n" for name in pictures]
    page += _notes(plan)
    page += _rates(plan, rates)
    page += _missing(plan, table, failures, skipped)
    return "\n".join(page).rstrip() + "\n"


def _commits(told: str) -> str:
    """The commits of the code, shortened as git does.

    ``table.json`` and the CSV have the full names.
    """
    commits = told.split(", ")
    shown = ", ".join(commit[:10] + "+" * commit.endswith("+") for commit in commits)
    changed = (
        " (+: with changes that were not committed yet, in the code or in `results/`)"
        if "+" in shown
        else ""
    )
    return f"commit{'s' if len(commits) > 1 else ''} {shown}{changed}"


def _recorded(table: Mapping[str, Any]) -> str:
    """How many runs have no folder here, and so can't be verified again."""
    count, older = table["runs"]["recorded"], table["runs"]["unsigned"]
    if not count:
        return ""
    told = "verified when they were written; their folders are not here"
    if older:
        were, their = ("was", "its") if older == 1 else ("were", "their")
        told += f"; {older} {were} taken from an older table, without the digests of {their} files"
    return f", {count} of them from `records.jsonl` ({told})"


def number(value: float | None, digits: int) -> str:
    """A number with so many decimals."""
    return "–" if value is None else f"{value:.{digits}f}"


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *lines)] + [""]


def _values(
    table: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], columns: Sequence[int]
) -> list[str]:
    head = ["", *(_title(table, lines, place) for place in columns)]
    digits = {place: _measure(table, lines, place).digits for place in columns}
    body = [
        [line["label"], *(_value(line["cells"][place], digits[place]) for place in columns)]
        for line in lines
    ]
    caption = "Mean ± standard deviation over seeds, last epoch"
    cells = [cell for line in lines for cell in line["cells"] if cell]
    if any(cell["ours"] and cell["finished"] < cell["planned"] for cell in cells):
        caption += "; (2/5): over the two of five seeds that all the rows have"
    if any(cell["diverged"] for cell in cells):
        caption += (
            "; a seed that diverged has no value: the mean is over the other seeds, and the cell"
            " counts as neither better nor worse"
        )
    if any(cell["published"] for cell in cells):
        caption += "; the paper's in brackets"
    if table["baseline"]:
        caption += (
            f". Bold: better than {table['baseline']} by the 95 % interval of the paired difference"
        )
    return [f"{caption}.", "", *grid(head, body)]


def _measure(table: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], place: int) -> Measure:
    """What a column shows in these lines; "metric" becomes their metric, if it is the same."""
    name = table["column_details"][place]["measure"]
    told = {line["cells"][place]["metric"] for line in lines if line["cells"][place]} - {None}
    return MEASURES[told.pop() if len(told) == 1 else name]


def _title(table: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], place: int) -> str:
    general = MEASURES[table["column_details"][place]["measure"]].label
    return str(table["columns"][place]).removesuffix(general) + _measure(table, lines, place).label


def _value(cell: Mapping[str, Any] | None, digits: int) -> str:
    if cell is None:
        return ""
    ours, theirs = cell["ours"], cell["published"]
    lost = f"{cell['diverged']} of {cell['finished']} diverged" if cell["diverged"] else ""
    if ours is None:
        # Training without privacy has no C, and the baseline has no overhead.
        text = lost or ("–" if cell["finished"] else "not run")
    else:
        text = number(ours["mean"], digits) + (
            f" ± {number(ours['std'], digits)}" if ours["std"] is not None else ""
        )
        text = f"**{text}**" if cell["better"] else text
        text += (
            f" ({cell['finished']}/{cell['planned']})" if cell["finished"] < cell["planned"] else ""
        )
        text += f" ({lost})" if lost else ""
    if theirs is not None:
        text += (
            f" [{theirs['mean']:g}"
            + (f" ± {theirs['std']:g}" if theirs["std"] is not None else "")
            + "]"
        )
    return text


def _differences(
    table: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], columns: Sequence[int]
) -> list[str]:
    places = [
        place
        for place in columns
        if any(line["cells"][place] and line["cells"][place]["difference"] for line in lines)
    ]
    if not places:
        return []
    digits = {place: _measure(table, lines, place).digits for place in places}
    body = []
    for line in lines:
        cells = [_difference(line["cells"][place], digits[place]) for place in places]
        if any(cells):
            body.append([line["label"], *cells])
    head = ["", *(_title(table, lines, place) for place in places)]
    return [
        f"Difference from {table['baseline']}, paired over seeds, with its 95 % interval.",
        "",
        *grid(head, body),
    ]


def _difference(cell: Mapping[str, Any] | None, digits: int) -> str:
    if cell is None or not cell["difference"]:
        return ""
    text, pairs = difference_text(cell["difference"], digits), cell["difference"]["n"]
    # Two rows may share more seeds than all rows do, and the mean is over the seeds of all.
    return f"{text} ({pairs} seeds)" if pairs > cell["ours"]["n"] else text


def _budgets(
    table: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], columns: Sequence[int]
) -> list[str]:
    """ε as recomputed from the ledgers, one column per condition."""
    places: dict[str, int] = {}
    for place in columns:
        places.setdefault(table["column_details"][place]["condition"], place)
    deltas = {cell["delta"] for line in lines for cell in line["cells"] if cell and cell["delta"]}
    if not deltas:
        return []
    body = []
    for line in lines:
        spent = [(line["cells"][place] or {}).get("epsilon") for place in places.values()]
        if any(spent):
            body.append([line["label"], *(_budget(pair) for pair in spent)])
    shown = ", ".join(f"{delta:g}" for delta in sorted(deltas))
    caption = f"ε from the ledgers, at δ = {shown}, for adding or removing one record"
    alike = [sorted({cells[1 + number] for cells in body} - {"–"}) for number in range(len(places))]
    if all(len(values) <= 1 for values in alike):  # one sentence is enough
        told = [
            f"{condition}: {values[0]}" if condition else values[0]
            for condition, values in zip(places, alike)
            if values
        ]
        return [f"{caption}, the same in every private row that was run: {'; '.join(told)}.", ""]
    return [f"{caption}.", "", *grid(["", *(condition or "ε" for condition in places)], body)]


def _budget(pair: Sequence[float] | None) -> str:
    if pair is None:
        return "–"
    low, high = (f"{value:.3g}" for value in pair)
    return low if low == high else f"{low} to {high}"


def _notes(plan: Plan) -> list[str]:
    notes = [*plan.experiment.notes]
    if plan.experiment.source:
        notes.append(f"Published cells: `{plan.experiment.source}` of the paper.")
    return ["## Notes", "", *(f"- {note}" for note in notes), ""] if notes else []


def _used(
    plan: Plan, rates: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, Mapping[str, Any]]]:
    """The learning rates of a table: their names, and how they were chosen."""
    return [(tuning.name, rates[tuning.name]) for tuning in plan.tunings if tuning.name in rates]


def edges(plan: Plan, rates: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """How many of the learning rates are at the edge of their grid, and how many there are."""
    used = _used(plan, rates)
    return sum(bool(entry["at_edge_of_grid"]) for _, entry in used), len(used)


def _edges(plan: Plan, rates: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The warning about rates at the edge of their grid, which must come before the numbers."""
    ends, count = edges(plan, rates)
    if not ends:
        return []
    return [
        (
            f"**Learning rates at the edge of their grid: {ends} of {count}** (below). A better"
            " rate may be outside the grid or, because rates are chosen at half the length, between"
            " its points (`rates`). So the rank of a row may be due to its grid and not to its"
            " method."
        ),
        "",
    ]


def _rates(plan: Plan, rates: Mapping[str, Mapping[str, Any]]) -> list[str]:
    used = _used(plan, rates)
    if not used:
        return []
    body = []
    for title, entry in used:
        tried = ", ".join(f"{point['lr']:g}" for point in entry["grid"])
        edge = "yes" if entry["at_edge_of_grid"] else "no"
        body.append([title.partition("/")[2], f"{entry['rate']:g}", tried, edge])
    return [
        "## Learning rates",
        "",
        (
            "Chosen on one seed, half the length, a tenth of the training records held out, at"
            f" {_tuned_at(plan)}. Such tuning is not free: it looks at private data and is not in"
            " any ε."
        ),
        "",
        *grid(["data / recipe / method", "chosen", "tried", "at the edge"], body),
    ]


def _tuned_at(plan: Plan) -> str:
    """The noise with which the rates were chosen, by data set."""
    found = {}
    for tuning in plan.tunings:
        config = tuning.runs[0].config
        for key, sign in (("sigma", "σ"), ("epsilon", "ε")):
            if config.get(key) is not None:
                found[str(config["data"])] = f"{sign} = {config[key]:g} ({config['data']})"
    return ", ".join(found.values()) or "the table's budget"


def _missing(
    plan: Plan, table: Mapping[str, Any], failures: Sequence[str], skipped: Sequence[str]
) -> list[str]:
    lines = [
        f"- {text}"
        for text in (*map(open_part, table["missing"]), *plan.left_out, *skipped, *failures)
    ]
    return ["## Not run", "", *lines, ""] if lines else []


def open_part(part: Mapping[str, Any]) -> str:
    """What is left of a part of an experiment, with its command and its time."""
    what = f"{part['what']}: " if part["what"] else ""
    grid = f" and {part['grid']} for learning rates" if part["grid"] else ""
    return (
        f"{what}{part['left']} of {part['planned']} runs{grid}: `{part['command']}`,"
        f" {time_left(part)}"
    )


def time_left(part: Mapping[str, Any]) -> str:
    """The time of what is left, in words."""
    if part["seconds"] is None:
        return "time not known (`--dry-run` measures it)"
    return f"about {duration(part['seconds'])} of one worker"
