"""Windows are the same pixels as a whole decode, whatever the size and the subsampling; damage never crashes."""

import functools
import io
import subprocess
import sys

import numpy as np
import pytest
import simplejpeg
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from datapipe.images import turbojpeg, window
from datapipe.images.jpeg import piece_ends, read_markers, restart_interval
from datapipe.images.window import cut, decode_window

END = b"\xff\xd9"
SUBSAMPLINGS = ["4:2:0", "4:2:2", "4:4:4", "grey"]


@functools.lru_cache(64)
def picture(width, height, subsampling, interval, seed=0):
    """A JPEG of noise, in which no two neighbouring pixels are alike, with restart markers every `interval` MCUs."""
    random = np.random.default_rng(seed)
    grey = subsampling == "grey"
    pixels = random.integers(0, 256, (height, width) if grey else (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    options = {} if grey else {"subsampling": subsampling}
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90, restart_marker_blocks=interval, **options)
    return buffer.getvalue(), simplejpeg.decode_jpeg(buffer.getvalue(), "GRAY" if grey else "RGB")


def interval_for(width, subsampling, wanted):
    unit = 16 if subsampling in ("4:2:0", "4:2:2") else 8
    return restart_interval(-(-width // unit), wanted)


def noted(data):
    """Return a file as earlier versions packed it, with the pieces' lengths in a segment that is not read any more."""
    at, note = read_markers(data).frame_at, b"Pieces\0" + bytes(range(192))
    return data[:at] + b"\xff\xe7" + (2 + len(note)).to_bytes(2, "big") + note + data[at:]


def decoded(data, box, channels=3, scale=1):
    found = decode_window(data, cut(data, box), box, channels, scale, memoryview(bytearray(1 << 20)))
    left, top, width, height = found.box
    return found.pixels[top : top + height, left : left + width]


@st.composite
def boxes(draw, max_side=150):
    width, height = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    return width, height, (left, top, draw(st.integers(1, width - left)), draw(st.integers(1, height - top)))


@settings(max_examples=300, deadline=None)
@given(boxes(), st.sampled_from(SUBSAMPLINGS), st.integers(1, 8), st.sampled_from(["none", "markers", "noted"]))
@example((34, 3, (33, 0, 1, 2)), "4:2:0", 1, "markers")  # two pixels behind the last whole MCU
@example((35, 3, (33, 0, 1, 2)), "4:2:2", 1, "markers")
@example((3, 3, (1, 0, 1, 2)), "4:2:0", 1, "markers")
@example((256, 64, (64, 16, 64, 16)), "4:2:0", 4, "markers")  # chroma at its edges needs its neighbours
def test_a_window_is_the_same_pixels(size, subsampling, wanted, markers):
    width, height, box = size
    interval = interval_for(width, subsampling, wanted) if markers != "none" else 0
    data, whole = picture(width, height, subsampling, interval)
    data = noted(data) if markers == "noted" else data
    left, top, w, h = box
    part = decoded(data, box, whole.shape[2])
    np.testing.assert_array_equal(part, whole[top : top + h, left : left + w])


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_only_the_pieces_that_are_needed_are_kept(subsampling):
    """Every MCU's corner and middle, and the edges."""
    width, height = 150, 90
    data, whole = picture(width, height, subsampling, interval_for(width, subsampling, 2))
    for left in range(0, width, 7):
        for top in range(0, height, 7):
            box = left, top, min(9, width - left), min(9, height - top)
            found = cut(data, box)
            assert len(found.data) < len(data) / 2 and not found.ends_late
            header = read_markers(bytes(found.data))
            assert (header.width, header.height) == (found.width, found.height) and found.width < width
            with Image.open(io.BytesIO(found.data)) as image:  # another decoder takes it without a complaint
                assert np.asarray(image).shape[:2] == (found.height, found.width)
            np.testing.assert_array_equal(
                decoded(data, box, whole.shape[2]), whole[top : top + box[3], left : left + box[2]]
            )


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
@pytest.mark.parametrize("interval", [1, 2, 5])
def test_pieces_end_at_their_markers(subsampling, interval):
    data, _ = picture(150, 90, subsampling, interval)
    header = read_markers(data)
    columns, rows = (-(-side // unit) for side, unit in zip((150, 90), header.mcu_size(), strict=True))
    count = -(-columns * rows // interval)
    found = piece_ends(data, header, count)
    assert [data[end : end + 2] for end in found] == [bytes((0xFF, 0xD0 + i % 8)) for i in range(count - 1)] + [END]
    assert piece_ends(data, header, count - 1) is piece_ends(data, header, count + 1) is None
    end = found[0]
    lost = data[:end] + data[end + 2 :]
    assert piece_ends(lost, header, count) is None


@pytest.mark.parametrize("kind", ["no markers", "interval of no column", "progressive"])
def test_what_cannot_be_cut_is_decoded_whole(photo, encoded, kind):
    options = {"interval of no column": {"restart_marker_blocks": 7}, "progressive": {"progressive": True}}
    data = encoded(photo(200, 150, 1), quality=90, **options.get(kind, {}))
    whole = simplejpeg.decode_jpeg(data, "RGB")
    found = cut(data, (20, 30, 50, 60))
    assert (found.left, found.top, found.width) == (0, 0, 200)
    if kind == "progressive":
        assert found.data is data and found.height == 150
    else:
        assert found.height == 96 and found.ends_late  # the rows of MCUs below the box are left out
    np.testing.assert_array_equal(decoded(data, (20, 30, 50, 60)), whole[30:90, 20:70])
    assert cut(data, (20, 30, 50, 120)).data is data  # nothing lies below


def test_lossless_markers_of_other_programs(photo, encoded):
    restart = turbojpeg.lossless()
    if restart is None:
        pytest.skip("neither libturbojpeg 3.1 nor jpegtran is installed")
    plain = encoded(photo(500, 375, 3), quality=92)
    data, whole = restart(plain, 8, 1), simplejpeg.decode_jpeg(plain, "RGB")
    found = cut(data, (140, 100, 200, 150))
    assert (found.left, found.top, found.width, found.height) == (128, 96, 256, 160)
    np.testing.assert_array_equal(decoded(data, (140, 100, 200, 150)), whole[100:250, 140:340])


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.parametrize("markers", [0, 4])
def test_smaller_scales_are_close_to_the_mean_of_their_pixels(photo, encoded, scale, markers):
    data = encoded(photo(512, 384, 5), quality=95, **({"restart_marker_blocks": markers} if markers else {}))
    whole = simplejpeg.decode_jpeg(data, "RGB").astype(float)
    left, top, width, height = 16 * scale, 8 * scale, 192 // scale * scale, 128 // scale * scale
    part = decoded(data, (left, top, width, height), scale=scale)
    assert part.shape == (height // scale, width // scale, 3)
    blocks = whole[top : top + height, left : left + width].reshape(height // scale, scale, width // scale, scale, 3)
    difference = np.abs(part - blocks.mean((1, 3)))
    assert difference.mean() < 1.5 and difference.max() < 12


def test_chroma_that_is_halved_in_one_direction_is_not_scaled_in_both():
    """libjpeg would scale a 4:2:2 image's chroma by the larger factor, both ways."""
    across = np.linspace(0, 60, 512)[None, :] + np.linspace(0, 40, 384)[:, None]
    pixels = np.stack([128 + 100 * np.sin(across), 128 + 100 * np.cos(across), 128 - 100 * np.sin(across)], -1)
    for subsampling in ("4:2:0", "4:2:2"):
        buffer = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG", quality=95, subsampling=subsampling)
        data, box = buffer.getvalue(), (0, 0, 512, 384)
        found = decode_window(data, cut(data, box), box, 3, 4, memoryview(bytearray(1 << 20)))
        assert found.pixels.shape[:2] == ((96, 128) if subsampling == "4:2:0" else (384, 512))
        assert found.box == (0, 0, *found.pixels.shape[1::-1])


def test_boxes_beyond_the_image(photo, encoded):
    """As padding asks for them: what lies in the image is covered."""
    data = encoded(photo(160, 128, 2), quality=90, restart_marker_blocks=5)
    for box in ((-4, -4, 40, 40), (130, 100, 40, 40), (-10, -10, 300, 300), (150, 0, 14, 14)):
        found = cut(data, box)
        assert found.left <= max(0, box[0]) and found.top <= max(0, box[1])
        assert found.left + found.width >= min(160, box[0] + box[2])
        assert found.top + found.height >= min(128, box[1] + box[3])


def test_an_image_behind_the_image_is_left_alone(photo, encoded):
    """As in phones' multi-picture files: a second JPEG follows, with markers of its own."""
    data = encoded(photo(160, 128, 2), quality=90, restart_marker_blocks=5)
    both = data + encoded(photo(64, 64, 3), restart_marker_blocks=1)
    whole = simplejpeg.decode_jpeg(data, "RGB")
    assert len(cut(both, (0, 0, 30, 30)).data) < len(data)
    np.testing.assert_array_equal(decoded(both, (90, 60, 40, 50)), whole[60:110, 90:130])


FUZZ = """
import sys, numpy as np
sys.path.insert(0, {tests!r})
from test_window import fuzz
fuzz({count}, {seed})
"""


def fuzz(count, seed):
    """Mutated files: ValueError or a picture, in memory of our own whose ends are watched."""
    random = np.random.default_rng(seed)
    kinds = [(97, 61, s, interval_for(97, s, 2)) for s in SUBSAMPLINGS] + [(97, 61, "4:2:0", 0), (33, 200, "4:2:2", 3)]
    guard, size = 4096, 1 << 18
    memory = np.full(size + 2 * guard, 0xA5, np.uint8)
    room = memoryview(memory)[guard : guard + size]
    refused = pictures = 0
    for number in range(count):
        data, _ = picture(*kinds[number % len(kinds)])
        data = bytearray(noted(data) if number // len(kinds) % 2 else data)
        scan = read_markers(bytes(data)).scan_at
        way = random.integers(5)
        for _ in range(random.integers(1, 6)):
            where = int(random.integers(2, scan if way < 3 else len(data)))
            if way in (0, 3):
                data[where] = random.integers(256)
            elif way == 1:
                data[where] ^= 1 << random.integers(8)
            elif way == 2:
                del data[where : where + int(random.integers(1, 20))]
            else:
                data[where:where] = bytes([0xFF, 0xD0 + int(random.integers(10))])
        if random.integers(10) == 0:
            del data[int(random.integers(2, len(data))) :]
        box = *(int(n) for n in random.integers(0, 60, 2)), *(int(n) for n in random.integers(1, 80, 2))
        try:
            given_data = bytes(data)
            window_ = cut(given_data, box)
            if window_.width * window_.height > 1 << 22:
                continue  # nothing wrong with it, but it takes long
            found = decode_window(given_data, window_, box, 3, 1, room)
            assert found.pixels.dtype == np.uint8 and found.pixels.ndim == 3
            pictures += 1
        except ValueError:
            refused += 1
        assert (memory[:guard] == 0xA5).all() and (memory[-guard:] == 0xA5).all(), "written out of bounds"
    assert refused > count // 50 and pictures > count // 10, (refused, pictures)


def _fuzz_in_a_process(count, seed, limit_s):
    """A crash or a hang of the decoder must not be one of the tests'."""
    code = FUZZ.format(tests=str(__file__).rpartition("/")[0], count=count, seed=seed)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr[-2000:]


def test_mutated_files():
    _fuzz_in_a_process(4_000, 1, 200)


@pytest.mark.slow
def test_a_hundred_thousand_mutated_files():
    _fuzz_in_a_process(100_000, 2, 1800)


def test_margin_is_needed(monkeypatch):
    """Without it, chroma at a window's edge differs: the test above can fail."""
    monkeypatch.setattr(window, "MARGIN", 0)
    data, whole = picture(256, 64, "4:2:0", 4)
    part = decoded(data, (64, 16, 64, 16))
    assert (part != whole[16:32, 64:128]).any()
