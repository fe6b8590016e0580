"""What a JPEG's header is read from."""

import pytest

from datapipe.images.jpeg import read_header


def test_the_end_of_a_thumbnail_is_not_the_end_of_the_image(photo, encoded):
    whole, thumbnail = encoded(photo(64, 48, 4)), encoded(photo(16, 16, 5))
    data = whole[:2] + b"\xff\xe1" + (2 + len(thumbnail)).to_bytes(2, "big") + thumbnail + whole[2:]
    assert read_header(data)[:2] == (64, 48)
    with pytest.raises(ValueError, match="no end of image"):
        read_header(data[:-2])
