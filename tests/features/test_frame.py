"""The standard frame: where the ink goes, and what does not matter any more."""

import pytest
import torch
from torch.nn import functional as F

from zetaclip.features._frame import framed
from zetaclip.features._synthetic import pictures


def glyphs(count=40, height=28, width=28):
    return pictures("glyphs", count, (1, height, width)).float()


def moments(x):
    """Middle (down, across), covariance of where the ink is, in half sides; by torch.cov."""
    height, width = x.shape[1:]
    v, u = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    at = torch.stack(((2 * v + 1) / height - 1, (2 * u + 1) / width - 1)).flatten(1).double()
    ink = (x[0].double() + 1).flatten()
    return (at * ink).sum(1) / ink.sum(), at.cov(correction=0, aweights=ink)


def moved(x, slant=0.0, zoom=1.0, shift=0.0):
    """Sheared, shrunk by ``zoom`` and shifted."""
    matrix = torch.tensor([[zoom, slant, shift], [0.0, zoom, shift]])
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


@pytest.mark.parametrize("size", [(28, 28), (28, 40)])
def test_ink_is_in_the_middle_upright_and_nearer_to_the_standard_size(size):
    # Shrunk first, so that nothing leaves the picture.
    before = moved(glyphs(40, *size), slant=0.3, zoom=1.3, shift=0.1)
    for old, new in zip(before, framed(before), strict=True):
        (_, covariance), (middle, found) = moments(old), moments(new)
        assert middle.abs().max() < 0.05
        slant = covariance[0, 1] / covariance[0, 0]
        if slant.abs() < 1 and found[1, 1] > 0.02:  # steeper ones are not set upright
            assert (found[0, 1] / found[0, 0]).abs() < 0.1
        tall, wanted = covariance[0, 0].sqrt(), found[0, 0].sqrt()
        torch.testing.assert_close(tall / ((tall + 0.05) / 0.42).sqrt(), wanted, rtol=0.1, atol=0)


def test_slant_place_and_size_matter_less_than_before():
    x = glyphs()
    other = moved(x, slant=0.25, zoom=1.15, shift=0.08)

    def apart(a, b):
        return (a - b).square().mean((1, 2, 3)).sqrt().median()

    assert apart(framed(x), framed(other)) < 0.5 * apart(x, other)


def test_dark_on_white_is_framed_like_white_on_dark():
    x = glyphs()
    assert torch.equal(framed(-x), -framed(x))


def test_mirror_images_and_single_pictures():
    x = glyphs()
    torch.testing.assert_close(framed(x.flip(3)), framed(x).flip(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(framed(x[3:4]), framed(x)[3:4], rtol=0, atol=1e-4)


def test_flat_and_noisy_pictures_stay_in_range():
    flat = torch.full((2, 1, 28, 20), 0.3)
    torch.testing.assert_close(framed(flat), flat)
    noise = torch.rand(20, 1, 28, 20, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = framed(noise)
    assert found.isfinite().all() and found.abs().max() <= 1


@pytest.mark.filterwarnings("ignore")  # of the exporter itself
def test_it_can_be_exported_to_onnx(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Framed(torch.nn.Module):
        def forward(self, x):
            return framed(x)

    x, rows = glyphs(9), torch.export.Dim("rows")
    torch.onnx.export(
        Framed().eval(), (x[:2],), tmp_path / "m.onnx", dynamo=True, dynamic_shapes=({0: rows},),
        input_names=["x"], verbose=False,
    )  # fmt: skip
    (found,) = runtime.InferenceSession(str(tmp_path / "m.onnx")).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), framed(x), rtol=0, atol=1e-4)
