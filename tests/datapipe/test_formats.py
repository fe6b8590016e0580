"""Contract of every shard format: read back by another library, with equal bytes, and found by the hot path."""

import json
import tarfile

import h5py
import lmdb
import numpy as np
import pytest
import webdataset

from datapipe.dataset import DataSet
from datapipe.formats import FORMATS, shard_format
from datapipe.manifest import Manifest
from datapipe.packing import make_keys
from datapipe.sources import open_source


def by_tarfile(path):
    with tarfile.open(path) as archive:
        content = {member.name: archive.extractfile(member).read() for member in archive}
    for name, data in content.items():
        key, extension = name.rsplit(".", 1)
        if extension != "cls":
            yield key, data, int(content[f"{key}.cls"])


def by_webdataset(path):
    for sample in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False):
        image = sample["jpg"] if "jpg" in sample else sample["png"]
        yield sample["__key__"], image, int(sample["cls"])


def by_h5py(path):
    with h5py.File(path) as file:
        assert file["bytes"].chunks is None and file["bytes"].compression is None
        offsets = file["offsets"][:]
        for i, (key, label) in enumerate(zip(file["keys"], file["labels"], strict=True)):
            yield key.decode(), file["bytes"][offsets[i] : offsets[i + 1]].tobytes(), int(label)


def by_lmdb(path):
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as transaction:
        content = {name.decode(): bytes(value) for name, value in transaction.cursor()}
    for name, data in content.items():
        key, extension = name.rsplit(".", 1)
        if extension != "cls":
            yield key, data, int(content[f"{key}.cls"])


READERS = [("tar", by_tarfile), ("tar", by_webdataset), ("hdf5", by_h5py), ("lmdb", by_lmdb)]


def raw_files(image_folder, split):
    """What must come out, by an independent walk over the folder: image bytes -> class number."""
    classes = sorted(path.name for path in (image_folder / "train").iterdir())
    files = [path for path in (image_folder / split).rglob("*") if path.is_file()]
    return {path.read_bytes(): classes.index(path.parent.name) for path in files}


def test_every_format_has_an_independent_reader():
    assert {name for name, _ in READERS} == set(FORMATS)


@pytest.mark.parametrize(("name", "reader"), READERS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("split", ["train", "val"])
def test_read_back_by_another_library(packed_folders, image_folder, name, reader, split):
    folder = packed_folders[name] / split
    shards = Manifest.read(folder).shards
    samples = [sample for shard in shards for sample in reader(folder / shard.name)]
    assert {data: label for _, data, label in samples} == raw_files(image_folder, split)
    keys = [key for key, _, _ in samples]
    assert len(set(keys)) == len(keys)
    assert sorted(keys) == sorted(make_keys(open_source(image_folder).splits[split].names))


@pytest.mark.parametrize("name", FORMATS)
def test_own_reader_and_hot_path_agree(packed_folders, name):
    folder = packed_folders[name] / "train"
    with DataSet(folder) as data_set:
        assert len(data_set.manifest.shards) > 1
        read = {}
        for shard in data_set.manifest.shards:
            samples = list(shard_format(name).read(folder / shard.name))
            assert len(samples) == shard.num_samples
            read |= {key: (data, label) for key, data, label in samples}
        for i in range(len(data_set)):
            assert read[data_set.key(i)] == (data_set.read(i), data_set.index[i]["label"])


def test_all_formats_hold_the_same_samples_in_the_same_order(packed_folders):
    tables = []
    for name in FORMATS:
        with DataSet(packed_folders[name] / "train") as data_set:
            fields = ["size", "label", "checksum", "width", "height", "restart_interval", "encoding"]
            tables.append(([data_set.key(i) for i in range(len(data_set))], data_set.index[fields].tolist()))
    assert tables[0] == tables[1] == tables[2]


def test_samples_of_a_tar_lie_side_by_side(packed_folders):
    """WebDataset makes a sample of neighbours with the same key; order in the shard is the index's."""
    folder = packed_folders["tar"] / "train"
    with DataSet(folder) as data_set:
        keys = [key for shard in data_set.manifest.shards for key, _, _ in by_webdataset(folder / shard.name)]
        assert keys == [data_set.key(i) for i in range(len(data_set))]


def test_dali_index(packed_folders):
    """Version 1.2: per sample and file the extension, offset, size and name, as tarfile finds them."""
    folder = packed_folders["tar"] / "train"
    for shard in Manifest.read(folder).shards:
        version, *lines = (folder / shard.name).with_suffix(".idx").read_text().splitlines()
        assert version == f"v1.2 {shard.num_samples}" and len(lines) == shard.num_samples
        with tarfile.open(folder / shard.name) as archive:
            members = {m.name: (m.offset_data, m.size) for m in archive}
        for line in lines:
            words = line.split(" ")
            assert len(words) == 8
            for extension, offset, size, name in (words[:4], words[4:]):
                assert members.pop(name) == (int(offset), int(size)) and name.endswith(f".{extension}")
        assert not members


def test_manifest_and_index_need_no_software_of_ours(packed_folders):
    folder = packed_folders["hdf5"] / "val"
    manifest = json.loads((folder / "manifest.json").read_text())
    index = np.load(folder / "index.npy")
    assert manifest["num_samples"] == len(index) == 10
    assert index.dtype.itemsize <= 32
    row = index[3]
    with open(folder / manifest["shards"][row["shard"]]["name"], "rb") as file:
        file.seek(int(row["offset"]))
        assert file.read(int(row["size"]))[:2] in (b"\xff\xd8", b"\x89P")
