"""The Kronecker factors of layers, as sums of outer products: of the inputs' rows, and of the output gradients' rows.

They are exact, and do without the row matrix of a convolution (im2col) where there is a way around it.

Letters in the names of tensors are their dimensions: N samples, T positions of an output, R = N T rows, G groups,
C channels, H and W pixels, k (twice) the rows and columns of a kernel, n inputs and m outputs of a group.

The factor of a 3×3 kernel with stride 1 and one pixel of zeros around the image, without patches (`conv3x3_factor`).
The element (row, column) of the kernel, each from 0 to 2, reads for the output position p the pixel
p + (row - 1, column - 1), or a zero beyond the image. The factor's block for two elements s and t, [C, C], is

    B(s, t) = Σ_p x[p + s - 1] x[p + t - 1]ᵀ   over all positions p, which are as many as pixels.

1. With u = p + s - 1, that is Σ_u x[u] x[u + d]ᵀ with the offset d = t - s, over those pixels u that the element s
   reads. If it were over all pixels, the block would depend on the offset alone. The 81 pairs of elements have 25
   offsets, from (-2, -2) to (2, 2). As B(t, s) = B(s, t)ᵀ, those without a component upwards are enough:

       offset    -2  -1   0   1   2   along
           0      w   w   w   w   w
           1      w   w   w   w   w       `whole`: the 15 sums over all pixels
           2      w   w   w   w   w
         down

2. These 15 sums are what libraries compute as the weight gradient of a convolution with a kernel of 3×5. In half
   precision on a GPU they are 13 products of matrices instead (`_products_of_offsets`): of the rows of all pixels with
   the same rows from a later one on. A library may have no fast kernel for so odd a convolution, and it would take
   float32, in which a GPU multiplies a tenth as fast.
3. An element in an outer row of the kernel does not read one row of the image: row 0 of the kernel never reads the
   last row, row 2 never the first. The products of these pixels are subtracted: minus `row_sums`.
4. The same for columns: column 0 never reads the last column, column 2 never the first: minus `column_sums`.
5. For the kernel's corners, the pixel in both lines has been subtracted twice: plus its outer product.

Steps 3 and 4 subtract offsets along the line alone. An offset across it leads out of the image, and its product is
zero: row 0 of the kernel has other rows below it only, and below the image's last row there is none. So it is for
the three other sides.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

CHUNK_BYTES = 64 << 20  # of a row matrix at a time: more would be the step's largest tensor


def accumulating(tensor: Tensor) -> Tensor:
    """Return the tensor in the type that sums are formed in: float64 for float64, and float32 for all others."""
    return tensor.to(_sum_dtype(tensor))


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def multiplies_halves(tensor: Tensor) -> bool:
    """Return whether products of the tensor's half-precision elements can be summed in float32 without a copy."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def outer_products(rows_RGn: Tensor) -> Tensor:
    """Return the sum over the rows of each group's outer products: [G, n, n], in float32 or float64."""
    if multiplies_halves(rows_RGn):
        rows_GRn = rows_RGn.transpose(0, 1)
        return torch.bmm(rows_GRn.mT, rows_GRn, out_dtype=torch.float32)
    rows_RGn = accumulating(rows_RGn)
    if rows_RGn.shape[1] == 1:
        rows_Rn = rows_RGn[:, 0]
        return (rows_Rn.T @ rows_Rn)[None]
    rows_GRn = rows_RGn.transpose(0, 1)
    return rows_GRn.mT @ rows_GRn


def append_ones(factor_Gnn: Tensor, sums_Gn: Tensor, num_rows: int) -> Tensor:
    """Return what `outer_products` is of the same rows with a 1 at the end of each.

    Args:
        factor_Gnn: The sum of the rows' outer products.
        sums_Gn: The sum of the rows.
        num_rows: Number of rows.

    Returns:
        [G, n + 1, n + 1].
    """
    below = torch.cat([sums_Gn, sums_Gn.new_full((len(sums_Gn), 1), num_rows)], 1)
    return torch.cat([torch.cat([factor_Gnn, sums_Gn[:, :, None]], 2), below[:, None]], 1)


def sum_rows(rows_RGn: Tensor, dim: int = 0) -> Tensor:
    """Return the sum of the rows, or over another dimension than theirs: [G, n], in float32 or float64."""
    return rows_RGn.sum(dim, dtype=_sum_dtype(rows_RGn))


def sum_products(a_NTU: Tensor, b_NTU: Tensor) -> Tensor:
    """Return Σ_t a b: [N, U], of products in float32 or float64."""
    # The zero makes the type of the products. A device casts the elements as it reads them, and makes no copies.
    zero = a_NTU.new_zeros((1, 1, 1), dtype=_sum_dtype(a_NTU))
    return torch.addcmul(zero, a_NTU, b_NTU).sum(1)


