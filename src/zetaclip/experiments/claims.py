"""The paper claim by claim: what it says, what we measured, and whether it holds.

Verdicts are computed from ``results/*/table.json`` by the rule that stands with each claim, so that the page can be made again, and
checked, at any time. Tables of the full protocol speak first, those of the lite profile where they have nothing to say. A claim
holds only if every cell that was run supports it; cells that were not run are counted beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .measures import MEASURES
from .results import reach
from .spec import FOLDER, load, read_toml, tables_of
from .store import read_json, write_text

HOLDS, FAILS, UNDECIDED, UNTESTED = "holds", "does not hold", "can't be told", "not tested here"


@dataclass(frozen=True)
class Verdict:
    """The word, what was measured, and whether results of a lite profile are behind it."""

    word: str
    measured: str = ""
    profiles: frozenset[str] = field(default_factory=frozenset)


def write(out: str, page: str) -> None:
    """Writes the page of claims from the tables in a results folder."""
    write_text(Path(page), markdown(Path(out)))


def markdown(out: Path) -> str:
    claims = read_toml(FOLDER / "_claims.toml")["claims"]
    verdicts = {claim["id"]: judge(claim, out) for claim in claims}
    words = [verdict.word for verdict in verdicts.values()]
    count = ", ".join(f"{words.count(word)} {word}" for word in (HOLDS, FAILS, UNDECIDED, UNTESTED))
    page = [
        "# Reproduction, claim by claim",
        "",
        "Made by `zetaclip reproduce --claims docs/reproduction.md` from the tables under `results/`; don't edit. "
        "The rules stand in `src/zetaclip/experiments/_claims.toml`: a claim holds only if every cell that was run supports it. "
        "*Better* means that the 95 % interval of the difference paired over seeds leaves out zero; *best* compares means, and can't tell where one is of a single seed; *below* a limit, with *can't be told* where the interval over seeds holds it. "
        "*Comparable* (`sweep-robust`) means that the accuracies range less than those they are compared with, and that none is farther than "
        "one point from that of C_0 = 1.",
        "",
        f"{len(claims)} claims: {count}.",
        "",
        "| claim | experiment | verdict |",
        "| --- | --- | --- |",
    ]
    for claim in claims:
        page.append(
            f"| [{claim['id']}](#{claim['id']}) | {claim.get('experiment', 'accounting')} | {verdicts[claim['id']].word} |"
        )
    for claim in claims:
        page += ["", *_entry(claim, verdicts[claim["id"]])]
    return "\n".join(page) + "\n"


def judge(claim: Mapping[str, Any], out: Path) -> Verdict:
    """The verdict on one claim."""
    if claim["rule"] == "epsilon":
        return _epsilon(claim)
    verdicts = [_judge_table(claim, read_json(folder / "table.json")) for folder in tables_of(out, claim["experiment"])]
    return next((verdict for verdict in verdicts if verdict.word != UNTESTED), Verdict(UNTESTED))


def _judge_table(claim: Mapping[str, Any], table: Mapping[str, Any]) -> Verdict:
    found = []
    for group in dict.fromkeys(line["group"] for line in table["rows"]):
        if "groups" not in claim or group in claim["groups"]:
            for place, detail in enumerate(table["column_details"]):
                if detail["measure"] == claim["measure"]:
                    found.append(_RULES[claim["rule"]](claim, table, group, place))
    cells = [cell for cell in found if cell is not None]
    if not cells:
        return Verdict(UNTESTED)
    text = "; ".join(text for _, text in cells)
    missing = len(found) - len(cells)
    if missing:
        lost = any(cell and cell.get("diverged") for line in table["rows"] for cell in line["cells"])
        text += f"; {missing} of {len(found)} not run" + (" or diverged" if lost else "")
    words = [good for good, _ in cells]
    word = FAILS if False in words else UNDECIDED if None in words else HOLDS
    return Verdict(word, text, frozenset({table["profile"]}))


# Whether a cell supports the claim (None: it can't tell), and what was measured; None where nothing was.
Cell = tuple[bool | None, str] | None


def _better(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    cell = _cell(table, group, claim["row"], place)
    if cell is None or not cell["difference"] or cell["difference"]["low"] is None:
        return None
    return bool(cell["better"]), f"{_place(table, group, place)} {_difference(table, cell, place)}"


def _only(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    """Better than the baseline, and no control is."""
    own = _better(claim, table, group, place)
    others = [(name, _cell(table, group, name, place)) for name in claim["against"]]
    seen = [(name, cell) for name, cell in others if cell is not None and cell["difference"]]
    if own is None or not seen:
        return None
    as_good = [name for name, cell in seen if cell["better"]]
    text = f"{own[1]}, controls better than {table['baseline']}: {', '.join(as_good) or 'none'}"
    return bool(own[0]) and not as_good, text


def _best(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    """The best mean of all private rows that the paper's table has."""
    own = _means(table, group, [claim["row"]], place)
    if not own:
        return None
    published = load(table["name"]).published.get(group, {})
    lines = [line for line in table["rows"] if line["group"] == group and line["label"] in published]
    others = {
        line["label"]: means[0]
        for line in lines
        if line["method"] != "sgd"
        and line["label"] != claim["row"]
        and (means := _means(table, group, [line["label"]], place))
    }
    if not others:
        return None
    good = table["column_details"][place]["good"]
    best = max(others, key=lambda label: good * others[label])
    mean, digits = own[0], _digits(table, place)
    text = f"{_place(table, group, place)} {mean:.{digits}f}, best of {len(others)} others {best} {others[best]:.{digits}f}"
    return _by_means(good * mean > good * others[best], text, table, group, [claim["row"], best], place)


