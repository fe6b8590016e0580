"""What a decoder on another device is fed is the same whether windows are cut in C or in Python."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from datapipe import native
from datapipe.dataset import DataSet
from datapipe.loaders import native_pixels, window_cutter
from datapipe.loaders.base import DataDescription
from datapipe.loaders.batch_slots import WindowMemory
from datapipe.loaders.cpu import make_source
from datapipe.loaders.engine import Delivery, Engine
from datapipe.loaders.image_chunk import ChunkInMemory
from datapipe.loaders.options import LoaderOptions
from datapipe.loaders.window_cutter import EncodedImages, WindowCutter
from datapipe.packing import PackOptions, pack
from datapipe.sampling.augment import Augment

NOTHING = np.zeros(3, np.uint8)


@pytest.fixture
def without(monkeypatch):
    """Cutters that are made from now on have no decoder in C."""
    return lambda: monkeypatch.setattr(window_cutter, "choose_native", lambda: native.Choice(None, ""))


@pytest.fixture
def cut_in_c(monkeypatch):
    """How many windows were cut in C."""
    assert native_pixels.choose_native().native is not None or pytest.skip("no decoder in C here")
    counts = []
    cut = native.Native.cut

    def counting(self, jobs, *rest):
        left = cut(self, jobs, *rest)
        counts.append(len(jobs) - left)
        return left

    monkeypatch.setattr(native.Native, "cut", counting)
    return counts


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, photo):
    """JPEG files with restart markers, and images that are left to Python."""
    raw = tmp_path_factory.mktemp("mixed") / "raw"
    kinds = {"jpg": {"restart_marker_blocks": 2}, "progressive.jpg": {"progressive": True}, "png": {}}
    for label in "ab":
        (raw / label).mkdir(parents=True)
        for i, (suffix, options) in enumerate(kinds.items()):
            for width, height in ((90, 61), (33, 170), (400, 300)):
                Image.fromarray(photo(width, height, i)).save(raw / label / f"{width}.{suffix}", **options)
    pack(raw, raw.parent / "packed", PackOptions(workers=1, format="tar"))
    return raw.parent / "packed" / "train"


@pytest.fixture
def folder_of_photographs(tmp_path, photo):
    """Higher than wide, without restart markers: a crop of their middle needs no lower rows."""
    (tmp_path / "raw" / "a").mkdir(parents=True)
    for i in range(3):
        Image.fromarray(photo(64, 200, i)).save(tmp_path / "raw" / "a" / f"{i}.jpg")
    pack(tmp_path / "raw", tmp_path / "packed", PackOptions(workers=1, format="tar"))
    return tmp_path / "packed" / "train"


class Kept(Delivery[EncodedImages]):
    """The slots themselves."""

    def new_slots(self, positions, count):
        return EncodedImages(positions, count, NOTHING)

    def put_nothing(self, slots, slot):
        for i in range(*slot.indices(len(slots.data))) if isinstance(slot, slice) else (slot,):
            slots.data[i] = NOTHING
        slots.starts[slot], slots.shapes[slot] = 0, 1

    def finish(self, slots, engine):
        return slots

    def set_size(self, size): ...
    def drain(self): ...


def batches(folder, may_end_late=True, **settings):
    """Return the slots of an epoch, and the loader's count of bytes."""
    options = LoaderOptions(8, size=48, threads=2, last="pad", **settings)
    data_set = DataSet(folder, options.io)
    source = make_source(data_set, options)
    loader = Engine(
        DataDescription.from_data_set(data_set), options, source, WindowCutter(options, may_end_late), Kept()
    )
    try:
        slots = list(loader)
        assert {"read", "window"} <= loader.stages().keys()
        return slots, loader.read_bytes
    finally:
        loader.close()


def check_alike(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert [data.tobytes() for data in mine.data] == [data.tobytes() for data in other.data]
        for name in ("starts", "shapes", "flips", "samples", "labels", "valid"):
            assert np.array_equal(getattr(mine, name), getattr(other, name)), name


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train": False},
        {"order": "blocks", "io": "mmap"},
        {"io": "direct", "augment": Augment("pad", pad=40)},
        {"may_end_late": False},
    ],
    ids=str,
)
def test_the_same_windows(mixed, without, cut_in_c, settings):
    ours, read_bytes = batches(mixed, **settings)
    assert sum(cut_in_c) == 6  # of 18 images
    without()
    theirs, their_bytes = batches(mixed, **settings)
    check_alike(ours, theirs)
    assert read_bytes == their_bytes == DataSet(mixed).index["size"].sum()  # of the images, not of the windows
    assert sum(cut_in_c) == 6


