"""An encoded image: what its header says, its pixels, and the PNG that raw pixels become."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import NamedTuple

import numpy as np

from . import jpeg

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_COLOUR_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 1, 6: 3}  # PNG specification 11.2.2, without alpha
# Beyond this Pillow speaks of a decompression bomb, and so do we: 1/4 GiB / 3 bytes, doubled.
MAX_PIXELS = 2 * (1 << 28) // 3


class ImageHeader(NamedTuple):
    encoding: str  # "jpeg" or "png", from the bytes, whatever the file's name
    width: int
    height: int
    channels: int  # 1 or 3
    restart_interval: int


def read_header(data: bytes) -> ImageHeader:
    """Raises ValueError when the bytes are no whole JPEG or PNG, or of a bomb's size."""
    if jpeg.is_jpeg(data):
        found = jpeg.read_header(data)
        channels = 1 if found.components == 1 else 3
        header = ImageHeader("jpeg", found.width, found.height, channels, found.restart_interval)
    elif data.startswith(PNG_SIGNATURE):
        if len(data) < 33 or data[12:16] != b"IHDR" or data[25] not in PNG_COLOUR_CHANNELS:
            raise ValueError("PNG without a valid header")
        if not 0 <= data.rfind(b"IEND") <= len(data) - 8:  # its checksum follows
            raise ValueError("truncated PNG: no end chunk")
        width, height = struct.unpack_from(">II", data, 16)
        header = ImageHeader("png", width, height, PNG_COLOUR_CHANNELS[data[25]], 0)
    else:
        raise ValueError("neither JPEG nor PNG" if data else "empty file")
    if not 0 < header.width * header.height <= MAX_PIXELS or max(header.width, header.height) > 0xFFFF:
        raise ValueError(f"{header.width}×{header.height} pixels are out of range (1 to {MAX_PIXELS})")
    return header


def decode(data: bytes, channels: int) -> np.ndarray:
    """The pixels, uint8[height, width, channels], with channels 1 (grey) or 3 (RGB).

    JPEG through libjpeg-turbo, the PNG of `encode_png` directly, anything else (other PNG, CMYK)
    through Pillow. Alpha is dropped, 16-bit samples keep their upper byte. The EXIF orientation is
    not applied, as elsewhere in the field. Raises ValueError.
    """
    if jpeg.is_jpeg(data):
        import simplejpeg

        try:
            return simplejpeg.decode_jpeg(data, colorspace="GRAY" if channels == 1 else "RGB")
        except ValueError:  # CMYK, or truly broken: then Pillow says so
            pass
    elif (plain := _decode_plain_png(data, channels)) is not None:
        return plain
    return _decode_pillow(data, channels)


def _decode_pillow(data: bytes, channels: int) -> np.ndarray:
    from PIL import Image

    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # read_header has the bound
            if image.mode.startswith("I"):  # 16-bit grey: convert() would clip it to white
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError) as e:
        raise ValueError(f"cannot be decoded: {e}") from e
    return pixels.reshape(*pixels.shape[:2], channels)


def encode_png(pixels: np.ndarray) -> bytes:
    """uint8[height, width] or [height, width, 3] as a PNG without row filters.

    Filters gain nothing on images of this size (Fashion-MNIST: 516 bytes against 507), and without
    them encoding takes a quarter and decoding a fifth of Pillow's time.
    """
    height, width = pixels.shape[:2]
    rows = np.zeros((height, 1 + pixels[0].size), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    colour = 0 if pixels.ndim == 2 else 2
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.data, 6)), (b"IEND", b"")
    return PNG_SIGNATURE + b"".join(_png_chunk(name, body) for name, body in chunks)


def _png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(body, zlib.crc32(name)))


def _decode_plain_png(data: bytes, channels: int) -> np.ndarray | None:
    """Decode what `encode_png` wrote; None for any other PNG."""
    layout = bytes((8, 0 if channels == 1 else 2, 0, 0, 0))  # depth, colour, deflate, filters, no interlacing
    if data[24:29] != layout or data[37:41] != b"IDAT" or data[-8:-4] != b"IEND":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    (length,) = struct.unpack_from(">I", data, 33)
    if 41 + length + 4 + 12 != len(data):
        return None
    try:
        rows = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8)
    except zlib.error as error:
        raise ValueError(f"cannot be decoded: {error}") from error
    if rows.size != height * (1 + width * channels):
        raise ValueError("cannot be decoded: the PNG holds too few pixels")
    rows = rows.reshape(height, -1)
    return None if rows[:, 0].any() else rows[:, 1:].reshape(height, width, channels)
