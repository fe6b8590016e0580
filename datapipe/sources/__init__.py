"""Raw data sets: one file each, and one line in `datapipe/names.py`.

A source module has

    detect(path)               Return the kind of data set at a path, or None, from names alone.
    load(path, kind, listing)  List a data set: return a Source. `listing`: what the user says, and what is left out.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from ..checks import did_you_mean
from ..console import format_count, format_some
from ..errors import DatapipeError, SettingError, SourceError, WrongPathError
from ..images import Buffer
from ..names import KINDS
from ..splits import SplitRule
from .file_names import advise
from .large_files import advise_kind
from .listing import Listing
from .roots import LOOKED_AT, class_folder, folders_below
from .samples import Pixels

logger = logging.getLogger(__name__)

MODULES = tuple(dict.fromkeys(KINDS.values()))  # in the order in which `auto` asks them
# The classes of samples, module and name, by what saved plans call them: nothing is imported by a name from a file.
SAMPLES = {
    "files": ("samples", "Files"),
    "slices": ("samples", "ArchiveMembers"),
    "rows": ("parquet", "ParquetRows"),
    "pixels": ("samples", "Pixels"),
    "packed": ("packed", "PackedSamples"),
}
_NAMED = 5  # classes that a message names
_MAX_DEPTH = 3  # of folders in which a data set of another kind is looked for


class Samples(Protocol):
    """The samples of one split: a dataclass with fields of `str`, `list[str]`, arrays and None (see `packing.state`).

    Many threads read at the same time.
    """

    @property
    def names(self) -> Sequence[str]:
        """The path of each sample in the source, without extension: what keys are made of."""

    @property
    def labels(self) -> np.ndarray:
        """uint32[N], the class of each sample."""

    @property
    def blocks(self) -> np.ndarray | None:
        """int64[N], the block of each sample, which is read as a whole; None: each sample is read by itself."""

    def __len__(self) -> int: ...

    def where(self, i: int) -> str:
        """Say where sample `i` is, for messages."""

    def size_bytes(self, i: int) -> int:
        """Return the size of the encoded image; may ask the filesystem."""

    def read(self, i: int, buffer: memoryview) -> Buffer:
        """Read the encoded image into the beginning of `buffer` if it fits there, else into memory of its own.

        Raises OSError, and ValueError when what is there must not be read (a path that leaves the source, say).
        """

    def close(self) -> None:
        """Release open files. Reading opens them again."""


@dataclass(frozen=True)
class Source:
    """A raw data set, listed.

    `ordered`: it is packed already, so its order is kept, and the samples' names are their keys.
    """

    kind: str
    classes: list[str]
    splits: Mapping[str, Samples]
    ordered: bool = False


def open_source(
    path: Path,
    kind: str = "auto",
    outside: bool = False,
    splits: Sequence[str] = (),
    labels: str = "auto",
    label_column: str | None = None,
    path_column: str | None = None,
    strict: bool = False,
    left_out: Path | None = None,
) -> Source:
    """Return the samples of a raw data set by split, and its classes.

    Args:
        path: A folder or a file.
        kind: Kind of the source, one of `names.KINDS`, or "auto" to look.
        outside: Whether to follow links and paths that lead out of `path`; else they are refused.
        splits: Splits and patterns of what belongs to them, such as "val=holdout-*.tar"; none: see `splits`.
        labels: Meaning of the labels in tables and archives, one of `names.LABELS` (see `labels.number_labels`).
        label_column: The column of a table's labels; None: as it is usually called.
        path_column: The column of a CSV table's paths; None: as it is usually called.
        strict: Whether to refuse to leave anything out.
        left_out: A file to list what is left out in, as lines of JSON; None: the log alone names some of it.

    Raises:
        SourceError: There is nothing of this kind, it cannot be read, or can be read in two ways.
        SettingError: The kind does not exist, or `splits` do not fit what is there.
    """
    path = Path(path).absolute()  # a saved plan may be read from another working directory
    if kind != "auto" and kind not in KINDS:
        raise SettingError(f"kind: {kind!r} is not one of auto, {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    if not path.exists():
        raise WrongPathError("does not exist", path=path)
    is_found = kind == "auto"
    kind, module = _detect(path) if is_found else (kind, _module(KINDS[kind]))
    listing = Listing(outside, SplitRule.parse(splits).below(path), labels, label_column, path_column)
    listing.check_columns(kind, path)
    try:
        source = module.load(path, kind, listing)
    except (DatapipeError, SettingError) as error:
        if is_found and kind != "imagefolder" and (folder := class_folder(path)):
            error.add_note(f"it was taken for {kind}: if {folder} is a class or a split, type --kind imagefolder")
        raise
    if left_out is not None:
        listing.left_out.write(path, left_out)
    _check_images(path, source, listing, is_found)
    _check_names(path, source)
    _check_classes(path, source)
    listing.report(path, strict)
    return source


def _detect(path: Path) -> tuple[str, ModuleType]:
    """Find the kind of a data set, and its module."""
    return next((kind, module) for module in map(_module, MODULES) if (kind := module.detect(path)))


def _check_images(path: Path, source: Source, listing: Listing, is_found: bool) -> None:
    """Raise SourceError for a split without images."""
    if empty := next((name for name, samples in source.splits.items() if not len(samples)), None):
        more = f"; left out: {'; '.join(lines)}" if (lines := listing.left_out.lines(path)) else ""
        others = chain.from_iterable(listing.left_out.paths(path).values())
        advice = (advise_kind(path) + _advise_below(path) if is_found else "") or advise(others)
        raise SourceError(f"split {empty} holds no images{more}{advice}", path=path)


def _advise_below(path: Path) -> str:
    """Say which folder below one without images holds a data set of another kind, such as MNIST/raw; "": none."""
    folders = [path]
    places: list[str] = []
    for _ in range(_MAX_DEPTH):
        folders = [inner for folder in folders for inner in folders_below(folder)][:LOOKED_AT]
        for folder in folders:
            with suppress(OSError, DatapipeError):  # one that cannot be read is not advised
                kind, _ = _detect(folder)
                if kind != "imagefolder":
                    places.append(f"{kind} lies in {folder}")
        if places:
            break
    if len(places) > 1:
        return f"; data sets of several kinds or places: {', '.join(places[:_NAMED])}: give one of them"
    return f"; a data set of the kind {places[0]}: give that" if places else ""


def _check_names(path: Path, source: Source) -> None:
    """Raise SourceError for names that this process reads otherwise than one whose file names are UTF-8."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return
    names = chain(source.classes, *(samples.names for samples in source.splits.values()))
    if other := next((name for name in names if not name.isascii()), None):
        raise SourceError(
            f"has names that are not ASCII, such as {other!a}, and the locale says that names of files are {encoding}: "
            "keys and classes would not be those of other machines; set PYTHONUTF8=1 (type it before the command)",
            path=path,
        )


