"""Run folders as they are found: growing, cut off, damaged, left by a process that is gone."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_runs import append, invented, lines, status

from zetaclip.errors import CommandError
from zetaclip.report.lines import Lines, curve, number
from zetaclip.report.read import Follower, read_runs, state_of, unique_names


@pytest.mark.parametrize("value", [None, True, "3", float("nan"), float("inf"), [], {}, 10**400])
def test_what_is_no_number(value):
    assert number(value) is None


def test_a_growing_file_reads_like_a_finished_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"epoch": epoch, "value": epoch / 7} for epoch in range(1, 30)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    follower = Lines(path, "epoch")
    assert follower.update() == ()
    for end in range(0, len(text), 37):  # cuts lines in the middle
        path.write_bytes(text[:end])
        os.truncate(path, end)
        assert list(follower.update()) == rows[: text[:end].count(b"\n")]
        assert follower.problems(growing=True) == []
    path.write_bytes(text)
    assert list(follower.update()) == rows
    assert follower.problems(growing=False) == []


def test_a_file_that_was_cut_back_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines(path, [{"epoch": epoch, "value": "first"} for epoch in range(1, 6)])
    follower = Lines(path, "epoch")
    assert len(follower.update()) == 5
    # resumed at epoch 2, and already longer than it was
    lines(path, [{"epoch": epoch, "value": "second"} for epoch in range(1, 9)])
    assert [row["value"] for row in follower.update()] == ["second"] * 8
    path.unlink()
    assert follower.update() == ()


def test_of_a_repeated_epoch_the_later_line_holds(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines(
        path,
        [
            {"epoch": 1, "value": 1},
            {"epoch": 2, "value": 1},
            {"epoch": 2, "value": 2},
            {"epoch": 3, "value": 1},
        ],
    )
    assert [row["value"] for row in Lines(path, "epoch").update()] == [1, 2, 1]


def test_a_cut_off_line_costs_itself_and_a_sentence(tmp_path):
    run = invented(tmp_path / "run")
    text = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(text[:-20])
    read = read_runs([run])[0]
    assert len(read.metrics) == 11
    assert read.problems == ("the last line of metrics.jsonl is cut off and left out",)


def test_damaged_files_cost_their_own_content(tmp_path):
    run = invented(tmp_path / "run")
    (run / "probes.jsonl").write_bytes(
        b"\x00\xff{]\n[1, 2]\n" + b'{"step": 5, "layers": 3}\n{"no step": 1}\n'
    )
    (run / "status.json").write_text("{")
    read = read_runs([run])[0]
    assert [probe["step"] for probe in read.probes] == [5]
    assert set(read.problems) == {
        "3 unreadable lines of probes.jsonl left out",
        "status.json is damaged and left out",
    }
    assert read.state == "finished"


def test_folders_without_a_run(tmp_path):
    with pytest.raises(CommandError, match="no such folder"):
        read_runs([tmp_path / "none"])
    with pytest.raises(CommandError, match="holds no run"):
        read_runs([tmp_path])
    invented(tmp_path / "a")
    with pytest.raises(CommandError, match=r"there are runs inside it \(a\)"):
        read_runs([tmp_path])
    with pytest.raises(CommandError, match="is a file"):
        read_runs([tmp_path / "a" / "config.json"])


def test_names_tell_folders_apart():
    paths = [Path("/x/mnist/run"), Path("/x/adult/run"), Path("/x/other")]
    assert unique_names(paths) == ["mnist/run", "adult/run", "other"]


def test_a_run_whose_process_is_gone_has_stopped():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    now = time.time()
    mine = status("running", 5, 10)
    assert state_of(mine, False) == "running"
    assert state_of(mine | {"pid": child.pid}, False) == "stopped"
    # this very process, but it began long after that run's last sign of life: the number was given
    # again
    assert state_of(mine | {"updated": now - 10 * 365 * 86400}, False) == "stopped"
    elsewhere = mine | {"host": f"not-{socket.gethostname()}", "pid": child.pid}
    assert state_of(elsewhere, False) == "running"
    assert state_of(elsewhere, False, now + 1000) == "stopped"
    assert state_of(mine | {"state": "failed"}, False) == "failed"
    assert state_of({}, False) == "unknown"
    assert state_of(mine, True) == "finished"


def test_a_long_spectrum_keeps_its_tail():
    eigenvalues = [float(value) for value in range(1, 3001)]
    points = curve(eigenvalues)
    assert len(points) <= 160
    assert points[0] == (3000.0, 1 / 3000) and points[-1] == (1.0, 1.0)
    assert [value for value, _ in points[:10]] == [3000.0 - place for place in range(10)]
    assert all(share == pytest.approx((3001 - value) / 3000) for value, share in points)
    assert curve([0.0, -1.0, float("inf"), float("nan"), 2.0]) == [(2.0, 1.0)]


def test_a_follower_sees_what_was_added(tmp_path):
    run = invented(tmp_path / "run", state="running")
    follower = Follower(run)
    before = follower.stamp()
    assert len(follower.read().metrics) == 12
    append(run / "metrics.jsonl", {"epoch": 13, "step": 130, "metric": 0.99, "accuracy": 0.99})
    assert follower.stamp() != before
    assert follower.read().metric == 0.99


def test_the_metric_of_an_unfinished_binary_run_is_its_auc(tmp_path):
    path = invented(tmp_path / "run", state="running", metric="auc", ledger=False)
    rows = [
        json.loads(line) | {"accuracy": 0.5}
        for line in (path / "metrics.jsonl").read_text().splitlines()
    ]
    lines(path / "metrics.jsonl", rows)
    (path / "result.json").unlink(missing_ok=True)
    run = Follower(path).read()
    assert run.result is None and run.metric_name == "auc" and run.metric == rows[-1]["auc"]
