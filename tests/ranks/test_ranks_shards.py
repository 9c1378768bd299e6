"""Parameters that are spread over ranks by fully_shard: the sums, noise, rows and ε of one process,
each rank with its own part of everything."""

import math
import re
import time

import numpy as np
import pytest
import rank_work
import shard_work
import torch
import torch.nn.functional as F

from zetaclip.gradients.layout import owned_rows
from zetaclip.randomness import add_noise

SHARDED = {"shard": "parts"}


def close(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("method", ["dp-sgd", "dp-adam", "auto", "quantile", "slaclip"])
def test_without_noise_the_weights_and_rows_are_those_of_one_process(two, three, method):
    more = {"q": 1.0, "sigma": 0.0, "physical_batch_size": 8}
    one = rank_work.train(0, method, 5, more)
    for pool in (two, three):  # 24 and 4 rows over three ranks: parts of different sizes
        found = pool.run(shard_work.train, method, 5, more | SHARDED, 200)
        for rank in found:
            assert torch.equal(rank["weights"], found[0]["weights"])
            assert rank["clip"] == found[0]["clip"] == pytest.approx(one["clip"], rel=1e-6)
            assert rank["epsilon"] == one["epsilon"] == math.inf
            assert len(rank["rows"]) == len(one["rows"]) and rank["rows"] == found[0]["rows"]
        assert close(found[0]["weights"], one["weights"]) < 1e-6


def test_a_probe_reads_whole_weights(two):
    # Every second update rank 0 looks at the spectrum of a weight of which it has one half.
    options = {"period": 2, "clip": 1.0, "probe": "3"}
    more = {"q": 1.0, "sigma": 0.0, "options": options}
    one = rank_work.train(0, "ww-dp-sgd", 6, more)
    assert one["clip"] != 1.0
    for how in ("parts", "whole"):
        found = two.run(rank_work.train, "ww-dp-sgd", 6, more | {"shard": how})
        assert [rank["clip"] for rank in found] == pytest.approx([one["clip"]] * 2, rel=1e-6)
        assert close(found[1]["weights"], one["weights"]) < 1e-5


def test_a_probe_of_ones_own_reads_whole_weights(two):
    one = shard_work.probed(0, None)
    assert all(found == pytest.approx(one) for found in two.run(shard_work.probed, "parts"))


@pytest.mark.parametrize("half", ["autocast", "model"])
def test_in_bfloat16(two, half):
    one = shard_work.in_bfloat16(0, None, half)
    for weights in two.run(shard_work.in_bfloat16, "parts", half):
        assert close(weights, one) < 1e-6


@pytest.mark.parametrize("how", ["whole", "together", "kept"])
def test_it_does_not_matter_how_the_parts_are_put_together(two, how):
    more = {"q": 1.0, "sigma": 0.0}
    one = rank_work.train(0, "dp-sgd", 3, more)
    found = two.run(rank_work.train, "dp-sgd", 3, more | {"shard": how})
    assert close(found[0]["weights"], one["weights"]) < 1e-6


@pytest.mark.parametrize("name", shard_work.MODELS)
def test_layers_of_every_kind(two, name):
    one = shard_work.model_trained(0, name, "whole")
    for shard in ("whole", "parts") if name not in ("text",) else ("whole",):
        for found in two.run(shard_work.model_trained, name, shard):
            assert close(found["weights"], one["weights"]) < 1e-6
            # The ranks have half of the records each, so one chunk of 15 and one of 5.
            assert found["seen"][::2] == pytest.approx(one["seen"][::3], rel=1e-4)
            assert found["paths"] == one["paths"]


@pytest.mark.parametrize("work", [shard_work.steps_that_meet, shard_work.by_unit])
def test_optimizers_that_need_all_ranks_and_units_of_several_rows(two, work):
    one = work(0, None)
    for weights in two.run(work, "parts"):
        assert close(weights, one) < 1e-6


def test_the_clipped_sum_is_over_all_ranks_records_however_many_chunks_each_has(three):
    size, clip = rank_work.SIZE, 1.0
    more = {"q": 0.2, "sigma": 0.0, "physical_batch_size": 3}
    found = three.run(rank_work.watched, 8, more | SHARDED)
    x, y = rank_work.data().tensors
    records = set()
    for step in range(8):
        chunks = [found[rank][step]["chunks"] for rank in range(3)]
        assert len({len(part) for part in chunks}) == 1, "forward is a meeting of all ranks"
        records.add(tuple(math.ceil(sum(map(len, part)) / 3) for part in chunks))
        rows = torch.cat([rows for part in chunks for rows in part])
        assert len(rows.unique()) == len(rows)
        module = rank_work.network()
        torch.nn.utils.vector_to_parameters(found[0][step]["weights"], module.parameters())
        expected = torch.zeros(rank_work.flat(module).numel())
        for row in rows:
            loss = F.cross_entropy(module(x[row : row + 1]), y[row : row + 1])
            parts = torch.autograd.grad(loss, list(module.parameters()))
            gradient = torch.cat([g.flatten() for g in parts])
            expected += gradient * min(1.0, clip / float(gradient.norm()))
        assert close(found[1][step]["gradient"], expected / (0.2 * size)) < 1e-5
    assert any(len(set(one)) > 1 for one in records), "no rank had fewer chunks than another"


def _clipped_sum():
    """Σ of all records' clipped gradients by autograd, one at a time, in float64."""
    module = rank_work.network(width=shard_work.WIDTH).double()
    x, y = rank_work.data().tensors
    total = [torch.zeros_like(p) for p in module.parameters()]
    for row in range(len(x)):
        loss = F.cross_entropy(module(x[row : row + 1].double()), y[row : row + 1])
        parts = torch.autograd.grad(loss, list(module.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in parts))
        for sum_of, g in zip(total, parts, strict=True):
            sum_of += g * min(1.0, 1.0 / norm)
    return total


@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_adds_the_noise_of_its_own_key_to_its_own_part_on_one_grid(request, count):
    pool = request.getfixturevalue({2: "two", 3: "three"}[count])
    found = pool.run(shard_work.one_release, {"sigma": 4.0} | SHARDED)
    alone = shard_work.one_release(0, {"sigma": 4.0})
    keys = {one[name] for one in (*found, alone) for name in ("key", "coins")}
    assert len(keys) == 2 * (count + 1)
    expected = _clipped_sum()
    for rank, one in enumerate(found):
        # The grid and the noise are those of the whole vector, whatever part a rank has.
        assert one["grid"] == alone["grid"] and one["std"] == alone["std"]
        noise = np.zeros(sum(part.numel() for part in one["own"]))
        add_noise(one["key"], noise, 1 / one["grid"], one["std"] / one["grid"])
        begin = 0
        for part, whole in zip(one["own"], expected, strict=True):
            first, last = owned_rows(whole.shape[0], rank, count)
            assert part.shape[0] == last - first
            released = (part * rank_work.SIZE / one["grid"]).flatten().numpy()
            assert np.abs(released - released.round()).max(initial=0) < 1e-3
            sums = released.round() - noise[begin : begin + part.numel()]
            exact = (whole[first:last] / one["grid"]).flatten().numpy()
            assert np.abs(sums - exact).max(initial=0) < 0.5 + 1e-3
            begin += part.numel()


def test_no_two_parts_share_noise_and_each_has_the_declared_one(two):
    more = {"q": 0.5, "sigma": 2.0, "options": {"clip": 1e-3}}
    found = two.run(rank_work.watched, 20, more | SHARDED)
    sums = torch.stack([step["gradient"] for step in found[0]]).double() * 0.5 * rank_work.SIZE
    normal = sums / (2.0 * 1e-3)
    # The first layer's weight is 24 x 12: rank 0 has the first 12 rows, rank 1 the others.
    first, second = normal[:, :144], normal[:, 144:288]
    error = 1 / math.sqrt(first.numel())

    def accepts(std):
        return abs(float(std) - 1) < 5 * error / math.sqrt(2) + 0.01

    def independent(one, other):
        return abs(float((one * other).mean())) < 5 * error

    for part in (first, second):
        assert accepts(part.std())
        assert not accepts(part.std() * math.sqrt(2)) and not accepts(part.std() / math.sqrt(2))
    assert independent(first, second)
    assert not independent(first, first), "shared noise would have been accepted"
    assert independent(first[:-1], first[1:])  # fresh at every step


def test_with_noise_the_rows_and_epsilon_are_those_of_one_process(two):
    more = {"q": 0.5, "sigma": 0.8}
    one = rank_work.train(0, "dp-sgd", 4, more)
    for rank in two.run(rank_work.train, "dp-sgd", 4, more | SHARDED):
        assert rank["rows"] == one["rows"] and rank["epsilon"] == one["epsilon"] < math.inf


def test_a_rank_holds_only_its_part_of_weights_sum_gradient_and_moments(two):
    numel = rank_work.flat(rank_work.network()).numel()
    parts = two.run(shard_work.held)
    for name, times in {"weights": 1, "sum": 1, "gradient": 1, "moments": 2}.items():
        assert sum(part[name] for part in parts) == times * numel
        assert all(part[name] <= 0.51 * times * numel for part in parts)


# -- saving and loading

CUT, STEPS = 3, 7
MORE = {"q": 0.25, "sigma": 1.0, "physical_batch_size": 4}


@pytest.mark.parametrize("method", ["dp-adam", "quantile"])
def test_a_replay_is_bit_equal_and_others_go_on_with_fresh_streams(two, three, tmp_path, method):
    path = str(tmp_path / "run.pt")
    more = MORE | SHARDED
    wholes = two.run(rank_work.saved_and_gone_on, path, method, CUT, STEPS, more)
    arguments = (path, method, CUT, STEPS)
    for (weights, rows), (others, other_rows) in zip(
        wholes, two.run(rank_work.loaded_and_gone_on, *arguments, True, more), strict=True
    ):
        assert torch.equal(weights, others) and rows == other_rows
    for error in two.errors(rank_work.loaded_and_gone_on, *arguments, True, MORE):
        assert "noise_source" in error and "fresh streams" in error
    for error in three.errors(rank_work.loaded_and_gone_on, *arguments, True, more):
        assert "ranks (2 there, 3 here)" in error
    _, found = rank_work.loaded_and_gone_on(0, *arguments, False, MORE)
    assert found[: len(rows)] == rows and len(found) == len(rows) * (2 * STEPS - CUT) // STEPS


def test_a_replay_of_another_loop_moves_no_rank(two, tmp_path):
    ranks = two.run(rank_work.replays_another_loop, str(tmp_path / "run.pt"), False, "parts")
    assert "another gradient" in ranks[0]["said"] and "rank 0: " in ranks[1]["said"]
    for found in ranks:
        weights, untouched, updates = found["refused"]
        assert torch.equal(found["before"], weights) and untouched and updates == 1
        assert [row[2] for row in found["rows"]] == ["sum", "sum", "sum, try 2"]


# -- what is refused, and trouble


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("offload", "offloaded"),
        ("precision", "mixed precision policy"),
        ("columns", "not along its first dimension"),
        ("hybrid", "not the line of all ranks"),
        ("reversed", "not the line of all ranks"),
        ("partly", r"3.weight \(parameter\): it is not sharded, and others are"),
        ("inside", "sharded by itself inside of 0"),
        ("spectral norm", "spectral norm"),
        ("dp-sat", "it remembers releases"),
        ("replicas", "splits the batch over replicas"),
        ("ddp", "would sum raw gradients over the ranks"),
        ("adaclip", "its clip rule maps gradients"),
        ("dp-sam", "it takes several gradients per update"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(two, kind, said):
    for error in two.errors(shard_work.refused, kind):
        assert re.search(said, error), error


def test_parts_of_another_size_between_forward_and_backward_are_refused(two):
    # torch takes such a number from four ranks on.
    for said in two.run(shard_work.refusal_of_a_number):
        assert "reshard_after_forward is a number" in said


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("rule", "'liar' scaled an example beyond the sensitivity"),
        ("rule, counted", "'liar' scaled an example beyond the sensitivity"),
        ("grad", "0.weight.grad was written by autograd"),
        ("forward", "0.weight"),
    ],
)
def test_a_rank_that_refuses_its_batch_stops_all_of_them(two, what, said):
    errors = two.errors(shard_work.wrong, what)
    for error in errors:
        assert said in error, errors
    assert "rank 1" in errors[0]
    assert len(two.run(rank_work.train, "dp-sgd", 2, SHARDED)) == 2


