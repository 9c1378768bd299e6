"""Poisson batches: rates, independence, and every shape a batch can have."""

import pytest
import torch
from helpers import flat, mean_loss, private, tiny, toy_data, train
from scipy import stats
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from zetaclip import PrivacyEngine
from zetaclip.randomness import Stream
from zetaclip.sampling import poisson_indices


def draws(records, rate, times, seed=0):
    stream = Stream.seeded(seed, "sampling")
    mask = torch.zeros(times, records, dtype=torch.bool)
    for t in range(times):
        mask[t, poisson_indices(stream.draw(), records, rate)] = True
    return mask


def test_every_record_is_drawn_at_the_declared_rate_and_independently():
    times, records, rate = 4000, 40, 0.1
    mask = draws(records, rate, times).double()
    counts = mask.sum(0)
    expected, variance = times * rate, times * rate * (1 - rate)

    def spread(c):
        return stats.chi2.sf(float(((c - expected) ** 2 / variance).sum()), records)

    assert spread(counts) > 1e-3
    assert spread(counts * 1.1) < 1e-6  # a rate that is off by a tenth would be seen

    def variance_p(sizes):
        total = (times - 1) * float(sizes.var()) / (records * rate * (1 - rate))
        return 2 * min(stats.chi2.sf(total, times - 1), stats.chi2.cdf(total, times - 1))

    assert variance_p(mask.sum(1)) > 1e-3
    # Shuffled batches of fixed size have the same rates and no variance: they are seen.
    fixed = torch.zeros_like(mask).scatter_(1, torch.rand(times, records).argsort(1)[:, :4], 1.0)
    assert spread(fixed.sum(0)) > 1e-3 and variance_p(fixed.sum(1)) < 1e-6
    pairs = torch.corrcoef(mask.T) - torch.eye(records)
    assert float(pairs.abs().max()) < 5 / times**0.5
    along = (mask[1:] * mask[:-1]).mean() - rate**2
    assert abs(float(along)) < 5 * rate / (times * records) ** 0.5


def test_small_rates_and_one_are_met():
    assert draws(20_000, 1e-4, 200).sum() == pytest.approx(400, abs=5 * 20)
    assert draws(7, 1.0, 3).all()


def test_the_length_counts_logical_batches():
    def length(**options):
        loader = DataLoader(TensorDataset(*toy_data(50)), batch_size=8)
        module = tiny()
        engine = PrivacyEngine(seed=0)
        _, _, made = engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
            data_loader=loader,
            noise_multiplier=1.0,
            clipping=1.0,
            **options,
        )
        return len(made), made.sample_rate, engine.ledger.header

    with pytest.warns(UserWarning, match="taken from the data") as caught:
        found, rate, header = length()
    assert (found, rate, len(caught)) == (7, 8 / 50, 1)
    assert header.num_examples_source == "taken from the data" and header.expected_batch_size == 8
    found, rate, header = length(num_examples=50, sample_rate=0.1)
    assert (found, rate, header.expected_batch_size, header.num_examples_source) == (10, 0.1, 5.0, "declared")
    assert length(num_examples=50, sample_rate=1 / 3)[0] == 3
    assert length(num_examples=50, physical_batch_size=2)[0] == 7
    with pytest.warns(UserWarning, match="80 was declared, but the dataset has 50"):
        assert length(num_examples=80)[1] == 0.1


class Records(Dataset):
    """Batches as nested dictionaries."""

    def __init__(self, size=24):
        self.x, self.y = toy_data(size)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"inputs": (self.x[i], {"again": self.x[i]}), "label": self.y[i], "name": f"record {i}", "age": 3.0}


