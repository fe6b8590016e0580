"""Second moments: sums of outer products, over the rows that enter a layer and those of its output's gradient.

Exact, and without the row matrix of a convolution (im2col) where there is a way around it.

N samples, T positions of an output, R = N * T rows, G groups, C channels, H and W pixels, K taps of a kernel, n inputs
and m outputs of a group
"""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 64 << 20  # of a row matrix at a time: more would be the step's largest tensor


def accumulating(tensor: Tensor) -> Tensor:
    """In the type that sums are formed in: float32, or float64 for float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def of_rows(rows_RGn: Tensor) -> Tensor:
    """Sum over the rows of the outer products of each group: [G, n, n], in float32 or float64."""
    if rows_RGn.is_cuda and rows_RGn.dtype in (torch.bfloat16, torch.float16):
        rows_GRn = rows_RGn.transpose(0, 1)
        return torch.bmm(rows_GRn.mT, rows_GRn, out_dtype=torch.float32)  # half precision enters, float32 accumulates
    rows_RGn = accumulating(rows_RGn)
    if rows_RGn.shape[1] == 1:
        rows_Rn = rows_RGn[:, 0]
        return (rows_Rn.T @ rows_Rn)[None]
    rows_GRn = rows_RGn.transpose(0, 1)
    return rows_GRn.mT @ rows_GRn


def with_ones(moment_Gnn: Tensor, sums_Gn: Tensor, num_rows: int) -> Tensor:
    """The moment of the same rows with a 1 at their ends: [G, n + 1, n + 1]. `sums_Gn`: the rows' sum."""
    below = torch.cat([sums_Gn, sums_Gn.new_full((len(sums_Gn), 1), num_rows)], 1)
    return torch.cat([torch.cat([moment_Gnn, sums_Gn[:, :, None]], 2), below[:, None]], 1)


def sum_of_rows(rows_RGn: Tensor) -> Tensor:
    """[G, n], in float32 or float64."""
    return rows_RGn.sum(0, dtype=torch.float64 if rows_RGn.dtype == torch.float64 else torch.float32)


def padded(x_NCHW: Tensor, padding: tuple[int, int, int, int], mode: str) -> Tensor:
    """As a convolution sees its input. `padding`: left, right, top, bottom."""
    if not any(padding):
        return x_NCHW
    return F.pad(x_NCHW, padding, "constant" if mode == "zeros" else mode)


def patches(
    x_NCHW: Tensor, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], groups: int
) -> Tensor:
    """A view of what a convolution without padding takes to each position: [N, H', W', G, kh, kw, C / G]."""
    N, C, H, W = x_NCHW.shape
    (kh, kw), (sh, sw), (dh, dw) = kernel, stride, dilation
    across_N, across_C, down, along = x_NCHW.stride()
    size = N, (H - dh * (kh - 1) - 1) // sh + 1, (W - dw * (kw - 1) - 1) // sw + 1, groups, kh, kw, C // groups
    strides = across_N, down * sh, along * sw, across_C * (C // groups), down * dh, along * dw, across_C
    return x_NCHW.as_strided(size, strides)


def of_patches(patches_NHWGkkC: Tensor, ones: bool) -> Tensor:
    """The moment of a convolution's patches as rows (row, column, channel: neighbours in a channels-last image stay
    together); with `ones`, of those with a 1 at their ends. Chunk by chunk: [G, n, n].
    """
    N, H, W, groups = patches_NHWGkkC.shape[:4]
    n = patches_NHWGkkC[0, 0, 0, 0].numel()
    chunk = max(1, CHUNK_BYTES // (H * W * groups * n * patches_NHWGkkC.element_size()))
    moment = sums = 0
    for part in patches_NHWGkkC.split(chunk):
        rows_RGn = part.reshape(-1, groups, n)
        moment = moment + of_rows(rows_RGn)
        sums = sums + sum_of_rows(rows_RGn) if ones else 0
    return with_ones(moment, sums, N * H * W) if ones else moment


def of_3x3(x_NCHW: Tensor) -> Tensor:
    """The moment of the patches of a 3×3 convolution of stride 1 with one pixel of zeros around: [1, 9 C, 9 C].

    Two taps' block is a correlation of the image with itself, at the offset between them, and the 81 pairs of taps have
    25 offsets. All 25 are what a convolution's weight gradient is, which libraries do without im2col. What the window
    of a tap leaves out at the edges is subtracted.
    """
    x_NCHW = accumulating(x_NCHW)
    C, H, W = x_NCHW.shape[1:]
    # [u's channel, the other's, 5, 5]: sum of x[u] x[u + offset]^T, zeros beyond the image
    correlations = torch.nn.grad.conv2d_weight(x_NCHW, (C, C, 5, 5), x_NCHW, padding=2)
    x_NHWC = x_NCHW.permute(0, 2, 3, 1)
    blocks = x_NCHW.new_empty(3, 3, C, 3, 3, C)  # row and column of a tap, channel; the same of another
    # Of the image's lines, the one that a tap at either end does not reach.
    left_out_row, left_out_column = {0: H - 1, 2: 0}, {0: W - 1, 2: 0}
    for down in range(3):
        for along in range(-2 if down else 0, 3):
            whole = correlations[:, :, down + 2, along + 2].contiguous()
            edge = cache(partial(_edge, x_NHWC, down, along))
            for row in range(3 - down):
                for column in range(max(0, -along), min(3, 3 - along)):
                    y, x = left_out_row.get(row), left_out_column.get(column)
                    block = whole
                    if y is not None:
                        block = block - edge(y, None)
                    if x is not None:
                        block = block - edge(None, x)
                    if y is not None and x is not None:  # both have left out their corner
                        block = block + edge(y, x)
                    blocks[row, column, :, row + down, column + along] = block
                    blocks[row + down, column + along, :, row, column] = block.T
    return blocks.reshape(1, 9 * C, 9 * C)


def _edge(x_NHWC: Tensor, down: int, along: int, row: int | None, column: int | None) -> Tensor | float:
    """Sum of x[u] x[u + offset]^T over the pixels u of a row or a column, or of the corner of both: [C, C]."""
    _, H, W, C = x_NHWC.shape
    top, bottom = (0, H) if row is None else (row, row + 1)
    left, right = (0, W) if column is None else (column, column + 1)
    # Only pairs that both lie in the image: the rest is zero.
    top, bottom, left, right = max(top, -down), min(bottom, H - down), max(left, -along), min(right, W - along)
    if top >= bottom or left >= right:
        return 0.0
    here = x_NHWC[:, top:bottom, left:right].reshape(-1, C)
    there = x_NHWC[:, top + down : bottom + down, left + along : right + along].reshape(-1, C)
    return here.T @ there
