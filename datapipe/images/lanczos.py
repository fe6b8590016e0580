"""Resizing with a Lanczos filter, as products with banded matrices.

With Pillow, a resize of this quality takes longer than decoding and encoding together. Divided into blocks along the
diagonal, its two matrices (vertical and horizontal) are small, and numpy's matrix product applies them in less time
than Pillow needs for its bilinear filter. It takes planes of luma and chroma as well as RGB.

Weights and intermediate values are rounded so that every product and sum is exact in float32. So the result does not
depend on the order in which a processor or a BLAS adds, and is the same everywhere.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

LOBES = 3  # of the sinc on either side: Lanczos3, as Pillow's LANCZOS
# Between the passes, values are multiples of 1/8 and below 2^9 (the sum of the weights' magnitudes is below 1.4). So
# the first pass needs 9 + 13 bits and the second 9 + 3 + 11, of the 24 that float32 has.
FIRST_BITS, SECOND_BITS, STEPS = 13, 11, 8
# OpenBLAS divides a product of more multiplications than this among threads (interface/gemm.c: SMP_THRESHOLD_MIN times
# GEMM_MULTITHREAD_THRESHOLD). But all cores are busy with other images already.
PRODUCT_LIMIT = 1 << 18
MAX_BLOCK = 16  # outputs: larger blocks consist of zeros, mostly


def decoded_size(width: int, height: int) -> tuple[int, int]:
    """Return the smallest width and height at which a JPEG may be decoded before it is resized.

    Decoding at a half, a quarter or an eighth of the size is fast, but drops a block's high frequencies, which is not
    what the filter does. From twice the size of the result on, the difference is far smaller than what JPEG coding
    with quality 90 changes.
    """
    return 2 * width, 2 * height


def resize(pixels: np.ndarray, width: int, height: int, step: tuple[float, float] | None = None) -> np.ndarray:
    """Resize an image.

    Args:
        pixels: Pixels of the image, uint8[H, W, C].
        width: Width of the result, in pixels.
        height: Height of the result, in pixels.
        step: Distance between neighbouring output samples in input samples, horizontally and vertically. By default
            both images cover the same area; in a plane of subsampled chroma, the image may end within a sample.

    Returns:
        Pixels, uint8[height, width, C].
    """
    rows, columns, channels = pixels.shape
    step_x, step_y = step or (columns / width, rows / height)
    if (step_x, step_y) == (1, 1) and (columns, rows) >= (width, height):
        return np.ascontiguousarray(pixels[:height, :width])
    lines = pixels.reshape(rows, -1)
    squeezed = np.empty((height, columns * channels), np.float32)
    limit = PRODUCT_LIMIT // (columns * channels)
    for outputs, inputs, weights in _blocks(rows, height, step_y, limit, FIRST_BITS, STEPS):
        np.matmul(weights, lines[inputs].astype(np.float32), out=squeezed[outputs])
    np.rint(squeezed, out=squeezed)
    resized = np.empty((height, width * channels), np.float32)
    limit = PRODUCT_LIMIT // (height * channels**2)
    for outputs, inputs, weights in _interleaved_blocks(columns, width, step_x, limit, channels):
        np.matmul(squeezed[:, inputs], weights, out=resized[:, outputs])
    np.rint(resized, out=resized)
    result = np.empty((height, width * channels), np.uint8)
    np.clip(resized, 0, 255, out=result, casting="unsafe")
    return result.reshape(height, width, channels)


Block = tuple[slice, slice, np.ndarray]  # outputs, inputs, and their weights, float32[outputs, inputs]


@lru_cache(512)  # a data set's sizes repeat: 500 pixels to 341, and the like
def _blocks(num_in: int, num_out: int, step: float, limit: int, bits: int, gain: float) -> list[Block]:
    """Make the matrix that resizes a line, times `gain`, in blocks of about `limit` weights at most."""
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
    """Make the matrix of the second pass, as blocks of float32[inputs, outputs].

    A line holds `channels` values per sample, and an output uses those of its own channel. For RGB, two thirds of such
    a block are zeros; this is still faster than separating the channels and joining them again.
    """
    own = np.eye(channels, dtype=np.float32)
    return [
        (
            slice(out.start * channels, out.stop * channels),
            slice(inputs.start * channels, inputs.stop * channels),
            np.ascontiguousarray(np.kron(matrix, own).T),
        )
        for out, inputs, matrix in _blocks(num_in, num_out, step, limit, SECOND_BITS, 1 / STEPS)
    ]


def _taps(num_in: int, num_out: int, step: float, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each output's first input (int64[num_out]) and weights (int64[num_out, taps], in units of 2^-bits)."""
    stretch = max(step, 1.0)  # when the image becomes smaller, the filter is as wide in the output
    centre = np.minimum((np.arange(num_out) + 0.5) * step, num_in) - 0.5
    num_taps = min(int(np.ceil(2 * LOBES * stretch)) + 1, num_in)
    first = np.clip(np.floor(centre - LOBES * stretch).astype(int) + 1, 0, num_in - num_taps)
    x = (first[:, None] + np.arange(num_taps) - centre[:, None]) / stretch
    weights = np.sinc(x) * np.sinc(x / LOBES) * (np.abs(x) < LOBES)
    weights = np.rint(weights * ((1 << bits) / weights.sum(1, keepdims=True))).astype(int)
    missing = (1 << bits) - weights.sum(1)  # so that each sum is exactly 1: flat areas do not change
    weights[np.arange(num_out), weights.argmax(1)] += missing
    return first, weights
