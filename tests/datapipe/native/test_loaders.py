"""Loaders give the same batches with the decoder in C as without it."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

from datapipe import native
from datapipe.images.recode import RecodeOptions
from datapipe.loaders import native_pixels, open_loader, painter
from datapipe.loaders.batch_slots import ImageSlots
from datapipe.loaders.image_chunk import ChunkInMemory
from datapipe.packing import PackOptions, pack
from datapipe.sampling.augment import Augment


@pytest.fixture
def without(monkeypatch):
    """Loaders that are opened from now on have no decoder in C."""
    return lambda: monkeypatch.setattr(painter, "choose_native", lambda: native.Choice(None, ""))


@pytest.fixture
def counted(monkeypatch):
    """How many images the decoder in C took, and how many it left."""
    counts = {"taken": 0, "left": 0}

    def counting(library, slots, chunk):
        left, stage_s = native_pixels.decode_in_c(library, slots, chunk)
        counts["left"] += len(left)
        counts["taken"] += len(chunk.slots) - len(left)
        return left, stage_s

    monkeypatch.setattr(painter, "decode_in_c", counting)
    return counts


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, photo):
    """Images of every kind that a folder may hold, packed as they are."""
    raw = tmp_path_factory.mktemp("mixed") / "raw"
    kinds = {"jpg": {}, "progressive.jpg": {"progressive": True}, "png": {}, "grey.jpg": {}, "cmyk.jpg": {}}
    for label in "ab":
        (raw / label).mkdir(parents=True)
        for i, (suffix, options) in enumerate(kinds.items()):
            for width, height in ((90, 61), (33, 170), (400, 300)):  # the last is decoded at a smaller scale
                image = Image.fromarray(photo(width, height, i))
                image = image.convert({"grey.jpg": "L", "cmyk.jpg": "CMYK"}.get(suffix, "RGB"))
                image.save(raw / label / f"{width}.{suffix}", **options)
    pack(raw, raw.parent / "packed", PackOptions(workers=1, format="tar"))
    return raw.parent / "packed" / "train"


def batches(folder, **settings):
    with open_loader(folder, 8, size=48, threads=2, last="pad", **settings) as loader:
        return [tuple(np.asarray(part).copy() for part in (b.images, b.labels, b.samples, b.valid)) for b in loader]


def check_alike(folder, without, **settings):
    with_it = batches(folder, **settings)
    without()
    for ours, theirs in zip(with_it, batches(folder, **settings), strict=True):
        assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train": False},
        {"order": "blocks", "io": "mmap"},
        {"io": "direct", "augment": Augment("pad", pad=40)},
        {"backend": "webdataset"},
    ],
    ids=str,
)
def test_the_same_batches(mixed, without, counted, settings):
    assert native_pixels.choose_native().native is not None or pytest.skip("no decoder in C here")
    check_alike(mixed, without, **settings)
    assert counted["taken"] >= 6 and counted["left"] >= 12  # of 12 and of 18


@pytest.mark.parametrize("format", ["hdf5", "lmdb"])
def test_formats(packed_folders, without, counted, format):
    assert native_pixels.choose_native().native is not None or pytest.skip("no decoder in C here")
    check_alike(packed_folders[format] / "train", without)
    assert counted["taken"] > counted["left"]


def test_bytes_that_are_left_are_copied_while_they_are_there(library):
    """As those of a file in memory, which is closed by another thread that cannot read it."""

    class Fleeting(ChunkInMemory):
        def locate(self):
            self.memory = np.frombuffer(self.data.pop(0), np.uint8).copy()
            self.jobs["data"] = self.memory.ctypes.data
            return self.hold(), np.zeros(native.PROGRESS, np.int64)

        @contextmanager
        def hold(self):
            yield
            self.memory[:] = 0

    chunk = Fleeting([0], np.arange(1), np.zeros(1, native.JOB), [b"no image"])
    slots = ImageSlots(np.arange(1), 1, np.zeros((1, 8, 8, 3), np.uint8))
    assert native_pixels.decode_in_c(library, slots, chunk)[0] == [0]
    assert chunk.data[0] == b"no image"


def test_a_damaged_image_is_reported_as_ever(tmp_path, photo, without):
    """Its entropy-coded data, so that only a decoder finds it; what is left is decoded as well as it can be."""
    (tmp_path / "raw" / "a").mkdir(parents=True)
    for i in range(4):
        path = tmp_path / "raw" / "a" / f"{i}.jpg"
        Image.fromarray(photo(80, 60, i)).save(path)
        data = bytearray(path.read_bytes())
        if i == 2:
            data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
        path.write_bytes(data if i != 3 else data[:-300])
    pack(tmp_path / "raw", tmp_path / "packed", PackOptions(workers=1, max_bad=1, recode=RecodeOptions(check="header")))
    check_alike(tmp_path / "packed" / "train", without, train=False)
