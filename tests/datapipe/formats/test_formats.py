"""Contract of every shard format: read back by another library, with equal bytes, and found by the hot path."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import h5py
import lmdb
import numpy as np
import pytest
import webdataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datapipe.dataset import DataSet
from datapipe.dataset.manifest import Manifest
from datapipe.errors import MissingBackendError
from datapipe.formats import shard_format
from datapipe.formats.naming import EXTENSIONS
from datapipe.formats.tar import member_header
from datapipe.images.codec import ImageHeader
from datapipe.names import FORMATS
from datapipe.packing.plan import make_keys
from datapipe.sources import open_source

ENCODED_FORMATS = [name for name in FORMATS if name != "npy"]  # which hold images of different sizes


def by_tarfile(path):
    with tarfile.open(path) as archive:
        content = {member.name: archive.extractfile(member).read() for member in archive}
    yield from paired(content)


def by_webdataset(path):
    for sample in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False):
        (extension,) = (name for name in sample if not name.startswith("__") and name != "cls")
        yield sample["__key__"], sample[extension], int(sample["cls"])


def by_h5py(path):
    with h5py.File(path) as file:
        assert file["bytes"].chunks is None and file["bytes"].compression is None
        offsets = file["offsets"][:]
        for i, (key, label) in enumerate(zip(file["keys"], file["labels"], strict=True)):
            yield key.decode(), file["bytes"][offsets[i] : offsets[i + 1]].tobytes(), int(label)


def by_lmdb(path):
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as transaction:
        content = {name.decode(): bytes(value) for name, value in transaction.cursor()}
    yield from paired(content)


def by_zipfile(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        content = {name: archive.read(name) for name in archive.namelist()}
    yield from paired(content)


def by_tfrecord(path):
    package = pytest.importorskip("tfrecord")
    for row in package.tfrecord_loader(str(path), None):
        yield row["image/filename"].decode(), row["image/encoded"], int(row["image/class/label"][0])


def by_numpy(path):
    images, labels = np.load(path, mmap_mode="r"), np.load(path.with_suffix(".labels.npy"))
    assert images.dtype == np.uint8 and labels.dtype == np.uint32 and images.ndim == 4
    keys = path.with_suffix(".keys.txt").read_text().splitlines()
    yield from zip(keys, (image.tobytes() for image in images), labels.tolist(), strict=True)


def paired(content):
    """From the files or entries of a shard, by name: key, image and label."""
    for name, data in content.items():
        key, extension = name.split(".", 1)
        if extension != "cls":
            yield key, data, int(content[f"{key}.cls"])


READERS = [
    ("tar", by_tarfile),
    ("tar", by_webdataset),
    ("hdf5", by_h5py),
    ("lmdb", by_lmdb),
    ("zip", by_zipfile),
    ("tfrecord", by_tfrecord),
    ("npy", by_numpy),
]


def lay(name, samples, path):
    """Write a shard as `pack` does: the writer says what, and sees its images no more once they are written."""
    writer = shard_format(name).Writer()
    with open(path, "wb") as file:
        file.write(writer.head)
        for key, label, data, header in samples:
            view = memoryview(bytearray(data))
            pieces = writer.add(key, label, view, header)
            assert any(piece is view for piece in pieces) or (name == "lmdb" and len(data) < 2048)
            file.writelines(pieces)
            view[:] = bytes(len(view))
        finished = writer.finish()
        file.write(finished.tail)
        for position, content in finished.patches.items():
            file.seek(position)
            file.write(content)
    for suffix, content in finished.sidecars.items():
        path.with_suffix(suffix).write_bytes(content)
    return finished


def make_samples(name, table):
    """Samples for a format from (key, label, size of the image); in npy all have the first one's size."""
    generator = np.random.default_rng(0)
    encodings = ("jpeg", "png", "pnm", "pnm+lz4", "pnm+zstd")
    for i, (key, label, size) in enumerate(table):
        if name == "npy":
            size = table[0][2]
            header = ImageHeader("raw", size, 1, 1, 0)
        else:
            header = ImageHeader(encodings[i % 5], 500, 375, 3, 4)
        yield key, label, generator.bytes(size), header


def in_order(name, samples):
    """What a reader of the format must give."""
    samples = [(key, data, label) for key, label, data, _ in samples]
    return sorted(samples, key=lambda sample: f"{sample[0]}.") if name == "lmdb" else samples


