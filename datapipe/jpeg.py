"""JPEG headers, read without decoding (ITU-T T.81, annex B)."""

from __future__ import annotations

from typing import NamedTuple

SOI, EOI, SOS, DRI = 0xD8, 0xD9, 0xDA, 0xDD
# Start of frame: C0 to CF without DHT (C4), JPG (C8) and DAC (CC).
SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class JpegHeader(NamedTuple):
    width: int
    height: int
    components: int
    restart_interval: int  # MCUs, 0 for none


def is_jpeg(data: bytes) -> bool:
    return data[:3] == b"\xff\xd8\xff"


def read_header(data: bytes) -> JpegHeader:
    """Walk the markers up to the first scan. Raises ValueError when the bytes are no whole JPEG.

    Whole means: a frame header, a scan, and an end of image after it. The entropy-coded data between
    is not looked at.
    """
    width = height = components = restart = 0
    at = 2
    while True:
        at = data.find(b"\xff", at)
        while at >= 0 and data[at + 1 : at + 2] == b"\xff":  # fill bytes
            at += 1
        if at < 0 or at + 4 > len(data):
            raise ValueError("truncated JPEG: it ends before its first scan")
        marker = data[at + 1]
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == SOS:
            break
        if marker in SOF:
            height, width = int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
            components = data[at + 9] if at + 9 < len(data) else 0
        elif marker == DRI:
            restart = int.from_bytes(data[at + 4 : at + 6], "big")
        at += 2 + length
    if not (width and height and components):
        raise ValueError("JPEG without a frame header, or with a height of 0")
    if data.rfind(b"\xff\xd9") < at:
        raise ValueError("truncated JPEG: no end of image after its scan")
    return JpegHeader(width, height, components, restart)
