"""``zetaclip probe``: what it prints, what it draws, and what it refuses."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from zetaclip.cli import main
from zetaclip.spectrum import eigenvalues, fit_tail
from zetaclip.spectrum.checkpoint import CheckpointError, load_matrices


def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Linear(300, 80), nn.Linear(80, 2)
    )
    with torch.no_grad():
        model[2].weight *= (torch.rand(80, 1) + 1e-3) ** -0.5
    return model


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(net().state_dict(), path)
    return path


def test_table_has_a_line_per_matrix(checkpoint, capsys):
    assert main(["probe", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["layer", "shape", "zeta", "+-"]
    assert [line.split()[0] for line in lines[1:]] == ["0.weight", "2.weight", "3.weight"]
    assert "16x27" in lines[1] and "weak: 16 eigenvalues" in lines[1]
    assert lines[2].endswith("ok") and "300" in lines[2]
    assert "no fit: 2 distinct" in lines[3]
    assert "".join(lines).isascii()


def test_json_holds_the_numbers(checkpoint, capsys):
    assert main(["probe", str(checkpoint), "--json", "--fit", "ks", "--layer", "[23]*"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in rows] == ["2.weight", "3.weight"]
    weight = torch.load(checkpoint, weights_only=True)["2.weight"]
    expected = fit_tail(eigenvalues(weight), "ks")
    assert math.isclose(rows[0]["zeta"], expected.zeta) and rows[0]["n_tail"] == expected.n_tail
    assert rows[0]["random"]["low"] <= rows[0]["random"]["median"] <= rows[0]["random"]["high"]
    assert rows[0]["ok"] and rows[0]["verdict"] == "ok"
    assert not rows[1]["ok"] and rows[1]["zeta"] is None and rows[1]["stderr"] is None


def test_plot_writes_a_picture(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert main(["probe", str(checkpoint), "--plot", str(path)]) == 0
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    assert main(["probe", str(checkpoint), "--plot", str(tmp_path / "no" / "out.png")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_safetensors_reads_the_same(checkpoint, tmp_path, capsys):
    library = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    state = torch.load(checkpoint, weights_only=True)
    state["half"] = torch.randn(20, 30).bfloat16()
    state["counts"] = torch.ones(5, 5, dtype=torch.int64)
    library.save_file(state, path, metadata={"format": "pt"})
    found = load_matrices(path)
    assert set(found) == {"0.weight", "2.weight", "3.weight", "half"}
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]) and tensor.dtype == state[name].dtype
    assert main(["probe", str(path)]) == 0
    by_format = capsys.readouterr().out.splitlines()
    assert main(["probe", str(checkpoint)]) == 0
    # the columns are as wide as needed, so the words are compared
    plain = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert all(
        plain[line.split()[0]] == line.split() for line in by_format if not line.startswith("half")
    )


def test_training_checkpoints_show_the_model_only(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model[2](torch.randn(2, 300)).sum().backward()
    optimizer.step()
    path = tmp_path / "run.pt"
    torch.save({"epoch": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert set(load_matrices(path)) == {"0.weight", "2.weight", "3.weight"}
    nested = tmp_path / "nested.pt"
    torch.save({"a": {"w": torch.ones(3, 3)}, "b": [torch.ones(2, 2)], "c": 1}, nested)
    assert set(load_matrices(nested)) == {"a.w", "b.0"}


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def write(path, kind):
    if kind == "missing":
        return
    if kind == "folder":
        path.mkdir()
    elif kind == "code":
        torch.save({"w": torch.ones(5, 5), "x": Evil()}, path)
    elif kind == "no matrices":
        torch.save({"bias": torch.ones(4), "count": torch.ones(2, 2, dtype=torch.int64)}, path)
    elif kind == "cut":
        torch.save({"w": torch.randn(50, 50)}, path)
        path.write_bytes(path.read_bytes()[:3000])
    else:
        path.write_bytes({"empty": b"", "text": b"hello\n" * 50, "zeros": bytes(500)}[kind])


KINDS = ["missing", "folder", "empty", "text", "zeros", "cut", "code", "no matrices"]


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_files_give_an_error_and_code_two(tmp_path, capsys, kind, ending):
    path = tmp_path / f"bad{ending}"
    write(path, kind)
    assert main(["probe", str(path)]) == 2
    out, error = capsys.readouterr()
    assert (
        out == ""
        and error.startswith("zetaclip: ")
        and "bad" in error
        and len(error.splitlines()) == 1
    )
    assert "executed" not in out + error and "weights_only" not in error


def test_a_lying_safetensors_header_is_refused(tmp_path):
    def file(header, body=b""):
        path = tmp_path / "x.safetensors"
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)
        return path

    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    assert set(load_matrices(file({"w": entry}, bytes(16)))) == {"w"}
    for wrong in (
        {**entry, "data_offsets": [0, 400]},
        {**entry, "data_offsets": [-16, 0]},
        {**entry, "shape": [3, 3]},
        {**entry, "data_offsets": [0, 15]},
        {"dtype": "F32"},
        [],
    ):
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            load_matrices(file({"w": wrong}, bytes(16)))


def test_a_layer_that_is_not_there_names_those_that_are(checkpoint, capsys):
    assert main(["probe", str(checkpoint), "--layer", "fc*"]) == 2
    assert "2.weight" in capsys.readouterr().err


def test_wrong_usage_exits_with_two(capsys):
    for arguments in ([], ["probe"], ["probe", "x", "--fit", "ols"], ["prob", "x"]):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 2
    capsys.readouterr()


def test_help_imports_neither_torch_nor_numpy():
    script = (
        "import sys\n"
        "from zetaclip.cli import main\n"
        "try:\n    main(['probe', '--help'])\nexcept SystemExit:\n    pass\n"
        "print('heavy:', sorted({'torch', 'numpy', 'scipy', 'opacus'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "heavy: []" in done.stdout and "--layer" in done.stdout


def test_the_module_runs_as_a_program(checkpoint):
    done = subprocess.run(
        [sys.executable, "-m", "zetaclip", "probe", str(checkpoint), "--layer", "2*"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "80x300" in done.stdout
