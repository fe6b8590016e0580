"""Sources: what they find, and what they say of a raw data set that is not as it should be."""

import dataclasses
import gzip
import io
import os
import pickle
import pickletools
import shutil
import socket
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from datapipe.errors import SettingError, SourceError, WrongPathError
from datapipe.images.codec import decode
from datapipe.sources import open_source

RANDOM = np.random.default_rng(0)


def pixels_of(samples):
    return np.stack([decode(samples.read(i, memoryview(b"")), 3) for i in range(len(samples))])


# --- CIFAR -------------------------------------------------------------------------------------------


def cifar_files(kind, version):
    """The files of a small CIFAR: name -> bytes, and the truth: split -> (images, labels)."""
    classes = 10 if kind == "cifar10" else 100
    train = [f"data_batch_{i}" for i in range(1, 6)] if kind == "cifar10" else ["train"]
    test = ["test_batch"] if kind == "cifar10" else ["test"]
    files, truth = {}, {}
    for split, names in (("train", train), ("val", test)):
        parts = []
        for name in names:
            rows = RANDOM.integers(0, 256, (20, 3072), dtype=np.uint8)
            labels = np.arange(20) * 3 % classes  # no class of val that train lacks
            parts.append((rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels))
            if version == "python":
                field = "labels" if kind == "cifar10" else "fine_labels"
                content = {"data": rows, field: labels.tolist(), "filenames": ["x.png"] * 20}
                files[name] = pickle.dumps(content, protocol=2)
            else:
                columns = [labels[:, None].astype(np.uint8), rows]
                columns = columns if kind == "cifar10" else [np.zeros((20, 1), np.uint8), *columns]
                files[f"{name}.bin"] = np.concatenate(columns, axis=1).tobytes()
        truth[split] = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    names = [f"class {i}".replace(" ", "_") for i in range(classes)]
    if version == "python":
        field = "label_names" if kind == "cifar10" else "fine_label_names"
        files["batches.meta" if kind == "cifar10" else "meta"] = pickle.dumps({field: names}, protocol=2)
    else:
        name = "batches.meta.txt" if kind == "cifar10" else "fine_label_names.txt"
        files[name] = "\n".join(names).encode() + b"\n\n"
    return files, truth


