"""Sources: what they find, and what they say of a raw data set that is not as it should be."""

import gzip
import io
import os
import pickle
import pickletools
import tarfile

import numpy as np
import pytest

from datapipe.errors import SettingError, SourceError
from datapipe.image import decode
from datapipe.sources import open_source

RANDOM = np.random.default_rng(0)


def pixels_of(samples):
    return np.stack([decode(samples.read(i), 3) for i in range(len(samples))])


# --- CIFAR -------------------------------------------------------------------------------------------


def cifar_rows(count, classes):
    rows = RANDOM.integers(0, 256, (count, 3072), dtype=np.uint8)
    return rows, RANDOM.integers(0, classes, count)


def cifar_files(kind, version):
    """The files of a small CIFAR: name -> bytes, and the truth: split -> (images, labels)."""
    classes = 10 if kind == "cifar10" else 100
    train = [f"data_batch_{i}" for i in range(1, 6)] if kind == "cifar10" else ["train"]
    test = ["test_batch"] if kind == "cifar10" else ["test"]
    files, truth = {}, {}
    for split, names in (("train", train), ("val", test)):
        parts = []
        for name in names:
            rows, labels = cifar_rows(7, classes)
            parts.append((rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels))
            if version == "python":
                field = "labels" if kind == "cifar10" else "fine_labels"
                content = {"data": rows, field: labels.tolist(), "filenames": ["x.png"] * 7}
                files[name] = pickle.dumps(content, protocol=2)
            else:
                columns = [labels[:, None].astype(np.uint8), rows]
                columns = columns if kind == "cifar10" else [np.zeros((7, 1), np.uint8), *columns]
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
        images, labels = RANDOM.integers(0, 256, (count, 9, 8)), RANDOM.integers(0, 4, count)
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


def test_imagefolder_without_splits(tmp_path):
    source = open_source(tree(tmp_path / "raw", "b/2.png", "a/1.jpg", "b/deeper/3.JPEG", "b/.hidden.jpg"))
    assert source.classes == ["a", "b"] and list(source.splits) == ["train"]
    samples = source.splits["train"]
    assert list(samples.paths) == ["a/1.jpg", "b/2.png", "b/deeper/3.JPEG"]
    assert samples.labels.tolist() == [0, 1, 1]


def test_a_test_split_is_val(tmp_path):
    source = open_source(tree(tmp_path / "raw", "train/a/1.jpg", "train/b/1.jpg", "test/b/2.jpg"))
    assert list(source.splits["val"].paths) == ["b/2.jpg"] and source.splits["val"].labels.tolist() == [1]


def test_a_class_may_be_called_train(tmp_path):
    source = open_source(tree(tmp_path / "raw", "train/1.jpg", "car/2.jpg"))
    assert source.classes == ["car", "train"] and list(source.splits) == ["train"]


def test_pipes_are_no_images(tmp_path):
    os.mkfifo(tree(tmp_path / "raw", "a/1.jpg") / "a" / "2.jpg")
    assert list(open_source(tmp_path / "raw").splits["train"].paths) == ["a/1.jpg"]


def test_val_wins_over_test(tmp_path, caplog):
    source = open_source(tree(tmp_path / "raw", "train/a/1.jpg", "test/a/2.jpg", "val/a/3.jpg"))
    assert list(source.splits["val"].paths) == ["a/3.jpg"]
    assert "test: left out" in caplog.text


def test_other_files_are_left_out_aloud(tmp_path, caplog):
    open_source(tree(tmp_path / "raw", "a/1.jpg", "a/notes.txt"))
    assert "left out 1 files" in caplog.text and "a/notes.txt" in caplog.text


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "no class folders"),
        (["1.jpg", "2.jpg"], "no class folders"),
        (["a/1.jpg", "2.jpg"], "2.jpg: lies beside the class folders"),
        (["train/1.jpg", "train/2.jpg"], "lies beside the class folders"),
        (["train/a/1.jpg", "others/a/1.jpg"], "holds train beside others"),
        (["train/a/1.jpg", "val/z/1.jpg"], "class folders that the train split does not have: z"),
        (["a/readme.txt"], "holds no images"),
        (["train/a/1.jpg", "val/a/readme.txt"], "split val holds no images"),
    ],
)
def test_unknown_layout_says_what_is_expected(tmp_path, paths, message):
    (tmp_path / "raw").mkdir()
    with pytest.raises(SourceError, match=message):
        open_source(tree(tmp_path / "raw", *paths))


def test_links_below_a_class_are_not_followed(tmp_path):
    root = tree(tmp_path / "raw", "a/1.jpg")
    (root / "a" / "loop").symlink_to(root / "a")
    (root / "b").symlink_to(root / "a")
    (root / "a" / "2.jpg").symlink_to(root / "a" / "1.jpg")
    assert list(open_source(root).splits["train"].paths) == ["a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg"]


def test_what_is_no_source(tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        open_source(tmp_path / "nothing")
    (tmp_path / "file").write_bytes(b"hello")
    with pytest.raises(SourceError):
        open_source(tmp_path / "file")
    with pytest.raises(SettingError, match="kind: 'tiff'"):
        open_source(tmp_path, "tiff")
    for kind in ("cifar10", "cifar100", "idx", "imagefolder"):
        with pytest.raises(SourceError):
            open_source(tmp_path / "file", kind)