def _below(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    """The whole 95 % interval over seeds is below the limit. One that holds the limit can't tell."""
    if not _means(table, group, [claim["row"]], place):
        return None
    cell = _cell(table, group, claim["row"], place)
    assert cell is not None
    mean, digits = cell["ours"]["mean"], _digits(table, place)
    text = f"{_place(table, group, place)} {mean:.{digits}f}"
    if cell["ours"]["std"] is None:
        return None, text
    half = reach(cell["ours"]["std"], cell["ours"]["n"])
    text += f" [{mean - half:.{digits}f}, {mean + half:.{digits}f}], limit {claim['limit']:g}"
    return (True if mean + half <= claim["limit"] else False if mean - half > claim["limit"] else None), text


def _monotone(sign: int) -> Any:
    def rule(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
        means = _means(table, group, claim["rows"], place)
        if not means:
            return None
        holds = all(sign * (later - earlier) > 0 for earlier, later in itertools.pairwise(means))
        shown = ", ".join(f"{mean:.{_digits(table, place)}f}" for mean in means)
        return _by_means(holds, f"{_place(table, group, place)} {shown}", table, group, claim["rows"], place)

    return rule


def _by_means(holds: bool, text: str, table: Mapping[str, Any], group: str, rows: list[str], place: int) -> Cell:
    """What means say; where one of them is of a single seed, they say nothing."""
    cells = [_cell(table, group, row, place) for row in rows]
    single = any(cell is not None and cell["ours"]["n"] == 1 for cell in cells)
    return (None, f"{text} (one seed)") if single else (holds, text)


def _narrower(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    """The means of one list of rows range less than those of another, and stay near that of one row.

    A range alone would prove too little: seven points are less than eleven, and still not comparable.
    """
    lists = [_means(table, group, rows, place) for rows in (claim["rows"], claim["against"], [claim["row"]])]
    if not all(lists):
        return None
    ours, theirs, (middle,) = lists
    ranges = [max(means) - min(means) for means in (ours, theirs)]
    farthest = max(abs(mean - middle) for mean in ours)
    digits = _digits(table, place)
    text = (
        f"{_place(table, group, place)} range {ranges[0]:.{digits}f} against {ranges[1]:.{digits}f}, "
        f"up to {farthest:.{digits}f} from {claim['row']} (limit {claim['limit']:g})"
    )
    return ranges[0] < ranges[1] and farthest <= claim["limit"], text


_RULES: dict[str, Any] = {
    "better": _better,
    "only": _only,
    "best": _best,
    "below": _below,
    "rising": _monotone(+1),
    "falling": _monotone(-1),
    "narrower": _narrower,
}


def _epsilon(claim: Mapping[str, Any]) -> Verdict:
    from ..accounting import epsilon
    from ..ledger import Event

    part, whole = claim["sample_rate"]
    values = {
        name: epsilon([Event(part / whole, claim["sigma"], claim["steps"])], claim["delta"], name)
        for name in ("prv", "rdp")
    }
    text = f"ε = {values['prv']:.3f} by PRV, {values['rdp']:.3f} by RDP (`zetaclip.accounting`)"
    holds = any(abs(value - claim["published"]) < 0.05 * claim["published"] for value in values.values())
    return Verdict(HOLDS if holds else FAILS, text)


def _cell(table: Mapping[str, Any], group: str, row: str, place: int) -> Mapping[str, Any] | None:
    for line in table["rows"]:
        if (line["group"], line["label"]) == (group, row):
            cell: Mapping[str, Any] | None = line["cells"][place]
            return cell
    return None


def _means(table: Mapping[str, Any], group: str, rows: Sequence[str], place: int) -> list[float]:
    """The means of these rows; none at all if one of them has not been run, or has a seed that diverged."""
    cells = [_cell(table, group, row, place) for row in rows]
    means = [cell["ours"]["mean"] for cell in cells if cell is not None and cell["ours"] and not cell.get("diverged")]
    return means if len(means) == len(cells) else []


def _digits(table: Mapping[str, Any], place: int) -> int:
    return MEASURES[table["column_details"][place]["measure"]].digits


def _place(table: Mapping[str, Any], group: str, place: int) -> str:
    condition = table["column_details"][place]["condition"]
    return (", ".join(part for part in (group, condition) if part) or table["columns"][place]) + ":"


def _difference(table: Mapping[str, Any], cell: Mapping[str, Any], place: int) -> str:
    digits, difference = _digits(table, place), cell["difference"]
    return f"{difference['mean']:+.{digits}f} [{difference['low']:+.{digits}f}, {difference['high']:+.{digits}f}]"


def _entry(claim: Mapping[str, Any], verdict: Verdict) -> Sequence[str]:
    lines = [f"## {claim['id']}", "", f"{claim['where']}. **The paper:** {claim['says']}"]
    if "remark" in claim:
        lines.append(claim["remark"])
    profile = f" ({', '.join(sorted(verdict.profiles))} profile)" if verdict.measured and verdict.profiles else ""
    measured = verdict.measured or f"nothing yet: `zetaclip reproduce {claim['experiment']}`"
    return [*lines, "", f"**Measured{profile}:** {measured}", "", f"**Verdict:** {verdict.word}"]
