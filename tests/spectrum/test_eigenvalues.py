"""Eigenvalues and their tails against the SVD, and what odd tensors give."""

import importlib
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from zetaclip.spectrum import as_matrix, eigenvalues, fit_tail

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


def ill_conditioned(name):
    """Square matrices whose Gram matrix loses digits of the smallest singular values."""
    if name == "gaussian":  # its smallest λ is 4e-10 of the largest
        return gaussian(256, 256, seed=64).double()
    left, values, right = torch.linalg.svd(gaussian(200, 200).double())
    if name == "decaying":  # a quarter of all λ is below 1e-9
        return left * torch.logspace(0, -5.9, 200).double() @ right
    values[-4:] = values[0] * 1e-6 * torch.tensor([4.0, 3.0, 2.0, 1.2])  # down to 1.4e-12
    return left * values @ right


@pytest.mark.parametrize("name", ["gaussian", "decaying", "near the floor"])
def test_the_tail_needs_no_digits_of_the_smallest_values(name):
    weight = ill_conditioned(name)
    found, truth = eigenvalues(weight), by_svd(weight)
    kept = truth > code.FLOOR * truth[0]
    off = (found - truth).abs()
    assert float((off[kept] / truth[kept]).max()) > 1e-8  # digits are lost
    assert float(off.max()) <= 1e-14 * float(truth[0])
    for method in ("rank", "hill", "ks"):
        own, exact = fit_tail(found, method), fit_tail(truth, method)
        assert own.ok and own.n_tail == exact.n_tail
        assert own.zeta == pytest.approx(exact.zeta, rel=1e-6)
