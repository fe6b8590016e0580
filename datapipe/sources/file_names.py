"""What files of a source are, by their names: images, archives, tables, or the work of a system."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..console import format_count, printable

EXTENSIONS = (".jpg", ".jpeg", ".png")
# Of archives and tables, which may hold samples.
ARCHIVES = (".tar", ".zip", ".7z", ".rar", ".gz", ".xz", ".bz2", ".zst", ".lz4", ".tgz", ".txz", ".tbz", ".tbz2",
            ".tzst")  # fmt: skip
_TABLES = (".csv", ".parquet", ".arrow", ".tfrecord", ".h5", ".hdf5", ".npz")
# What to do about them, and about images that are not read, where images are looked for.
_CONVERT = (
    "python -c \"import pathlib, PIL.Image; [PIL.Image.open(path).save(path.with_suffix('.png')) "
    "for path in pathlib.Path().rglob('*{suffix}')]\""
)
_RENAME = "python -c \"import pathlib; [path.rename(f'{{path}}.jpg') for path in pathlib.Path().rglob('*{suffix}')]\""
_ADVICE = {
    (".jfif", ".jpe", ".jif"):
        f"is called otherwise than JPEG files that are read: to add .jpg to all names, run in the source {_RENAME}",
    (".ppm", ".pgm", ".pbm", ".pnm", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".jp2", ".avif", ".tga"):
        f"is an image that is not read: to write all of them as PNG, with their pixels, run in the source {_CONVERT}",
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
_JUNK = {"__macosx", "network trash folder", "temporary items", "icon\r"}
_JUNK |= {"$recycle.bin", "recycler", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini"}
_JUNK |= {"lost+found", "__pycache__", "@eadir", "@tmp", "#recycle", "#snapshot", "~snapshot"}
_JUNK |= {"@recycle", "@recently-snapshot", "@__thumb", "@sharebin", "_ds_store"}
# Files that say something about a data set: README.roboflow.txt, LICENSE-CC-BY-4.0, train.tar.sha256.
_DOCUMENT = r"\.(md|txt|rst|html?|pdf|docx?|bib|cff|json)"
_ABOUT = re.compile(
    rf"readme([-_ (\[][^.]*)?((\.[\w-]+)*{_DOCUMENT})?"
    r"|(licen[cs]e|copying|notice|citation|changelog|md5sums?|sha[0-9]+sums?|checksums?)"
    rf"([-_. ](agreement|notice|terms|file|cc|by|nc|nd|sa|mit|bsd|apache|a?gpl|[0-9]+))*({_DOCUMENT})?"
    r"|dataset[-_](metadata|infos?)\.json|.+\.(md5|sha[0-9]+)",
    re.IGNORECASE,
)
IMAGENET_TRAIN, CLASS_TAR = "ILSVRC2012_img_train.tar", re.compile(r"(n\d{8})\.tar")  # the second lie in the first
TEXT_TABLES = (".csv", ".tsv")  # tables that are read as text
# Files, and folders of them, that programs write while they receive something, under another name than it will have:
# rsync (.x.tar.Xy12ab), aws (x.tar.6eF3d5Ab), browsers, WinSCP, aria2, lftp, gsutil, azcopy, BitTorrent and so on.
_DATA = "|".join(map(re.escape, sorted({*EXTENSIONS, *ARCHIVES, *_TABLES})))
_PARTIAL = re.compile(
    r"\.~tmp~|\.rsync-(partial|tmp)|\.azdownload-.+|\.goutputstream-.+"
    r"|.+\.(part|parts|partial|crdownload|download|opdownload|filepart|incomplete|aria2|gstmp|!ut|!qb|bc!|te?mp"
    r"|lftp-pget-status)|.+_\.gstmp"
    rf"|.*({_DATA})~",
    re.IGNORECASE,
)
_RANDOM = re.compile(  # rsync's six characters, the eight of aws
    rf"\..*(?i:{_DATA})\.[A-Za-z0-9]{{6}}|\..*\.(?![a-z]+$|[0-9]+$)[A-Za-z0-9]{{6}}"
    rf"|.*(?i:{_DATA})\.(?!part|[a-z]+$|[0-9]+$)[A-Za-z0-9]{{8}}"
)
_SHEETS = (".csv", ".tsv", ".tab", ".xls", ".xlsx", ".jsonl", ".parquet", ".arrow", ".mat")  # may have labels of images
_SUBMISSION = re.compile("submission", re.IGNORECASE)  # in the name of a table that shows how to answer, as on Kaggle


def is_image(name: str) -> bool:
    """Whether a file is named as an image."""
    return name.lower().endswith(EXTENSIONS)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden, or the work of a system."""
    return name.startswith(".") or name.lower() in _JUNK


def is_harmless(name: str) -> bool:
    """Whether a file is passed over without a word: it is hidden, a system's or a README, and can hold no sample.

    >>> is_harmless(".DS_Store"), is_harmless("README.md"), is_harmless(".hidden.jpg"), is_harmless("notes.txt")
    (True, True, False, False)
    """
    is_known = is_hidden(name) or _ABOUT.fullmatch(name) is not None
    return is_known and not name.lower().endswith((*EXTENSIONS, *ARCHIVES, *_TABLES)) and not is_partial(name)


def is_partial(name: str) -> bool:
    """Whether a file or folder is called as what a program writes while it receives a file.

    >>> is_partial(".train.tar.Xy12ab"), is_partial("1.jpg.part"), is_partial(".git.lock"), is_partial("1.jpg")
    (True, True, False, False)
    """
    is_random = _RANDOM.fullmatch(name) is not None and _ABOUT.fullmatch(name) is None
    return is_random or _PARTIAL.fullmatch(name) is not None


def is_submission(name: str) -> bool:
    """Whether a table is a contest's example of an answer, such as `sample_submission.csv`: it has no labels."""
    return _SUBMISSION.search(name) is not None


def may_have_labels(name: str) -> bool:
    """Whether a file may be a table of labels of images beside it."""
    return name.lower().endswith(_SHEETS) and not is_submission(name)


def advise(names: Iterable[str]) -> str:
    """Say what to do about files that may hold images, and are not images; "" if there are none.

    >>> advise(["notes.txt", "archive.zip"])
    '; archive.zip is an archive: unpack it, and give the folder that it becomes'
    """
    names = sorted(names)
    partial = list(filter(is_partial, names))
    texts = [f"; {printable(partial[0])} is of a transfer that has not ended: run that again"] if partial else []
    for suffixes, advice in _ADVICE.items():
        if named := [name for name in names if name.lower().endswith(suffixes) or f"{suffixes[0]}-" in name.lower()]:
            others = f" (and {format_count(len(named) - 1, 'other')} like it)" if len(named) > 1 else ""
            suffix = "." + named[0].rpartition(".")[2]
            texts.append(f"; {printable(named[0])}{others} {advice.format(suffix=suffix)}")
    return "".join(texts)


def is_in_hidden(path: str) -> bool:
    """Whether a path in an archive has a hidden part."""
    return any(is_hidden(part) for part in path.split("/") if part not in (".", ".."))
