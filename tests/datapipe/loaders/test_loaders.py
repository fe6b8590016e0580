"""Contract of the backends that read by the index."""

import json
import os

import numpy as np
import pytest
import torch

from datapipe.dataset import DataSet
from datapipe.errors import DecodeError, ManifestError, SettingError, ShardCorruptError
from datapipe.loaders import open_loader
from datapipe.packing import PackOptions, pack
from datapipe.sampling.augment import Augment


def epoch(loader):
    """All that one epoch gives, batch by batch, as numpy arrays."""
    fields = ("images", "labels", "samples", "valid")
    return [tuple(getattr(batch, field).numpy().copy() for field in fields) for batch in loader]


def column(batches, i):
    return np.concatenate([batch[i] for batch in batches])


def test_numbers_of_numpy_are_numbers(packed_folders):
    with open_loader(packed_folders["tar"] / "train", np.int64(8), size=np.int32(16), seed=np.uint8(3)) as loader:
        assert json.loads(json.dumps(loader.state_dict()))["seed"] == 3


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


def test_padding_given_for_evaluation_has_no_effect(folder, backend):
    with open_loader(folder, 8, backend=backend, size=24, train=False, augment=Augment("pad", pad=100)) as loader:
        assert sum(int(batch.valid.sum()) for batch in loader) == 61


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
            assert loader.source.data_set.folder.is_relative_to(tmp_path / "cache")
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


def test_no_data_set(tmp_path, packed_folders):
    with pytest.raises(ManifestError, match="the folder is not packed: datapipe pack"):
        open_loader(tmp_path, 4)
    with pytest.raises(ManifestError, match="holds splits: choose one of train, val"):
        open_loader(packed_folders["tar"], 4)


@pytest.mark.parametrize("train", [True, False])
def test_images_have_another_size_from_the_next_iteration_on(folder, backend, train):
    settings = {"train": train, "backend": backend, "augment": Augment("random_resized")}
    with open_loader(folder, 8, size=24, **settings) as loader, open_loader(folder, 8, size=40, **settings) as other:
        next(iter(loader))
        for size, expected in ((40, other), (24, loader), (40, other)):
            loader.set_size(size)
            loader.set_epoch(2)
            batches = list(loader)
            assert len(batches) == len(loader)
            assert {batch.images.shape[-1] for batch in batches} == {size}
            if expected is other:
                other.set_epoch(2)
                for batch, fresh in zip(batches, other, strict=True):
                    assert torch.equal(batch.images, fresh.images)


def test_a_size_ends_what_is_under_way_and_has_a_range(folder, backend):
    with open_loader(folder, 8, size=24, backend=backend, augment=Augment("random_resized")) as loader:
        batches = iter(loader)
        next(batches)
        loader.set_size(32)
        with pytest.raises(ValueError, match="was ended"):
            next(batches)
        with pytest.raises(SettingError, match=r"^size: 0 "):
            loader.set_size(0)
    with (
        open_loader(folder, 8, size=24, backend=backend, augment=Augment("pad", pad=8)) as loader,
        pytest.raises(SettingError, match=r'^size: 32 is not 24, and the crop "pad"'),
    ):
        loader.set_size(32)