keys = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,44}(/[a-zA-Z0-9_-]{1,45})?", fullmatch=True)
# Around the sizes of blocks, pages, nodes in a page (less their names) and of numbers in few bytes.
edges = st.builds(
    lambda edge, more: max(0, edge + more),
    st.sampled_from((128, 256, 512, 2038, 2048, 4080, 4096, 8176, 16384, 65536)),
    st.integers(-130, 20),
)
tables = st.lists(
    st.tuples(keys, st.integers(0, 2**32 - 1), st.integers(0, 3000) | edges), max_size=12, unique_by=lambda row: row[0]
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None)
@given(table=tables)
@example(table=[])
@example(table=[("a", 0, 0)])
@example(table=[("a", 1, 1), ("a-b", 2, 0), ("a/b", 3, 1), ("aa", 4, 300_000)])
def test_contract(name, table):
    samples = list(make_samples(name, table))
    with TemporaryDirectory() as folder:
        path, again = (Path(folder) / f"{stem}{shard_format(name).SUFFIX}" for stem in ("shard", "again"))
        finished = lay(name, samples, path)
        for reader in (shard_format(name).read, *(reader for format_, reader in READERS if format_ == name)):
            assert list(reader(path)) == in_order(name, samples)
        content = path.read_bytes()
        for (_, _, data, _), offset in zip(samples, finished.offsets, strict=True):
            assert content[offset : offset + len(data)] == data
        assert lay(name, samples, again) == finished and again.read_bytes() == content  # no times, no owners


def test_every_format_has_an_independent_reader():
    assert {name for name, _ in READERS} == set(FORMATS)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=100), st.integers(0, 8**11))
def test_tar_headers_are_those_of_tarfile(name, size):
    info = tarfile.TarInfo(name)
    info.size = size
    if len(name.encode()) > 100 or size == 8**11:
        with pytest.raises(ValueError, match="tar shard holds"):
            member_header(name.encode(), size)
    else:
        assert member_header(name.encode(), size) == info.tobuf(tarfile.USTAR_FORMAT)


def open_lmdb(path, **options):
    return lmdb.open(str(path), subdir=False, lock=False, **options)


def check_lmdb(path, content):
    """Every way to read the file gives `content`, and its pages are as many as it says."""
    names = sorted(content)
    with open_lmdb(path, readonly=True) as env, env.begin() as transaction:
        assert all(transaction.get(name) == value for name, value in content.items())
        with transaction.cursor() as cursor:
            assert list(cursor.iternext(values=False)) == names
            assert list(cursor.iterprev(values=False)) == names[::-1]
            assert all(cursor.set_range(name[:-1]) and cursor.key() <= name for name in names[::50])
        state, info = env.stat(), env.info()
    assert state["entries"] == len(content)
    return state, info


