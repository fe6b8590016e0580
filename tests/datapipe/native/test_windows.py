"""The windows that are cut in C are those of Python, byte for byte, or none."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from datapipe import native
from datapipe.images import jpeg
from datapipe.images.window import cut
from datapipe.loaders.image_chunk import ChunkInMemory
from datapipe.loaders.native_pixels import do_jobs

from .test_pixels import CASE, REFUSED, SUBSAMPLINGS, Case, cases, encoded, picture

ROOM = 64  # bytes behind a window, which stay as they are


def windows(library, images, may_end_late=True):
    """Have the windows of (bytes, box, size) cut in one call: (bytes, box) of each; None for those that are left."""
    jobs = np.zeros(len(images), native.JOB)
    for job, (_, box, size) in zip(jobs, images, strict=True):
        job["box"], (job["width"], job["height"]) = box, size
    chunk = ChunkInMemory(range(len(images)), np.arange(len(images)), jobs, [data for data, _, _ in images])
    memory = [np.full(len(data) + ROOM, 77, np.uint8) for data, _, _ in images]
    jobs["out"] = [out.ctypes.data for out in memory]

    def work(progress, spent_s):
        return library.cut(jobs, may_end_late, np.zeros(1, np.uint8), progress, spent_s)

    left, stage_s = do_jobs(chunk, work, native.CUT_STAGES)
    assert stage_s.keys() == {"read", "window"} and min(stage_s.values()) >= 0
    for out, (data, _, _) in zip(memory, images, strict=True):
        assert (out[len(data) :] == 77).all()
    return [
        None if i in left else (bytes(memory[i][: jobs["size"][i]]), tuple(jobs["box"][i].tolist()))
        for i in range(len(images))
    ]


def expected(data, box, size, may_end_late=True):
    """Return the same of Python; None for an image that is refused."""
    try:
        window = cut(data, box, size)
    except ValueError:
        return None
    if window.ends_late and not may_end_late:
        return data, tuple(box)
    return bytes(window.data), (box[0] - window.left, box[1] - window.top, *box[2:])


def check(libraries, data, box, size):
    """Compare; return whether the library has cut the window."""
    for library in libraries:
        (pieces,) = windows(library, [(data, box, size)], may_end_late=False)
        (found,) = windows(library, [(data, box, size)])
        if found is not None:
            assert found == expected(data, box, size)
            assert pieces == expected(data, box, size, may_end_late=False)
    return found is not None


@settings(max_examples=150)
@example(CASE._replace(interval=1, box=(0, 0, 1, 1)))
@example(CASE._replace(interval=3, box=(-30, 30, 24, 24)))  # columns of MCUs: 3
@given(cases())
def test_the_same_windows(library_of_session, case):
    data = encoded(case)
    assert check(library_of_session, data, case.box, (case.width, case.height))


@st.composite
def synthetic(draw):
    """A JPEG of any sampling with restart markers and with entropy-coded data that mean nothing, and a box.

    Most have as many pieces as they should; some have others, or numbers that are wrong.
    """
    width, height = draw(st.integers(1, 200)), draw(st.integers(1, 200))
    case = Case(width, height, draw(st.sampled_from(SUBSAMPLINGS)), 50, 0, 0, False, (0, 0, 1, 1), 1, False, 3)
    whole = encoded(case)
    header = jpeg.read_markers(whole)
    mcu_width, mcu_height = header.mcu_size()
    columns, rows = -(-width // mcu_width), -(-height // mcu_height)
    interval = draw(st.sampled_from([n for n in range(1, columns + 1) if columns % n == 0 or n == 5]))
    count = max(1, columns * rows // interval)
    fault = draw(st.sampled_from(("", "", "", "fewer", "more", "number", "last number", "early end", "another")))
    count += {"fewer": -1, "more": 1}.get(fault, 0)
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    pieces = [random.bytes(random.integers(9)).replace(b"\xff", b"\xff\xff\x00") for _ in range(max(1, count))]
    numbers = np.arange(count - 1) % 8
    if fault in ("number", "last number") and count > 1:
        numbers[-1 if fault == "last number" else random.integers(count - 1)] += 1
    marked = [bytes((0xFF, jpeg.RST0 | number & 7)) for number in numbers.tolist()] + [jpeg.END_OF_IMAGE]
    if fault == "early end":
        pieces[random.integers(len(pieces))] += jpeg.END_OF_IMAGE
    scan = b"".join(part for pair in zip(pieces, marked, strict=True) for part in pair)
    dri = b"\xff\xdd\0\x04" + interval.to_bytes(2, "big")
    data = whole[:2] + dri + whole[2 : header.scan_at] + scan
    if fault == "another":
        data += data
    left, top = draw(st.integers(-50, width + 50)), draw(st.integers(-50, height + 50))
    return data, (left, top, draw(st.integers(1, width)), draw(st.integers(1, height))), (width, height)


@settings(max_examples=400)
@given(synthetic())
def test_the_same_windows_of_any_pieces(library_of_session, image):
    assert check(library_of_session, *image)


@pytest.mark.slow
@settings(max_examples=4_000)
@given(synthetic())
def test_the_same_windows_of_many(library_of_session, image):
    assert check(library_of_session, *image)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("set", "set", "remove", "insert", "cut off")),
        st.floats(0, 1, exclude_max=True),
        st.one_of(st.integers(0, 255), st.sampled_from((0, 0xFF, 0xD0, 0xD7, 0xD9, 0xDA, 0xDD, 0xC0, 0xC2))),
    ),
    min_size=1,
    max_size=4,
)


def change(data, changes, is_ended):
    damaged = bytearray(data)
    for kind, place, value in changes:
        at = int(place * len(damaged))
        if kind == "set" and damaged:
            damaged[at] = value
        elif kind == "insert":
            damaged.insert(at, value)
        else:
            del damaged[at : at + 1 + value % 4 if kind == "remove" else None]
    return bytes(damaged + (jpeg.END_OF_IMAGE if is_ended else b""))


@settings(max_examples=400)
@given(synthetic(), CHANGES, st.booleans())
def test_what_is_damaged_is_cut_as_in_python_or_left_to_it(library_of_session, image, changes, is_ended):
    data, box, size = image
    event("cut" if check(library_of_session, change(data, changes, is_ended), box, size) else "left")


@pytest.mark.slow
@settings(max_examples=4_000)
@given(synthetic(), CHANGES, st.booleans())
def test_what_is_damaged_in_many_ways(library_of_session, image, changes, is_ended):
    data, box, size = image
    check(library_of_session, change(data, changes, is_ended), box, size)


def test_truncated_anywhere(library_of_session):
    """To each length, and each with an end of image behind."""
    data = encoded(CASE._replace(interval=1, detail=0))
    for length in range(len(data)):
        for end in (b"", jpeg.END_OF_IMAGE):
            check(library_of_session, data[:length] + end, CASE.box, (CASE.width, CASE.height))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_to_python(library, name):
    assert windows(library, [(REFUSED[name](), CASE.box, (CASE.width, CASE.height))]) == [None]


@pytest.mark.parametrize("box", [(2**31 - 1, 0, 9, 9), (0, -(2**31), 9, 9), (0, 0, 2**31 - 1, 2**31 - 1), (5, 5, 0, 0)])
def test_boxes_that_are_far_away_or_large(library, box):
    data = encoded(CASE._replace(interval=1))
    check([library], data, box, (CASE.width, CASE.height))


def test_more_pixels_than_any_decoder_takes(library):
    """65,500 pixels square: the header is all that is needed to refuse it."""
    data = encoded(CASE)
    at = jpeg.read_markers(data).frame_at + 5
    data = data[:at] + (65_500).to_bytes(2, "big") * 2 + data[at + 4 :]
    assert windows(library, [(data, CASE.box, (65_500, 65_500))]) == [expected(data, CASE.box, (65_500, 65_500))]


def test_each_image_of_a_chunk_by_itself(library):
    images = []
    for i in range(6):
        case = CASE._replace(width=48 + i, interval=i % 3)
        images.append((encoded(case) if i != 4 else b"", case.box, (case.width, case.height)))
    assert windows(library, images) == [expected(*image) for image in images]


def test_a_window_is_a_part_of_the_image(library):
    """A second opinion, which is not Python's `cut`: the pixels of the window are those of the whole."""
    buffer = io.BytesIO()
    Image.fromarray(picture(160, 128, 5)).save(buffer, "JPEG", quality=90, restart_marker_blocks=2)
    box = 70, 50, 40, 30
    ((data, inside),) = windows(library, [(buffer.getvalue(), box, (160, 128))])
    assert len(data) < len(buffer.getvalue()) / 2
    whole, window = (np.asarray(Image.open(io.BytesIO(file))) for file in (buffer.getvalue(), data))
    boxes = [
        pixels[top : top + height, left : left + width]
        for pixels, (left, top, width, height) in ((whole, box), (window, inside))
    ]
    assert np.array_equal(*boxes)
