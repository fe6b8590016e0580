"""What is stored of an image, against Pillow, float64 arithmetic and the coefficients' own pixels."""

import io
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageOps

from datapipe.dataset import DataSet
from datapipe.errors import MissingBackendError, SettingError
from datapipe.images import jpeg, lanczos, pnm, turbojpeg
from datapipe.images.codec import decode, encode_png, read_header
from datapipe.images.recode import RecodeOptions, Recoder, upright

JPEGTRAN = shutil.which("jpegtran")
OTHER_SIZES = (373, 501), (1601, 1203)  # width and height, in pixels
LOSSLESS = {
    "libturbojpeg": lambda: (library := turbojpeg.turbojpeg()) and library.restart,
    "jpegtran": lambda: JPEGTRAN and turbojpeg.jpegtran(JPEGTRAN),
}
KINDS = {
    "4:2:0": {"subsampling": "4:2:0"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:4:4": {"subsampling": "4:4:4"},
    "progressive": {"progressive": True},
    "optimized": {"optimize": True},
    "other interval": {"restart_marker_blocks": 3},
    "exif": {"exif": b"Exif\0\0" + bytes(60)},
}


@pytest.fixture(params=LOSSLESS)
def restart(request, monkeypatch):
    """Each of the two ways to write restart markers without a loss."""
    restart = LOSSLESS[request.param]()
    if not restart or (request.param == "libturbojpeg" and turbojpeg.lossless() != restart):
        pytest.skip(f"no {request.param} here that does it")
    monkeypatch.setattr(turbojpeg, "lossless", lambda: restart)
    return restart


@pytest.fixture(params=["libturbojpeg", "without"])
def library(request, monkeypatch):
    """With and without a libturbojpeg that gives planes."""
    if request.param == "without":
        monkeypatch.setattr(turbojpeg, "turbojpeg", lambda: None)
    elif turbojpeg.turbojpeg() is None:
        pytest.skip("no libturbojpeg 3 here")


def pixels_of(data, mode="RGB"):
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


def psnr(one, other):
    error = np.mean((np.asarray(one, float) - np.asarray(other, float)) ** 2)
    return 10 * np.log10(255**2 / error) if error else np.inf


def interval_of(data, wanted):
    found = jpeg.read_markers(data)
    return jpeg.restart_interval(-(-found.width // found.mcu_size()[0]), wanted)


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": "all"}, "check: 'all' is not allowed; allowed: one of header, decode"),
        ({"resize": "256"}, "resize: '256' is not allowed; allowed: short=PIXELS or max=PIXELS"),
        ({"resize": "short=0"}, "resize"),
        ({"quality": 0}, "quality: 0 is not allowed; allowed: 1 to 100"),
        ({"quality": 101}, "quality"),
        ({"restart": 0}, "restart"),
        ({"store": "tiff"}, "store: 'tiff' is not allowed; allowed: one of encoded, raw"),
        ({"size": 256}, "size: 256 needs --store raw"),
        ({"compress": "lz4"}, "compress"),
        ({"store": "raw", "compress": "gzip"}, "compress: 'gzip' is not allowed; allowed: one of lz4, zstd"),
        ({"store": "raw", "quality": 90}, "quality: 90 needs --store encoded"),
        ({"store": "raw", "size": 0}, "size: 0 is not allowed; allowed: 1 to 65535"),
        ({"store": "raw", "size": 256, "resize": "short=256"}, "size: 256 excludes resize"),
        ({"store": "raw", "headerless": True, "compress": "lz4"}, "headerless: True excludes compress"),
        ({"store": "raw", "channels": 4}, "channels: 4 is not allowed; allowed: 1 or 3"),
    ],
)
def test_a_bad_option_is_named(options, message):
    with pytest.raises(SettingError) as error:
        RecodeOptions(**options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "size", "target"),
    [
        ({}, (500, 375), (500, 375)),
        ({"resize": "short=256"}, (500, 375), (341, 256)),
        ({"resize": "short=256"}, (375, 500), (256, 341)),
        ({"resize": "short=256"}, (5000, 256), (5000, 256)),
        ({"resize": "short=256"}, (500, 255), (500, 255)),  # never larger
        ({"resize": "max=500"}, (1000, 375), (500, 188)),
        ({"resize": "max=500"}, (500, 375), (500, 375)),
        ({"resize": "max=500"}, (20000, 10), (500, 1)),
        ({"store": "raw", "size": 256}, (500, 375), (341, 256)),
        ({"store": "raw", "size": 256}, (100, 50), (512, 256)),
    ],
)
def test_target_sizes(options, size, target):
    assert RecodeOptions(**options).target(*size) == target