def put(files, where, archived, folder="cifar-10-batches"):
    """Write the files as a folder or as a .tar.gz; return its path."""
    if not archived:
        where.mkdir()
        for name, data in files.items():
            (where / name).write_bytes(data)
        return where
    path = where.with_suffix(".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
@pytest.mark.parametrize("version", ["python", "binary"])
@pytest.mark.parametrize("archived", [False, True])
def test_cifar(tmp_path, kind, version, archived):
    files, truth = cifar_files(kind, version)
    path = put(files, tmp_path / "cifar", archived)
    for asked in ("auto", kind):
        source = open_source(path, asked)
        assert source.kind == kind and len(source.classes) == (10 if kind == "cifar10" else 100)
        for split, (images, labels) in truth.items():
            np.testing.assert_array_equal(pixels_of(source.splits[split]), images)
            np.testing.assert_array_equal(source.splits[split].labels, labels)


def test_cifar_as_python_2_pickled_it(tmp_path):
    """The real files name numpy.core.multiarray and hold Python 2 strings."""
    files, truth = cifar_files("cifar10", "python")
    for name in [name for name in files if "batch" in name and "meta" not in name]:
        assert b"numpy._core.multiarray" in files[name] or b"numpy.core.multiarray" in files[name]
        files[name] = files[name].replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    source = open_source(put(files, tmp_path / "cifar", False))
    np.testing.assert_array_equal(pixels_of(source.splits["val"]), truth["val"][0])


@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar_read_as_bytes_and_saved_again(tmp_path, protocol):
    """As `pickle.load(file, encoding="bytes")`, of CIFAR's page, returns it, and Python 3 pickles that."""

    def as_bytes(value):
        if isinstance(value, dict):
            return {as_bytes(key): as_bytes(each) for key, each in value.items()}
        return [as_bytes(each) for each in value] if isinstance(value, list) else (
            value.encode() if isinstance(value, str) else value
        )  # fmt: skip

    files, truth = cifar_files("cifar10", "python")
    files = {name: pickle.dumps(as_bytes(pickle.loads(data)), protocol) for name, data in files.items()}
    source = open_source(put(files, tmp_path / "cifar", False))
    assert source.kind == "cifar10" and source.classes[3] == "class_3"
    for split, (images, labels) in truth.items():
        np.testing.assert_array_equal(pixels_of(source.splits[split]), images)
        np.testing.assert_array_equal(source.splits[split].labels, labels)


class Payload:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_cifar_pickle_with_a_payload_is_refused(tmp_path):
    files, _ = cifar_files("cifar10", "python")
    target = tmp_path / "owned"
    files["data_batch_3"] = pickle.dumps({"data": Payload(target), "labels": [0]}, protocol=2)
    path = put(files, tmp_path / "cifar", False)
    with pytest.raises(SourceError, match=r"data_batch_3.*asks for (posix|nt|os)\.system"):
        open_source(path)
    assert not target.exists()


@pytest.mark.parametrize("name", ["eval", "getattr", "exec"])
def test_cifar_pickle_reaches_no_builtin(tmp_path, name):
    files, _ = cifar_files("cifar10", "python")
    files["test_batch"] = b"cbuiltins\n" + name.encode() + b"\n(S'1'\ntR."
    pickletools.dis(files["test_batch"], out=io.StringIO())  # it is a pickle
    with pytest.raises(SourceError, match=f"asks for builtins.{name}"):
        open_source(put(files, tmp_path / "cifar", True))


def spoilt(files, what):
    data = files["data_batch_2"]
    if what == "truncated":
        files["data_batch_2"] = data[: len(data) // 2]
    elif what == "no dictionary":
        files["data_batch_2"] = pickle.dumps([1, 2], protocol=2)
    elif what == "labels out of range":
        files["data_batch_2"] = pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, protocol=2)
    elif what == "too few rows":
        files["data_batch_2"] = pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [1, 2]}, protocol=2)
    elif what == "noise":
        files["data_batch_2"] = RANDOM.bytes(500)
    elif what == "missing":
        del files["data_batch_2"]


@pytest.mark.parametrize(
    "what", ["truncated", "no dictionary", "labels out of range", "too few rows", "noise", "missing"]
)
def test_spoilt_cifar_file_is_named(tmp_path, what):
    files, _ = cifar_files("cifar10", "python")
    spoilt(files, what)
    with pytest.raises(SourceError, match="data_batch_2"):
        open_source(put(files, tmp_path / "cifar", False))


@pytest.mark.parametrize("kind", ["auto", "cifar10"])
@pytest.mark.parametrize("packing", ["gz", "xz", ""])
@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_broken_cifar_archive(tmp_path, kind, packing, how):
    path = tmp_path / f"cifar.tar.{packing}"
    with tarfile.open(path, f"w:{packing}") as archive:
        for name, content in cifar_files("cifar10", "python")[0].items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2 + 100]
    elif packing:
        data[len(data) // 2] ^= 0xFF
    else:
        data[:512] = b"x" * 512
    path.write_bytes(data)
    with pytest.raises(SourceError):
        open_source(path, kind)


def test_truncated_binary_cifar(tmp_path):
    files, _ = cifar_files("cifar100", "binary")
    files["train.bin"] = files["train.bin"][:-1]
    with pytest.raises(SourceError, match=r"train\.bin.*truncated"):
        open_source(put(files, tmp_path / "cifar", False))


# --- IDX ---------------------------------------------------------------------------------------------


def idx(array):
    header = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(np.uint8).tobytes()


def idx_folder(folder, gzipped=True):
    truth = {}
    folder.mkdir()
    for prefix, split, count in (("train", "train", 12), ("t10k", "val", 5)):
        images, labels = RANDOM.integers(0, 256, (count, 9, 8)), np.arange(count) % 4
        truth[split] = images, labels
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            data = idx(array)
            (folder / (name + ".gz" * gzipped)).write_bytes(gzip.compress(data) if gzipped else data)
    return truth


@pytest.mark.parametrize("gzipped", [False, True])
def test_idx(tmp_path, gzipped):
    truth = idx_folder(tmp_path / "raw", gzipped)
    source = open_source(tmp_path / "raw")
    assert source.kind == "idx" and source.classes == [str(i) for i in range(len(source.classes))]
    for split, (images, labels) in truth.items():
        np.testing.assert_array_equal(pixels_of(source.splits[split])[:, :, :, 0], images)
        np.testing.assert_array_equal(source.splits[split].labels, labels)


def test_real_sample(sample_dir):
    source = open_source(sample_dir)
    assert {split: len(samples) for split, samples in source.splits.items()} == {"train": 2400, "val": 600}
    assert np.bincount(source.splits["train"].labels).tolist() == [240] * 10


def put_idx(folder, prefix, labels):
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(np.zeros((len(labels), 4, 4))))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.array(labels)))


