"""Which split a name speaks of, and how the parts of a data set are divided."""

import shlex
from pathlib import Path

import pytest

from datapipe.errors import SettingError
from datapipe.split_names import is_split_name, split_words
from datapipe.splits import AmbiguousSplitError, SplitRule, VariantsError

SOURCE = Path("/raw/data")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *[(word, [word]) for word in ("train", "training", "trn", "val", "valid", "validation", "eval", "evaluation")],
        *[(word, [word]) for word in ("dev", "test", "testing", "tst", "holdout", "minival")],
        *[("Train", ["train"]), ("VALIDATION", ["validation"]), ("tEsT", ["test"])],
        *[("train2017", ["train"]), ("2021_valid", ["valid"]), ("val_256", ["val"]), ("train-0000-of-0294", ["train"])],
        *[("ILSVRC2012_img_val.tar", ["val"]), ("t10k-images-idx3-ubyte.gz", ["test"]), ("Hold-Out", ["holdout"])],
        *[("trainset", ["train"]), ("testImages", ["test"]), ("MyTrainImages", ["train"]), ("TestingSet", ["testing"])],
        *[("trainA", ["train"]), ("held_out_3", ["holdout"]), ("emnist-letters-test-images-idx3-ubyte", ["test"])],
        *[("trainval", ["train", "val"]), ("train_val2018", ["train", "val"]), ("test/val.tar", ["test", "val"])],
        *[(name, []) for name in ("latest-000001.tar", "trained.tar", "contest", "000001.tar", "retrain", "valley")],
        *[(name, []) for name in ("device", "devkit", "interval", "Evaluator", "strain", "attest", "festival", "")],
    ],
)  # fmt: skip
def test_words_of_a_name(name, words):
    assert split_words(name) == words


@pytest.mark.parametrize(
    "name", ["val", "Train2017", "test_images", "2021_valid", "train-data", "ValSet", "train_val2018"]
)
def test_names_that_say_nothing_else(name):
    assert is_split_name(name)


@pytest.mark.parametrize("name", ["bullet_train", "test_tube", "imagenet-val", "trainA", "cat", "latest", "train_mini"])
def test_names_that_say_more(name):
    assert not is_split_name(name)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], {}),
        (["0.tar", "1.tar"], {"train": 2}),
        (["shard-{000..009}.tar"], {"train": 1}),
        (["train-0.tar", "train-1.tar", "val-0.tar"], {"train": 2, "val": 1}),
        (["Training/0.tar", "Validation/0.tar", "Testing/0.tar"], {"train": 1, "val": 1, "test": 1}),
        (["x_dev.csv", "x_train.csv"], {"train": 1, "val": 1}),
        (["imagenet-holdout-0.tar", "imagenet-train-0.tar"], {"train": 1, "test": 1}),
        (["eval-0.tar"], {"val": 1}),
        (["t10k-images-idx3-ubyte", "train-images-idx3-ubyte"], {"train": 1, "test": 1}),
        # Of several words the one that differs.
        (["test-images-train-0.tar", "test-images-val-0.tar"], {"train": 1, "val": 1}),
        (["my_test/train.csv", "my_test/val.csv"], {"train": 1, "val": 1}),
        (["train/eval-run-0.tar", "val/eval-run-0.tar"], {"train": 1, "val": 1}),
        (["train/train-0.tar", "val/val-0.tar"], {"train": 1, "val": 1}),
        (["imagenettrain-0.tar", "imagenettrain-1.tar"], {"train": 2}),
    ],
)
def test_parts_are_divided(names, expected):
    divided = SplitRule().divide(names, SOURCE)
    assert {split: len(of_split) for split, of_split in divided.items()} == expected
    assert sorted(name for of_split in divided.values() for name in of_split) == sorted(names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.tar", "val-0.tar"], "val-0.tar names a split, and a.tar does not: if they are train type"),
        (["extra.tar", "more.tar", "train.tar"], "train.tar names a split, and extra.tar, more.tar do not: if they"),
        (["train-0.tar", "validierung-0.tar"], "and validierung-0.tar does not"),
        (["imagenettrain-0.tar", "imagenetval-0.tar"], "imagenettrain-0.tar names a split, and imagenetval-0"),
        (["imagenettrain-0.tar", "val-0.tar"], "val-0.tar names a split, and imagenettrain-0.tar does not"),
        (["trainval.csv", "val.csv"], "the name of trainval.csv has train and val in it"),
        (["trainval-0.tar"], "has train and val in it: say which it is, as --split train=trainval-0.tar or"),
        (["train-test-0.tar", "val-0.tar"], "the name of train-test-0.tar has train and test in it"),
        (["test/val.tar", "train/a.tar"], "the name of test/val.tar has test and val in it"),
        (["train.csv", "training.csv"], "holds both train .* and training .*, which mean the same"),
        (["train.csv", "val.csv", "validation.csv"], "both val .* and validation"),
        (["dev.csv", "eval.csv", "train.csv"], "both dev .* and eval"),
    ],
)  # fmt: skip
def test_what_can_be_read_in_two_ways_is_refused(names, message):
    for order in (names, names[::-1]):
        with pytest.raises(AmbiguousSplitError, match="/raw/data: "):
            SplitRule().divide(order, SOURCE)
    with pytest.raises(AmbiguousSplitError, match=message):
        SplitRule().divide(names, SOURCE)


