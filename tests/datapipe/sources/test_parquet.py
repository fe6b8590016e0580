"""Parquet files as Hugging Face lays them out."""

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from datapipe.errors import MissingBackendError, SourceError
from datapipe.sources import open_source, parquet
from tests.waiting import limit_s

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

RANDOM = np.random.default_rng(0)
NAMES = ["tench", "goldfish", "shark", "ray"]
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def hugging_face(names):
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def write(path, count=10, names=NAMES, rows=4, labels=None, images=None, kind=STRUCT, columns=("image", "label")):
    """A file of row groups of `rows` rows; returns what is in it."""
    images = images or [RANDOM.bytes(int(size)) for size in RANDOM.integers(0, 3000, count)]
    labels = (np.arange(len(images)) % 4).tolist() if labels is None else labels
    if kind == STRUCT:
        stored = [image if image is None else {"bytes": image, "path": "../x.jpg"} for image in images]
    else:
        stored = images
    table = pa.table({columns[0]: pa.array(stored, kind), "other": ["x"] * len(images), columns[1]: labels})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(hugging_face(names) if names else None), path, row_group_size=rows)
    return images, labels


def read(samples, i, size=1 << 16):
    return bytes(samples.read(i, memoryview(bytearray(size))))


def content(samples):
    return [read(samples, i) for i in range(len(samples))]


@pytest.mark.parametrize("folder", ["", "data/"])
@pytest.mark.parametrize("names", [NAMES, None])
def test_hugging_faces_layout(tmp_path, caplog, folder, names):
    files = {
        split: [tmp_path / f"{folder}{split}-{i:05d}-of-00002-a1b2.parquet" for i in range(2)]
        for split in ("train", "validation", "test")
    }
    truth = {split: [write(path, 10 + 3 * i, names) for i, path in enumerate(of)] for split, of in files.items()}
    (tmp_path / "README.md").write_bytes(b"")
    source = open_source(tmp_path)
    assert source.kind == "parquet" and source.classes == (NAMES if names else ["0", "1", "2", "3"])
    assert "2 entries (of a test split, and " in caplog.text and "validation-00000" in caplog.text
    for split, name in (("train", "train"), ("val", "validation")):
        samples = source.splits[split]
        assert content(samples) == [image for images, _ in truth[name] for image in images]
        assert samples.labels.tolist() == [label for _, labels in truth[name] for label in labels]
        assert samples.blocks.tolist() == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 4 + [4] * 4 + [5] * 4 + [6]
        assert samples.names[9] == f"{name}-00000-of-00002-a1b2/000009"
        assert samples.names[10] == f"{name}-00001-of-00002-a1b2/000000"
        assert samples.where(22) == f"{files[name][1]}, row 12"


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.struct([("bytes", pa.large_binary())])])
@pytest.mark.parametrize("columns", [("image", "labels"), ("img", "fine_label")])
def test_other_columns(tmp_path, kind, columns):
    images = [b"one", b"two", b""]
    stored = [{"bytes": image} for image in images] if pa.types.is_struct(kind) else images
    write(tmp_path / "x.parquet", images=stored, kind=kind, columns=columns, labels=[2, 0, 2], names=None)
    source = open_source(tmp_path / "x.parquet")
    assert content(source.splits["train"]) == images
    assert source.classes == ["0", "1", "2"] and source.splits["train"].labels.tolist() == [2, 0, 2]


def test_names_as_labels(tmp_path):
    labels = pa.array(["cat", "bee", "ant"]).dictionary_encode()
    write(tmp_path / "train-0.parquet", images=[b"1", b"2", b"3"], labels=labels, names=None)
    write(tmp_path / "val-0.parquet", images=[b"4"], labels=["ant"], names=None)
    source = open_source(tmp_path)
    assert source.classes == ["ant", "bee", "cat"] and source.splits["train"].labels.tolist() == [2, 1, 0]


def test_classes_that_no_sample_has(tmp_path):
    write(tmp_path / "x.parquet", images=[b"1"], labels=[1])
    assert open_source(tmp_path).classes == NAMES


