"""Symmetric matrices as their upper triangles: half the memory, half the bytes to send.

Rows i and n - i of a triangle have n elements together, so the first half of the rows has room for the second half,
turned by 180°, left of its diagonal. To fold so takes no indices, which would be twice the matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def folded_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of [..., n, n]: [..., n (n + 1) / 2]."""
    return (*shape[:-2], shape[-1] * (shape[-1] + 1) // 2)


def fold(matrix: Tensor) -> Tensor:
    """The upper triangles of [..., n, n], in an order that `unfold` knows; what is below them is not looked at."""
    n = matrix.shape[-1]
    half = n // 2 + 1
    folded = matrix[..., :half, :].triu()
    folded[..., 1:, :] += matrix[..., n - half + 1 :, :].flip(-2, -1).tril()
    return folded.flatten(-2)[..., : n * (n + 1) // 2]


def unfold(folded: Tensor, n: int) -> Tensor:
    """The symmetric matrices [..., n, n] of which `fold` has made [..., n (n + 1) / 2]."""
    half = n // 2 + 1
    rows = F.pad(folded, (0, half * n - folded.shape[-1])).unflatten(-1, (half, n))
    upper = torch.cat([rows[..., : n - half + 1, :].triu(), rows[..., 1:, :].tril().flip(-2, -1)], -2)
    return upper.add_(upper.triu(1).mT)
