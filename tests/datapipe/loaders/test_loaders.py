"""Contract of the backends that read by the index."""

import gc
import json
import os
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from datapipe.dataset import DataSet
from datapipe.dataset.index import ENCODINGS
from datapipe.errors import DecodeError, ManifestError, SettingError, ShardCorruptError
from datapipe.loaders import BACKENDS, normalise, open_loader
from datapipe.packing import PackOptions, pack
from datapipe.sampling.augment import Augment, eval_windows, train_windows
from datapipe.sampling.order import permutation

JPEG = ENCODINGS.index("jpeg")


def check(pixels, wanted, backend, scaled):
    """Of 255: DALI's own decoder and rounding; libjpeg-turbo's smaller scales instead of the filter."""
    difference = np.abs(pixels.astype(int) - wanted)
    if backend == "dali":
        assert difference.mean() <= 0.5 and difference.max() <= 16
    elif scaled:
        assert difference.mean() <= 2
    else:
        assert difference.max() <= 1


@pytest.fixture(params=[name for name in BACKENDS if name != "webdataset"])
def backend(request):
    if request.param == "dali":
        pytest.importorskip("nvidia.dali")
    return request.param


@pytest.fixture(params=["tar", "hdf5", "lmdb"])
def folder(request, packed_folders):
    return packed_folders[request.param] / "train"  # 61 images


def epoch(loader):
    """All that one epoch gives, batch by batch, as numpy arrays."""
    fields = ("images", "labels", "samples", "valid")
    return [tuple(getattr(batch, field).numpy().copy() for field in fields) for batch in loader]


def column(batches, i):
    return np.concatenate([batch[i] for batch in batches])


def test_numbers_of_numpy_are_numbers(packed_folders):
    with open_loader(packed_folders["tar"] / "train", np.int64(8), size=np.int32(16), seed=np.uint8(3)) as loader:
        assert json.loads(json.dumps(loader.state_dict()))["seed"] == 3


def test_padding_may_exceed_the_output(packed_folders, backend):
    """A crop may then lie beyond the image, and be black."""
    augment = Augment(crop="pad", pad=40)
    with open_loader(packed_folders["tar"] / "train", 61, backend=backend, size=16, augment=augment) as loader:
        (batch,) = loader
        assert (batch.images.flatten(1).sum(1) == 0).any() and batch.images.any()


@pytest.mark.parametrize("change", [{"step": 1.5}, {"epoch": None}, {"step": "3"}, {"epoch": -1}, {"step": True}])
def test_what_is_no_state_is_refused(packed_folders, change):
    with open_loader(packed_folders["tar"] / "train", 8, size=16) as loader:
        with pytest.raises(SettingError, match=f"^{next(iter(change))}: "):
            loader.load_state_dict(loader.state_dict() | change)
        assert loader.state_dict()["step"] == 0


def test_batches_are_as_promised(folder, backend):
    with open_loader(folder, 8, backend=backend, size=48) as loader:
        batches = list(loader)
        assert len(batches) == len(loader) == 7 and loader.num_samples == 61
        assert (loader.num_classes, loader.channels, loader.size) == (3, 3, 48)
        for batch in batches:
            assert batch.images.dtype == torch.uint8 and batch.images.shape == (8, 3, 48, 48)
            assert batch.images.is_contiguous(memory_format=torch.channels_last)
            assert batch.labels.dtype == batch.samples.dtype == torch.int64 and batch.valid.dtype == torch.bool
            assert batch.valid.all()


def test_labels_belong_to_the_images(folder, backend, image_folder):
    """Against the raw files: bytes of the sample's file, its folder's number."""
    classes = sorted(path.name for path in (image_folder / "train").iterdir())
    raw = {path.read_bytes(): classes.index(path.parent.name) for path in (image_folder / "train").rglob("*.*")
           if path.is_file()}  # fmt: skip
    with open_loader(folder, 9, backend=backend, size=32) as loader, DataSet(folder) as data_set:
        for batch in loader:
            for sample, label in zip(batch.samples.tolist(), batch.labels.tolist(), strict=True):
                assert raw[data_set.read(sample)] == label


def reference(pixels, box, flip, size):
    """A window, cut from a black plane, scaled by torch in float32 and rounded, mirrored."""
    left, top, width, height = (int(n) for n in box)
    padded = np.pad(pixels, ((size, size), (size, size), (0, 0)))
    window = padded[size + top : size + top + height, size + left : size + left + width]
    planes = torch.from_numpy(np.ascontiguousarray(window)).permute(2, 0, 1)[None].float()
    scaled = F.interpolate(planes, size=(size, size), mode="bilinear", antialias=True)[0].round()
    return (scaled.flip(-1) if flip else scaled).numpy()


