"""What a packed data set is: `manifest.json`, and where its files lie."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ManifestError, WrongPathError
from ..fsio import atomic_write

MANIFEST = "manifest.json"
INDEX = "index.npy"
KEYS = "keys.txt"
QUARANTINE = "quarantine.jsonl"
# A pack writes below OUT/.pack/new, and moves its splits into place when all are whole (see packing/out_folder.py).
# Splits on their way out of place or into it lie in these folders: for a moment, or until the next pack if this one
# was killed in between.
STATE = ".pack"
MOVED_OUT, MOVING_IN = f"{STATE}/old", ".pack-done/new"
SPLITS = "train", "val"
FORMAT_VERSION: Final = 3
UNSEALED_VERSIONS = (1, 2)  # without a checksum of their own content
SEAL = "xxh3_128"  # the field with that checksum
NO_DIGITS = "0" * 32
MAX_BYTES = 256 << 20  # a million classes with long names take 100 MB; a larger file is not a manifest
MAX_COUNT = 2**63 - 1  # what the index and the filesystem can hold


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileInfo(_Record):
    """A file of the data set: its name in the folder, its size, its xxh3-128 in hexadecimal."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=255)
    size_bytes: int = Field(ge=0, le=MAX_COUNT)
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class ShardInfo(FileInfo):
    """A shard, and how many samples lie in it."""

    num_samples: int = Field(gt=0, le=MAX_COUNT)


