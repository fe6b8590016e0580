"""Tables of image files and labels."""

import csv
import logging
import os

import pytest

from datapipe.errors import SettingError, SourceError
from datapipe.sources import open_source


@pytest.fixture
def raw(tmp_path):
    """A folder with images below it, and one beside it."""
    for path in ("raw/img/1.jpg", "raw/img/2.jpg", "raw/img/deep/3.png", "raw/4.jpg", "elsewhere/9.jpg"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(path.encode())
    return tmp_path / "raw"


def table(path, *rows, **options):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows(rows)
    return path


def content(samples):
    return [bytes(samples.read(i, memoryview(bytearray(99)))).decode() for i in range(len(samples))]


def test_a_table_of_names(raw):
    path = table(raw / "all.csv", ("id", "path", "label"), (7, "img/1.jpg", "zebra"), (8, "4.jpg", "cat, black"),
                 (9, "./img//deep/3.png", "zebra"), (10, "img/1.jpg", "cat, black"))  # fmt: skip
    source = open_source(path)
    assert source.kind == "csv" and source.classes == ["cat, black", "zebra"]
    samples = source.splits["train"]
    assert content(samples) == ["raw/img/1.jpg", "raw/4.jpg", "raw/img/deep/3.png", "raw/img/1.jpg"]
    assert samples.labels.tolist() == [1, 0, 1, 0]
    assert samples.names == ["img/1", "4", "img/deep/3", "img/1"]
    assert samples.where(2) == str(raw / "img/deep/3.png")


@pytest.mark.parametrize(
    "path_name", ["path", "file", "filename", "image", "image_path", " Image_Path ", "file_name", "img"]
)
@pytest.mark.parametrize("label_name", ["label", "class", "target", "category"])
def test_columns_by_any_of_their_names(raw, path_name, label_name):
    source = open_source(table(raw / "all.csv", (label_name, path_name), ("2", "4.jpg"), ("0", "img/2.jpg")))
    assert source.classes == ["0", "1", "2"] and source.splits["train"].labels.tolist() == [2, 0]


def test_the_first_column_that_is_there_is_taken(raw, caplog):
    rows = ("image", "category", "path", "label"), ("no", "no", "4.jpg", "yes")
    source = open_source(table(raw / "all.csv", *rows))
    assert source.classes == ["yes"] and content(source.splits["train"]) == ["raw/4.jpg"]
    assert "all.csv: may hold paths or labels in image and category, too, not read" in caplog.text
    assert open_source(raw / "all.csv", strict=True).classes == ["yes"]  # nothing but a column is not read


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_columns_are_separated_by_what_the_header_has(raw, caplog, separator):
    caplog.set_level(logging.INFO)
    rows = ("path", "label"), ("img/1.jpg", "a,b"), ("4.jpg", "c;d"), ("img/2.jpg", "e\tf")
    for name in ("all.csv", "all.tsv"):
        source = open_source(table(raw / name, *rows, delimiter=separator))
        assert source.classes == ["a,b", "c;d", "e\tf"] and len(source.splits["train"]) == 3
    assert ("are separated by" in caplog.text) == (separator != ",")


def test_a_column_of_paths_that_the_user_names(raw):
    rows = ("Image ID", "path", "label"), ("4.jpg", "no", "a"), ("img/1.jpg", "no", "b")
    path = table(raw / "all.csv", *rows)
    assert content(open_source(path, path_column="Image ID").splits["train"]) == ["raw/4.jpg", "raw/img/1.jpg"]
    with pytest.raises(SourceError, match=r"names no column of paths \(photo\), but image id, path, label$"):
        open_source(path, path_column="photo")
    table(path, ("id", "label"), ("nowhere", "a"))
    with pytest.raises(SourceError, match="but id, label; say which it is with --path-column NAME"):
        open_source(path)
    with pytest.raises(SettingError, match="path_column: it is for csv, and"):
        open_source(raw, "imagefolder", path_column="id")


def test_splits_from_a_column(raw, caplog):
    rows = ("path", "label", "split"), ("4.jpg", 0, "train"), ("img/1.jpg", 0, "Validation"), ("img/2.jpg", 9, "test")
    source = open_source(table(raw / "all.csv", *rows))
    assert {split: content(samples) for split, samples in source.splits.items()} == {
        "train": ["raw/4.jpg"], "val": ["raw/img/1.jpg"],
    }  # fmt: skip
    assert source.classes == ["0"]  # what is left out has no say
    assert "(of a test split, and Validation is taken for val): all.csv: img/2.jpg" in caplog.text


def test_splits_from_files(raw):
    table(raw / "train.csv", ("path", "label"), ("4.jpg", "b"), ("img/deep/3.png", "a"))
    table(raw / "test.csv", ("filename", "class"), ("img/1.jpg", "a"), ("img/2.jpg", "b"))
    source = open_source(raw)
    assert source.kind == "csv" and source.classes == ["a", "b"]
    assert content(source.splits["val"]) == ["raw/img/1.jpg", "raw/img/2.jpg"]
    assert source.splits["val"].labels.tolist() == [0, 1]


def test_windows_text(raw):
    path = raw / "all.csv"
    path.write_bytes('\ufefflabel,path\r\n"é\r\nè",4.jpg\r\n\r\nb,img/1.jpg\r\n'.encode())
    source = open_source(path)
    assert source.classes == ["b", "é\r\nè"] and len(source.splits["train"]) == 2


def test_absolute_paths_within_the_folder(raw):
    link = raw.parent / "link"
    link.symlink_to(raw)
    for folder in (raw, link):
        for name in (raw, link):
            source = open_source(table(folder / "all.csv", ("path", "label"), (folder / "img/1.jpg", "a"),
                                       (name.resolve() / "4.jpg", "a")))  # fmt: skip
            assert source.splits["train"].names == ["img/1", "4"]
            assert content(source.splits["train"]) == ["raw/img/1.jpg", "raw/4.jpg"]


@pytest.mark.parametrize("where", ["../elsewhere/9.jpg", "img/../../elsewhere/9.jpg", "/{}/elsewhere/9.jpg"])
def test_paths_that_lead_out(raw, where):
    where = where.format(str(raw.parent)[1:])
    path = table(raw / "all.csv", ("path", "label"), ("4.jpg", "a"), (where, "a"))
    with pytest.raises(SourceError, match=r"all.csv: line 3: .*elsewhere/9.jpg leads out of the source; --outside"):
        open_source(path)
    assert content(open_source(path, outside=True).splits["train"]) == ["raw/4.jpg", "elsewhere/9.jpg"]


def test_absolute_paths_of_another_machine(raw, caplog):
    caplog.set_level("INFO")
    rows = ("/home/me/raw/img/1.jpg", "a"), ("/home/me/raw/4.jpg", "b")
    for outside in (False, True):
        source = open_source(table(raw / "all.csv", ("path", "label"), *rows), outside=outside)
        assert source.splits["train"].names == ["img/1", "4"]
        assert "its rows name images below its folder: /home/me/raw/img/1.jpg is img/1.jpg" in caplog.text
    nowhere, elsewhere = ("/home/me/none.jpg", "a"), (raw.parent / "elsewhere/9.jpg", "a")
    for more, message in (
        ((*rows, nowhere), "of 3 names, 1 without an image, such as /home/me/none.jpg"),
        ((*rows * 4, elsewhere), "of 9 names, 1 without an image, such as .*elsewhere/9.jpg"),
        ((*rows, elsewhere), "line 2: /home/me/raw/img/1.jpg leads out of the source, and names no file there"),
        ((nowhere,), "line 2: /home/me/none.jpg leads out of the source, and names no file there"),
    ):
        with pytest.raises(SourceError, match=f"all.csv: {message}"):
            open_source(table(raw / "all.csv", ("path", "label"), *more))


@pytest.mark.parametrize("where", ["out/9.jpg", "img/9.jpg"])
def test_links_that_lead_out(raw, where):
    (raw / "out").symlink_to(raw.parent / "elsewhere")
    (raw / "img" / "9.jpg").symlink_to(raw.parent / "elsewhere" / "9.jpg")
    path = table(raw / "all.csv", ("path", "label"), (where, "a"))
    with pytest.raises(ValueError, match="is a link that leads out of the source; --outside follows it"):
        content(open_source(path).splits["train"])
    assert content(open_source(path, outside=True).splits["train"]) == ["elsewhere/9.jpg"]


def test_a_table_that_is_a_link(raw):
    target = table(raw.parent / "elsewhere.csv", ("path", "label"), ("4.jpg", "a"))
    (raw / "train.csv").symlink_to(target)
    with pytest.raises(SourceError, match=r"train.csv: is a link that leads out"):
        open_source(raw)
    for source in (open_source(raw, outside=True), open_source(raw / "train.csv")):  # named by the user
        assert content(source.splits["train"]) == ["raw/4.jpg"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "line 1: names no column of paths"),
        (b"path label\n4.jpg a\n", "but path label; commas, semicolons or tabs must separate the columns"),
        (b"nowhere,a\n", "line 1: names no column of paths .*, but nowhere, a"),
        (b"path,name\n4.jpg,a\n", "line 1: names no column of labels"),
        (b"path,label\n", "holds no rows"),
        (b"path,label\n4.jpg,a\n4.jpg,\n", "line 3: no label"),
        (b"path,label\n4.jpg,a\n  ,b\n", "line 3: no path"),
        (b"path,label\n4.jpg,a\n4.jpg\n", "line 3: 1 fields, where the header names 2"),
        (b"path,label\n4.jpg,a,b\n", "line 2: 3 fields, where the header names 2"),
        (b"path,label\n4.jpg,a\n4\xff.jpg,a\n", "line 3: is not text in utf-8: save it as UTF-8; .* iconv -f latin1"),
        (b"path,label\r4.jpg,a\r", "line 1: its lines end in a carriage return alone: write line feeds, as tr"),
        (b"path,label\n4.jpg,a\n4\0.jpg,a\n", "line 3: holds NUL"),
        ("path,label\n4.jpg,a\n".encode("utf-16-le"), "line 1: holds NUL bytes, so it is not text in UTF-8: save it"),
        ("path,label\n4.jpg,a\n".encode("utf-16")[:-1], "line 1: .*utf-16"),
        ("path,label\n4.jpg,a\n".encode("utf-32"), "line 1: holds NUL"),
        (b'path,label\n"4.jpg"x,a\n', "line 2: "),
        (b'path,label\n"4.jpg,a\n', "unexpected end of data"),
        (b"path,label\n" + b"x" * 200_000 + b",a\n", "line 2: field larger than field limit"),
        (b"path,label\r4.jpg,a\r", "line 1: "),
        (
            b"path,label,split\n4.jpg,a,other\n",
            "split is 'other', and nothing else says the splits: type --split train=. if",
        ),
        (b"path,label\n4.jpg,-1\n4.jpg,3\n", "holds the label -1; allowed: 0 to 999999"),
        (b"path,label\n4.jpg,1000000\n", "holds the label 1000000; allowed"),
        (b"path,label\n4.jpg," + b"9" * 5000 + b"\n", None),  # no number that Python reads: a name
    ],
)
def test_what_is_no_table_is_named(raw, text, message):
    path = raw / "all.csv"
    path.write_bytes(text)
    if message is None:
        assert len(open_source(path).classes) == 1
        return
    with pytest.raises(SourceError, match=message) as raised:
        open_source(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_files_that_are_not_there_are_found_when_read(raw):
    samples = open_source(table(raw / "all.csv", ("path", "label"), ("no/1.jpg", 0), ("img", 0))).splits["train"]
    for i, error in enumerate((FileNotFoundError, IsADirectoryError)):
        with pytest.raises(error):
            samples.read(i, memoryview(bytearray(9)))


def test_a_folder_without_train(raw):
    table(raw / "val.csv", ("path", "label"), ("4.jpg", "a"))
    assert list(open_source(raw, "csv").splits) == ["val"]


def test_file_names_of_any_bytes(raw):
    name = os.fsdecode(b"caf\xc3\xa9 \xe6\x97\xa5.jpg")
    (raw / name).write_bytes(b"x")
    assert content(open_source(table(raw / "all.csv", ("path", "label"), (name, "a"))).splits["train"]) == ["x"]


@pytest.mark.parametrize(
    ("header", "values", "message"),
    [
        (("path", "label", "label"), ("a", "b"), "names two columns label"),
        (("path", "id", "fold"), ("train", "val"), "names no column of labels"),
    ],
)  # fmt: skip
def test_columns_of_labels_that_are_not_one(raw, header, values, message):
    path = table(raw / "all.csv", header, ("4.jpg", "a", values[0]), ("img/1.jpg", "a", values[1]))
    with pytest.raises(SourceError, match=message):
        open_source(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("old/1", "old/1 names no file, and img/1.jpg does: write it so in the table"),
        ("old/raw/img/1.jpg", "old/raw/img/1.jpg names no file, and img/1.jpg does"),
        ("old\\1.jpg", "names no file, and img/1.jpg does"),
        ("raw/img/1.jpg", "raw/img/1.jpg names no file, and img/1.jpg does: put the table into .*, and give it there"),
    ],
)
def test_paths_that_are_clearly_meant_otherwise(raw, path, message):
    with pytest.raises(SourceError, match=message):
        open_source(table(raw / "all.csv", ("path", "label"), (path, "a"), (path.replace("1", "2"), "b")))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("4.jpg", "a", "train"), ("./4.jpg", "b", "train")], "1 row names an image that others give other labels,"),
        ([("img/1.jpg", "a", "train"), ("img//1.jpg", "a", "val")], "other splits, such as img/1.jpg, of train"),
        ([("4.jpg", "a", "train"), ("4.jpg", "a", "train"), ("img/1.jpg", "a", "val")], None),  # weighted by hand
    ],
)  # fmt: skip
def test_images_of_two_labels_or_splits_are_told(raw, caplog, rows, message):
    source = open_source(table(raw / "all.csv", ("path", "label", "split"), *rows))
    assert sum(len(samples) for samples in source.splits.values()) == len(rows)
    assert message in caplog.text if message else not caplog.records
