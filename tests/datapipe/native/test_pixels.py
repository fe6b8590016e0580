"""The decoder in C gives the pixels of libjpeg-turbo's whole decode and torch's resize, to the bit, or none."""

from __future__ import annotations

import functools
import io
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import simplejpeg
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from datapipe import native
from datapipe.images import pnm
from datapipe.images.codec import decode
from datapipe.images.window import cut, decode_window
from datapipe.loaders.batch_slots import ImageSlots
from datapipe.loaders.image_chunk import ChunkInMemory
from datapipe.loaders.native_pixels import decode_in_c
from datapipe.loaders.resize import crop_resize_flip

SUBSAMPLINGS = ("444", "422", "440", "420", "411", "Gray")
PILLOW = {"444": "4:4:4", "422": "4:2:2", "420": "4:2:0"}  # by which restart markers are written, too


class Case(NamedTuple):
    """An image, and what is cut out of it."""

    width: int
    height: int
    subsampling: str
    quality: int
    detail: int  # 0: a smooth picture; 100: noise
    interval: int  # MCUs between restart markers; 0: none
    optimised: bool  # Huffman tables of its own
    box: tuple[int, int, int, int]
    size: int
    flip: bool
    channels: int


@functools.lru_cache(64)
def picture(width, height, detail):
    random = np.random.default_rng(width * height + detail)
    y, x = np.mgrid[0:height, 0:width] / 16
    waves = [np.sin(a * x + b) * np.cos(c * y + b) for a, b, c in random.uniform(0, 4, (3, 3))]
    noise = random.normal(0, 1.2 * detail + 0.1, (height, width, 3))
    return (128 + 90 * np.stack(waves, axis=2) + noise).clip(0, 255).astype(np.uint8)


def encoded(case):
    pixels = picture(case.width, case.height, case.detail)
    if case.subsampling in PILLOW or case.subsampling == "Gray":
        image = Image.fromarray(pixels)
        options = {"restart_marker_blocks": case.interval, "optimize": case.optimised, "quality": case.quality}
        if case.subsampling == "Gray":
            image = image.convert("L")
        else:
            options["subsampling"] = PILLOW[case.subsampling]
        buffer = io.BytesIO()
        with mock.patch.object(ImageFile, "MAXBLOCK", 1 << 22):  # Pillow's room for noise is too small
            image.save(buffer, "JPEG", **options)
        return buffer.getvalue()
    return simplejpeg.encode_jpeg(pixels, case.quality, colorsubsampling=case.subsampling)


@st.composite
def cases(draw, max_side=90, max_size=70):
    width, height = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    size = draw(st.integers(1, max_size))
    if draw(st.integers(0, 5)):
        left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
        box = left, top, draw(st.integers(1, width - left)), draw(st.integers(1, height - top))
    else:  # beyond the image's edges, too
        box = draw(st.integers(1 - size, width - 1)), draw(st.integers(1 - size, height - 1)), size, size
    interval = draw(st.one_of(st.just(0), st.integers(1, 12)))
    kind = draw(st.sampled_from(SUBSAMPLINGS)), draw(st.integers(1, 100)), draw(st.sampled_from((0, 5, 100)))
    rest = draw(st.booleans()), draw(st.sampled_from((3, 3, 1)))
    return Case(width, height, *kind, interval, draw(st.booleans()), box, size, *rest)


def drawn(library, data, case, scale=1, only_pixels=False):
    """Return what the library makes of an image; None if it leaves it to others."""
    images = np.full((1, case.size, case.size, case.channels), 77, np.uint8)
    slots = ImageSlots(np.arange(1), 1, images)
    jobs = np.zeros(1, native.JOB)
    jobs["width"], jobs["height"], jobs["box"] = case.width, case.height, case.box
    jobs["scale"], jobs["flip"] = scale, case.flip
    chunk = ChunkInMemory([0], np.arange(1), jobs, [data])
    chunk.only_pixels = only_pixels
    left, stage_s = decode_in_c(library, slots, chunk)
    assert stage_s.keys() == {"read", "decode", "resize"} and min(stage_s.values()) >= 0
    return None if left else images[0]


def expected(pixels, case):
    out = np.zeros((case.size, case.size, case.channels), np.uint8)
    crop_resize_flip(pixels, case.box, case.flip, out)
    return out


def check(library, case):
    data = encoded(case)
    pixels = simplejpeg.decode_jpeg(data, "GRAY" if case.channels == 1 else "RGB")
    want = expected(pixels, case)
    for kind, bytes_ in (("JPEG", data), ("PNM", pnm.encode(pixels)), ("pixels", pixels.tobytes())):
        got = drawn(library, bytes_, case, only_pixels=kind == "pixels")
        assert got is not None, f"{kind} was refused"
        assert np.array_equal(got, want), kind


