"""Find the files of a data set of few large files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..dataset.manifest import MANIFEST
from ..errors import SourceError
from ..split_names import list_some, split_words
from .file_names import EXTENSIONS, is_hidden, is_image
from .listing import Listing, folders_in, is_folder

_PARTITION = re.compile(r"[^=]+=.*")  # a folder as Hive and Spark name it
_LOOKED_AT = 8  # entries of a folder, to see what it holds
_FOLDERS = 3  # looked at, so that an ImageFolder is not listed twice


def has_large_files(path: Path, suffixes: tuple[str, ...], below: Sequence[str] = ()) -> bool:
    """Return whether a path is a data set of few large files.

    If folders lie beside the files it is not: then it is an ImageFolder, whose archive was left there.

    Args:
        path: A file or folder.
        suffixes: Ends of the files' names, in lower case.
        below: Names of folders in `path` that may hold the files.
    """
    if not path.is_dir():
        return path.name.lower().endswith(suffixes)
    if _lie_deeper(path, suffixes):
        return True
    folders = _folders_of_splits(path)
    return any(_files_in(path, name, suffixes, alone=True) for name in ("", *below, *folders))


def large_files(
    path: Path, listing: Listing, suffixes: tuple[str, ...], below: Sequence[str] = ()
) -> tuple[Path, list[str]]:
    """Find the files of a data set of few large files: return a folder, and their paths below it, sorted.

    They are `path` itself, or lie in it, in a folder `below`, or in folders beside each other of which one is named as
    a split.

    Args:
        path: A file or folder.
        listing: Listing to which what lies beside them is added as left out.
        suffixes: Ends of the files' names, in lower case.
        below: Names of folders in `path` that may hold the files.

    Raises:
        SourceError: None lie there, and some in a folder below, which must be given.
    """
    if not path.is_dir():
        return path.parent, [path.name] if path.name.lower().endswith(suffixes) else []
    folders = [*below, *_folders_of_splits(path)]
    if len(folders) > len(below):  # then those beside them may be splits, too
        folders = sorted(entry.name for entry in os.scandir(path) if not is_hidden(entry.name))
    names = [name for folder in ("", *folders) for name in _files_in(path, folder, suffixes)]
    if not names:
        _check_below(path, suffixes)
    _count_others(path, names, suffixes, listing)
    return path, names


def advise_kind(path: Path) -> str:
    """Say how to take files for a data set although folders lie beside them; "" if there are none."""
    for kind, suffix in (("webdataset", ".tar"), ("parquet", ".parquet")):
        if files := _files_in(path, "", (suffix,)):
            return f"; if {files[0]} is part of the data set, type --kind {kind}"
    return ""


def _check_below(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise SourceError if folders that are not called as splits hold files, and say which folder to give.

    Such are a configuration of Hugging Face's, `plain_text/train/0000.parquet`, and partitions, `label=0/a.parquet`.
    """
    places = {name: place for name in folders_in(path) if (place := _place(path / name, suffixes)) is not None}
    inner = list(places)
    parts = [part for name, place in places.items() for part in (name, *place.split("/"))]
    if partition := next(filter(_PARTITION.fullmatch, parts), None):
        column = partition.partition("=")[0]
        what = f"its files lie in partitions such as {partition}, so that their rows lack {column}"
        advice = f"write {column} into the files, as a column"
    elif any(map(split_words, inner)):
        what = f"its {suffixes[0]} files lie in {inner[0]}/{places[inner[0]]}"
        advice = f"move them into {path / inner[0]}, and those of the other folders likewise"
    elif len(inner) > 1:
        what = f"{list_some(inner)} hold a data set each"
        advice = f"give one of them, such as {path / inner[0]}"
    elif inner:
        what, advice = f"its {suffixes[0]} files lie in {inner[0]}", f"give {path / inner[0]}"
    else:
        return
    raise SourceError(f"{what}: {advice}", path=path)


def _lie_deeper(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether all folders in a folder that holds no such files itself, as far as is looked at, hold some."""
    if any(name.lower().endswith((*suffixes, *EXTENSIONS)) for name in os.listdir(path)):
        return False
    folders = folders_in(path)[:_FOLDERS]
    return bool(folders) and all(_place(path / name, suffixes) is not None for name in folders)


def _place(folder: Path, suffixes: tuple[str, ...], deeper: bool = True) -> str | None:
    """Find where such files lie, by the first entries of a folder, and of those in it.

    Returns the path below the folder, "" for itself; None if there are none, or images.
    """
    with os.scandir(folder) as scanned:
        entries = [entry for entry, _ in zip(scanned, range(_LOOKED_AT), strict=False)]
    names = [entry.name for entry in entries]
    if any(map(is_image, names)) or MANIFEST in names:
        return None
    if any(name.lower().endswith(suffixes) for name in names):
        return ""
    inner = sorted(entry.name for entry in entries if deeper and not is_hidden(entry.name) and is_folder(entry))
    return next((name for name in inner if _place(folder / name, suffixes, False) is not None), None)


def _folders_of_splits(path: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if split_words(entry.name) and is_folder(entry))


def _files_in(path: Path, folder: str, suffixes: tuple[str, ...], alone: bool = False) -> list[str]:
    """List the files in `path / folder`, by their paths below `path`; `alone`: none if folders lie beside them."""
    try:
        entries = [entry for entry in os.scandir(path / folder) if not is_hidden(entry.name)]
    except (NotADirectoryError, FileNotFoundError):
        return []
    files = sorted(entry.name for entry in entries if entry.name.lower().endswith(suffixes))
    others = (entry for entry in entries if not entry.name.lower().endswith((*suffixes, *EXTENSIONS)))
    if any(entry.name == MANIFEST for entry in entries):  # a packed data set
        return []
    if files and alone and any(map(is_folder, others)):
        return []
    return [os.path.join(folder, name) for name in files]


def _count_others(path: Path, names: Sequence[str], suffixes: tuple[str, ...], listing: Listing) -> None:
    """Count what lies beside the files, in the same folders."""
    places = {"", *map(os.path.dirname, names)}
    for folder in sorted(places):
        known = {os.path.basename(name) for name in (*names, *places) if name and os.path.dirname(name) == folder}
        listing.left_out.add_entries(path / folder, f"beside the {suffixes[0]} files", known)