def _check_classes(path: Path, source: Source) -> None:
    """Warn of classes without images. Raises SourceError for classes that val has and train lacks."""
    present = {split: np.unique(samples.labels) for split, samples in source.splits.items()}
    for split, labels in present.items():
        if empty := sorted(set(range(len(source.classes))) - set(labels.tolist())):
            logger.warning(
                "%s: %s of %s %s no images in %s%s: %s",
                path, format_count(len(empty), "class", "classes"), f"{len(source.classes):,}",
                "has" if len(empty) == 1 else "have", split,
                ", which is most of them" if 2 * len(empty) > len(source.classes) else "", _named(source, empty),
            )  # fmt: skip
    lacking = np.setdiff1d(present["val"], present["train"]).tolist() if len(present) > 1 else []
    if lacking:
        has = "has" if len(lacking) == 1 else "have"
        raise SourceError(
            f"{format_count(len(lacking), 'class', 'classes')} of val {has} no images in train: "
            f"{_named(source, lacking)}; are both of the same data set?",
            path=path,
        )


def _named(source: Source, labels: list[int]) -> str:
    return format_some([source.classes[label] for label in labels], _NAMED)


def place_in_source(samples: Samples, where: str) -> str:
    """Return what a sample's `where` says without the folders above the split's data, which differ between machines."""
    files = [samples.origin] if isinstance(samples, Pixels) else getattr(samples, "files", [])
    root = getattr(samples, "root", None) or os.path.commonpath([os.path.dirname(file) for file in files] or ["/"])
    return where.removeprefix(root.rstrip("/") + "/")


def samples_class(name: str) -> type:
    """Return the class of samples that saved plans call `name`. Raises ValueError when there is none."""
    if name not in SAMPLES:
        raise ValueError(f"{name!r} is not a kind of samples")
    module, kind = SAMPLES[name]
    return getattr(_module(module), kind)


def samples_name(samples: Samples) -> str:
    """Return what saved plans call the class of `samples`."""
    kind = type(samples)
    module = kind.__module__.removeprefix(__name__).lstrip(".")
    return next(name for name, place in SAMPLES.items() if place == (module, kind.__name__))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __name__)
