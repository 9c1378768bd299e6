"""Reuse, resume, failures, the lock, Ctrl-C and sudden death, with a trainer that trains
nothing."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zetaclip.errors import CommandError
from zetaclip.experiments import estimate, needs, plan, runner, session, spec
from zetaclip.experiments.planned import PlannedRun
from zetaclip.experiments.progress import Progress, duration
from zetaclip.experiments.runner import LocalBackend, Outcome, run_all
from zetaclip.experiments.store import Store

RATES = {"dp-sgd · σ = 1.1 · decoupled": 0.25}


def go(mini, store, workers=2, threads=1):
    planned = plan.make_plan(mini, RATES)
    stream = io.StringIO()
    outcomes = run_all(planned.runs, store, LocalBackend(workers), threads, Progress(stream))
    return planned, outcomes, stream.getvalue()


def attempts(store, key):
    return [
        json.loads(line) for line in (store.folder(key) / "attempts.jsonl").read_text().splitlines()
    ]


def states(outcomes):
    return [outcome.state for outcome in outcomes.values()]


def test_all_run_once_and_are_then_reused(mini, store):
    planned, outcomes, said = go(mini, store)
    assert states(outcomes) == ["done"] * 9
    assert said.count("done ·") == 9
    times = {key: (store.folder(key) / "result.json").stat().st_mtime_ns for key in outcomes}
    _, again, said = go(mini, store)
    assert states(again) == ["reused"] * 9 and "9 reused, 0 to run" in said
    assert times == {
        key: (store.folder(key) / "result.json").stat().st_mtime_ns for key in outcomes
    }
    assert all(len(attempts(store, run.key)) == 1 for run in planned.runs)


def test_placeholders_are_filled_in(mini, store):
    planned, _, _ = go(mini, store)
    replay = next(run for run in planned.runs if run.labels["row"] == "Replay")
    config = json.loads(store.config_file(replay.key).read_text())
    (needed,) = replay.after
    assert config["clipping"] == {"kind": "replay", "run": str(store.folder(needed))}
    result = json.loads((store.folder(needed) / "result.json").read_text())
    scaled = store.materialise({"lr": {"rate": 0.25, "times_mean_clip_of": f"@run:{needed}"}})
    assert scaled["lr"] == 0.25 * result["clip"]["mean"] != 0.25
    with pytest.raises(CommandError, match="has not been tuned"):
        store.materialise({"lr": "@tuned:mine"})


def test_threads_are_shared_out(mini, store):
    planned, _, _ = go(mini, store, threads=3)
    assert attempts(store, planned.runs[0].key)[0]["threads"] == "3"


def test_a_limit_of_threads_is_kept(mini, monkeypatch):
    monkeypatch.setattr(session, "cores", lambda: 8)
    request = session.Request(mini, "results", workers=2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert request.shared_out == (2, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert request.shared_out == (2, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert request.shared_out == (2, 4)


def test_a_cut_run_is_resumed_where_it_was(mini, store):
    planned = plan.make_plan(mini, RATES)
    folder = store.folder(planned.runs[0].key)
    folder.mkdir(parents=True)
    (folder / "private").write_text("5")
    (folder / "config.json").write_text("{}")
    (folder / "status.json").write_text('{"state": "running", "step": 5}')
    cut_at_once = store.folder(planned.runs[1].key)
    cut_at_once.mkdir(parents=True)
    (cut_at_once / "private").write_text(
        "0"
    )  # before it wrote its configuration: there is nothing to resume
    _, outcomes, _ = go(mini, store)
    assert states(outcomes) == ["done"] * 9
    (attempt,) = attempts(store, planned.runs[0].key)
    assert attempt["resume"] is True and attempt["from"] == 5
    (attempt,) = attempts(store, planned.runs[1].key)
    assert attempt["resume"] is False


def test_a_failed_run_is_told_and_the_rest_goes_on(mini, store, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAIL", "ww-dp-sgd")
    planned, outcomes, _ = go(mini, store)
    for run in planned.runs:
        outcome = outcomes[run.key]
        expected = {"DP-SGD": "done", "Spectral": "failed", "Replay": "blocked"}[run.labels["row"]]
        assert outcome.state == expected
        if expected == "failed":
            assert outcome.message == "zetaclip: the stand-in was told to fail"
    monkeypatch.delenv("STAND_IN_FAIL")
    _, outcomes, _ = go(mini, store)
    assert sorted(states(outcomes)) == ["done"] * 6 + ["reused"] * 3


def test_a_run_that_ends_without_a_result_has_failed(mini, store, monkeypatch):
    monkeypatch.setenv("ZETACLIP_TRAIN_COMMAND", "true")
    _, outcomes, _ = go(mini, store)
    assert {outcome.message for outcome in outcomes.values() if outcome.state == "failed"} == {
        "it ended without a result"
    }


def test_a_run_that_is_killed_says_so(mini, store, monkeypatch):
    monkeypatch.setenv("ZETACLIP_TRAIN_COMMAND", "sh -c 'kill -9 $$'")
    _, outcomes, _ = go(mini, store)
    assert "it was killed by signal 9" in {outcome.message for outcome in outcomes.values()}


def test_an_edited_run_is_not_trusted(mini, store):
    planned, _, _ = go(mini, store)
    key = planned.runs[0].key
    config = store.folder(key) / "config.json"
    config.write_text(config.read_text().replace('"sigma": 1.1', '"sigma": 0.9'))
    _, outcomes, _ = go(mini, store)
    assert outcomes[key].state == "failed" and states(outcomes).count("reused") == 8
    assert (
        "another sigma: 0.9, not 1.1" in outcomes[key].message
        and "Delete the folder" in outcomes[key].message
    )


def test_a_results_folder_may_be_moved(mini, store, tmp_path):
    planned, _, _ = go(mini, store)
    store.out.rename(tmp_path / "elsewhere")
    moved = Store.open(tmp_path / "elsewhere", verify=lambda folder: [])
    _, outcomes, _ = go(mini, moved)
    assert states(outcomes) == ["reused"] * 9
    # What it follows still matters.
    replay = next(run for run in planned.runs if run.labels["row"] == "Replay")
    config = moved.folder(replay.key) / "config.json"
    config.write_text(config.read_text().replace(replay.after[0], planned.runs[0].key))
    assert "another clipping" in moved.problems(replay)[0]


def test_verify_is_asked_once_per_content(mini, tmp_path):
    asked = []

    def verify(folder):
        asked.append(folder.name)
        return ["row 3 was changed"] if (folder / "forged").exists() else []

    store = Store.open(tmp_path / "verified", verify=verify)
    planned, _, _ = go(mini, store)
    assert sorted(asked) == sorted(run.key for run in planned.runs)
    go(mini, store)
    assert len(asked) == 9
    key = planned.runs[0].key
    (store.folder(key) / "forged").touch()
    result = store.folder(key) / "result.json"
    result.write_text(result.read_text().replace('"epsilon": 0.83', '"epsilon": 0.10'))
    _, outcomes, _ = go(mini, store)
    assert len(asked) == 10 and "row 3 was changed" in outcomes[key].message
    _, outcomes, _ = go(mini, store)  # a bad verdict is not remembered as a good one
    assert outcomes[key].state == "failed"


def test_the_lock_says_who_holds_it(tmp_path):
    store = Store.open(tmp_path / "out")
    held = pytest.raises(CommandError, match=f"process {os.getpid()} of .* has held it since")
    with store.lock(), held, Store.open(tmp_path / "out").lock():
        pass
    with store.lock():
        pass


def test_a_folder_of_another_version_is_refused(tmp_path):
    (tmp_path / "reproduce.json").write_text('{"zetaclip_reproduce": 99}')
    with pytest.raises(CommandError, match="another version"):
        Store.open(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CommandError, match="other files"):
        Store.open(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "3 s"), (600, "10 min"), (7200, "2.0 h"), (864000, "10.0 days")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_workers_must_be_positive(mini, tmp_path):
    for workers in (0, -1):
        with pytest.raises(CommandError, match="--workers must be at least 1"):
            session.Request(mini, str(tmp_path / "out"), workers=workers)


# The command itself, as a process of its own.


def command(mini_file, out, *words):
    return [
        sys.executable,
        "-m",
        "zetaclip",
        "reproduce",
        str(mini_file),
        "--out",
        str(out),
        "--workers",
        "2",
        *words,
    ]


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def running_pids(out):
    found = []
    for path in Path(out).glob("runs/*/attempts.jsonl"):
        pid = json.loads(path.read_text().splitlines()[-1])["pid"]
        if not (path.parent / "result.json").exists() and _alive(pid):
            found.append(pid)
    return found


def _alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setenv("STAND_IN_PAUSE", "0.1")
    monkeypatch.setenv("STAND_IN_STEPS", "40")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopping_loses_nothing(mini_file, tmp_path, slow, monkeypatch, how):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(mini_file, out, "--only", "seed=1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Whoever starts these tests in the background may have Ctrl-C ignored, which children
        # inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(lambda: len(list(out.glob("runs/*/private"))) == 2)
        pids = running_pids(out)
        assert len(pids) == 2
        with pytest.raises(CommandError, match=f"process {process.pid} "), Store.open(out).lock():
            pass
        process.send_signal(how)
        said = process.communicate(timeout=30)[0].decode()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    wait_for(lambda: not any(map(_alive, pids)))  # no training goes on alone
    if how != signal.SIGKILL:
        assert "the same command continues" in said
    cut = {path.parent: int(path.read_text()) for path in out.glob("runs/*/private")}
    assert len(cut) == 2 and all(step > 0 for step in cut.values())
    monkeypatch.setenv("STAND_IN_PAUSE", "0")
    request = session.Request(spec.load(str(mini_file)), str(out), only={"seed": ["1"]}, workers=2)
    text, failed = session.reproduce(request)
    assert failed == 0 and "of 9 runs" in text
    for folder, step in cut.items():
        first, second = (
            json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()
        )
        assert first["from"] == 0 and second["from"] == step


def test_list_and_dry_run(mini_file, tmp_path, capsys):
    from zetaclip.cli import _main as cli

    assert cli.main(["reproduce", "--list"]) == 0
    listed = capsys.readouterr().out
    assert len(spec.names()) == 17 and all(f"\n{name} " in f"\n{listed}" for name in spec.names())
    out = tmp_path / "out"
    assert cli.main(["reproduce", str(mini_file), "--out", str(out), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "at least 12 runs to do (3 of them for learning rates), 0 done" in said
    assert "with" in said and "20 measured steps" in said
    assert not out.exists()


def test_the_estimate_is_steps_times_speed(mini, store):
    go(mini, store)
    request = session.Request(mini, str(store.out), workers=1)
    # the stand-in reports 0.5 s before, 2.5 s for 8 steps; eight epochs of MNIST are 1880 steps,
    # of nine tenths of it 8 x 211
    for_runs, for_rate = 0.5 + 2.5 / 8 * 1880, 0.5 + 2.5 / 8 * 8 * 211
    planned = plan.make_plan(mini)  # rates unknown again: all is to do
    (ladder,) = planned.ladders.values()
    seconds, sources = session._clock(mini, store)([*planned.runs, *ladder.runs(0.25)])
    assert seconds == pytest.approx(9 * for_runs + for_rate) and sources == {"finished runs"}
    assert "at least 12 runs to do (3 of them for learning" in session.dry_run(request)


def test_measured_speeds_are_kept_for_the_tables(mini, store):
    store.out.joinpath("runs").mkdir()
    request = session.Request(mini, str(store.out), workers=1)
    assert "20 measured steps" in session.dry_run(request)
    speeds = estimate.known_speeds(store)
    assert {place[:2] for place in speeds} == {("mnist", "cnn")}
    session.tables_only(request)
    assert "time not known" not in (store.out / "mini/table.md").read_text(encoding="utf-8")
    go(mini, store)
    assert {one.source for one in estimate.known_speeds(store).values()} == {"finished runs"}


@pytest.mark.parametrize(
    ("features", "source", "seconds"),
    [
        ("scattering", "20 measured steps", 106),  # they waited for the features
        ("scattering", "finished runs", 300),
        ("none", "20 measured steps", 300),
    ],
)
def test_features_are_waited_for_once(mini, features, source, seconds):
    runs = plan.make_plan(mini).runs[:3]
    changed = [
        dataclasses.replace(run, config={**run.config, "features": features}) for run in runs
    ]
    places = {tuple(str(run.config[k]) for k in ("data", "model", "method")) for run in runs}
    speeds = dict.fromkeys(places, estimate.Speed(100.0, 0.0, source))
    sizes = {run.labels["data"]: 60000 for run in runs}
    assert estimate.estimate(changed, sizes, {}, speeds)[0] == seconds


def test_a_measurement_that_takes_too_long_is_given_up(mini, monkeypatch):
    monkeypatch.setattr(estimate, "_MOST_SECONDS", 0.01)
    assert estimate.measure(plan.make_plan(mini).runs[0], 1) is None


def test_a_row_whose_ladder_fails_is_left_out(mini_file, tmp_path, monkeypatch):
    text = mini_file.read_text(encoding="utf-8").replace('rate_of = "dp-sgd"\n', "")
    mini_file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("STAND_IN_FAIL", "ww-dp-sgd")
    request = session.Request(spec.load(str(mini_file)), str(tmp_path / "out"), workers=2)
    text, failed = session.reproduce(request)
    assert failed == 3 + 1 and "3 of 9 runs" in text  # three rates, and the row with its replay
    page = (tmp_path / "out/mini/table.md").read_text(encoding="utf-8")
    name = "ww-practical · σ = 1.1 · decoupled"
    assert f"- left out: {name}: no learning rate, not all of its runs have a result" in page


def test_every_failure_is_kept(mini):
    runs = [PlannedRun(key, {}, plan.make_plan(mini).runs[0].labels) for key in ("a", "b")]
    told = session._failures(
        {run.key: run for run in runs}, {key: Outcome("failed", f"{key}!") for key in ("a", "b")}
    )
    assert list(told.values()) == [
        f"failed: σ = 1.1 · DP-SGD · seed 1: {key}!" for key in ("a", "b")
    ]


def test_the_command_reports_failures(mini_file, tmp_path, monkeypatch, capsys):
    from zetaclip.cli import _main as cli

    monkeypatch.setenv("STAND_IN_FAIL", "ww-dp-sgd")
    code = cli.main(
        [
            "reproduce",
            str(mini_file),
            "--out",
            str(tmp_path / "out"),
            "--only",
            "seed=1",
            "--workers",
            "2",
        ]
    )
    said = capsys.readouterr().out
    assert code == 1
    assert "seed 1: zetaclip: the stand-in was told to fail" in said
    page = (tmp_path / "out/mini/table.md").read_text()
    assert "failed: σ = 1.1 · Spectral · seed 1: zetaclip: the stand-in was told to fail" in page


def test_data_that_are_not_here(mini, tmp_path, monkeypatch):
    monkeypatch.setattr(
        session, "missing_data", lambda runs: {"mnist": "the data set mnist is not here"}
    )
    request = session.Request(mini, str(tmp_path / "out"))
    with pytest.raises(CommandError, match="mnist is not here"):
        session.reproduce(request)
    monkeypatch.setattr(
        session, "missing_data", lambda runs: {"heart": "the data set heart is not here"}
    )
    tabular = spec.load("tabular")
    with pytest.raises(CommandError, match="heart is not here"):
        session.reproduce(session.Request(tabular, str(tmp_path / "out"), strict=True))
    request = session.Request(
        tabular,
        str(tmp_path / "out"),
        only={"method": ["dp-sgd"], "seed": ["1"]},
        workers=2,
    )
    text, failed = session.reproduce(request)
    assert failed == 0 and "heart is not here" in text
    assert "heart is not here" in (tmp_path / "out/tabular/table.md").read_text()


def test_which_data_are_here():
    pytest.importorskip("zetaclip.data", reason="zetaclip.data is not part of this tree")
    planned = plan.make_plan(spec.load("iid"))
    missing = needs.missing_data(planned.runs)
    assert "mnist" not in missing and "emnist-letters-subset" in missing
    assert (
        missing["cifar10"]
        == "the data set cifar10 is not here: set ZETACLIP_DATA, or run `zetaclip data fetch "
        "cifar10`"
    )


def test_a_cut_file_is_named(mini, store):
    name = "reproduce.json"
    (store.out / name).write_text('{"ra')
    with pytest.raises(CommandError, match=f"{name} can't be read"):
        session.tables_only(session.Request(mini, str(store.out)))


@pytest.mark.parametrize("content", ['{"ra', '{"mnist/cnn/dp-sgd": "fast", "x": [1]}'])
@pytest.mark.parametrize("name", ["verified.json", "speeds.json"])
def test_a_cut_cache_is_made_again(mini, store, name, content):
    go(mini, store)
    (store.out / name).write_text(content)
    assert "of 9 runs" in session.tables_only(session.Request(mini, str(store.out)))


def test_a_file_is_no_results_folder(mini, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="is a file; --out takes a folder"):
        session.tables_only(session.Request(mini, str(tmp_path / "file")))


def test_claims_need_tables(tmp_path, capsys):
    from zetaclip.cli import _main as cli

    page = tmp_path / "page.md"
    page.write_text("as it was")
    assert cli.main(["reproduce", "--claims", str(page), "--out", str(tmp_path / "empty")]) == 2
    assert "holds no tables" in capsys.readouterr().err and page.read_text() == "as it was"


def test_a_training_is_told_where_the_data_are(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    monkeypatch.delenv("ZETACLIP_DATA")
    assert runner.environment_of(1, str(there))["ZETACLIP_DATA"] == str(there)
    monkeypatch.setenv("ZETACLIP_DATA", str(here))  # this machine has them elsewhere
    assert runner.environment_of(1, str(there))["ZETACLIP_DATA"] == str(here)
    there.mkdir()
    assert runner.environment_of(1, str(there))["ZETACLIP_DATA"] == str(there)


def test_speeds_are_measured_on_a_workers_threads(mini, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(estimate, "measure", lambda run, threads: asked.append(threads))
    monkeypatch.setattr(session, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for workers in (1, 2, 8):
        session.dry_run(session.Request(mini, str(tmp_path / "out"), workers=workers))
    assert asked == [8, 4, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # a limit of the user's
    for workers in (1, 2, 8):
        session.dry_run(session.Request(mini, str(tmp_path / "out"), workers=workers))
    assert asked[3:] == [3, 3, 1]


def test_the_usual_mistakes(capsys, tmp_path):
    from zetaclip.cli import _main as cli

    assert cli.main(["reproduce"]) == 2
    assert cli.main(["reproduce", "idd"]) == 2
    assert (
        cli.main(["reproduce", "zone", "--only", "colour=red", "--out", str(tmp_path / "o")]) == 2
    )
    said = capsys.readouterr().err
    assert "--list" in said and "did you mean iid" in said and "KEY=VALUE" in said