# --- as it is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("check", ["header", "decode"])
def test_by_default_an_image_is_kept_byte_for_byte(photo, encoded, kind, check):
    recoder = Recoder(RecodeOptions(check=check))
    for data in (encoded(photo(61, 43, 1), progressive=True), encode_png(photo(61, 43, 1)), pnm.encode(photo(6, 4, 1))):
        data = kind(data)
        stored, header, unusual = recoder(data)
        assert stored is data and header == read_header(data) and unusual == ()


def test_the_full_check_finds_damage_that_the_header_does_not_show(photo, encoded):
    whole = encoded(photo(200, 150, 1))
    damaged = whole[: len(whole) // 2] + b"\xff\xd9"
    png = bytearray(encoded(photo(200, 150, 1), "PNG"))
    png[len(png) // 2] ^= 255
    for data in (damaged, png):
        assert Recoder(RecodeOptions())(data)[0] is data
        with pytest.raises(ValueError, match="cannot be decoded"):
            Recoder(RecodeOptions(check="decode"))(data)


def test_the_full_check_sees_what_a_full_decode_sees(photo, encoded):
    """It decodes at an eighth of the size, which skips no entropy-coded data."""
    whole, random = encoded(photo(200, 150, 1), quality=95), np.random.default_rng(0)
    start = whole.index(b"\xff\xda")
    check, bad = Recoder(RecodeOptions(check="decode")), 0
    for _ in range(200):
        data = bytearray(whole)
        at = int(random.integers(start, len(data) - 10))
        data[at : at + 8] = random.bytes(8)
        verdicts = []
        for function in (check, lambda data: simplejpeg.decode_jpeg(data, "RGB")):
            try:
                function(data)
                verdicts.append("good")
            except ValueError:
                verdicts.append("bad")
        assert verdicts[0] == verdicts[1]
        bad += verdicts[0] == "bad"
    assert bad > 20


# --- restart markers without a loss -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(512, 128), (333, 77), (1, 1), (17, 40)])
@pytest.mark.parametrize("grey", [False, True])
def test_restart_markers_change_no_pixel(restart, photo, encoded, kind, size, grey):
    data = encoded(photo(*size, 1, grey), quality=92, **KINDS[kind])
    recoder = Recoder(RecodeOptions(restart=4))
    stored, header, unusual = recoder(memoryview(data))
    assert header == read_header(stored) and header[:4] == read_header(data)[:4]
    assert header.restart_interval == interval_of(data, 4)
    found = jpeg.read_markers(stored)
    assert found.frame == 0xC0 and found.interleaved and not found.exif
    assert unusual == (("progressive",) if kind == "progressive" else ())
    np.testing.assert_array_equal(pixels_of(stored), pixels_of(data))
    colours = "GRAY" if grey else "RGB"
    ours, theirs = (simplejpeg.decode_jpeg(bytes(image), colours) for image in (stored, data))
    np.testing.assert_array_equal(ours, theirs)
    again = recoder(stored)
    assert again[0] is stored and again[1:] == (header, ())


@pytest.mark.parametrize("script", ["0;1;2;", "0 1 2;"])
def test_a_scan_for_each_component_becomes_one(restart, photo, encoded, tmp_path, script):
    if not JPEGTRAN:
        pytest.skip("no jpegtran to make one")
    (tmp_path / "scans").write_text(script)
    data = subprocess.run(
        [JPEGTRAN, "-scans", tmp_path / "scans", "-restart", "4B"],
        input=encoded(photo(128, 64, 1)),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    stored, _, unusual = Recoder(RecodeOptions(restart=4))(data)
    multi = script.count(";") > 1
    assert unusual == (("multi-scan",) if multi else ())
    assert (stored == data) is not multi
    assert jpeg.read_markers(stored).interleaved
    np.testing.assert_array_equal(pixels_of(stored), pixels_of(data))


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("options", [{"subsampling": "4:4:4"}, {"subsampling": "4:2:0"}, {"subsampling": "4:2:2"}])
@pytest.mark.parametrize("size", [(96, 64), (95, 61)])
def test_a_turned_image_comes_out_upright(restart, photo, encoded, orientation, options, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(*size, 1), quality=95, exif=exif, **options)
    stored, header, unusual = Recoder(RecodeOptions(restart=4, quality=None))(data)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert unusual == ("rotated",) and (header.height, header.width) == wanted.shape[:2]
    found = jpeg.read_markers(stored)
    assert not found.exif and found.restart_interval == interval_of(stored, 4)
    whole_blocks = size == (96, 64)
    # Without a loss up to the inverse transform's rounding, which is not symmetric; else coded again at quality 90.
    assert psnr(pixels_of(stored), wanted) > (47 if whole_blocks else 29)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_is_what_pillow_makes_of_it(photo, orientation):
    pixels = photo(7, 5, 1)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(pixels)
    image.getexif()[0x0112] = orientation
    np.testing.assert_array_equal(upright(pixels, orientation), np.asarray(ImageOps.exif_transpose(image)))


def test_damage_is_counted_where_decoders_make_do(restart, photo, encoded):
    whole = encoded(photo(200, 150, 1))
    damaged = whole[: len(whole) // 2] + b"\xff\xd9"
    for options in (RecodeOptions(restart=4), RecodeOptions(resize="short=100"), RecodeOptions(store="raw")):
        stored, header, unusual = Recoder(options)(damaged)
        assert unusual == ("damaged",) and read_header(stored) == header
    with pytest.raises(ValueError):
        Recoder(RecodeOptions(restart=4, check="decode"))(damaged)
    with pytest.raises(ValueError):
        Recoder(RecodeOptions(restart=4))(whole[: len(whole) // 2])


def test_without_any_backend_that_is_said_at_once(monkeypatch):
    monkeypatch.setattr(turbojpeg, "lossless", lambda: None)
    with pytest.raises(MissingBackendError, match=r"libturbojpeg.*jpegtran"):
        Recoder(RecodeOptions(restart=8))
    Recoder(RecodeOptions(restart=8, resize="short=256"))  # which encodes again


@pytest.mark.slow
def test_the_command_says_what_works_without_any_backend(image_folder, command, tmp_path):
    """As with no more than pip and the extra `turbo`: no jpegtran, and libturbojpeg 3.0 or none."""
    if hasattr(turbojpeg.lossless(), "__self__"):
        pytest.skip("libturbojpeg 3.1 is installed")
    line = ["datapipe", "pack", image_folder, tmp_path / "out", "--restart", 8]
    done = command(*line, env={**os.environ, "PATH": ""})
    assert done.returncode == 1 and "Traceback" not in done.stderr and not (tmp_path / "out").exists()
    ways = "conda install -c conda-forge", "module load", "apt install", "dnf install", "--quality 90"
    assert all(way in done.stderr for way in ways), done.stderr
    done = command(*line, "--quality", 90, env={**os.environ, "PATH": ""})
    assert done.returncode == 0, done.stderr
    with DataSet(tmp_path / "out" / "train") as data_set:
        assert (data_set.index["restart_interval"] > 0).all()


def test_a_jpegtran_that_does_not_work_is_not_used(monkeypatch):
    monkeypatch.setattr(turbojpeg, "turbojpeg", lambda: None)
    for program in (None, "/bin/false", "/bin/cat", "/no/such/program"):
        monkeypatch.setattr(shutil, "which", lambda _, program=program: program)
        turbojpeg.lossless.cache_clear()
        assert turbojpeg.lossless() is None
    turbojpeg.lossless.cache_clear()


# --- other sizes and qualities ------------------------------------------------------------------------


@given(
    arrays(np.uint8, st.tuples(st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 3]))),
    st.integers(1, 70),
    st.integers(1, 70),
)
def test_resizing_is_lanczos(pixels, width, height):
    resized = lanczos.resize(pixels, width, height)
    assert resized.shape == (height, width, pixels.shape[2]) and resized.dtype == np.uint8
    wanted = lanczos_in_float64(pixels, width, height)
    scale = max(pixels.shape[1] / width, pixels.shape[0] / height)
    # Beyond a quarter there are ever more weights, each of them rounded: JPEGs are not decoded larger than that.
    assert np.abs(resized - wanted.clip(0, 255)).max() <= (1.2 if scale <= 4 else 1.2 + scale / 16)
    if (pixels == pixels[0, 0, 0]).all():
        assert (resized == pixels[0, 0, 0]).all()


def lanczos_in_float64(pixels, width, height):
    """In float64, from the filter's definition."""

    def matrix(num_in, num_out):
        scale = num_in / num_out
        x = (np.arange(num_in) + 0.5 - (np.arange(num_out)[:, None] + 0.5) * scale) / max(scale, 1)
        weights = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)
        return weights / weights.sum(1, keepdims=True)

    rows, columns = matrix(pixels.shape[0], height), matrix(pixels.shape[1], width)
    return np.einsum("yh,hwc,xw->yxc", rows, pixels.astype(float), columns, optimize=True)


def test_resizing_is_exact_so_that_the_order_of_additions_does_not_matter(photo):
    """The same in integers, with the weights in units of 2^-13 and 2^-11: nothing is lost in float32."""
    pixels = np.random.default_rng(0).choice([0, 255], (97, 300, 1)).astype(np.uint8)  # the largest sums
    width, height = 111, 41

    def apply(axis, num_out, bits, values):
        num_in = values.shape[axis]
        first, weights = lanczos._taps(num_in, num_out, num_in / num_out, bits)
        taken = first[:, None] + np.arange(weights.shape[1])
        return np.einsum("ok,...ok->...o", weights, np.moveaxis(values, axis, -1)[..., taken])

    def rounded(values, bits):  # half to even
        whole, rest = values >> bits, values & ((1 << bits) - 1)
        half = 1 << (bits - 1)
        return whole + ((rest > half) | ((rest == half) & (whole & 1 == 1)))

    columns = rounded(apply(0, height, lanczos.FIRST_BITS, pixels[:, :, 0].astype(np.int64)), 10).T  # in eighths
    wanted = rounded(apply(1, width, lanczos.SECOND_BITS, columns), lanczos.SECOND_BITS + 3).clip(0, 255)
    np.testing.assert_array_equal(lanczos.resize(pixels, width, height)[:, :, 0], wanted)


@pytest.mark.parametrize("size", [(500, 375), *(pytest.param(size, marks=pytest.mark.slow) for size in OTHER_SIZES)])
@pytest.mark.parametrize(
    ("subsampling", "grey"), [("4:2:0", False), ("4:2:2", False), ("4:4:4", False), ("4:2:0", True)]
)
def test_resized_images_are_at_least_as_good_as_pillows(library, photo, encoded, grey, size, subsampling):
    data = encoded(photo(*size, 1, grey), quality=95, subsampling=subsampling)
    stored, header, unusual = Recoder(RecodeOptions(resize="short=256", restart=8))(memoryview(data))
    width, height = RecodeOptions(resize="short=256").target(*size)
    assert header == ("jpeg", width, height, 1 if grey else 3, interval_of(stored, 8)) and unusual == ()
    found = jpeg.read_markers(stored)
    assert found.frame == 0xC0 and found.mcu_size() == ((8, 8) if grey else (16, 16))
    wanted = lanczos_in_float64(pixels_of(data), width, height)
    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(data)).resize((width, height), Image.Resampling.BILINEAR)
    image.save(buffer, "JPEG", quality=90)
    assert psnr(pixels_of(stored), wanted) > psnr(pixels_of(buffer.getvalue()), wanted) - 0.5


def test_luma_and_chroma_stay_where_they_are(library, encoded):
    """A coloured edge in the picture's middle, resized by an odd ratio: no shift, no seam at the right and below."""
    pixels = np.zeros((301, 403, 3), np.uint8)
    pixels[:150, :201], pixels[150:, 201:] = (250, 30, 30), (30, 30, 250)
    data = encoded(pixels, quality=98, subsampling="4:2:0")
    stored = pixels_of(Recoder(RecodeOptions(resize="short=151", quality=98))(data)[0])
    wanted = lanczos_in_float64(pixels_of(data), stored.shape[1], stored.shape[0])
    assert psnr(stored, wanted) > 33
    assert psnr(stored[-20:, -20:], wanted[-20:, -20:]) > 40


@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2", "4:4:4"])
def test_another_quality_alone(library, photo, encoded, subsampling):
    data = encoded(photo(123, 77, 1), quality=97, subsampling=subsampling)
    stored, header, _ = Recoder(RecodeOptions(quality=90))(data)
    assert header == ("jpeg", 123, 77, 3, 0) and len(stored) < len(data)
    theirs = io.BytesIO()
    Image.open(io.BytesIO(data)).save(theirs, "JPEG", quality=90, subsampling="4:2:0")
    assert psnr(pixels_of(stored), pixels_of(data)) > psnr(pixels_of(theirs.getvalue()), pixels_of(data)) - 0.3


def test_small_images_are_kept_or_only_get_their_markers(restart, photo, encoded):
    data = encoded(photo(128, 100, 1))
    assert Recoder(RecodeOptions(resize="short=256"))(data)[0] is data
    stored, header, _ = Recoder(RecodeOptions(resize="short=256", restart=4))(data)
    assert header.restart_interval == 4
    np.testing.assert_array_equal(pixels_of(stored), pixels_of(data))


def unusual_images(photo, encoded):
    """Of 80×60 pixels: bytes, what is said of them, their pixels as Pillow has them."""
    picture, buffer = Image.fromarray(photo(80, 60, 1)), io.BytesIO()
    picture.convert("CMYK").save(buffer, "JPEG", quality=95)
    cmyk = buffer.getvalue()
    grey16 = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) << 8)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(np.rot90(np.asarray(picture)), quality=95, exif=exif)  # turned back when looked at
    rgba, png16 = io.BytesIO(), io.BytesIO()
    picture.convert("RGBA").save(rgba, "PNG")
    grey16.save(png16, "PNG")
    yield cmyk, ("cmyk",), pixels_of(cmyk)
    yield encoded(np.asarray(picture), "PNG"), ("png",), np.asarray(picture)
    yield rgba.getvalue(), ("png",), np.asarray(picture)
    yield png16.getvalue(), ("png", "16-bit"), np.asarray(picture.convert("L").convert("RGB"))
    yield encoded(np.asarray(picture), progressive=True, quality=95), ("progressive",), np.asarray(picture)
    yield turned, ("rotated",), np.asarray(picture)
    if JPEGTRAN:
        run = subprocess.run([JPEGTRAN, "-arithmetic"], input=cmyk, stdout=subprocess.PIPE, check=True)
        yield run.stdout, ("arithmetic", "cmyk"), pixels_of(cmyk)


