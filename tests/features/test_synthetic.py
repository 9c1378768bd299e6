"""Public random numbers and the pictures made from them."""

import pytest
import torch

from zetaclip.features._draws import Draws
from zetaclip.features._synthetic import KINDS, pictures


def test_streams_with_equal_labels_are_equal_and_others_are_not():
    first, again, other = Draws("a", 1), Draws("a", 1), Draws("a", 2)
    one = first.uniform(100)
    assert torch.equal(one, again.uniform(100))
    assert not torch.equal(one, other.uniform(100))
    assert not torch.equal(one, first.uniform(100))


def test_the_stream_is_that_of_numpys_philox_words():
    """The values that a wheel of another year must give, too: numpy promises the raw words."""
    import hashlib

    import numpy as np

    key = np.frombuffer(hashlib.sha256(b"('fixed',)").digest()[:16], "<u8")
    words = np.random.Philox(key=key).random_raw(3)
    assert Draws("fixed").uniform(3).tolist() == [int(word >> 11) / 2**53 for word in words]


def test_the_numbers_have_their_distributions():
    draws = Draws("distribution")
    uniform, normal = draws.uniform(20_000), draws.normal(20_000)
    assert uniform.min() >= 0 and uniform.max() < 1
    # Standard errors of the means: 0.002 and 0.007.
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.003
    assert abs(normal.mean()) < 0.035 and abs(normal.std() - 1) < 0.025
    whole = draws.whole(6000, low=2, high=5)
    assert whole.unique().tolist() == [2, 3, 4]
    assert whole.bincount()[2:].min() > 1800
    assert draws.order(50).sort().values.tolist() == list(range(50))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 20, 13)])
def test_pictures_are_repeatable_different_and_in_range(kind, shape):
    found = pictures(kind, 70, shape)  # more than one part
    assert found.shape == (70, *shape) and found.dtype == torch.float64
    assert found.min() >= -1 and found.max() <= 1 and found.isfinite().all()
    assert torch.equal(found, pictures(kind, 70, shape))
    assert not torch.equal(found, pictures(kind, 70, shape, seed=1))
    assert len(torch.unique(found.flatten(1), dim=0)) > 60
    assert (found.flatten(1).std(1) > 0.05).double().mean() > 0.7  # they are not empty


def test_strokes_lie_on_black_and_leaves_cover_all():
    strokes, dense = pictures("strokes", 64, (1, 28, 28)), pictures("dense", 64, (3, 28, 28))
    assert (strokes == -1).double().mean() > 0.5 and (strokes == 1).double().mean() > 0.01
    assert (dense == -1).double().mean() < 0.05


def test_glyphs_hang_together_more_often_than_strokes():
    """Counted by scipy: pieces of ink; and they leave the edge empty."""
    from scipy.ndimage import label

    def pieces(kind):
        found = pictures(kind, 200, (1, 28, 28))[:, 0]
        return [label(one > 0, structure=[[1] * 3] * 3)[1] for one in found.numpy()]

    glyphs, strokes = pieces("glyphs"), pieces("strokes")
    assert min(glyphs) >= 1 and sum(n == 1 for n in glyphs) > 0.7 * 200
    assert sum(glyphs) < sum(strokes)
    drawn = pictures("glyphs", 200, (1, 28, 28))
    assert (drawn[..., 0] == -1).all() and (drawn[:, :, 0] == -1).all()
