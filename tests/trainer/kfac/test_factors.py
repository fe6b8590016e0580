"""Factors of a convolution, two ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.trainer.kfac.brute_force import close
from trainer.kfac import factors


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (2, 2), (3, 2), (7, 6)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_offsets_instead_of_patches(size, layout):
    """Correlations of the image with itself make the same factor."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, *size, dtype=torch.float64).to(memory_format=layout)
    taken = factors.extract_patches(F.pad(x, (1, 1, 1, 1)), factors.Kernel((3, 3)))
    close(factors.conv3x3_factor(x), factors.patch_factor(taken, False), 1e-13)
    close(factors._products_of_offsets(x), factors._convolved_offsets(x), 1e-13)  # the way of half precision on a GPU
    halves = x.bfloat16()
    close(factors.conv3x3_factor(halves), factors.conv3x3_factor(halves.double()), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("ratio", [0, 1, 100])
def test_moments_are_as_precise_as_the_elements(ratio, dtype):
    """The mean is as many times the deviation."""
    torch.manual_seed(0)
    x = (ratio + torch.randn(64, 49, 3)).to(dtype)
    exact = x.double().flatten(0, 1)
    mean, variance = factors.mean_and_variance(x)
    assert mean.dtype == variance.dtype == torch.float32
    close(mean, exact.mean(0), 1e-6)
    close(variance, exact.var(0, correction=0), max(1e-5, torch.finfo(dtype).eps / 4))


def test_chunks_of_patches(monkeypatch):
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    taken = factors.extract_patches(x, factors.Kernel((3, 3)))
    whole = factors.patch_factor(taken, True)
    monkeypatch.setattr(factors, "CHUNK_BYTES", 2 * 16 * 27 * 8)
    close(factors.patch_factor(taken, True), whole, 1e-13)
