"""Pixels as binary PNM images (netpbm's P5 and P6), which Pillow and WebDataset read, with or without compression."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import ModuleType

import numpy as np

from ..errors import MissingBackendError
from . import Buffer, UndecodableError

MAGIC = {b"P5": "pnm", b"P6": "pnm", b"\x04\x22\x4d\x18": "pnm+lz4", b"\x28\xb5\x2f\xfd": "pnm+zstd"}
HEAD = re.compile(rb"P([56])\s+(\d{1,5})\s+(\d{1,5})\s+255\s")
_HEAD_BYTES = 64  # longer than any head that `encode` writes
MODULES = {"lz4": "lz4.frame", "zstd": "zstandard"}
# On photographs of 256×256 pixels, level 3 saves 1 % more than level 1 and takes 1.6 times as long.
ZSTD_LEVEL = 1


def encoding_of(data: Buffer) -> str | None:
    """Return "pnm", "pnm+lz4" or "pnm+zstd", or None for anything else."""
    return MAGIC.get(bytes(data[:4])) or MAGIC.get(bytes(data[:2]))


def encode(pixels: np.ndarray) -> bytes:
    """Encode pixels, uint8[height, width, 1 or 3], without compression."""
    height, width, channels = pixels.shape
    return b"".join((b"P%d\n%d %d\n255\n" % (5 if channels == 1 else 6, width, height), pixels.tobytes()))


def read_size(data: Buffer, max_bytes: int) -> tuple[int, int, int]:
    """Read width, height and channels. Of a compressed image, only the head is unpacked.

    Raises ValueError when it is not a PNM of 8 bits, or larger than `max_bytes`; MissingBackendError.
    """
    encoding = encoding_of(data) or "pnm"
    head = data if encoding == "pnm" else _unpack(data, encoding, _HEAD_BYTES)
    width, height, channels, start = _parse(head)
    size = start + width * height * channels
    if encoding == "pnm" and len(data) != size:
        raise ValueError(f"truncated PNM: {len(data)} bytes instead of {size}")
    if size > max_bytes:
        raise ValueError(f"{width}×{height} pixels are out of range")
    return width, height, channels


def parse(data: Buffer, max_bytes: int) -> np.ndarray:
    """Decode an image: uint8[height, width, channels], read-only. Raises ValueError, MissingBackendError.

    This never unpacks more than `max_bytes`, nor more than the image's head announces.
    """
    width, height, channels = read_size(data, max_bytes)
    encoding = encoding_of(data) or "pnm"
    if encoding != "pnm":
        data = _unpack(data, encoding, _HEAD_BYTES + width * height * channels)
    start = _parse(data)[3]
    if len(data) != start + width * height * channels:
        raise ValueError("cannot be unpacked: it holds too few or too many pixels")
    return np.frombuffer(data, np.uint8, offset=start).reshape(height, width, channels)


def compressor(name: str) -> Callable[[bytes], bytes]:
    """Return the function that compresses bytes into a single frame of "lz4" or "zstd".

    It may be called by many threads. Raises MissingBackendError.
    """
    module = _backend(name)
    if name == "lz4":
        return module.compress
    return lambda data: module.ZstdCompressor(level=ZSTD_LEVEL).compress(data)


def _parse(head: Buffer) -> tuple[int, int, int, int]:
    match = HEAD.match(head)
    if not match:
        raise ValueError("PNM without a valid header of 8 bits per sample")
    kind, width, height = (int(group) for group in match.groups())
    return width, height, 1 if kind == 5 else 3, match.end()


def _unpack(data: Buffer, encoding: str, max_bytes: int) -> bytes:
    """Unpack the first bytes, at most `max_bytes`. Raises UndecodableError for damaged data."""
    errors: tuple[type[Exception], ...] = RuntimeError, EOFError
    try:
        if encoding == "pnm+lz4":
            return _backend("lz4").LZ4FrameDecompressor().decompress(data, max_length=max_bytes)
        errors = (_backend("zstd").ZstdError,)
        return _backend("zstd").ZstdDecompressor().stream_reader(data).read(max_bytes)
    except errors as error:
        raise UndecodableError("cannot be unpacked", error) from error


def _backend(name: str) -> ModuleType:
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        package = MODULES[name].split(".")[0]
        raise MissingBackendError.for_extra(f"{package} is not installed", "compress") from error
