"""Poisson batches: rates, independence, and every shape a batch can have."""

import random
import time
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from helpers import flat, mean_loss, private, tiny, toy_data, train
from scipy import stats
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from zetaclip import PrivacyEngine, PrivacyLeakWarning, check_parity
from zetaclip.engine._dataset_checks import _repeats, check_loader
from zetaclip.engine._records import zero_row
from zetaclip.randomness import Stream, poisson_indices


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
    assert (found, rate, header.expected_batch_size, header.num_examples_source) == (
        10,
        0.1,
        5.0,
        "declared",
    )
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
        return {
            "inputs": (self.x[i], {"again": self.x[i]}),
            "label": self.y[i],
            "name": f"record {i}",
            "age": 3.0,
        }


def nested_loss(module, batch):
    return torch.nn.functional.cross_entropy(
        module(batch["inputs"][0] + 0 * batch["inputs"][1]["again"]), batch["label"]
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
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
    assert (
        batch["label"].tolist() == [0]
        and batch["label"].dtype == torch.long
        and batch["name"] == [""]
    )
    custom = DataLoader(
        Records(), batch_size=4, collate_fn=lambda rows: torch.stack([r["inputs"][0] for r in rows])
    )
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
        (
            lambda d: DataLoader(d, batch_size=4, sampler=WeightedRandomSampler([1.0] * 24, 24)),
            "WeightedRandomSampler",
        ),
        (lambda d: DataLoader(d, batch_size=4, sampler=SubsetRandomSampler(range(5))), "Subset"),
        (
            lambda d: DataLoader(d, batch_sampler=_Own(SequentialSampler(d), 4, False)),
            "batch sampler of its own",
        ),
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
    _, module, optimizer, loader = private(
        tiny(), toy_data(), sigma=0.2, clipping=1.0, lr=0.5, q=0.5
    )
    first = mean_loss(module, toy_data()).item()
    train(module, optimizer, loader, epochs=40)
    assert mean_loss(module, toy_data()).item() < 0.9 * first


# -- the same record twice


BASE = TensorDataset(*toy_data(10))
OTHER = TensorDataset(*toy_data(10, inputs=5))


class Files(Dataset):
    """Records by name, and no length."""

    def __getitem__(self, name):
        return torch.zeros(6), 0


NAMED = Files()


@pytest.mark.parametrize(
    "data",
    [
        Subset(BASE, [0, 0, 1]),
        Subset(BASE, torch.tensor([0, 1, 1])),
        Subset(BASE, [9, -1]),
        Subset(Subset(BASE, [0, 0, 1]), range(3)),
        ConcatDataset([BASE, BASE]),
        ConcatDataset([BASE, OTHER, Subset(BASE, [3])]),
        ConcatDataset([Subset(BASE, [1, 2]), ConcatDataset([OTHER, Subset(BASE, [2, 3])])]),
        Subset(ConcatDataset([BASE, BASE]), [4, 14]),
        Subset(ConcatDataset([BASE, OTHER]), [-1, 19]),
        ConcatDataset([BASE, TensorDataset(*BASE.tensors)]),
        ConcatDataset([Subset(NAMED, ["a", "b"]), Subset(NAMED, ["b", "c"])]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_a_record_that_is_in_the_data_twice_is_refused_however_it_got_there(data):
    with pytest.raises(ValueError, match="more than once"):
        check_loader(DataLoader(data, batch_size=2))


@pytest.mark.parametrize(
    "data",
    [
        Subset(Subset(BASE, [5, 0, 1]), [2, 1]),
        Subset(BASE, [0, -1]),
        ConcatDataset([BASE, OTHER]),
        ConcatDataset([Subset(BASE, [1, 2]), Subset(BASE, [3]), Subset(BASE, [])]),
        Subset(ConcatDataset([BASE, BASE]), [4, 15]),
        Subset(Subset(BASE, [0, 0, 1]), [1, 2]),
        ConcatDataset([Subset(NAMED, ["a", "b"]), Subset(NAMED, ["c", "d"])]),
        Subset(NAMED, [(0, 1), (0, 2), (1, 0)]),
        Subset(NAMED, ["1", "01", "001"]),
        Subset(BASE, np.argwhere(np.arange(10) > 6)),
    ],
    ids=lambda data: type(data).__name__,
)
def test_parts_that_do_not_overlap_are_taken(data):
    check_loader(DataLoader(data, batch_size=2))


@pytest.mark.parametrize(
    "data",
    [
        Subset(NAMED, ["1", "01", *"abcdefgh"]),
        Subset(NAMED, [(i // 5, i % 5) for i in range(10)]),
        Subset(BASE, range(-10, 0)),
    ],
    ids=["names", "tuples", "from the end"],
)
def test_a_subset_trains_and_is_saved_by_whatever_keys_its_data_take(data, tmp_path):
    engine, module, optimizer, loader = private(tiny(), data)
    train(module, optimizer, loader)
    engine.save(tmp_path / "run.pt")
    engine.load(tmp_path / "run.pt", replay=True)


def test_a_million_records_are_looked_at_in_no_time():
    size = 1_000_000
    base = TensorDataset(torch.zeros(size, 1))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    data = ConcatDataset(
        [Subset(base, order[: size // 2]), Subset(Subset(base, order), range(size // 2, size))]
    )
    start = time.process_time()
    assert not _repeats(data)
    assert time.process_time() - start < 3.0


# -- padding to the longest record of a batch


class Texts(Dataset):
    def __init__(self, lengths):
        generator = torch.Generator().manual_seed(3)
        self.rows = [
            (torch.randint(1, 50, (n,), generator=generator), i % 2) for i, n in enumerate(lengths)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def to_longest(rows):
    return pad_sequence([ids for ids, _ in rows], batch_first=True), torch.tensor(
        [label for _, label in rows]
    )


def to_forty(rows):
    x, y = to_longest(rows)
    return nn.functional.pad(x, (0, 40 - x.shape[1])), y


class Bag(nn.Module):
    masked = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.out = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 2)

    def forward(self, x):
        found = self.embed(x)
        return self.out(
            found.sum(1) / (x != 0).sum(1, keepdim=True) if self.masked else found.mean(1)
        )


class Masked(Bag):
    masked = True


class Conv(Bag):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x):
        return self.out(torch.relu(self.conv(self.embed(x).transpose(1, 2))).mean(2))


class Gru(Bag):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(16, 16, batch_first=True)

    def forward(self, x):
        return self.out(self.gru(self.embed(x))[0][:, -1])


SHORT, MIXED = [5] * 12, [5] * 11 + [40]


def leaks(data, collate, **options):
    """Warnings of a leak in two epochs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, module, optimizer, loader = private(
            Bag(),
            data,
            q=0.5,
            seed=1,
            loader_options={"collate_fn": collate, **options.pop("loader_options", {})},
            **options,
        )
        train(module, optimizer, loader, epochs=2)
    return [w for w in caught if w.category is PrivacyLeakWarning]


@pytest.mark.parametrize(
    "options", [{}, {"physical_batch_size": 2}, {"loader_options": {"num_workers": 1}}], ids=str
)
def test_padding_to_the_longest_of_a_batch_is_noticed_once(options):
    (warning,) = leaks(Texts(MIXED), to_longest, **options)
    assert "public length" in str(warning.message) and warning.filename.endswith("helpers.py")
    assert leaks(Texts(MIXED), to_forty) == leaks(Texts(SHORT), to_longest) == []


def test_padding_is_noticed_where_there_is_one_batch_of_everything():
    _, _, _, loader = private(Bag(), Texts(MIXED), q=1.0, loader_options={"collate_fn": to_longest})
    with pytest.warns(PrivacyLeakWarning, match="padded to its longest"):
        next(iter(loader))


def test_padding_is_noticed_in_any_shape_of_batch():
    class Encoding(UserDict):  # as transformers' BatchEncoding
        pass

    def opaque(rows):
        x, y = to_longest(rows)
        return Encoding(ids=x, labels=y)

    def time_first(rows):
        x, y = to_longest(rows)
        return x.T, y

    for collate in (opaque, time_first):
        _, _, _, loader = private(
            Bag(), Texts(MIXED), q=1.0, loader_options={"collate_fn": collate}
        )
        with pytest.warns(PrivacyLeakWarning):
            next(iter(loader))


def test_a_collate_fn_that_needs_several_records_still_works():
    def pairs(rows):
        assert len(rows) > 1
        return to_longest(rows)

    _, _, _, loader = private(Bag(), Texts(SHORT), q=1.0, loader_options={"collate_fn": pairs})
    assert next(iter(loader))[0].shape == (12, 5)


def test_looking_at_a_record_moves_no_public_stream():
    class Augmented(Texts):
        def __getitem__(self, i):
            random.random(), np.random.rand(), torch.rand(1)
            return super().__getitem__(i)

    def standing():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = standing()
    zero_row(DataLoader(Augmented(SHORT), collate_fn=to_longest))
    assert standing() == before


class OpenedOnFirstUse(Texts):
    """As one opens a file of records in each worker: not picklable once it is open."""

    file = None

    def __getitem__(self, i):
        if self.file is None:
            self.file = open(__file__, "rb")  # noqa: SIM115
        return super().__getitem__(i)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_with_workers_no_record_is_read_in_the_process_that_trains(context):
    data = OpenedOnFirstUse(MIXED)
    options = {"num_workers": 1, "multiprocessing_context": context}
    assert (
        len(leaks(data, to_longest, loader_options=options)) == 1
    )  # in two epochs, each with workers of its own
    assert data.file is None


@pytest.mark.parametrize(
    ("kind", "fine"), [(Bag, False), (Conv, False), (Gru, False), (Masked, True)]
)
def test_parity_of_raw_records_sees_padding(kind, fine):
    records = Texts(MIXED).rows
    assert check_parity(
        kind(), to_longest(records), mean_loss
    ).ok  # collated already: nothing to be seen
    assert check_parity(kind(), records, mean_loss, collate_fn=to_forty).ok
    found = check_parity(kind(), records, mean_loss, collate_fn=to_longest)
    assert found.ok == fine and ("public length" in found.note) == (not fine)
    engine, *_ = private(kind(), Texts(MIXED), loader_options={"collate_fn": to_longest})
    problems = engine.validate(records, mean_loss, collate_fn=to_longest)
    assert bool(problems) == (not fine) and all("public length" in problem for problem in problems)
    assert engine.validate(records, mean_loss, collate_fn=to_forty) == []
