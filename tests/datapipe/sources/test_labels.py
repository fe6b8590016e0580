"""Classes from labels as they are written."""

from pathlib import Path

import pytest

from datapipe.errors import SourceError
from datapipe.sources.labels import number_labels

SOURCE = Path("/raw/data")


@pytest.mark.parametrize(
    ("labels", "how", "classes", "numbers"),
    [
        (["2", "0", "1"], "auto", ["0", "1", "2"], [2, 0, 1]),
        (["2.0", "0.", "1", "1.0"], "auto", ["0", "1", "2"], [2, 0, 1, 1]),  # pandas, once a NaN was there
        ([f"{i}.0" for i in range(12)], "auto", [str(i) for i in range(12)], [*range(12)]),  # not in the text's order
        ([str(i) for i in range(1, 27)], "auto", [str(i) for i in range(27)], [*range(1, 27)]),  # EMNIST's letters
        (["01", "02.0", "00"], "auto", ["0", "1", "2"], [1, 2, 0]),
        (["1", "01", "2"], "numbers", ["0", "1", "2"], [1, 1, 2]),
        (["1", "01", "2", "1.0"], "names", ["01", "1", "2"], [1, 0, 2, 1]),
        (["None", "mild"], "names", ["None", "mild"], [0, 1]),
        (["3"], "numbers", ["0", "1", "2", "3"], [3]),
        (["1", "3"], "auto", ["0", "1", "2", "3"], [1, 3]),  # half of them
        (["bee", "ant", "bee"], "auto", ["ant", "bee"], [1, 0, 1]),
        (["Bee", "bee"], "auto", ["Bee", "bee"], [0, 1]),
        (["-1", "40", "7.0", "7"], "names", ["-1", "7", "40"], [0, 2, 1, 1]),
        (["10", "9", "x", "9.0"], "names", ["10", "9", "x"], [0, 1, 2, 1]),
        (["nan", "0.5", "x"], "names", ["0.5", "nan", "x"], [1, 0, 2]),
        (["none", "inf", "True", "3d", "1st"], "auto", ["1st", "3d", "True", "inf", "none"], [4, 3, 2, 1, 0]),
        (["9" * 5000], "auto", ["9" * 5000], [0]),  # no number that Python reads
        ([], "auto", [], []),
    ],
)
def test_labels_become_classes(labels, how, classes, numbers):
    found, of_split = number_labels(SOURCE, {"train": labels}, how)
    assert found == classes and of_split["train"].tolist() == numbers and of_split["train"].dtype == "uint32"


def test_labels_that_differ_in_case_alone_are_told(caplog):
    classes, _ = number_labels(SOURCE, {"train": ["True", "no"], "val": ["TRUE", "no"]})
    assert classes == ["TRUE", "True", "no"]
    assert caplog.messages == ["/raw/data: classes whose names differ in case alone stay apart: TRUE and True"]


def test_splits_have_the_same_classes():
    classes, of_split = number_labels(SOURCE, {"train": [f"{i}.0" for i in range(12)], "val": ["3", "11"]})
    assert len(classes) == 12 and of_split["val"].tolist() == [3, 11]


@pytest.mark.parametrize(
    ("labels", "how", "message"),
    [
        (["0", "1", "unknown"], "auto", r"that are numbers \(0, 1\) with names \(unknown\): .* --labels names"),
        ([*map(str, range(11)), "?"], "auto", r"numbers \(0, 1, 2, …\) with names \(\?\)"),
        (["0", "nan"], "auto", "neither whole numbers nor names: nan"),
        (["cat", "NaN"], "auto", "neither whole numbers nor names: NaN"),
        (["cat", "N/A", "null"], "auto", "neither whole numbers nor names: N/A, null"),
        (["mild", "None"], "auto", "neither whole numbers nor names: None: mend it, or .* --labels names"),
        (["1", "01", "2"], "auto", "01 and 1: --labels numbers takes both as 1, --labels names keeps them apart"),
        (["0.5", "1.5"], "auto", "neither whole numbers nor names: 0.5, 1.5"),
        (["1e3"], "auto", "neither whole numbers nor names: 1e3"),
        (["cat", "1"], "numbers", "labels that are not whole numbers: cat"),
        (["1.5", "1"], "numbers", "labels that are not whole numbers: 1.5"),
        (["-1", "0"], "auto", "holds the label -1; allowed: 0 to 999999, or with --labels names any"),
        (["-1"], "numbers", "holds the label -1"),
        (["1000000"], "auto", "holds the label 1000000"),
        (["1", "9"], "auto", "only 2 numbers of those from 0 to 9 .* --labels names .* 8 classes .* --labels num"),
        (["5"], "auto", "only 1 number of those from 0 to 5"),
        (["281", "282", "999"], "auto", "997 classes without images"),
        (["caf\u00e9", "cafe\u0301"], "auto", "two labels that look the same .*'caf.xe9'"),
    ],
)  # fmt: skip
def test_labels_that_can_be_read_in_two_ways_are_refused(labels, how, message):
    with pytest.raises(SourceError, match=f"^/raw/data: .*{message}"):
        number_labels(SOURCE, {"train": labels}, how)
