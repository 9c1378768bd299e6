"""Eigenvalues against the SVD, on both routes, and what odd tensors give."""

import importlib
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from zetaclip.spectrum import as_matrix, eigenvalues

# the package exports the function under the name of its file, so the file is reached this way
code = importlib.import_module("zetaclip.spectrum.eigenvalues")


def by_svd(weight):
    return torch.linalg.svdvals(weight.double().flatten(1)).square()


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "shape", [(32, 512), (512, 32), (10, 10), (300, 700), (700, 300), (1, 50), (50, 1), (1, 1)]
)
def test_gram_route_equals_svd(shape):
    weight = gaussian(*shape)
    found = eigenvalues(weight)
    assert found.dtype == torch.float64 and found.shape == (min(shape),)
    torch.testing.assert_close(found, by_svd(weight), rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", [(70, 90), (90, 70), (2, 2)])
def test_the_layout_in_memory_does_not_matter(shape):
    weight = gaussian(*shape, seed=3).double()
    expected = by_svd(weight)
    for same in (
        weight,
        weight.T,
        weight.T.contiguous(),
        torch.stack([weight, 9 * weight], dim=2)[:, :, 0],
    ):
        kept = same.clone()
        torch.testing.assert_close(eigenvalues(same), expected, rtol=1e-9, atol=0)
        assert torch.equal(same, kept)  # LAPACK writes over what it is given


def test_torchs_number_of_threads_is_the_one_that_counts():
    """scipy's linear algebra has threads of its own, and the last digits depend on how many.
    Environment variables set them."""
    code = (
        "import torch; from zetaclip.spectrum import eigenvalues; torch.set_num_threads(1); g = "
        "torch.Generator().manual_seed(0); "
        "print([v.hex() for n in (256, 512) for v in eigenvalues(torch.randn(n, n, "
        "generator=g)).tolist()])"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    ]
    assert told[0] == told[1] and len(told[0]) > 10_000


def test_small_matrices_take_one_thread(monkeypatch):
    """Whatever torch has: beside a training on several, threads for so little work cost more than
    the work."""
    asked = []
    limit = code._blas().limit
    monkeypatch.setattr(
        code,
        "_blas",
        lambda: SimpleNamespace(limit=lambda limits: asked.append(limits) or limit(limits=limits)),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for shape in ((511, 600), (512, 600)):
            eigenvalues(gaussian(*shape))
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 2]


@pytest.mark.parametrize("routine", ["dsytrd", "dsterf"])
def test_svd_takes_over_where_lapack_gives_up(monkeypatch, routine):
    weight, real = gaussian(20, 30), getattr(code, routine)
    monkeypatch.setattr(code, routine, lambda *args, **options: (*real(*args, **options)[:-1], 3))
    torch.testing.assert_close(eigenvalues(weight), by_svd(weight), rtol=1e-12, atol=0)


def conditioned(smallest, count=200):
    """A matrix with known singular values: most near 1, the last four at ``smallest``."""
    left = torch.linalg.qr(gaussian(count, count, seed=1).double()).Q
    right = torch.linalg.qr(gaussian(count, count, seed=2).double()).Q
    values = torch.linspace(1.0, 0.5, count, dtype=torch.float64)
    values[-4:] = smallest * torch.tensor([4.0, 3.0, 2.0, 1.0])
    return left @ torch.diag(values) @ right.T, values.square()


def test_svd_takes_over_where_the_gram_matrix_loses_accuracy(monkeypatch):
    weight, truth = conditioned(smallest=3e-6)  # λ down to 9e-12, just above the floor
    torch.testing.assert_close(eigenvalues(weight), truth, rtol=1e-7, atol=0)
    # without the second route the small ones are wrong: the test sees the difference
    monkeypatch.setattr(code, "_GRAM_LIMIT", 0.0)
    assert ((eigenvalues(weight) - truth).abs() / truth).max() > 1e-6


def test_a_convolution_is_read_one_filter_per_row():
    kernel = gaussian(8, 3, 5, 5)
    torch.testing.assert_close(
        eigenvalues(kernel), by_svd(kernel.reshape(8, 75)), rtol=1e-9, atol=0
    )
    assert as_matrix(kernel).shape == (8, 75)


def test_half_precision_weights_are_read_in_double():
    weight = gaussian(20, 30).bfloat16()
    torch.testing.assert_close(eigenvalues(weight), by_svd(weight), rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", [1e-140, 1e-30, 1e30, 1e150])
def test_extreme_scales_neither_overflow_nor_vanish(scale):
    weight = gaussian(12, 20).double()
    expected = by_svd(weight) * scale * scale
    torch.testing.assert_close(eigenvalues(weight * scale), expected, rtol=1e-9, atol=0)


def test_degenerate_tensors():
    assert eigenvalues(torch.zeros(4, 7)).tolist() == [0.0] * 4
    assert eigenvalues(torch.empty(0, 7)).numel() == 0
    assert eigenvalues(torch.full((3, 3), math.nan)).isnan().all()
    poisoned = gaussian(5, 5)
    poisoned[2, 2] = math.inf
    assert eigenvalues(poisoned).isnan().all()
    with pytest.raises(ValueError, match="shape \\(7,\\)"):
        eigenvalues(torch.ones(7))


def test_the_weight_and_its_graph_are_left_alone():
    weight = torch.nn.Parameter(gaussian(6, 6))
    before = weight.detach().clone()
    assert not eigenvalues(weight).requires_grad
    assert torch.equal(weight, before)


@pytest.mark.parametrize("few", [1, 3])
def test_a_few_tiny_values_of_a_square_matrix_need_no_svd(few, monkeypatch):
    """A Gaussian matrix, with some singular values so small that its Gram matrix loses them."""
    left, values, right = torch.linalg.svd(gaussian(300, 300).double())
    values[-few:] = values[0] * 3e-6 * torch.arange(few, 0, -1)
    weight = left * values @ right
    truth = by_svd(weight)
    from_gram = code._from_gram(weight)
    assert ((from_gram - truth).abs() / truth).max() > 1e-7  # what is lost without care
    whole, asked = torch.linalg.svdvals, []
    monkeypatch.setattr(torch.linalg, "svdvals", lambda m: (asked.append(m.shape), whole(m))[1])
    torch.testing.assert_close(eigenvalues(weight), truth, rtol=1e-8, atol=0)
    assert all(shape[1] < 300 for shape in asked)
