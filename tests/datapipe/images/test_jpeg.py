"""What a JPEG's header is read from."""

import pytest

from datapipe.images.codec import decode
from datapipe.images.jpeg import read_markers


def test_the_end_of_a_thumbnail_is_not_the_end_of_the_image(photo, encoded):
    whole, thumbnail = encoded(photo(64, 48, 4)), encoded(photo(16, 16, 5))
    data = whole[:2] + b"\xff\xe1" + (2 + len(thumbnail)).to_bytes(2, "big") + thumbnail + whole[2:]
    assert read_markers(data)[:2] == (64, 48)
    with pytest.raises(ValueError, match="no end of image"):
        read_markers(data[:-2])


@pytest.mark.parametrize(
    ("frame", "bits", "reason"),
    [
        *[(frame, 8, None) for frame in (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)],
        *[(frame, 8, "of a kind that no decoder here reads: lossless") for frame in (0xC3, 0xC7, 0xCB, 0xCF)],
        *[(frame, 8, "of a kind that no decoder here reads: hierarch") for frame in (0xC5, 0xC6, 0xCD, 0xCE)],
        *[(frame, bits, f"of {bits} bits per sample") for frame in (0xC0, 0xC1, 0xC2, 0xC9) for bits in (2, 7, 12, 16)],
    ],
)
def test_kinds_that_no_decoder_reads_are_refused(photo, encoded, frame, bits, reason):
    """As libjpeg-turbo refuses them: packed, they would end a training."""
    data = bytearray(encoded(photo(64, 48, 4)))
    at = data.index(b"\xff\xc0")
    data[at + 1], data[at + 4] = frame, bits
    if reason is None:
        assert read_markers(data)[:2] == (64, 48)
        return
    with pytest.raises(ValueError, match=reason):
        read_markers(data)
    with pytest.raises(ValueError, match="cannot be decoded"):
        decode(data, 3)
