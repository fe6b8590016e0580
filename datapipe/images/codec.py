"""Encoded images: read their headers, decode them, and encode pixels as PNG or JPEG."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from typing import NamedTuple

import numpy as np

from .. import native
from . import Buffer, UndecodableError, jpeg, pnm

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_COLOUR_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 1, 6: 3}  # PNG specification 11.2.2, without alpha
# Larger images are refused, as Pillow refuses them as decompression bombs: 1/4 GiB / 3 bytes, doubled.
MAX_PIXELS = 2 * (1 << 28) // 3


class ImageHeader(NamedTuple):
    """What an image's first bytes say of it."""

    encoding: str  # one of index.ENCODINGS: from the bytes, not from a file's name
    width: int
    height: int
    channels: int  # 1 or 3
    restart_interval: int  # of a JPEG, in MCUs; 0 for none


def read_header(data: Buffer) -> ImageHeader:
    """Read an image's header. Raises ValueError unless the bytes are a whole JPEG, PNG or PNM of an allowed size.

    Of a compressed PNM only the head is unpacked: whether the rest is whole, `decode` finds out.
    """
    if jpeg.is_jpeg(data):
        frame = jpeg.read_markers(data)
        channels = 1 if frame.components == 1 else 3
        header = ImageHeader("jpeg", frame.width, frame.height, channels, frame.restart_interval)
    elif data[:8] == PNG_SIGNATURE:
        if len(data) < 33 or data[12:16] != b"IHDR" or data[25] not in PNG_COLOUR_CHANNELS:
            raise ValueError("PNG without a valid header")
        if not 0 <= _last(data, b"IEND") <= len(data) - 8:  # its checksum follows
            raise ValueError("truncated PNG: no end chunk")
        width, height = struct.unpack_from(">II", data, 16)
        header = ImageHeader("png", width, height, PNG_COLOUR_CHANNELS[data[25]], 0)
    elif encoding := pnm.encoding_of(data):
        header = ImageHeader(encoding, *pnm.read_size(data, 3 * MAX_PIXELS), 0)
    else:
        raise ValueError("neither JPEG, PNG nor PNM" if data else "empty file")
    if not 0 < header.width * header.height <= MAX_PIXELS or max(header.width, header.height) > 0xFFFF:
        raise ValueError(f"{header.width}×{header.height} pixels are out of range (1 to {MAX_PIXELS})")
    return header


def _last(data: Buffer, part: bytes) -> int:
    """Return where `part` occurs last, -1 for nowhere. It is usually near the end: then `data` is not copied."""
    tail = max(0, len(data) - 64)
    place = bytes(data[tail:]).rfind(part)
    return tail + place if place >= 0 else bytes(data).rfind(part)


def png_bits(data: Buffer) -> int:
    """Return the bits per sample, 1 to 16, of a PNG that `read_header` accepts."""
    return data[24]


def decode(data: Buffer, channels: int, *, smallest: tuple[int, int] = (0, 0), strict: bool = False) -> np.ndarray:
    """Decode an image.

    JPEG is decoded by libjpeg-turbo; PNM and the PNG of `encode_png` here; everything else (other PNG, CMYK) by
    Pillow. Alpha is dropped, and samples of 16 bits keep their upper byte. The EXIF orientation is not applied, as
    is usual in loaders.

    Args:
        data: Encoded image.
        channels: 1 (grey) or 3 (RGB).
        smallest: Width and height. A JPEG may be decoded at a half, a quarter or an eighth of its size, which is
            faster, as long as it is not smaller than this; (0, 0) is its full size.
        strict: Whether to refuse a damaged JPEG instead of decoding what can be decoded.

    Returns:
        Pixels, uint8[height, width, channels].

    Raises:
        ValueError: The image cannot be decoded.
        MissingBackendError: Its compression needs a library that is not installed.
    """
    if jpeg.is_jpeg(data):
        try:
            return decode_jpeg(data, channels, smallest=smallest)
        except ValueError as error:
            if strict:
                if jpeg.read_markers(data).components != 4:
                    raise UndecodableError("cannot be decoded", error) from error
                _check_cmyk(data)
    elif pnm.encoding_of(data):
        return _in_channels(pnm.parse(data, 3 * MAX_PIXELS), channels)
    elif (plain := _decode_plain_png(data, channels)) is not None:
        return plain
    return _decode_pillow(data, channels)


def check_image(data: Buffer) -> ImageHeader:
    """Decode an image strictly and return its header.

    Of a JPEG all of its data are read: by the decoder in C, which decodes no pixels for that, or at an eighth of its
    size. Raises ValueError for whatever a decoder warns of, MissingBackendError.
    """
    header = read_header(data)
    library = native.choose().native
    if not (library and header.encoding == "jpeg" and library.accepts(data, header.width, header.height)):
        decode(data, header.channels, smallest=(1, 1), strict=True)
    return header


