"""The paper claim by claim: what it says, what was measured, and whether it holds.

Verdicts are computed from ``results/*/table.json`` by the rule of each claim, so that the page can
be made again, and checked, at any time. Tables of the paper profile come first; those of the lite
profile are used for claims that they don't cover. A claim holds only if every cell that was run
supports it; cells that were not run are counted beside it. Rows are compared by the differences of
their common seeds. A difference whose interval contains zero decides nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .files import read_json, write_text
from .measures import MEASURES
from .results import CONFIDENCE, Difference, difference_text, paired_difference, reach
from .spec import FOLDER, load, names, read_toml, tables_of
from .tally import tally

HOLDS, FAILS, UNDECIDED, UNTESTED = "holds", "does not hold", "can't be told", "not tested here"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim.

    Args:
        word: One of ``HOLDS``, ``FAILS``, ``UNDECIDED`` and ``UNTESTED``.
        measured: What was measured.
        profiles: The profiles of the results.
    """

    word: str
    measured: str = ""
    profiles: frozenset[str] = field(default_factory=frozenset)


def write(out: str, page: str) -> None:
    """Writes the page of claims.

    Args:
        out: The results folder.
        page: The file to write.

    Raises:
        CommandError: The folder has no tables.
    """
    if not any(tables_of(Path(out), name) for name in names()):
        raise CommandError(
            f"{out} holds no tables: run `zetaclip reproduce NAME` first, or give their folder with"
            " --out"
        )
    write_text(Path(page), markdown(Path(out)))


def _counted(number: int, word: str) -> str:
    """A count with the verdict as a verb: "1 holds", "3 hold"."""
    plural = {HOLDS: "hold", FAILS: "do not hold"}
    return f"{number} {word if number == 1 else plural.get(word, word)}"


def markdown(out: Path) -> str:
    """The page of claims."""
    claims = read_toml(FOLDER / "_claims.toml")["claims"]
    verdicts = {claim["id"]: judge(claim, out) for claim in claims}
    words = [verdict.word for verdict in verdicts.values()]
    count = ", ".join(
        _counted(words.count(word), word) for word in (HOLDS, FAILS, UNDECIDED, UNTESTED)
    )
    page = [
        "# Reproduction, claim by claim",
        "",
        (
            "The claims are those of *When Gradient Clipping Becomes a Control Mechanism for"
            " Differential Privacy in Deep Learning* (arXiv 2602.10584). Made by `zetaclip"
            " reproduce --claims docs/reproduction.md` from the tables under `results/`; don't"
            " edit. The rules stand in `src/zetaclip/experiments/_claims.toml`: a claim holds only"
            " if every cell that was run supports it. Rows are compared seed by seed: a difference"
            " counts only where its 95 % interval leaves out zero, and can't be told otherwise, or"
            " from a single seed. *Best* compares with the rival that comes out best, by an"
            " interval widened for the number of rivals (Bonferroni). Intervals are not widened for"
            " the number of cells or of claims, and claims that read the same runs (`iid-better`,"
            " `components-better` and `rate-better` at its rate of 1 have one and the same"
            " difference on MNIST) stand or fall together. *Below* a limit: the interval over"
            " seeds. *Comparable* (`sweep-robust`) means that the mean accuracies range less than"
            " those they are compared with, and that none is farther than one point from that of"
            " C_0 = 1."
        ),
        "",
        f"{len(claims)} claims: {count}.",
        "",
        *_caveat(list(verdicts.values())),
        *tally(out),
        "| claim | experiment | verdict |",
        "| --- | --- | --- |",
    ]
    for claim in claims:
        page.append(
            f"| [{claim['id']}](#{claim['id']}) | {claim.get('experiment', 'accounting')} |"
            f" {verdicts[claim['id']].word} |"
        )
    for claim in claims:
        page += ["", *_entry(claim, verdicts[claim["id"]])]
    return "\n".join(page) + "\n"


def _caveat(verdicts: Sequence[Verdict]) -> list[str]:
    """What limits the verdicts, to be read before them."""
    if any("paper" in verdict.profiles for verdict in verdicts):
        return []
    return [
        (
            "**All measurements are of the lite profile**: shorter training than the paper's,"
            " mostly fewer seeds, and on CIFAR a smaller network. But for Heart and VED, where lite"
            " is the whole protocol, the paper's own has not been run, so *does not hold* means"
            " here, in these runs. Most learning rates lie at the edge of a grid of three, and how"
            " many of an experiment's do stands with each claim."
        ),
        "",
    ]