@pytest.mark.parametrize(
    "options", [{"resize": "short=30", "restart": 2}, {"quality": 95}, {"store": "raw"}, {"restart": 2}], ids=str
)
def test_unusual_images_become_usual_and_are_counted(library, photo, encoded, options):
    if options == {"restart": 2} and turbojpeg.lossless() is None:
        pytest.skip("nothing writes restart markers here")
    for data, said, wanted in unusual_images(photo, encoded):
        stored, header, unusual = Recoder(RecodeOptions(**options))(memoryview(data))
        assert unusual == said and header == read_header(stored)
        if header.encoding == "jpeg":
            found = jpeg.read_markers(stored)
            assert (found.frame, found.components, found.exif) == (0xC0, header.channels, 0)
        if "resize" in options:
            wanted = lanczos_in_float64(wanted, 40, 30)
        assert psnr(pixels_of(stored), wanted) > 30


def test_many_threads_make_the_same(library, photo, encoded):
    images = [encoded(photo(200 + 7 * i, 150 + 5 * i, i), quality=90) for i in range(12)]
    options = RecodeOptions(resize="short=100", restart=4), RecodeOptions(store="raw", size=64)
    for recoder in map(Recoder, options):
        alone = [recoder(data)[0] for data in images]
        with ThreadPoolExecutor(8) as pool:
            assert [stored for stored, *_ in pool.map(recoder, images * 4)] == alone * 4


