"""Which kind of source a folder or file is, by names alone; and which split a name stands for."""

import importlib
import os

import pytest

from datapipe.errors import SourceError
from datapipe.sources import MODULES, open_source

WNID = "n01440764"
LAYOUTS = {
    "idx": [["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"], ["t10k-images.idx3-ubyte", "notes.txt"]],
    "cifar10": [["data_batch_1", "test_batch", "batches.meta"], ["cifar-10-batches-py/data_batch_1",
                 "cifar-10-batches-py/batches.meta", "cifar-10-python.tar.gz"]],
    "cifar100": [["train", "test", "meta", "file.txt~"], ["train.bin", "test.bin", "fine_label_names.txt"]],
    "imagenet": [
        ["ILSVRC2012_img_train.tar"],
        ["ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"],
        ["ILSVRC2012_img_train.tar", "val/n01440764/1.JPEG"],
        [f"train/{WNID}.tar", "train/n01443537.tar", "val/n01440764/1.JPEG"],
        ["ILSVRC2012_img_val.tar", f"train/{WNID}/1.JPEG"],
        [f"train/{WNID}/1.JPEG", "val/ILSVRC2012_val_00000001.JPEG", "val/ILSVRC2012_val_00000002.JPEG"],
        ["LOC_val_solution.csv", "LOC_sample_submission.csv", f"ILSVRC/Data/CLS-LOC/train/{WNID}/1.JPEG"],
    ],
    "webdataset": [
        ["000000.tar", "000001.tar", "readme.md"],
        ["imagenet-train-000000.tar", "imagenet-val-000000.tar"],
        ["train/000000.tar", "val/000000.tar", "other/x.txt"],
        ["train/000000.tar", "train/000000.idx"],
        ["000000.tar.gz", "000001.tgz"],
    ],
    "parquet": [
        ["data/train-00000-of-00002-abc.parquet", "data/validation-00000-of-00001-abc.parquet", "README.md"],
        ["train-00000-of-00001.parquet", "dataset_infos.json"],
        ["train/0000.parquet", "test/0000.parquet"],
    ],
    "csv": [["train.csv", "images/1.jpg"], ["train.csv", "val.csv", "test.csv", "a/1.jpg", "b/1.jpg"],
            ["Train.csv", "Val.csv", "i/1.jpg"], ["TRN_labels.CSV", "a/1.jpg"],
            ["train.csv", "test.csv", "sample_submission.csv", "train/1.jpg"]],
    "imagefolder": [
        ["a/1.jpg", "b/1.jpg"],
        ["train/a/1.jpg", "val/a/1.jpg"],
        ["train/a/1.jpg", "test/a/1.jpg", "meta/train.txt"],  # called as files of CIFAR-100
        ["train/a/1.jpg", "test/a/1.jpg", "meta"],
        ["train/a/1.jpg", "val/a/1.jpg", "test", "meta"],
        ["a/1.jpg", "b/1.jpg", "train", "test", "meta"],
        ["train/a/1.jpg", "val/a/1.jpg", "train.tar", "val.tar.gz", "all.parquet", "labels.csv"],  # left beside
        ["train/a/1.jpg", "train/a.tar", "train/a.parquet"],
        [f"train/{WNID}/1.JPEG", f"val/{WNID}/1.JPEG"],
        ["a/1.jpg", "a/1.tar", "a/train.csv"],
        ["a/1.jpg", "cifar-notes.txt", "val.csv"],
        ["a/1.jpg", "a/1.tar", "b/1.jpg", "b/1.tar"],
        ["a/1.tar", "b/1.jpg"],
        [],
    ],
}  # fmt: skip
FILES = {
    "webdataset": ["x.tar", "train-000000.TAR", "x.tar.gz", "x.tgz"],
    "parquet": ["x.parquet"],
    "csv": ["x.csv"],
    "imagenet": ["ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"],
    "imagefolder": ["x.zip", "x"],
}
CASES = [(kind, files) for kind, layouts in LAYOUTS.items() for files in layouts]
FILE_CASES = [(kind, name) for kind, names in FILES.items() for name in names]


def put(root, files):
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"")
    return root


def kinds(path):
    """What each module takes it for; the first is what it is taken for."""
    found = ((importlib.import_module(f"datapipe.sources.{name}").detect(path), name) for name in MODULES)
    return [kind for kind, _ in found if kind]


@pytest.mark.parametrize(("kind", "files"), CASES)
def test_a_folder_is_of_one_kind(tmp_path, monkeypatch, kind, files):
    scanned = []
    for name in ("scandir", "listdir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, real=real: scanned.append(str(path)) or real(path))
    put(tmp_path, [*files, ".hidden.tar", ".hidden.parquet", ".hidden.csv"])
    found = kinds(tmp_path)
    assert found[0] == kind and set(found) <= {kind, "imagefolder"} | ({"webdataset"} if kind == "imagenet" else set())
    assert len(scanned) <= 24 and not any(path.endswith(WNID) for path in scanned)


@pytest.mark.parametrize(("kind", "name"), FILE_CASES)
def test_a_file_is_of_one_kind(tmp_path, kind, name):
    assert kinds(put(tmp_path, [name]) / name)[0] == kind
    with pytest.raises(SourceError, match=name):  # for it is empty
        open_source(tmp_path / name)


@pytest.mark.parametrize("files", [["manifest.json", "shard-000000.tar"], ["train/manifest.json", "train/shard-0.tar"]])
def test_a_packed_data_set_is_no_webdataset(tmp_path, files):
    assert kinds(put(tmp_path, files)) == ["imagefolder"]
    with pytest.raises(SourceError, match="holds no tar shards"):
        open_source(tmp_path, "webdataset")


@pytest.mark.parametrize("kind", ["webdataset", "parquet"])
def test_a_kind_that_is_told_is_looked_for_beside_folders_too(tmp_path, kind):
    name = {"webdataset": "x.tar", "parquet": "x.parquet"}[kind]
    with pytest.raises(SourceError, match=name):  # for it is empty
        open_source(put(tmp_path, [name, "logs/log.txt"]), kind)


@pytest.mark.parametrize("kind", ["imagenet", "webdataset", "parquet", "csv"])
def test_a_kind_that_is_not_there(tmp_path, kind):
    with pytest.raises(SourceError, match="holds n"):
        open_source(tmp_path, kind)


@pytest.mark.parametrize(("kind", "name"), [("webdataset", "train-0.tar"), ("parquet", "train-0.parquet")])
def test_shards_beside_a_folder_of_others(tmp_path, kind, name):
    """The folder may be an old copy of them."""
    put(tmp_path, [name, f"old/{name}"])
    message = f"if {name} is part of the data set, type --kind {kind}; a data set of the kind {kind} lies in .*/old"
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)
