"""Every experiment file: it plans, it asks `zetaclip train` for known things, and its published
cells are the paper's."""

import inspect
import re
import warnings
from pathlib import Path

import pytest

from zetaclip import Spectral
from zetaclip.errors import CommandError
from zetaclip.experiments import plan, spec

PAPER = Path(__file__).resolve().parents[3] / "shared/seed/000_32f4d8cacd2adeeb.txt"
EXPECTED = [
    "iid",
    "tabular",
    "recent",
    "noniid",
    "clip-sweep",
    "zone",
    "components",
    "smoothing",
    "probe-layer",
    "calibration",
    "runtime",
    "controls",
    "budget",
    "resnet",
    "imagenet",
    "accuracy",
    "accuracy-tables",
]

BOARDS = ("accuracy", "accuracy-tables")


def test_every_experiment_is_there():
    assert spec.names() == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_it_plans(name):
    planned = plan.make_plan(spec.load(name))
    assert planned.runs and planned.columns
    rungs = [run for ladder in planned.ladders.values() for run in ladder.runs(1.0)]
    for run in [*planned.runs, *rungs]:
        assert set(run.config) <= spec.CONFIG_KEYS
        lengths = ("epochs" in run.config) + ("steps" in run.config)
        assert lengths == 1 or (lengths == 0 and run.config["method"] == "auto")
        private = run.config["method"] not in ("sgd", "adam")
        assert (("epsilon" in run.config) + ("sigma" in run.config) == 1) == private
        assert ("delta" in run.config) == private
        if private:
            assert run.config["delta"] == (1e-3 if name == "imagenet" else 1e-5)


@pytest.mark.parametrize("name", EXPECTED)
def test_its_controllers_can_be_built(name):
    known = set(inspect.signature(Spectral.__init__).parameters) | {"paper"}
    for run in plan.make_plan(spec.load(name)).runs:
        if "spectral" not in run.config:
            continue
        options = dict(run.config["spectral"])
        assert set(options) <= known
        literal = options.pop("paper", False)
        if options.get("bounds") == "none":
            options["bounds"] = None
        elif "bounds" in options:  # C_0 is inside: a start outside would warn
            low, high = options["bounds"]
            assert low < run.config["clip"] < high
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (Spectral.paper if literal else Spectral)(run.config.get("clip", 1.0), **options)


def test_every_controller_has_its_fifty_probes():
    for name in EXPECTED:
        experiment = spec.load(name)
        sizes = {key: data["size"] for key, data in experiment.common["data"].items()}
        for run in plan.make_plan(experiment).runs:
            if "spectral" in run.config and name != "imagenet":
                steps = plan.steps_of(run.config, sizes[run.labels["data"]])
                slow = run.labels["row"] == "WW-DP-SGD, probe period K=100"
                assert steps / run.config["spectral"]["period"] >= (25 if slow else 50), run.labels


def test_every_controller_says_which_form_it_is():
    # A recipe may choose the form that is meant where none is given, so none may be left out.
    for name in EXPECTED:
        for run in plan.make_plan(spec.load(name)).runs:
            if "spectral" in run.config:
                literal = run.labels["method"] == "ww-dp-sgd"
                assert run.config["spectral"]["paper"] is literal


def test_looks_and_smallest_effects_are_those_of_the_protocol():
    common = spec.load("iid").common["data"]
    quick = {"mnist-features", "emnist", "cifar10", "cifar100", "adult", "ved"}
    for name, data in common.items():
        assert data["looks"] == (
            [5, 10, 20] if name in quick else {"heart": [20], "cifar10-resnet": [3]}.get(name, [5])
        )
        small = {"accuracy": 0.2 if name in quick else 0.5, "auc": 0.002, "rmse": 0.002}
        assert all(data["effects"][key] == small[key] for key in small if key in data["effects"])
        assert set(data["effects"]) & set(small)


def test_the_board_has_fewer_seeds_only_of_what_is_expensive():
    planned = plan.make_plan(spec.load("accuracy"))
    for (group, row, _), seeds in planned.cells.items():
        network = row.startswith("Network") and (group != "digits" or "views" in row)
        assert list(seeds) == ([1] if network or group == "CIFAR-100" else [1, 2, 3, 4, 5])


def test_controls_stand_beside_spectral_control_everywhere():
    wanted = {row["label"] for row in spec.load("iid").common["rows"]["controls"]}
    assert len(wanted) == 5
    for name in EXPECTED:
        if name not in ("runtime", "resnet", "imagenet", "clip-sweep", *BOARDS):
            assert wanted <= {row["label"] for row in spec.load(name).rows}, name


# An independent reading of the paper's LaTeX.


