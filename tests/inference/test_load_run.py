"""From a run folder to answers for new records."""

import csv
import json
import shutil
import stat

import numpy as np
import pytest
import torch
from made_up import SCHEMA, patients, settings, write
from PIL import Image
from safetensors.torch import load_file

import zetaclip
from zetaclip.cli import main
from zetaclip.data import load
from zetaclip.errors import InputError, PrivacyLeakWarning
from zetaclip.models import build
from zetaclip.training import Config, description, train


def by_hand(folder, rows):
    """Probabilities of "well", from weights and schema, without the library's preparation."""
    weights = load_file(folder / "model.safetensors")
    x = []
    for age, dose, ward, *_ in rows:
        missing = dose == ""
        scaled = 0.0 if missing else 2 * min(max(float(dose), 0), 10) / 10 - 1
        x.append(
            [2 * (age - 18) / 77 - 1, scaled, float(missing), *(float(ward == w) for w in "ABC")]
        )
    h = torch.relu(torch.tensor(x) @ weights["fc1.weight"].T + weights["fc1.bias"])
    return torch.sigmoid(h @ weights["fc2.weight"].T + weights["fc2.bias"])[:, 0].numpy()


def test_answers_are_those_of_the_weights_and_the_declared_columns(table_run, tmp_path):
    folder, _ = table_run
    rows = [(40, "3.5", "A"), (90, "", "B"), (30, "99", "no such ward"), (18, "0", "C")]
    run = zetaclip.load_run(folder)
    new = write(tmp_path / "new.csv", rows, "age,dose,ward")
    expected = by_hand(folder, rows)
    shares = run.predict_proba(new)
    assert run.classes == ("ill", "well") and shares.shape == (4, 2)
    assert shares[:, 1] == pytest.approx(expected, abs=1e-6) and shares.sum(1) == pytest.approx(1)
    assert run.predict(new).tolist() == ["well" if p > 0.5 else "ill" for p in expected]
    assert (run.predict(new) != run.predict(new)[0]).any()  # not one class for all


def test_every_form_of_the_rows_gives_the_same(table_run, tmp_path):
    pandas = pytest.importorskip("pandas")
    folder, _ = table_run
    rows = [(40, "3.5", "A"), (90, "", "B"), (30, "7", "C")]
    run = zetaclip.load_run(folder)
    expected = run.predict_proba(write(tmp_path / "new.csv", rows, "age,dose,ward"))
    columns = {"age": [40, 90, 30], "dose": [3.5, None, 7.0], "ward": ["A", "B", "C"]}
    frame = pandas.DataFrame({**columns, "more": [1, 2, 3]})
    array = np.array([[40, 3.5, "A"], [90, np.nan, "B"], [30, 7, "C"]], dtype=object)
    mappings = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for form in (frame, frame.iloc[:, ::-1], columns, mappings, array, run.prepare(columns)):
        assert np.array_equal(run.predict_proba(form), expected)


def test_what_load_run_tells(table_run):
    folder, data = table_run
    run = zetaclip.load_run(folder)
    result = json.loads((folder / "result.json").read_text())
    assert run.epsilon == result["epsilon"] > 0 and run.delta == result["delta"]
    assert run.finished and run.steps == 40 and run.task == "binary"
    assert f"{run.epsilon:.3g}" in repr(run) and "ε" in run.card
    assert not run.model.training and len(list(run.model.parameters())) == 4
    again = load(data, schema=run.schema)  # no warning: everything is declared in it
    assert torch.equal(again.train.x, load(data, schema=SCHEMA).train.x)


def test_a_wrong_table_says_which_column(table_run, tmp_path):
    folder, _ = table_run
    run = zetaclip.load_run(folder)
    bad = write(tmp_path / "bad.csv", [(40, "3.5", "A")], "age,doze,ward")
    with pytest.raises(InputError, match=r"no column 'dose'. Did you mean 'doze'"):
        run.predict(bad)
    word = write(tmp_path / "word.csv", [(40, "3.5", "A"), (41, "much", "B")], "age,dose,ward")
    with pytest.raises(InputError, match=r"line 3: 'much' in column dose"):
        run.predict(word)
    with pytest.raises(InputError, match="3 columns age, dose, ward"):
        run.predict(np.zeros((2, 7)))
    with pytest.raises(InputError, match="no rows"):
        run.predict({"age": [], "dose": [], "ward": []})
    with pytest.raises(InputError, match="different lengths"):
        run.predict({"age": [1], "dose": [1, 2], "ward": ["A"]})
    with pytest.raises(InputError, match="does not exist"):
        run.predict(tmp_path / "none.csv")
    with pytest.raises(InputError, match="is a folder"):
        run.predict(tmp_path)


def test_nothing_of_the_records_is_in_the_folder(table_run):
    folder, _ = table_run
    assert not (folder / "private").exists()
    for path in folder.iterdir():
        assert b"Secret" not in path.read_bytes(), path.name


