"""TensorBoard gets the same series as the page."""

import json
import sys

import pytest
from fake_runs import invented

from zetaclip.cli import main
from zetaclip.errors import CommandError
from zetaclip.report.tensorboard import Board, export


def test_without_the_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(CommandError, match=r"pip install 'zetaclip\[tensorboard\]'"):
        Board(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_series_come_back(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tensorboard", reason="the extra zetaclip[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("zetaclip.report.page.picture", lambda chart: "data:,")
    run = invented(tmp_path / "run")
    export(run)
    assert main(["report", str(run), "--tensorboard", "--no-verify"]) == 0
    assert str(run / "tensorboard") in capsys.readouterr().out
    assert (
        len(list((run / "tensorboard").iterdir())) == 1
    )  # the second export took the place of the first
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    probes = [json.loads(line) for line in (run / "probes.jsonl").read_text().splitlines()]

    def series(tag):
        return [(event.step, event.value) for event in board.Scalars(tag)]

    def expected(found, key):
        return [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in found]

    assert series("epoch/accuracy") == expected(rows, "accuracy")
    assert series("epoch/epsilon") == expected(rows, "epsilon")
    assert series("zeta/smoothed") == expected(probes, "smoothed")
    assert series("control/clip") == expected(probes, "clip")
    assert len(series("zeta/fc1")) == 11  # one of the twelve could not be fitted
