"""Find the files of a data set of few large files, and tell their splits apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..dataset.manifest import MANIFEST
from ..splits import split_words
from .listing import EXTENSIONS, Listing, is_folder, is_hidden


def has_large_files(path: Path, suffixes: tuple[str, ...], below: Sequence[str] = ()) -> bool:
    """Return whether a path is a data set of few large files.

    If folders lie beside the files it is not: then it is an ImageFolder, whose archive was left there.

    Args:
        path: A file or folder.
        suffixes: As for `large_files`.
        below: As for `large_files`.
    """
    if not path.is_dir():
        return path.name.lower().endswith(suffixes)
    folders = _folders_of_splits(path)
    return any(_files_in(path, name, suffixes, alone=True) for name in ("", *below, *folders))


def large_files(
    path: Path, listing: Listing, suffixes: tuple[str, ...], below: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Find the files of a data set of few large files.

    They are `path` itself, or lie in it, in a folder `below`, or in folders beside each other of which one is named as
    a split. Names of files and folders say which split they belong to.

    Args:
        path: A file or folder.
        listing: How to tell splits apart.
        suffixes: What the files' names end in, lower case.
        below: Names of folders in `path` that may hold the files.

    Returns:
        The sorted paths by split, "train" and "val"; {} if there are none.

    Raises:
        SourceError: What belongs to which split can be read in two ways.
    """
    if not path.is_dir():
        if not path.name.lower().endswith(suffixes):
            return {}
        root, names = path.parent, [path.name]
        divided = listing.divide(names, root / path.name)
    else:
        root, folders = path, [*below, *_folders_of_splits(path)]
        if len(folders) > len(below):  # then those beside them may be splits, too
            folders = sorted(entry.name for entry in os.scandir(path) if not is_hidden(entry.name))
        names = [name for folder in ("", *folders) for name in _files_in(path, folder, suffixes)]
        _count_others(path, names, suffixes, listing)
        divided = listing.divide(names, path)
    return {split: [str(root / name) for name in of_split] for split, of_split in divided.items()}


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
