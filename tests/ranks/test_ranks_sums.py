"""Two and three ranks against one process: the same records, sums, noise, clipping norms and
rows."""

import math

import pytest
import rank_work
import torch
import torch.nn.functional as F

from zetaclip import methods
from zetaclip.engine._group import Ranks, deal
from zetaclip.randomness import subkey

METHODS = methods.names(private=True)


def close(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("sigma", [0.0, 0.7])
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_ranks_gives_the_weights_and_the_ledger_of_one_process(
    two, three, method, sigma
):
    # With a noise multiplier and one seed the noise is the same, so it must have been drawn once.
    more = {"q": 1.0, "sigma": sigma, "physical_batch_size": 8}
    one = rank_work.train(0, method, 5, more)
    for pool in (two, three):
        found = pool.run(rank_work.train, method, 5, more)
        for rank in found:
            assert torch.equal(rank["weights"], found[0]["weights"])
            assert rank["clip"] == found[0]["clip"] == pytest.approx(one["clip"], rel=1e-6)
            assert rank["epsilon"] == one["epsilon"]
            assert len(rank["rows"]) == len(one["rows"]) and rank["rows"] == found[0]["rows"]
            for row, other in zip(rank["rows"], one["rows"], strict=True):
                assert row[:3] == other[:3] and row[3:] == pytest.approx(other[3:], rel=1e-6)
        if method != "dp-is":  # its coins are each rank's own
            # With noise each rank rounds its part to the grid: up to C/1024 in each of the sums, of
            # 40 records.
            assert close(found[0]["weights"], one["weights"]) < (1e-5 if sigma else 1e-6)


def test_what_is_released_is_the_clipped_sum_over_all_ranks_records(three):
    size, clip = rank_work.SIZE, 1.0
    found = three.run(rank_work.watched, 8, {"q": 0.2, "sigma": 0.0, "physical_batch_size": 3})
    x, y = rank_work.data().tensors
    counts = set()
    for step in range(8):
        chunks = [found[rank][step]["chunks"] for rank in range(3)]
        counts.add(tuple(len(part) for part in chunks))
        rows = torch.cat([rows for part in chunks for rows in part])
        assert len(rows.unique()) == len(rows)
        module = rank_work.network()
        torch.nn.utils.vector_to_parameters(found[0][step]["weights"], module.parameters())
        expected = torch.zeros(rank_work.flat(module).numel())
        for row in rows:
            loss = F.cross_entropy(module(x[row : row + 1]), y[row : row + 1])
            gradient = torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]
            )
            expected += gradient * min(1.0, clip / float(gradient.norm()))
        for rank in range(3):
            assert close(found[rank][step]["gradient"], expected / (0.2 * size)) < 1e-5
    assert any(len(set(part)) > 1 for part in counts), (
        "ranks should have had different numbers of chunks"
    )


def test_a_rank_without_records_takes_part_all_the_same(three):
    # Five records for three ranks at q = 0.3: most shares of a batch are empty, and some whole
    # batches.
    found = three.run(rank_work.watched, 12, {"q": 0.3, "sigma": 0.0, "size": 5})
    sizes = [
        [sum(map(len, found[rank][step]["chunks"])) for rank in range(3)] for step in range(12)
    ]
    assert any(sum(one) and 0 in one for one in sizes) and any(not sum(one) for one in sizes)
    for step, one in enumerate(sizes):
        assert bool(found[0][step]["gradient"].any()) == bool(sum(one))


@pytest.mark.parametrize("physical", [None, 3])
def test_one_sum_and_one_message_a_batch_and_none_in_forward_or_backward(two, physical):
    for found in two.run(rank_work.counted_collectives, physical):
        assert found["inside"] == 0
        assert found["chunks"] == (1 if physical is None else math.ceil(rank_work.SIZE / 2 / 3))
        # The gradient, the few numbers beside it, and rank 0's word at the end; then the epoch's
        # comparison of weights.
        assert found["calls"] == [
            "all_reduce",
            "all_reduce",
            "broadcast",
            "all_gather",
            "all_gather",
        ]
        assert 8 * found["numel"] <= found["payload"] <= 8 * found["numel"] + 100


def test_the_literal_forms_count_the_records_of_all_ranks(two, three):
    one = rank_work.literal(0, 3, {"q": 1.0, "sigma": 0.0})
    for pool in (two, three):
        for weights, releases in pool.run(rank_work.literal, 3, {"q": 1.0, "sigma": 0.0}):
            assert close(weights, one[0]) < 1e-6 and releases == 3
    # Four records at q = 0.2: a batch is skipped if it is empty on every rank, and taken if it is
    # on one.
    found = two.run(rank_work.literal, 20, {"q": 0.2, "size": 4})
    assert torch.equal(found[0][0], found[1][0]) and 0 < found[0][1] == found[1][1] < 20


