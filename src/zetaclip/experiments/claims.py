"""The paper claim by claim: what it says, what was measured, and what that proves.

Verdicts are computed from ``results/*/table.json`` by the rule of each claim, so that the page can
be made again, and checked, at any time. Every claim is judged cell by cell, in the words of
``evidence.py``. The statements of all cells of all claims are one family: Holm's procedure keeps
the chance of even one wrong statement on the page below 5 %. Cells that have not been run count,
too, so that a word does not depend on what else was run.
"""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CommandError
from . import evidence
from .cells import Difference, compared, difference_text
from .evidence import BETTER, EQUIVALENT, EXCLUDED, NOT_WORSE, OPEN, WORSE, Rules
from .files import read_json, write_text
from .measures import MEASURES
from .plan import make_plan
from .results import table as make_table
from .spec import FOLDER, load, names, read_toml

HOLDS, FAILS, UNTESTED = "holds", "does not hold", "not run"
_ORDER = (HOLDS, FAILS, *evidence.WORDS, OPEN, UNTESTED)


@dataclass(frozen=True)
class Cell:
    """One cell of a claim.

    Args:
        place: Where it is in the table.
        measured: What was measured; "" if nothing was.
        p: The p-value of each statement, 1 if it was not tested; empty if the word is certain.
        word: The verdict.
    """

    place: str
    measured: str = ""
    p: dict[str, float] = field(default_factory=dict)
    word: str = UNTESTED


def write(out: str, page: str) -> None:
    """Writes the page of claims.

    Args:
        out: The results folder.
        page: The file to write.

    Raises:
        CommandError: The folder has no tables.
    """
    if not any((Path(out) / name / "table.json").is_file() for name in names()):
        raise CommandError(
            f"{out} holds no tables: run `zetaclip reproduce NAME` first, or give their folder with"
            " --out"
        )
    write_text(Path(page), markdown(Path(out)))


def markdown(out: Path) -> str:
    """The page of claims."""
    told = read_toml(FOLDER / "_claims.toml")
    claims, verdicts = told["claims"], judge(told["claims"], out)
    count = Counter(cell.word for cells in verdicts.values() for cell in cells)
    total = ", ".join(f"{count[word]} {word}" for word in _ORDER if count[word])
    page = [
        "# Reproduction, claim by claim",
        "",
        told["summary"].strip(),
        "",
        "## The verdicts",
        "",
        told["reading"].strip(),
        "",
        _wrapped(f"{len(claims)} claims with {sum(count.values())} cells: {total}."),
        "",
        "| claim | experiment | cells |",
        "| --- | --- | --- |",
    ]
    for claim in claims:
        words = Counter(cell.word for cell in verdicts[claim["id"]])
        counts = ", ".join(f"{words[word]} {word}" for word in _ORDER if words[word])
        where = claim.get("experiment", "computed")
        page.append(f"| [{claim['id']}](#{claim['id']}) | {where} | {counts} |")
    for claim in claims:
        page += ["", *map(_wrapped, _entry(claim, verdicts[claim["id"]]))]
    return "\n".join(page) + "\n"


def _wrapped(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 100, subsequent_indent=indent, break_on_hyphens=False)


def judge(claims: Sequence[Mapping[str, Any]], out: Path) -> dict[str, list[Cell]]:
    """The cells of every claim, with the words that Holm's procedure leaves them."""
    found = {claim["id"]: _cells(claim, out) for claim in claims}
    family = {
        (name, number, word): p
        for name, cells in found.items()
        for number, cell in enumerate(cells)
        for word, p in cell.p.items()
    }
    proved = evidence.holm(family)
    return {
        name: [
            Cell(cell.place, cell.measured, cell.p, _word(name, number, cell, proved))
            for number, cell in enumerate(cells)
        ]
        for name, cells in found.items()
    }


def _word(name: str, number: int, cell: Cell, proved: set[tuple[str, int, str]]) -> str:
    if not cell.p or not cell.measured:
        return cell.word
    return next((word for word in _ORDER if (name, number, word) in proved), OPEN)


def _cells(claim: Mapping[str, Any], out: Path) -> list[Cell]:
    if claim["rule"] == "epsilon":
        return [_epsilon(claim)]
    if claim["rule"] == "algebra":
        return [Cell("by algebra", claim["proof"], word=FAILS)]
    path = out / claim["experiment"] / "table.json"
    table = read_json(path) if path.is_file() else _nothing_run(claim["experiment"])
    found = []
    for group in dict.fromkeys(line["group"] for line in table["rows"]):
        for place, detail in enumerate(table["column_details"]):
            if detail["measure"] == claim["measure"] and _has(table, group, claim, place):
                own = _RULES[claim["rule"]](claim, table, group, place)
                found.append(own or _untested(claim, table, group, place))
    return found


def _nothing_run(name: str) -> Mapping[str, Any]:
    """The table of an experiment before its first run."""
    return make_table(make_plan(load(name)), {}, "", 0)


