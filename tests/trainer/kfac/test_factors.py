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


def test_chunks_of_patches(monkeypatch):
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    taken = factors.extract_patches(x, factors.Kernel((3, 3)))
    whole = factors.patch_factor(taken, True)
    monkeypatch.setattr(factors, "CHUNK_BYTES", 2 * 16 * 27 * 8)
    close(factors.patch_factor(taken, True), whole, 1e-13)