@pytest.mark.parametrize("seeds", [False, True])
def test_a_batch_that_is_begun_again_gets_other_noise_where_the_sum_could_differ(two, seeds):
    found = two.run(rank_work.looks_first, seeds)
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert [row[2] for row in found[0][1]] == ["sum, try 2" if seeds else "sum", "sum"]


def test_every_rank_has_dropout_masks_of_its_own(two):
    (inside, after), (others, same) = two.run(rank_work.drawn_in_the_loop)
    assert not torch.equal(inside, others) and torch.equal(after, same)


def test_parts_that_have_no_text_of_their_own_are_no_difference(two):
    (weights, _), (others, _) = two.run(rank_work.with_nameless_rule)
    assert torch.equal(weights, others)


def _noise_ratio(found):
    """Standard deviation of the released sums over what one draw would have; the records' gradients
    are clipped to nearly nothing."""
    sums = torch.stack([step["gradient"] for step in found]) * 0.5 * rank_work.SIZE
    return float(sums.double().std()) / (2.0 * 1e-3), sums


def test_the_noise_is_drawn_once(two):
    more = {"q": 0.5, "sigma": 2.0, "options": {"clip": 1e-3}}
    found = two.run(rank_work.watched, 20, more)
    ratio, sums = _noise_ratio(found[0])
    # The clipped records move a sum by 20 * 1e-3 over all coordinates together: nothing against the
    # noise in each.
    error = 1 / math.sqrt(2 * sums.numel())

    def accepts(value):
        return abs(value - 1) < 5 * error + 0.01

    assert accepts(ratio)
    assert not accepts(ratio * math.sqrt(2)), "noise of two ranks would have been accepted"
    assert not accepts(ratio / math.sqrt(2)), "noise shared out would have been accepted"
    for step in range(20):
        assert torch.equal(found[0][step]["gradient"], found[1][step]["gradient"])
    normal = (sums - sums.mean()) / sums.std()
    assert abs(float((normal[:-1] * normal[1:]).mean())) < 5 / math.sqrt(
        normal[1:].numel()
    )  # fresh at every step


# -- sampling, without any process


class _Here:
    runs = 0

    def __init__(self, rank, count):
        self.rank, self.count = rank, count


def shares(records, count, seed=4):
    made = [Ranks(_Here(rank, count)) for rank in range(count)]
    for ranks in made:
        ranks.take_share(records, seed)
    return made


@pytest.mark.parametrize(("records", "count"), [(100, 2), (101, 3), (2, 3)])
def test_every_record_is_dealt_to_one_rank(records, count):
    dealt = [ranks.rows for ranks in shares(records, count)]
    assert torch.cat(dealt).sort().values.tolist() == list(range(records))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert torch.equal(dealt[0], deal(records, count, 0, 4))
    assert records < 10 or not torch.equal(dealt[0], deal(records, count, 0, 5))


def test_the_ranks_keys_differ():
    keys = {subkey(b"k" * 32, f"records{ranks.suffix}") for ranks in shares(10, 3)}
    keys |= {subkey(b"k" * 32, f"records{ranks.suffix}") for ranks in shares(10, 2)}
    assert len(keys) == 5 and b"k" * 32 not in keys


def _sizes(made, q, draws, same_key=False):
    from zetaclip.randomness import Stream, poisson_indices

    stream = Stream.seeded(1, "test")
    found, hits = [], torch.zeros(sum(len(r.rows) for r in made))
    for _ in range(draws):
        key = stream.draw()
        if same_key:
            parts = [r.rows[poisson_indices(key, len(r.rows), q)] for r in made]
        else:
            parts = [r.own_rows(key, q) for r in made]
        for rows in parts:
            hits[rows] += 1
        found.append([len(rows) for rows in parts])
    return torch.tensor(found, dtype=torch.float64), hits


def test_the_union_is_one_poisson_sample():
    records, q, draws = 60, 0.3, 4000
    made = shares(records, 2)
    sizes, hits = _sizes(made, q, draws)
    spread = math.sqrt(q * (1 - q) / draws)
    assert (
        float((hits / draws - q).abs().max()) < 5 * spread
    )  # every record, with the declared rate
    variance = records * q * (1 - q)

    def independent(sizes):
        return abs(float(sizes.sum(1).var()) / variance - 1) < 5 * math.sqrt(2 / draws)

    assert independent(sizes)
    assert not independent(_sizes(made, q, draws, same_key=True)[0]), (
        "ranks that toss the same coins should be noticed"
    )
