"""Headers and pixels against Pillow's."""

import contextlib
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from datapipe.image import decode, encode_png, read_header

KINDS = {
    "baseline": {"quality": 90},
    "progressive": {"progressive": True},
    "4:4:4": {"subsampling": 0},
    "restart rows": {"restart_marker_rows": 1},
    "restart blocks": {"restart_marker_blocks": 8},
    "exif": {"exif": b"Exif\x00\x00" + bytes(60)},
    "comment": {"comment": b"\xff\xd9 looks like an end"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grey", [False, True])
def test_jpeg_header_and_pixels(photo, encoded, kind, grey):
    data = encoded(photo(123, 77, 1, grey), **KINDS[kind])
    header = read_header(data)
    assert header[:4] == ("jpeg", 123, 77, 1 if grey else 3)
    blocks = {"restart rows": (123 + 7) // 8 if grey else (123 + 15) // 16, "restart blocks": 8}
    assert header.restart_interval == blocks.get(kind, 0)
    channels = header.channels
    mine = decode(data, channels)
    theirs = np.asarray(Image.open(io.BytesIO(data)).convert("L" if channels == 1 else "RGB"))
    theirs = theirs.reshape(mine.shape)
    assert mine.shape == (77, 123, channels) and np.abs(mine.astype(int) - theirs).max() <= 4


def test_cmyk_jpeg_becomes_rgb(photo):
    buffer = io.BytesIO()
    Image.fromarray(photo(40, 30, 2)).convert("CMYK").save(buffer, "JPEG")
    assert read_header(buffer.getvalue()).channels == 3
    assert decode(buffer.getvalue(), 3).shape == (30, 40, 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_any_png(photo, mode):
    image = Image.fromarray(photo(31, 17, 3))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8)
    else:
        image = image.convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    header = read_header(buffer.getvalue())
    assert header[:3] == ("png", 31, 17)
    pixels = decode(buffer.getvalue(), 3)
    assert pixels.shape == (17, 31, 3)
    wanted = (np.asarray(image) >> 8) if mode == "I;16" else np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(pixels[:, :, 0] if mode == "I;16" else pixels, wanted)


shapes = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 40)), st.tuples(st.integers(1, 40), st.integers(1, 40), st.just(3))
)


@given(arrays(np.uint8, shapes))
def test_our_png_is_read_by_pillow_and_by_ourselves(pixels):
    data = encode_png(pixels)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)
    channels = 1 if pixels.ndim == 2 else 3
    assert read_header(data) == ("png", pixels.shape[1], pixels.shape[0], channels, 0)
    np.testing.assert_array_equal(decode(data, channels), pixels.reshape(*pixels.shape[:2], channels))
    assert decode(data, 4 - channels).shape == (*pixels.shape[:2], 4 - channels)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_every_truncation_is_noticed(photo, encoded, kind):
    data = encoded(photo(64, 48, 4), kind)
    for length in [*range(0, 700, 7), *range(700, len(data), 97), len(data) - 9, len(data) - 2]:
        with pytest.raises(ValueError):
            read_header(data[:length])


def test_truncation_with_a_whole_thumbnail_inside_is_noticed(photo, encoded):
    thumbnail = encoded(photo(16, 16, 5))
    exif = Image.Exif()
    exif[0x010E] = "x"
    whole = encoded(photo(64, 48, 4), exif=exif.tobytes())
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    data = whole[:2] + segment + whole[2:]
    assert read_header(data)[:3] == ("jpeg", 64, 48)
    with pytest.raises(ValueError, match="truncated"):
        read_header(data[: len(data) // 2 + len(segment) // 2])


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"GIF89a" + bytes(50), b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n" + bytes(40)]
)
def test_what_is_no_image(data):
    with pytest.raises(ValueError):
        read_header(data)


def test_a_bomb_is_refused():
    bomb = bytearray(encode_png(np.zeros((1, 1), np.uint8)))
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    with pytest.raises(ValueError, match="out of range"):
        read_header(bytes(bomb))


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_garbage_never_breaks_out(noise, at, value):
    """Whatever the bytes, the answer is a header or a ValueError; and decoding never does worse."""
    base = encode_png(np.arange(64, dtype=np.uint8).reshape(8, 8))
    spoiled = bytearray(base)
    spoiled[at % len(base)] = value
    for data in (noise, b"\xff\xd8\xff" + noise, b"\x89PNG\r\n\x1a\n" + noise, bytes(spoiled)):
        for function in (read_header, lambda data: decode(data, 3), lambda data: decode(data, 1)):
            with contextlib.suppress(ValueError):
                function(data)
