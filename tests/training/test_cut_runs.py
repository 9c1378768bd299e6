"""Runs that are killed for real, and what goes on from them."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings

import pytest
import small_runs
import torch
from safetensors.torch import load_file

from zetaclip.ledger import Ledger
from zetaclip.training import ConfigError, FolderError, Interrupted
from zetaclip.training.folder import RunFolder

LONG = {"steps": 60, "batch_size": 64}


def _child(out, changes, resume, pause, rekey=False):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    from zetaclip.training.steps import PrivateSteps

    moved = PrivateSteps.moved

    def slowly(self, clip=None):  # so that there is a middle to be killed in
        moved(self, clip)
        time.sleep(pause)

    PrivateSteps.moved = slowly
    small_runs.run(out, small_runs.small(**changes), resume=resume, rekey=rekey)


@pytest.fixture(scope="module")
def spawn():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["zetaclip.training.start", "zetaclip.data", "zetaclip.models", "small_runs", "opacus"]
    )

    def start(*arguments):
        process = context.Process(target=_child, args=arguments)
        process.start()
        return process

    return start


def journaled(out):
    """Releases that the run has noted so far."""
    return sum(
        path.read_bytes().count(b'"noise_std"') for path in (out / "checkpoint").glob("*.journal")
    )


def kill_after(process, out, releases):
    deadline = time.monotonic() + 120
    while process.is_alive() and journaled(out) < releases:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.join()


def contents(out):
    return {
        name: (out / name).read_bytes()
        for name in ("model.safetensors", "ledger.jsonl", "config.json")
    }


@pytest.mark.parametrize("method", ["ww-dp-sgd", "dp-sam"])
def test_a_run_killed_again_and_again_ends_as_one_that_was_never_cut(spawn, tmp_path, method):
    changes = {**LONG, "method": method, "weight_average": 0.9}
    if method != "ww-dp-sgd":
        changes["spectral"] = {}
    whole = small_runs.run(tmp_path / "whole", small_runs.small(**changes))
    per_update = 2 if method == "dp-sam" else 1
    chance = random.Random(20240)
    cut = tmp_path / "cut"
    for attempt in range(3):
        process = spawn(cut, changes, attempt > 0, 0.01)
        kill_after(process, cut, per_update * chance.randint(2, 55))
        assert process.exitcode == -signal.SIGKILL, "the run was over before it could be killed"
        assert not (cut / "result.json").exists()
    result = small_runs.run(cut, small_runs.small(**changes), resume=True)
    assert contents(tmp_path / "whole") == contents(cut)
    assert result["epsilon"] == whole["epsilon"] and result["metric"] == whole["metric"]
    assert result["resumed"] >= 1 and result["clip"] == whole["clip"]
    steps = [line["step"] for line in RunFolder(cut).read_lines("metrics.jsonl")]
    assert steps == [
        line["step"] for line in RunFolder(tmp_path / "whole").read_lines("metrics.jsonl")
    ]
    if method == "ww-dp-sgd":
        assert (cut / "probes.jsonl").read_bytes() == (
            tmp_path / "whole" / "probes.jsonl"
        ).read_bytes()


def _cut(spawn, out, changes=LONG, releases=25):
    kill_after(spawn(out, changes, False, 0.01), out, releases)
    return journaled(out)


def test_fresh_streams_keep_every_executed_step_in_the_ledger(spawn, tmp_path):
    out = tmp_path / "cut"
    executed = _cut(spawn, out)
    result = small_runs.run(out, small_runs.small(**LONG), resume=True, rekey=True)
    ledger = Ledger.from_jsonl(out / "ledger.jsonl")
    streams = {row.stream for row in ledger.rows()}
    first = next(iter(ledger.rows())).stream
    assert len(streams) == 2
    assert sum(row.stream == first for row in ledger.rows()) == executed
    assert len(ledger) > 60 and result["steps"] == 60
    whole = small_runs.run(tmp_path / "whole", small_runs.small(**LONG))
    assert result["epsilon"] > whole["epsilon"]
    saved, other = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "whole"))
    assert not torch.equal(saved["fc1.weight"], other["fc1.weight"])


def test_a_copy_of_a_cut_run_takes_fresh_streams(spawn, tmp_path):
    """What the original does from here on is not noted in the copy."""
    out, copy = tmp_path / "cut", tmp_path / "copy"
    executed = _cut(spawn, out)
    shutil.copytree(out, copy)
    with pytest.raises(FolderError, match=r"looks like a copy.*--rekey") as caught:
        small_runs.run(copy, small_runs.small(**LONG), resume=True)
    assert "load(path)" not in str(caught.value)
    small_runs.run(copy, small_runs.small(**LONG), resume=True, rekey=True)
    small_runs.run(out, small_runs.small(**LONG), resume=True)
    streams = [
        [row.stream for row in Ledger.from_jsonl(folder / "ledger.jsonl").rows()]
        for folder in (out, copy)
    ]
    assert set(streams[0]) == {streams[1][0]} and streams[1].count(streams[1][0]) == executed
    assert len(set(streams[1])) == 2


def test_what_can_not_be_replayed_is_refused_by_name(spawn, tmp_path):
    out = tmp_path / "cut"
    _cut(spawn, out)
    before = {path: path.read_bytes() for path in sorted((out / "checkpoint").iterdir())}
    for changes, said in (
        ({"lr": 0.5}, r"lr \(1.0 there, 0.5 here\)"),
        ({"threads": 2}, "threads"),
        ({"seed": 8}, "seed"),
    ):
        with pytest.raises(FolderError, match=said):
            small_runs.run(out, small_runs.small(**{**LONG, **changes}), resume=True)
    shutil.rmtree(out / "private")
    with pytest.raises(FolderError, match="--rekey") as caught:
        small_runs.run(out, small_runs.small(**LONG), resume=True)
    assert "replay=True" not in str(caught.value) and "load(path)" not in str(caught.value)
    assert {path: path.read_bytes() for path in sorted((out / "checkpoint").iterdir())} == before
    result = small_runs.run(out, small_runs.small(**LONG), resume=True, rekey=True)
    assert result["steps"] == 60


def test_without_a_checkpoint_nobody_can_tell_what_was_executed(spawn, tmp_path):
    out = tmp_path / "cut"
    _cut(spawn, out, releases=30)
    if not (out / "metrics.jsonl").exists():
        (out / "metrics.jsonl").write_text('{"epoch": 1, "step": 23}\n')
    shutil.rmtree(out / "checkpoint")
    with pytest.raises(FolderError, match="unknown which steps were executed"):
        small_runs.run(out, small_runs.small(**LONG), resume=True, rekey=True)


def test_a_run_that_is_not_finished_is_not_overwritten(spawn, tmp_path):
    out = tmp_path / "cut"
    _cut(spawn, out, releases=3)
    with pytest.raises(FolderError, match="--resume continues it"):
        small_runs.run(out, small_runs.small(**LONG))


def test_one_process_per_folder(spawn, tmp_path):
    out = tmp_path / "run"
    process = spawn(out, LONG, False, 0.05)
    try:
        while process.is_alive() and journaled(out) < 2:
            time.sleep(0.01)
        with pytest.raises(FolderError, match=f"process {process.pid}"):
            small_runs.run(out, small_runs.small(**LONG), resume=True)
        before = (out / "config.json").read_bytes()
        with pytest.raises(FolderError, match=f"process {process.pid}"):
            small_runs.run(out, small_runs.small(**{**LONG, "seed": 8}), force=True)
        assert (out / "config.json").read_bytes() == before and (
            out / "checkpoint" / "run.pt"
        ).exists()
    finally:
        process.kill()
        process.join()
    # Nobody is there any more: now it may be replaced, and nothing of the old run is left to go on
    # with.
    assert small_runs.run(out, small_runs.small(steps=2), force=True)["steps"] == 2


def test_resume_of_a_run_that_was_cut_before_its_first_step_starts_it(tmp_path, monkeypatch):
    from zetaclip.training import start

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "undo", lambda *_: None)  # as if killed
        patch.setattr(start, "PrivateSteps", None)
        with pytest.raises(TypeError):
            small_runs.run(out, small_runs.small(steps=2))
    assert (out / "config.json").exists() and not (out / "checkpoint" / "run.pt").exists()
    assert small_runs.run(out, small_runs.small(steps=2), resume=True)["steps"] == 2


def test_resume_where_there_is_no_run_is_refused(tmp_path):
    """A wrong name must not become a new run, on other data than was meant."""
    (tmp_path / "empty").mkdir()
    for name in ("typo", "empty"):
        with pytest.raises(FolderError, match=f"nothing to resume in .*{name}; leave --resume out"):
            small_runs.run(tmp_path / name, small_runs.small(steps=2), resume=True)
    assert not (tmp_path / "typo").exists() and not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize(
    "problem", [{"epsilon": 1e-4, "sigma": None, "accountant": "rdp"}, {"max_epsilon": 1e-3}]
)
def test_a_start_that_fails_does_not_block_its_folder(tmp_path, problem):
    out = tmp_path / "deep" / "run"
    with pytest.raises(ConfigError):
        small_runs.run(out, small_runs.small(steps=2, **problem))
    assert not list(tmp_path.iterdir())
    (out / "private").mkdir(parents=True)
    (out / "report.html").write_text("mine")
    (out / "private" / "diary").write_text("mine")
    with pytest.raises(ConfigError):
        small_runs.run(out, small_runs.small(steps=2, **problem))
    assert {path.name for path in out.rglob("*")} == {
        "report.html",
        "private",
        "diary",
    }  # what was not the run's stays
    assert small_runs.run(out, small_runs.small(steps=2))["steps"] == 2


def test_a_start_that_is_interrupted_or_finds_the_disk_full_is_taken_back(tmp_path, monkeypatch):
    from zetaclip.training import loop

    for error, told in (
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(28, "No space left on device"), FolderError),
    ):

        def fail(*_, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(loop.Training, "save", fail)
            with pytest.raises(told):
                small_runs.run(tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["dp-sgd", "sgd"])
def test_a_damaged_checkpoint_is_not_advised_to_rekey(tmp_path, monkeypatch, method):
    from zetaclip.training.steps import PlainSteps, PrivateSteps

    kind = PlainSteps if method == "sgd" else PrivateSteps
    config = small_runs.small(
        method=method, spectral={}, **({"sigma": None} if method == "sgd" else {})
    )
    moved = kind.moved

    def interrupted(self, clip=None):
        moved(self, clip)
        if self.done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "moved", interrupted)
        with pytest.raises(Interrupted):
            small_runs.run(tmp_path / "cut", config)
    file = tmp_path / "cut" / "checkpoint" / "run.pt"
    file.write_bytes(file.read_bytes()[:1000])
    before = {path: path.read_bytes() for path in (tmp_path / "cut" / "checkpoint").iterdir()}
    for rekey in (False, True):
        with pytest.raises(
            FolderError, match=r"weights are lost, and --rekey does not help.*another folder"
        ) as caught:
            small_runs.run(tmp_path / "cut", config, resume=True, rekey=rekey)
        assert ("still count;" in str(caught.value)) == (method == "dp-sgd")
    assert before == {
        path: path.read_bytes() for path in (tmp_path / "cut" / "checkpoint").iterdir()
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_signal_saves_and_the_rest_is_bit_equal(tmp_path, monkeypatch, number):
    from zetaclip.training.steps import PrivateSteps

    whole = small_runs.run(tmp_path / "whole")
    moved = PrivateSteps.moved

    def interrupted(self, clip=None):
        moved(self, clip)
        if self.done == 11:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(PrivateSteps, "moved", interrupted)
        with pytest.raises(Interrupted):
            small_runs.run(tmp_path / "cut")
    status = json.loads((tmp_path / "cut" / "status.json").read_text())
    assert status["state"] == "stopped" and status["step"] == 11 and "--resume" in status["resume"]
    assert signal.getsignal(number) is not None
    result = small_runs.run(tmp_path / "cut", resume=True)
    assert (
        contents(tmp_path / "cut") == contents(tmp_path / "whole")
        and result["metric"] == whole["metric"]
    )


@pytest.mark.parametrize("method", ["dp-sgd", "sgd"])
@pytest.mark.parametrize("at", [23, 46])
def test_a_cut_right_after_an_epoch_loses_none_of_its_metrics(tmp_path, monkeypatch, method, at):
    """23 updates are an epoch; the signal comes after its last one, before it is evaluated."""
    from zetaclip.training.steps import PlainSteps, PrivateSteps
    from zetaclip.training.verify import verify

    changes = {"sigma": None, "steps": 46} if method == "sgd" else {"steps": 46}
    config = small_runs.small(method=method, spectral={}, **changes)
    whole = small_runs.run(tmp_path / "whole", config)
    kind = PlainSteps if method == "sgd" else PrivateSteps
    moved = kind.moved

    def interrupted(self, clip=None):
        moved(self, clip)
        if self.done == at:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "moved", interrupted)
        with pytest.raises(Interrupted):
            small_runs.run(tmp_path / "cut", config)
    result = small_runs.run(tmp_path / "cut", config, resume=True)
    assert result["metric"] == whole["metric"] and verify(tmp_path / "cut") == []
    lines = [
        [
            (line["epoch"], line["step"], line["metric"])
            for line in RunFolder(tmp_path / name).read_lines("metrics.jsonl")
        ]
        for name in ("whole", "cut")
    ]
    assert lines[0] == lines[1] and [step for _, step, _ in lines[0]] == [23, 46]


def test_a_checkpoint_inside_an_epoch_knows_the_time_of_its_steps(tmp_path, monkeypatch):
    """Each update takes a tenth of a second of a clock that only the updates move; the run is cut
    in the middle of its epoch."""
    from zetaclip.training import loop
    from zetaclip.training.steps import PrivateSteps

    moved, now = PrivateSteps.moved, [0.0]

    def timed(self, clip=None):
        moved(self, clip)
        now[0] += 0.1
        if self.done == 11 and not resuming:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(PrivateSteps, "moved", timed)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    config = small_runs.small(steps=20, method="dp-sgd", spectral={})
    resuming = False
    with pytest.raises(Interrupted):
        small_runs.run(tmp_path / "cut", config)
    resuming = True
    result = small_runs.run(tmp_path / "cut", config, resume=True)
    assert result["seconds"]["train"] == pytest.approx(2.0)


def test_a_full_disk_keeps_the_last_good_state(tmp_path, monkeypatch):
    from zetaclip.training import loop

    monkeypatch.setattr(loop, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "_SAVE_SHARE", 1e9)
    save = torch.save
    count = 0

    def full(*arguments, **options):
        nonlocal count
        count += 1
        if count == 8:
            raise OSError(28, "No space left on device")
        return save(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(FolderError, match=r"No space left.*--resume"):
            small_runs.run(tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / "status.json").read_text())["state"] == "failed"
    small_runs.run(tmp_path / "cut", resume=True)
    small_runs.run(tmp_path / "whole")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("where", ["append", "weights"])
def test_a_full_disk_is_told_in_one_line_whichever_file_meets_it(tmp_path, monkeypatch, where):
    import safetensors.torch
    from safetensors import SafetensorError

    def full(*_, **__):
        if where == "append":
            raise OSError(28, "No space left on device")
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(
            *((RunFolder, "append") if where == "append" else (safetensors.torch, "save_file")),
            full,
        )
        with pytest.raises(
            FolderError, match=r"No space left on device\).*zetaclip train --out .* --resume"
        ):
            small_runs.run(tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / "status.json").read_text())["state"] == "failed"
    small_runs.run(tmp_path / "cut", resume=True)


def test_plain_training_resumes_bit_equal_too(tmp_path, monkeypatch):
    from zetaclip.training.steps import PlainSteps

    config = small_runs.small(method="sgd", spectral={}, sigma=None, momentum=0.9)
    small_runs.run(tmp_path / "whole", config)
    moved = PlainSteps.moved

    def interrupted(self, clip=None):
        moved(self, clip)
        if self.done == 25:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(PlainSteps, "moved", interrupted)
        with pytest.raises(Interrupted):
            small_runs.run(tmp_path / "cut", config)
    small_runs.run(tmp_path / "cut", config, resume=True)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in a)
