"""Records of finished runs: tables without the run folders, seeds added to them, and lines that
were edited."""

import json
import shutil
from dataclasses import replace

import pytest

from zetaclip.errors import CommandError
from zetaclip.experiments import estimate, plan, records, results, session
from zetaclip.experiments.store import Store


@pytest.fixture
def request_(mini_file, mini, tmp_path):
    """Every kind of measure and series, so that a record must hold what all of them read."""
    timed = {
        **mini.columns[0],
        "measures": ["accuracy", "clip_mean", "time_total", "probe_share", "overhead"],
    }
    epochs = {
        "name": "epochs",
        "kind": "epochs",
        "values": ["epsilon", "accuracy"],
        "title": "By epoch",
    }
    experiment = replace(mini, columns=(timed,), series=(*mini.series, epochs), published={"": {}})
    return session.Request(experiment, str(tmp_path / "out"), workers=2)


@pytest.fixture
def done(request_, tmp_path):
    session.reproduce(request_)
    return tmp_path / "out"


def trained(out):
    return {folder.name for folder in (out / "runs").glob("*")}


def recorded(out):
    return [
        json.loads(line)["run"]
        for line in (out / records.FILE).read_text(encoding="utf-8").splitlines()
    ]


def planned(request, out):
    store = Store.open(out, verify=lambda folder: [])
    return session.plan_of(request.experiment, store)[0]


def drop(out, keys):
    """Takes runs out of the records, as if they had never been made."""
    path = out / records.FILE
    kept = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if json.loads(line)["run"] not in keys
    ]
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def test_without_the_folders_everything_comes_out_the_same(request_, done):
    names = ("runs.csv", "clip.csv", "clip.md", "epochs.csv", "epochs.md")
    before = {name: (done / "mini" / name).read_bytes() for name in names}
    table = json.loads((done / "mini/table.json").read_text(encoding="utf-8"))
    assert table["rows"][1]["cells"][2]["ours"] is not None, "the times are read from a record too"
    assert "records.jsonl" not in (done / "mini/table.md").read_text(encoding="utf-8")
    for name in ("runs", "configs", "logs", "verified.json", "mini"):
        path = done / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    text, failed = session.reproduce(request_)
    assert failed == 0 and text.startswith("9 of 9 runs") and not trained(done), (
        "nothing is trained again"
    )
    assert before == {name: (done / "mini" / name).read_bytes() for name in names}
    again = json.loads((done / "mini/table.json").read_text(encoding="utf-8"))
    assert again.pop("runs") == {"finished": 9, "planned": 9, "recorded": 9, "unsigned": 9}
    assert table.pop("runs") == {"finished": 9, "planned": 9, "recorded": 0, "unsigned": 9}
    assert again == table
    assert "9 of 9 runs, 9 of them from `records.jsonl`" in (done / "mini/table.md").read_text(
        encoding="utf-8"
    )


def test_a_seed_is_added_to_recorded_ones(request_, done):
    third = [
        run
        for run in planned(request_, done).runs
        if run.labels["seed"] == 3 and run.labels["row"] == "DP-SGD"
    ]
    before = (done / "mini/runs.csv").read_bytes()
    shutil.rmtree(done / "runs")
    drop(done, {run.key for run in third})
    dry = session.dry_run(request_)
    assert "at least 1 run to do" in dry and "8 done" in dry
    session.reproduce(request_)
    assert trained(done) == {run.key for run in third}
    assert (done / "mini/runs.csv").read_bytes() == before
    runs = json.loads((done / "mini/table.json").read_text(encoding="utf-8"))["runs"]
    assert runs == {"finished": 9, "planned": 9, "recorded": 8, "unsigned": 9}
    assert len(recorded(done)) == 13


def test_a_recorded_run_is_made_again_for_one_that_reads_its_folder(request_, done):
    replay = next(run for run in planned(request_, done).runs if run.labels["row"] == "Replay")
    (followed,) = replay.after
    shutil.rmtree(done / "runs")
    drop(done, {replay.key})
    _, failed = session.reproduce(request_)
    assert failed == 0 and trained(done) == {replay.key, followed}


def test_a_ladder_is_climbed_by_its_records(request_, done):
    """Its folders may be lost before the last of its runs has been made."""
    before = json.loads((done / "mini/table.json").read_text(encoding="utf-8"))["ladders"]
    (ladder,) = planned(request_, done).ladders.values()
    (start,) = ladder.runs(ladder.start)
    shutil.rmtree(done / "runs")
    drop(done, {start.key})
    session.reproduce(request_)
    assert trained(done) == {start.key}
    after = json.loads((done / "mini/table.json").read_text(encoding="utf-8"))["ladders"]
    assert after == before and len(next(iter(after.values()))["points"]) == 4


