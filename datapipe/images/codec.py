"""An encoded image: what its header says, its pixels, and the PNG or JPEG that pixels become."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from typing import NamedTuple

import numpy as np

from . import Buffer, jpeg, pnm

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_COLOUR_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 1, 6: 3}  # PNG specification 11.2.2, without alpha
# Beyond this Pillow speaks of a decompression bomb, and so do we: 1/4 GiB / 3 bytes, doubled.
MAX_PIXELS = 2 * (1 << 28) // 3


class ImageHeader(NamedTuple):
    encoding: str  # of index.ENCODINGS, from the bytes, whatever the file's name
    width: int
    height: int
    channels: int  # 1 or 3
    restart_interval: int


def read_header(data: Buffer) -> ImageHeader:
    """Raises ValueError when the bytes are no whole JPEG, PNG or PNM, or of a bomb's size.

    A compressed PNM is not unpacked beyond its head: `decode` tells whether it is whole.
    """
    if jpeg.is_jpeg(data):
        found = jpeg.read_header(data)
        channels = 1 if found.components == 1 else 3
        header = ImageHeader("jpeg", found.width, found.height, channels, found.restart_interval)
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
    """Where `part` is last found, -1 for nowhere. Mostly that is near the end, and `data` need not be copied."""
    tail = max(0, len(data) - 64)
    found = bytes(data[tail:]).rfind(part)
    return tail + found if found >= 0 else bytes(data).rfind(part)


def png_bits(data: Buffer) -> int:
    """Bits a sample of a PNG that `read_header` takes: 1 to 16."""
    return data[24]


def decode(data: Buffer, channels: int, *, smallest: tuple[int, int] = (0, 0), strict: bool = False) -> np.ndarray:
    """The pixels, uint8[height, width, channels], with channels 1 (grey) or 3 (RGB).

    JPEG through libjpeg-turbo, PNM and the PNG of `encode_png` directly, anything else (other PNG, CMYK)
    through Pillow. Alpha is dropped, 16-bit samples keep their upper byte. The EXIF orientation is
    not applied, as elsewhere in the field.

    `smallest`, a width and height, allows a JPEG to be decoded at an eighth to a half of its size, but no smaller
    than that, which is faster. `strict` refuses damaged JPEG data, which otherwise are made the best of.
    Raises ValueError, MissingBackendError.
    """
    if jpeg.is_jpeg(data):
        try:
            return decode_jpeg(data, channels, smallest=smallest)
        except ValueError as error:
            if strict:
                if jpeg.read_header(data).components != 4:
                    raise ValueError(f"cannot be decoded: {error}") from error
                _check_cmyk(data)
    elif pnm.encoding_of(data):
        return _in_channels(pnm.decode(data, 3 * MAX_PIXELS), channels)
    elif (plain := _decode_plain_png(data, channels)) is not None:
        return plain
    return _decode_pillow(data, channels)


def check_image(data: Buffer) -> ImageHeader:
    """Decode an image strictly, a JPEG at an eighth of its size (which looks at all of its data); return its header.

    Raises ValueError for whatever a decoder warns of, MissingBackendError.
    """
    header = read_header(data)
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
    """What of `decode` libjpeg-turbo does: uint8[height, width, channels], in `out`, if that is given.

    `smallest` and `factor`: decode at a smaller size, at least `smallest` (width, height), at most 1/`factor`. Without
    `strict`, damage is made the best of. Raises ValueError, also for an image that it has no grey or RGB for.
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
    """simplejpeg makes no RGB of CMYK, but sees damage where Pillow does not."""
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, "CMYK", min_factor=8)
    except ValueError as error:
        raise ValueError(f"cannot be decoded: {error}") from error


def _in_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]


# What Pillow runs into with damaged files, beside its own errors.
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, AssertionError, TypeError,
                 IndexError, AttributeError, OverflowError)  # fmt: skip


def _decode_pillow(data: Buffer, channels: int) -> np.ndarray:
    from PIL import Image

    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # read_header has the bound
            if image.mode.startswith("I"):  # 16-bit grey: convert() would clip it to white
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except (*PILLOW_ERRORS, Image.DecompressionBombError) as e:
        raise ValueError(f"cannot be decoded: {e}") from e
    return pixels.reshape(*pixels.shape[:2], channels)


def encode_jpeg(pixels: np.ndarray, quality: int, restart_interval: int = 0) -> bytes:
    """uint8[height, width, 1 or 3] as a baseline JPEG, in colour 4:2:0, with restart markers every so many MCUs."""
    from PIL import Image

    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    # Into a file, if only in memory, Pillow encodes without the interpreter's lock; into a BytesIO it keeps it.
    with os.fdopen(os.memfd_create("jpeg"), "r+b", buffering=0) as file:
        image.save(file, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_blocks=restart_interval)
        return os.pread(file.fileno(), file.tell(), 0)


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
        rows = np.frombuffer(unpacker.decompress(data[41 : 41 + length], size + 1), np.uint8)  # no bomb's bytes
    except zlib.error as error:
        raise ValueError(f"cannot be decoded: {error}") from error
    if rows.size != size or not unpacker.eof:
        raise ValueError("cannot be decoded: the PNG holds too few or too many pixels")
    rows = rows.reshape(height, -1)
    return None if rows[:, 0].any() else rows[:, 1:].reshape(height, width, channels)