def test_what_a_refusal_says_to_type_divides():
    """The command of the message, taken as it stands, is understood, and divides as it says."""
    names = ["holdout-0.tar", "it's.tar", "plain.tar"]
    with pytest.raises(AmbiguousSplitError) as caught:
        SplitRule().divide(names, SOURCE)
    words = shlex.split(str(caught.value).partition(" type ")[2].partition(" (")[0])
    assert words[::2] == 3 * ["--split"]
    assert SplitRule.parse(words[1::2]).divide(names, SOURCE) == {"train": names[1:], "val": names[:1]}


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["contest", "test"], "if they are train type --split train=contest --split val=test (patterns"),
        (["seg_pred", "seg_test", "seg_train"], ": type --split train=seg_train --split val=seg_test (patterns"),
        (["annotations", "train2017", "val2017"], ": type --split train=train2017 --split val=val2017 (patterns"),
        (["ground_truth", "test", "train"], ": type --split train=train --split val=test (patterns"),
        (["meta", "test", "train", "val"], ": type --split train=train --split val=val (patterns"),
        ([*(f"train-{i}.tar" for i in range(9)), "x.tar"], "type --split train='train-*.tar' --split val=x.tar (pat"),
        ([*(f"0-{i}.tar" for i in range(9)), "0-train.tar"], "train=0-train.tar --split val='[0-9]*-[0-9]*.tar' (pat"),
        ([*(f"0-{c}.tar" for c in "abcd"), "0-train.tar"], ": say with --split train=PATTERN and"),  # 0-* is both
        ([*(f"{c}.tar" for c in "abcde"), "train.tar"], ": say with --split train=PATTERN and"),
        (["[a].tar", "train.tar"], "type --split train=train.tar --split val='[[]a].tar'"),
    ],
)
def test_a_refusal_says_what_to_type_for_all_names(names, advice):
    with pytest.raises(AmbiguousSplitError) as caught:
        SplitRule().divide(names, SOURCE)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["train_0.tar", "train_mini_0.tar", "val_0.tar"], "holds train_0.tar and train_mini_0.tar, all of train: "),
        (["train/0.tar", "val/0.tar", "val_small/0.tar"], "holds val/0.tar and val_small/0.tar, all of val"),
        (["train-00.tar", "train-00-fixed.tar"], "holds train-00.tar and train-00-fixed.tar, all of train"),
        (["test.tar", "test_hard.tar", "train.tar"], "holds test.tar and test_hard.tar, all of test"),
        ([f"{split}_fold{i}.csv" for i in (0, 10, 9) for split in ("train", "val")], "holds folds 0, 9, 10, all of"),
        (["train/cv-1.csv", "train/cv-2.csv"], "holds folds 1, 2, all of train"),
    ],
)  # fmt: skip
def test_variants_and_folds_of_a_split_are_not_joined(names, why):
    with pytest.raises(AmbiguousSplitError) as caught:
        SplitRule().divide(names, SOURCE)
    assert why in str(caught.value)


