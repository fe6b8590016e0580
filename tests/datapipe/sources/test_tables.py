"""Tables as they are distributed: without a header, of ids, with columns of any name, and their faults."""

import gzip
import logging
import shlex

import pytest

from datapipe.errors import SourceError
from datapipe.sources import open_source


def put(root, files):
    """Make files: those of a text or bytes have it, those of None, images, their own path."""
    for path, content in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        content = path if content is None else content
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def images(*paths):
    return dict.fromkeys(paths)


def read(root, source, typed=""):
    """Pack what a command says: the image and the class of each sample, by split."""
    words = shlex.split(typed)
    options = dict(zip(words[::2], words[1::2], strict=True))
    of_option = {"--label-column": "label_column", "--path-column": "path_column", "--labels": "labels"}
    opened = open_source(
        root / source, options.pop("--kind", "auto"), **{of_option[name]: value for name, value in options.items()}
    )
    return {
        split: [
            (bytes(samples.read(i, memoryview(bytearray(99)))).decode(), opened.classes[label])
            for i, label in enumerate(samples.labels.tolist())
        ]
        for split, samples in opened.splits.items()
    }


A, B = ("i/a.jpg", "0"), ("i/b.jpg", "1")
HEADLESS = "i/a.jpg,0\ni/b.jpg,1\n"
AUTOML = "TRAIN,gs://bucket/x/i/a.jpg,0\nVALIDATION,gs://bucket/x/i/b.jpg,0\nTRAIN,gs://bucket/x/i/c.jpg,1\n"
OF_AUTOML = {"train": [("i/a.jpg", "0"), ("i/c.jpg", "1")], "val": [("i/b.jpg", "0")]}
# Tables beside i/a.jpg, i/b.jpg and i/c.jpg: their text, options, and what is read.
READ = {
    "no header": (HEADLESS, "", {"train": [A, B]}),
    "no header, columns by number": (HEADLESS, "--path-column 1 --label-column 2", {"train": [A, B]}),
    "no header, one row": ("i/a.jpg,0\n", "", {"train": [A]}),
    "no header, tabs": (HEADLESS.replace(",", "\t"), "", {"train": [A, B]}),
    "no header, ids": ("a,0\nb,1\n", "", {"train": [A, B]}),
    "no header, the split first": (
        "TRAINING,i/a.jpg,0\nTEST,i/b.jpg,0\nTRAINING,i/c.jpg,1\n", "", OF_AUTOML
    ),
    "no header, three columns": ("i/a.jpg,x,0\ni/b.jpg,y,1\n", "--label-column 3", {"train": [A, B]}),
    "AutoML": (AUTOML, "", OF_AUTOML),
    "AutoML, of boxes that are empty": (AUTOML.replace("\n", ",,,\n"), "", OF_AUTOML),
    "file names without their folder": ("image_id,label\na.jpg,0\nb.jpg,1\n", "", {"train": [A, B]}),
    "ids": ("image,label\na,0\nb,1\n", "", {"train": [A, B]}),
    "ids in a column of any name": ("isic_id,age,label\na,50,0\nb,50,1\n", "", {"train": [A, B]}),
    "ids, and other columns that repeat": ("lesion,id,dx\nL1,a,0\nL1,b,1\n", "--label-column DX", {"train": [A, B]}),
    "paths without extension": ("path,label\ni/a,0\ni/b,1\n", "", {"train": [A, B]}),
    "backslashes": ("path,label\ni\\a.jpg,0\ni\\b.jpg,1\n", "", {"train": [A, B]}),
    "a drive": ("path,label\nC:\\data\\i\\a.jpg,0\nC:\\data\\i\\b.jpg,1\n", "", {"train": [A, B]}),
    "UTF-16": ("path,label\ni/a.jpg,0\ni/b.jpg,1\n".encode("utf-16"), "", {"train": [A, B]}),
    "UTF-16, the other way round": (
        b"\xfe\xff" + "path,label\r\ni/a.jpg,0\r\ni/b.jpg,1\r\n".encode("utf-16-be"), "", {"train": [A, B]}
    ),
    "semicolons and a mark": ("\ufeffpath;label\ni/a.jpg;0\ni/b.jpg;1\n", "", {"train": [A, B]}),
    "rows of a test split without images": (
        "id,label,split\na,0,train\nb,1,train\nz,0,test\nc,1,val\n", "", {"train": [A, B], "val": [("i/c.jpg", "1")]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_tables_that_are_read(tmp_path, name):
    text, typed, expected = READ[name]
    put(tmp_path, {"t.csv": text, **images("i/a.jpg", "i/b.jpg", "i/c.jpg", "i/label.png")})
    assert read(tmp_path, "t.csv", typed) == expected


# Tables beside i/a.jpg, i/b.jpg, j/b.jpg: their text, options, and what is said.
REFUSED = {
    "a cell of data as a column's name": (
        HEADLESS, "--path-column i/a.jpg --label-column 0",
        r"line 1: is a row of data, not of names \(i/a.jpg, 0\), .* --path-column NUMBER, such as 1 for i/a.jpg$",
    ),
    "an id as a column's name": ("a,0\nz,1\n", "--path-column a", r"is a row of data.*-column NUMBER, such as 1 "),
    "a name where there is no header": (HEADLESS, "--label-column label", "--label-column NUMBER, such as 1 "),
    "a number that is too large": (HEADLESS, "--label-column 3", "is a row of data"),
    "no header, two columns of labels": (
        "i/a.jpg,x,0\ni/b.jpg,y,1\n", "", "columns 2 and 3 may hold the labels: say which with --label-column 3"
    ),
    "no header, two columns of paths": (
        "i/a.jpg,i/b.jpg,0\n", "", r"columns 1 and 2 may hold the paths: say which with --path-column 2"
    ),
    "no header, rows of other lengths": ("i/a.jpg,0\ni/b.jpg,0,1\n", "", "line 2: 3 fields, where the first row has 2"),
    "ids of several images": (
        "id,label\na,0\nb,1\n", "", r"of 2 names, 1 with several, such as b \(i/b.jpg and j/b.jpg\): write their paths"
    ),
    "ids of no image": (
        "image,label\na,0\ny,1\nz,1\n", "", "of 3 names, 2 without an image, such as y, z: add the images, or remove"
    ),
    "two columns of ids": ("first,second,label\na,b,0\nb,a,1\n", "", "first, second may hold .* --path-column first"),
    "one column may be of labels": ("image,level\ni/a.jpg,0\n", "", r"but image, level: .* --label-column level$"),
    "a column of labels with a space": ("image,my dx\ni/a.jpg,0\n", "", r"say which it is with --label.* 'my dx'$"),
    "several columns may be": ("image,dx,age\ni/a.jpg,0,9\n", "", r"but image, dx, age: .* --label-column NAME$"),
    "beside one of splits": ("image,split,dx\ni/a.jpg,train,9\n", "", r"but image, split, dx: .* --label-column dx$"),
    "no column of labels but ids": ("id_code\na\n", "", "line 1: names no column of labels .*, but id_code: there "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_tables_that_are_refused(tmp_path, name):
    text, typed, message = REFUSED[name]
    put(tmp_path, {"t.csv": text, **images("i/a.jpg", "i/b.jpg", "j/b.jpg")})
    with pytest.raises(SourceError, match=f"^{tmp_path}/t.csv: .*{message}"):
        read(tmp_path, "t.csv", typed)


KAGGLE = {
    "cassava": (
        {"train.csv": "image_id,label\na.jpg,0\nb.jpg,1\n", "sample_submission.csv": "image_id,label\nz.jpg,4\n",
         **images("train_images/a.jpg", "train_images/b.jpg", "test_images/z.jpg")}, "",
        {"train": [("train_images/a.jpg", "0"), ("train_images/b.jpg", "1")]},
    ),
    "HAM10000": (
        {"HAM10000_metadata.csv": "lesion_id,image_id,dx,age\nL1,a,nv,60.0\nL1,b,mel,\n",
         **images("HAM10000_images_part_1/a.jpg", "HAM10000_images_part_2/b.jpg")}, "--kind csv --label-column dx",
        {"train": [("HAM10000_images_part_1/a.jpg", "nv"), ("HAM10000_images_part_2/b.jpg", "mel")]},
    ),
    "EyePACS": (
        {"trainLabels.csv": "image,level\n1_left,0\n1_right,1\n", **images("train/1_left.jpeg", "train/1_right.jpeg")},
        "--label-column level", {"train": [("train/1_left.jpeg", "0"), ("train/1_right.jpeg", "1")]},
    ),
    "APTOS": (
        {"train.csv": "id_code,diagnosis\na,0\nb,1\n", "test.csv": "id_code\nz\n",
         **images("train_images/a.png", "train_images/b.png", "test_images/z.png")}, "--label-column diagnosis",
        {"train": [("train_images/a.png", "0"), ("train_images/b.png", "1")]},
    ),
    "APTOS without the images of its test split": (
        {"train.csv": "id_code,diagnosis\na,0\nb,1\n", "test.csv": "id_code\nz\n",
         **images("train_images/a.png", "train_images/b.png")}, "--label-column diagnosis",
        {"train": [("train_images/a.png", "0"), ("train_images/b.png", "1")]},
    ),
    "ids that train and test share": (
        {"train.csv": "id,label\n1,0\n2,1\n", "test.csv": "id,label\n1,1\n2,0\n",
         **images("train/1.jpg", "train/2.jpg", "test/1.jpg", "test/2.jpg")}, "",
        {"train": [("train/1.jpg", "0"), ("train/2.jpg", "1")], "val": [("test/1.jpg", "1"), ("test/2.jpg", "0")]},
    ),
    "folders of splits that ids are found in": (
        {"all.csv": "id,label\na,0\nb,1\nc,0\n", **images("train/a.jpg", "train/b.jpg", "val/c.jpg")}, "--kind csv",
        {"train": [("train/a.jpg", "0"), ("train/b.jpg", "1")], "val": [("val/c.jpg", "0")]},
    ),
    "tabs": (
        {"data.tsv": "path\tlabel\ni/a.jpg\t0\n", **images("i/a.jpg")}, "--kind csv", {"train": [("i/a.jpg", "0")]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KAGGLE)
def test_folders_with_tables(tmp_path, caplog, name):
    caplog.set_level(logging.INFO)
    files, typed, expected = KAGGLE[name]
    assert read(put(tmp_path, files), "", typed) == expected
    assert ("its rows name images below its folder: " in caplog.text) == (name != "tabs")


@pytest.mark.parametrize("lists", [
    {"train_val_list.txt": "a.jpg\n", "test_list.txt": "b.jpg\n"}, {"val.lst": "b 1\n"}, {"test.json": '["b"]'},
])  # fmt: skip
@pytest.mark.parametrize("source", ["all.csv", ""])
def test_lists_of_splits_beside_a_table(tmp_path, lists, source):
    put(tmp_path, {"all.csv": "id,label\na,x\nb,x\n", **images("i/a.jpg", "i/b.jpg"), **lists})
    why = f"{', '.join(sorted(lists))} may say which images are for training: if so, add a column split"
    with pytest.raises(SourceError, match=why):
        read(tmp_path, source, "--kind csv")
    assert len(open_source(tmp_path / source, "csv", splits=["train=."]).splits["train"]) == 2
    put(tmp_path, {"all.csv": "id,label,split\na,x,train\nb,x,val\n"})
    assert read(tmp_path, source, "--kind csv") == {"train": [("i/a.jpg", "x")], "val": [("i/b.jpg", "x")]}


@pytest.mark.parametrize("lists", [{"train.txt": "epoch 1\nepoch 2\n"}, {"images.txt": "a.jpg\n"}, {"val.txt": ""}])
def test_files_beside_a_table_that_say_no_splits(tmp_path, lists):
    put(tmp_path, {"all.csv": "id,label\na,x\n", **images("i/a.jpg"), **lists})
    assert read(tmp_path, "all.csv", "") == {"train": [("i/a.jpg", "x")]}


def test_linked_folders_of_images(tmp_path):
    put(tmp_path, {"raw/t.csv": "id,label\na,0\n", **images("elsewhere/a.jpg", "raw/i/z.jpg")})
    (tmp_path / "raw/i/up").symlink_to(tmp_path / "raw")  # in a circle
    (tmp_path / "raw/out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="names no column of paths"):
        open_source(tmp_path / "raw/t.csv")
    source = open_source(tmp_path / "raw/t.csv", outside=True)
    assert source.splits["train"].names == ["out/a"]


FAULTS = {
    "gaps": ("path,label\ni/a.jpg,3\ni/b.jpg,912\n", "holds only 2 numbers of those from 0 to 912 .* --labels names"),
    "another name": (
        "path,class_name\ni/a.jpg,3\n",
        r"labels.csv: line 1: names no column .* --label-column class_name",
    ),
    "a hole": ("path;label\ni/a.jpg;x\ni/b.jpg;\n", "labels.csv: line 3: no label"),
    "no table": (b"\x00\x01\n", "labels.csv: line 1: holds NUL bytes"),
    "a few images missing": ("id,label\na,x\nb,x\nz,y\n", "of 3 names, 1 without an image, such as z"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_of_a_table_beside_images(tmp_path, caplog, name):
    text, fault = FAULTS[name]
    put(tmp_path, {"labels.csv": text, **images("i/a.jpg", "i/b.jpg")})
    with pytest.raises(SourceError, match=f"has their labels, --kind csv reads it once this is settled: {fault}"):
        open_source(tmp_path)
    assert not caplog.records


@pytest.mark.parametrize("text", [
    "path;label\ni/a.jpg;0\n", "\ufeffpath;label\ni/a.jpg;0\n", "path,label\ni\\a.jpg,0\n", "id,label\na,0\n",
    "path,label\ni/a.jpg,0\n".encode("utf-16"),
])  # fmt: skip
def test_a_table_beside_images_that_is_read(tmp_path, text):
    put(tmp_path, {"labels.csv": text, **images("i/a.jpg")})
    with pytest.raises(SourceError, match=r"if labels\.csv has their labels, type --kind csv;"):
        open_source(tmp_path)
    assert read(tmp_path, "", "--kind csv") == {"train": [("i/a.jpg", "0")]}


def test_a_column_where_folders_are_classes_points_to_the_table(tmp_path):
    put(tmp_path, {"t.csv": "id,dx\na,0\n", **images("i/a.jpg")})
    with pytest.raises(ValueError, match=r"is imagefolder; if a table there has the labels, add --kind csv$"):
        open_source(tmp_path, label_column="dx")


def test_idx_files_beside_folders_of_the_same_names(tmp_path):
    for stem, header in (("images", [3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1]), ("labels", [1, 0, 0, 0, 2])):
        name = f"train-{stem}-idx{header[0]}-ubyte"
        content = bytes([0, 0, 8, *header, 0, 1])
        put(tmp_path, {f"{name}/{name}": content, f"train-{stem}.idx{header[0]}-ubyte": content})
        put(tmp_path, {f"packed/{name}/x": b"", f"packed/{name}.gz": gzip.compress(content)})
    for folder in (tmp_path, tmp_path / "packed"):
        assert open_source(folder).splits["train"].labels.tolist() == [0, 1]
