"""Checkpoints of several ranks: replayed bit for bit on as many, counted and re-keyed on another
number."""

import shutil

import pytest
import rank_work
import torch

CUT, STEPS = 3, 7  # in the middle of an epoch of four
MORE = {"q": 0.25, "sigma": 1.0, "physical_batch_size": 4}


@pytest.mark.parametrize(
    ("count", "method"),
    [(2, "dp-sam"), (2, "quantile"), (2, "dp-is"), (2, "adaclip"), (3, "ww-dp-sgd")],
)
def test_a_replay_on_as_many_ranks_is_bit_equal(request, tmp_path, count, method):
    pool = request.getfixturevalue({2: "two", 3: "three"}[count])
    path = str(tmp_path / "run.pt")
    wholes = pool.run(rank_work.saved_and_gone_on, path, method, CUT, STEPS, MORE)
    again = pool.run(rank_work.loaded_and_gone_on, path, method, CUT, STEPS, True, MORE)
    for (weights, rows), (others, other_rows) in zip(wholes, again, strict=True):
        assert torch.equal(weights, others) and torch.equal(weights, wholes[0][0])
        assert rows == other_rows


def test_another_number_of_ranks_needs_fresh_streams_and_keeps_what_was_executed(
    two, three, tmp_path
):
    path = str(tmp_path / "run.pt")
    ((_, rows), _) = two.run(rank_work.saved_and_gone_on, path, "dp-sgd", CUT, STEPS, MORE)
    arguments = (path, "dp-sgd", CUT, STEPS)
    for error in three.errors(rank_work.loaded_and_gone_on, *arguments, True, MORE):
        assert "ranks (2 there, 3 here)" in error and "fresh streams" in error
    with pytest.raises(ValueError, match=r"ranks \(2 there, 1 here\)"):
        rank_work.loaded_and_gone_on(0, *arguments, True, MORE)

    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for resume in (lambda: three.run(rank_work.loaded_and_gone_on, *arguments, False, MORE)[0],
                   lambda: rank_work.loaded_and_gone_on(0, *arguments, False, MORE)):  # fmt: skip
        for file, content in files.items():
            file.write_bytes(content)
        _, found = resume()
        # All seven that the first run executed, and the four that were taken again with other keys.
        assert found[: len(rows)] == rows and len(found) == STEPS + (STEPS - CUT)


def test_what_is_missing_is_missed_on_every_rank(two, tmp_path):
    path = str(tmp_path / "run.pt")
    two.run(rank_work.saved_and_gone_on, path, "dp-sgd", CUT, STEPS, MORE)
    shutil.move(f"{path}.private", tmp_path / "elsewhere")
    for error in two.errors(rank_work.loaded_and_gone_on, path, "dp-sgd", CUT, STEPS, True, MORE):
        assert "run.pt.private" in error
    for error in two.errors(
        rank_work.loaded_and_gone_on, str(tmp_path / "no.pt"), "dp-sgd", CUT, STEPS, True, MORE
    ):
        assert "no checkpoint at" in error


@pytest.mark.parametrize("early", [False, True], ids=["after", "at the same time"])
def test_a_replay_that_is_refused_moves_no_rank(two, tmp_path, early):
    """Rank 0 alone can tell that another gradient came out; the others must not have used it by
    then."""
    (tmp_path / "run").mkdir()
    ranks = two.run(rank_work.replays_another_loop, str(tmp_path / "run" / "run.pt"), early)
    assert "another gradient" in ranks[0]["said"] and "rank 0 stopped" in ranks[1]["said"]
    for found in ranks:
        weights, untouched, updates = found["refused"]
        assert torch.equal(found["before"], weights) and untouched and updates == 1
        # All of them begin the batch again, with other noise.
        assert torch.equal(found["after"], ranks[0]["after"]) and not torch.equal(
            found["after"], weights
        )
        assert [row[2] for row in found["rows"]] == ["sum", "sum", "sum, try 2"]


def test_ranks_count_and_compare_what_was_done_from_every_folder(two, tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    first, second = (str(folder / "run.pt") for folder in folders)
    wholes = two.run(rank_work.saved_twice, first, second)
    assert list(folders[0].glob("*.journal")) and list(folders[1].glob("*.journal"))
    for path in (second, first):
        for (weights, rows), (other, other_rows) in zip(
            wholes, two.run(rank_work.replays, path), strict=True
        ):
            assert torch.equal(weights, other) and rows == other_rows
    shutil.rmtree(folders[0])
    for error in two.errors(rank_work.replays, second):
        assert "in ../a" in error and "fresh streams" in error
