"""What files of a source are, by their names: images, archives, tables, or the work of a system."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..console import format_count, printable

EXTENSIONS = (".jpg", ".jpeg", ".png")
# Of archives and tables, which may hold samples.
ARCHIVES = (".tar", ".zip", ".7z", ".rar", ".gz", ".xz", ".bz2", ".zst", ".lz4", ".tgz", ".txz", ".tbz", ".tbz2",
            ".tzst")  # fmt: skip
TABLES = (".csv", ".parquet", ".arrow", ".tfrecord", ".h5", ".hdf5", ".npz")
# What to do about them where images are looked for.
ADVICE = {
    ARCHIVES[1:]: "is an archive: unpack it, and give the folder that it becomes",
    (".tar",): "is an archive: give it itself if it is a shard of WebDataset, or else unpack it",
    (".parquet", ".csv", ".tsv"): "is a table: give it or its folder if it is one of images",
    (".jsonl", ".xlsx"): "is not read: write a .csv of paths and labels, if it is a table of images",
    (".tfrecord", ".tfrecords", ".arrow", ".h5", ".hdf5", ".lmdb", ".mdb", ".npz", ".npy", ".mat", ".pkl", ".pt",
     ".pth", ".bin", ".beton", ".mds", ".rec", ".sqsh", ".sqfs", ".squashfs", ".iso"):
        "is not read: write its images as files, or into Parquet or WebDataset's tars",
}  # fmt: skip
# What systems leave beside images without asking, in lower case: those of macOS, Windows, Linux, Synology, QNAP. All
# that begins with a dot is hidden, too.
JUNK = {"__macosx", "network trash folder", "temporary items", "icon\r"}
JUNK |= {"$recycle.bin", "recycler", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini"}
JUNK |= {"lost+found", "__pycache__", "@eadir", "@tmp", "#recycle", "#snapshot", "~snapshot"}
JUNK |= {"@recycle", "@recently-snapshot", "@__thumb", "@sharebin"}
# Files that say something about a data set.
ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|md5sums?|sha[0-9]+sums?|checksums?)"
    r"(\.(md|txt|rst|html?|pdf|bib|cff))?",
    re.IGNORECASE,
)
TEXT_TABLES = (".csv", ".tsv")  # tables that are read as text
SHEETS = (".csv", ".tsv", ".tab", ".xls", ".xlsx", ".jsonl", ".parquet", ".arrow", ".mat")  # may have labels of images
SUBMISSION = re.compile("submission", re.IGNORECASE)  # in the name of a table that shows how to answer, as on Kaggle


def is_image(name: str) -> bool:
    """Whether a file is named as an image."""
    return name.lower().endswith(EXTENSIONS)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden, or the work of a system."""
    return name.startswith(".") or name.lower() in JUNK


def is_harmless(name: str) -> bool:
    """Whether a file is passed over without a word: it is hidden, a system's or a README, and can hold no sample.

    >>> is_harmless(".DS_Store"), is_harmless("README.md"), is_harmless(".hidden.jpg"), is_harmless("notes.txt")
    (True, True, False, False)
    """
    return (is_hidden(name) or ABOUT.fullmatch(name) is not None) and not name.lower().endswith(
        (*EXTENSIONS, *ARCHIVES, *TABLES)
    )


def is_submission(name: str) -> bool:
    """Whether a table is a contest's example of an answer, such as `sample_submission.csv`: it has no labels."""
    return SUBMISSION.search(name) is not None


def may_have_labels(name: str) -> bool:
    """Whether a file may be a table of labels of images beside it."""
    return name.lower().endswith(SHEETS) and not is_submission(name)


def advise(names: Iterable[str]) -> str:
    """Say what to do about files that may hold images, and are not images; "" if there are none.

    >>> advise(["notes.txt", "archive.zip"])
    '; archive.zip is an archive: unpack it, and give the folder that it becomes'
    """
    names = sorted(names)
    texts = []
    for suffixes, advice in ADVICE.items():
        if named := [name for name in names if name.lower().endswith(suffixes) or f"{suffixes[0]}-" in name.lower()]:
            others = f" (and {format_count(len(named) - 1, 'other')} like it)" if len(named) > 1 else ""
            texts.append(f"; {printable(named[0])}{others} {advice}")
    return "".join(texts)


def is_in_hidden(path: str) -> bool:
    """Whether a path in an archive has a hidden part."""
    return any(is_hidden(part) for part in path.split("/") if part not in (".", ".."))