def test_inferred_values_stay_in_private(tmp_path):
    rows = [
        (age, dose, f"ward-{i % 7}", "x", out)
        for i, (age, dose, _, _, out) in enumerate(patients())
    ]
    data = write(tmp_path / "patients.csv", rows)
    config = settings(data, schema=None, target="outcome")
    with pytest.warns(PrivacyLeakWarning):
        train(config, tmp_path / "run")
    public = [path for path in (tmp_path / "run").iterdir() if path.is_file()]
    assert {"model.json", "MODEL_CARD.md"} <= {path.name for path in public}
    for path in public:
        assert b"ward-3" not in path.read_bytes(), path.name
    hidden = tmp_path / "run" / "private" / "input.json"
    assert [p.name for p in hidden.parent.iterdir()] == ["input.json"]
    assert stat.S_IMODE(hidden.stat().st_mode) == 0o600 and "ward-3" in hidden.read_text()
    run = zetaclip.load_run(tmp_path / "run")
    new = {"age": [40], "dose": [2], "ward": ["ward-3"]}
    assert run.classes == ("ill", "well") and len(run.predict(new)) == 1
    shutil.rmtree(hidden.parent)
    run = zetaclip.load_run(tmp_path / "run")
    assert run.schema is None and run.model(torch.zeros(1, 9)).shape == (1, 1)
    with pytest.raises(InputError, match=r"private/input\.json, which is not in"):
        run.predict(new)


def test_the_command_writes_predictions(table_run, tmp_path, capsys):
    folder, _ = table_run
    rows = patients(50)
    new = write(tmp_path / "new.csv", [row[:3] for row in rows], "age,dose,ward")
    out = tmp_path / "out.csv"
    assert main(["predict", str(folder), str(new), "--out", str(out), "--proba"]) == 0
    assert "50 predictions" in capsys.readouterr().out
    said = list(csv.DictReader(out.read_text().splitlines()))
    assert list(said[0]) == ["prediction", "ill", "well"] and len(said) == 50
    expected = by_hand(folder, rows)
    assert [float(line["well"]) for line in said] == pytest.approx(expected, abs=1e-6)
    assert (
        np.mean([line["prediction"] == row[-1] for line, row in zip(said, rows, strict=True)]) > 0.8
    )
    assert main(["predict", str(folder), str(new)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == said[0]["prediction"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "{top}/none.csv"], "none.csv does not exist"),
        (["{top}", "{new}"], "has no model.json: it is no run folder"),
        (["{top}/nowhere", "{new}"], "nowhere is not a folder"),
        (["{run}", "{new}", "--out", "{run}/p.csv"], "in the run's folder"),
        (["{run}", "{new}", "--out", "{top}/no/p.csv"], "no folder"),
        (["{run}", "{new}", "--out", "{top}"], "takes the name of a file"),
    ],
)
def test_errors_of_the_command(table_run, tmp_path, capsys, words, message):
    new = write(tmp_path / "new.csv", [(40, "3", "A")], "age,dose,ward")
    places = {"run": table_run[0], "top": tmp_path, "new": new}
    assert main(["predict", *(word.format(**places) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_regression_answers_in_units_and_within_its_range(tmp_path):
    rows = [(i % 50, 20 * (i % 50)) for i in range(300)]
    data = write(tmp_path / "r.csv", rows, "x,y")
    schema = tmp_path / "s.json"
    schema.write_text(
        json.dumps(
            {
                "target": "y",
                "target_bounds": [0, 800],
                "columns": {"x": {"type": "numeric", "bounds": [0, 50]}},
            }
        )
    )
    config = Config(
        data=str(data), schema=str(schema), method="dp-sgd", model="mlp-2", sigma=0.3, steps=60,
        batch_size=100, num_examples=300, seed=1, data_options={"test_share": 0},
    )  # fmt: skip
    train(config, tmp_path / "run")
    run = zetaclip.load_run(tmp_path / "run")
    low, high = run.predict({"x": [2, 45]})
    assert low < 250 < 550 < high <= 800 and run.classes == ()
    # The clamp: a network that says more than the range allows.
    with torch.no_grad():
        run.model.fc2.bias += 9.0
    assert run.predict({"x": [2]}).tolist() == [800.0]
    with pytest.raises(InputError, match="predicts a number"):
        run.predict_proba({"x": [2]})


def test_folders_of_pictures(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name, channel in (("red", 0), ("blue", 2)):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(60):
            pixels = rng.integers(0, 120, (12, 16, 3), dtype=np.uint8)
            pixels[:, :, channel] += 130
            Image.fromarray(pixels).save(tmp_path / "train" / name / f"{i}.png")
    config = Config(
        data=str(tmp_path / "train"), image_size=8, model="mlp-2", method="dp-sgd",
        sigma=0.5, steps=30, batch_size=40, seed=2,
    )  # fmt: skip
    train(config, tmp_path / "run")
    (tmp_path / "new").mkdir()
    for name, color in (("a.png", (220, 20, 20)), ("b.jpg", (20, 20, 220))):
        Image.new("RGB", (30, 20), color).save(tmp_path / "new" / name)
    run = zetaclip.load_run(tmp_path / "run")
    assert run.predict(tmp_path / "new").tolist() == ["red", "blue"]
    assert run.predict(tmp_path / "new" / "b.jpg").tolist() == ["blue"]
    assert run.predict([tmp_path / "new" / "b.jpg"]).tolist() == ["blue"]
    pixels = np.zeros((2, 8, 8, 3), np.uint8)
    pixels[0, :, :, 0] = pixels[1, :, :, 2] = 255
    assert run.predict(pixels).tolist() == run.predict(pixels.transpose(0, 3, 1, 2)).tolist()
    assert run.predict(pixels).tolist() == ["red", "blue"]
    out = tmp_path / "p.csv"
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "new"), "--out", str(out)]) == 0
    assert out.read_text() == "file,prediction\na.png,red\nb.jpg,blue\n"
    (tmp_path / "new" / "aa.png").write_bytes(b"broken")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "new"), "--out", str(out)]) == 0
    assert out.read_text() == "file,prediction\na.png,red\nb.jpg,blue\n"
    assert "1 of 3 pictures can't be read" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"cannot read the image .*aa\.png"):
        run.predict(tmp_path / "new")
    with pytest.raises(InputError, match=r"shape \(3, 9, 9\)"):
        run.predict(np.zeros((1, 3, 9, 9), np.uint8))
    with pytest.raises(InputError, match="a table was given"):
        run.predict({"x": [1]})


