"""What files of a data set say of each other: folds, shards that are missing, and copies."""

import shlex
import shutil

import pytest

from datapipe.errors import SourceError
from datapipe.sources import open_source
from tests.datapipe.sources.test_parts import KINDS, WRITERS, rows


def put(folder, kind, names):
    """Files of two samples each."""
    for number, name in enumerate(names):
        paths = [(f"{2 * number + i}.jpg",) for i in range(2)]
        (folder / name).parent.mkdir(exist_ok=True)
        WRITERS[kind]((folder / name).parent, (folder / name).name, rows("", *paths))


def listed(folder, kind, *splits):
    """The number of samples of each split."""
    return {split: len(samples) for split, samples in open_source(folder, kind, splits=splits).splits.items()}


def refusal(folder, kind):
    with pytest.raises(SourceError) as caught:
        listed(folder, kind)
    return str(caught.value).partition(": ")[2]


def typed(text):
    """What each advice of a message says to type, in its order."""
    options = []
    for words in text.split("--split ")[1:]:
        options.append(shlex.split(words.split(",")[0].split(";")[0])[0])
    return options


FOLDS = [
    (["fold0", "fold1", "fold2"], "type --split train='fold[12].", {"train": 4, "val": 2}),
    (["cv_fold_1", "cv_fold_2"], "type --split train=cv_fold_2.", {"train": 2, "val": 2}),
    ([f"fold{i}" for i in range(12)], "type --split train='fold[1-9].", {"train": 22, "val": 2}),
    (["fold0-000", "fold0-001", "fold1-000", "fold1-001"], "type --split train='fold1-*.", {"train": 4, "val": 4}),
    (["1st_fold", "2nd_fold"], "type --split train=2nd_fold.", {"train": 2, "val": 2}),
]


@pytest.mark.parametrize(
    ("kind", "names", "advice", "expected"),
    [*((kind, *FOLDS[0]) for kind in WRITERS), *(("webdataset", *folds) for folds in FOLDS[1:])],
)
def test_folds_are_not_joined(tmp_path, kind, names, advice, expected):
    put(tmp_path, kind, names)
    text = refusal(tmp_path, kind)
    assert text.startswith("holds folds ") and advice in text
    *options, everything = typed(text)
    assert listed(tmp_path, kind, *options) == expected
    assert everything == "train=." and listed(tmp_path, kind, everything) == {"train": 2 * len(names)}


@pytest.mark.parametrize(
    ("kind", "names", "missing", "expected"),
    [
        *((kind, ["train-00000-of-00002"], "train-00001-of-00002 is missing", {"train": 2}) for kind in WRITERS),
        ("parquet", ["train-0-of-3", "train-2-of-3", "val-0-of-1"], "train-1-of-3 is missing", {"train": 4, "val": 2}),
        ("csv", ["part 1 of 5", "part 5 of 5"], "part 2 of 5, part 3 of 5, part 4 of 5 are missing", {"train": 4}),
        ("webdataset", ["0_of_9"], "1_of_9, 2_of_9, 3_of_9 and 5 others are missing", {"train": 2}),
    ],
)
def test_shards_that_are_missing(tmp_path, kind, names, missing, expected):
    put(tmp_path, kind, names)
    text = refusal(tmp_path, kind)
    assert missing in text and "do without" in text
    assert listed(tmp_path, kind, *typed(text.replace(" to do without", ""))) == expected


@KINDS
def test_shards_of_two_versions(tmp_path, kind):
    put(tmp_path, kind, ["train-0-of-1", "train-0-of-2", "train-1-of-2", "val-0-of-1"])
    text = refusal(tmp_path, kind)
    assert "are shards of two versions" in text
    first, second = text.partition("; if ")[::2]
    assert [listed(tmp_path, kind, *typed(reading)) for reading in (first, second)] == [
        {"train": 2, "val": 2},
        {"train": 4, "val": 2},
    ]