VARIANTS = [  # of one split: what there is, and what each command of the message takes of train and val, at last all
    (["train_HR-000.tar", "train_LR-000.tar"], [(1, 0), (1, 0), (2, 0)]),
    ([f"{s}_{v}-{i:03}.tar" for s in ("train", "val") for v in ("HR", "LR") for i in range(5)],
     [(5, 5), (5, 5), (10, 10)]),
    (["train_clean/0.tar", "train_noisy/0.tar", "val/0.tar"], [(1, 1), (1, 1), (2, 1)]),
    (["train-0.parquet", "val_seen-0.parquet", "val_unseen-0.parquet"], [(1, 1), (1, 1), (1, 2)]),
    (["train.csv", "test.csv", "val_seen.csv", "val_unseen.csv"], [(1, 1), (1, 1), (1, 2)]),
    (["train.csv", "test_seen.csv", "test_unseen.csv"], [(1, 1), (1, 1), (1, 2)]),
    (["train_v1.tar", "train_v2.tar"], [(1, 0), (1, 0), (2, 0)]),
    (["train_v1-0.tar", "train_v1-1.tar", "trainV2-0.tar"], [(2, 0), (1, 0), (3, 0)]),
    (["train/v1.tar", "train/version-2.tar"], [(1, 0), (1, 0), (2, 0)]),
    (["train_64x64.tar", "train_224x224.tar"], [(1, 0), (1, 0), (2, 0)]),
    (["train_64px.tar", "train_224px.tar"], [(1, 0), (1, 0), (2, 0)]),
    (["train_224-0.tar", "train_224-1.tar", "train_512-0.tar"], [(2, 0), (1, 0), (3, 0)]),
    (["train.tar", "train_64.tar"], [(1, 0), (1, 0), (2, 0)]),
    (["Training", "PublicTest", "PrivateTest"], [(1, 1), (1, 1), (1, 2)]),
    (["train_10percent.tar", "train_full.tar", "val.tar"], [(1, 1), (1, 1), (2, 1)]),
    (["train_1percent.tar", "train_10percent.tar"], [(1, 0), (1, 0), (2, 0)]),
    (["imagenet1k-train-0.tar", "imagenet21k-train-0.tar"], [(1, 0), (1, 0), (2, 0)]),
    ([f"{d}_{s}.csv" for d in ("clipart", "real", "sketch", "quickdraw") for s in ("train", "test")],
     [(1, 1), (1, 1), (1, 1), (4, 4)]),
    (["Train/0.tar", "train/0.tar", "val/0.tar"], [(1, 1), (1, 1), (2, 1)]),
    (["train.csv", "val.csv", "validation.csv"], [(1, 1), (1, 1), (1, 2)]),
    (["train.tar", "train_extra.tar"], [(1, 0), (1, 0), (2, 0)]),
    ([f"{s}_fold{i}.csv" for i in (0, 1) for s in ("train", "val")], [(1, 1), (1, 1), (2, 2)]),
]  # fmt: skip


@pytest.mark.parametrize(("names", "expected"), VARIANTS)
def test_variants_are_refused_with_what_to_type_for_each(names, expected):
    with pytest.raises(VariantsError, match=r"all of|mean the same") as caught:
        SplitRule().divide(names, SOURCE)
    commands = [shlex.split(text.partition(" (")[0].rstrip(",;")) for text in str(caught.value).split("type ")[1:]]
    counts = []
    for words in commands:
        patterns = [word for word in (word.rstrip(",;") for word in words) if "=" in word]
        divided = SplitRule.parse(patterns).divide(names, SOURCE)
        counts.append((len(divided["train"]), len(divided.get("val", []))))
    assert counts == expected


@pytest.mark.parametrize(
    "names",
    [
        ["train2014.tar", "train2017.tar", "val2017.tar"],
        ["train/cat.tar", "train/dog.tar"],
        ["train/HR-0.tar", "train/LR-0.tar", "val/0.tar"],
    ],
)
def test_parts_that_are_called_differently_are_joined_and_named(names, caplog):
    assert sum(map(len, SplitRule().divide(names, SOURCE).values())) == len(names)
    assert f"{names[0]}, {names[1]} are joined for train, though they are called differently: --split" in caplog.text


