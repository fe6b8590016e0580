"""Headers and pixels against Pillow's."""

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from datapipe.errors import MissingBackendError
from datapipe.images import jpeg, pnm
from datapipe.images.codec import decode, encode_jpeg, encode_png, read_header

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
    starts = b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"P6 3 3 255\n", b"P5"
    for data in (*(start + noise for start in starts), bytes(spoiled), memoryview(spoiled)):
        for function in (read_header, lambda data: decode(data, 3), lambda data: decode(data, 1)):
            with contextlib.suppress(ValueError):
                function(data)


@given(draws=st.data())
def test_a_spoiled_jpeg_never_breaks_out(photo, encoded, draws):
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = encoded(photo(40, 30, 1), exif=exif, restart_marker_blocks=2)
    spoiled = bytearray(whole)
    for _ in range(draws.draw(st.integers(1, 6))):
        spoiled[draws.draw(st.integers(2, 700))] = draws.draw(st.sampled_from([0, 1, 0xFF, 0xD8, 0xC0, 0xDA, 0x7F]))
    spoiled = spoiled[: draws.draw(st.integers(1, len(whole)))] + draws.draw(st.sampled_from([b"", b"\xff\xd9"]))
    with contextlib.suppress(ValueError):
        read_header(spoiled)
        found = jpeg.read_markers(spoiled)
        assert 1 <= jpeg.orientation(spoiled, found) <= 8
        assert min(found.mcu_size()) >= 8
        if found.width * found.height < 1 << 20:
            decode(spoiled, 3)


def test_damaged_exif_data_bring_no_warning(photo):
    """Of an image that is damaged, so that Pillow has a look at it: a tag is larger than the file."""
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.fromarray(photo(40, 30, 1)).convert("CMYK").save(buffer, "JPEG", exif=exif)
    whole = buffer.getvalue()
    at = whole.index(b"MM\0*") + 8 + 2 + 4  # the number of the first tag's values
    spoiled = whole[:at] + b"\0\0\xff\xff" + whole[at + 4 : -100] + b"\xff\xd9"
    assert decode(spoiled, 3).shape == (30, 40, 3)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))])
def test_any_buffer_will_do(photo, encoded, kind):
    for data in (encoded(photo(61, 43, 1)), encode_png(photo(61, 43, 2)), pnm.encode(photo(61, 43, 3))):
        assert read_header(kind(data)) == read_header(data)
        np.testing.assert_array_equal(decode(kind(data), 3), decode(data, 3))


def test_what_follows_the_end_of_a_jpeg_does_not_matter(photo, encoded):
    data = encoded(photo(61, 43, 1))
    assert read_header(data + bytes(1000)) == read_header(data)
    with pytest.raises(ValueError, match="no end of image"):
        read_header(data[:-2] + bytes(1000))


@pytest.mark.parametrize(
    ("options", "grey", "size"),
    [
        ({"subsampling": "4:2:0"}, False, (16, 16)),
        ({"subsampling": "4:2:2"}, False, (16, 8)),
        ({"subsampling": "4:4:4"}, False, (8, 8)),
        ({}, True, (8, 8)),
    ],
)
def test_the_size_of_an_mcu(photo, encoded, options, grey, size):
    found = jpeg.read_markers(encoded(photo(50, 50, 1, grey), **options))
    assert found.mcu_size() == size and found.interleaved
    assert (found.frame in jpeg.PROGRESSIVE) is False


def test_the_mcu_of_a_single_component_is_a_block_whatever_its_factors(photo, encoded):
    data = bytearray(encoded(photo(50, 50, 1, True)))
    data[data.index(b"\xff\xc0") + 11] = 0x22
    assert jpeg.read_markers(data).mcu_size() == (8, 8)


def test_cmyk_and_progressive_are_in_the_header(photo):
    buffer = io.BytesIO()
    Image.fromarray(photo(40, 30, 2)).convert("CMYK").save(buffer, "JPEG", progressive=True)
    found = jpeg.read_markers(buffer.getvalue())
    assert found.components == 4 and found.frame in jpeg.PROGRESSIVE


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("value", range(10))
def test_the_orientation(photo, encoded, order, value):
    exif = Image.Exif()
    exif.endian = order
    exif[0x010E], exif[0x0112] = "x", value
    data = encoded(photo(40, 30, 1), exif=exif.tobytes())
    assert jpeg.orientation(data, jpeg.read_markers(data)) == (value if 1 <= value <= 8 else 1)
    assert jpeg.orientation(encoded(photo(40, 30, 1)), jpeg.read_markers(encoded(photo(40, 30, 1)))) == 1


@pytest.mark.parametrize(
    ("columns", "wanted", "interval"),
    [
        (32, 8, 8),
        (22, 8, 11),
        (24, 8, 8),
        (30, 8, 10),  # 6: a ratio of 1.33; 10: 1.25
        (36, 6, 6),
        (8, 4, 4),
        (10, 4, 5),  # 2 and 5
        (31, 8, 31),  # a prime number: whole rows
        (7, 8, 7),
        (3, 8, 3),  # shorter than any interval wanted
        (1, 1, 1),
        (32, 1, 1),
        (13, 1, 1),
        (18, 4, 3),  # 3: 1.33; 6: 1.5
        (8, 3, 4),
        (2, 1, 1),
    ],
)
def test_restart_intervals_cut_rows_evenly(columns, wanted, interval):
    assert jpeg.restart_interval(columns, wanted) == interval