def test_frozen_features_come_before_the_network(table_run, tmp_path, monkeypatch):
    """What a part that adds features must do, and nothing more."""
    folder = tmp_path / "run"
    shutil.copytree(table_run[0], folder)
    about = json.loads((folder / "model.json").read_text())
    about["features"] = {"kind": "flip", "digest": "abc"}
    (folder / "model.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match="unknown features 'flip'"):
        zetaclip.load_run(folder)

    class Flip(torch.nn.Module):
        def forward(self, x):
            return -x

    module = type("M", (), {"make": staticmethod(lambda settings: Flip())})
    monkeypatch.setitem(description.FEATURES, "flip", ("flips", "make"))
    monkeypatch.setitem(__import__("sys").modules, "zetaclip.flips", module)
    x = torch.randn(5, 6)
    plain, flipped = zetaclip.load_run(table_run[0]), zetaclip.load_run(folder)
    assert torch.equal(flipped.model(x), plain.model(-x))


def test_a_network_of_ones_own_is_built_again(table_run, tmp_path, monkeypatch):
    (tmp_path / "nets_of_mine.py").write_text(
        "import torch\n"
        "def net(input_shape, outputs):\n"
        "    return torch.nn.Linear(*input_shape, outputs)\n"
    )
    monkeypatch.chdir(tmp_path)
    train(settings(table_run[1], model="nets_of_mine:net", steps=2), tmp_path / "run")
    run = zetaclip.load_run(tmp_path / "run")
    assert type(run.model) is torch.nn.Linear and run.predict_proba(
        {"age": [1], "dose": [2], "ward": ["A"]}
    ).shape == (1, 2)


def test_a_folder_that_does_not_fit_its_weights(table_run, tmp_path):
    shutil.copytree(table_run[0], tmp_path / "run")
    about = json.loads((tmp_path / "run" / "model.json").read_text())
    about["network"]["name"] = "mlp-4"
    (tmp_path / "run" / "model.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match="can't be used"):
        zetaclip.load_run(tmp_path / "run")
    assert type(build("mlp-4", (6,), 1)) is not None


def test_a_data_frame_is_trained_on_and_resumed(tmp_path):
    pandas = pytest.importorskip("pandas")
    data = write(tmp_path / "p.csv", patients())
    frame, config = pandas.read_csv(data), settings(data)
    train(config, tmp_path / "file")
    train(config, tmp_path / "frame", data=frame)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("file", "frame"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    said = json.loads((tmp_path / "frame" / "config.json").read_text())["data"]
    assert said == "data in memory"
    assert train(config, tmp_path / "frame", data=frame, resume=True)["steps"] == 40
    dataset = load(data, schema=SCHEMA, test_share=0)
    train(config, tmp_path / "set", data=dataset)
    assert torch.equal(load_file(tmp_path / "set" / "model.safetensors")["fc1.bias"], a["fc1.bias"])
    assert (zetaclip.load_run(tmp_path / "frame").predict(frame) == frame["outcome"]).mean() > 0.8