@settings(max_examples=150)
@example(Case(500, 375, "420", 90, 5, 0, False, (31, 17, 402, 301), 224, True, 3))
@example(Case(17, 9, "420", 100, 100, 1, True, (16, 8, 1, 1), 5, False, 3))
@example(Case(65_500, 2, "420", 90, 5, 0, False, (64_990, 0, 510, 2), 16, True, 3))  # libjpeg's largest side
@example(Case(2, 65_500, "Gray", 90, 5, 1, True, (0, 0, 2, 65_500), 3, False, 1))
@example(Case(3, 40, "420", 90, 5, 0, False, (0, 0, 3, 40), 7, False, 3))  # 2 samples of chroma: not interpolated
@given(cases())
def test_the_same_pixels(library_of_session, case):
    for library in library_of_session:
        check(library, case)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(cases(max_side=300, max_size=260))
def test_the_same_pixels_of_many(library_of_session, case):
    for library in library_of_session:
        check(library, case)


CASE = Case(48, 40, "420", 90, 5, 0, False, (3, 4, 30, 31), 24, False, 3)


def saved(mode="RGB", **options):
    buffer = io.BytesIO()
    Image.fromarray(picture(48, 40, 5)).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def other_size(data):
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + (41).to_bytes(2, "big") + data[at + 7 :]


def with_adobe(data, transform):
    return data[:2] + b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([transform]) + data[2:]


def without_jfif(data):
    return data[:2] + data[2 + 2 + int.from_bytes(data[4:6], "big") :]


REFUSED = {
    "progressive": lambda: saved(progressive=True),
    "CMYK": lambda: saved("CMYK"),
    "another size": lambda: other_size(saved()),
    "no end": lambda: saved()[:-2],
    "bytes behind the end": lambda: saved() + b"\0" * 7,
    "a PNG": lambda: b"\x89PNG\r\n\x1a\n" + bytes(60),
    "RGB by Adobe, YCbCr by JFIF": lambda: with_adobe(saved(), 0),
    "an unknown transform": lambda: with_adobe(without_jfif(saved()), 2),
    "nothing": lambda: b"",
    "a PNM with 16 bits": lambda: b"P6\n48 40\n65535\n" + bytes(48 * 40 * 6),
    "a PNM that is cut off": lambda: pnm.encode(picture(48, 40, 5))[:-1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_to_other_decoders(library, name):
    assert drawn(library, REFUSED[name](), CASE) is None


@settings(max_examples=60)
@example(Case(90, 90, "420", 90, 5, 0, False, (8, 8, 80, 80), 40, False, 3), 2)
@given(cases(), st.sampled_from((2, 4, 8)))
def test_the_same_pixels_at_a_smaller_scale(library_of_session, case, scale):
    """As libjpeg's scaled decoding, where MCUs are squares; others are decoded at full size. Pixels have no scale."""
    left, top, width, height = (side // scale * scale for side in case.box)
    assume(left >= 0 and top >= 0 and width and height and left + width <= case.width and top + height <= case.height)
    case, data = case._replace(box=(left, top, width, height)), encoded(case)
    memory = memoryview(bytearray(1 << 20))
    part = decode_window(data, cut(data, case.box), case.box, case.channels, scale, memory)
    whole = decode(data, case.channels)
    for library in library_of_session:
        want = expected(part.pixels, case._replace(box=part.box))
        assert np.array_equal(drawn(library, data, case, scale), want)
        assert np.array_equal(drawn(library, whole.tobytes(), case, scale, only_pixels=True), expected(whole, case))


def test_images_of_more_pixels_than_32_bits_can_count_bytes_of_are_left_to_other_decoders(library):
    data, at, part = saved(), saved().index(b"\xff\xc0"), CASE._replace(box=(0, 0, 4, 4), size=4)
    for side, is_taken in ((32768, True), (32769, False)):
        size = side.to_bytes(2, "big")
        drawing = drawn(library, data[: at + 5] + size + size + data[at + 9 :], part._replace(width=side, height=side))
        assert (drawing is not None) == is_taken


def test_resizing_that_needs_half_a_gigabyte_is_left_to_others(library):
    high = CASE._replace(width=1, height=65500, box=(0, 0, 1, 65500), size=2760)
    assert drawn(library, bytes(65500 * 3), high, only_pixels=True) is None


TAKEN = {
    "an Adobe segment": lambda: with_adobe(without_jfif(saved()), 1),
    "no JFIF segment": lambda: without_jfif(saved()),
    "RGB": lambda: with_adobe(without_jfif(simplejpeg.encode_jpeg(picture(48, 40, 5), 90, colorsubsampling="444")), 0),
    "coarse tables of 16 bits": lambda: saved(qtables=[[*range(1, 64), 300], [256] * 64]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_unusual_images_that_are_taken(library, name):
    data = TAKEN[name]()
    pixels = simplejpeg.decode_jpeg(data, "RGB")
    assert np.array_equal(drawn(library, data, CASE), expected(pixels, CASE))