@pytest.mark.parametrize("hows", [("parts", "whole"), ("whole", "kept"), ("parts", None)])
def test_ranks_that_shard_in_different_ways_are_refused(two, hows):
    for error in two.errors(shard_work.spread_apart, hows):
        assert "rank 1: not what rank 0 has:" in error and "sharding (" in error


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
@pytest.mark.parametrize("sync", [True, False])
def test_gradients_outside_of_layers_are_refused_and_never_added_up(two, ranks, sync):
    errors = two.errors(shard_work.penalised, ranks, sync)
    for error in errors:
        assert "0.weight.grad was written by autograd" in error, errors
    assert len(two.run(rank_work.train, "dp-sgd", 2, SHARDED)) == 2


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_were_interrupted_at_different_places_do_not_go_on(two, first):
    found = two.run(shard_work.interrupted, first)
    assert [one["updates"] for one in found] == [2 - first, 1 + first]
    for rank, one in enumerate(found):
        where = (
            "the start of update 3" if rank == first else "a batch of update 2 that is begun again"
        )
        assert f"rank {rank} came to {where}" in one["said"], found
        assert torch.equal(one["before"], one["after"])


def test_nothing_is_released_where_one_rank_can_not_write_its_rows(two):
    for rank, found in enumerate(two.run(shard_work.disk_full_on_one_rank)):
        assert "no space left" in found["said"] and (rank == 1 or "rank 1" in found["said"])
        assert torch.equal(found["before"], found["after"]) and found["updates"] == 1
        assert not torch.equal(found["after"], found["moved"])
        assert [row[2] for row in found["rows"]][-1] == "sum, try 2"


def test_the_survivor_of_a_killed_rank_stops_and_names_it(own_pool, tmp_path):
    pool = own_pool(2)
    pool.start(rank_work.trains_forever, str(tmp_path / "mark"), "parts")
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"mark.{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    pool.processes[1].kill()
    ((fine, (kind, text, _)),) = pool.answers([0])
    assert not fine and kind == "RankError"
    assert f"rank 1 (process {pool.processes[1].pid}" in text and "was released" in text
