"""Memory of batches is used again, and never while somebody holds the batch."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import PrivacyEngine
from zetaclip.engine._batch_memory import BatchMemory

WIDE = 1 << 18  # floats of a record: each batch below is larger than what is not worth it


def rows(*chosen):
    return torch.tensor(chosen, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_it_gathers_what_index_select_gathers(dtype):
    data = torch.randn(6, 3, WIDE).mul(5).to(dtype)
    memory = BatchMemory()
    for source in (data, data.transpose(0, 1), data[:, :, ::2]):
        for chosen in (rows(2, 0, 1), rows(1), rows()):
            found = memory.select(source, chosen)
            assert torch.equal(found, source.index_select(0, chosen))
            assert found.dtype == dtype and found.is_contiguous() and not found._is_view()


def test_a_loop_that_keeps_one_batch_needs_two_pieces():
    data, memory, addresses = torch.randn(4, WIDE), BatchMemory(), []
    for size in (3, 3, 2, 3, 1, 3):
        batch = memory.select(data, torch.arange(size))
        addresses.append(batch.data_ptr())
    assert addresses[0::2] == addresses[0:1] * 3 and addresses[1::2] == addresses[1:2] * 3


HOLDERS = {
    "the batch": lambda batch: batch,
    "a view": lambda batch: batch[1:, ::3],
    "a numpy array": lambda batch: batch.numpy()[:1],
    "an alias": lambda batch: batch.detach(),
    "a graph": lambda batch: (batch * torch.ones(WIDE, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_keeps_its_numbers(holder):
    data, memory = torch.randn(8, WIDE), BatchMemory()
    held = []
    for i in range(0, 8, 2):
        batch = memory.select(data, rows(i, i + 1))
        held.append(HOLDERS[holder](batch))
        del batch
    for i, kept in zip(range(0, 8, 2), held, strict=True):
        expected = HOLDERS[holder](data[i : i + 2])
        if holder == "a graph":
            node = kept.grad_fn.next_functions[0][0]  # of the product: it saved the batch
            assert torch.equal(node._saved_self, data[i : i + 2])
        else:
            assert np.array_equal(np.asarray(kept), np.asarray(expected))


@pytest.mark.parametrize("shared", [False, True])
def test_a_storage_that_is_held_or_shared_is_not_used_again(shared):
    data, memory = torch.randn(8, WIDE), BatchMemory()
    batch = memory.select(data, rows(0, 1))
    storage = batch.untyped_storage()
    address = storage.data_ptr()
    if shared:  # another process may hold it
        storage.share_memory_()
        address = storage.data_ptr()
        del storage
    del batch
    again = [memory.select(data, rows(i, i + 1)) for i in (2, 4)]
    assert address not in [batch.data_ptr() for batch in again]
    if not shared:
        found = torch.empty(0).set_(storage)[: 2 * WIDE].view(2, WIDE)
        assert torch.equal(found, data[:2])


def test_batches_of_the_private_loader_can_be_kept():
    torch.manual_seed(0)
    x, y = torch.randn(12, WIDE), torch.arange(12)
    network = nn.Linear(WIDE, 12)
    network, optimizer, loader = PrivacyEngine(accountant="rdp", seed=0).make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
        noise_multiplier=1.0,
        clipping=1.0,
        sample_rate=0.5,
        num_examples=12,
    )
    kept = []
    for _ in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs), labels).backward()
            optimizer.step()
            kept.append((inputs, labels))
    assert len(kept) == 6
    for inputs, labels in kept:
        assert torch.equal(inputs, x[labels])