def test_idx_files_of_emnist(tmp_path, caplog):
    for name in ("balanced", "letters"):
        for split in ("train", "test"):
            put_idx(tmp_path, f"emnist-{name}-{split}", [1, 2, 3] if name == "letters" else [0, 1])
    with pytest.raises(SourceError, match=r"several files of images for train, emnist-balanced-train-.*--split train="):
        open_source(tmp_path)
    chosen = [f"{split}=emnist-letters-{word}-*" for split, word in (("train", "train"), ("val", "test"))]
    source = open_source(tmp_path, splits=chosen)
    assert source.classes == ["0", "1", "2", "3"] and source.splits["val"].labels.tolist() == [1, 2, 3]
    assert "1 class of 4 has no images in train: 0" in caplog.text
    assert open_source(tmp_path, splits=chosen, labels="names").classes == ["1", "2", "3"]


def test_idx_of_classes_that_train_lacks(tmp_path):
    put_idx(tmp_path, "train", [0, 1])
    put_idx(tmp_path, "t10k", [0, 2])
    with pytest.raises(SourceError, match="1 class of val has no images in train: 2"):
        open_source(tmp_path)
    put_idx(tmp_path, "other", [0, 1])
    with pytest.raises(SourceError, match="names a split, and other-images-idx3-ubyte does not"):
        open_source(tmp_path)


@pytest.mark.parametrize("options", [{"splits": ["train=."]}, {"labels": "names"}])
def test_what_cifar_has_no_use_for_is_refused(tmp_path, options):
    path = put(cifar_files("cifar10", "python")[0], tmp_path / "cifar", False)
    with pytest.raises(SettingError, match="cifar10 has its own; leave --"):
        open_source(path, **options)


@pytest.mark.parametrize("cut", [3, 10, 100, -1])
@pytest.mark.parametrize("gzipped", [False, True])
def test_truncated_idx(tmp_path, cut, gzipped):
    idx_folder(tmp_path / "raw", gzipped)
    path = tmp_path / "raw" / ("train-images-idx3-ubyte" + ".gz" * gzipped)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SourceError, match="train-images-idx3"):
        open_source(tmp_path / "raw")