# --- pixels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("compress", [None, "lz4", "zstd"])
def test_raw_pixels_are_a_pnm_that_pillow_reads(photo, encoded, grey, compress):
    if compress:
        pytest.importorskip(pnm.MODULES[compress])
    data = encoded(photo(90, 64, 1, grey))
    stored, header, _ = Recoder(RecodeOptions(store="raw", compress=compress))(data)
    encoding = f"pnm+{compress}" if compress else "pnm"
    assert header == read_header(stored) == (encoding, 90, 64, 1 if grey else 3, 0)
    np.testing.assert_array_equal(decode(stored, 3), decode(data, 3))
    if not compress:
        assert stored[:2] == (b"P5" if grey else b"P6")
        np.testing.assert_array_equal(pixels_of(stored), decode(data, 3))


@pytest.mark.parametrize("size", [(90, 64), (64, 91), (20, 10)])
def test_raw_pixels_of_one_size_are_the_middle(photo, encoded, size):
    data = encoded(photo(*size, 1), quality=95)
    stored, header, _ = Recoder(RecodeOptions(store="raw", size=32))(data)
    assert header == ("pnm", 32, 32, 3, 0)
    width, height = RecodeOptions(store="raw", size=32).target(*size)
    left, top = (width - 32) // 2, (height - 32) // 2
    wanted = lanczos_in_float64(decode(data, 3), width, height)[top : top + 32, left : left + 32].clip(0, 255)
    assert np.abs(pixels_of(stored) - wanted).max() <= 1.2


