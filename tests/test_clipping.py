"""Clip rules: the bound that each of them promises, for any norm."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zetaclip import Flat
from zetaclip.clipping import AutoS, Counted, Psac, Slack, Thinned, Whitened
from zetaclip.clipping._base import check_factors
from zetaclip.gradients.reduce import TOO_LONG
from zetaclip.mechanism import Coins

RULES = [
    Flat(),
    AutoS(),
    Psac(),
    Psac(0.01),
    Thinned(),
    Counted(),
    Counted(2.5, True),
    Slack(),
    Slack(1),
    Whitened(),
]
norms = st.lists(
    st.one_of(
        # Longer gradients count as not finite and never reach a rule (tests/test_neighbours.py).
        st.floats(min_value=0, max_value=TOO_LONG),
        st.sampled_from([0.0, 5e-324, 1e-300, 1e-30, 1.0, 1e30, 3.4e38, TOO_LONG]),
    ),
    min_size=1,
    max_size=8,
)
clips = st.floats(min_value=1e-12, max_value=1e12)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=300, deadline=None)
@given(values=norms, clip=clips)
def test_factor_times_norm_stays_within_the_sensitivity(rule, values, clip):
    lengths = torch.tensor(values, dtype=torch.float64)
    factors = rule.factors(lengths, clip, Coins(bytes(32)))
    assert factors.shape == lengths.shape and torch.isfinite(factors).all() and (factors >= 0).all()
    moved = factors * lengths
    if hasattr(rule, "extras"):
        for extra in rule.extras(lengths, clip).values():
            size = extra.columns.norm(dim=1)
            if extra.sensitivity is None:
                moved = torch.hypot(moved, size)
            else:
                assert (size <= extra.sensitivity).all()
    assert (moved <= rule.sensitivity(clip) * (1 + 1e-12)).all()


@settings(max_examples=200, deadline=None)
@given(values=norms, clip=clips)
def test_flat_clipping_is_the_identity_below_c(values, clip):
    lengths = torch.tensor(values, dtype=torch.float64)
    factors = Flat().factors(lengths, clip, None)
    assert (factors[lengths <= clip] == 1).all()
    torch.testing.assert_close(
        (factors * lengths)[lengths > clip],
        torch.full_like(lengths, clip)[lengths > clip],
        rtol=1e-12,
        atol=0,
    )


@pytest.mark.parametrize("factor", [1.001, -1.001, -100.0, float("nan"), float("inf")])
def test_a_rule_that_breaks_its_word_is_stopped(factor):
    ones = torch.ones(3, dtype=torch.float64)
    check_factors(ones, ones, None, 1.0, "good")
    with pytest.raises(RuntimeError, match="nothing was released"):
        check_factors(ones, torch.tensor([1.0, factor, 1.0], dtype=torch.float64), None, 1.0, "bad")


def test_joint_columns_count_towards_the_bound():
    norm = torch.tensor([0.8], dtype=torch.float64)
    check_factors(
        norm, torch.ones_like(norm), torch.tensor([[0.6]], dtype=torch.float64), 1.0, "joint"
    )
    with pytest.raises(RuntimeError, match="sensitivity"):
        check_factors(
            norm, torch.ones_like(norm), torch.tensor([[0.61]], dtype=torch.float64), 1.0, "joint"
        )
