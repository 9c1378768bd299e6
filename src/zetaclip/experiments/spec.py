"""An experiment as its TOML file describes it, checked.

Nothing here knows how a run is started. A mistake in a file is a ``CommandError`` that names the
file and the key.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import CommandError
from ..training.config import Config
from .measures import MEASURES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parent
OUT = "results"  # the default results folder

# In the order of the paper; the last ones are not in the paper.
ORDER = (
    *(
        "iid",
        "tabular",
        "recent",
        "noniid",
        "clip-sweep",
        "zone",
        "components",
        "smoothing",
        "probe-layer",
    ),
    *("calibration", "runtime", "controls", "budget", "resnet", "imagenet"),
    *("accuracy", "accuracy-tables"),
)

# The settings of `zetaclip train`; a plan may set nothing else.
CONFIG_KEYS = frozenset(setting.name for setting in fields(Config))

# Other folders inside a results folder; see store.py.
_TAKEN = ("runs", "configs", "logs")

_EXPERIMENT_KEYS = frozenset(
    [
        "title",
        "source",
        "about",
        "baseline",
        "data",
        "readings",
        "measures",
        "published_measures",
        "notes",
        "groups",
        "rows_from",
        "subject",
        "columns",
        "rows",
        "series",
        "plots",
        "published",
        "looks",
        "exclusive",
        "base",
        "recipes",
        "methods",
        "datasets",
    ]
)
_ROW_KEYS = frozenset(["label", "method", "set", "recipes", "rate_of", "rate_times_mean_clip"])
_COLUMN_KEYS = frozenset(["label", "data", "readings", "recipe", "measures", "set", "x"])
_GROUP_KEYS = frozenset(["label", "data", "recipe", "set", "sets"])


@dataclass(frozen=True)
class Published:
    """One cell of the paper."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Experiment:
    """One TOML file, together with what all experiments share.

    Args:
        name: The name of the file, without its ending.
        title: One line about it.
        about: A paragraph about it.
        source: Where it is in the paper; "" if it is not.
        baseline: The row that others are compared with.
        groups: Parts of the table with their own rows.
        columns: The columns, each with its data, readings and measures.
        rows: The rows, each with its method.
        published: The paper's cells by group and row, one for each column and measure.
        common: Base settings, recipes, readings, data sets and methods.
        published_measures: The measures that the paper reports; None for all.
        notes: Remarks under the table.
        subject: The row that is compared with every published row; "" for none.
        series: Values over epochs or probes to report.
        plots: Plots over columns.
        looks: Numbers of seeds at which rows are compared; () for those of the data set.
        exclusive: Whether each run has the machine to itself, because it is timed.
        given: What the user called it: a name, or the path of a file.
    """

    name: str
    title: str
    about: str
    source: str
    baseline: str
    groups: tuple[dict[str, Any], ...]
    columns: tuple[dict[str, Any], ...]
    rows: tuple[dict[str, Any], ...]
    published: dict[str, dict[str, list[Published | None]]]
    common: dict[str, Any]
    published_measures: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    subject: str = ""
    series: tuple[dict[str, Any], ...] = ()
    plots: tuple[dict[str, Any], ...] = ()
    looks: tuple[int, ...] = ()
    exclusive: bool = False
    given: str = ""


def names() -> list[str]:
    """The experiments of the package, in the order of the paper."""
    found = {path.stem for path in FOLDER.glob("*.toml") if not path.name.startswith("_")}
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def load(name: str) -> Experiment:
    """An experiment by its name, or by the path of a TOML file.

    Raises:
        CommandError: There is no such experiment, or its file has a mistake.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise CommandError(f"there is no experiment {name!r}{hint} There are: {', '.join(names())}")
    if not path.exists():
        raise CommandError(f"there is no file {path}")
    _check_own_name(path)
    return replace(
        _experiment(path, read_toml(path), read_toml(FOLDER / "_common.toml")), given=name
    )


def _check_own_name(path: Path) -> None:
    """Checks that a user's file does not write into another experiment's folder."""
    if path.resolve().parent == FOLDER:
        return
    if path.stem in names():
        raise CommandError(
            f"{path}: {path.stem} is an experiment of this package, and its tables go to a folder"
            " of that name; rename the file"
        )
    if path.stem in _TAKEN:
        raise CommandError(
            f"{path}: the results folder uses the name {path.stem} for something else; rename the"
            " file"
        )


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        CommandError: It is not valid.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} is not valid TOML: {error}") from error


def published_cell(text: str) -> Published | None:
    """A cell of the paper: ``"94.22 ± 0.15"``, ``"1.05"``, or ``"--"`` for an empty one.

    Raises:
        CommandError: The text has another form.
    """
    if text == "--":
        return None
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?", text)
    if match is None:
        raise CommandError(f"a published cell is {text!r}; write '94.22 ± 0.15', '94.22' or '--'")
    return Published(float(match[1]), None if match[2] is None else float(match[2]))


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables merged, with inner tables too; later ones win."""
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            inner = result.get(key)
            both = isinstance(value, Mapping) and isinstance(inner, Mapping)
            result[key] = merged(inner or {}, value) if both else value
    return result