def nested_loss(module, batch):
    return torch.nn.functional.cross_entropy(
        module(batch["inputs"][0] + 0 * batch["inputs"][1]["again"]), batch["label"]
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [None, 5])
def test_nested_batches_and_workers_give_the_same_training(workers, size):
    _, module, optimizer, loader = private(
        tiny(), Records(), physical_batch_size=size, loader_options={"num_workers": workers}
    )
    assert train(module, optimizer, loader, nested_loss, epochs=2) == 4
    _, twin, other, their = private(tiny(), toy_data())
    train(twin, other, their, epochs=2)
    torch.testing.assert_close(flat(module), flat(twin), rtol=1e-5, atol=1e-6)
    assert loader.num_workers == workers and isinstance(loader.dataset, Records)
    assert not isinstance(loader, DataLoader)


def test_empty_batches_of_any_shape_are_one_row_of_zeros():
    _, _, _, loader = private(tiny(), Records(), q=1e-9)
    batch = next(iter(loader))
    assert batch["inputs"][1]["again"].shape == (1, 6) and not batch["inputs"][0].any()
    assert batch["label"].tolist() == [0] and batch["label"].dtype == torch.long and batch["name"] == [""]
    custom = DataLoader(Records(), batch_size=4, collate_fn=lambda rows: torch.stack([r["inputs"][0] for r in rows]))
    module = tiny()
    _, _, loader = PrivacyEngine(seed=0).make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=custom,
        noise_multiplier=1.0,
        clipping=1.0,
        sample_rate=1e-9,
        num_examples=24,
    )
    assert next(iter(loader)).shape == (1, 6) and loader.collate_fn is custom.collate_fn


def test_the_model_never_sees_zero_rows():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            return self.fc(x.view(x.size(0), -1))  # crashes on a batch of no rows

    _, module, optimizer, loader = private(Views(), toy_data(8), q=0.02)
    assert train(module, optimizer, loader) == 50


def test_subsets_are_sampled_as_they_are():
    x, y = toy_data(30)
    x[:, 0] = torch.arange(30)
    subset = Subset(TensorDataset(x, y), list(range(10, 20)))
    _, _, _, loader = private(tiny(), subset, q=1.0)
    batch = next(iter(loader))
    assert batch[0][:, 0].tolist() == list(range(10, 20))


def test_a_batch_of_one_record_and_a_data_set_of_one():
    _, module, optimizer, loader = private(tiny(), toy_data(1), q=1.0)
    assert train(module, optimizer, loader, epochs=3) == 3


class Stream_(IterableDataset):
    def __iter__(self):
        yield from zip(*toy_data(8), strict=True)


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda d: DataLoader(d, batch_size=4, sampler=WeightedRandomSampler([1.0] * 24, 24)), "WeightedRandomSampler"),
        (lambda d: DataLoader(d, batch_size=4, sampler=SubsetRandomSampler(range(5))), "Subset"),
        (lambda d: DataLoader(d, batch_sampler=_Own(SequentialSampler(d), 4, False)), "batch sampler of its own"),
        (lambda d: DataLoader(Subset(d, [0, 0, 1, 2]), batch_size=4), "more than once"),
        (lambda d: DataLoader(Stream_(), batch_size=4), "IterableDataset"),
        (lambda d: DataLoader(d, batch_size=None), "batch_size=None"),
        (lambda d: [1, 2, 3], "torch DataLoader"),
    ],
    ids=["weighted", "subset", "batch-sampler", "repeated", "iterable", "no-batch-size", "list"],
)
def test_loaders_without_a_theorem_are_refused_with_the_reason(build, word):
    module = tiny()
    with pytest.raises((ValueError, TypeError), match=word):
        PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
            data_loader=build(TensorDataset(*toy_data())),
            noise_multiplier=1.0,
            clipping=1.0,
            num_examples=24,
        )


class _Own(BatchSampler):
    pass


def test_fixed_batches_are_refused():
    with pytest.raises(ValueError, match="Poisson"):
        private(tiny(), toy_data(), poisson_sampling=False)


def test_an_ordinary_loss_on_each_batch_is_all_that_is_needed():
    _, module, optimizer, loader = private(tiny(), toy_data(), sigma=0.2, clipping=1.0, lr=0.5, q=0.5)
    first = mean_loss(module, toy_data()).item()
    train(module, optimizer, loader, epochs=40)
    assert mean_loss(module, toy_data()).item() < 0.9 * first