@pytest.mark.parametrize("metadata", [b"{", b"[]", b'{"info": {"features": {"label": {"names": 3}}}}'])
def test_metadata_that_names_no_classes(tmp_path, metadata):
    table = pa.table({"image": [b"1", b"2"], "label": [2, 0]}).replace_schema_metadata({b"huggingface": metadata})
    pq.write_table(table, tmp_path / "x.parquet")
    assert open_source(tmp_path).classes == ["0", "1", "2"]


@pytest.mark.parametrize("kept_bytes", [0, 5000, 1 << 20])
def test_threads_share_row_groups(tmp_path, monkeypatch, kept_bytes):
    images, _ = write(tmp_path / "x.parquet", 60, rows=7)
    samples = open_source(tmp_path).splits["train"]
    monkeypatch.setattr(parquet, "KEPT_BYTES", kept_bytes)
    with ThreadPoolExecutor(16) as pool:
        for order in (np.arange(60), RANDOM.permutation(60)):
            assert list(pool.map(lambda i: read(samples, int(i)), order)) == [images[i] for i in order]


def test_a_row_group_is_decoded_once(tmp_path, monkeypatch):
    write(tmp_path / "x.parquet", 40, rows=10)
    decoded = []
    real = parquet.ParquetRows._decode

    def slowly(self, block):
        decoded.append(block)
        time.sleep(0.05)  # all threads ask meanwhile
        return real(self, block)

    monkeypatch.setattr(parquet.ParquetRows, "_decode", slowly)
    samples = open_source(tmp_path).splits["train"]
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda i: read(samples, i), range(40)))
    assert sorted(decoded) == [0, 1, 2, 3]
    samples.close()
    read(samples, 0)
    assert sorted(decoded) == [0, 0, 1, 2, 3]


def test_row_groups_are_let_go(tmp_path, monkeypatch):
    write(tmp_path / "x.parquet", images=[RANDOM.bytes(1000)] * 10, rows=1, labels=[0] * 10)
    samples = open_source(tmp_path).splits["train"]
    monkeypatch.setattr(parquet, "KEPT_BYTES", 3500)
    for i in (*range(10), 7):
        read(samples, i)
    assert list(samples._row_groups._futures) == [8, 9, 7]


def test_every_thread_hears_of_an_error_and_the_next_one_tries_again(tmp_path):
    images, _ = write(tmp_path / "x.parquet", 8, rows=8)
    samples = open_source(tmp_path).splits["train"]
    (tmp_path / "x.parquet").rename(tmp_path / "y")
    barrier = threading.Barrier(8, timeout=limit_s())

    def ask(i):
        barrier.wait()
        with pytest.raises(FileNotFoundError):
            read(samples, i)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    (tmp_path / "y").rename(tmp_path / "x.parquet")
    assert content(samples) == images


def test_samples_are_what_their_fields_say(tmp_path):
    images, _ = write(tmp_path / "x.parquet", 20)
    samples = open_source(tmp_path).splits["train"]
    fields = ("files", "column", "file", "group", "start", "image_bytes", "row", "labels", "blocks")
    values = {name: getattr(samples, name) for name in fields}
    assert all(isinstance(value, str | list | np.ndarray) for value in values.values())
    assert content(type(samples)(**values)) == images


def test_images_larger_than_the_buffer(tmp_path):
    images, _ = write(tmp_path / "x.parquet", 20)
    samples = open_source(tmp_path).splits["train"]
    for size in (0, 1, 500):
        assert [read(samples, i, size) for i in range(20)] == images


def test_sizes_are_about_right(tmp_path):
    images, _ = write(tmp_path / "x.parquet", images=[RANDOM.bytes(20_000) for _ in range(9)], labels=[0] * 9)
    samples = open_source(tmp_path).splits["train"]
    assert all(20_000 <= samples.size_bytes(i) < 21_000 for i in range(len(images)))


