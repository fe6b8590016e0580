"""What a packed data set is: `manifest.json`, and where its files lie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import ManifestError
from .fsio import atomic_write

MANIFEST = "manifest.json"
INDEX = "index.npy"
KEYS = "keys.txt"
QUARANTINE = "quarantine.jsonl"
FORMAT_VERSION = 2


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileInfo(_Record):
    """A file of the data set: its name in the folder, its size, its xxh3-128 in hexadecimal."""

    name: str = Field(pattern=r"^[^./][^/]*$")
    size_bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class ShardInfo(FileInfo):
    num_samples: int = Field(gt=0)


class Manifest(_Record):
    """One data set: one split, packed.

    Sample `i` is row `i` of the index and line `i` of the keys. `channels` is 1 when every image is
    grey, else 3; `width` and `height` are the images' common size in pixels, or None when they differ.
    `recode` is what was done to the images (the options of that name), `converted` counts those that were of another
    kind, `source_bytes` and `image_bytes` are the images' size before and after; `num_bad` were left out, and are
    listed in quarantine.jsonl.
    """

    version: Literal[1, 2] = FORMAT_VERSION
    format: str
    kind: str
    split: str
    num_samples: int = Field(gt=0)
    classes: list[str]
    channels: Literal[1, 3]
    width: int | None
    height: int | None
    seed: int
    shard_mib: int
    recode: dict[str, str | int | bool] = {}
    converted: dict[str, int] = {}
    source_bytes: int | None = None
    image_bytes: int | None = None
    num_bad: int = 0
    shards: list[ShardInfo]
    files: list[FileInfo]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def size_bytes(self) -> int:
        """All files but the manifest."""
        return sum(file.size_bytes for file in self.all_files())

    def all_files(self) -> Iterator[FileInfo]:
        yield from self.shards
        yield from self.files

    def write(self, folder: Path) -> None:
        """Write `folder/manifest.json`: the last act of a pack, and what makes a folder a data set."""
        with atomic_write(folder / MANIFEST) as file:
            file.write(json.dumps(self.model_dump(), indent=1).encode() + b"\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ManifestError: none there, not readable, or written by a newer version."""
        path = Path(folder) / MANIFEST
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ManifestError("no data set here (an unfinished pack has none)", path=path) from None
        except (OSError, ValueError) as error:
            raise ManifestError(f"cannot be read: {error}", path=path) from error
        version = content.get("version") if isinstance(content, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ManifestError(
                f"has format version {version}, this datapipe reads up to {FORMAT_VERSION}: upgrade it", path=path
            )
        try:
            manifest = cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ManifestError(f"is no valid manifest: {field}: {first['msg']}", path=path) from error
        if sum(shard.num_samples for shard in manifest.shards) != manifest.num_samples:
            raise ManifestError("is no valid manifest: the shards' samples do not add up", path=path)
        return manifest


def find_data_sets(folder: Path) -> list[Path]:
    """The data sets at `folder`: itself, or its sub-folders (splits) that have a manifest, by name.

    Raises ManifestError when there is none.
    """
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        return [folder]
    found = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    if not found:
        raise ManifestError("no data set here (an unfinished pack has none)", path=folder / MANIFEST)
    return found
