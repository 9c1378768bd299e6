"""Signal beyond the edge of known noise: on planted matrices, and on what Auto moved."""

import math

import pytest
import torch
from torch import nn

from zetaclip import optim
from zetaclip.spectrum import noise_edge, outliers


def noise(rows, columns, std, seed):
    generator = torch.Generator().manual_seed(seed)
    return std * torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def planted(rows, columns, values, std, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    left = torch.linalg.qr(torch.randn(rows, len(values), generator=generator).double()).Q
    right = torch.linalg.qr(torch.randn(columns, len(values), generator=generator).double()).Q
    signal = left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.T
    return signal + noise(rows, columns, std, seed)


@pytest.mark.parametrize("shape", [(10, 300), (64, 64), (300, 10)])
def test_pure_noise_has_hardly_any(shape):
    found = [outliers(noise(*shape, 0.3, seed), 0.3).count for seed in range(100)]
    assert sum(found) <= 2
    # Noise that is 15 % larger than said is found out.
    assert sum(outliers(noise(*shape, 0.345, seed), 0.3).count > 0 for seed in range(100)) > 50


def test_planted_directions_are_counted_and_measured():
    std, shape = 0.1, (40, 200)
    edge = noise_edge(shape, std)
    values = [4 * edge, 3 * edge, 2 * edge]
    for seed in range(10):
        found = outliers(planted(*shape, values, std, seed), std)
        assert found.count == 3 and found.of == 40 and found.edge == pytest.approx(edge)
        assert found.signal == pytest.approx(values, rel=0.1)
        assert 0.5 < found.energy < 1
    # The raw singular value of the weakest is too large; what noise added was taken off.
    raw = torch.linalg.svdvals(planted(*shape, values, std, 0))[2]
    assert float(raw) > 1.05 * values[2]


def test_a_signal_below_the_threshold_is_not_claimed():
    """Below std (mn)^(1/4) a planted direction can't be seen by anybody."""
    std, rows, columns = 0.1, 40, 200
    hidden = 0.5 * std * (rows * columns) ** 0.25
    assert (
        sum(outliers(planted(rows, columns, [hidden], std, s), std).count for s in range(30)) <= 1
    )


def test_kernels_are_flattened_and_nonsense_is_refused():
    kernel = noise(8, 4 * 3 * 3, 1.0, 0).view(8, 4, 3, 3)
    assert outliers(kernel, 1.0).of == 8
    assert outliers(torch.eye(3), 0.0).count == 3
    with pytest.raises(ValueError, match="noise_std"):
        outliers(torch.eye(3), -1.0)
    with pytest.raises(ValueError, match="not finite"):
        outliers(torch.tensor([[math.nan, 1.0], [1.0, 1.0]]), 1.0)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.05)])
def test_auto_knows_the_noise_that_it_moved_by(momentum, decay):
    """Pure noise through the optimizer: the spread of what it moved is what it says."""
    head = nn.Linear(400, 50, bias=False)
    optimizer = optim.Auto(head.parameters(), steps=40, momentum=momentum, weight_decay=decay)
    start = head.weight.detach().clone()
    torch.manual_seed(3)
    for _ in range(40):
        head.weight.grad = 0.2 * torch.randn_like(head.weight)
        optimizer.set_noise_std(0.2)
        optimizer.step()
    moved, std = optimizer.moved(head.weight)
    torch.testing.assert_close(moved, head.weight.detach() - start)
    if not decay:  # decay moves the start as well
        assert float(moved.std()) == pytest.approx(std, rel=0.03)
        assert outliers(moved, std).count == 0
        # A walk that ignored the momentum's delay, or the fall of the rate, would be far off.
        assert float(moved.std()) != pytest.approx(2 * std, rel=0.3)
    assert std > 0
