"""Second moments: sums of outer products, over the rows that enter a layer and those of its output's gradient.

Exact, and without the row matrix of a convolution (im2col) where there is a way around it.

N samples, T positions of an output, R = N * T rows, G groups, C channels, H and W pixels, K taps of a kernel, n inputs
and m outputs of a group
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 64 << 20  # of a row matrix at a time: more would be the step's largest tensor
MIN_OFFSET_CHANNELS = 48  # below, one product of wide rows takes less than many of narrow ones


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
    """A view of what a convolution without padding takes to each position: [N, H', W', G, C / G, kh, kw]."""
    N, C, H, W = x_NCHW.shape
    (kh, kw), (sh, sw), (dh, dw) = kernel, stride, dilation
    across_N, across_C, down, along = x_NCHW.stride()
    size = N, (H - dh * (kh - 1) - 1) // sh + 1, (W - dw * (kw - 1) - 1) // sw + 1, groups, C // groups, kh, kw
    strides = across_N, down * sh, along * sw, across_C * (C // groups), across_C, down * dh, along * dw
    return x_NCHW.as_strided(size, strides)


def of_patches(patches_NHWGCkk: Tensor, ones: bool) -> Tensor:
    """The moment of a convolution's patches as rows, in the order of its weight (channel, row, column); with `ones`, of
    those with a 1 at their ends. Chunk by chunk: [G, n, n].
    """
    N, H, W, groups = patches_NHWGCkk.shape[:4]
    n = patches_NHWGCkk[0, 0, 0, 0].numel()
    chunk = max(1, CHUNK_BYTES // (H * W * groups * n * patches_NHWGCkk.element_size()))
    moment = sums = 0
    for part in patches_NHWGCkk.split(chunk):
        rows_RGn = part.reshape(-1, groups, n)
        moment = moment + of_rows(rows_RGn)
        sums = sums + sum_of_rows(rows_RGn) if ones else 0
    return with_ones(moment, sums, N * H * W) if ones else moment


def of_3x3(x_NCHW: Tensor) -> Tensor:
    """The moment of the patches of a 3×3 convolution of stride 1 with one pixel of zeros around: [1, 9 C, 9 C].

    Two taps' block is a correlation of the image with itself, at the offset between them; 81 pairs of taps have 25
    offsets, and 13 up to transposition. What the window of a tap leaves out at the edges is subtracted. That takes 26
    products of R × C × C instead of 162.
    """
    C, W = x_NCHW.shape[1], x_NCHW.shape[3]
    x_NHWC = accumulating(x_NCHW.permute(0, 2, 3, 1))
    wide = F.pad(x_NHWC, (0, 0, 1, 1, 1, 1)).reshape(-1, C)  # zeros between the lines: a shift leads into them
    blocks = x_NHWC.new_empty(3, 3, 3, 3, C, C)  # row and column of a tap, and of another
    for down in range(3):
        for along in range(-2 if down else 0, 3):
            shift = down * (W + 2) + along
            whole = wide[: len(wide) - shift].T @ wide[shift:]  # [C, C] of x[u] and x[u + offset]
            _fill(blocks, x_NHWC, whole, down, along)
    return blocks.permute(4, 0, 1, 5, 2, 3).reshape(1, 9 * C, 9 * C)


def _fill(blocks: Tensor, x_NHWC: Tensor, whole: Tensor, down: int, along: int) -> None:
    """Put the correlation at an offset into all pairs of taps with that offset."""
    H, W = x_NHWC.shape[1:3]
    edges: dict[tuple, Tensor] = {}

    def outside(rows: int | None, columns: int | None) -> Tensor | float:
        """What the row or column, or the corner, contributes to the correlation."""
        if (rows, columns) not in edges:
            edges[rows, columns] = _edge(x_NHWC, rows, columns, down, along)
        return edges[rows, columns]

    for row in range(3 - down):
        for column in range(max(0, -along), min(3, 3 - along)):
            # The first tap's window, moved by one, misses the image's line at the other side.
            left_out_row = {0: H - 1, 1: None, 2: 0}[row]
            left_out_column = {0: W - 1, 1: None, 2: 0}[column]
            block = whole
            if left_out_row is not None:
                block = block - outside(left_out_row, None)
            if left_out_column is not None:
                block = block - outside(None, left_out_column)
            if left_out_row is not None and left_out_column is not None:
                block = block + outside(left_out_row, left_out_column)
            blocks[row, column, row + down, column + along] = block
            if (down, along) != (0, 0):
                blocks[row + down, column + along, row, column] = block.T


def _edge(x_NHWC: Tensor, row: int | None, column: int | None, down: int, along: int) -> Tensor | float:
    """Sum of x[u] x[u + offset]^T over the pixels u of a row, a column or (both given) a corner: [C, C]."""
    _, H, W, C = x_NHWC.shape
    rows = [row] if row is not None else range(H)
    columns = [column] if column is not None else range(W)
    here_rows = [r for r in rows if 0 <= r + down < H]
    here_columns = [c for c in columns if 0 <= c + along < W]
    if not here_rows or not here_columns:
        return 0.0
    first, stop = here_rows[0], here_rows[-1] + 1
    start, end = here_columns[0], here_columns[-1] + 1
    here = x_NHWC[:, first:stop, start:end].reshape(-1, C)
    there = x_NHWC[:, first + down : stop + down, start + along : end + along].reshape(-1, C)
    return here.T @ there