def _untested(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    """A cell without the values that its rule needs. Its statements count as not proved."""
    if claim["rule"] in _COMPARING:
        rivals = _compared_with(claim, table, group, place)
        words = [BETTER, WORSE, EQUIVALENT]
        if any((_gain(table, group, (claim["row"], row), place) or 0) > 0 for row in rivals):
            words.append(EXCLUDED)
    else:
        words = [EQUIVALENT, WORSE] if claim["rule"] == "alike" else [HOLDS, FAILS]
    named = claim.get("rows", [claim.get("row"), table["baseline"]])
    lost = [row for row in named if _diverged(table, group, row, place)]
    text = f"training diverged: {', '.join(lost)}" if lost else ""
    word = OPEN if lost else UNTESTED
    return Cell(_place(table, group, place), text, dict.fromkeys(words, 1.0), word)


def _has(table: Mapping[str, Any], group: str, claim: Mapping[str, Any], place: int) -> bool:
    """Whether a column is one of the claim's: its rows are in it, and several rivals."""
    rows = claim.get("rows", [claim.get("row")])
    if claim["rule"] in ("best", "no_worse") and len(_rivals(claim, table, group, place)) < 2:
        return False
    return all(_cell(table, group, row, place) is not None for row in rows)


def _rivals(
    claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int
) -> list[str]:
    """The rows ``against`` that a column has; default: all private rows of the paper's table."""
    rivals = claim.get("against") or _published_rivals(claim, table, group)
    return [row for row in rivals if _cell(table, group, row, place) is not None]


def _compared_with(
    claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int
) -> list[str]:
    if claim["rule"] == "better":
        return [table["baseline"]]
    return _rivals(claim, table, group, place)


def _against(
    claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int
) -> Cell | None:
    """Against the table's baseline, or each of its rivals."""
    rivals = _compared_with(claim, table, group, place)
    own = _values(table, group, claim["row"], place)
    found = {
        row: one
        for row in rivals
        if (one := _difference(table, group, (claim["row"], row), place)) is not None
    }
    # A part whose limit was never reached takes nothing away: the same training is no rival.
    same = [row for row in rivals if len(rivals) > 1 and row in found and _equal(found[row])]
    rivals = [row for row in rivals if row not in same]
    found = {row: found[row] for row in rivals if row in found}
    if not found:
        return None
    digits, good = _digits(table, place), _good(table, group, claim["row"], place)
    nearest = min(found, key=lambda row: good * found[row].mean)
    text = difference_text(vars(found[nearest]), digits)
    if len(rivals) > 1:
        text = (
            f"{statistics.fmean(own.values()):.{digits}f}; from {nearest}, the"
            f" {'only other' if len(found) == 1 else f'best of {len(found)} others'}, {text}"
        )
    p = evidence.best_of([one.p for one in found.values()])
    not_worse = max(one.p[NOT_WORSE] for one in found.values())
    if len(found) < len(rivals):  # better than all, or like all: not known
        left = [row for row in rivals if row not in found]
        lost = sum(_diverged(table, group, row, place) for row in left)
        counts = {"diverged": lost, "not run": len(left) - lost}
        text += "; of the others " + ", ".join(f"{n} {what}" for what, n in counts.items() if n)
        p = {word: 1.0 if word in (BETTER, EQUIVALENT) else value for word, value in p.items()}
        not_worse = 1.0
    if same:
        text += f"; the same training: {', '.join(same)}"
    if claim["rule"] == "no_worse":
        p = {HOLDS: not_worse, FAILS: p[WORSE]}
    return Cell(_place(table, group, place), text, p)


def _equal(difference: Difference) -> bool:
    """Whether two rows have the same value in every seed, up to a look."""
    return difference.low is not None and difference.low == difference.high


def _alike(
    claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int
) -> Cell | None:
    """All ``rows`` are equivalent to ``row``; worse: at least one of them is."""
    found = {
        row: one
        for row in claim["rows"]
        if row != claim["row"]
        and (one := _difference(table, group, (row, claim["row"]), place)) is not None
    }
    if len(found) < len(claim["rows"]) - 1:
        return None
    digits, good = _digits(table, place), _good(table, group, claim["row"], place)
    worst = min(found, key=lambda row: good * found[row].mean)
    p = evidence.best_of([one.p for one in found.values()])
    text = f"{worst} is farthest, {difference_text(vars(found[worst]), digits)}"
    return Cell(_place(table, group, place), text, {word: p[word] for word in (EQUIVALENT, WORSE)})


def _below(
    claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int
) -> Cell | None:
    """The mean over seeds is below a limit."""
    values = _values(table, group, claim["row"], place)
    looks = _rules(table, group, claim["row"], place).looks
    limit = {seed: float(claim["limit"]) for seed in values}
    found = compared(values, limit, Rules(looks, 0.0), -1)
    if found is None:
        return None
    digits = _digits(table, place)
    text = f"{statistics.fmean(values.values()):.{digits}f}, limit {claim['limit']:g}"
    return Cell(_place(table, group, place), text, {HOLDS: found.p[BETTER], FAILS: found.p[WORSE]})


def _monotone(sign: int) -> Callable[..., Cell | None]:
    """A rule: along the rows, the values only rise (or fall)."""

    def rule(
        claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int
    ) -> Cell | None:
        values = [_values(table, group, row, place) for row in claim["rows"]]
        looks = _rules(table, group, claim["rows"][0], place).looks
        steps = [
            compared(later, earlier, Rules(looks, 0.0), sign)
            for earlier, later in itertools.pairwise(values)
        ]
        found = [step for step in steps if step is not None]
        if len(found) < len(steps):
            return None
        digits = _digits(table, place)
        text = ", ".join(f"{statistics.fmean(one.values()):.{digits}f}" for one in values)
        p = evidence.best_of([step.p for step in found])
        return Cell(_place(table, group, place), text, {HOLDS: p[BETTER], FAILS: p[WORSE]})

    return rule


_RULES: dict[str, Callable[..., Cell | None]] = {
    "better": _against,
    "best": _against,
    "no_worse": _against,
    "alike": _alike,
    "below": _below,
    "rising": _monotone(+1),
    "falling": _monotone(-1),
}
_COMPARING = ("better", "best")


def _epsilon(claim: Mapping[str, Any]) -> Cell:
    from ..accounting import epsilon
    from ..ledger import Event

    part, whole = claim["sample_rate"]
    values = {
        name: epsilon([Event(part / whole, claim["sigma"], claim["steps"])], claim["delta"], name)
        for name in ("prv", "rdp")
    }
    text = f"ε = {values['prv']:.3f} by PRV, {values['rdp']:.3f} by RDP (`zetaclip.accounting`)"
    holds = any(
        abs(value - claim["published"]) < 0.05 * claim["published"] for value in values.values()
    )
    return Cell("computed", text, word=HOLDS if holds else FAILS)


def _published_rivals(claim: Mapping[str, Any], table: Mapping[str, Any], group: str) -> list[str]:
    published = load(table["name"]).published.get(group, {})
    lines = [line for line in table["rows"] if line["group"] == group and line["method"] != "sgd"]
    return [
        line["label"]
        for line in lines
        if line["label"] in published and line["label"] != claim["row"]
    ]


def _cell(table: Mapping[str, Any], group: str, row: str, place: int) -> Mapping[str, Any] | None:
    for line in table["rows"]:
        if (line["group"], line["label"]) == (group, row):
            cell: Mapping[str, Any] | None = line["cells"][place]
            return cell
    return None


def _values(table: Mapping[str, Any], group: str, row: str, place: int) -> dict[str, float]:
    """Values by seed; none if one of them diverged."""
    cell = _cell(table, group, row, place)
    return dict(cell["values"]) if cell and not cell["diverged"] else {}


def _difference(
    table: Mapping[str, Any], group: str, rows: tuple[str, str], place: int
) -> Difference | None:
    """Two rows of a table, with the gain that the paper reports for them."""
    values = [_values(table, group, row, place) for row in rows]
    if any(_cell(table, group, row, place) is None for row in rows):
        return None
    rules, good = _rules(table, group, rows[0], place), _good(table, group, rows[0], place)
    return compared(values[0], values[1], rules, good, _gain(table, group, rows, place))


def _gain(table: Mapping[str, Any], group: str, rows: tuple[str, str], place: int) -> float | None:
    """What the paper reports for two rows: positive if the first is the better one."""
    ours, theirs = (_cell(table, group, row, place) for row in rows)
    if not ours or not theirs or not ours["published"] or not theirs["published"]:
        return None
    return float(ours["good"] * (ours["published"]["mean"] - theirs["published"]["mean"]))


def _diverged(table: Mapping[str, Any], group: str, row: str, place: int) -> bool:
    cell = _cell(table, group, row, place)
    return bool(cell and cell["diverged"])


def _rules(table: Mapping[str, Any], group: str, row: str, place: int) -> Rules:
    cell = _cell(table, group, row, place)
    assert cell is not None
    told = cell["rules"]
    return Rules(tuple(told["looks"]), *(float(told[key]) for key in ("effect", "overlap", "step")))


def _good(table: Mapping[str, Any], group: str, row: str, place: int) -> int:
    cell = _cell(table, group, row, place)
    return int(cell["good"]) if cell else 1


def _digits(table: Mapping[str, Any], place: int) -> int:
    return MEASURES[table["column_details"][place]["measure"]].digits


def _place(table: Mapping[str, Any], group: str, place: int) -> str:
    condition = table["column_details"][place]["condition"]
    return ", ".join(part for part in (group, condition) if part) or table["columns"][place]


def _entry(claim: Mapping[str, Any], cells: Sequence[Cell]) -> Sequence[str]:
    lines = [f"### {claim['id']}", "", f"{claim['where']}. **The paper:** {claim['says']}"]
    if "remark" in claim:
        lines.append(claim["remark"])
    lines.append("")
    for cell in cells:
        if cell.measured:
            lines.append(f"- {cell.place}: {cell.measured}. **{cell.word}**")
    left = [cell.place for cell in cells if not cell.measured]
    if left:
        lines.append(f"- not run: {'; '.join(left)} (`zetaclip reproduce {claim['experiment']}`)")
    return lines