@given(st.integers(1, 8192), st.integers(1, 0xFFFF))
def test_a_restart_interval_divides_a_row_and_is_near_or_the_row(columns, wanted):
    interval = jpeg.restart_interval(columns, wanted)
    assert columns % interval == 0
    assert wanted / 2 <= interval <= 2 * wanted or interval == columns


@pytest.mark.parametrize("name", [None, "lz4", "zstd"])
@pytest.mark.parametrize("grey", [False, True])
def test_pnm(photo, name, grey):
    pixels = photo(61, 43, 1, grey).reshape(43, 61, -1)
    plain = data = pnm.encode(pixels)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(plain))).reshape(pixels.shape), pixels)
    if name:
        pytest.importorskip(pnm.MODULES[name])
        data = pnm.compressor(name)(plain)
    assert read_header(data) == (f"pnm+{name}" if name else "pnm", 61, 43, 1 if grey else 3, 0)
    for channels in (1, 3):
        theirs = Image.fromarray(pixels.squeeze()).convert("L" if channels == 1 else "RGB")
        np.testing.assert_array_equal(decode(data, channels), np.asarray(theirs).reshape(43, 61, channels))
    for length in [*range(2, 70), *range(70, len(data), 97)]:
        with pytest.raises(ValueError):
            decode(data[:length], 3)
        if not name:
            with pytest.raises(ValueError):
                read_header(data[:length])


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_a_compressed_bomb_is_not_unpacked(name):
    pytest.importorskip(pnm.MODULES[name])
    compress = pnm.compressor(name)
    with pytest.raises(ValueError, match="out of range"):
        read_header(compress(b"P6\n60000 60000\n255\n" + bytes(1000)))
    much = compress(b"P6\n2 2\n255\n" + bytes(50_000_000))
    assert read_header(much)[1:4] == (2, 2, 3)
    with pytest.raises(ValueError, match="too many"):
        decode(much, 3)


def test_a_missing_compression_names_the_extra(monkeypatch):
    monkeypatch.setitem(pnm.MODULES, "lz4", "no_such_package.frame")
    with pytest.raises(MissingBackendError, match=r"pip install '\.\[compress\]'"):
        pnm.compressor("lz4")


def test_a_jpeg_is_decoded_smaller_where_that_is_allowed(photo, encoded):
    data = encoded(photo(640, 480, 1), quality=95)
    small = decode(data, 3, smallest=(150, 100))
    assert small.shape == (120, 160, 3) and decode(data, 3).shape == (480, 640, 3)
    whole = np.asarray(Image.open(io.BytesIO(data)).reduce(4)).astype(int)
    assert np.abs(small - whole).mean() < 2


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_strictness(photo, mode):
    """Decoders fill up data that end too early."""
    buffer = io.BytesIO()
    Image.fromarray(photo(64, 48, 1)).convert(mode).save(buffer, "JPEG")
    data = buffer.getvalue()
    damaged = data[: len(data) * 2 // 3] + b"\xff\xd9"
    for smallest in ((0, 0), (1, 1)):
        decode(data, 3, strict=True, smallest=smallest)
        decode(damaged, 3, smallest=smallest)
        with pytest.raises(ValueError, match="cannot be decoded"):
            decode(damaged, 3, strict=True, smallest=smallest)


@pytest.mark.parametrize("grey", [False, True])
def test_our_jpeg(photo, grey):
    pixels = photo(123, 77, 1, grey).reshape(77, 123, -1)
    data = encode_jpeg(pixels, 95, 4)
    assert read_header(data) == ("jpeg", 123, 77, 1 if grey else 3, 4)
    theirs = np.asarray(Image.open(io.BytesIO(data))).reshape(pixels.shape).astype(int)
    assert np.abs(theirs - pixels).mean() < 6


def test_a_palette_png_without_its_palette_cannot_be_decoded():
    """Pillow ends in an AssertionError there."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", 8, 1, 1, 3, 0, 0, 0)
    chunks = (b"IHDR", header), (b"tRNS", b"\0"), (b"IDAT", zlib.compress(b"\0\0")), (b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*parts) for parts in chunks)
    for channels in (1, 3):
        with pytest.raises(ValueError, match="cannot be decoded"):
            decode(data, channels)


def test_a_png_with_more_pixels_than_any_image_may_have_is_not_unpacked():
    small = encode_png(np.zeros((1, 1), np.uint8))
    claims = small[:16] + struct.pack(">II", 60_000, 60_000) + small[24:29]
    head = claims[12:29]
    bomb = claims + struct.pack(">I", zlib.crc32(head)) + small[33:]
    with pytest.raises(ValueError, match="exceeds limit"):
        decode(bomb, 1)