class Manifest(_Record):
    """What `manifest.json` says of one data set (one split).

    Sample `i` is row `i` of the index and line `i` of the keys.

    Attributes:
        version: Version of the manifest's format.
        format: Format of the shards.
        kind: Kind of the raw data set that was packed.
        split: Name of the split, "train" or "val".
        num_samples: Number of samples, at least 1.
        classes: Names of the classes, by label.
        channels: The images' channels as they are read: what was asked for, else 1 if all are grey, else 3.
        width: Width of every image, in pixels; None when they differ.
        height: Height of every image, in pixels; None when they differ.
        seed: Seed of the order in which the samples lie in the shards.
        shard_mib: Size of a shard that was asked for, in MiB.
        recode: Changes that were made to the images (those of RecodeOptions that are not at their defaults).
        converted: Number of images by what was unusual about them and no longer is, such as "progressive".
        source_bytes: Size of all images before packing, in bytes; None when it is not known.
        image_bytes: Size of all images as stored, in bytes; None when it is not known.
        num_bad: Number of images left out, which quarantine.jsonl lists.
        shards: Files with the images.
        files: Other files of the data set.
    """

    version: Literal[1, 2, 3] = FORMAT_VERSION
    format: str
    kind: str
    split: Literal["train", "val"]  # `convert` names a folder by it
    num_samples: int = Field(gt=0, le=MAX_COUNT)
    classes: list[str] = Field(min_length=1)
    channels: Literal[1, 3]
    width: int | None = Field(gt=0, le=0xFFFF)
    height: int | None = Field(gt=0, le=0xFFFF)
    seed: int
    shard_mib: int | float = Field(gt=0)
    recode: dict[str, str | int | bool] = {}
    converted: dict[str, int] = {}
    source_bytes: int | None = Field(None, ge=0, le=MAX_COUNT)
    image_bytes: int | None = Field(None, ge=0, le=MAX_COUNT)
    num_bad: int = Field(0, ge=0, le=MAX_COUNT)
    shards: list[ShardInfo]
    files: list[FileInfo]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def index_checksum(self) -> str:
        """Checksum of the index, which tells two data sets apart."""
        (checksum,) = (file.xxh3_128 for file in self.files if file.name == INDEX)
        return checksum

    @property
    def size_bytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(file.size_bytes for file in self.all_files())

    def all_files(self) -> Iterator[FileInfo]:
        """Yield all files of the data set except the manifest."""
        yield from self.shards
        yield from self.files

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        if sum(shard.num_samples for shard in self.shards) != self.num_samples:
            raise ValueError("the shards' samples do not add up")
        if self.format == "npy" and None in (self.width, self.height):
            raise ValueError("npy shards hold images of one size, and it gives no width or no height")
        names = {MANIFEST}
        for file in self.all_files():
            if file.name in names:
                raise ValueError(f"the name {file.name} is given twice, or not allowed")
            names.add(file.name)
        return self

    def write(self, folder: Path) -> None:
        """Write `folder/manifest.json`: the last act of a pack, and what makes a folder a data set."""
        fields = {"version": FORMAT_VERSION, SEAL: NO_DIGITS, **self.model_dump(exclude={"version"})}
        content = json.dumps(fields, indent=1) + "\n"
        digits = _compute_checksum(content.encode(), NO_DIGITS)
        with atomic_write(folder / MANIFEST) as file:
            file.write(content.replace(NO_DIGITS, digits, 1).encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read `folder/manifest.json`.

        Raises ManifestError: it is missing, cannot be read, was changed after it was packed, was written by a newer
        version, or contradicts itself.
        """
        return cls.parse(read_content(folder), Path(folder) / MANIFEST)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Manifest:
        """Make a manifest of a file's content. `path` is for messages. Raises ManifestError like `read`."""
        try:
            fields = json.loads(content.decode())
        except (ValueError, RecursionError) as error:  # RecursionError: lists in lists in lists
            raise ManifestError(f"cannot be read: {error}", path=path) from error
        if not isinstance(fields, dict):
            raise ManifestError("is not a valid manifest: it holds no fields", path=path)
        version, digits = fields.get("version"), fields.pop(SEAL, None)
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ManifestError(
                f"has format version {str(version)[:9]}, this datapipe reads up to {FORMAT_VERSION}: upgrade it",
                path=path,
            )
        _check_seal(content, version, digits, path)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            field = ".".join(map(str, first["loc"]))[:200]
            message = ": ".join(filter(None, ("is not a valid manifest", field, first["msg"])))
            raise ManifestError(message, path=path) from error


def read_content(folder: Path) -> bytes:
    """Read the bytes of `folder/manifest.json`. Raises ManifestError."""
    path = Path(folder) / MANIFEST
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ManifestError(f"has more than {MAX_BYTES:,} bytes: it is not a manifest", path=path)
        return path.read_bytes()
    except FileNotFoundError:
        raise _no_data_set(Path(folder)) from None
    except OSError as error:
        raise ManifestError(f"cannot be read: {error}", path=path) from error


def _compute_checksum(content: bytes, digits: str) -> str:
    """Return the xxh3-128 of a manifest, in hexadecimal; the digits that stand in it for that count as zeros."""
    return xxhash.xxh3_128_hexdigest(content.replace(digits.encode(), NO_DIGITS.encode()))


def _check_seal(content: bytes, version: Any, digits: Any, path: Path) -> None:
    """Raise ManifestError unless `content` is what was written. A flipped bit makes version 2 of 3, too."""
    is_unsealed = type(version) is int and version in UNSEALED_VERSIONS  # True and 1.0 are equal to 1, too
    if is_unsealed and digits is None:
        return
    if is_unsealed or not isinstance(digits, str) or not re.fullmatch("[0-9a-f]{32}", digits):
        problem = f"its version is {version!r}, and its checksum is {digits!r}"
    elif (actual := _compute_checksum(content, digits)) != digits:
        problem = f"its checksum is {actual}, and it says {digits}"
    else:
        return
    advice = "stage it again from a good copy, or pack again"
    raise ManifestError(f"was changed after it was packed, or is damaged: {problem:.200}; {advice}", path=path)


def find_data_sets(folder: Path) -> list[Path]:
    """List the data sets at `folder`: itself, or those of its sub-folders (splits) that have a manifest, by name.

    Raises ManifestError when there is none, or when a sub-folder may not be looked into: it may be a split.
    """
    folder = Path(folder)
    try:
        if _has_manifest(folder):
            return [folder]
        places = folder, folder / MOVED_OUT, folder / MOVING_IN
        splits = [path for place in places for path in _sub_folders(place) if _has_manifest(path)]
        if not splits:
            raise _no_data_set(folder)
    except OSError as error:
        raise ManifestError(f"cannot be looked into: {error.strerror}", path=error.filename or folder) from error
    return sorted(splits, key=lambda path: path.name)


def _no_data_set(folder: Path) -> ManifestError:
    """Make the error for a folder without a manifest: it says what is there instead, and what to do."""
    folders = []
    with contextlib.suppress(OSError):  # it may not be looked into
        folders = sorted(_sub_folders(folder))
    splits = [path.name for path in folders if os.path.exists(path / MANIFEST)]
    data_sets = [path.name for path in folders if any(os.path.exists(path / split / MANIFEST) for split in SPLITS)]
    kind: type[ManifestError] = WrongPathError
    if any(os.path.exists(place / STATE) for place in (folder, folder.parent)):
        kind, why = ManifestError, "the pack is unfinished: run the same command again"
    elif os.path.exists(folder / INDEX):
        kind, why = ManifestError, f"its {MANIFEST} is missing: stage or pack it again"
    elif not os.path.lexists(folder):
        why = "the folder does not exist"
    elif not os.path.isdir(folder):
        why = "it is a file"
    elif splits:
        why = f"the folder holds splits: choose one of {', '.join(splits)}"
    elif data_sets:
        why = f"the folder holds data sets: choose one of {', '.join(data_sets)}"
    else:
        why = "the folder is not packed: datapipe pack makes a data set of images"
    return kind(f"no data set here ({why})", path=folder / MANIFEST if os.path.isdir(folder) else folder)


def _has_manifest(folder: Path) -> bool:
    try:
        os.stat(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _sub_folders(folder: Path) -> list[Path]:
    """List the folders in a folder, except the one that mkfs makes for root alone; none if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_dir() and entry.name != "lost+found"]
    except (FileNotFoundError, NotADirectoryError):
        return []


def compute_digest(content: bytes) -> str:
    """Compute what tells a manifest from others: the beginning of the SHA-256 of its content."""
    return hashlib.sha256(content).hexdigest()[:16]


def compute_identity(manifest: Manifest) -> str:
    """Compute what the versions of a data set have in common: the beginning of the SHA-256 of split and classes."""
    return hashlib.sha256(json.dumps([manifest.split, manifest.classes]).encode()).hexdigest()[:16]