def test_null_images_are_found_when_read(tmp_path):
    write(tmp_path / "x.parquet", images=[b"1", None, b"3"], labels=[0, 1, 2])
    table = pa.table({"image": pa.array([{"bytes": None, "path": "/etc/passwd"}], STRUCT), "label": [0]})
    pq.write_table(table.replace_schema_metadata(hugging_face(NAMES)), tmp_path / "y.parquet")
    samples = open_source(tmp_path).splits["train"]
    assert read(samples, 2) == b"3"
    for i in (1, 3):
        with pytest.raises(ValueError, match="holds no image: null"):
            read(samples, i)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"image": [b"1", b"2"], "label": [0, None]}, r"x\.parquet: row 1 has no label"),
        ({"image": [b"1"], "label": [-1]}, "holds the label -1"),
        ({"image": [b"1"], "label": [0.5]}, "labels that are neither whole numbers nor names: 0.5"),
        ({"image": [b"1"], "label": [b"cat"]}, "column label holds no whole numbers or names, but binary"),
        ({"image": ["x.jpg"], "label": [0]}, "column image holds no encoded images, but string"),
        ({"image": [{"path": "x.jpg"}], "label": [0]}, "column image holds no encoded images, but struct"),
        (
            {"picture": [b"1"], "label": [0]},
            r"has not both columns, .*, but picture, label: rename .* \(picture\) to im",
        ),
        ({"photo": [{"bytes": b"1"}], "mask": [b"2"], "label": [0]}, r"but photo, .* \(photo or mask\) to image$"),
        (
            {"image": [b"1"], "caption": ["x"]},
            r"has not both columns, .*, but image, caption: .* --label-column caption$",
        ),
        ({"image": [b"1"], "dx": ["x"], "age": [1]}, r"but image, dx, age: say which has the .* --label-column NAME$"),
        ({"image": np.empty(0, bytes), "label": np.empty(0, np.int64)}, "split train holds no images"),
    ],
)
def test_bad_tables_are_named(tmp_path, table, message):
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)


def test_files_that_do_not_fit_each_other(tmp_path):
    write(tmp_path / "train-0.parquet")
    write(tmp_path / "train-1.parquet", names=["other", "names", "of", "classes"])
    with pytest.raises(SourceError, match=r"train-1\.parquet: names other classes than .*train-0\.parquet"):
        open_source(tmp_path)
    write(tmp_path / "train-1.parquet", images=[b"1"], kind=pa.binary())
    with pytest.raises(SourceError, match=r"train-1\.parquet: has its images in another column than .*train-0"):
        open_source(tmp_path)
    write(tmp_path / "train-1.parquet", images=[b"1"], labels=[4])
    with pytest.raises(SourceError, match="holds the label 4, but names 4 classes"):
        open_source(tmp_path)


def test_broken_files_are_named(tmp_path):
    write(tmp_path / "x.parquet")
    data = (tmp_path / "x.parquet").read_bytes()
    for broken in (data[:-1], data[len(data) // 2 :], b"", b"no parquet", data[:-100] + b"\xff" * 92 + data[-8:]):
        (tmp_path / "x.parquet").write_bytes(broken)
        with pytest.raises(SourceError, match=r"x\.parquet: cannot be read"):
            open_source(tmp_path)


def test_a_file_that_is_a_link_out_of_the_source(tmp_path):
    images, _ = write(tmp_path / "blobs" / "abc")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train-0.parquet").symlink_to(os.path.join("..", "blobs", "abc"))  # as in Hugging Face's cache
    with pytest.raises(SourceError, match=r"train-0\.parquet: is a link that leads out of the source; --outside"):
        open_source(tmp_path / "raw")
    assert content(open_source(tmp_path / "raw", outside=True).splits["train"]) == images


def test_without_pyarrow(tmp_path, monkeypatch):
    write(tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingBackendError, match=r"pip install '\.\[parquet\]'"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["train-0.parquet", "validation-0.parquet", "test-0.parquet"], {"train": 1, "val": 1}),
        (["default/train-0.parquet"], "its .parquet files lie in default: give .*/default"),
        (["train/0000.parquet", "val/0000.parquet"], {"train": 1, "val": 1}),
        (["data/train-0.parquet", "sample.parquet"], "names a split, and sample.parquet does not"),
        (["data/0.parquet", "sample.parquet"], {"train": 2}),
        (["train-0.parquet", "extra-0.parquet"], "names a split, and extra-0.parquet does not"),
        (["Training-0.parquet", "Testing-0.parquet"], {"train": 1, "val": 1}),
    ],
)
def test_files_of_splits(tmp_path, files, expected):
    for file in files:
        write(tmp_path / file, images=[file.encode()], labels=[0], names=None)
    if isinstance(expected, dict):
        assert {split: len(samples) for split, samples in open_source(tmp_path).splits.items()} == expected
    else:
        with pytest.raises(SourceError, match=expected):
            open_source(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["plain_text/train/0000.parquet", "plain_text/test/0000.parquet"],
            "files lie in plain_text: give .*/plain_text$",
        ),
        (["a/train-0.parquet", "b/train-0.parquet"], "a, b hold a data set each: give one of them, such as .*/a$"),
        (["label=0/a.parquet", "label=1/a.parquet"], "in partitions such as label=0, so that their rows lack label"),
        (["train/label=0/a.parquet", "val/label=0/a.parquet"], "in partitions such as label=0, "),
        (["train/en/0.parquet", "val/en/0.parquet"], "files lie in train/en: move them into .*/train,"),
        (["data/train/0.parquet"], "files lie in data: give .*/data$"),
    ],
)
@pytest.mark.parametrize("kind", ["auto", "parquet"])
def test_files_that_lie_deeper(tmp_path, files, message, kind):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path, kind)