@pytest.mark.parametrize("channels", [None, 1, 3])
@pytest.mark.parametrize("grey", [False, True])
def test_headerless_pixels(photo, encoded, channels, grey):
    data = encoded(photo(90, 64, 1, grey))
    options = RecodeOptions(store="raw", headerless=True, channels=channels)
    stored, header, _ = Recoder(options)(data)
    channels = channels or (1 if grey else 3)
    assert header == ("raw", 90, 64, channels, 0)
    np.testing.assert_array_equal(np.frombuffer(stored, np.uint8).reshape(64, 90, channels), decode(data, channels))


@pytest.mark.parametrize("compress", ["lz4", "zstd"])
def test_a_missing_compression_is_said_at_once(monkeypatch, compress):
    monkeypatch.setitem(pnm.MODULES, compress, "no_such_package")
    with pytest.raises(MissingBackendError, match="compress"):
        Recoder(RecodeOptions(store="raw", compress=compress))


def test_an_image_for_which_nothing_is_installed_is_a_bad_image(tmp_path, photo, encoded, command):
    """Any file may begin with zstd's magic. In a process of its own, where the package cannot be imported."""
    folder = tmp_path / "raw" / "class"
    folder.mkdir(parents=True)
    (folder / "1.jpg").write_bytes(encoded(photo(40, 40, 1)))
    (folder / "2.jpg").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    without = tmp_path / "without"
    without.mkdir()
    (without / "zstandard.py").write_text("raise ImportError")
    environment = os.environ | {"PYTHONPATH": f"{without}:{os.environ.get('PYTHONPATH', '')}"}
    done = command("datapipe", "pack", tmp_path / "raw", tmp_path / "out", env=environment)
    assert done.returncode == 1 and "2.jpg" in done.stderr and "pip install '.[compress]'" in done.stderr
    done = command("datapipe", "pack", tmp_path / "raw", tmp_path / "out", "--max-bad", "1", env=environment)
    assert done.returncode == 0 and "zstandard is not installed" in done.stderr, done.stderr
