"""Resizing with a Lanczos filter, as products with banded matrices.

A blur-free resize costs Pillow more than decoding and encoding together. Cut into blocks along the diagonal, its two
matrices (vertical, horizontal) are small, and numpy's matrix product does them in less time than Pillow takes for
its bilinear filter, on luma and chroma planes as on RGB.

Weights and intermediate values are rounded so that every product and sum is exact in float32: the result does not
depend on the order in which a processor or a BLAS adds, and is the same everywhere.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

LOBES = 3  # of the sinc on either side: Lanczos3, as Pillow's LANCZOS
# Between the passes values are kept to 1/8 and below 2^9 (sums of weights' magnitudes are below 1.4), so: first pass
# 9 + 13 bits, second pass 9 + 3 + 11 bits, within float32's 24.
FIRST_BITS, SECOND_BITS, STEPS = 13, 11, 8
# OpenBLAS gives a product of more multiplications than this to several threads (interface/gemm.c: SMP_THRESHOLD_MIN
# times GEMM_MULTITHREAD_THRESHOLD), but those are ours already.
PRODUCT_LIMIT = 1 << 18
MAX_BLOCK = 16  # outputs: beyond, more of a block is zeros
EXACT_SHARE = 2  # see `decoded_size`


def decoded_size(width: int, height: int) -> tuple[int, int]:
    """The smallest size to decode a JPEG at, where decoding at less than its full size is meant to be fast.

    Decoding to a half, a quarter, an eighth cuts a block's high frequencies off, which is not what the filter does.
    At twice the size that is wanted or more, the difference is far below that of JPEG coding with quality 90.
    """
    return EXACT_SHARE * width, EXACT_SHARE * height


def resize(pixels: np.ndarray, width: int, height: int, step: tuple[float, float] | None = None) -> np.ndarray:
    """uint8[H, W, C] -> uint8[height, width, C].

    `step` is how many input samples an output sample is apart from the next, horizontally and vertically; by default
    so many that both images cover the same. (In a plane of subsampled chroma, the image may end within a sample.)
    """
    rows, columns, channels = pixels.shape
    step_x, step_y = step or (columns / width, rows / height)
    if (step_x, step_y) == (1, 1) and (columns, rows) >= (width, height):
        return np.ascontiguousarray(pixels[:height, :width])
    lines = pixels.reshape(rows, -1)
    squeezed = np.empty((height, columns * channels), np.float32)
    limit = PRODUCT_LIMIT // (columns * channels)
    for out, taken, weights in _blocks(rows, height, step_y, limit, FIRST_BITS, STEPS):
        np.matmul(weights, lines[taken].astype(np.float32), out=squeezed[out])
    np.rint(squeezed, out=squeezed)
    resized = np.empty((height, width * channels), np.float32)
    limit = PRODUCT_LIMIT // (height * channels**2)
    for out, taken, weights in _interleaved_blocks(columns, width, step_x, limit, channels):
        np.matmul(squeezed[:, taken], weights, out=resized[:, out])
    np.rint(resized, out=resized)
    result = np.empty((height, width * channels), np.uint8)
    np.clip(resized, 0, 255, out=result, casting="unsafe")
    return result.reshape(height, width, channels)


Block = tuple[slice, slice, np.ndarray]  # outputs, inputs, float32[outputs, inputs]


@lru_cache(512)  # a data set's sizes repeat: 500 pixels to 341, and the like
def _blocks(num_in: int, num_out: int, step: float, limit: int, bits: int, gain: float) -> list[Block]:
    """The matrix that resizes a line, times `gain`, in blocks of no more than about `limit` weights."""
    first, weights = _taps(num_in, num_out, step, bits)
    num_taps = weights.shape[1]
    block = next((n for n in range(MAX_BLOCK, 1, -1) if n * (n * step + num_taps) <= limit), 1)
    blocks = []
    for start in range(0, num_out, block):
        stop = min(start + block, num_out)
        low, high = int(first[start]), int(first[stop - 1]) + num_taps
        matrix = np.zeros((stop - start, high - low), np.float32)
        for row in range(start, stop):
            at = first[row] - low
            matrix[row - start, at : at + num_taps] = weights[row] * (gain / (1 << bits))
        blocks.append((slice(start, stop), slice(low, high), matrix))
    return blocks


@lru_cache(512)
def _interleaved_blocks(num_in: int, num_out: int, step: float, limit: int, channels: int) -> list[Block]:
    """The matrix of the second pass, as blocks of float32[inputs, outputs].

    A line holds `channels` values for each sample, and an output takes those of its own channel: two thirds of such a
    block are zeros for RGB, and it is still faster than parting the channels and joining them again.
    """
    own = np.eye(channels, dtype=np.float32)
    return [
        (
            slice(out.start * channels, out.stop * channels),
            slice(taken.start * channels, taken.stop * channels),
            np.ascontiguousarray(np.kron(matrix, own).T),
        )
        for out, taken, matrix in _blocks(num_in, num_out, step, limit, SECOND_BITS, 1 / STEPS)
    ]


def _taps(num_in: int, num_out: int, step: float, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """First input sample (int64[num_out]) and weights (int64[num_out, taps], in units of 2^-bits) of each output."""
    stretch = max(step, 1.0)  # making smaller, the filter covers as much as it does in the output
    centre = np.minimum((np.arange(num_out) + 0.5) * step, num_in) - 0.5
    num_taps = min(int(np.ceil(2 * LOBES * stretch)) + 1, num_in)
    first = np.clip(np.floor(centre - LOBES * stretch).astype(int) + 1, 0, num_in - num_taps)
    x = (first[:, None] + np.arange(num_taps) - centre[:, None]) / stretch
    weights = np.sinc(x) * np.sinc(x / LOBES) * (np.abs(x) < LOBES)
    weights = np.rint(weights * ((1 << bits) / weights.sum(1, keepdims=True))).astype(int)
    weights[np.arange(num_out), weights.argmax(1)] += (1 << bits) - weights.sum(1)  # flat areas stay as they are
    return first, weights