def test_idx_whose_parts_do_not_fit(tmp_path):
    idx_folder(tmp_path / "raw", False)
    (tmp_path / "raw" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(4)))
    with pytest.raises(SourceError, match="4 labels for 5 images"):
        open_source(tmp_path / "raw")
    (tmp_path / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(SourceError, match="has no labels"):
        open_source(tmp_path / "raw")


def test_corrupt_gzip(tmp_path):
    idx_folder(tmp_path / "raw")
    path = tmp_path / "raw" / "train-images-idx3-ubyte.gz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(SourceError, match="truncated or corrupt"):
        open_source(tmp_path / "raw")


# --- ImageFolder -------------------------------------------------------------------------------------


def tree(root, *paths, data=b"x"):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def paths_of(samples):
    return [os.path.relpath(samples.where(i), samples.root) for i in range(len(samples))]


def test_imagefolder_without_splits(tmp_path):
    source = open_source(tree(tmp_path / "raw", "b/2.png", "a/1.jpg", "b/deeper/3.x.JPEG", "b/.hidden.jpg"))
    assert source.classes == ["a", "b"] and list(source.splits) == ["train"]
    samples = source.splits["train"]
    assert paths_of(samples) == ["a/1.jpg", "b/2.png", "b/deeper/3.x.JPEG"]
    assert samples.names == ["a/1", "b/2", "b/deeper/3.x"]
    assert samples.labels.tolist() == [0, 1, 1] and samples.labels.dtype == np.uint32


def test_a_test_split_is_val(tmp_path):
    source = open_source(tree(tmp_path / "raw", "train/a/1.jpg", "train/b/1.jpg", "test/b/2.jpg"))
    assert paths_of(source.splits["val"]) == ["b/2.jpg"] and source.splits["val"].labels.tolist() == [1]


def test_classes_are_in_order_however_many_threads_list_them(tmp_path, monkeypatch):
    paths = [f"{c:03d}/{i}.jpg" for c in range(40) for i in range(3)]
    tree(tmp_path / "raw", *paths)
    for cpu in (0.0, 1e9):  # all of the time spent waiting, none
        monkeypatch.setattr("time.thread_time", iter([0.0, cpu]).__next__)
        assert paths_of(open_source(tmp_path / "raw").splits["train"]) == paths


def test_val_wins_over_test(tmp_path, caplog):
    source = open_source(tree(tmp_path / "raw", "train/a/1.jpg", "test/a/2.jpg", "val/a/3.jpg"))
    assert paths_of(source.splits["val"]) == ["a/3.jpg"]
    assert "1 entry (of a test split, and val is taken for val): test" in caplog.text


def test_other_files_are_left_out_aloud(tmp_path, caplog):
    open_source(tree(tmp_path / "raw", "a/1.jpg", "a/notes.txt"))
    assert "left out 1 entry (not named .jpg" in caplog.text and "a/notes.txt" in caplog.text
    assert "most of its files" not in caplog.text
    (tmp_path / "raw" / "a" / "more.txt").touch()
    open_source(tmp_path / "raw")
    assert "left out 2 entries (not named .jpg" in caplog.text
    assert "most of its files are not named .jpg, .jpeg, .png: is it the right folder?" in caplog.text


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "no class folders"),
        (["1.jpg", "2.jpg"], "no class folders"),
        (["readme.txt"], "no class folders"),
        (["a/1.jpg", "2.jpg"], "2.jpg: lies beside the class folders"),
        (["train/1.jpg", "train/2.jpg"], "lies beside the class folders"),
        (["train/a/1.jpg", "others/a/1.jpg"], "train names a split, and others does not"),
        (["train/a/1.jpg", "val/z/1.jpg"], "class folders that the train split does not have: z"),
        (["a/readme.txt"], "holds no images"),
        (["train/a/1.jpg", "val/a/readme.txt"], "split val holds no images"),
    ],
)
def test_unknown_layout_says_what_is_expected(tmp_path, paths, message):
    (tmp_path / "raw").mkdir()
    with pytest.raises(SourceError, match=message):
        open_source(tree(tmp_path / "raw", *paths))


class Asked(Exception):
    pass


SCANDIR = os.scandir


class Entry:
    """A directory entry of a filesystem that does not tell types: whoever asks for an image's pays a request."""

    asked = 0

    def __init__(self, entry):
        self.entry, self.name, self.path = entry, entry.name, entry.path

    def _ask(self, what, **options):
        Entry.asked += 1
        if self.name.lower().endswith((".jpg", ".jpeg", ".png")):
            raise Asked(f"{what} of {self.path}")
        return getattr(self.entry, what)(**options)

    def __getattr__(self, what):
        return lambda **options: self._ask(what, **options)


