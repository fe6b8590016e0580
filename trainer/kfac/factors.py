"""Second moments: sums of outer products, over the rows that enter a layer and those of its output's gradient.

Exact, and without the row matrix of a convolution (im2col) where there is a way around it.

N samples, T positions of an output, R = N * T rows, G groups, C channels, H and W pixels, K taps of a kernel, n inputs
and m outputs of a group
"""

from __future__ import annotations

from itertools import product

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
    25 offsets, of which those upwards are the others' transposes. The rest is what the weight gradient of a convolution
    with 3×5 taps is, which libraries do without im2col. What the window of a tap leaves out at an edge is subtracted.
    """
    x_NCHW = accumulating(x_NCHW)
    N, C, H, W = x_NCHW.shape
    # Sum of x[u] x[u + offset]^T, with zeros beyond the image: [u's channel, offset down and along, the other's]
    below = x_NCHW.new_empty(N, H + 2, W, C).movedim(3, 1)  # F.pad would fill all of it with zeros first
    below[:, :, :H], below[:, :, H:] = x_NCHW, 0
    whole = torch.nn.grad.conv2d_weight(below, (C, C, 3, 5), x_NCHW, padding=(0, 2)).permute(0, 2, 3, 1).contiguous()
    # The line that a tap at either end does not reach. From there, an offset towards the edge leads out of the image.
    rows = {tap: x_NCHW[:, :, y : y + 1] for tap, y in ((0, H - 1), (2, 0))}
    columns = {tap: x_NCHW[..., x : x + 1] for tap, x in ((0, W - 1), (2, 0))}
    of_rows = {tap: _along(line, (1, 5), (2, 2, 0, 0))[:, 0] for tap, line in rows.items()}
    of_columns = {tap: _along(line, (3, 1), (0, 0, 0, 2))[:, :, 0] for tap, line in columns.items()}
    blocks = x_NCHW.new_empty(3, 3, C, 3, 3, C)  # row and column of a tap, channel; the same of another
    for row, column in product(range(3), range(3)):
        along = slice(2 - column, 5 - column)
        block = blocks[row, column]
        block[:, row:] = whole[:, : 3 - row, along]
        if row in rows:
            block[:, row] -= of_rows[row][:, along]
        if column in columns:
            block[:, row:, column] -= of_columns[column][:, : 3 - row]
        if row in rows and column in columns:  # both have left out their corner
            corner = rows[row][:, :, 0, -1 if column == 0 else 0]
            block[:, row, column] += corner.T @ corner
    moment = blocks.reshape(3, 3 * C, 3, 3 * C)
    for row, other in ((1, 0), (2, 0), (2, 1)):
        moment[row, :, other] = moment[other, :, row].T
    return moment.reshape(1, 9 * C, 9 * C)


def of_taps(x_NCHW: Tensor, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]) -> Tensor:
    """The moment of the pixels that one tap of a convolution without padding takes, in the mean over the taps:
    [1, C, C].
    """
    C, H, W = x_NCHW.shape[1:]
    x_NCHW = accumulating(x_NCHW)
    # How many times each pixel is taken: from the two dimensions, in each the sum over taps of the positions they take.
    times = [x_NCHW.new_zeros(size) for size in (H, W)]
    for taken, k, s, d in zip(times, kernel, stride, dilation, strict=True):
        last = len(taken) - d * (k - 1)  # position of the first tap, at most
        for tap in range(k):
            taken[tap * d : tap * d + last : s] += 1 / k
    weights_HW = torch.outer(*times).sqrt()
    return of_rows((x_NCHW * weights_HW).movedim(1, -1).reshape(-1, 1, C))


def _along(line_NCHW: Tensor, kernel: tuple[int, int], padding: tuple[int, int, int, int]) -> Tensor:
    """Sum of x[u] x[u + offset]^T over a line's pixels: [u's channel, offset down and along, the other's]."""
    C = line_NCHW.shape[1]
    here_RC = line_NCHW.permute(0, 2, 3, 1).reshape(-1, C)
    others_Rn = patches(F.pad(line_NCHW, padding), kernel, (1, 1), (1, 1), 1).reshape(len(here_RC), -1)
    return (here_RC.T @ others_Rn).reshape(C, *kernel, C)
