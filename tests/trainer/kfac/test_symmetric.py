"""Packed triangles."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.kfac.symmetric import pack_triangle, packed_shape, unpack_triangle


@given(st.integers(1, 12), st.sampled_from([(), (1,), (3,), (2, 3)]))
def test_triangles_hold_every_element_above_the_diagonal_once(n, batch):
    matrix = torch.randn(*batch, n, n)
    symmetric = matrix.triu() + matrix.triu(1).mT
    folded = pack_triangle(matrix)  # what is below the diagonal does not count
    assert folded.shape == packed_shape(matrix.shape) == (*batch, n * (n + 1) // 2)
    assert torch.equal(unpack_triangle(folded, n), symmetric)
    above = matrix[(..., *torch.triu_indices(n, n))]
    assert torch.equal(folded.sort().values, above.sort().values)
    matrix[..., 0, -1] = float("nan")
    assert unpack_triangle(pack_triangle(matrix), n).isnan().sum(dim=(-2, -1)).unique().item() == (2 if n > 1 else 1)
