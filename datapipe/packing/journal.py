"""The journal of a split: a small file for each finished shard, so that an interrupted pack can continue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..dataset.index import RECORD
from ..dataset.manifest import FileInfo, ShardInfo
from ..errors import ManifestError
from ..foreign import open_regular
from ..fsio import UNREADABLE, atomic_write
from .options import begin_again


@dataclass(frozen=True)
class BadSample:
    """A sample that is left out."""

    number: int  # in the plan's order of the shard
    path: str
    reason: str


@dataclass(frozen=True)
class PackedShard:
    """What a manifest needs to know of a finished shard. `info` is None when all its samples were bad: no file then."""

    number: int  # in the plan of the split
    info: ShardInfo | None
    sidecars: list[FileInfo]
    records: np.ndarray  # RECORD[good samples]
    channels: int
    source_bytes: int  # of the good samples' images before they were re-encoded
    converted: dict[str, int] = field(default_factory=dict)
    bad: list[BadSample] = field(default_factory=list)


class Journal:
    """The finished shards of one split."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, shard: PackedShard) -> None:
        """Record a finished shard, whose files are on disk."""
        head = {
            "info": shard.info and shard.info.model_dump(),
            "sidecars": [sidecar.model_dump() for sidecar in shard.sidecars],
            "channels": shard.channels,
            "source_bytes": shard.source_bytes,
            "converted": shard.converted,
            "bad": [vars(bad) for bad in shard.bad],
        }
        with atomic_write(self._path(shard.number), alone=False) as file:
            np.savez(file, records=shard.records, head=np.frombuffer(json.dumps(head).encode(), np.uint8))

    def read(self, number: int) -> PackedShard | None:
        """Read what is known of a shard; None when it is not finished. Raises ManifestError."""
        path = self._path(number)
        try:
            with open(path, "rb", opener=open_regular) as file, np.load(file, allow_pickle=False) as content:
                head, records = json.loads(content["head"].tobytes()), content["records"]
            if records.dtype != RECORD:
                message = "was written by another version of datapipe: let that one finish the pack"
                raise ManifestError(f"{message}, or {begin_again(self.folder.parent)}", path=path)
            head["info"] = head["info"] and ShardInfo(**head["info"])
            head["sidecars"] = [FileInfo(**sidecar) for sidecar in head["sidecars"]]
            head["bad"] = [BadSample(**bad) for bad in head["bad"]]
            return PackedShard(number=number, records=records, **head)
        except FileNotFoundError:
            return None
        except (*UNREADABLE, TypeError) as error:
            message = f"cannot be read ({error}): {begin_again(self.folder.parent)}"
            raise ManifestError(message, path=path) from error

    def finished(self, numbers: Iterable[int], folder: Path) -> dict[int, int]:
        """Return the finished ones of some shards, whose files are in `folder`, and each one's count of bad samples."""
        shards = ((number, self.read(number)) for number in numbers)
        return {number: len(shard.bad) for number, shard in shards if shard and _is_there(folder, shard)}

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}.npz"


def _is_there(folder: Path, shard: PackedShard) -> bool:
    files = shard.sidecars if shard.info is None else [shard.info, *shard.sidecars]
    try:
        return all((folder / file.name).stat().st_size == file.size_bytes for file in files)
    except FileNotFoundError:
        return False
