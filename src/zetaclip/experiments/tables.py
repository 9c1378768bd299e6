"""A table of results as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .cells import difference_text
from .ladder import NOTE
from .measures import MEASURES, Measure
from .planned import Plan
from .progress import duration


def markdown(
    plan: Plan,
    table: Mapping[str, Any],
    *,
    failures: Sequence[str],
    skipped: Sequence[str],
    pictures: Sequence[str],
) -> str:
    """The page of one experiment.

    Args:
        plan: The plan.
        table: The content of table.json.
        failures: Sentences about runs that failed.
        skipped: Sentences about runs that were left out.
        pictures: The names of the plots.
    """
    done, planned = table["runs"]["finished"], table["runs"]["planned"]
    page = [f"# {plan.experiment.title}", "", plan.experiment.about, ""]
    page += [
        f"`{table['command']}` · {done} of {planned} runs{_recorded(table)}"
        + (f" · {_commits(table['commit'])}" if table["commit"] else ""),
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
    page += _rates(table)
    page += _missing(table, failures, skipped)
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
        told += f"; {older} without the digests of {'its' if older == 1 else 'their'} files"
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
        caption += f". Bold: better than {table['baseline']} by more than the smallest effect"
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
    effects = {
        _title(table, lines, place): line["cells"][place]["rules"]["effect"]
        for place in places
        for line in lines
        if line["cells"][place]
    }
    told = ", ".join(f"{effect:g} ({title})" for title, effect in effects.items())
    if len(set(effects.values())) == 1:
        told = f"{next(iter(effects.values())):g}"
    more = any(_more_seeds(line["cells"][place]) for line in lines for place in places)
    return [
        (
            f"Difference from {table['baseline']}, paired over seeds, with the 95 % interval for"
            f" all looks together, and what it proves by itself against a smallest effect of"
            f" {told}."
            + " A number of seeds stands where the means above are over fewer, so that the two can"
            " disagree."
            * more
            + " The page of claims corrects for the number of statements; this table does not."
        ),
        "",
        *grid(head, body),
    ]


def _difference(cell: Mapping[str, Any] | None, digits: int) -> str:
    if cell is None or not cell["difference"]:
        return ""
    found = cell["difference"]
    text = difference_text(found, digits)
    if found["low"] is None:
        return text
    more = f" ({found['n']} seeds)" if _more_seeds(cell) else ""
    return f"{text}{more}: {found['word']}"


def _more_seeds(cell: Mapping[str, Any] | None) -> bool:
    """Whether a tested difference is over more seeds than the mean, which is over those of all."""
    if cell is None or cell["difference"] is None:
        return False
    found = cell["difference"]
    return bool(found["low"] is not None and found["n"] > cell["ours"]["n"])


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


def _rates(table: Mapping[str, Any]) -> list[str]:
    """The chosen learning rates, and what was tried."""
    if not table["ladders"]:
        return []
    body = []
    for name, ladder in table["ladders"].items():
        tried = ", ".join(
            f"{point['lr']:g}" + (" (diverged)" if point["value"] is None else "")
            for point in ladder["points"]
        )
        rate = "not yet" if ladder["rate"] is None else f"{ladder['rate']:g}"
        body.append([name, rate + " (cap reached)" * ladder["at_edge"], tried])
    return ["## Learning rates", "", NOTE, "", *grid(["ladder", "chosen", "tried"], body)]


def _missing(
    table: Mapping[str, Any], failures: Sequence[str], skipped: Sequence[str]
) -> list[str]:
    lines = [f"- {text}" for text in (*map(open_part, table["missing"]), *skipped, *failures)]
    return ["## Not run", "", *lines, ""] if lines else []


def open_part(part: Mapping[str, Any]) -> str:
    """What is left of a part of an experiment, with its command and its time."""
    what = f"{part['what']}: " if part["what"] else ""
    rungs = f" and at least {part['rungs']} for learning rates" if part["rungs"] else ""
    return (
        f"{what}{part['left']} of {part['planned']} runs{rungs}: `{part['command']}`,"
        f" {time_left(part)}"
    )


def time_left(part: Mapping[str, Any]) -> str:
    """The time of what is left, in words."""
    if part["seconds"] is None:
        return "time not known (`--dry-run` measures it)"
    return f"about {duration(part['seconds'])} of one worker"