def clean(text):
    text = re.sub(r"~?\\cite\{[^}]*\}", "", text)
    text = re.sub(r"\\multirow\{\d+\}\{\*\}", "", text)
    for before, after in (
        (r"\beta", "β"),
        (r"\kappa", "κ"),
        (r"\zeta_\star", "ζ*"),
        (r"\pm", "±"),
        (r"\alpha", "α"),
        (r"\(", ""),
        (r"\)", ""),
        ("$", ""),
        ("{=}", "="),
    ):
        text = text.replace(before, after)
    text = re.sub(r"\\(textbf|texttt)", "", text).replace("{", "").replace("}", "")
    return re.sub(r"\s*±\s*", " ± ", text).strip()


def latex_rows(label):
    source = PAPER.read_text(encoding="utf-8")
    start = source.index(f"\\label{{{label}}}")
    body = source[start : source.index("\\end{tabular}", start)]
    body = body[body.index("\\toprule") :]
    body = re.sub(r"\\(toprule|midrule|bottomrule)", "", body)
    return [[clean(cell) for cell in row.split("&")] for row in body.split("\\\\") if "&" in row]


def by_label(rows, *columns):
    """The paper calls its own method "(ours)"; in our tables, where "ours" are all numbers that are
    not the paper's, it has its name alone."""
    return {row[0].removesuffix(" (ours)"): [row[column] for column in columns] for row in rows}


def read_iid():
    head, _, *rows = latex_rows("tab:iid_all")
    labels = [column["label"] for column in spec.load("iid").columns]
    assert head[1:] == [*(one for one in labels if "coupled" not in one), "ImageNet-100"]
    imagenet = spec.read_toml(spec.FOLDER / "imagenet.toml")["published"]
    every = by_label(rows, 5)
    assert imagenet == {row: every[row] for row in imagenet}
    return by_label(rows, 1, 2, 3, 4)


def read_tabular():
    return by_label(latex_rows("tab:adult_ved_results")[1:], 1, 2, 3)


def read_recent():
    head, *rows = latex_rows("tab:comparison_recent_adaptive")
    assert head[1:] == [column["label"] for column in spec.load("recent").columns]
    return by_label(rows, 1, 2, 3, 4)


def read_noniid():
    head, *rows = latex_rows("tab:noniid_combined")
    assert head[2:] == [column["label"] for column in spec.load("noniid").columns]
    found, group = {}, ""
    for first, method, *cells in rows:
        group = first or group
        method = {"Non-private": "Non-private (SGD)"}.get(method, method)
        found.setdefault(group, {})[method] = cells
    del found["ImageNet"]  # the data are not here
    return found


def read_sweep():
    rows = latex_rows("tab:sweep_C")[1:]
    return by_label([row for row in rows if len(row) == 5], 2, 3, 4)


def read_zone():
    return {f"ζ*={row[0]}, r={row[1]}": row[2:] for row in latex_rows("tab:ablate_zone")[1:]}


def read_components():
    return by_label(latex_rows("tab:ablate")[1:], 1)


def read_smoothing():
    return by_label(latex_rows("tab:ablate_beta")[1:], 1)


def read_layers():
    rows = latex_rows("tab:cifar10_probe_layer_summary")[1:]
    return {
        row[0]: [row[3], *re.split(r"\s*/\s*", row[4]), *re.split(r"\s*/\s*", row[5])]
        for row in rows
    }


def read_calibration():
    return by_label(
        [row for row in latex_rows("tab:calibration_points") if "±" in row[1]], 1, 2, 3, 4, 5, 6
    )


def read_runtime():
    return by_label(latex_rows("tab:runtime_overhead")[1:], 1, 2, 3, 4)


READERS = {
    "iid": read_iid,
    "tabular": read_tabular,
    "recent": read_recent,
    "noniid": read_noniid,
    "clip-sweep": read_sweep,
    "zone": read_zone,
    "components": read_components,
    "smoothing": read_smoothing,
    "probe-layer": read_layers,
    "calibration": read_calibration,
    "runtime": read_runtime,
}


@pytest.mark.skipif(
    not PAPER.exists(), reason="the paper's LaTeX source is not beside this checkout"
)
@pytest.mark.parametrize("name", READERS)
def test_published_cells_are_the_papers(name):
    ours = spec.read_toml(spec.FOLDER / f"{name}.toml")["published"]
    assert ours == READERS[name]()


@pytest.mark.skipif(
    not PAPER.exists(), reason="the paper's LaTeX source is not beside this checkout"
)
def test_published_trajectories_are_the_papers():
    (series,) = spec.load("probe-layer").series
    rows = latex_rows("tab:cifar10_probe_layer_C_values")[1:]
    assert [int(row[0]) for row in rows] == list(range(1, 25))
    columns = [[float(row[number]) for row in rows] for number in range(1, 6)]
    assert list(series["published"]["clip"].values()) == columns


def test_every_published_cell_has_a_column():
    for name in READERS:
        experiment = spec.load(name)
        planned = plan.make_plan(experiment)
        places = {column.published for column in planned.columns} - {None}
        for group, lines in experiment.published.items():
            assert group in {item["label"] for item in experiment.groups}
            for row, cells in lines.items():
                assert row in {item["label"] for item in experiment.rows}
                assert places == set(range(len(cells)))


