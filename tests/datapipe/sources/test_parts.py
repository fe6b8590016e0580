"""Which split rows of tables and members of archives belong to."""

import csv
import io
import json
import logging
import re
import shlex
import tarfile

import pytest

from datapipe.errors import SettingError, SourceError
from datapipe.sources import open_source
from datapipe.sources.split_columns import MAX_VALUES, Columns, is_column
from datapipe.splits import SplitRule


def write_csv(folder, name, rows):
    """Rows: dicts with path, label and other columns."""
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(folder, name, rows):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {key: [None if row[key] == "" else row[key] for row in rows] for key in rows[0] if key != "path"}
    images = [{"bytes": row["path"].encode(), "path": row["path"]} for row in rows]
    pq.write_table(pa.table({"image": images, **columns}), folder / f"{name}.parquet", row_group_size=3)


def write_tar(folder, name, rows):
    with tarfile.open(folder / f"{name}.tar", "w") as archive:
        for row in rows:
            fields = {key: value for key, value in row.items() if key != "path"}
            key = row["path"].removesuffix(".jpg")
            contents = {".jpg": row["path"].encode()}
            if row.get("label"):
                contents[".json"] = json.dumps(fields).encode()
            for suffix, content in contents.items():
                info = tarfile.TarInfo(key + suffix)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


WRITERS = {"csv": write_csv, "parquet": write_parquet, "webdataset": write_tar}
KINDS = pytest.mark.parametrize("kind", WRITERS)


def rows(header, *values):
    """A row for each tuple: path, then the label that is "a" for even ones, and the columns of the header."""
    names = header.split()
    return [
        {"path": path, "label": "ab"[number % 2], **dict(zip(names, others, strict=True))}
        for number, (path, *others) in enumerate(values)
    ]


def divided(tmp_path, kind, files, **options):
    """The samples' names by split, of files of rows."""
    for name, of_file in files.items():
        WRITERS[kind](tmp_path, name, of_file)
    path = tmp_path / f"{next(iter(files))}.{kind}" if kind == "csv" and len(files) == 1 else tmp_path
    source = open_source(path, kind, **options)
    splits = {}
    for split, samples in source.splits.items():
        texts = (
            [bytes(samples.read(i, memoryview(bytearray(99)))) for i in range(len(samples))] if kind != "csv" else []
        )
        splits[split] = " ".join(text.decode().removesuffix(".jpg") for text in texts) or " ".join(samples.names)
    return splits


FOUR = [("0.jpg", "train"), ("1.jpg", "train"), ("2.jpg", "val"), ("3.jpg", "val")]
TWO_AND_TWO = {"train": "0 1", "val": "2 3"}


@KINDS
@pytest.mark.parametrize("header", ["dataset", "group", "set_category", "data_split", "tvt"])
def test_a_column_of_nothing_but_splits_whatever_it_is_called(tmp_path, kind, header):
    assert divided(tmp_path, kind, {"data": rows(header, *FOUR)}) == TWO_AND_TWO


@KINDS
@pytest.mark.parametrize("others", [[f"word {i}" for i in range(30)], ["a red bus", "x"]])
def test_text_that_names_splits(tmp_path, kind, others):
    words = ["train", "val", *others]
    data = {"data": rows("text", *((f"{i}.jpg", word) for i, word in enumerate(words)))}
    assert divided(tmp_path, kind, data).keys() == {"train"}


def test_what_a_column_is_of():
    named = [
        "split",
        "Subset",
        "data split",
        "split_name",
        "fold",
        "kfold",
        "is_valid",
        "in_train",
        "train and val",
        "traintest",
        "Is Test Set",
        "val",
    ]
    assert all(map(is_column, named))
    others = ("cv_score", "test_score", "label", "dataset", "group", "train_loss", "offset", "settings", "unfolded", "")
    assert not any(map(is_column, others))


@KINDS
@pytest.mark.parametrize(
    "values",
    [
        "xxxx",
        ("dev board",) * 4,
        ("train board", "board of val", "x", "y"),
        ("train",) * 4,
        ("train", "bus", "train", "car"),  # the vehicle: with one of the labels
        ("rail train", "bullet train", "x", "x"),
    ],
)
def test_a_column_of_other_things(tmp_path, kind, values):
    data = {"data": rows("country", *((f"{i}.jpg", value) for i, value in enumerate(values)))}
    assert divided(tmp_path, kind, data) == {"train": "0 1 2 3"}