@pytest.mark.parametrize(
    ("count", "max_size", "depth"), [(1, 300_000, 1), (2, 4000, 1), (100, 300_000, 2), (35_000, 40, 3)]
)
def test_lmdb_files_are_whole_trees(tmp_path, count, max_size, depth):
    generator = random.Random(count)
    table = [(f"{generator.random()}"[2:] + i * "x", i, generator.randrange(max_size)) for i in range(min(count, 70))]
    table += [(f"{i:06d}/{'y' * (i % 60)}", i, generator.randrange(max_size)) for i in range(70, count)]
    samples = list(make_samples("lmdb", table))
    lay("lmdb", samples, tmp_path / "shard")
    content = {f"{key}.cls".encode(): b"%d" % label for key, label, _, _ in samples}
    content |= {f"{key}.{EXTENSIONS[header.encoding]}".encode(): data for key, _, data, header in samples}
    state, info = check_lmdb(tmp_path / "shard", content)
    assert state["depth"] == depth
    large = [len(data) for name, data in content.items() if 8 + len(name) + len(data) > 2038]
    assert state["overflow_pages"] == sum(-(-(16 + size) // 4096) for size in large)
    num_pages = 2 + sum(state[f"{kind}_pages"] for kind in ("branch", "leaf", "overflow"))
    assert num_pages == info["last_pgno"] + 1 == (tmp_path / "shard").stat().st_size / 4096

    with open_lmdb(tmp_path / "shard", readonly=True) as env:
        env.copy(str(tmp_path / "compact"), compact=True)  # fails when a page is in no tree, or in two
    assert check_lmdb(tmp_path / "compact", content)[0] == state
    change_lmdb(tmp_path / "shard", content, generator)


def change_lmdb(path, content, generator):
    """Delete, replace and add entries with LMDB itself, in many transactions."""
    for _ in range(5):
        gone = generator.sample(sorted(content), len(content) // 3)
        added = {b"%032x" % generator.getrandbits(128): generator.randbytes(generator.randrange(5000)) for _ in gone}
        added |= {name: generator.randbytes(generator.randrange(100)) for name in gone[::2]}
        added = dict(list(added.items())[:3000])
        with open_lmdb(path, map_size=1 << 28, sync=False) as env, env.begin(write=True) as transaction:
            assert all(transaction.delete(name) for name in gone)
            assert all(transaction.put(name, value) for name, value in added.items())
        for name in gone:
            del content[name]
        content |= added
    check_lmdb(path, content)


def test_lmdb_trees_of_few_children(tmp_path):
    """With long names a branch holds eight children, and every count of them occurs on its last page."""
    for count in range(1, 130):
        table = [(f"{i:03d}".ljust(500, "x"), i, 0) for i in range(count)]
        lay("lmdb", list(make_samples("lmdb", table)), tmp_path / "shard")
        content = dict.fromkeys((f"{key}.cls".encode() for key, _, _ in table))
        with open_lmdb(tmp_path / "shard", map_size=1 << 24) as env, env.begin(write=True) as transaction:
            assert [name for name in transaction.cursor().iternext(values=False) if name in content] == sorted(content)
            assert all(transaction.delete(name) for name in content)
            assert transaction.stat()["entries"] == count


def test_zip_of_many_members(tmp_path):
    """More than 65,535 need ZIP64."""
    samples = list(make_samples("zip", [(f"{i:06d}", i, 1) for i in range(35_000)]))
    lay("zip", samples, tmp_path / "shard.zip")
    with zipfile.ZipFile(tmp_path / "shard.zip") as archive:
        names = archive.namelist()
        assert names[::2] == [f"{key}.{EXTENSIONS[header.encoding]}" for key, _, _, header in samples]
        for i in (0, 32_767, 32_768, 34_999):
            assert archive.read(names[2 * i]) == samples[i][2] and archive.read(names[2 * i + 1]) == b"%d" % i


@pytest.mark.skipif(shutil.which("unzip") is None, reason="needs unzip")
@pytest.mark.parametrize("count", [3, 35_000])
def test_unzip_finds_no_fault(tmp_path, count):
    lay("zip", make_samples("zip", [(f"a/{i}", i, 9) for i in range(count)]), tmp_path / "shard.zip")
    assert subprocess.run(["unzip", "-tqq", tmp_path / "shard.zip"], stdout=subprocess.DEVNULL).returncode == 0


def slow_crc32c(data):
    """RFC 3720, appendix B.4: the polynomial 0x1EDC6F41, bits reflected."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def test_tfrecord_framing(tmp_path):
    """The checksums, which no reader here looks at, and the index as the package `tfrecord` makes it."""
    package = pytest.importorskip("tfrecord")
    assert slow_crc32c(bytes(32)) == 0x8A9136AA  # the RFC's example
    path = tmp_path / "shard.tfrecord"
    lay("tfrecord", make_samples("tfrecord", [(f"k{i}", i, size) for i, size in enumerate((0, 1, 127, 5000))]), path)
    content, position = path.read_bytes(), 0
    while position < len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        for begin, end in ((position, position + 8), (position + 12, position + 12 + length)):
            crc = slow_crc32c(content[begin:end])
            (found,) = struct.unpack_from("<I", content, end)
            assert found == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
        position += length + 16
    package.tools.tfrecord2idx.create_index(str(path), str(tmp_path / "expected"))
    assert path.with_suffix(".idx").read_text() == (tmp_path / "expected").read_text()


def test_tfrecord_features(tmp_path):
    package = pytest.importorskip("tfrecord")
    sample = ("folder/key", 300, b"image", ImageHeader("jpeg", 500, 375, 3, 0))
    lay("tfrecord", [sample], tmp_path / "shard")
    (row,) = package.tfrecord_loader(str(tmp_path / "shard"), None)
    assert {name.removeprefix("image/"): value for name, value in row.items()} == {
        "encoded": b"image", "format": b"JPEG", "filename": b"folder/key",
        "class/label": [300], "height": [375], "width": [500], "channels": [3],
    }  # fmt: skip


@pytest.mark.parametrize("package", ["crc32c", "tfrecord"])
def test_tfrecord_says_what_to_install(monkeypatch, package):
    module = shard_format("tfrecord")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.reader", None)
    with pytest.raises(MissingBackendError, match=rf"{package}: .* pip install '\.\[tfrecord\]'"):
        module.Writer() if package == "crc32c" else next(module.read("shard"))


@pytest.mark.parametrize(
    ("name", "key", "size", "header", "message"),
    [
        ("tar", "k" * 97, 9, ("jpeg", 1, 1, 1, 0), "101 bytes, a tar shard holds 100"),
        ("lmdb", "k" * 508, 9, ("jpeg", 1, 1, 1, 0), "512 bytes, LMDB holds 511"),
        ("npy", "k", 9, ("jpeg", 3, 3, 1, 0), "not an image of encoding jpeg"),
        ("npy", "k", 9, ("raw", 2, 2, 1, 0), "9 bytes are not an image of 2×2×1"),
        ("npy", "k", 18, ("raw", 2, 3, 3, 0), "3×2×3 pixels .* among images of 2×3×3"),
    ],
)
def test_what_a_format_cannot_hold(name, key, size, header, message):
    writer = shard_format(name).Writer()
    if "among" in message:
        writer.add("first", 0, bytes(size), ImageHeader("raw", 3, 2, 3, 0))
    with pytest.raises(ValueError, match=message):
        writer.add(key, 0, bytes(size), ImageHeader(*header))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_beyond_4_gib(name, tmp_path):
    """Offsets of more than 32 bits, in a sparse file: large images of zeros."""
    path, zeros = tmp_path / f"shard{shard_format(name).SUFFIX}", bytes(1 << 29)
    last = zeros if name == "npy" else b"last"
    header = ImageHeader("raw" if name == "npy" else "png", 1 << 15, 1 << 14, 1, 0)
    writer = shard_format(name).Writer()
    with open(path, "wb") as file:
        file.write(writer.head)
        for i in range(10):
            for piece in writer.add(f"{i}", i, zeros if i < 9 else last, header):
                file.seek(len(piece), os.SEEK_CUR) if piece is zeros else file.write(piece)
        finished = writer.finish()
        file.write(finished.tail)
        file.truncate()  # an npy shard ends in a hole
        for position, content in finished.patches.items():
            file.seek(position)
            file.write(content)
    for suffix, content in finished.sidecars.items():
        path.with_suffix(suffix).write_bytes(content)
    for i, (key, data, label) in enumerate(shard_format(name).read(path)):
        assert (key, label) == (f"{i}", i) and data == (zeros if i < 9 else last)
    with open(path, "rb") as file:
        assert finished.offsets[9] > 1 << 32
        assert os.pread(file.fileno(), len(last), finished.offsets[9]) == last


def raw_files(image_folder, split):
    """What must come out, by an independent walk over the folder: image bytes -> class number."""
    classes = sorted(path.name for path in (image_folder / "train").iterdir())
    files = [path for path in (image_folder / split).rglob("*") if path.is_file()]
    return {path.read_bytes(): classes.index(path.parent.name) for path in files}


@pytest.mark.parametrize(
    ("name", "reader"),
    [row for row in READERS if row[0] in ENCODED_FORMATS],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_read_back_by_another_library(packed_folders, image_folder, name, reader, split):
    folder = packed_folders[name] / split
    shards = Manifest.read(folder).shards
    samples = [sample for shard in shards for sample in reader(folder / shard.name)]
    assert {data: label for _, data, label in samples} == raw_files(image_folder, split)
    keys = [key for key, _, _ in samples]
    assert len(set(keys)) == len(keys)
    assert sorted(keys) == sorted(make_keys(open_source(image_folder).splits[split].names))


@pytest.mark.parametrize("name", ENCODED_FORMATS)
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
    for name in ENCODED_FORMATS:
        with DataSet(packed_folders[name] / "train") as data_set:
            fields = ["size", "label", "checksum", "width", "height", "restart_interval", "encoding"]
            tables.append(([data_set.key(i) for i in range(len(data_set))], data_set.index[fields].tolist()))
    assert all(table == tables[0] for table in tables)


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