@pytest.mark.parametrize("crop", ["random_resized", "none"])
def test_pixels_equal_a_plain_reference(folder, backend, crop):
    size, augment = 40, Augment(crop)
    with open_loader(folder, 61, backend=backend, size=size, seed=3, augment=augment) as loader:
        loader.set_epoch(2)
        ((images, _, samples, _),) = epoch(loader)
    with DataSet(folder) as data_set:
        np.testing.assert_array_equal(samples, permutation(61, 3, 2))
        records = data_set.index[samples]
        sizes = records["width"].astype(int), records["height"].astype(int)
        windows = train_windows(augment, *sizes, size, 3, 2, np.arange(61))
        assert windows.flips.any() and not windows.flips.all()
        for i, sample in enumerate(samples):
            pixels = data_set.pixels(int(sample), data_set.read(int(sample)))
            wanted = reference(pixels, windows.boxes[i], windows.flips[i], size)
            check(images[i], wanted, backend, records["encoding"][i] == JPEG and windows.boxes[i, 2:].min() >= 2 * size)


def test_pad_crop_pixels(tmp_path, sample_dir, backend):
    pack(sample_dir, tmp_path / "out", PackOptions(workers=1))
    folder = tmp_path / "out" / "val"
    with open_loader(folder, 300, backend=backend, size=28) as loader, DataSet(folder) as data_set:
        assert loader.channels == 1
        images, _, samples, _ = (np.concatenate(part) for part in zip(*epoch(loader), strict=True))
        sides = np.full(600, 28)
        windows = train_windows(Augment("pad"), sides, sides, 28, 0, 0, np.arange(600))
        for i, sample in enumerate(samples.tolist()):
            pixels = data_set.pixels(sample, data_set.read(sample))
            np.testing.assert_array_equal(images[i], reference(pixels, windows.boxes[i], windows.flips[i], 28))


@pytest.fixture(scope="module")
def turned(tmp_path_factory, photo):
    """Photographs, wider than high, whose EXIF says to turn them; that of class `i` in the i-th of the eight ways."""
    root = tmp_path_factory.mktemp("turned")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        folder = root / "raw" / "train" / str(orientation)
        folder.mkdir(parents=True)
        Image.fromarray(photo(90, 60, orientation)).save(folder / "a.jpg", quality=95, exif=exif)
    pack(root / "raw", root / "packed", PackOptions(workers=1))
    with DataSet(root / "packed" / "train") as data_set:
        assert all(b"Exif\0\0" in data_set.read(i) for i in range(8))
    return root / "packed" / "train"


@pytest.mark.parametrize("crop", ["random_resized", "pad", "none"])
@pytest.mark.parametrize("train", [True, False])
def test_no_backend_turns_images_by_exif(turned, crop, train):
    pytest.importorskip("nvidia.dali")
    augment, batches = Augment(crop), []
    for backend in ("cpu", "dali"):
        with open_loader(turned, 8, backend=backend, size=48, train=train, augment=augment, seed=1) as loader:
            for number in range(3):
                loader.set_epoch(number)
                batches.append(next(iter(loader)))
    for cpu, dali in zip(batches[:3], batches[3:], strict=True):
        assert torch.equal(cpu.samples, dali.samples) and dali.valid.all()
        for i in range(8):
            check(dali.images[i].numpy(), cpu.images[i].numpy(), "dali", False)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("last", ["drop", "pad"])