def _experiment(path: Path, table: dict[str, Any], shared: dict[str, Any]) -> Experiment:
    where = path.name
    _known(where, "the experiment", table, _EXPERIMENT_KEYS)
    # In an experiment, `data` is the name of a data set; its own sets are under `datasets`.
    own: dict[str, Any] = {
        key: table[key] for key in ("base", "recipes", "methods") if key in table
    }
    common = merged(shared, own, {"data": table.get("datasets", {})})
    default = {key: table[key] for key in ("data", "readings", "measures") if key in table}
    groups = tuple(table.get("groups", [{"label": ""}]))
    rows = (*_row_sets(where, table, common), *table.get("rows", []))
    columns = tuple({**default, **column} for column in table.get("columns", [{"label": ""}]))
    for what, items, keys in (
        ("a group", groups, _GROUP_KEYS),
        ("a column", columns, _COLUMN_KEYS),
        ("a row", rows, _ROW_KEYS),
    ):
        labels = [item.get("label") for item in items]
        if None in labels or len(set(labels)) != len(labels) or not labels:
            raise CommandError(f"{where}: {what} needs a label of its own")
        for item in items:
            _known(where, f"{what} {item['label']!r}", item, keys)
    named = {column["label"]: column for column in columns}
    for group in groups:
        for label in group.get("sets", {}):
            _one_of(where, f"a column of the sets of {group['label']!r}", label, named)
    _check_complete(where, common)
    _check_names(where, common, groups, columns, rows)
    for key in ("baseline", "subject"):
        if table.get(key, "") not in ("", *(row["label"] for row in rows)):
            raise CommandError(f"{where}: the {key} {table[key]!r} is not one of the rows")
    published = table.get("published", {})
    by_group = published if any(group["label"] for group in groups) else {"": published}
    return Experiment(
        name=path.stem,
        title=table.get("title", path.stem),
        about=table.get("about", ""),
        source=table.get("source", ""),
        baseline=table.get("baseline", ""),
        groups=groups,
        columns=columns,
        rows=rows,
        published={
            group: {row: [published_cell(text) for text in cells] for row, cells in lines.items()}
            for group, lines in by_group.items()
        },
        common=common,
        published_measures=(
            tuple(table["published_measures"]) if "published_measures" in table else None
        ),
        notes=tuple(table.get("notes", ())),
        subject=table.get("subject", ""),
        series=tuple(table.get("series", ())),
        plots=tuple(table.get("plots", ())),
        looks=tuple(table.get("looks", ())),
        exclusive=table.get("exclusive", False),
    )


def _row_sets(
    where: str, table: Mapping[str, Any], common: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rows that experiments share, by the names of their sets."""
    found = []
    for name in table.get("rows_from", []):
        _one_of(where, "a set of rows", name, common["rows"])
        found += common["rows"][name]
    return found


def _check_complete(where: str, common: dict[str, Any]) -> None:
    """Checks for the keys that plans and estimates need."""
    for name, method in common["methods"].items():
        _needs(where, f"the method {name!r}", method, "set", "what train is told, with its method")
        _needs(
            where, f"the set of the method {name!r}", method["set"], "method", "a method of train"
        )
    for name, data in common["data"].items():
        _needs(
            where,
            f"the data set {name!r}",
            data,
            "size",
            "the public number of its training records",
        )
        _needs(where, f"the data set {name!r}", data, "set", "what train is told, with its data")
        _needs(
            where,
            f"the set of the data set {name!r}",
            data["set"],
            "data",
            "a name or a path, as train takes it",
        )


def _needs(where: str, what: str, table: Mapping[str, Any], key: str, meaning: str) -> None:
    if key not in table:
        raise CommandError(f"{where}: {what} has no {key} ({meaning})")


def _check_names(where: str, common: dict[str, Any], groups: Any, columns: Any, rows: Any) -> None:
    for row in rows:
        _one_of(where, f"the method of {row['label']!r}", row.get("method"), common["methods"])
        if "rate_of" in row:
            _one_of(where, f"rate_of of {row['label']!r}", row["rate_of"], common["methods"])
    for part in (*groups, *columns):
        if "recipe" in part:
            _one_of(where, f"the recipe of {part['label']!r}", part["recipe"], common["recipes"])
    for column in columns:
        for reading in column.get("readings", ()):
            _one_of(where, f"a reading of {column['label']!r}", reading, common["readings"])
        if not column.get("measures"):
            raise CommandError(
                f"{where}: column {column['label']!r} measures nothing; set measures"
            )
        for measure in column["measures"]:
            _one_of(where, f"a measure of {column['label']!r}", measure, MEASURES)
        for group in groups:
            what = f"the data of {group['label'] or column['label'] or 'the experiment'!r}"
            _one_of(where, what, group.get("data", column.get("data")), common["data"])


def _one_of(where: str, what: str, value: Any, known: Mapping[str, Any]) -> None:
    if value not in known:
        raise CommandError(f"{where}: {what} is {value!r}; there are: {', '.join(known)}")


def _known(where: str, what: str, table: Mapping[str, Any], keys: frozenset[str]) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            raise CommandError(
                f"{where}: {what} has an unknown key {key!r}" + (f"; {near[0]}?" if near else "")
            )