def judge(claim: Mapping[str, Any], out: Path) -> Verdict:
    """The verdict on one claim, from the tables in ``out``."""
    if claim["rule"] == "epsilon":
        return _epsilon(claim)
    verdicts = [
        _judge_table(claim, read_json(folder / "table.json"))
        for folder in tables_of(out, claim["experiment"])
    ]
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
        lost = any(
            cell and cell.get("diverged") for line in table["rows"] for cell in line["cells"]
        )
        text += f"; {missing} of {len(found)} not run" + (" or diverged" if lost else "")
    if table.get("rates_at_edge"):
        text += (
            f"; {table['rates_at_edge']} of the experiment's {table['rates']} learning rates at the"
            " edge of their grid"
        )
    words = [good for good, _ in cells]
    word = FAILS if False in words else UNDECIDED if None in words else HOLDS
    return Verdict(word, text, frozenset({table["profile"]}))


# Whether a cell supports the claim (None: undecided), and what was measured; None if nothing was.
Cell = tuple[bool | None, str] | None


def _better(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    cell = _cell(table, group, claim["row"], place)
    if cell is None or not cell["difference"]:
        return None
    return (
        cell["better"],
        (
            f"{_place(table, group, place)}"
            f" {difference_text(cell['difference'], _digits(table, place))}"
        ),
    )


def _only(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    """Better than the baseline, and no control is; a control without an interval could be."""
    own = _better(claim, table, group, place)
    if own is None:
        return None
    cells = {name: _cell(table, group, name, place) for name in claim["against"]}
    as_good = [name for name, cell in cells.items() if cell and cell["better"]]
    open_ones = [
        name
        for name, cell in cells.items()
        if cell is None or cell["difference"] is None or cell["difference"]["low"] is None
    ]
    text = f"{own[1]}, controls better than {table['baseline']}: {', '.join(as_good) or 'none'}"
    text += f", not known of: {', '.join(open_ones)}" if open_ones else ""
    return (False if as_good else None if own[0] and open_ones else own[0]), text


def _best(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    """Better than each of the rows ``against``; default: all private rows of the paper's table."""
    own = _values(table, group, claim["row"], place)
    if not own:
        return None
    rivals = claim.get("against") or _published_rivals(claim, table, group)
    good = table["column_details"][place]["good"]
    level = 1 - (1 - CONFIDENCE) / max(1, len(rivals))
    found = {
        name: difference
        for name in rivals
        if (difference := paired_difference(own, _values(table, group, name, place), level))
        is not None
    }
    if not found:
        return None
    nearest = min(found, key=lambda name: good * found[name].mean)
    mean, digits = statistics.fmean(own.values()), _digits(table, place)
    standing = "the only other" if len(found) == 1 else f"the best of {len(found)} others"
    distance = difference_text(vars(found[nearest]), digits)
    text = (
        f"{_place(table, group, place)} {mean:.{digits}f}; from {nearest}, {standing}, {distance}"
    )
    signs = [_sign(one, good) for one in found.values()]
    tied = [name for name, one in found.items() if _tied(one)]
    if claim.get("strict") and tied:
        text += f", the same in every seed as {' and '.join(tied)}"
        signs.append(False)
    if len(found) < len(rivals):
        text += f", {len(rivals) - len(found)} not run"
        signs.append(None)
    return (False if False in signs else None if None in signs else True), text


def _published_rivals(claim: Mapping[str, Any], table: Mapping[str, Any], group: str) -> list[str]:
    published = load(table["name"]).published.get(group, {})
    lines = [line for line in table["rows"] if line["group"] == group and line["method"] != "sgd"]
    return [
        line["label"]
        for line in lines
        if line["label"] in published and line["label"] != claim["row"]
    ]


def _sign(difference: Difference, good: int) -> bool | None:
    """True: better; False: worse; None: the interval contains zero, or there is none."""
    if difference.low is None or difference.high is None or difference.low <= 0 <= difference.high:
        return None
    return good * difference.mean > 0


def _tied(difference: Difference) -> bool:
    """Whether two rows are equal in each of several seeds: they are the same training."""
    return difference.n > 1 and difference.low == difference.high == 0


def _below(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    """Whether the 95 % interval over seeds is below the limit; None if it contains the limit."""
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
    return (
        True if mean + half <= claim["limit"] else False if mean - half > claim["limit"] else None
    ), text


def _monotone(sign: int) -> Any:
    """A rule: along the rows, the values only rise (or fall)."""

    def rule(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
        means = _means(table, group, claim["rows"], place)
        if not means:
            return None
        values = [_values(table, group, row, place) for row in claim["rows"]]
        steps = [paired_difference(later, earlier) for earlier, later in itertools.pairwise(values)]
        signs = [None if step is None else _sign(step, sign) for step in steps]
        shown = ", ".join(f"{mean:.{_digits(table, place)}f}" for mean in means)
        single = " (one seed)" if min(map(len, values)) == 1 else ""
        word = False if False in signs else None if None in signs else True
        return word, f"{_place(table, group, place)} {shown}{single}"

    return rule


def _narrower(claim: Mapping[str, Any], table: Mapping[str, Any], group: str, place: int) -> Cell:
    """The means of some rows range less than those of others, and stay near the mean of one row.

    A range alone would prove too little: seven points are less than eleven, and still not
    comparable.
    """
    lists = [
        _means(table, group, rows, place)
        for rows in (claim["rows"], claim["against"], [claim["row"]])
    ]
    if not all(lists):
        return None
    ours, theirs, (middle,) = lists
    ranges = [max(means) - min(means) for means in (ours, theirs)]
    farthest = max(abs(mean - middle) for mean in ours)
    digits = _digits(table, place)
    text = (
        f"{_place(table, group, place)} range {ranges[0]:.{digits}f} against"
        f" {ranges[1]:.{digits}f}, up to {farthest:.{digits}f} from {claim['row']} (limit"
        f" {claim['limit']:g})"
    )
    rows = [claim["row"], *claim["rows"], *claim["against"]]
    if min(len(_values(table, group, row, place)) for row in rows) == 1:
        return None, f"{text} (one seed)"
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
    holds = any(
        abs(value - claim["published"]) < 0.05 * claim["published"] for value in values.values()
    )
    return Verdict(HOLDS if holds else FAILS, text)


def _cell(table: Mapping[str, Any], group: str, row: str, place: int) -> Mapping[str, Any] | None:
    for line in table["rows"]:
        if (line["group"], line["label"]) == (group, row):
            cell: Mapping[str, Any] | None = line["cells"][place]
            return cell
    return None


def _values(table: Mapping[str, Any], group: str, row: str, place: int) -> dict[str, float]:
    """Values by seed; none if one of them diverged."""
    cell = _cell(table, group, row, place)
    return dict(cell.get("values", {})) if cell and not cell.get("diverged") else {}


def _means(table: Mapping[str, Any], group: str, rows: Sequence[str], place: int) -> list[float]:
    """The means of these rows; none if one of them has not been run or has a diverged seed."""
    cells = [_cell(table, group, row, place) for row in rows]
    means = [
        cell["ours"]["mean"]
        for cell in cells
        if cell is not None and cell["ours"] and not cell.get("diverged")
    ]
    return means if len(means) == len(cells) else []


def _digits(table: Mapping[str, Any], place: int) -> int:
    return MEASURES[table["column_details"][place]["measure"]].digits


def _place(table: Mapping[str, Any], group: str, place: int) -> str:
    condition = table["column_details"][place]["condition"]
    return (", ".join(part for part in (group, condition) if part) or table["columns"][place]) + ":"


def _entry(claim: Mapping[str, Any], verdict: Verdict) -> Sequence[str]:
    lines = [f"## {claim['id']}", "", f"{claim['where']}. **The paper:** {claim['says']}"]
    if "remark" in claim:
        lines.append(claim["remark"])
    profile = (
        f" ({', '.join(sorted(verdict.profiles))} profile)"
        if verdict.measured and verdict.profiles
        else ""
    )
    measured = verdict.measured or f"nothing yet: `zetaclip reproduce {claim['experiment']}`"
    return [*lines, "", f"**Measured{profile}:** {measured}", "", f"**Verdict:** {verdict.word}"]
