"""Dropout and augmentation follow a secret key of the batch: nobody knows the masks, and the public
streams tell nothing."""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from zetaclip import PrivacyEngine
from zetaclip.randomness import generator
from zetaclip.randomness._forward import ForwardRng, drawing_from

CPU = torch.device("cpu")


class Noisy(nn.Module):
    """Shows what forward draws."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.drawn = []

    def forward(self, x):
        self.drawn.append(torch.rand(len(x)))
        return self.inner(x) * self.drawn[-1].unsqueeze(1)


def records(count=60):
    source = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 4, generator=source), torch.randint(0, 2, (count,), generator=source)
    )


def train(seed, data=None, steps=4, torch_seed=3, workers=0, look=lambda engine: None, **options):
    """What forward has drawn in each step."""
    module = Noisy()
    engine = PrivacyEngine(seed=seed)
    options = {
        "noise_multiplier": 1.0,
        "clipping": 1.0,
        "sample_rate": 0.25,
        "num_examples": 60,
        **options,
    }
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    loader = DataLoader(data or records(), batch_size=15, num_workers=workers)
    model, optimizer, loader = engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader, **options
    )
    torch.manual_seed(torch_seed)
    while engine.updates < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            look(engine)
            if engine.updates == steps:
                break
    engine.detach()
    return module.drawn


def test_torchs_public_seed_says_nothing_about_masks():
    """With fresh keys the same torch seed gives other masks; with the engine's seed, for tests, the
    same ones whatever torch's is."""
    one, other = train(None, sample_rate=1.0), train(None, sample_rate=1.0)
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    one, other = train(7), train(7, torch_seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len({float(values[0]) for values in one}) == len(one)  # other masks in every batch


def test_the_public_stream_does_not_tell_how_many_records_were_drawn(tmp_path):
    states = []

    def look(engine):
        engine.save(tmp_path / "run.pt")
        states.append(
            torch.load(tmp_path / "run.pt", weights_only=True)["public_streams"][0]["cpu"]
        )

    drawn = train(7, steps=6, look=look)
    assert len({len(values) for values in drawn}) > 1, "batches of several sizes"
    assert all(torch.equal(state, states[0]) for state in states)
    assert torch.equal(states[0], torch.Generator().manual_seed(3).get_state())


def test_a_mask_that_everybody_can_draw_moves_the_sum_by_more_than_its_sensitivity():
    """Why masks are secret: with a public one, a record less shifts the masks of all rows after it.
    The sum's sensitivity is 1."""

    def released(rows, public):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
        engine = PrivacyEngine(seed=7)  # the same noise in both, so that only the sums differ
        model, optimizer, loader = engine.make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), 0.1),
            data_loader=DataLoader(rows, batch_size=60), noise_multiplier=1.0,
            clipping=1.0, sample_rate=1.0, num_examples=60,
        )  # fmt: skip
        for x, y in loader:
            if public:
                torch.manual_seed(1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        engine.detach()
        return 60 * torch.cat([parameter.grad.flatten() for parameter in module.parameters()])

    whole = records()
    without = TensorDataset(*(tensor[1:] for tensor in whole.tensors))
    assert (released(whole, True) - released(without, True)).norm() > 2.0


def test_the_chunks_and_passes_of_a_batch_draw_different_masks():
    from zetaclip import methods

    chunks = train(7, steps=1, sample_rate=1.0, physical_batch_size=20)
    assert len(chunks) == 3 and not torch.equal(chunks[0], chunks[1])
    sam = methods.get("dp-sam", ascent_batch="same")
    passes = train(
        7, steps=1, sample_rate=1.0, method=sam, clipping=None, epochs=1, target_delta=1e-5
    )
    assert len(passes) == 2 and not torch.equal(*passes)


def test_two_engines_at_once_give_the_users_stream_back_and_publish_none_of_theirs(tmp_path):
    """The first to take a batch need not be the first to step: what it finds on its way back may be
    the other's secret."""
    made = []
    for seed in (1, 2):
        module = Noisy()
        engine = PrivacyEngine(seed=seed)
        options = {
            "noise_multiplier": 1.0,
            "clipping": 1.0,
            "sample_rate": 0.25,
            "num_examples": 60,
        }
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        loader = DataLoader(records(), batch_size=15)
        made.append(
            (
                engine,
                *engine.make_private(
                    module=module, optimizer=optimizer, data_loader=loader, **options
                ),
            )
        )
    torch.manual_seed(3)
    own = torch.get_rng_state()
    iterators = [iter(loader) for *_, loader in made]
    for _ in range(2):
        batches = [next(iterator) for iterator in iterators]
        for (engine, module, optimizer, _), (x, y) in zip(made, batches, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()  # the first one, while the second has a batch out
            engine.save(tmp_path / "run.pt")
            saved = torch.load(tmp_path / "run.pt", weights_only=True)["public_streams"][0]["cpu"]
            assert torch.equal(saved, own)
        assert torch.equal(torch.get_rng_state(), own)
    for engine, *_ in made:
        engine.detach()


def test_an_engine_that_was_left_with_a_batch_out_holds_nothing_up():
    left, tape, key = ForwardRng(CPU), ForwardRng(CPU), b"k" * 32
    left.lend(b"l" * 32)  # and nobody ever steps
    torch.manual_seed(11)
    own = torch.get_rng_state()
    tape.lend(key)
    torch.rand(2)
    tape.take_back()
    assert torch.equal(torch.get_rng_state(), own)
    left.take_back()
    assert torch.equal(torch.get_rng_state(), own)


def test_a_device_whose_masks_can_not_be_made_secret_is_refused():
    with pytest.raises(ValueError, match="not secret"):
        ForwardRng(torch.device("xpu"))


def test_the_users_stream_comes_back_and_a_seed_that_is_set_meanwhile_stays():
    tape, key = ForwardRng(CPU), b"k" * 32
    torch.manual_seed(11)
    wanted = torch.rand(3)
    torch.manual_seed(11)
    tape.lend(key)
    secret = torch.rand(3)
    assert torch.equal(secret, torch.rand(3, generator=generator(key))) and not torch.equal(
        secret, wanted
    )
    tape.take_back()
    tape.take_back()  # once is enough
    assert torch.equal(torch.rand(3), wanted)
    tape.lend(key)
    torch.manual_seed(0)
    seeded = torch.get_rng_state()
    tape.take_back()
    assert torch.equal(torch.get_rng_state(), seeded)


def test_a_batch_that_is_only_looked_at_gives_the_stream_back_with_the_next():
    module = Noisy()
    engine = PrivacyEngine(seed=1)
    _, _, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), 0.1),
        data_loader=DataLoader(records(), batch_size=15), noise_multiplier=1.0,
        clipping=1.0, num_examples=60,
    )  # fmt: skip
    torch.manual_seed(5)
    before = torch.get_rng_state()
    next(iter(loader))
    next(iter(loader))
    engine.detach()
    assert torch.equal(torch.get_rng_state(), before)


class Augmented(Dataset):
    """Every record shows what torch, numpy and Python draw while it is read."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), np.random.rand(), random.random(), 1.0]), index % 2


def seen(seed, workers):
    """What was drawn for the records of each batch, from public seeds that are the same every
    time."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    module, found = nn.Linear(4, 2), []
    engine = PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), 0.1),
        data_loader=DataLoader(Augmented(), batch_size=30, num_workers=workers),
        noise_multiplier=1.0, clipping=1.0, sample_rate=0.5, num_examples=60,
    )  # fmt: skip
    for x, y in loader:
        found.append(x.clone())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.detach()
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_is_as_secret_as_the_batches(workers):
    one, other, again = seen(None, workers), seen(None, workers), seen(8, workers)
    for column in range(3):
        drawn = [float(batch[0, column]) for batch in one + other]
        assert len(set(drawn)) == len(drawn), "public seeds decide nothing"
    assert all(torch.equal(a, b) for a, b in zip(again, seen(8, workers), strict=True)), (
        "the engine's seed decides all"
    )


def test_what_is_drawn_for_a_record_moves_no_public_stream():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with suppress(KeyError), drawing_from(b"k" * 32):
        torch.rand(3), np.random.rand(3), random.random()
        raise KeyError
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
