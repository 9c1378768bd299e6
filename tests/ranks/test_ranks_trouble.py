"""What is refused, and what happens when one rank is not as the others, falls behind or dies."""

import os
import time

import pytest
import rank_work
import torch


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "sigma",
            r"rank 1: not what rank 0 has: noise_multipliers \(\[1.0\] there, \[2.0\] here\)",
        ),
        ("data", r"rank 1: not what rank 0 has: settings"),
        ("network", "rank 1: not what rank 0 has: parameters"),
        ("weights", "3.weight of rank 1 is not what rank 0 has after 2 updates"),
        ("rule", "'liar' scaled an example beyond the sensitivity"),
        ("grad", "0.weight.grad was written by autograd"),
        ("split", r"rank 1: not what rank 0 has: data \(as many records, but others"),
        (
            "order",
            r"rank 1: not what rank 0 has: data \(as many records, but others, or in another order",
        ),
        ("files", r"rank 1: not what rank 0 has: data \(as many records, but others"),
        ("units", r"rank 1: not what rank 0 has: units \(as many, but of other rows"),
    ],
)
def test_a_rank_that_is_not_as_the_others_stops_all_of_them(two, what, said):
    import re

    errors = two.errors(rank_work.wrong_on_one_rank, what)
    for error in errors:
        assert re.search(said, error), errors
    assert "rank 1" in errors[0]
    # Nobody is left waiting: the group goes on with the next run.
    assert len(two.run(rank_work.train, "dp-sgd", 2, {})) == 2


@pytest.mark.parametrize("shard", [None, "parts"])
def test_ranks_with_different_c_release_nothing_until_all_of_them_load(two, tmp_path, shard):
    found = two.run(rank_work.loses_what_it_was_told, str(tmp_path / "run.pt"), shard)
    assert found[0]["clip"] != found[1]["clip"]
    for rank, one in enumerate(found):
        assert f"rank {rank} came to the sum of update 3" in one["said"], found
        assert f"C = {one['clip']}" in one["said"]
        assert torch.equal(one["before"], one["after"]) and one["updates"] == 2


@pytest.mark.parametrize("augment", [None, "torch", "numpy", "python", "own", "unreadable"])
def test_data_that_look_different_every_time_are_no_reason_to_stop(two, augment):
    (first, kept), (second, too) = two.run(rank_work.joins, augment)
    assert first == second and (first is None) == (augment in ("own", "unreadable"))
    assert kept and too


def test_everybody_starts_with_the_weights_of_rank_0(two):
    (own, first, scale), (other, second, told) = two.run(rank_work.starts_apart)
    assert not torch.equal(own, other)
    assert torch.equal(first, own) and torch.equal(second, own) and torch.equal(scale, told)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ddp", r"DistributedDataParallel.*make_private\(module=ddp.module, ...\)"),
        ("tensor-parallel", "0.weight.*device mesh"),
    ],
)
def test_modules_that_are_distributed_in_another_way_are_refused_by_name(two, kind, said):
    import re

    for error in two.errors(rank_work.refused, kind):
        assert error.startswith("ValidationError") and re.search(said, error, re.DOTALL), error


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_is_only_slow_is_waited_for(own_pool, late):
    """The others stand at different places meanwhile, because a message reaches some of them before
    others."""
    found = own_pool(3).run(rank_work.comes_late, late)
    assert all(torch.equal(weights, found[0][0]) for weights, _ in found)


def test_a_rank_that_calls_something_else_is_named_instead_of_hanging(own_pool, tmp_path):
    errors = own_pool(2).errors(rank_work.saves_alone, str(tmp_path / "alone.pt"))
    text = " ".join(errors)
    assert (
        "rank 0 waits in save() after 2 updates" in text
        or "rank 0 in save() after 2 updates" in text
    )
    assert "the sum of update 3" in text and "the same loop" in text


@pytest.mark.parametrize("victim", [0, 2])
def test_the_survivors_of_a_killed_rank_stop_and_name_it(own_pool, tmp_path, victim):
    pool = own_pool(3)
    pool.start(rank_work.trains_forever, str(tmp_path / "mark"))
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"mark.{rank}").exists() for rank in range(3)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    process = pool.processes[victim]
    process.kill()
    started = time.monotonic()
    for fine, (kind, text, _) in pool.answers([rank for rank in range(3) if rank != victim]):
        assert not fine and kind == "RankError"
        assert (
            "rank 0, which holds the ranks' store, is gone" in text
            if victim == 0
            else f"rank 2 (process {process.pid}" in text
        )
    assert time.monotonic() - started < 30
    assert os.getpid() != process.pid