@pytest.mark.parametrize("in_c", [False, True])
def test_a_window_whose_data_end_late_stays_a_whole_image(folder_of_photographs, without, in_c):
    """For a decoder that may refuse it: without restart markers, rows below the crop would stay behind it."""
    if not in_c:
        without()
    data_set = DataSet(folder_of_photographs)
    for may_end_late in (True, False):
        (slots, *_), _ = batches(folder_of_photographs, may_end_late, train=False)
        stored = [data_set.read(i) for i in range(3)]
        assert [data.tobytes() == whole for data, whole in zip(slots.data, stored, strict=False)] == [
            not may_end_late
        ] * 3
        assert all(len(data) == len(whole) for data, whole in zip(slots.data, stored, strict=False))


@pytest.mark.parametrize("format", ["hdf5", "lmdb"])
def test_formats(packed_folders, without, cut_in_c, format):
    ours, _ = batches(packed_folders[format] / "train")
    assert sum(cut_in_c)
    without()
    check_alike(ours, batches(packed_folders[format] / "train")[0])


def test_bad_images_are_those_of_python(tmp_path, photo, without, cut_in_c):
    """Bytes that are not those of the checksum."""
    (tmp_path / "raw" / "a").mkdir(parents=True)
    for i in range(5):
        Image.fromarray(photo(64, 48, i)).save(tmp_path / "raw" / "a" / f"{i}.jpg")
    pack(tmp_path / "raw", tmp_path / "packed", PackOptions(workers=1, format="tar"))
    folder = tmp_path / "packed" / "train"
    index = DataSet(folder).index
    (shard,) = folder.glob("*.tar")
    with shard.open("r+b") as file:
        file.seek(int(index["offset"][2] + index["size"][2] // 2))
        file.write(b"damaged")
    ours, _ = batches(folder, train=False, max_bad=1)
    assert [slots.valid[:5].tolist() for slots in ours] == [[True, True, False, True, True]]
    assert sum(cut_in_c) == 4
    without()
    check_alike(ours, batches(folder, train=False, max_bad=1)[0])


def test_an_abandoned_batch_is_left_alone(cut_in_c, photo, tmp_path):
    Image.fromarray(photo(64, 48, 0)).save(tmp_path / "image.jpg")
    jobs = np.zeros(1, native.JOB)
    jobs["width"], jobs["height"], jobs["box"] = 64, 48, (0, 0, 8, 8)
    slots = EncodedImages(np.arange(1), 1, NOTHING)
    slots.abandon()
    chunk = ChunkInMemory([0], np.arange(1), jobs, [(tmp_path / "image.jpg").read_bytes()])
    WindowCutter(LoaderOptions(1, size=8, threads=1)).put(slots, chunk)
    assert not chunk.bad and slots.data == [NOTHING] and jobs["box"].tolist() == [[0, 0, 8, 8]]


def test_a_batch_keeps_its_windows(mixed, cut_in_c):
    """Their memory is used again once the batch is gone, and not before."""
    options = LoaderOptions(8, size=48, threads=1)
    data_set = DataSet(mixed)
    data, source = DataDescription.from_data_set(data_set), make_source(data_set, options)
    loader = Engine(data, options, source, WindowCutter(options), Kept())
    for _ in range(3):
        first = next(iter(loader))
        before = [data.tobytes() for data in first.data]
        list(loader)  # others are cut meanwhile
        assert [data.tobytes() for data in first.data] == before
    loader.close()
    assert sum(cut_in_c)


def test_memory_is_used_again():
    class Batch: ...

    memory, batches = WindowMemory(), [Batch(), Batch()]
    first, second = (memory.take(size, batch).ctypes.data for size, batch in zip((1000, 0), batches, strict=True))
    batches.pop(0)
    smaller, larger = memory.take(1250, batches[0]), memory.take(1251, batches[0])
    assert smaller.ctypes.data == first and len(smaller) == 1250 and len(larger) == 1251
    assert len({first, second, larger.ctypes.data}) == 3
