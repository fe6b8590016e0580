"""Decode only what a crop needs: windows cut out of a JPEG's bytes, and smaller scales.

A JPEG with restart markers (ITU-T T.81, E.1.4) is a sequence of pieces that are decoded independently. Where a whole
number of pieces makes a row of MCUs, the pieces that cover a crop make a JPEG of their own: the same header with
another width and height, and the markers renumbered. Any decoder reads it.

The pixels are those of decoding the whole image: decoders interpolate chroma from the neighbouring sample, so a window
covers one pixel more than the crop on each side.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from . import Buffer, jpeg
from .codec import MAX_PIXELS, decode, decode_jpeg

MARGIN = 1  # pixels: libjpeg's "fancy upsampling" uses the next sample of chroma, and none beyond
NARROW = 2  # samples of chroma across: in an image as narrow as that, libjpeg does not interpolate
Box = tuple[int, int, int, int]  # left, top, width, height in pixels


class Window(NamedTuple):
    """A JPEG of a part of an image."""

    data: Buffer
    left: int  # where its corner lies in the image, pixels
    top: int
    width: int
    height: int
    # The entropy-coded data do not end with the last row of the window: decoders warn of extraneous bytes.
    ends_late: bool = False
    # It may be decoded at reduced size. Not with 4:2:2 or 4:4:0, where libjpeg's scaled decoding would also drop
    # chroma in the direction that has full resolution.
    scalable: bool = True


class Decoded(NamedTuple):
    """Decoded pixels (uint8[H, W, C]), and where in them the box lies that was asked for."""

    pixels: np.ndarray
    box: Box


def check_size(width: int, height: int, expected: tuple[int, int]) -> None:
    """Check that an image has the size for which its window was chosen.

    Args:
        width: Width of the image, in pixels.
        height: Height of the image, in pixels.
        expected: Width and height that it should have, in pixels.

    Raises:
        ValueError: It has another size.
    """
    if (width, height) != expected:
        raise ValueError(f"has {width}×{height} pixels, and the index says {expected[0]}×{expected[1]}")


def cut(data: Buffer, box: Box, size: tuple[int, int] | None = None) -> Window:
    """Cut the smallest possible JPEG that covers a box out of another JPEG, without decoding it.

    With usable restart markers it is made of the pieces that cover the box. Without them, a baseline JPEG only loses
    the rows of MCUs below the box, and any other stays whole.

    Args:
        data: The JPEG.
        box: Box in pixels of the image; what lies outside the image is ignored.
        size: Width and height of the image for which the box was chosen; None to accept any.

    Returns:
        A window that covers the box and a margin of a pixel, inside the image.

    Raises:
        ValueError: The header is damaged, or gives another size.
    """
    header = jpeg.read_markers(data)
    if size is not None:
        check_size(header.width, header.height, size)
    if header.width * header.height > MAX_PIXELS:
        raise ValueError(f"{header.width}×{header.height} pixels are out of range (1 to {MAX_PIXELS})")
    mcu_width, mcu_height = header.mcu_size()
    scalable = mcu_width == mcu_height
    whole = Window(data, 0, 0, header.width, header.height, scalable=scalable)
    if header.frame not in jpeg.SEQUENTIAL or not header.interleaved or header.components not in (1, 3):
        return whole
    columns, rows = -(-header.width // mcu_width), -(-header.height // mcu_height)
    left, top, width, height = box
    row, end_row = _covering(top, height, mcu_height, rows)
    bottom = min(header.height, end_row * mcu_height)
    if header.restart_interval and columns % header.restart_interval == 0:
        per_row, piece_width = columns // header.restart_interval, header.restart_interval * mcu_width
        first, end = _covering(left, width, piece_width, per_row)
        if first and header.width - first * piece_width <= NARROW * mcu_width // 8:
            first -= 1
        if (end - first, end_row - row) == (per_row, rows):
            return whole
        if (ends := jpeg.piece_ends(data, header, per_row * rows)) is not None:
            x, y = first * piece_width, row * mcu_height
            size = min(header.width, end * piece_width) - x, bottom - y
            pieces = [(number + first, number + end) for number in range(row * per_row, end_row * per_row, per_row)]
            return Window(_join(data, header, size, pieces, ends), x, y, *size, scalable=scalable)
    if bottom == header.height:
        return whole
    at = header.frame_at + 5
    lowered = b"".join((data[:at], bottom.to_bytes(2, "big"), data[at + 2 :]))
    return Window(lowered, 0, 0, header.width, bottom, True, scalable)


def _covering(start: int, length: int, unit: int, count: int) -> tuple[int, int]:
    """Return the first of `count` units that cover a line with its margin, and the end of their range."""
    first = min(max(0, start - MARGIN) // unit, count - 1)
    return first, max(first + 1, min(count, -(-(start + length + MARGIN) // unit)))


def _join(
    data: Buffer, header: jpeg.JpegHeader, size: tuple[int, int], rows: list[tuple[int, int]], ends: list[int]
) -> bytearray:
    """Make a JPEG of `size` out of the pieces first to end - 1, for each (first, end) in `rows`."""
    at, view = header.frame_at + 5, memoryview(data)
    parts: list[Buffer] = [view[:at], struct.pack(">HH", size[1], size[0]), view[at + 4 : header.scan_at]]
    length, places = header.scan_at, []
    for first, end in rows:
        start = ends[first - 1] + 2 if first else header.scan_at
        stop = ends[end - 1] + 2
        parts.append(view[start:stop])
        moved = length + 1 - start
        places += [place + moved for place in ends[first:end]]
        length += stop - start
    joined, number = bytearray().join(parts), 0
    for place in places:
        joined[place] = jpeg.RST0 | number
        number = number + 1 & 7
    joined[-1] = jpeg.EOI
    return joined


def decode_window(data: Buffer, window: Window, box: Box, channels: int, scale: int, out: memoryview) -> Decoded:
    """Decode a window.

    Args:
        data: The JPEG that the window was cut out of.
        window: Window that `cut` returned.
        box: Box for which the window was cut.
        channels: 1 (grey) or 3 (RGB).
        scale: 1, or 2, 4 or 8 to decode at 1/2, 1/4 or 1/8 of the size, in libjpeg-turbo's inverse DCT. The box must
            lie on multiples of it.
        out: Memory, used for the pixels if it is large enough.

    Returns:
        The window's pixels, at the reduced size where it may be decoded so. Of a window that libjpeg-turbo cannot
        decode: the whole image, at its full size.

    Raises:
        ValueError: The image cannot be decoded.
    """
    scale = scale if window.scalable else 1
    fits = window.width * window.height * channels <= len(out)
    smallest = (-(-window.width // scale), -(-window.height // scale)) if scale > 1 else (0, 0)
    try:
        pixels = decode_jpeg(
            window.data,
            channels,
            smallest=smallest,
            factor=scale,
            strict=not window.ends_late,
            out=out if fits else None,
        )
    except ValueError:  # damaged, or its colours need Pillow: decode what can be decoded of the whole image
        return Decoded(decode(data, channels), box)
    left, top, width, height = box
    left, top = left - window.left, top - window.top
    return Decoded(pixels, (left // scale, top // scale, width // scale, height // scale))