class Untyped:
    """`os.scandir` of such a filesystem."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        self.entries = SCANDIR(self.path)
        return map(Entry, self.entries)

    def __exit__(self, *_exc):
        self.entries.close()

    def __iter__(self):
        return map(Entry, SCANDIR(self.path))


def test_listing_asks_nothing_about_what_is_named_as_an_image(tmp_path, monkeypatch):
    files = [f"{c}/{i}.JPEG" for c in "abc" for i in range(20)]
    root = tree(tmp_path / "raw", *(f"{split}/{file}" for split in ("train", "val") for file in files))
    tree(root, "train/a/deeper/1.png", "train/a/notes.txt")
    monkeypatch.setattr(os, "scandir", Untyped)
    source = open_source(root)
    assert len(source.splits["train"]) == 61 and len(source.splits["val"]) == 60
    assert Entry.asked < 40  # folders and the text, a few times


@pytest.fixture
def linked(tmp_path):
    """A source with links of all sorts, and what lies beside it."""
    root = tree(tmp_path / "raw", "a/1.jpg", data=b"one")
    tree(tmp_path, "elsewhere/x/9.jpg", data=b"nine")
    return root


def read(samples, i=0, size=1000):
    return bytes(samples.read(i, memoryview(bytearray(size))))


def test_links_below_a_class_lead_to_it_once(linked):
    (linked / "a" / "loop").symlink_to(linked / "a")
    (linked / "a" / "2.jpg").symlink_to("1.jpg")
    samples = open_source(linked).splits["train"]
    assert paths_of(samples) == ["a/1.jpg", "a/2.jpg"]
    assert {read(samples, i) for i in range(2)} == {b"one"}
    (linked / "b").symlink_to(linked / "a")
    with pytest.raises(SourceError, match=r"is of two classes: .*/b leads to the same folder"):
        open_source(linked)


@pytest.mark.parametrize("through", ["link", "two links", "dots"])
def test_a_file_that_is_a_link_out_of_the_source(linked, through):
    target = linked.parent / "elsewhere" / "x" / "9.jpg"
    if through == "two links":
        (linked / ".between").symlink_to(target)
        target = linked / ".between"
    (linked / "a" / "0.jpg").symlink_to("../../elsewhere/x/9.jpg" if through == "dots" else target)
    with pytest.raises(ValueError, match="is a link that leads out of the source; --outside follows it"):
        read(open_source(linked).splits["train"])
    assert read(open_source(linked, outside=True).splits["train"]) == b"nine"


def test_a_folder_whose_name_begins_as_the_sources_is_outside(linked):
    tree(linked.parent, "raw-2/1.jpg")
    (linked / "a" / "0.jpg").symlink_to(linked.parent / "raw-2" / "1.jpg")
    with pytest.raises(ValueError, match="leads out of the source"):
        read(open_source(linked).splits["train"])


@pytest.mark.parametrize("name", ["z", "train"])
def test_a_folder_that_is_a_link_out_of_the_source(linked, name):
    if name == "train":
        shutil.rmtree(linked / "a")
        (linked / "train").symlink_to(linked.parent / "elsewhere")
    else:
        (linked / "z").symlink_to(linked.parent / "elsewhere" / "x")
    with pytest.raises(SourceError, match=f"raw/{name}: is a link that leads out of the source; --outside follows it"):
        open_source(linked)
    samples = open_source(linked, outside=True).splits["train"]
    assert read(samples, len(samples) - 1) == b"nine"


def test_a_folder_that_became_a_link_after_it_was_listed(linked):
    samples = open_source(linked).splits["train"]
    shutil.rmtree(linked / "a")
    (linked / "a").symlink_to(linked.parent / "elsewhere" / "x")
    with pytest.raises(ValueError, match="its folder is a link that leads out of the source"):
        read(samples)


def test_a_source_that_is_a_link_itself(linked):
    (linked / "a" / "2.jpg").symlink_to("1.jpg")
    (linked.parent / "link").symlink_to(linked)
    samples = open_source(linked.parent / "link").splits["train"]
    assert [read(samples, i) for i in range(2)] == [b"one", b"one"]


@pytest.mark.parametrize("outside", [False, True])
def test_links_that_lead_nowhere(linked, outside):
    (linked / "a" / "1.jpg").unlink()
    (linked / "a" / "0.jpg").symlink_to("1.jpg")
    (linked / "a" / "1.jpg").symlink_to("0.jpg")
    (linked / "a" / "2.jpg").symlink_to("nothing")
    samples = open_source(linked, outside=outside).splits["train"]
    with pytest.raises(ValueError, match="circle"):
        read(samples, 0)
    with pytest.raises(FileNotFoundError):
        read(samples, 2)
    assert [samples.size_bytes(i) for i in range(3)] == [0, 0, 0]
    (linked / "b").symlink_to(linked / "b")
    with pytest.raises(SourceError, match="raw/b: is a link that leads in a circle"):
        open_source(linked, outside=outside)


def test_what_is_named_as_an_image_and_is_none(linked, monkeypatch):
    os.mkfifo(linked / "a" / "2.jpg")
    (linked / "a" / "3.jpg").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(linked / "a")  # the names of sockets are short
        listener.bind("4.jpg")
    samples = open_source(linked).splits["train"]
    assert read(samples, 1) == b""  # and does not wait for a writer
    for i, error in ((2, IsADirectoryError), (3, OSError)):
        with pytest.raises(error):
            read(samples, i)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 3000])
def test_files_are_read_whole_whatever_the_buffer(tmp_path, size):
    data = RANDOM.bytes(3000)
    samples = open_source(tree(tmp_path / "raw", "a/1.jpg", data=data[:100])).splits["train"]
    tree(tmp_path / "raw", "a/1.jpg", data=data[:100] if size <= 101 else data)
    buffer = memoryview(bytearray(size))
    read = samples.read(0, buffer)
    assert read == (tmp_path / "raw/a/1.jpg").read_bytes()
    in_buffer = isinstance(read, memoryview) and read.obj is buffer.obj
    assert in_buffer == (len(read) <= size)


def test_a_file_too_large_for_an_image_takes_no_memory(tmp_path):
    root = tree(tmp_path / "raw", "a/1.jpg")
    os.truncate(root / "a" / "1.jpg", 1 << 40)
    with pytest.raises(ValueError, match=f"is not an image: {1 << 40} bytes"):
        read(open_source(root).splits["train"])


def num_open_below(folder: Path) -> int:
    """Count this process's descriptors of what is below a folder."""
    count = 0
    for descriptor in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another test's garbage is closed at any time
            count += Path(os.readlink(descriptor)).is_relative_to(folder)
    return count


