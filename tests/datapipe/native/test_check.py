"""The decoder in C accepts no JPEG as whole of which libjpeg-turbo warns, and all that are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe import native
from datapipe.images import codec, jpeg
from datapipe.images.codec import check_image, decode, read_header
from tests.datapipe.native.test_pixels import CASE, cases, encoded, saved

CHANGES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.booleans()), max_size=3)


def is_whole(data: bytes) -> bool:
    """Return what the libraries say."""
    try:
        decode(data, read_header(data).channels, smallest=(1, 1), strict=True)
    except ValueError:
        return False
    return True


def damaged(data: bytes, changes) -> bytes:
    """Change bytes behind the header, or insert some."""
    first = jpeg.read_markers(data).scan_at
    bytes_ = bytearray(data)
    for place, byte, inserts in changes:
        at = first + int(place * (len(bytes_) - first))
        bytes_[at : at if inserts else at + 1] = bytes([byte])
    return bytes(bytes_)


def check(libraries, case, changes):
    data = damaged(encoded(case), changes)
    for library in libraries:
        accepts = library.accepts(data, case.width, case.height)
        assert accepts or changes
        assert is_whole(data) or not accepts


@settings(max_examples=300)
@given(cases(), CHANGES)
def test_nothing_is_accepted_of_which_libjpeg_warns(library_of_session, case, changes):
    check(library_of_session, case, changes)


@pytest.mark.slow
@settings(max_examples=4_000)
@given(cases(), CHANGES)
def test_nothing_of_many_is_accepted_of_which_libjpeg_warns(library_of_session, case, changes):
    check(library_of_session, case, changes)


def test_images_are_checked_by_it_and_what_it_leaves_by_libraries(library, monkeypatch):
    decoded = []
    monkeypatch.setattr(native, "choose", lambda: native.Choice(library, ""))
    monkeypatch.setattr(
        codec, "decode", lambda data, *rest, **settings: decoded.append(data) or decode(data, *rest, **settings)
    )
    whole, progressive = encoded(CASE), saved(progressive=True)
    assert check_image(whole) == read_header(whole) and not decoded
    assert check_image(progressive) == read_header(progressive) and decoded == [progressive]
    with pytest.raises(ValueError):
        check_image(whole[: len(whole) // 2] + b"\xff\xd9")
    assert len(decoded) == 2
    assert not library.accepts(whole, CASE.height, CASE.width) and not library.accepts(b"", 1, 1)


def test_pieces_that_a_crop_passes_by_are_read(library):
    data = encoded(CASE._replace(interval=1))
    markers = [data.rindex(bytes((0xFF, marker))) for marker in (0xD0, 0xD1)]
    first, last = sorted(markers)
    empty = data[: first + 2] + data[last:]
    assert library.accepts(data, CASE.width, CASE.height)
    assert not is_whole(empty) and not library.accepts(empty, CASE.width, CASE.height)
