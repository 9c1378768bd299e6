"""Mistakes that no other test noticed when somebody made them on purpose (``tests/mutation``)."""

import platform
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import flat, private, tiny, toy_data, train

from zetaclip import randomness
from zetaclip.clipping import Affine, Extra, Flat
from zetaclip.methods import Method
from zetaclip.randomness import Stream


def test_an_empty_batch_adds_no_row_of_zeros():
    """The model sees one row of zeros, which has a gradient in its biases; without noise nothing
    may move.
    """
    _, module, optimizer, loader = private(tiny(), toy_data(), q=1e-9, sigma=0.0)
    before = flat(module)
    assert train(module, optimizer, loader, steps=1) == 1
    assert torch.equal(flat(module), before)


@dataclass(frozen=True)
class Column(Flat):
    """One more column for each record: a query of its own, or a part of the sum."""

    value: float = 0.5
    own: bool = True

    def extras(self, norms, clip):
        columns = torch.full((len(norms), 1), self.value, dtype=torch.float64)
        return {"column": Extra(columns, 0.5, 3.0) if self.own else Extra(columns)}


@pytest.mark.parametrize(("own", "fine", "wrong"), [(True, 0.5, 0.6), (False, 0.0, 0.1)])
def test_columns_beyond_their_bound_stop_the_run_before_anything_is_released(own, fine, wrong):
    # C is so small that every gradient has length C: there is no room for a column beside it.
    for value in (fine, wrong):
        method = Method("column", rule=Column(value=value, own=own))
        engine, module, optimizer, loader = private(
            tiny(), toy_data(), q=1.0, clipping=1e-3, method=method
        )
        if value == fine:
            train(module, optimizer, loader)
            continue
        with pytest.raises(RuntimeError, match="beyond the sensitivity"):
            train(module, optimizer, loader)
        assert len(engine.ledger) == 0


@dataclass(frozen=True)
class Magnified(Flat):
    """A map whose results may be too large for float32."""

    def init(self, numel):
        return {"scale": torch.full((numel,), 1e-38)}

    def update(self, released, state):
        return state

    def transform(self, state):
        return Affine(scale=state["scale"])


def test_a_record_that_a_map_makes_infinite_counts_as_zero():
    x, y = toy_data()
    weights = []
    for size in (1e4, 1e5):
        inputs = x.clone()
        inputs[3] *= size
        options = {"q": 1.0, "sigma": 0.0, "clipping": 0.2}
        method = Method("magnified", rule=Magnified())
        _, module, optimizer, loader = private(tiny(), (inputs, y), method=method, **options)
        train(module, optimizer, loader)
        weights.append(flat(module))
    assert torch.isfinite(weights[0]).all() and torch.equal(*weights)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_record_that_is_not_finite_counts_as_zero_under_a_map(bad):
    x, y = toy_data()
    options = {"q": 1.0, "sigma": 0.0, "clipping": 0.2, "num_examples": len(x)}
    inputs, left = x.clone(), torch.arange(len(x)) != 3
    inputs[3] = bad
    weights = []
    for data in ((inputs, y), (x[left], y[left])):
        method = Method("magnified", rule=Magnified())
        _, module, optimizer, loader = private(tiny(), data, method=method, **options)
        train(module, optimizer, loader)
        weights.append(flat(module))
    assert torch.isfinite(weights[0]).all()
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_a_streams_state_is_no_key_that_it_drew():
    stream = Stream.seeded(1, "noise")
    for _ in range(10):
        drawn = stream.draw()
        assert stream.state != drawn


@pytest.mark.skipif(randomness._compiled is None, reason="built without a C compiler")
def test_secrets_are_wiped_by_a_function_that_no_compiler_leaves_out():
    """A memset of memory that is not read again may be left out, and nothing else would tell."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("explicit_bzero is used with glibc only")
    assert b"explicit_bzero" in Path(randomness._compiled.__file__).read_bytes()
