"""The labels of ImageNet's val images: of the devkit (from image-net.org), or of Kaggle's table."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import MissingBackendError, SourceError
from .unpacked import members, read_file

DEVKITS = ("ILSVRC2012_devkit_t12", "ILSVRC2012_devkit_t12.tar.gz")
_GROUND_TRUTH, _META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
SOLUTION = "LOC_val_solution.csv"
TRAIN_SOLUTION = "LOC_train_solution.csv"  # beside it; says again what train's folders say
_SOLUTION_ID = re.compile(r"ILSVRC2012_val_(\d{8})")
LABEL_FILES = f"{' or '.join(DEVKITS)} (from image-net.org) or {SOLUTION} (from Kaggle)"
_NUM_CLASSES = 1000
_MAX_DEVKIT_BYTES = 64 << 20  # of the two files that are read, which have 1 MB


class ValLabels(NamedTuple):
    """The labels of the val images, and all classes, as WordNet ids."""

    where: Path
    wnids: dict[int, str]  # by the image's number
    classes: list[str]


def read_labels(root: Path, path: Path, bounds: str | None) -> ValLabels | None:
    """Read the labels of the val images from the devkit, or Kaggle's table; return None if there is neither.

    Args:
        root: The folder that the user gave.
        path: The folder of the images, the same or below it.
        bounds: See `paths`.

    Raises:
        SourceError: They cannot be read, or do not agree.
    """
    places = dict.fromkeys(folder / name for folder in (root, path) for name in (*DEVKITS, SOLUTION))
    readers = [(_read_solution if place.name == SOLUTION else _read_devkit, place) for place in places]
    known = [read(place, bounds) for read, place in readers if place.exists()]
    for other in known[1:]:
        if other.wnids != known[0].wnids:
            raise SourceError(f"has other labels than {known[0].where}: remove one of them", path=other.where)
    return known[0] if known else None


def _read_solution(path: Path, bounds: str | None) -> ValLabels:
    """Read Kaggle's table: the image's name, and in PredictionString its class and a box, once per object."""
    wnids: dict[int, str] = {}
    try:
        text = read_file(str(path), bounds, _MAX_DEVKIT_BYTES).decode("utf-8-sig")
        for row in csv.DictReader(io.StringIO(text, newline=""), strict=True):
            match, words = _SOLUTION_ID.fullmatch(row["ImageId"]), row["PredictionString"].split()
            (wnid,) = set(words[::5])
            if not match or len(words) % 5 or int(match[1]) in wnids:
                raise ValueError
            wnids[int(match[1])] = wnid
    except (ValueError, KeyError, AttributeError, csv.Error) as error:
        where = f"after image {max(wnids)}" if wnids else "in its first row"
        raise SourceError(
            f"is not Kaggle's table of the val images' classes: {where} something else stands than ImageId and "
            "PredictionString", path=path,
        ) from error  # fmt: skip
    return ValLabels(path, wnids, sorted(set(wnids.values())))


def _read_devkit(path: Path, bounds: str | None) -> ValLabels:
    truth, meta = _devkit_files(path, bounds)
    wnids = _wnids(path, meta)
    try:
        labels = {number: wnids[int(line)] for number, line in enumerate(truth.split(), 1)}
    except (ValueError, KeyError) as error:
        raise SourceError(
            f"{_GROUND_TRUTH} has a line that is not the number of a class: {error}", path=path
        ) from error
    return ValLabels(path, labels, sorted(wnids.values()))


def _devkit_files(path: Path, bounds: str | None) -> tuple[bytes, bytes]:
    """Read the labels of the val images, and the classes, from an unpacked devkit or its archive."""
    names = {_GROUND_TRUTH, _META}
    if path.is_dir():
        contents = {name: read_file(str(path / name), bounds, _MAX_DEVKIT_BYTES) for name in names}
    else:
        inside = members(str(path), bounds, names, _MAX_DEVKIT_BYTES)
        contents = {"/".join(name.split("/")[-2:]): data for name, data in inside if data is not None}
    if missing := names - contents.keys():
        raise SourceError(f"lacks {' and '.join(sorted(missing))}", path=path)
    return contents[_GROUND_TRUTH], contents[_META]


def _wnids(path: Path, meta: bytes) -> dict[int, str]:
    """Return the WordNet id of each class by its number in the challenge, without inner nodes (numbers over 1000)."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        message = "the labels of ImageNet's val images need scipy"
        raise MissingBackendError.for_extra(message, "imagenet", path) from error
    try:
        synsets = np.atleast_1d(loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"])
        pairs = [(int(synset["ILSVRC2012_ID"]), str(synset["WNID"])) for synset in synsets]
    except Exception as error:  # scipy raises all sorts for a broken file
        raise SourceError(f"{_META} cannot be read: {error}", path=path) from error
    return {number: wnid for number, wnid in pairs if number <= _NUM_CLASSES}
