"""Exported files give the answers of the run, tried by the programs that read them."""

import json

import numpy as np
import pytest
import torch
from made_up import settings

import zetaclip
from zetaclip.cli import main
from zetaclip.errors import InputError
from zetaclip.inference import ENDINGS, FORMATS, export
from zetaclip.training import Config, train

NEW = {"age": [40, 90, 30], "dose": [3.5, None, 7.0], "ward": ["A", "B", "C"]}


def test_onnx_by_onnxruntime(table_run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    run = zetaclip.load_run(table_run[0])
    assert export(run, tmp_path / "m.onnx", "onnx") < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    (found,) = session.run(["probabilities"], {"x": run.prepare(NEW).numpy()})
    assert found == pytest.approx(run.predict_proba(NEW), abs=1e-6)
    about = json.loads(session.get_modelmeta().custom_metadata_map["zetaclip"])
    assert about["epsilon"] == run.epsilon and about["target"]["classes"] == ["ill", "well"]
    assert about["input"]["columns"]["age"]["bounds"] == [18.0, 95.0]


def test_torch_forms(table_run, tmp_path):
    run = zetaclip.load_run(table_run[0])
    x, expected = run.prepare(NEW), run.predict_proba(NEW)
    export(run, tmp_path / "m.pt", "torchscript")
    export(run, tmp_path / "m.pt2", "torch-export")
    extra = {"zetaclip": ""}
    with pytest.warns(DeprecationWarning, match="torch.jit.load"):
        script = torch.jit.load(tmp_path / "m.pt", _extra_files=extra)
    assert json.loads(extra["zetaclip"])["delta"] == run.delta
    program = torch.export.load(tmp_path / "m.pt2").module()
    for one in (script, program):
        assert one(x).detach().numpy() == pytest.approx(expected, abs=1e-6)
        assert one(x[:1]).shape == (1, 2)  # any number of records


def test_safetensors_are_the_weights(table_run, tmp_path):
    from safetensors.torch import load_file

    run = zetaclip.load_run(table_run[0])
    assert export(run, tmp_path / "m.safetensors", "safetensors") == 0.0
    found = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(found[name], value) for name, value in run.model.state_dict().items())


def test_pictures_and_several_classes(tmp_path):
    pytest.importorskip("onnxruntime")
    config = Config(data="digits", model="cnn", method="dp-sgd", sigma=1.0, steps=3, seed=1)
    train(config, tmp_path / "run")
    run = zetaclip.load_run(tmp_path / "run")
    pixels = np.random.default_rng(0).integers(0, 17, (9, 8, 8)).astype(np.float32)
    assert export(run, tmp_path / "m.onnx", rows=pixels) < 1e-5
    assert run.predict_proba(pixels).shape == (9, 10)


def test_a_file_that_answers_otherwise_is_not_kept(table_run, tmp_path, monkeypatch):
    run = zetaclip.load_run(table_run[0])

    def wrong(run, answering, x, path):
        path.write_bytes(b"a file")
        return lambda part: answering(part) + 0.001

    monkeypatch.setitem(FORMATS, "onnx", wrong)
    (tmp_path / "m.onnx").write_text("before")
    with pytest.raises(InputError, match=r"gives other answers than the run, by 0\.001"):
        export(run, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_the_command(table_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for format in ("torch-export", "safetensors"):
        assert main(["export", str(table_run[0]), "--format", format]) == 0
        assert (tmp_path / f"run{ENDINGS[format]}").exists()
        assert "tried on made-up records, answers differ by at most" in capsys.readouterr().out
    (tmp_path / "new.csv").write_text("age,dose,ward\n40,1,A\n")
    words = ["export", str(table_run[0]), "--format", "torchscript", "--rows", "new.csv"]
    assert main([*words, "--out", "x.pt"]) == 0 and (tmp_path / "x.pt").exists()
    assert main([*words, "--out", "no/x.pt"]) == 2 and "no folder" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    assert main(["export", str(table_run[0])]) == 2
    assert "pip install 'zetaclip[onnx]'" in capsys.readouterr().err


class Awkward(torch.nn.Module):
    """Its way depends on the values, which no exporter follows."""

    def __init__(self, input_shape, outputs):
        super().__init__()
        self.fc = torch.nn.Linear(*input_shape, outputs)

    def forward(self, x):
        return self.fc(x) if float(x.detach().sum()) > -1e9 else -self.fc(x)


def test_a_network_that_cannot_be_exported_says_so(table_run, tmp_path):
    run = zetaclip.load_run(table_run[0])
    run.model = Awkward((6,), 1)
    with pytest.raises(InputError, match="this network can't be exported as torch-export"):
        export(run, tmp_path / "m.pt2", "torch-export")
    with pytest.raises(InputError, match="unknown format 'tflite'"):
        export(run, tmp_path / "m", "tflite")


def test_what_is_private_is_not_exported(table_run, tmp_path):
    config = settings(table_run[1], schema=None, target="outcome")
    with pytest.warns(zetaclip.PrivacyLeakWarning):
        train(config, tmp_path / "run")
    run = zetaclip.load_run(tmp_path / "run")
    for format in ("safetensors", "torchscript"):
        export(run, tmp_path / format, format)
        content = (tmp_path / format).read_bytes()
        assert b"dose" not in content and b"well" not in content and b"zetaclip_model" in content


def test_a_range_that_was_inferred_is_not_exported(tmp_path):
    rows = "".join(f"{i % 50},{20.5 * (i % 50)}\n" for i in range(300))
    (tmp_path / "r.csv").write_text("x,y\n" + rows)
    config = Config(
        data=str(tmp_path / "r.csv"), target="y", method="dp-sgd", model="mlp-2", sigma=1.0,
        steps=2, batch_size=50,
    )  # fmt: skip
    with pytest.warns(zetaclip.PrivacyLeakWarning):
        train(config, tmp_path / "run")
    run = zetaclip.load_run(tmp_path / "run")
    assert run.predict({"x": [3]}).shape == (1,)
    with pytest.raises(InputError, match="range of the target was inferred from private data"):
        export(run, tmp_path / "m.pt", "torchscript")
    export(run, tmp_path / "m.safetensors", "safetensors")
