"""A unit of several rows is drawn, clipped and counted once, however many rows it has."""

import numpy as np
import pytest
import torch
from helpers import mean_loss, private, train
from networks import MODELS
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from zetaclip.engine._checkpoint import CheckpointError
from zetaclip.engine._units import Units
from zetaclip.integrations.terms import Terms

KEY = bytes(range(32))
# Units 0 to 6 with five or six rows each, not next to each other, then four of five rows.
OWNERS = torch.tensor([i % 7 for i in range(40)] + [7 + i // 5 for i in range(20)])


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def data(rows=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def clipped_sum(module, batch, units, clip=0.3, loss=mean_loss, **options):
    """What one noiseless step at q = 1 releases, times L."""
    number = 1000  # the declared number of units, which only divides
    with pytest.warns(UserWarning, match="num_examples = 1000"):
        _, module, optimizer, loader = private(
            module,
            batch,
            sigma=0.0,
            clipping=clip,
            q=1.0,
            lr=0.0,
            num_examples=number,
            **({} if units is None else {"units": units, "rows_per_unit": 100}),
            **options,
        )
    total = 0
    while not optimizer.stepped:
        for rows in loader:
            optimizer.zero_grad()
            loss(module, rows).backward()
            optimizer.step()
            if optimizer.stepped:
                total = flat([p.grad for p in module.parameters()]).double() * number
                break
    return total


def one_unit_at_a_time(module, batch, units, clip=0.3, reduction="mean"):
    total = 0
    for unit in units.unique():
        own = units == unit
        loss = F.cross_entropy(module(batch[0][own]), batch[1][own], reduction=reduction)
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        gradient = flat(gradients).double()
        total = total + gradient * min(1.0, clip / float(gradient.norm()))
    return total


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet-late", "words", "transformer", "lstm"])
def test_a_step_adds_each_unit_clipped_once(name, reduction):
    build, inputs = MODELS[name]
    torch.manual_seed(1)
    module, units = build(), torch.tensor([0, 1, 0, 2, 2, 0, 3, 1, 0, 2])
    batch = inputs(10), torch.randint(0, 10, (10,))
    expected = one_unit_at_a_time(module, batch, units, reduction=reduction)
    found = clipped_sum(module, batch, units, unit_reduction=reduction)
    assert (found - expected).norm() <= 3e-5 * expected.norm()


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_one_unit_more_moves_the_sum_by_c_however_many_rows_it_has(rows):
    x, y = data()
    # The new unit's rows agree with each other and are long: unclipped they would move it far.
    more = torch.full((rows, 6), 50.0), torch.zeros(rows, dtype=torch.int64)
    units = torch.cat([OWNERS, torch.full((rows,), 99)])
    bigger = torch.cat([x, more[0]]), torch.cat([y, more[1]])
    moved = clipped_sum(linear(), bigger, units) - clipped_sum(linear(), (x, y), OWNERS)
    assert float(moved.norm()) == pytest.approx(0.3, rel=1e-4)
    if rows > 1:  # as rows of their own they move it by C each
        alone = clipped_sum(linear(), bigger, None) - clipped_sum(linear(), (x, y), None)
        assert float(alone.norm()) == pytest.approx(0.3 * rows, rel=1e-4)


def test_the_order_of_rows_changes_nothing():
    x, y = data()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    before = clipped_sum(linear(), (x, y), OWNERS)
    after = clipped_sum(linear(), (x[order], y[order]), OWNERS[order])
    assert (after - before).norm() <= 1e-5 * before.norm()


def trained(units=None, sigma=0.7, **options):
    if units is not None:
        options |= {"units": units, "rows_per_unit": options.get("rows_per_unit", 100)}
    count = len(data()[0]) if units is None else len(np.unique(np.asarray(units)))
    engine, module, optimizer, loader = private(
        linear(), data(), sigma=sigma, q=0.3, num_examples=count, **options
    )
    train(module, optimizer, loader, epochs=2)
    return engine, flat(module.parameters())


def test_units_of_one_row_train_bit_for_bit_as_rows():
    (_, plain), (_, single) = trained(), trained(units=np.arange(60))
    assert torch.equal(plain, single)
    assert not torch.equal(plain, trained(units=OWNERS)[1])


@pytest.mark.parametrize("physical", [8, 13])
def test_physical_batches_change_nothing_and_split_no_unit(physical):
    _, whole = trained(units=OWNERS, sigma=0.0)
    _, parts = trained(units=OWNERS, sigma=0.0, physical_batch_size=physical, rows_per_unit=6)
    assert (whole - parts).norm() <= 1e-6 * whole.norm()


def test_ids_may_be_names_and_epsilon_is_for_one_unit():
    names = [f"patient {number}" for number in OWNERS.tolist()]
    engine, weights = trained(units=names, rows_per_unit=4)
    assert torch.isfinite(weights).all()
    head = engine.ledger.header
    assert head.adjacency == "add/remove one unit (at most 4 rows per batch)"
    assert head.num_examples == 11 and head.expected_batch_size == pytest.approx(3.3)


def test_a_drawn_unit_brings_all_its_rows_up_to_the_declared_number():
    units = Units(OWNERS, 60, 5)
    rows = units.rows_of(torch.tensor([0, 3, 8]), KEY)
    assert units.counts(rows).tolist() == [5, 5, 5]
    assert OWNERS[rows].tolist() == [0] * 5 + [3] * 5 + [8] * 5
    assert set(rows[10:].tolist()) == set(range(45, 50))  # unit 8 has just five
    assert len(set(rows.tolist())) == 15


def test_rows_that_are_left_out_are_chosen_by_secret_coins_evenly():
    units = Units([0] * 6 + [1], 7, 2)
    both = torch.tensor([0, 1])
    chosen = torch.zeros(7)
    for number in range(3000):
        rows = units.rows_of(both, number.to_bytes(32, "little"))
        assert len(rows) == 3
        chosen[rows] += 1
    assert chosen[6] == 3000
    share = chosen[:6] / 3000
    # Four standard errors of a share of a third; the first two rows every time would be 1 and 0.
    assert float((share - 1 / 3).abs().max()) < 4 * (1 / 3 * 2 / 3 / 3000) ** 0.5
    again = units.rows_of(both, (7).to_bytes(32, "little"))
    assert torch.equal(again, units.rows_of(both, (7).to_bytes(32, "little")))


def test_another_unit_in_the_batch_leaves_the_choice_of_rows_alone():
    units = Units([0] * 6 + [1] * 6 + [2] * 6, 18, 2)
    few, many = units.rows_of(torch.tensor([2]), KEY), units.rows_of(torch.tensor([0, 2]), KEY)
    assert torch.equal(few, many[2:])


def test_units_are_drawn_with_the_declared_rate():
    engine, _, _, _ = private(
        linear(), data(), q=0.3, num_examples=11, units=OWNERS, rows_per_unit=100
    )
    batches = engine._private().batches
    drawn = torch.zeros(11)
    for number in range(2000):
        (rows,) = batches.chunks(number.to_bytes(32, "little"))
        drawn[OWNERS[rows].unique()] += 1
    assert float((drawn / 2000 - 0.3).abs().max()) < 4 * (0.3 * 0.7 / 2000) ** 0.5


def test_an_empty_batch_is_a_step_with_noise():
    _, module, optimizer, loader = private(
        linear(), data(), q=1e-9, num_examples=11, units=OWNERS, rows_per_unit=9
    )
    before = flat(module.parameters())
    for batch in loader:
        optimizer.zero_grad()
        mean_loss(module, batch).backward()
        optimizer.step()
        break
    assert optimizer.stepped and not torch.equal(before, flat(module.parameters()))


def test_a_run_goes_on_exactly_and_refuses_other_owners(tmp_path):
    def build(units=OWNERS):
        return private(linear(), data(), q=0.3, num_examples=11, units=units, rows_per_unit=4)

    def go(engine, module, optimizer, loader, until):
        while engine.updates < until:
            for batch in loader:
                optimizer.zero_grad()
                mean_loss(module, batch).backward()
                optimizer.step()
                if engine.updates == until:
                    break
        return flat(module.parameters())

    first = build()
    go(*first, 3)
    first[0].save(tmp_path / "run.pt")
    whole = go(*first, 7)
    second = build()
    second[0].load(tmp_path / "run.pt", replay=True)
    assert torch.equal(go(*second, 7), whole)
    for replay in (True, False):
        third = build(OWNERS.roll(1))
        with pytest.raises(CheckpointError, match="data" if replay else "to other units"):
            third[0].load(tmp_path / "run.pt", replay=replay)
        assert len(third[0].ledger) == 0
    same = build()
    same[0].load(tmp_path / "run.pt")
    assert len(same[0].ledger) and not any("compared" in n for n in same[0].ledger.header.notes)
    (tmp_path / "run.pt.private").unlink()
    unknown = build(OWNERS.roll(1))
    unknown[0].load(tmp_path / "run.pt")
    assert any("could not be compared" in n for n in unknown[0].ledger.header.notes)


@pytest.mark.parametrize("before", [{}, {"units": OWNERS, "rows_per_unit": 4}])
def test_releases_for_rows_and_for_units_never_stand_in_one_ledger(tmp_path, before):
    after = {} if before else {"units": OWNERS, "rows_per_unit": 4}
    first, second = (
        private(linear(), data(), q=0.3, num_examples=11 if terms else 60, **terms)
        for terms in (before, after)
    )
    train(*first[1:], steps=2)
    first[0].save(tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="one ledger can't tell an ε for both"):
        second[0].load(tmp_path / "run.pt")
    assert len(second[0].ledger) == 0
    with pytest.raises(CheckpointError, match="one ledger can't tell an ε for both"):
        second[0].hooks.continue_ledger(first[0].ledger)


def test_one_row_of_a_unit_can_move_the_sum_by_twice_c():
    """Why docs/units.md claims only twice the ε for single rows of larger units."""
    x = torch.tensor([[1.0] + [0.0] * 5, [-3.0] + [0.0] * 5])
    y = torch.zeros(2, dtype=torch.long)

    def loss(module, batch):
        return module(batch[0])[:, 0].mean()

    one, both = (
        clipped_sum(linear(), (x[:n], y[:n]), torch.zeros(n), loss=loss, clip=0.1) for n in (1, 2)
    )
    assert 0.1 * 1.3 < (one - both).norm() <= 0.1 * 2


# -- views


def test_views_that_are_all_alike_are_the_row_itself():
    plain = clipped_sum(linear(), data(), None)
    found = clipped_sum(linear(), data(), None, views=3, augment=lambda batch: batch)
    assert (found - plain).norm() <= 1e-5 * plain.norm()


def test_views_of_a_row_are_averaged_before_clipping():
    x, y = data(12)
    shifts = torch.tensor([0.0, 1.0, -3.0])

    def augment(batch):
        return [batch[0] + shifts.repeat(len(batch[0]) // 3).unsqueeze(1), batch[1]]

    rows = torch.arange(12).repeat_interleave(3)
    expected = one_unit_at_a_time(linear(), augment([x[rows], y[rows]]), rows)
    found = clipped_sum(linear(), (x, y), None, views=3, augment=augment)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_views_come_as_many_rows_at_a_time_as_a_batch_has_without_them():
    seen, drawn = [], []

    def augment(batch):
        seen.append(len(batch[0]))
        drawn.append(torch.rand(1).item())
        return batch

    engine, module, optimizer, loader = private(linear(), data(12), views=4, augment=augment, q=1.0)
    for batch in loader:
        optimizer.zero_grad()
        mean_loss(module, batch).backward()
        optimizer.step()
    assert len(engine.ledger) == 1  # one release, all the same
    assert seen[-4:] == [12, 12, 12, 12] and "at most 12 rows at a time" in repr(loader)
    assert len(set(drawn[-4:])) == 4  # each part has randomness of its own


def test_augmentation_follows_a_secret_key_and_leaves_torchs_stream_alone():
    seen, last = [], []

    def augment(batch):
        last[:] = [torch.rand(2)]
        return batch

    for seed in (0, 0, 1):
        _, module, optimizer, loader = private(
            linear(), data(), seed=seed, views=2, augment=augment
        )
        state = torch.get_rng_state()
        for batch in loader:
            optimizer.zero_grad()
            mean_loss(module, batch).backward()
            optimizer.step()
            break
        assert torch.equal(torch.get_rng_state(), state)
        seen += last
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], torch.rand(2))  # the public stream would give this


def mixup(batch):
    x, y = batch
    return [0.7 * x + 0.3 * x[torch.randperm(len(x))], y]


def centred(batch):
    return [batch[0] - batch[0].mean(0), batch[1]]


def shuffled(batch):
    order = torch.randperm(len(batch[0]))
    return [part[order] for part in batch]


@pytest.mark.parametrize("augment", [mixup, centred, shuffled])
def test_an_augmentation_that_mixes_rows_is_refused(augment):
    *_, loader = private(linear(), data(), views=2, augment=augment)
    with pytest.raises(ValueError, match="augment= mixes rows"):
        next(iter(loader))


def by_size(records):
    return default_collate(sorted(records, key=lambda record: float(record[0].norm())))


def with_masks(records):
    x, y = default_collate(records)
    return x * (torch.rand_like(x) > 0.1), y


def untouched(records):
    return default_collate([(records.pop(0)) for _ in range(len(records))])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_that_sorts_would_give_rows_to_other_units(workers):
    options = {"collate_fn": by_size, "num_workers": workers}
    *_, loader = private(
        linear(), data(), units=OWNERS, rows_per_unit=3, num_examples=11, loader_options=options
    )
    with pytest.raises(ValueError, match="into another order"):
        next(iter(loader))


class Sorting(nn.Module):
    """Sorts rows before its layer, and puts the answers back into their places."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.layer, self.batch_first = nn.Linear(6, 3), batch_first

    def forward(self, x):
        order = x.sum(1).argsort()
        if self.batch_first:
            return self.layer(x[order])[order.argsort()]
        return self.layer(x[order].unsqueeze(0))[0, order.argsort()]


class InPlace(nn.Module):
    """Keeps the order; sees the sum of each row."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.layer(self.drop(torch.cat([x, x.sum(1, keepdim=True)], 1)))


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_module_that_sorts_would_give_rows_to_other_units(batch_first):
    terms = {"units": OWNERS, "rows_per_unit": 100, "num_examples": 11}
    with pytest.raises(ValueError, match="another order before 'layer'"):
        private(Sorting(batch_first), data(), **terms)
    with pytest.raises(ValueError, match="another order before 'layer'"):
        private(Sorting(batch_first), data(), views=2)
    private(Sorting(), data())  # rows of their own may stand anywhere
    kept = InPlace()
    before = torch.random.get_rng_state()
    _, module, *_ = private(kept, data(), **terms)
    assert module.training and torch.equal(before, torch.random.get_rng_state())


def test_what_a_sorting_module_would_do(monkeypatch):
    """Without the check, the one unit more moves the sum by more than C."""
    monkeypatch.setattr("zetaclip.engine._engine.rehearse_order", lambda *_: None)
    x, y = data()
    generator = torch.Generator().manual_seed(8)
    more = torch.randn(9, 6, generator=generator), torch.zeros(9, dtype=torch.int64)
    units = torch.cat([OWNERS, torch.full((9,), 99)])
    bigger = torch.cat([x, more[0]]), torch.cat([y, more[1]])

    def sorting():
        torch.manual_seed(0)
        return Sorting()

    moved = clipped_sum(sorting(), bigger, units) - clipped_sum(sorting(), (x, y), OWNERS)
    assert float(moved.norm()) > 1.05 * 0.3


@pytest.mark.parametrize("collate", [with_masks, untouched])
def test_a_collate_fn_that_keeps_the_order_is_left_alone(collate):
    *_, loader = private(
        linear(),
        data(),
        units=OWNERS,
        rows_per_unit=3,
        num_examples=11,
        loader_options={"collate_fn": collate},
    )
    x, y = next(iter(loader))
    assert len(x) == len(y) > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": OWNERS}, "needs rows_per_unit="),
        ({"rows_per_unit": 3}, "needs units="),
        ({"units": OWNERS[:9], "rows_per_unit": 3}, "60 of them"),
        ({"units": OWNERS, "rows_per_unit": 0}, "positive whole number"),
        ({"views": 0}, "positive whole number"),
        ({"units": OWNERS, "rows_per_unit": 9, "physical_batch_size": 8}, "too small"),
        ({"units": OWNERS, "rows_per_unit": 9, "unit_reduction": "max"}, "'mean', 'sum'"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    with pytest.raises(ValueError, match=message):
        private(linear(), data(), num_examples=11 if "units" in change else 60, **change)


def test_the_terms_of_frameworks_take_units():
    terms = Terms(
        noise_multiplier=1.0, clipping=1.0, num_examples=11, units=OWNERS, rows_per_unit=4, seed=0
    )
    module = linear()
    loader = DataLoader(TensorDataset(*data()), batch_size=2)
    assert terms.steps_per_epoch(loader) == 6
    engine, _, private_loader = terms.make_private(
        module, torch.optim.SGD(module.parameters(), lr=0.1), loader, 6
    )
    assert engine.ledger.header.adjacency.startswith("add/remove one unit")
    assert private_loader.sample_rate == pytest.approx(2 / 11)
