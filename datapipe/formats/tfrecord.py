"""TFRecord shards: a tf.train.Example per sample, with the features of TensorFlow's ImageNet scripts.

    image/encoded      bytes, the image        image/class/label  int64, from 0
    image/format       bytes, JPEG or PNG      image/filename     bytes, the key
    image/height, image/width, image/channels  int64

A record is the length, its checksum, the Example and its checksum. Checksums are masked CRC-32C
(tensorflow/core/lib/io/record_writer.h). The Example (tensorflow/core/example/example.proto) is encoded here, so that
the image, which comes last, is written without a copy. Beside each shard lies the index that DALI and the package
`tfrecord` read (`.idx`: offset and length of each record).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from ..errors import MissingBackendError
from ..images import Buffer
from ..images.codec import ImageHeader
from . import Finished

SUFFIX = ".tfrecord"
# Lengths and checksums 16, the features' names, tags and numbers 180, the key.
OVERHEAD_BYTES = 256
CRC_MASK = 0xA282EAD8


class Writer:
    """Lays out a TFRecord shard. Raises MissingBackendError without the package `crc32c`."""

    head = b""

    def __init__(self) -> None:
        try:
            from crc32c import crc32c
        except ImportError as error:
            raise _missing("crc32c") from error
        self._crc32c = crc32c
        self._position = 0
        self._offsets: list[int] = []
        self._index: list[str] = []

    def add(self, key: str, label: int, data: Buffer, header: ImageHeader) -> Sequence[Buffer]:
        before = _example_before(key, label, len(data), header)
        length = (len(before) + len(data)).to_bytes(8, "little")
        opening = length + _masked(self._crc32c(length)) + before
        closing = _masked(self._crc32c(data, self._crc32c(before)))
        begin, image_at = self._position, self._position + len(opening)
        self._position = image_at + len(data) + len(closing)
        self._offsets.append(image_at)
        self._index.append(f"{begin} {self._position - begin}\n")
        return opening, data, closing

    def finish(self) -> Finished:
        return Finished(b"", {}, self._offsets, {".idx": "".join(self._index).encode()})


def _masked(crc: int) -> bytes:
    return ((crc >> 15 | crc << 17) + CRC_MASK & 0xFFFFFFFF).to_bytes(4, "little")


def _example_before(key: str, label: int, size: int, header: ImageHeader) -> bytes:
    """Encode the Example except the image's `size` bytes, which come last."""
    features = (
        _number_feature(b"image/height", header.height),
        _number_feature(b"image/width", header.width),
        _number_feature(b"image/channels", header.channels),
        _number_feature(b"image/class/label", label),
        _format_feature(header.encoding),
        _bytes_feature(FILENAME, key.encode()),
        _bytes_feature(ENCODED, b"", size),
    )
    return _field(FIELD_1, b"".join(features), size)


def _bytes_feature(name: bytes, value: bytes, more: int = 0) -> bytes:
    """Encode an entry of the map `Features.feature`: a name, and a Feature of a BytesList (1) of one value (1)."""
    values = _field(FIELD_1, _field(FIELD_1, value, more), more)
    return _field(FIELD_1, name + _field(FIELD_2, values, more), more)


@lru_cache(64)
def _format_feature(encoding: str) -> bytes:
    return _bytes_feature(_field(FIELD_1, b"image/format"), encoding.upper().encode())


@lru_cache(1 << 14)
def _number_feature(name: bytes, value: int) -> bytes:
    """Encode an entry as `_bytes_feature` does, with an Int64List (field 3) of packed numbers."""
    values = _field(FIELD_3, _field(FIELD_1, _varint(value)))
    return _field(FIELD_1, _field(FIELD_1, name) + _field(FIELD_2, values))


def _field(tag: bytes, content: bytes, more: int = 0) -> bytes:
    """Encode a length-delimited field of a protobuf message, of which `more` bytes follow these."""
    return tag + _varint(len(content) + more) + content


def _varint(value: int) -> bytes:
    """Encode a number, seven bits per byte, the lowest first; the eighth bit says that more follow."""
    if value < 0x80:
        return ONE_BYTE[value]
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


# A field's number, and 2 for "length-delimited" (protobuf.dev, Encoding).
FIELD_1, FIELD_2, FIELD_3 = (bytes((number << 3 | 2,)) for number in (1, 2, 3))
ONE_BYTE = [bytes((value,)) for value in range(0x80)]
FILENAME, ENCODED = (_field(FIELD_1, name) for name in (b"image/filename", b"image/encoded"))


def read(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield key, image and label of every sample, through the package tfrecord."""
    try:
        from tfrecord.reader import tfrecord_loader
    except ImportError as error:
        raise _missing("tfrecord") from error
    for example in tfrecord_loader(str(path), None):
        yield example["image/filename"].decode(), example["image/encoded"], int(example["image/class/label"][0])


def _missing(package: str) -> MissingBackendError:
    return MissingBackendError.for_extra(f"TFRecord shards need the package {package}", "tfrecord")