def test_threads_share_descriptors_and_close_gives_them_back(tmp_path):
    files = [f"{c:03d}/{i}.jpg" for c in range(100) for i in range(2)]
    for file in files:
        tree(tmp_path / "raw", file, data=file.encode())
    samples = open_source(tmp_path / "raw").splits["train"]
    for _ in range(2):
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda i: read(samples, i % 200), range(800)))
        assert found == [file.encode() for file in files] * 4
        assert num_open_below(tmp_path) == 100
        samples.close()
        assert num_open_below(tmp_path) == 0


def test_more_folders_than_descriptors(tmp_path, server):
    """What the system does not let us keep open is opened each time."""
    for i in range(200):
        tree(tmp_path / "raw", f"{i:03d}/1.jpg", data=str(i).encode())
    server.run(Path(__file__).parent / "children" / "reads_with_few_descriptors.py", tmp_path / "raw", check=True)


def test_samples_are_what_their_fields_say(linked):
    """As a plan on disk keeps them."""
    samples = open_source(linked).splits["train"]
    values = {field.name: getattr(samples, field.name) for field in dataclasses.fields(samples) if field.init}
    assert all(value is None or isinstance(value, str | list | np.ndarray) for value in values.values())
    again = type(samples)(**values)
    assert read(again) == read(samples) == b"one" and again.names == samples.names


def test_what_is_no_source(tmp_path):
    with pytest.raises(WrongPathError, match="does not exist"):
        open_source(tmp_path / "nothing")
    (tmp_path / "file").write_bytes(b"hello")
    with pytest.raises(WrongPathError, match="is not a folder, and not an archive"):
        open_source(tmp_path / "file")
    with pytest.raises(WrongPathError, match="is not a folder"):
        open_source(tmp_path / "file", kind="imagenet")
    with pytest.raises(SettingError, match="kind: 'tiff'"):
        open_source(tmp_path, "tiff")
    for kind in ("cifar10", "cifar100", "idx", "imagefolder"):
        with pytest.raises(SourceError):
            open_source(tmp_path / "file", kind)