def decode_jpeg(
    data: Buffer,
    channels: int,
    *,
    smallest: tuple[int, int] = (0, 0),
    factor: int = 1,
    strict: bool = True,
    out: memoryview | None = None,
) -> np.ndarray:
    """Decode a JPEG by libjpeg-turbo.

    Args:
        data: The JPEG.
        channels: 1 (grey) or 3 (RGB).
        smallest: Width and height; the image may be decoded smaller, but no smaller than this. (0, 0): its full size.
        factor: Least factor by which the size is divided: 1, 2, 4 or 8.
        strict: Whether to refuse damaged data instead of decoding what can be decoded.
        out: Memory for the pixels; new memory by default.

    Returns:
        Pixels, uint8[height, width, channels].

    Raises:
        ValueError: It cannot be decoded, or libjpeg-turbo does not convert its colours to grey or RGB.
    """
    import simplejpeg

    return simplejpeg.decode_jpeg(
        data,
        "GRAY" if channels == 1 else "RGB",
        min_width=smallest[0],
        min_height=smallest[1],
        min_factor=factor,
        buffer=out,
        strict=strict,
    )


def _check_cmyk(data: Buffer) -> None:
    """Raise ValueError for a damaged CMYK image: simplejpeg cannot convert it to RGB, but sees damage Pillow misses."""
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, "CMYK", min_factor=8)
    except ValueError as error:
        raise UndecodableError("cannot be decoded", error) from error


def _in_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]


# What Pillow raises on damaged files, besides its own errors.
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, AssertionError, TypeError,
                 IndexError, AttributeError, OverflowError)  # fmt: skip


def _decode_pillow(data: Buffer, channels: int) -> np.ndarray:
    from PIL import Image

    try:
        # Pillow warns of many pixels, which read_header has bounded, and of damaged EXIF data, which nothing here uses.
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data)) as image:
            whole: Image.Image = image
            if image.mode.startswith("I"):  # 16-bit grey: convert() would clip it to white
                whole = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            pixels = np.asarray(whole.convert("L" if channels == 1 else "RGB"))
    except (*PILLOW_ERRORS, Image.DecompressionBombError) as e:
        raise UndecodableError("cannot be decoded", e) from e
    return pixels.reshape(*pixels.shape[:2], channels)


def encode_jpeg(pixels: np.ndarray, quality: int, restart_interval: int = 0) -> bytes:
    """Encode a baseline JPEG, colour as 4:2:0.

    Args:
        pixels: Pixels of the image, uint8[height, width, 1 or 3].
        quality: 1 to 100.
        restart_interval: MCUs between restart markers, 0 for none.

    Returns:
        The JPEG.

    Raises:
        OSError: A side is longer than 65,500 pixels.
    """
    from PIL import Image

    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    # Pillow releases the interpreter's lock when it encodes into a file, even one in memory, but not into a BytesIO.
    with os.fdopen(os.memfd_create("jpeg"), "r+b", buffering=0) as file:
        image.save(file, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_blocks=restart_interval)
        return os.pread(file.fileno(), file.tell(), 0)


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode pixels (uint8[height, width] or [height, width, 3]) as a PNG without row filters.

    Filters save nothing on small images (Fashion-MNIST: 516 bytes with them, 507 without), and without
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


def _decode_plain_png(data: Buffer, channels: int) -> np.ndarray | None:
    """Decode what `encode_png` wrote; None for any other PNG."""
    layout = bytes((8, 0 if channels == 1 else 2, 0, 0, 0))  # depth, colour, deflate, filters, no interlacing
    if data[24:29] != layout or data[37:41] != b"IDAT" or data[-8:-4] != b"IEND":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    (length,) = struct.unpack_from(">I", data, 33)
    if 41 + length + 4 + 12 != len(data) or width * height > MAX_PIXELS:
        return None
    size = height * (1 + width * channels)
    unpacker = zlib.decompressobj()
    try:
        unpacked = unpacker.decompress(data[41 : 41 + length], size + 1)  # never more memory than that
    except zlib.error as error:
        raise UndecodableError("cannot be decoded", error) from error
    if len(unpacked) != size or not unpacker.eof:
        raise ValueError("cannot be decoded: the PNG holds too few or too many pixels")
    rows = np.frombuffer(unpacked, np.uint8).reshape(height, -1)
    return None if rows[:, 0].any() else rows[:, 1:].reshape(height, width, channels)