def mean_and_variance(x_NTU: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance over samples and positions: [U] each, in float32 or float64."""
    if x_NTU.dtype != torch.bfloat16:
        x_RU = accumulating(x_NTU).flatten(0, 1)
        mean = x_RU.mean(0)
        return mean, (x_RU - mean).square_().mean(0)  # torch.var_mean takes ten times as long on a processor
    # Without a float32 copy. The difference is off by a few units of rounding of float32 times the square of the mean,
    # which is far less than the variance that the rounding to bfloat16 has added.
    count = x_NTU.shape[0] * x_NTU.shape[1]
    mean = sum_rows(x_NTU, 1).double().sum(0) / count
    squares_NU = torch.linalg.vector_norm(x_NTU, dim=1, dtype=torch.float32).double().square()
    variance = (squares_NU.sum(0) / count - mean.square()).clamp(min=0)
    return mean.float(), variance.float()


class Kernel(NamedTuple):
    """A convolution's kernel: how many elements it has, and how many pixels it moves and skips, down and along."""

    size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)


def extract_patches(x_NCHW: Tensor, kernel: Kernel, groups: int = 1) -> Tensor:
    """Return the patches that a convolution without padding multiplies with its kernel.

    Args:
        x_NCHW: The image, padded.
        kernel: The kernel.
        groups: The number of groups of channels.

    Returns:
        A view of the image: [N, H', W', G, k, k, C / G], for an output of H' times W' positions.
    """
    N, C, H, W = x_NCHW.shape
    (kh, kw), (sh, sw), (dh, dw) = kernel
    across_N, across_C, down, along = x_NCHW.stride()
    size = N, (H - dh * (kh - 1) - 1) // sh + 1, (W - dw * (kw - 1) - 1) // sw + 1, groups, kh, kw, C // groups
    strides = across_N, down * sh, along * sw, across_C * (C // groups), down * dh, along * dw, across_C
    return x_NCHW.as_strided(size, strides)


def patch_factor(patches_NHWGkkC: Tensor, ones: bool) -> Tensor:
    """Return the sum of the outer products of a convolution's patches.

    A patch's elements are in the order row, column, channel, so that neighbours in a channels-last image stay together.
    The row matrix is formed in chunks of CHUNK_BYTES.

    Args:
        patches_NHWGkkC: The patches.
        ones: Append a 1 to each patch, for a bias.

    Returns:
        [G, n, n], with n = k k C or one more.
    """
    N, H, W, groups = patches_NHWGkkC.shape[:4]
    n = patches_NHWGkkC[0, 0, 0, 0].numel()
    chunk = max(1, CHUNK_BYTES // (H * W * groups * n * patches_NHWGkkC.element_size()))
    factor: Tensor | int = 0
    sums: Tensor | int = 0
    for part in torch.split(patches_NHWGkkC, chunk):
        rows_RGn = part.reshape(-1, groups, n)
        factor = factor + outer_products(rows_RGn)
        sums = sums + sum_rows(rows_RGn) if ones else 0
    assert isinstance(factor, Tensor)  # split gives at least one part
    return append_ones(factor, sums, N * H * W) if isinstance(sums, Tensor) else factor


def conv3x3_factor(x_NCHW: Tensor) -> Tensor:
    """Return `patch_factor` for a 3×3 kernel with stride 1 and one pixel of zeros around the image, [1, 9 C, 9 C].

    The image comes without padding. The steps are those at the top of this file.
    """
    _, C, H, W = x_NCHW.shape
    whole = _products_of_offsets(x_NCHW) if multiplies_halves(x_NCHW) else _convolved_offsets(accumulating(x_NCHW))
    # Steps 3 and 4: the lines that the outer rows and columns of the kernel do not read, and the sums over them.
    unread_rows = {row: accumulating(x_NCHW[:, :, y : y + 1]) for row, y in ((0, H - 1), (2, 0))}
    unread_columns = {column: accumulating(x_NCHW[..., x : x + 1]) for column, x in ((0, W - 1), (2, 0))}
    row_sums = {row: _line_sums(line, (1, 5), (2, 2, 0, 0))[:, 0] for row, line in unread_rows.items()}
    column_sums = {column: _line_sums(line, (3, 1), (0, 0, 0, 2))[:, :, 0] for column, line in unread_columns.items()}
    # blocks[row of s, column of s, C, row of t, column of t, C], filled for t in the same row as s or below it.
    blocks = whole.new_empty(3, 3, C, 3, 3, C)
    for row, column in product(range(3), range(3)):
        along = slice(2 - column, 5 - column)  # the offsets from `column` to columns 0, 1 and 2
        block = blocks[row, column]
        block[:, row:] = whole[:, : 3 - row, along]  # step 1
        if row in unread_rows:
            block[:, row] -= row_sums[row][:, along]  # step 3
        if column in unread_columns:
            block[:, row:, column] -= column_sums[column][:, : 3 - row]  # step 4
        if row in unread_rows and column in unread_columns:
            corner = unread_rows[row][:, :, 0, -1 if column == 0 else 0]
            block[:, row, column] += corner.T @ corner  # step 5
    factor = blocks.reshape(3, 3 * C, 3, 3 * C)
    for row, lower_row in ((0, 1), (0, 2), (1, 2)):
        factor[lower_row, :, row] = factor[row, :, lower_row].T
    return factor.reshape(1, 9 * C, 9 * C)


def _convolved_offsets(x_NCHW: Tensor) -> Tensor:
    """Return the sums of step 2: [C of u, offset down, offset along, C of u + d]."""
    N, C, H, W = x_NCHW.shape
    below = x_NCHW.new_empty(N, H + 2, W, C).movedim(3, 1)  # F.pad would fill all of it with zeros first
    below[:, :, :H], below[:, :, H:] = x_NCHW, 0  # zeros below the image for the offsets down
    whole: Tensor = conv2d_weight(below, (C, C, 3, 5), x_NCHW, padding=(0, 2))  # type: ignore[no-untyped-call]
    return whole.permute(0, 2, 3, 1).contiguous()


def _products_of_offsets(x_NCHW: Tensor) -> Tensor:
    """Return what `_convolved_offsets` does, for half precision on a GPU.

    With two columns of zeros at the right of each image and two rows below it, an offset is a number of rows of the
    matrix of all pixels, and leads from each image's edge to a zero.
    """
    N, C, H, W = x_NCHW.shape
    padded = x_NCHW.new_zeros(N, H + 2, W + 2, C)
    padded[:, :H, :W] = x_NCHW.permute(0, 2, 3, 1)
    rows_RC = padded.reshape(-1, C)
    products = {}
    for down, along in product(range(3), range(-2, 3)):
        offset = down * (W + 2) + along
        if offset >= 0:
            products[down, along] = _products(rows_RC[: len(rows_RC) - offset], rows_RC[offset:])
    products |= {(0, -along): products[0, along].T for along in (1, 2)}
    offsets = [products[down, along] for down, along in product(range(3), range(-2, 3))]
    return torch.stack(offsets, 1).reshape(C, 3, 5, C)


def _products(a_Rn: Tensor, b_Rm: Tensor) -> Tensor:
    """Return Σ_r a bᵀ: [n, m], in float32 or float64."""
    if multiplies_halves(a_Rn):
        return torch.mm(a_Rn.T, b_Rm, out_dtype=torch.float32)
    return accumulating(a_Rn).T @ accumulating(b_Rm)


def _line_sums(line_NCHW: Tensor, offsets: tuple[int, int], padding: tuple[int, int, int, int]) -> Tensor:
    """Return Σ_u x[u] x[u + d]ᵀ over a line's pixels u, for each offset d: [C, *offsets, C].

    Args:
        line_NCHW: One row or one column of an image.
        offsets: The number of offsets down and along.
        padding: Zeros to the left, to the right, at the top and at the bottom, such that each pixel has all offsets.
    """
    C = line_NCHW.shape[1]
    pixels_RC = line_NCHW.permute(0, 2, 3, 1).reshape(-1, C)
    others_Rn = extract_patches(F.pad(line_NCHW, padding), Kernel(offsets)).reshape(len(pixels_RC), -1)
    return (pixels_RC.T @ others_Rn).reshape(C, *offsets, C)


def sua_factor(x_NCHW: Tensor, kernel: Kernel) -> Tensor:
    """Return the factor of spatially uncorrelated pixels (SUA) of a padded image: [1, C, C], in float32 or float64.

    It is the sum of the outer products of the pixels that one element of the kernel reads, in the mean over the
    elements.
    """
    C, H, W = x_NCHW.shape[1:]
    x_NCHW = accumulating(x_NCHW)
    # How many of the kernel's elements read a pixel, divided by the number of elements: it is a product of two such
    # counts, one for rows and one for columns, so each pixel is taken once, with the root of that weight.
    counts = [x_NCHW.new_zeros(size) for size in (H, W)]
    for count, k, s, d in zip(counts, *kernel, strict=True):
        end = len(count) - d * (k - 1)  # the first element's positions are below this
        for element in range(k):
            count[element * d : element * d + end : s] += 1 / k
    weights_HW = torch.outer(*counts).sqrt()
    return outer_products((x_NCHW * weights_HW).movedim(1, -1).reshape(-1, 1, C))