def test_gaps_between_numbers_are_told(tmp_path, caplog):
    put(tmp_path, "webdataset", ["train-0", "train-1", "train-3", "val-1", "val-9"])
    assert listed(tmp_path, "webdataset") == {"train": 6, "val": 4}
    assert "of train-*.tar 2 is not there: is that all?" in caplog.text and "val-*" not in caplog.text


def test_a_shard_of_two_hashes(tmp_path):
    put(tmp_path, "parquet", ["train-0-of-1-0123456789abcdef", "train-0-of-1-fedcba9876543210"])
    assert "are shards of two versions, by their names: remove those that are old" in refusal(tmp_path, "parquet")


@pytest.mark.parametrize("kind", ["csv", "webdataset"])
@pytest.mark.parametrize(
    "names", [["train-00000-of-00002", "train-00001-of-00002"], ["1-of-2", "2-of-2"], ["train-0-of-1", "val-0-of-1"]]
)
def test_whole_sets_of_shards(tmp_path, kind, names):
    put(tmp_path, kind, names)
    assert sum(listed(tmp_path, kind).values()) == 2 * len(names)


@pytest.mark.parametrize("kind", ["csv", "webdataset"])
@pytest.mark.parametrize(
    "copy",
    ["train-0 (1)", "train-0(2)", "train-0 - Copy", "train-0 copy", "train-0 copy 2", "Copy of train-0",
     "train-0 - Copy (3)", "train-0 - Kopie", "train-0 (copy)",
     "train-0 (another copy)", "train-0 (Ann's conflicted copy 2024-01-31)"],
)  # fmt: skip
def test_what_is_called_as_a_copy(tmp_path, kind, copy):
    """It is refused whatever it holds: the copy may be of an earlier version."""
    put(tmp_path, kind, ["train-0", "val-0", copy])
    text = refusal(tmp_path, kind)
    assert f"train-0.{suffix(kind)} and {copy}.{suffix(kind)} are called as a file and its copy" in text
    without, both = text.partition("; to take both")[::2]
    assert listed(tmp_path, kind, *typed(without)) == {"train": 2, "val": 2}
    assert listed(tmp_path, kind, *typed(both)) == {"train": 4, "val": 2}


@KINDS
@pytest.mark.parametrize("names", [["train", "train2"], ["a", "a_backup"], ["train (1)", "train (2)"]])
def test_files_of_the_same_bytes(tmp_path, kind, names, caplog):
    put(tmp_path, kind, names[:1])
    first, second = (tmp_path / f"{name}.{suffix(kind)}" for name in names)
    shutil.copy(first, second)
    text = refusal(tmp_path, kind)
    assert f"{first.name} and {second.name} hold the same bytes" in text
    assert listed(tmp_path, kind, *typed(text.partition(";")[0])) == {"train": 2}
    assert listed(tmp_path, kind, "train=.") == {"train": 4}
    assert "hold the same bytes, so each image is there twice" in caplog.text


@KINDS
def test_files_of_equal_size_are_no_copies(tmp_path, kind):
    put(tmp_path, kind, ["train-0", "train-1"])
    first, second = (tmp_path / f"train-{number}.{suffix(kind)}" for number in range(2))
    assert first.stat().st_size == second.stat().st_size or kind == "parquet"
    assert listed(tmp_path, kind) == {"train": 4}


@KINDS
def test_val_of_the_same_bytes_as_train(tmp_path, kind, caplog):
    """It may be a trial."""
    put(tmp_path, kind, ["train"])
    shutil.copy(tmp_path / f"train.{suffix(kind)}", tmp_path / f"val.{suffix(kind)}")
    assert listed(tmp_path, kind) == {"train": 2, "val": 2}
    assert "hold the same bytes" in caplog.text


def test_tables_without_rows_are_no_copies(tmp_path):
    put(tmp_path, "csv", ["train"])
    for name in ("train-1.csv", "train-2.csv"):
        (tmp_path / name).write_text("path,label\n")
    assert listed(tmp_path, "csv") == {"train": 2}


def suffix(kind):
    return "tar" if kind == "webdataset" else kind
