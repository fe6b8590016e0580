"""Symmetric matrices as their upper triangles: half the memory, half the bytes to send.

Rows i and n - i of a triangle have n elements together. So the first half of the rows has room for the second half,
rotated by 180°, to the left of its diagonal; for n = 4, with the elements of the triangle numbered:

     0  1  2  3                      0  1  2  3
     .  4  5  6    is packed as      9  4  5  6    and flattened without the last two elements.
     .  .  7  8                      8  7  .  .
     .  .  .  9

To pack in this way needs no index tensors, which would take twice the memory of the matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape [..., n (n + 1) / 2] of the packed triangles of matrices [..., n, n]."""
    return (*shape[:-2], shape[-1] * (shape[-1] + 1) // 2)


def pack_triangle(matrix: Tensor) -> Tensor:
    """Return the upper triangles [..., n (n + 1) / 2] of [..., n, n]; what is below the diagonal is not read."""
    n = matrix.shape[-1]
    half = n // 2 + 1
    packed = matrix[..., :half, :].triu()
    packed[..., 1:, :] += matrix[..., n - half + 1 :, :].flip(-2, -1).tril()
    return packed.flatten(-2)[..., : n * (n + 1) // 2]


def unpack_triangle(packed: Tensor, n: int) -> Tensor:
    """Return the symmetric matrices [..., n, n] that `pack_triangle` has packed as [..., n (n + 1) / 2]."""
    half = n // 2 + 1
    rows = F.pad(packed, (0, half * n - packed.shape[-1])).reshape(*packed.shape[:-1], half, n)
    upper = torch.cat([rows[..., : n - half + 1, :].triu(), rows[..., 1:, :].tril().flip(-2, -1)], -2)
    return upper.add_(upper.triu(1).mT)