def test_rows_of_one_file_in_several_splits(tmp_path):
    images = [b"%d" % i for i in range(10)]
    columns = {"image": images, "label": [0] * 10, "subset": ["train", "val", "train", "test", "train"] * 2}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=4)
    splits = open_source(tmp_path).splits
    assert content(splits["train"]) == [images[i] for i in (0, 2, 4, 5, 7, 9)]
    assert content(splits["val"]) == [images[i] for i in (1, 6)]
    assert splits["train"].blocks.tolist() == [0, 0, 1, 1, 1, 2] and splits["val"].blocks.tolist() == [0, 1]
    assert splits["val"].names == ["x/000001", "x/000006"] and splits["val"].where(1).endswith("x.parquet, row 6")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0.0, 1.0, 2.0], None),
        ([0.0, float("nan"), 2.0], "neither whole numbers nor names: nan"),
        (["0", "1", "cat"], "mixes labels that are numbers"),
        ([7, 7, 9], "only 2 numbers of those from 0 to 9"),
        ([-1, -1, -1], "holds the label -1"),
        ([[0], [1], [2]], "column label holds no whole numbers or names, but list"),
    ],
)
def test_labels_of_all_kinds(tmp_path, labels, message):
    write(tmp_path / "x.parquet", images=[b"1", b"2", b"3"], labels=labels, names=None)
    if message is None:
        assert open_source(tmp_path).splits["train"].labels.tolist() == [0, 1, 2]
        return
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)


def test_classes_that_val_has_and_train_lacks(tmp_path):
    write(tmp_path / "train-0.parquet", images=[b"1", b"2"], labels=[0, 1])
    write(tmp_path / "validation-0.parquet", images=[b"1", b"2"], labels=[0, 2])
    with pytest.raises(SourceError, match="1 class of val has no images in train: shark"):
        open_source(tmp_path)


def test_columns_that_may_be_meant(tmp_path, caplog):
    content = {"image": [b"1", b"2"], "label": [0, 1], "class": ["a", "b"], "img": [b"3", b"4"]}
    pq.write_table(pa.table(content), tmp_path / "x.parquet")
    assert content["image"] == [read(open_source(tmp_path).splits["train"], i) for i in range(2)]
    assert "x.parquet: may hold images or labels in img and class, too, not read" in caplog.text
    open_source(tmp_path, strict=True)  # nothing but a column is not read
    content = {"image": [b"1"], "mask": [{"bytes": b"2", "path": "1.png"}], "label": [0], "embedding": [[0.5]]}
    for name in ("a", "b"):  # of files with the same columns the first is named
        pq.write_table(pa.table({**content, "image": [name.encode()]}), tmp_path / f"{name}.parquet")
    (tmp_path / "x.parquet").unlink()
    caplog.clear()
    open_source(tmp_path)
    (message,) = (record.getMessage() for record in caplog.records if "too, not read" in record.getMessage())
    assert (
        message
        == f"{tmp_path}/a.parquet: may hold images or labels in mask, too, not read: its images are those of image"
    )


def test_truths_as_labels(tmp_path):
    table = pa.table({"image": [b"1", b"2", b"3"], "label": [True, False, True]})
    pq.write_table(table, tmp_path / "x.parquet")
    source = open_source(tmp_path)
    assert source.classes == ["False", "True"] and source.splits["train"].labels.tolist() == [1, 0, 1]