@KINDS
@pytest.mark.parametrize("labels", ["aaaa", "aaba", "abcd"])
def test_train_beside_other_things_that_is_no_class(tmp_path, kind, labels):
    data = rows("use", *((f"{i}.jpg", value) for i, value in enumerate(("train", "train", "novel", "novel"))))
    for row, label in zip(data, labels, strict=True):
        row["label"] = label
    with pytest.raises(SourceError, match="and 'novel' names no split that datapipe knows"):
        divided(tmp_path, kind, {"data": data})


@pytest.mark.parametrize("name", ["original", "eval"])
@pytest.mark.parametrize("text", ["train_{}.jpg", "0.{}", "train_{:x}"])
def test_few_of_many_values_are_kept(name, text):
    columns = Columns(SplitRule())
    values = {columns.said([(name, text.format(10**6 + i))]) for i in range(3 * MAX_VALUES)}
    assert len(values) <= MAX_VALUES + 1
    assert (((name, "val_1"),) in {columns.said([(name, f"val_{i}")]) for i in (1, 2)}) == bool(columns.alive([name]))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_two_columns_of_one_name(tmp_path, kind):
    if kind == "csv":
        (tmp_path / "x.csv").write_text("path,label,split,Split\n1.jpg,a,train,val\n2.jpg,a,val,val\n")
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        columns = [pa.array([b"1"]), *map(pa.array, (["a"], ["train"], ["val"]))]
        pq.write_table(pa.table(columns, names=["image", "label", "split", "split"]), tmp_path / "x.parquet")
    with pytest.raises(
        SourceError, match=r"where split \(2\) is 'val': if split counts|has two columns split: rename one"
    ):
        open_source(tmp_path, kind)


def test_types_of_columns_in_parquet(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    metadata = {"huggingface": json.dumps({"info": {"features": {"part": {"names": ["train", "val"]}}}})}
    for name, kind, values in (
        ("split", getattr(pa, "string_view", pa.string)(), ["train", "val"]),
        ("split", pa.binary(), [b"train", b"val"]),
        ("part", pa.int64(), [0, 1]),
        ("splits", pa.list_(pa.string()), [["train"], ["val"]]),
    ):
        columns = {"image": pa.array([b"0", b"1"]), "label": ["a", "a"], name: pa.array(values, kind)}
        pq.write_table(pa.table(columns).replace_schema_metadata(metadata), tmp_path / "x.parquet")
        assert open_source(tmp_path).splits.keys() == {"train", "val"}, name


@KINDS
@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("train/0 train/1 val/2 val/3", {"train": "train/0 train/1", "val": "val/2 val/3"}),
        ("im/Train2017/x/0 im/Train2017/y/1 im/val2017/x/2 im/val2017/y/3", "im/Train2017/x/0 im/Train2017/y/1"),
        ("cars_train/0 cars_train/1 cars_test/2 cars_test/3", "cars_train/0 cars_train/1"),
        ("cat/train/0 dog/train/1 cat/test/2 dog/test/3", "cat/train/0 dog/train/1"),
        ("train_0 train_1 val_0 val_1", "train_0 train_1"),
        ("im/COCO_train2014_0 im/COCO_train2014_1 im/COCO_val2014_0 im/COCO_val2014_1", None),
        ("val/0 val/1 val/2 val/3", {"val": "val/0 val/1 val/2 val/3"}),
        ("a/0 b/1 a/2 b/3", {"train": "a/0 b/1 a/2 b/3"}),
        ("a/0 test/1 a/2 test/3", "names a split, and a does not: .*--split"),
        ("train/0 train/1 query/2 query/3", "names a split, and query does not"),
        ("train/0 train/1 val/2 3", r"names a split, and 3(\.jpg)? does not"),
        ("train_0 train_1 val_0 other", "names a split, and other.* does not"),
        ("val/0 val/1 valid/2 valid/3", "which mean the same"),
        ("test_tube/0 b/1 test_tube/2 b/3", {"train": "test_tube/0 b/1 test_tube/2 b/3"}),  # of one class: a class
    ],
)
def test_folders_and_names_in_paths(tmp_path, kind, paths, expected):
    data = {"data": rows("", *((f"{path}.jpg",) for path in paths.split()))}
    if isinstance(expected, str) and ("names" in expected or "mean" in expected):
        with pytest.raises(SourceError, match=expected):
            divided(tmp_path, kind, data)
        return
    splits = divided(tmp_path, kind, data)
    first, rest = " ".join(paths.split()[:2]), " ".join(paths.split()[2:])
    assert splits == (expected if isinstance(expected, dict) else {"train": first, "val": rest})


