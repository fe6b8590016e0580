"""JPEG headers, read without decoding (ITU-T T.81, annex B), and how restart markers are laid out."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from . import Buffer

SOI, EOI, SOS, DRI, APP1 = 0xD8, 0xD9, 0xDA, 0xDD, 0xE1
# Start of frame: C0 to CF without DHT (C4), JPG (C8) and DAC (CC).
SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# What libjpeg-turbo decodes: baseline, extended and progressive, the last two also with arithmetic coding. Not lossless
# (C3), and nothing differential.
_DECODED = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}
SEQUENTIAL, PROGRESSIVE, ARITHMETIC = {0xC0, 0xC1}, {0xC2, 0xC6, 0xCA, 0xCE}, frozenset(range(0xC9, 0xD0))
NOTED = SOF | {SOI, EOI, SOS, DRI, APP1}  # the other segments are skipped
RST0 = 0xD0
# Markers that no length follows: stuffed zero, TEM, RST0 to RST7. A fill byte is not a marker.
STANDALONE = frozenset([0x00, 0x01, *range(RST0, RST0 + 8)])
NO_SEGMENT = STANDALONE | {0xFF}
EXIF = b"Exif\0\0"
END_OF_IMAGE = bytes((0xFF, EOI))
ORIENTATION = 0x0112  # EXIF 2.3, section 4.6.4
TAIL_BYTES = 64  # of a file, searched first for the end of the image: some cameras pad their files

_segment = struct.Struct(">BBH").unpack_from  # 0xFF, marker, length
_frame = struct.Struct(">BHHB").unpack_from  # bits per sample, height, width, components
_short = struct.Struct(">H").unpack_from


class JpegHeader(NamedTuple):
    """What a JPEG says before its first scan. Positions are in bytes from the beginning of the file."""

    width: int
    height: int
    components: int
    restart_interval: int  # MCUs, 0 for none
    frame: int  # the SOF marker: what kind of JPEG this is
    sampling: bytes  # each component's factors, horizontal * 16 + vertical
    interleaved: bool  # the first scan holds all components
    exif: int  # where the EXIF data begin (a TIFF header), 0 for none
    frame_at: int  # where the frame header's marker lies
    scan_at: int  # where the first scan's entropy-coded data begin

    def mcu_size(self) -> tuple[int, int]:
        """Return the width and height of an MCU in pixels. With a single component it is one block (T.81, A.2.2)."""
        if self.components == 1:
            return 8, 8
        wide, high = max(factors >> 4 for factors in self.sampling), max(factors & 15 for factors in self.sampling)
        return 8 * max(wide, 1), 8 * max(high, 1)  # a factor of 0 is invalid, which the decoder refuses


def is_jpeg(data: Buffer) -> bool:
    """Return whether the bytes begin like a JPEG."""
    return data[:3] == b"\xff\xd8\xff"


def read_markers(data: Buffer) -> JpegHeader:
    """Read the markers up to the first scan. Raises ValueError unless the bytes are a whole JPEG that can be decoded.

    Whole means: a frame header, a scan, and an end of image after it. The entropy-coded data in between
    are not looked at.
    """
    frame = frame_at = restart = bits = height = width = components = exif = 0
    sampling, at = b"", 2
    try:
        while True:
            prefix, marker, length = _segment(data, at)
            if prefix != 0xFF or marker in NO_SEGMENT:
                at = _next_marker(data, at)
                continue
            if marker in NOTED:
                if marker == SOS:
                    interleaved, scan_at = data[at + 4] == components, at + 2 + length
                    break
                if marker == DRI:
                    (restart,) = _short(data, at + 4)
                elif marker == APP1:
                    exif = exif or (at + 10 if data[at + 4 : at + 10] == EXIF else 0)
                elif frame or marker not in SOF:
                    raise ValueError(f"corrupt JPEG: a second marker {marker:02X}, or one before its first scan")
                else:
                    frame, frame_at = marker, at
                    bits, height, width, components = _frame(data, at + 4)
                    sampling = bytes(data[at + 11 : at + 10 + 3 * components : 3])
            if length < 2:
                raise ValueError(f"corrupt JPEG: a segment of {length} bytes")
            at += 2 + length
    except (struct.error, IndexError):
        raise ValueError("truncated JPEG: it ends before its first scan") from None
    if not (width and height and len(sampling) == components > 0):
        raise ValueError("JPEG without a frame header, or with a height of 0")
    if frame not in _DECODED:
        raise ValueError(
            f"a JPEG of a kind that no decoder here reads: {'lossless' if frame & 3 == 3 else 'hierarchical'}"
        )
    if bits != 8:
        raise ValueError(f"a JPEG of {bits} bits per sample, which no decoder here reads")
    if not _ends(data, at):
        raise ValueError("truncated JPEG: no end of image after its scan")
    return JpegHeader(width, height, components, restart, frame, sampling, interleaved, exif, frame_at, scan_at)


def piece_ends(data: Buffer, header: JpegHeader, count: int) -> list[int] | None:
    """Locate the pieces between a JPEG's restart markers.

    Args:
        data: The JPEG.
        header: Header of the JPEG.
        count: Number of pieces that it should have.

    Returns:
        The position of the marker behind each piece, the last being the end of image; None unless there are `count`
        pieces, and the last marker has the right number.
    """
    scan_at = header.scan_at
    content = np.frombuffer(data, np.uint8, offset=scan_at)
    places = np.flatnonzero(content[:-1] == 0xFF)  # in entropy-coded data 0xFF stands before a zero or a marker
    ends = (places[content[1:][places] & 0xF8 == RST0] + scan_at).tolist()
    following = ends[count - 1 : count]  # a marker of another image behind this one
    ends = ends[: count - 1]
    last = ends[-1] if ends else scan_at
    end = last + bytes(data[last:]).find(END_OF_IMAGE)
    if len(ends) < count - 1 or end < last or (following and following[0] < end):
        return None
    if ends and data[last + 1] & 7 != (count - 2) & 7:
        return None
    return [*ends, end]


def _ends(data: Buffer, at: int) -> bool:
    """Return whether there is an end of image from `at` on. Usually it is the last two bytes."""
    return (
        (data[-2:] == END_OF_IMAGE and at <= len(data) - 2)
        or END_OF_IMAGE in bytes(data[max(at, len(data) - TAIL_BYTES) :])
        or END_OF_IMAGE in bytes(data[at:])
    )


def _next_marker(data: Buffer, at: int) -> int:
    """Skip fill bytes, garbage and markers without a length, as libjpeg does; return the position of a marker."""
    at += 2 if data[at] == 0xFF and data[at + 1] in STANDALONE else 1
    while data[at] != 0xFF:
        distance = bytes(data[at : at + 256]).find(b"\xff")
        at += distance if distance >= 0 else 256
    return at


def orientation(data: Buffer, header: JpegHeader) -> int:
    """Read the EXIF orientation: 1 to 8, and 1 (upright) where there is none, or a value that is not valid."""
    start = header.exif
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(data[start : start + 4])) if start else None
    if order is None:
        return 1
    try:
        (first,) = struct.unpack_from(order + "I", data, start + 4)
        (count,) = struct.unpack_from(order + "H", data, start + first)
        for entry in range(start + first + 2, start + first + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", data, entry)
            if tag == ORIENTATION:
                return int(value) if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def restart_interval(mcu_columns: int, desired: int) -> int:
    """Choose the restart interval, in MCUs, that divides each row of MCUs into equal pieces of about `desired` MCUs.

    It is the divisor of `mcu_columns` nearest to `desired` by ratio, at least its half and at most its double, and the
    smaller of two that are equally near; if there is none, a whole row. So the pieces of all rows form columns, and
    a rectangle of the image is made of whole pieces (see window.py).

        >>> restart_interval(mcu_columns=32, desired=5), restart_interval(mcu_columns=31, desired=5)
        (4, 31)
    """
    divisors = [n for n in range(-(-desired // 2), 2 * desired + 1) if mcu_columns % n == 0 and n <= mcu_columns]
    return min(divisors, key=lambda n: (max(n / desired, desired / n), n), default=mcu_columns)