@pytest.mark.parametrize("text", ["94.22+-0.15", "94.22 ±", "± 0.1", "", "nan"])
def test_a_mistyped_cell_is_refused(text):
    with pytest.raises(CommandError, match="published cell"):
        spec.published_cell(text)


def test_an_unknown_experiment_names_the_near_one():
    with pytest.raises(CommandError, match="did you mean controls"):
        spec.load("contrls")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('method = "dp-sgd"', 'method = "dp-sdg"', "the method of 'DP-SGD'"),
        ('readings = ["sigma"]', 'readings = ["sigmas"]', "sigmas"),
        ('measures = ["accuracy", "clip_mean"]', 'measures = ["accurracy"]', "accurracy"),
        ('baseline = "DP-SGD"', 'baseline = "DP-GSD"', "baseline"),
        ('rows_from = ["subject"', 'rows_from = ["subjects"', "subjects"),
        ('rate_of = "ww-practical"', 'rate_of = "ww"', "rate_of"),
        ("baseline = ", "base_line = ", "baseline?"),
        ('data = "mnist"', 'data = "mnits"', "mnits"),
        ("[[rows]]", "[[rows]", "not valid TOML"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, before, after, message):
    text = (spec.FOLDER / "controls.toml").read_text(encoding="utf-8")
    assert before in text
    (tmp_path / "own.toml").write_text(text.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(CommandError, match=re.escape(message)):
        spec.load(str(tmp_path / "own.toml"))


def test_settings_of_a_column_that_is_not_there_are_refused(tmp_path):
    text = (spec.FOLDER / "noniid.toml").read_text(encoding="utf-8")
    assert text.count('sets."α=0.5"') == 2
    own = tmp_path / "own.toml"
    own.write_text(text.replace('sets."α=0.5"', 'sets."α=0.4"', 1), encoding="utf-8")
    with pytest.raises(CommandError, match=r"the sets of 'EMNIST' is 'α=0\.4'; there are: α=1\.0"):
        spec.load(str(own))


@pytest.mark.parametrize(
    ("name", "message"),
    [("iid", "iid is an experiment of this package"), ("runs", "rename")],
)
def test_a_name_that_is_taken_is_refused(tmp_path, name, message):
    text = (spec.FOLDER / "controls.toml").read_text(encoding="utf-8")
    (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    with pytest.raises(CommandError, match=message):
        spec.load(str(tmp_path / f"{name}.toml"))
    assert spec.load(str(spec.FOLDER / "iid.toml")).name == "iid"


def test_a_key_that_train_does_not_know_is_refused(tmp_path):
    text = (
        (spec.FOLDER / "controls.toml")
        .read_text(encoding="utf-8")
        .replace("rate_times_mean_clip", "set.decuple")
    )
    (tmp_path / "own.toml").write_text(text, encoding="utf-8")
    with pytest.raises(CommandError, match="decuple"):
        plan.make_plan(spec.load(str(tmp_path / "own.toml")))


OWN = """
baseline = "DP-SGD"
data = "mine"
measures = ["accuracy"]
[datasets.mine]
size = 1000
rates = { sgd = 0.1 }
looks = [2]
set = {data = "table.csv", target = "y", model = "mlp", batch_size = 50, epochs = 4, epsilon = 3.0}
[methods.half-clip]
rate = "sgd"
set = { method = "dp-sgd", clip = 0.5 }
[[rows]]
label = "DP-SGD"
method = "dp-sgd"
[[rows]]
label = "half"
method = "half-clip"
"""


def test_a_method_and_a_data_set_of_ones_own(tmp_path):
    (tmp_path / "own.toml").write_text(OWN, encoding="utf-8")
    planned = plan.make_plan(spec.load(str(tmp_path / "own.toml")))
    assert [(run.labels["row"], run.config["clip"]) for run in planned.runs] == [
        ("DP-SGD", 1.0),
        ("half", 0.5),
    ] * 2
    assert planned.runs[0].config["target"] == "y"


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("size = 1000", "the data set 'mine' has no size"),
        ("rates = { sgd = 0.1 }", "no learning rate to start from for dp-sgd"),
        ('data = "table.csv", ', "the set of the data set 'mine' has no data"),
        ('model = "mlp", ', "'mine' has no model"),
        ("batch_size = 50, ", "'mine' has no batch_size"),
        ("epochs = 4, ", "'mine' has no epochs or steps"),
        ('set = { method = "dp-sgd", clip = 0.5 }', "the method 'half-clip' has no set"),
        ('method = "dp-sgd", ', "the set of the method 'half-clip' has no method"),
    ],
)
def test_what_is_missing_is_named_before_anything_runs(tmp_path, without, message):
    assert without in OWN
    (tmp_path / "own.toml").write_text(OWN.replace(without, "", 1), encoding="utf-8")
    with pytest.raises(CommandError, match=f"^own.*{re.escape(message)}"):
        plan.make_plan(spec.load(str(tmp_path / "own.toml")))