@KINDS
@pytest.mark.parametrize(
    ("header", "values", "message"),
    [
        ("split dataset", [("0.jpg", "train", "train"), ("1.jpg", "train", "val")],
         "disagree: in .* split is 'train' where dataset is 'val': if split counts, type --split train=.; if dataset "),
        ("split", [("train/0.jpg", "val"), ("val/1.jpg", "train")],
         "1 sample of train lies in val, such as val/1.*--split train=train"),
        ("split", [("0.jpg", "train"), ("1.jpg", "train+val")], "has train and val in it"),
        ("split", [("0.jpg", "train"), ("1.jpg", "extra")], "and 'extra' names no split that datapipe knows"),
        ("dataset", [("0.jpg", "train"), ("1.jpg", "val"), ("2.jpg", "")], "and '' names no split that datapipe"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(tmp_path, kind, header, values, message):
    with pytest.raises(SourceError, match=message):
        divided(tmp_path, kind, {"data": rows(header, *values)})


@pytest.mark.parametrize("kind", ["csv", "webdataset"])  # where files say it, Parquet's paths are not read
def test_paths_that_contradict_the_files(tmp_path, kind):
    files = {"train-0": rows("", ("x/0.jpg",), ("val/1.jpg",)), "val-0": rows("", ("x/2.jpg",))}
    with pytest.raises(SourceError, match=r"1 sample of train-0.* lies in val, such as val/1"):
        divided(tmp_path, kind, files)


@KINDS
def test_a_column_that_contradicts_the_files(tmp_path, kind):
    files = {"train-0": rows("split", ("0.jpg", "train")), "val-0": rows("split", ("1.jpg", "train"))}
    with pytest.raises(SourceError, match=r"val-0.* has rows whose split is 'train': .* --split train=train-0"):
        divided(tmp_path, kind, files)


@KINDS
def test_labels_that_are_splits(tmp_path, kind):
    data = {"data": [{"path": f"{i}.jpg", "label": name} for i, name in enumerate(("train", "train", "val"))]}
    with pytest.raises(SourceError, match="labels that are all names of splits: train, val; call that column split"):
        divided(tmp_path, kind, data)
    assert divided(tmp_path, kind, data, labels="names") == {"train": "0 1 2"}


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
@pytest.mark.parametrize("fields", [("split", "train", "val"), ("is_valid", False, True)])
def test_fields_deep_in_fields(tmp_path, kind, fields):
    name, *values = fields
    data = rows("a", *((f"{i}.jpg", {"b": {"c": {"d": {"e": {name: values[i // 2]}}}}}) for i in range(4)))
    assert divided(tmp_path, kind, {"data": data}) == TWO_AND_TWO


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"meta": {"split": "val"}}, {"train": "0", "val": "1"}),
        ({}, "meta.split is 'train' and '', and '' names no split .*--split train=meta.split=train .*val=meta.split= "),
        ({"meta": {"split": 7}}, "meta.split is 'train' and '7', and '7' names no split"),
        ({"meta": {"a": {"split": "val"}, "split": "train"}}, "meta.a.split is '' and 'val', and '' names no split"),
    ],
)
def test_fields_in_fields(tmp_path, second, expected):
    first = {"path": "0.jpg", "label": "a", "meta": {"split": "train", "width": 3}}
    data = {"data": [first, {"path": "1.jpg", "label": "a", **second}]}
    if isinstance(expected, dict):
        assert divided(tmp_path, "webdataset", data) == expected
        return
    with pytest.raises(SourceError, match=expected):
        divided(tmp_path, "webdataset", data)


def test_val_that_is_carved_out_of_train(tmp_path, caplog):
    data = rows("split", *((f"train/{i}.jpg", split) for i, split in enumerate(("train", "train", "val", "val"))))
    assert divided(tmp_path, "csv", {"data": data}) == {"train": "train/0 train/1", "val": "train/2 train/3"}
    assert not caplog.records
    divided(tmp_path, "csv", {"data": [*data, *rows("split", ("test/4.jpg", "test"))]})
    assert "2 samples of val lie in train, such as train/2.jpg: taken as what val says" in caplog.text


@KINDS
@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["train=."], {"train": "a/0 a/1 b/2 b/3"}),
        (["train=x", "val=y"], {"train": "a/0 b/3", "val": "a/1 b/2"}),
        (["train=subset=x", "val=subset=y"], {"train": "a/0 b/3", "val": "a/1 b/2"}),
        (["val=split=val", "train=train"], {"train": "a/0 a/1", "val": "b/2 b/3"}),
        (["train=a", "val=b"], {"train": "a/0 a/1", "val": "b/2 b/3"}),
        (["train=a/*", "val=b/2*"], {"train": "a/0 a/1", "val": "b/2"}),
        (["train=data.*"], {"train": "a/0 a/1 b/2 b/3"}),
        (["train=x", "val=b"], "the patterns name different things in "),
        (["train=nothing"], "'nothing' names nothing in .*; there is split=train, subset=x, subset=y, data"),
        (["train=*"], {"train": "a/0 a/1 b/2 b/3"}),  # whichever column is meant
        (
            ["train=*[xv]*", "val=*[ty]*"],
            r"split and subset: .*, as --split 'train=split=\*\[xv\]\*' --split 'val=split=",
        ),
    ],
)
def test_patterns_of_values_paths_and_files(tmp_path, kind, patterns, expected):
    values = ("a/0.jpg", "train", "x"), ("a/1.jpg", "train", "y"), ("b/2.jpg", "val", "y"), ("b/3.jpg", "val", "x")
    data = {"data": rows("split subset", *values)}
    if isinstance(expected, dict):
        assert divided(tmp_path, kind, data, splits=patterns) == expected
        return
    with pytest.raises(SettingError, match=expected):
        divided(tmp_path, kind, data, splits=patterns)


@KINDS
def test_a_pattern_of_any_column(tmp_path, kind):
    data = {"data": rows("country", ("0.jpg", "fr"), ("1.jpg", "fr"), ("2.jpg", "de"), ("3.jpg", "de"))}
    assert divided(tmp_path, kind, data, splits=["train=country=f*", "val=Country=de"]) == TWO_AND_TWO


@KINDS
def test_files_that_no_pattern_names_are_not_read(tmp_path, kind, caplog):
    files = {"train": rows("", ("0.jpg",)), "val": rows("", ("1.jpg",))}
    (tmp_path / f"test.{'tar' if kind == 'webdataset' else kind}").write_bytes(b"\0broken")
    suffix = "tar" if kind == "webdataset" else kind
    for row in files["val"]:
        row["label"] = "a"
    patterns = [f"train=train.{suffix}", f"val=val.{suffix}"]
    assert divided(tmp_path, kind, files, splits=patterns) == {"train": "0", "val": "1"}
    assert f"1 entry (not named by any --split): test.{suffix}" in caplog.text


# --- what columns say, together ---------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    ("name", "values"),
    [
        *[("is_valid", pair) for pair in ((False, True), (0, 1), ("0.0", "1.0"), ("no", "yes"), ("F", "T"))],
        *[(name, (False, True)) for name in ("is_val", "is_test", "in_validation", "isVal")],
        *[(name, (True, False)) for name in ("is_train", "is_training_image", "for_training")],
    ],
)
def test_a_column_that_says_whether(tmp_path, kind, name, values, caplog):
    caplog.set_level(logging.INFO)
    first, second = values
    data = rows(name, ("0.jpg", first), ("1.jpg", first), ("2.jpg", second), ("3.jpg", second))
    assert divided(tmp_path, kind, {"data": data}) == TWO_AND_TWO
    assert f"the splits are taken from {name.lower()} (true: " in caplog.text.lower()


@KINDS
@pytest.mark.parametrize(
    ("header", "values", "expected"),
    [
        ("is_valid is_test", ["00", "00", "10", "10", "01", "01"], TWO_AND_TWO),
        ("is_train is_valid", ["10", "10", "01", "01", "00", "00"], TWO_AND_TWO),
        ("is_train is_test", ["10", "10", "00", "00", "01", "01"], TWO_AND_TWO),
        ("is_valid is_test", ["00", "11"], "has rows whose is_valid is 1 and is_test is 1: if is_valid counts, type"),
        ("is_valid", "00", {"train": "0 1"}),
        ("is_valid", "11", "is_valid is '1', and nothing else says the splits: type --split train=. if"),
        (
            "valid",
            "0011",
            "valid is '0' and '1', and '0' and '1' name no split .*: type --split train=valid=0 --split val=",
        ),
        ("is_valid", ["0", "0", "1", ""], "name no split"),
        (
            "is_valid",
            "0111",
            "is_valid: it would make 3 samples of val and 1 of train, .*: type --split train=is_valid=0",
        ),
    ],
)
def test_columns_that_say_whether(tmp_path, kind, header, values, expected):
    data = {
        "data": rows(header, *((f"{i}.jpg", *value) if value else (f"{i}.jpg", "") for i, value in enumerate(values)))
    }
    if isinstance(expected, dict):
        assert divided(tmp_path, kind, data) == expected
        return
    with pytest.raises(SourceError, match=expected):
        divided(tmp_path, kind, data)


@KINDS
@pytest.mark.parametrize(
    ("header", "others"),
    [
        ("split fold", "1200"),
        ("split subset", "xyxy"),
        ("split version", ["dev"] * 4),
        ("split object", ["train", "bus"] * 2),
        ("split is_valid", [False, False, True, True]),
        ("split is_train", [True, True, False, False]),
        ("split note", [""] * 4),
    ],
)
def test_a_column_of_splits_wins_over_others(tmp_path, kind, header, others, caplog):
    caplog.set_level(logging.INFO)
    pairs = zip(FOUR, others, strict=True)
    assert divided(tmp_path, kind, {"data": rows(header, *((*row, other) for row, other in pairs))}) == TWO_AND_TWO
    assert "the splits are taken from split" in caplog.text


@KINDS
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fold", "1212"),
        ("subset", "xxyy"),
        ("phase", ["arterial", "venous"] * 2),
        ("env", ["dev"] * 4),
        ("env", ["dev", "x"] * 2),
    ],
)
def test_files_of_splits_win_over_other_columns(tmp_path, kind, name, values):
    data = rows(name, *((f"{i}.jpg", value) for i, value in enumerate(values)))
    assert divided(tmp_path, kind, {"train-0": data[:2], "val-0": data[2:]}) == TWO_AND_TWO


def test_a_member_that_is_in_several_splits(tmp_path):
    data = rows("split", *((f"{i}.jpg", ["train", "val"]) for i in range(2)))
    with pytest.raises(SourceError, match="has train and val in it"):
        divided(tmp_path, "webdataset", {"data": data})
    assert divided(tmp_path, "webdataset", {"data": data}, splits=["train=."]) == {"train": "0 1"}


LAYOUTS = [  # whose splits can be read in two ways: columns, and the values of four or more rows
    ("dataset", ["train", "train", "extra", "extra", "val", "val"]),
    ("dataset", ["train", "train", "query", "query"]),
    ("dataset", ["val", "val", "extra", "extra"]),
    ("dataset", ["non-test", "non-test", "test", "test"]),
    ("env", ["dev", "dev", "prod", "prod"]),
    ("use", ["train", "train", "valid", "valid", "", ""]),
    ("quality", ["test"] * 4),
    ("original", ["test_0.jpg", "test_1.jpg", "test_2.jpg", "test_3.jpg"]),
    ("split", ["train", "train", "unlabeled", "unlabeled", "test", "test"]),
    ("split", ["train", "train", "", ""]),
    ("split", ["trainval", "trainval", "test", "test"]),
    ("split", ["train_mini", "train_mini", "train", "train"]),
    ("split", ["Train", "TRAIN", "val", "val", "valid", "valid"]),
    ("is_valid", ["True", "True", "unknown", "unknown"]),
    ("split dataset", [("train", "train"), ("train", "train"), ("val", "test"), ("val", "test")]),
    ("split dataset", [("train", "val"), ("train", "val"), ("val", "train"), ("val", "train")]),
    ("split is_valid", [("train", True), ("train", True), ("val", False), ("val", False)]),
    ("is_valid is_test", [(1, 1), (1, 1), (0, 0), (0, 0)]),
    ("is_valid", [True] * 4),
    ("is_valid", ["", "", "True", "True"]),
    ("valid", [0, 0, 1, 1]),
    ("train_test_split", [1, 1, 0, 0]),
    ("fold", [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
    ("phase", ["it's [1]", "it's [1]", "venous*", "venous*"]),
    ("test", ["PCR"] * 4),
    ("train_or_test", [0, 0, 1, 1]),
    ("is_train_or_test", [1, 1, 0, 0]),
    ("cv", [0, 0, 1, 1, 2, 2]),
    ("tvt", [0, 0, 1, 1, 2, 2]),
    ("datatype", ["TE", "TE", "TR", "TR"]),
    ("group", ["tr", "tr", "va", "va", "te", "te"]),
    ("use", ["Entrenamiento", "Entrenamiento", "Validación", "Validación"]),
]


@KINDS
@pytest.mark.parametrize(("header", "values"), LAYOUTS)
def test_what_a_refusal_says_to_type_can_be_typed(tmp_path, kind, header, values):
    lines = [(f"{i}.jpg", *(value if isinstance(value, tuple) else (value,))) for i, value in enumerate(values)]
    check_advice(tmp_path, kind, {"data": rows(header, *lines)})


@KINDS
@pytest.mark.parametrize(
    "values",
    [["train"] * 4, ["train", "train", "test", "test"], ["val", "val", "train", "train"], ["train", "", "val", ""]],
)
def test_what_a_refusal_of_files_says_to_type_can_be_typed(tmp_path, kind, values):
    data = rows("split", *((f"{i}.jpg", value) for i, value in enumerate(values)))
    check_advice(tmp_path, kind, {"train-0": data[:2], "val-0": data[2:]})


@KINDS
@pytest.mark.parametrize(
    "names",
    [["set1_tr", "set1_va"], ["learn-0", "check-0"], ["entrenamiento-0", "validacion-0"], ["tr-0", "tr-1", "te-0"]],
)
def test_files_called_by_short_forms(tmp_path, kind, names):
    files = {name: rows("", (f"{at}.jpg",), (f"{at}b.jpg",)) for at, name in enumerate(names)}
    check_advice(tmp_path, kind, files)


@KINDS
@pytest.mark.parametrize(
    "paths",
    [
        "fold1/{}.jpg fold2/{}.jpg",
        "all/cv3/a/{}.jpg all/cv4/b/{}.jpg",
        "tr/a/{}.jpg va/a/{}.jpg",
        "photos/tr/{}.jpg photos/te/{}.jpg",
        "tr_{}.jpg va_{}.jpg",
    ],
)
def test_paths_called_by_short_forms_or_as_folds(tmp_path, kind, paths):
    check_advice(tmp_path, kind, {"data": rows("", *((path.format(i),) for path in paths.split() for i in range(2)))})


@KINDS
def test_short_forms_that_are_of_other_things(tmp_path, kind):
    """Of languages with others, of a class, or beside what says the splits."""
    languages = rows("language", *((f"{i}.jpg", text) for i, text in enumerate(["tr", "te", "en", "tr"])))
    assert divided(tmp_path, kind, {"data": languages}) == {"train": "0 1 2 3"}
    classes = rows("", ("texts/tr/0.jpg",), ("texts/te/1.jpg",))
    for row, label in zip(classes, ("tr", "te"), strict=True):
        row["label"] = label
    assert divided(tmp_path, kind, {"data": classes}).keys() == {"train"}
    both = rows("split group", ("0.jpg", "train", "te"), ("1.jpg", "train", "tr"), ("2.jpg", "val", "tr"))
    assert divided(tmp_path, kind, {"data": both}).keys() == {"train", "val"}


@KINDS
def test_files_of_several_names_are_told(tmp_path, kind, caplog):
    caplog.set_level(logging.INFO)
    files = {name: rows("", (f"{name}.jpg",), (f"{name}b.jpg",)) for name in ("a-000", "a-001", "b-000")}
    assert divided(tmp_path, kind, files).keys() == {"train"}
    assert re.search(r"a-\*\.\w+, b-\*\.\w+ are all for training, since none is called as a split", caplog.text)


@KINDS
def test_what_a_refusal_of_paths_says_to_type_can_be_typed(tmp_path, kind):
    lines = [("train/0.jpg", False), ("train/1.jpg", False), ("val/2.jpg", False), ("val/3.jpg", False)]
    lines += [("val/4.jpg", True), ("val/5.jpg", True)]
    check_advice(tmp_path, kind, {"data": rows("is_valid", *lines)})


def check_advice(tmp_path, kind, files):
    """Type each run of options in the message that refuses the files: each must name something, and no other."""
    with pytest.raises(SourceError) as caught:
        divided(tmp_path, kind, files)
    runs = re.findall(r"(?:--split (?:'[^']*'|\"[^\"]*\"|[^\s'\"])+(?:(?<![,;:]) |$)?)+", str(caught.value))
    assert runs, caught.value
    for run in runs:
        words = shlex.split(run.rstrip(" ,;:"))
        assert words[::2] == ["--split"] * (len(words) // 2)
        assert divided(tmp_path, kind, files, splits=words[1::2]).keys() == {word.split("=")[0] for word in words[1::2]}


# --- samples without labels -------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("missing", ["", "-1"])
def test_a_test_split_without_labels_is_left_out(tmp_path, kind, caplog, missing):
    data = rows("split", ("0.jpg", "train"), ("1.jpg", "train"), ("2.jpg", "test"), ("3.jpg", "test"))
    for row, label in zip(data, ("0", "1", missing, missing), strict=True):
        row["label"] = label
    if kind == "webdataset":  # a member without a label has no JSON
        data = [{"path": row["path"], "label": row["label"]} for row in data]
    files = {"train": data[:2], "test": data[2:]} if kind == "webdataset" else {"data": data}
    assert divided(tmp_path, kind, files) == {"train": "0 1"}
    entries = f"2 entries (of a test split, without labels): data.{kind}: 2.jpg, data.{kind}: 3.jpg"
    assert ("1 entry (of a test split, without labels): test.tar" if kind == "webdataset" else entries) in caplog.text


@KINDS
def test_samples_that_are_left_out_are_counted(tmp_path, kind, caplog):
    data = rows("split", *((f"{i}.jpg", split) for i, split in enumerate(("train", "val", "test", "test"))))
    data = [{**row, "label": "a"} for row in data]
    where = tmp_path / "left_out.jsonl"
    suffix = "tar" if kind == "webdataset" else kind
    of_tar = "" if kind == "webdataset" else ".jpg"
    for options in ([], ["train=train", "val=val"]):
        divided(tmp_path, kind, {"data": data}, splits=options, left_out=where)
        paths = [json.loads(line)["path"] for line in where.read_text().splitlines()]
        assert paths == [f"data.{suffix}: 2{of_tar}", f"data.{suffix}: 3{of_tar}"]
        where.unlink()
    assert caplog.text.count("left out 2 entries (") == 2


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_test_table_without_the_column(tmp_path, kind, caplog):
    bare = [{"path": "2.jpg"}]
    files = {"train": rows("", ("0.jpg",), ("1.jpg",)), "test": bare}
    assert divided(tmp_path, kind, files) == {"train": "0 1"}
    assert "1 entry (of a test split, without labels): test" in caplog.text
    with pytest.raises(SourceError, match=r"test\..*: (line 1: names no column of labels|has not both columns)"):
        divided(tmp_path, kind, files, splits=["train=train.*", "val=test.*"])
    files = {"train": files["train"], "val": bare}
    (tmp_path / f"test.{kind}").unlink()
    with pytest.raises(SourceError, match=r"val\..*: (line 1: names no column of labels|has not both columns)"):
        divided(tmp_path, kind, files)


# --- labels that differ -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("second", "message"),
    [(["x", "y", "x"], None), (["x", "x", "x"], "two columns of labels"), (["x", "y", "z"], "two columns of labels")],
)
def test_two_columns_of_labels(tmp_path, kind, second, message):
    first, other = ("class", "category") if kind == "csv" else ("fine_label", "coarse_label")
    data = {"data": [{"path": f"{i}.jpg", first: "aba"[i], other: text} for i, text in enumerate(second)]}
    if message is None:
        assert divided(tmp_path, kind, data) == {"train": "0 1 2"}
    else:
        with pytest.raises(SourceError, match=f"{message}.*{first} and {other}: say .* --label-column {first}"):
            divided(tmp_path, kind, data)
        for column, classes in ((first, ["a", "b"]), (other, sorted(set(second)))):
            assert open_source(tmp_path, kind, label_column=column).classes == classes


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
@pytest.mark.parametrize(("first", "second"), [("aba", "xyx"), ("aba", "xxx"), ("010", "101")])
def test_label_and_Label(tmp_path, kind, first, second):
    data = {"data": [{"path": f"{i}.jpg", "label": first[i], "Label": text} for i, text in enumerate(second)]}
    if second == "xyx":
        assert divided(tmp_path, kind, data) == {"train": "0 1 2"}
        return
    with pytest.raises(SourceError, match="label and Label: say which is meant, as --label-column label"):
        divided(tmp_path, kind, data)
    assert open_source(tmp_path, kind, label_column="Label").classes == sorted(set(second))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_of_labels_that_the_user_names(tmp_path, kind):
    data = {"data": [{"path": f"{i}.jpg", "breed": text, "label": f"l{i}"} for i, text in enumerate("xyx")]}
    divided(tmp_path, kind, data)
    source = open_source(tmp_path, kind, label_column="breed")
    assert source.classes == ["x", "y"] and source.splits["train"].labels.tolist() == [0, 1, 0]
    with pytest.raises(SourceError, match=r"column of labels \(race\)|label \(race\)"):
        open_source(tmp_path, kind, label_column="race")


def test_what_has_no_columns(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").touch()
    with pytest.raises(SettingError, match="label_column: it is for csv, parquet, webdataset, and"):
        open_source(tmp_path, label_column="breed")


@pytest.mark.parametrize(
    ("cls", "fields", "expected"),
    [
        (1, {"label": 1.0}, ["0", "1"]),
        (1, {"label": "cat"}, ["0", "1"]),
        ("dog", {"width": 8}, ["dog"]),
        (None, {"label": 1, "class": "cat", "class_id": 1}, ["0", "1"]),
        (1, {"label": 0}, ".cls says '1' and label of .json says '0'"),
        (None, {"label": 1, "cls": 0}, "label of .json says '1' and cls of .json says '0'"),
        (None, {"label": "cat", "class": "dog"}, "label of .json says 'cat' and class of .json says 'dog'"),
    ],
)
def test_two_labels_of_a_member(tmp_path, cls, fields, expected):
    contents = {"a.jpg": b"a", "a.json": json.dumps(fields).encode()}
    if cls is not None:
        contents["a.cls"] = str(cls).encode()
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    if isinstance(expected, list):
        assert open_source(tmp_path).classes == expected
        return
    with pytest.raises(SourceError, match=f"key a: has labels that differ: {expected}; .* --label-column (cls|label)$"):
        open_source(tmp_path)
    for name, value in (("cls", fields.get("cls", cls)), *fields.items()):
        if value is not None:
            source = open_source(tmp_path, label_column=name, labels="names")
            assert source.classes == [str(value)]


FOLDERS = ["train_clean/a", "train_clean/b", "train_noisy/a", "train_noisy/b"]
VARIANTS = {  # of a split: what there is, and the message
    "files": ({"train_HR": FOUR[:2], "train_LR": FOUR[2:]}, "", "holds train_HR[.].* and train_LR[.].*, all of train"),
    "folders": ({"data": [(f"{folder}.jpg",) for folder in FOLDERS]}, "", "holds train_clean and train_noisy, all of"),
    "folders in folders": ({"data": [(f"{'xyz'[at // 2]}/{folder}.jpg",) for at, folder in enumerate(
                           [*FOLDERS, "val/a", "val/b"])]}, "", "holds train_clean and train_noisy, all of"),
    "names": ({"data": [(f"{name}_{i}.jpg",) for name in ("train_clean", "train_noisy", "val") for i in range(5)]},
              "", "all of train"),
    "FER2013": ({"data": [(f"{i}.jpg", value) for i, value in enumerate(
                 ["Training"] * 2 + ["PublicTest"] * 2 + ["PrivateTest"] * 2)]},
                "Usage", "(?i:usage): holds PublicTest and PrivateTest, all of test: type --split "),
    "a column": ({"data": [(f"{i}.jpg", value) for i, value in enumerate(
                  ["train", "Train", "val_seen", "val_seen", "val_unseen", "val_unseen"])]},
                 "split", "split: holds val_seen and val_unseen, all of val"),
}  # fmt: skip


@KINDS
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_a_split_are_refused(tmp_path, kind, name):
    """What the message says to type takes one of them, or all."""
    files, header, message = VARIANTS[name]
    if name == "files":
        header, files = "use", {name: [(path, "x") for path, _ in its] for name, its in files.items()}
    files = {name: rows(header, *its) for name, its in files.items()}
    with pytest.raises(SourceError, match=message) as caught:
        divided(tmp_path, kind, files)
    *choices, everything = str(caught.value).split("type ")[1:]
    counts = []
    for text in (*choices, everything):
        words = [word.rstrip(",;") for word in shlex.split(text.partition(" (")[0])]
        splits = [word for word in words if "=" in word]
        its = divided(tmp_path, kind, files, splits=splits)
        counts.append({split: len(names.split()) for split, names in its.items()})
    assert len(choices) == 2 and sum(counts[-1].values()) == sum(map(len, files.values()))
    first, second, both = counts
    for split in both:
        assert first[split] == second[split] and both[split] in (first[split], 2 * first[split])
    assert first != both


@KINDS
def test_a_value_of_a_column_in_two_spellings(tmp_path, kind):
    data = rows("split", ("0.jpg", "train"), ("1.jpg", "Train"), ("2.jpg", "val"), ("3.jpg", "VAL"))
    assert divided(tmp_path, kind, {"data": data}) == TWO_AND_TWO