PARTS = [  # of one split, without a word
    [f"train_{c}.tar" for c in "0123456789abcdef"],  # Open Images
    [f"train_{i:02x}.tar" for i in range(256)],
    ["train_a.tar", "train_b.tar"],
    ["train_part1.tar", "train_part2.tar", "val.tar"],
    ["train.tar", "train_part2.tar", "val.tar"],
    [f"imagenet1k-{split}-{i:04}.tar" for split in ("train", "validation") for i in range(40)],
    [f"train-{i:05}-of-00064.parquet" for i in range(64)],
    ["train-00000-of-00002-abcdef0123456789.parquet", "train-00001-of-00002-deadbeefdeadbeef.parquet"],
    ["train-0-7f3a11aa-bade-4cab-9def-0123456789ab.parquet", "train-1-7f3a11ab-face-4bad-8dad-abcdefabcdef.parquet"],
    ["train-rank0-0.tar", "train-rank1-0.tar"],
    ["yfcc_train_000.tar", "yfcc_train_001.tar"],
    ["train2017.tar", "val2017.tar"],
    ["train_224.tar", "val_512.tar"],
    ["train/n01440764.tar", "train/n01443537.tar"],
    ["train-0.tar", "val-0.tar", "test_seen.tar", "test_unseen.tar"],  # a test split beside val is left out
]


@pytest.mark.parametrize("names", PARTS)
def test_parts_of_one_split_are_joined_without_a_word(names, caplog):
    assert sum(map(len, SplitRule().divide(names, SOURCE).values())) == len(names)
    assert not caplog.text


@pytest.mark.parametrize(
    "names",
    [
        ["train/cat.tar", "train/dog.tar"],
        ["train-00000-of-00002-a09b74b3ef9c3b56.parquet", "train-00001-of-00002-1234567890123456.parquet"],
        ["train-0.tar", "train-1.tar.gz"],
        ["test_hard.tar", "test.tar", "train.tar", "val.tar"],  # a test split is left out
        ["train_fold0.csv", "val_fold0.csv"],
    ],
)
def test_parts_of_a_split_are_joined(names):
    assert sum(map(len, SplitRule().divide(names, SOURCE).values())) == len(names)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["train=*.tar"], {"train": ["a/0.tar", "a/1.tar", "b/val-0.tar"]}),
        (["train=."], {"train": ["a/0.tar", "a/1.tar", "b/val-0.tar"]}),
        (["train=a"], {"train": ["a/0.tar", "a/1.tar"]}),
        (["train=a/", "val=./b"], {"train": ["a/0.tar", "a/1.tar"], "val": ["b/val-0.tar"]}),
        (["val=a/1.tar", "train=a/0.tar"], {"train": ["a/0.tar"], "val": ["a/1.tar"]}),
        (["val=[01].tar"], {"val": ["a/0.tar", "a/1.tar"]}),
    ],
)
def test_patterns_divide_whatever_names_say(patterns, expected):
    assert SplitRule.parse(patterns).divide(["a/0.tar", "a/1.tar", "b/val-0.tar"], SOURCE) == expected


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["train=a.tar", "val=*.tar"], "split: a.tar in /raw/data is named by 'a.tar' and by '\\*.tar'"),
        (["train=c.tar"], "split: 'c.tar' names nothing in /raw/data; there is a.tar, b.tar"),
        (["train=a.tar", "val=A.tar"], "'A.tar' names nothing"),
    ],
)
def test_patterns_that_do_not_fit(patterns, message):
    with pytest.raises(SettingError, match=message):
        SplitRule.parse(patterns).divide(["a.tar", "b.tar"], SOURCE)


@pytest.mark.parametrize("text", ["train", "test=x", "Train=x", "=x", "train=", "", 3, "training=x"])
def test_what_is_no_pattern(text):
    with pytest.raises(SettingError, match=r"split: .* is not train=PATTERN or val=PATTERN"):
        SplitRule.parse([text])


@pytest.mark.parametrize(
    "name", ["val", "Validation", "imagenet-val", "2021_valid", "test", "val2017", "dev", "my-eval-set"]
)
def test_a_source_that_is_called_as_a_split_needs_to_be_told(name):
    with pytest.raises(AmbiguousSplitError, match=f"is called {name}, and nothing in it .* --split val=. if"):
        SplitRule().check_own_name(Path("/raw") / name)
    for inside in ("labels.csv", "0.tar", "images", "shards/0.tar"):
        with pytest.raises(AmbiguousSplitError, match=f"lies in {name}, and nothing in it .* --split val=. if"):
            SplitRule().check_own_name(Path("/raw") / name / inside)


@pytest.mark.parametrize(
    "name", ["train", "imagenet", "imagenet-train", "my-test", "test_of_val0", "contest", "valley", "val/imagenet.v1"]
)
def test_other_sources_are_training_images(name):
    SplitRule().check_own_name(Path("/raw") / name)