def test_ranks_together_give_the_same_global_batches(packed_folders, backend, world_size, last):
    """Samples, labels and pixels, for any number of ranks, threads and formats."""

    def ranks(world_size, threads, name):
        parts = []
        for rank in range(world_size):
            with open_loader(
                packed_folders[name] / "train", 12 // world_size, backend=backend, size=24, seed=9, rank=rank,
                world_size=world_size, threads=threads, last=last,
            ) as loader:  # fmt: skip
                loader.set_epoch(4)
                parts.append(epoch(loader))
        assert len({len(part) for part in parts}) == 1
        return [np.concatenate([part[step][field] for part in parts])
                for step in range(len(parts[0])) for field in range(4)]  # fmt: skip

    alone, together = ranks(1, 1, "tar"), ranks(world_size, 3, "lmdb")
    assert len(alone) == 4 * (5 if last == "drop" else 6)
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_evaluation_counts_every_sample_once(folder, backend, world_size):
    seen = []
    for rank in range(world_size):
        with open_loader(folder, 7, backend=backend, train=False, size=24, rank=rank, world_size=world_size) as loader:
            assert len(loader) == -(-61 // (7 * world_size))
            batches = epoch(loader)
        valid = column(batches, 3)
        assert (column(batches, 2)[~valid] == -1).all() and not column(batches, 0)[~valid].any()
        seen.append(column(batches, 2)[valid])
    assert sorted(np.concatenate(seen)) == list(range(61))


def test_evaluation_cuts_the_centre(folder, backend):
    with open_loader(folder, 61, backend=backend, train=False, size=24) as loader, DataSet(folder) as data_set:
        ((images, _, samples, _),) = epoch(loader)
        boxes, _ = eval_windows(data_set.index["width"].astype(int), data_set.index["height"].astype(int), 24)
        for i in range(0, 61, 5):
            assert samples[i] == i
            wanted = reference(data_set.pixels(i, data_set.read(i)), boxes[i], False, 24)
            check(images[i], wanted, backend, data_set.index["encoding"][i] == JPEG and boxes[i, 2:].min() >= 48)


def test_epochs_differ_and_repeat(folder, backend):
    with open_loader(folder, 10, backend=backend, size=24) as loader:
        first = epoch(loader)
        loader.set_epoch(1)
        second = epoch(loader)
        loader.set_epoch(0)
        again = epoch(loader)
    assert not np.array_equal(column(first, 2), column(second, 2))
    for i in range(4):
        np.testing.assert_array_equal(column(first, i), column(again, i))


@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_state_continues_on_another_world_size(folder, backend, stop):
    with open_loader(folder, 12, backend=backend, size=24) as loader:
        whole = epoch(loader)
        loader.set_epoch(0)
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        state = loader.state_dict()
        batches.close()
    assert state["epoch"] == 0 and state["step"] == stop
    rests = []
    for rank in range(3):
        with open_loader(folder, 4, backend=backend, size=24, rank=rank, world_size=3) as loader:
            loader.load_state_dict(state)
            rests.append(epoch(loader))
            assert loader.state_dict()["step"] == 5
    for step, batch in enumerate(whole[stop:]):
        for field in range(4):
            np.testing.assert_array_equal(np.concatenate([rest[step][field] for rest in rests]), batch[field])


def test_state_of_another_run_is_refused(folder, backend):
    with open_loader(folder, 12, backend=backend, size=24) as loader:
        state = loader.state_dict()
    for changed in ({"batch_size": 11}, {"seed": 1}):
        with (
            open_loader(folder, **{"batch_size": 12, "size": 24, "backend": backend, **changed}) as loader,
            pytest.raises(SettingError, match=r"global_batch_size|seed"),
        ):
            loader.load_state_dict(state)


def test_state_of_another_data_set_is_refused(packed_folders, backend):
    with open_loader(packed_folders["tar"] / "train", 5, size=24, backend=backend) as loader:
        state = loader.state_dict()
    with (
        open_loader(packed_folders["hdf5"] / "train", 5, size=24, backend=backend) as loader,
        pytest.raises(SettingError, match="data_set"),
    ):
        loader.load_state_dict(state)


def test_padding_that_is_too_little_is_refused_at_once(folder, backend):
    with pytest.raises(SettingError, match="pad: 2 is too little"):
        open_loader(folder, 5, size=280, backend=backend, augment=Augment("pad", pad=2))


def test_batches_kept_by_the_user_are_not_overwritten(folder, backend):
    with open_loader(folder, 5, backend=backend, size=24, threads=2) as loader:
        kept = [batch.images[:2] for batch in loader]  # a part keeps the whole batch's memory
        loader.set_epoch(0)
        for part, (images, *_) in zip(kept, epoch(loader), strict=True):
            np.testing.assert_array_equal(part.numpy(), images[:2])


def test_memory_is_used_again(folder):
    with open_loader(folder, 5, backend="cpu", size=24) as loader:
        for number in range(6):
            loader.set_epoch(number)
            for _ in loader:
                pass
        gc.collect()
        assert 1 <= len(loader._delivery._memory._free) <= 6


def test_decoders_leave_torch_to_the_consumer(folder):
    """In a decoder torch has one thread; in the consumer, and in threads made later, as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with open_loader(folder, 5, backend="cpu", size=24, threads=2) as loader:
            list(loader)
            gate = threading.Barrier(2)
            inside = [loader._threads.fill.submit(lambda: (gate.wait(), torch.get_num_threads())[1]) for _ in range(2)]
            assert [future.result() for future in inside] == [1, 1]
            later = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert torch.get_num_threads() == 3 and later == [3]
    finally:
        torch.set_num_threads(before)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def settle(count, measure):
    deadline = time.monotonic() + 10
    while measure() > count and time.monotonic() < deadline:
        time.sleep(0.02)
    return measure()


def test_early_break_and_close_leave_nothing_behind(folder, backend):
    threads, files = threading.active_count(), open_files()
    for _ in range(5):
        loader = open_loader(folder, 4, backend=backend, size=200, threads=3)
        for _ in loader:
            break
        for _ in loader:  # goes on where it stopped
            break
        assert loader.state_dict()["step"] == 2
        loader.close()
        loader.close()
        with pytest.raises(ValueError, match="closed"):
            next(iter(loader))
    assert settle(threads, threading.active_count) <= threads
    assert settle(files, open_files) <= files


def test_an_exception_in_the_consumer_leaves_nothing_behind(folder, backend):
    threads, files = threading.active_count(), open_files()
    with pytest.raises(RuntimeError, match="mine"), open_loader(folder, 4, backend=backend, size=100) as loader:
        for _ in loader:
            raise RuntimeError("mine")
    assert settle(threads, threading.active_count) <= threads
    assert settle(files, open_files) <= files


def test_a_second_iteration_ends_the_first(folder, backend):
    """And is not mixed up with it: its pixels are its own."""
    with open_loader(folder, 4, backend=backend, size=24) as loader:
        whole = epoch(loader)
        loader.set_epoch(0)
        stale = iter(loader)
        next(stale)
        loader.set_epoch(0)
        fresh = epoch(loader)
        for mine, wanted in zip(fresh, whole, strict=True):
            for a, b in zip(mine, wanted, strict=True):
                np.testing.assert_array_equal(a, b)
        with pytest.raises(ValueError, match="ended by another"):
            next(stale)
        assert loader.state_dict()["step"] == len(loader)


def test_iterating_again_goes_on_with_the_next_epoch(folder, backend):
    with open_loader(folder, 10, backend=backend, size=24) as loader:
        without = [epoch(loader), epoch(loader)]
        assert loader.state_dict()["epoch"] == 1
        loader.set_epoch(1)
        np.testing.assert_array_equal(column(epoch(loader), 2), column(without[1], 2))
        state = loader.state_dict()
        loader.load_state_dict(state)  # at the end of an epoch: nothing is left of it
        assert epoch(loader) == [] and len(epoch(loader)) == 6
    with open_loader(folder, 10, backend=backend, size=24, train=False) as loader:
        for _ in loader:
            break
        for _ in range(2):
            assert column(epoch(loader), 2).tolist() == [*range(61), *[-1] * 9]


@pytest.mark.parametrize("wrong", [{"step": 999}, {"step": -1}, {"lanes": 7}, {"train": False}, {"last": "pad"}])
def test_a_state_out_of_range_is_refused(folder, backend, wrong):
    with (
        open_loader(folder, 12, backend=backend, size=24, order="blocks") as loader,
        pytest.raises(SettingError, match=next(iter(wrong))),
    ):
        loader.load_state_dict(loader.state_dict() | wrong)


@pytest.mark.parametrize("train", [True, False])
def test_padding_where_windows_are_as_large_as_the_output(tmp_path, sample_dir, backend, train):
    """CIFAR and the MNIST family: "pad" crops, the last batch not full."""
    pack(sample_dir, tmp_path / "out", PackOptions(workers=1))
    with (
        open_loader(tmp_path / "out" / "val", 64, backend=backend, size=28, train=train, last="pad") as loader,
        open_loader(tmp_path / "out" / "val", 64, size=28, train=train, last="pad") as reference,
    ):
        for mine, wanted in zip(loader, reference, strict=True):
            assert torch.equal(mine.images, wanted.images) and torch.equal(mine.valid, wanted.valid)


def test_padding_given_for_evaluation_has_no_effect(folder, backend):
    with open_loader(folder, 8, backend=backend, size=24, train=False, augment=Augment("pad", pad=100)) as loader:
        assert sum(int(batch.valid.sum()) for batch in loader) == 61


def test_closing_in_mid_epoch_is_said(folder, backend):
    with open_loader(folder, 4, backend=backend, size=24) as loader:
        batches = iter(loader)
        next(batches)
        loader.close()
        with pytest.raises(ValueError, match="the loader is closed"):
            next(batches)


@pytest.mark.parametrize("order", ["full", "blocks"])
def test_a_rank_may_have_nothing_but_padding(folder, backend, order):
    """61 images, 8 ranks of 10: the last rank's only batch is empty, in training, too."""
    for augment in (Augment("random_resized"), Augment("pad", pad=20)):
        with open_loader(
            folder, 10, backend=backend, size=24, rank=7, world_size=8, last="pad", order=order, augment=augment
        ) as loader:
            ((batch),) = loader
        assert not batch.valid.any() and not batch.images.any() and (batch.samples == -1).all()


@pytest.fixture
def copied(tmp_path, folder):
    """The data set, to be spoilt."""
    target = tmp_path / "copy"
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_one_flipped_byte_is_named(copied, backend):
    with DataSet(copied) as data_set:
        sample = 17
        record = data_set.index[sample]
        name, key = data_set.manifest.shards[record["shard"]].name, data_set.key(sample)
    path = copied / name
    data = bytearray(path.read_bytes())
    data[int(record["offset"]) + int(record["size"]) // 2] ^= 1
    path.write_bytes(data)
    with open_loader(copied, 61, backend=backend, size=24) as loader, pytest.raises(ShardCorruptError) as caught:
        epoch(loader)
    assert caught.value.shard == name and caught.value.key == key and name in str(caught.value)


@pytest.mark.parametrize("length", [0, 1000])
def test_truncated_shard_is_named(copied, backend, length):
    name = sorted(path.name for path in copied.glob("shard-*") if path.suffix != ".idx")[-1]
    os.truncate(copied / name, length)
    settings = {"backend": backend, "size": 24, "retries": 1}
    with open_loader(copied, 61, **settings) as loader, pytest.raises(ShardCorruptError, match=name):
        epoch(loader)
    (copied / name).unlink()
    with open_loader(copied, 61, **settings) as loader, pytest.raises(ShardCorruptError, match="missing"):
        epoch(loader)


def test_undecodable_image_is_named(tmp_path, backend, photo, encoded):
    """Whole by its header and its checksums, but broken inside."""
    good = encoded(photo(64, 64, 1))
    scan = good.index(b"\xff\xda")
    broken = good[:scan] + b"\xff\xda\x00\x0c\x03\x01\x77\x02\x77\x03\x77\x00\x3f\x00" + bytes(20) + b"\xff\xd9"
    for i in range(4):
        path = tmp_path / "raw" / "a" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(broken if i == 2 else good)
    pack(tmp_path / "raw", tmp_path / "out", PackOptions(workers=1))
    with (
        open_loader(tmp_path / "out" / "train", 4, backend=backend, size=24) as loader,
        pytest.raises(DecodeError, match=r"shard-000000\.tar, key a/2: "),
    ):
        epoch(loader)


def test_cache_stages_once(folder, backend, tmp_path):
    with open_loader(folder, 8, backend=backend, size=24) as loader:
        wanted = epoch(loader)
    for _ in range(2):
        with open_loader(folder, 8, backend=backend, size=24, cache=tmp_path / "cache") as loader:
            assert loader.data_set.folder.is_relative_to(tmp_path / "cache")
            np.testing.assert_array_equal(column(epoch(loader), 0), column(wanted, 0))
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 0}, {"batch_size": 62}, {"size": 0}, {"seed": -1}, {"rank": 1}, {"rank": -1},
        {"world_size": 0}, {"order": "random"}, {"threads": 0}, {"last": "repeat"}, {"backend": "magic"},
    ],
)  # fmt: skip
def test_bad_settings_are_named(packed_folders, settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        open_loader(packed_folders["tar"] / "train", **{"batch_size": 4, **settings})


def test_no_data_set(tmp_path):
    with pytest.raises(ManifestError, match="no data set here"):
        open_loader(tmp_path, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalise(dtype):
    images = torch.randint(0, 256, (5, 3, 6, 7), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    out = normalise(images, mean, std, dtype)
    exact = (images.double() / 255 - torch.tensor(mean).double().view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    assert out.dtype == dtype and out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-6)
    with pytest.raises(SettingError, match="mean"):
        normalise(images, (0.5,), (0.5,))
