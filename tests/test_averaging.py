"""The moving average of the weights, against the recursion written out."""

import pytest
import torch
from torch import nn

from zetaclip.averaging import WeightAverage


def test_it_is_the_recursion_and_the_module_comes_back_bit_for_bit():
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    average = WeightAverage(module, 0.8)
    expected = module.weight.detach().double().clone()
    for update in range(20):
        with torch.no_grad():
            module.weight.add_(torch.randn(2, 3))
        average.update()
        decay = min(0.8, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * module.weight.detach().double()
    own = module.weight.detach().clone()
    with average.applied() as averaged:
        assert torch.allclose(averaged.weight.double(), expected, rtol=1e-5)
    assert torch.equal(module.weight, own)


def test_its_state_goes_on_where_it_was():
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    average = WeightAverage(module, 0.5)
    average.update()
    other = WeightAverage(nn.Linear(3, 2), 0.5)
    other.load_state_dict(average.state_dict())
    assert other.updates == 1 and torch.equal(other._average["weight"], average._average["weight"])
    with pytest.raises(ValueError, match="another model"):
        WeightAverage(nn.Linear(3, 2, bias=False), 0.5).load_state_dict(average.state_dict())


def test_a_decay_of_one_would_never_move():
    with pytest.raises(ValueError, match="between 0 and 1"):
        WeightAverage(nn.Linear(1, 1), 1.0)