def test_a_run_is_recorded_when_it_ends(request_, tmp_path, monkeypatch):
    """Not only at the end of all: what was finished before the machine was lost is known."""
    counts = []
    plain = session.Store.record
    monkeypatch.setattr(
        session.Store,
        "record",
        lambda store, runs: (plain(store, runs), counts.append(recorded(store.out))),
    )
    session.reproduce(request_)
    assert [len(keys) for keys in counts] == [*range(1, 14), 13]


def test_a_rate_follows_a_recorded_mean(request_, done):
    store = Store.open(done, verify=lambda folder: [])
    spectral = next(run for run in planned(request_, done).runs if run.labels["row"] == "Spectral")
    wanted = {"lr": {"rate": 0.25, "times_mean_clip_of": f"@run:{spectral.key}"}}
    before = store.materialise(wanted)
    shutil.rmtree(done / "runs")
    assert store.materialise(wanted) == before and before["lr"] > 0.25
    with pytest.raises(OSError, match="No such file"):
        store.materialise({"lr": {"rate": 0.25, "times_mean_clip_of": "@run:0000000000000000"}})


def test_the_folder_counts_where_there_is_one(request_, done):
    """A folder that can't be trusted is not replaced by its record: somebody has to look."""
    first = planned(request_, done).runs[0]
    (done / "verified.json").unlink()
    store = Store.open(
        done, verify=lambda folder: ["it was edited"] if folder.name == first.key else []
    )
    found = results.collect(planned(request_, done), store)
    assert len(found) == 8 and first.key not in found
    assert all(run.folder is not None for run in found.values())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"accuracy":0.', '"accuracy":1.'),
        ('"sigma":1.1', '"sigma":1.2'),
        ('{"run"', '{"ru'),
        ('"alone":false', '"alone":true'),
    ],
)
def test_an_edited_line_is_refused(request_, done, old, new):
    path = done / records.FILE
    first, *rest = path.read_text(encoding="utf-8").splitlines()
    assert old in first
    path.write_text("\n".join([*rest, first.replace(old, new, 1)]) + "\n", encoding="utf-8")
    with pytest.raises(CommandError, match=r"records.jsonl, line 13.*not as it was written"):
        session.tables_only(request_)
    path.write_text(
        "\n".join(rest) + "\n", encoding="utf-8"
    )  # as it advises; the folder is still here
    assert session.tables_only(request_).startswith("9 of 9 runs")
    assert len(recorded(done)) == 13


def test_a_sealed_record_must_have_its_own_name(request_, done):
    path = done / records.FILE
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    swapped = {**json.loads(first), "run": json.loads(second)["run"]}
    path.write_text(
        json.dumps({**swapped, "seal": records._seal(swapped)}) + "\n", encoding="utf-8"
    )
    with pytest.raises(CommandError, match="line 1"):
        records.read(done)


def test_records_of_other_machines_are_the_last_to_tell_the_time(request_, done):
    store = Store.open(done, verify=lambda folder: [])
    place = ("mnist", "cnn", "dp-sgd")
    assert estimate.known_speeds(store)[place].source == "finished runs"
    shutil.rmtree(done / "runs")
    assert estimate.known_speeds(store)[place] == estimate.Speed(0.5, 2.5 / 8, "recorded runs")
    (done / "speeds.json").write_text('{"mnist/cnn/dp-sgd": [1.0, 0.1]}', encoding="utf-8")
    assert estimate.known_speeds(store)[place] == estimate.Speed(1.0, 0.1, "20 measured steps")


def test_lines_that_measured_nothing_are_not_kept(tmp_path, mini):
    """A set of short epochs is evaluated at every tenth of them: the others tell nothing but the
    time."""
    run = plan.make_plan(mini, {"dp-sgd · σ = 1.1 · decoupled": 0.25}).runs[0]
    epochs = [
        {
            "epoch": n,
            "metric": 0.5 if n % 3 == 0 else None,
            "seconds": {"train": float(n)},
            "odd": 1,
        }
        for n in range(1, 9)
    ]
    whole = results.Run(
        None, {"metric": None, "reliability": [1, 2]}, {}, {"metrics.jsonl": epochs}
    )
    records.write(tmp_path, [(run, whole)])
    found = records.read(tmp_path)[run.key]
    assert [line["epoch"] for line in found.lines("metrics.jsonl")] == [1, 3, 6, 8]
    assert "odd" not in found.lines("metrics.jsonl")[0] and found.lines("probes.jsonl") == []
    assert found.result == {"metric": None} and found.config == run.config
